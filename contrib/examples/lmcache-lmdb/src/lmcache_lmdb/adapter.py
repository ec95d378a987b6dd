"""The tier: objects as values of an LMDB file, each behind the time of its store."""

from __future__ import annotations

import contextlib
import struct
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, TypeVar

import lmdb

from lmcache_core.errors import TierError
from lmcache_core.tiers.contract import (
    AdapterContext,
    Capabilities,
    L2Adapter,
    LoadItem,
    Outcome,
    Result,
    ScanEntry,
    ScanPage,
    StoreItem,
    Usage,
)
from lmcache_lmdb.environment import Environment, LateError, closed, opened
from lmcache_lmdb.settings import LmdbSettings

Answer = TypeVar("Answer")

_STORED_AT = struct.Struct("<d")
_OBJECT_BYTES_MAX = (1 << 32) - 4096  # LMDB's own limit for a value, less our prefix
_SCAN_PAGE_ENTRIES = 1000
_NO_KEY_OF_OURS = b"\0" * 100  # ours are shorter


class LmdbAdapter(L2Adapter):
    """Values of the file `settings.path`. A batch is one transaction, so it costs one fsync."""

    capabilities: ClassVar[Capabilities] = Capabilities(durable=True, shared=True, object_bytes_max=_OBJECT_BYTES_MAX)

    def __init__(self, settings: LmdbSettings, context: AdapterContext) -> None:
        self._settings = settings
        self._path = settings.path.expanduser().resolve()
        self._tier = context.tier
        self._opening = threading.Lock()
        self._environment: Environment | None = None
        self._closed = False

    # --- what the server calls, from several threads at once --------------------------------------------------
    def store(self, items: Sequence[StoreItem], deadline: float) -> Sequence[Outcome]:
        try:
            return self._written(items, deadline, self._put)
        except lmdb.MapFullError:  # that transaction is lost: store each object by itself, as many as fit
            self._let_pages_go(deadline)
            return [self._store_alone(item, deadline) for item in items]

    def exists(self, keys: Sequence[bytes], deadline: float) -> Sequence[bool]:
        def ask(environment: Environment) -> list[bool]:
            with environment.read() as transaction:
                return [transaction.get(key) is not None for key in keys]

        return self._whole(ask)

    def load(self, items: Sequence[LoadItem], deadline: float) -> Sequence[Outcome]:
        def fetch(environment: Environment) -> list[Outcome]:
            with environment.read() as transaction:
                return [_filled(item, transaction.get(item.key)) for item in items]

        return self._whole(fetch)

    def delete(self, keys: Sequence[bytes], deadline: float) -> Sequence[Outcome]:
        def remove(transaction: Any, key: bytes) -> Outcome:
            transaction.delete(key)
            return Outcome(Result.DONE)

        try:
            return self._written(keys, deadline, remove)
        except lmdb.MapFullError as error:  # a delete copies pages before it frees any
            return [Outcome(Result.FAILED, error=self._words(error), retryable=True)] * len(keys)

    def usage(self) -> Usage:
        """From the pages in use: pages freed by deletes count as free, although the file does not shrink."""

        def ask(environment: Environment) -> Usage:
            told = environment.lmdb.stat()
            pages = told["branch_pages"] + told["leaf_pages"] + told["overflow_pages"]
            used = pages * told["psize"]
            return Usage(used, told["entries"], max(0, environment.lmdb.info()["map_size"] - used))

        return self._whole(ask)

    def scan(self, cursor: str | None, deadline: float) -> ScanPage:
        """In the order of the keys; the cursor is the last key of the page, whether or not it is still there."""
        last = bytes.fromhex(cursor or "")

        def ask(environment: Environment) -> ScanPage:
            entries: list[ScanEntry] = []
            with environment.read() as transaction, transaction.cursor() as found:
                more = found.set_range(last) if last else found.first()
                while more and len(entries) < _SCAN_PAGE_ENTRIES:
                    key, value = bytes(found.key()), found.value()
                    if key != last:
                        stored_at_s = _STORED_AT.unpack_from(value)[0] if len(value) >= _STORED_AT.size else 0.0
                        entries.append(ScanEntry(key, max(0, len(value) - _STORED_AT.size), stored_at_s))
                    more = found.next()
            return ScanPage(entries, entries[-1].key.hex() if more else None)

        return self._whole(ask)

    def medium(self) -> str:
        return f"the LMDB file {self._path}"

    def close(self) -> None:
        with self._opening:
            self._closed = True
            environment, self._environment = self._environment, None
        if environment is not None:
            closed(self._path, environment)

    # --- inside -----------------------------------------------------------------------------------------------
    def _put(self, transaction: Any, item: StoreItem) -> Outcome:
        if item.nbytes > _OBJECT_BYTES_MAX:
            return Outcome(Result.FAILED, error=f"{item.nbytes:,} bytes, and a value holds {_OBJECT_BYTES_MAX:,}")
        transaction.put(item.key, b"".join([_STORED_AT.pack(time.time()), *item.buffers]))
        return Outcome(Result.DONE, item.nbytes)

    def _let_pages_go(self, deadline: float) -> None:
        """Pages that a transaction frees can be used by the one after the next: make one in between."""

        def change_nothing(transaction: Any, key: bytes) -> Outcome:
            transaction.put(key, b"")
            transaction.delete(key)
            return Outcome(Result.DONE)

        with contextlib.suppress(lmdb.MapFullError):  # then there is nothing to be let go of
            self._written([_NO_KEY_OF_OURS], deadline, change_nothing)

    def _store_alone(self, item: StoreItem, deadline: float) -> Outcome:
        try:
            return self._written([item], deadline, self._put)[0]
        except lmdb.MapFullError as error:
            return Outcome(Result.FULL, error=self._words(error))

    def _written(self, items: Sequence[Any], deadline: float, call: Callable[[Any, Any], Outcome]) -> list[Outcome]:
        """All in one transaction: what is answered is committed. Raises `MapFullError`, and nothing is changed."""
        try:
            with self._open().write(deadline) as transaction:
                return [call(transaction, item) for item in items]
        except lmdb.MapFullError:
            raise
        except (LateError, lmdb.Error, OSError) as error:
            late = isinstance(error, LateError)
            return [Outcome(Result.FAILED, error=self._words(error), retryable=late)] * len(items)

    def _whole(self, call: Callable[[Environment], Answer]) -> Answer:
        try:
            return call(self._open())
        except (lmdb.Error, OSError) as error:
            raise TierError(self._words(error), retryable=False) from error

    def _open(self) -> Environment:
        with self._opening:
            if self._closed:
                raise TierError(f"tier {self._tier!r} is closed", retryable=False)
            if self._environment is None:
                self._environment = opened(self._path, self._settings.map_bytes, self._settings.sync)
            return self._environment

    def _words(self, error: Exception) -> str:
        return f"tier {self._tier!r}: {self._path}: {error}"


def _filled(item: LoadItem, value: memoryview | None) -> Outcome:
    if value is None:
        return Outcome(Result.MISS)
    if len(value) < _STORED_AT.size:
        return Outcome(Result.DAMAGED, error=f"{len(value)} bytes are no object")
    content = value[_STORED_AT.size :]
    room = sum(buffer.nbytes for buffer in item.buffers)
    if content.nbytes > room:
        return Outcome(Result.DAMAGED, error=f"it has {content.nbytes:,} bytes, and {room:,} were expected")
    at = 0
    for buffer in item.buffers:
        part = content[at : at + buffer.nbytes]
        buffer[: part.nbytes] = part
        at += part.nbytes
    return Outcome(Result.DONE, content.nbytes)
