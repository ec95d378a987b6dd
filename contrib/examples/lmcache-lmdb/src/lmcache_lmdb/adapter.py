"""The tier: objects as values of an LMDB file, each behind the time of its store."""

from __future__ import annotations

import contextlib
import struct
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import lmdb

from lmcache_core.errors import TierError
from lmcache_core.tiers.blocking import BatchAdapter, filled
from lmcache_core.tiers.contract import (
    AdapterContext,
    Capabilities,
    LoadItem,
    Outcome,
    Result,
    ScanEntry,
    StoreItem,
    Usage,
)
from lmcache_lmdb.environment import Environment, closed, opened
from lmcache_lmdb.settings import LmdbSettings

_STORED_AT = struct.Struct("<d")
_OBJECT_BYTES_MAX = (1 << 32) - 4096  # LMDB's own limit for a value, less our prefix
_NO_KEY_OF_OURS = b"\0" * 100  # ours are shorter


class LmdbAdapter(BatchAdapter):
    """Values of the file `settings.path`. A batch is one transaction, so it costs one fsync."""

    capabilities: ClassVar[Capabilities] = Capabilities(durable=True, shared=True, object_bytes_max=_OBJECT_BYTES_MAX)
    errors = (lmdb.Error, OSError)
    cure = "make the folder of l2.NAME.path one that we may write to, with room for the file"

    def __init__(self, settings: LmdbSettings, context: AdapterContext) -> None:
        super().__init__(context)
        self._settings = settings
        self._path = settings.path.expanduser().resolve()
        self._opening = threading.Lock()
        self._environment: Environment | None = None

    # --- what the server calls, from several threads at once --------------------------------------------------
    def store(self, items: Sequence[StoreItem], deadline: float) -> Sequence[Outcome]:
        def put() -> list[Outcome]:
            try:
                return self._written(items, deadline, self._put)
            except lmdb.MapFullError:  # that transaction is lost: store each object by itself, as many as fit
                self._let_pages_go(deadline)
                return [self._store_alone(item, deadline) for item in items]

        return self.together("store", len(items), put)

    def exists(self, keys: Sequence[bytes], deadline: float) -> Sequence[bool]:
        def ask() -> list[bool]:
            with self._open().read() as transaction:
                return [transaction.get(key) is not None for key in keys]

        return self.whole("look up", ask)

    def load(self, items: Sequence[LoadItem], deadline: float) -> Sequence[Outcome]:
        def fetch() -> list[Outcome]:
            with self._open().read() as transaction:
                return [_filled(item, transaction.get(item.key)) for item in items]

        return self.whole("load", fetch)

    def delete(self, keys: Sequence[bytes], deadline: float) -> Sequence[Outcome]:
        def remove(transaction: Any, key: bytes) -> Outcome:
            transaction.delete(key)
            return Outcome(Result.DONE)

        return self.together("delete", len(keys), lambda: self._written(keys, deadline, remove))

    def usage(self) -> Usage:
        """From the pages in use: pages freed by deletes count as free, although the file does not shrink."""

        def ask() -> Usage:
            environment = self._open()
            stat = environment.lmdb.stat()
            pages = stat["branch_pages"] + stat["leaf_pages"] + stat["overflow_pages"]
            used = pages * stat["psize"]
            return Usage(used, stat["entries"], max(0, environment.lmdb.info()["map_size"] - used))

        return self.whole("tell its usage", ask)

    def entries_after(self, key: bytes, count: int, deadline: float) -> Sequence[ScanEntry]:
        entries: list[ScanEntry] = []
        with self._open().read() as transaction, transaction.cursor() as found:
            more = found.set_range(key) if key else found.first()
            while more and len(entries) < count:
                here, value = bytes(found.key()), found.value()
                if here != key:
                    stored_at_s = _STORED_AT.unpack_from(value)[0] if len(value) >= _STORED_AT.size else 0.0
                    entries.append(ScanEntry(here, max(0, len(value) - _STORED_AT.size), stored_at_s))
                more = found.next()
        return entries

    def medium(self) -> str:
        return f"the LMDB file {self._path}"

    def close(self) -> None:
        with self._opening:
            super().close()
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
        return self.together("store", 1, lambda: self._written([item], deadline, self._put))[0]

    def _written(self, items: Sequence[Any], deadline: float, call: Callable[[Any, Any], Outcome]) -> list[Outcome]:
        """All in one transaction: what is answered is committed."""
        with self._open().write(deadline) as transaction:
            return [call(transaction, item) for item in items]

    def refused(self, what: str, error: Exception) -> Outcome:
        failure = TierError(
            f"tier {self._tier!r} cannot {what}: {self._path}: {error}", cure=self.cure, retryable=False
        )
        if isinstance(error, lmdb.MapFullError):  # a delete copies pages before it frees any
            full = what == "store"
            return Outcome(Result.FULL if full else Result.FAILED, error=failure.happened, retryable=not full)
        late = isinstance(error, TimeoutError)
        return Outcome.of(failure)._replace(retryable=late)

    def _open(self) -> Environment:
        with self._opening:
            self.check_open()
            if self._environment is None:
                self._environment = opened(self._path, self._settings.map_bytes, self._settings.sync)
            return self._environment


def _filled(item: LoadItem, value: memoryview | None) -> Outcome:
    if value is None:
        return Outcome(Result.MISS)
    if len(value) < _STORED_AT.size:
        return Outcome(Result.DAMAGED, error=f"{len(value)} bytes are no object")
    return filled(item, value[_STORED_AT.size :])
