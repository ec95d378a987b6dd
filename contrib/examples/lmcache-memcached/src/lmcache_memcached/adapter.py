"""The tier: objects as values of a memcached, which evicts by itself and lists nothing."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import ClassVar, TypeVar

from lmcache_core.errors import TierError
from lmcache_core.tiers.contract import (
    AdapterContext,
    Capabilities,
    L2Adapter,
    LoadItem,
    Outcome,
    Result,
    ScanPage,
    StoreItem,
    Usage,
)
from lmcache_memcached.client import Connection, MemcachedError, Pool, RefusedError
from lmcache_memcached.settings import MemcachedSettings

Item = TypeVar("Item")

# An item of memcached (-I, 1 MiB unless it is told otherwise) holds the value, the key, and a header of some 60 bytes.
_ITEM_BYTES = 1 << 20
_OBJECT_BYTES_MAX = _ITEM_BYTES - 512
_USAGE_S = 1.0
_LATE = Outcome(Result.FAILED, error="not started by its deadline", retryable=True)


class MemcachedAdapter(L2Adapter):
    """Values of the memcached at `settings.host`, under keys that are hexadecimal: memcached takes no others."""

    capabilities: ClassVar[Capabilities] = Capabilities(
        scan=False, evicts=True, shared=True, object_bytes_max=_OBJECT_BYTES_MAX
    )

    def __init__(self, settings: MemcachedSettings, context: AdapterContext) -> None:
        self._settings = settings
        self._tier = context.tier
        self._prefix = settings.prefix.encode()
        self._pool = Pool(settings.host, settings.port)
        self._closed = False

    # --- what the server calls, from several threads at once --------------------------------------------------
    def store(self, items: Sequence[StoreItem], deadline: float) -> Sequence[Outcome]:
        return self._each(self._store_one, items, deadline)

    def exists(self, keys: Sequence[bytes], deadline: float) -> Sequence[bool]:
        """`mg KEY t`: without its value, and as a use of it."""
        self._check_open()
        try:
            with self._pool.connection(deadline) as connection:
                connection.send(b"".join(b"mg %s t\r\n" % self._name(key) for key in keys))
                answers = [connection.line() for _ in keys]
                if not all(answer.startswith((b"HD", b"EN")) for answer in answers):
                    raise MemcachedError(f"it answered {answers[0][:60]!r} to mg: version 1.6 or later is needed")
                return [answer.startswith(b"HD") for answer in answers]
        except MemcachedError as error:
            raise TierError(f"tier {self._tier!r}: {error}", retryable=True) from error

    def load(self, items: Sequence[LoadItem], deadline: float) -> Sequence[Outcome]:
        return self._each(self._load_one, items, deadline)

    def delete(self, keys: Sequence[bytes], deadline: float) -> Sequence[Outcome]:
        return self._each(self._delete_one, keys, deadline)

    def usage(self) -> Usage:
        """Of the whole memcached: it does not count by prefix, and counts what is flushed until it comes across it."""
        self._check_open()
        try:
            with self._pool.connection(time.monotonic() + _USAGE_S) as connection:
                connection.send(b"stats\r\n")
                told: dict[bytes, bytes] = {}
                while (line := connection.answer()) != b"END":
                    _, name, value = line.split(b" ", 2)
                    told[name] = value
                used, most = int(told[b"bytes"]), int(told[b"limit_maxbytes"])
                return Usage(used, int(told[b"curr_items"]), max(0, most - used))
        except (MemcachedError, RefusedError, KeyError) as error:
            raise TierError(f"tier {self._tier!r}: {error}", retryable=True) from error

    def scan(self, cursor: str | None, deadline: float) -> ScanPage:
        raise TierError(f"tier {self._tier!r}: memcached lists nothing", retryable=False)

    def medium(self) -> str:
        return f"memcached {self._settings.host}:{self._settings.port}, prefix {self._settings.prefix!r}"

    def close(self) -> None:
        self._closed = True
        self._pool.close()

    # --- one object -------------------------------------------------------------------------------------------
    def _store_one(self, connection: Connection, item: StoreItem) -> Outcome:
        if item.nbytes > _OBJECT_BYTES_MAX:
            return Outcome(Result.FAILED, error=f"{item.nbytes:,} bytes, and an item holds {_OBJECT_BYTES_MAX:,}")
        connection.send(b"set %s 0 0 %d\r\n" % (self._name(item.key), item.nbytes), *item.buffers, b"\r\n")
        answer = connection.answer()
        if answer != b"STORED":
            raise MemcachedError(f"it answered {answer[:60]!r} to set")
        return Outcome(Result.DONE, item.nbytes)

    def _load_one(self, connection: Connection, item: LoadItem) -> Outcome:
        connection.send(b"get %s\r\n" % self._name(item.key))
        answer = connection.answer()
        if answer == b"END":
            return Outcome(Result.MISS)
        _, _, _, length = answer.split(b" ")  # VALUE key flags bytes
        nbytes, room = int(length), sum(buffer.nbytes for buffer in item.buffers)
        if nbytes > room:
            connection.skip(nbytes)
        else:
            connection.read_into(item.buffers, nbytes)
        if connection.line() != b"" or connection.line() != b"END":
            raise MemcachedError("no end where the object ends")
        if nbytes > room:
            return Outcome(Result.DAMAGED, error=f"it has {nbytes:,} bytes, and {room:,} were expected")
        return Outcome(Result.DONE, nbytes)

    def _delete_one(self, connection: Connection, key: bytes) -> Outcome:
        connection.send(b"delete %s\r\n" % self._name(key))
        answer = connection.answer()
        if answer not in (b"DELETED", b"NOT_FOUND"):
            raise MemcachedError(f"it answered {answer[:60]!r} to delete")
        return Outcome(Result.DONE)

    def _name(self, key: bytes) -> bytes:
        return self._prefix + key.hex().encode()

    # --- all of them ------------------------------------------------------------------------------------------
    def _each(
        self, call: Callable[[Connection, Item], Outcome], items: Sequence[Item], deadline: float
    ) -> list[Outcome]:
        """One outcome for each item, in order. A refusal is of one item; after any other trouble a new connection is
        made for the next one."""
        self._check_open()
        outcomes: list[Outcome] = []
        for item in items:
            if time.monotonic() >= deadline:
                outcomes.append(_LATE)
                continue
            try:
                with self._pool.connection(deadline) as connection:
                    outcomes.append(call(connection, item))
            except RefusedError as error:
                full = "out of memory" in str(error)
                outcomes.append(Outcome(Result.FULL if full else Result.FAILED, error=f"tier {self._tier!r}: {error}"))
            except MemcachedError as error:
                outcomes.append(Outcome(Result.FAILED, error=f"tier {self._tier!r}: {error}", retryable=True))
        return outcomes

    def _check_open(self) -> None:
        if self._closed:
            raise TierError(f"tier {self._tier!r} is closed", retryable=False)
