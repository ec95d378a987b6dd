"""The tier: objects as values of a memcached, which evicts by itself and lists nothing."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import ClassVar

from lmcache_core.tiers.blocking import BlockingAdapter
from lmcache_core.tiers.contract import (
    AdapterContext,
    Capabilities,
    LoadItem,
    Outcome,
    Result,
    StoreItem,
    Usage,
)
from lmcache_memcached.client import MemcachedError, Pool, RefusedError
from lmcache_memcached.settings import MemcachedSettings

# An item of memcached (-I, 1 MiB unless it is told otherwise) holds the value, the key, and a header of some 60 bytes.
_ITEM_BYTES = 1 << 20
_OBJECT_BYTES_MAX = _ITEM_BYTES - 512
_USAGE_S = 1.0


class MemcachedAdapter(BlockingAdapter):
    """Values of the memcached at `settings.host`, under keys that are hexadecimal: memcached takes no others."""

    capabilities: ClassVar[Capabilities] = Capabilities(
        scan=False, evicts=True, shared=True, object_bytes_max=_OBJECT_BYTES_MAX
    )

    errors = (MemcachedError, RefusedError)
    cure = "start memcached there, or say where it is with l2.NAME.host and l2.NAME.port"

    def __init__(self, settings: MemcachedSettings, context: AdapterContext) -> None:
        self._settings = settings
        self._prefix = settings.prefix.encode()
        self._pool = Pool(settings.host, settings.port)
        super().__init__(context, self._pool)

    # --- what the server calls, from several threads at once --------------------------------------------------
    def exists(self, keys: Sequence[bytes], deadline: float) -> Sequence[bool]:
        """`mg KEY t`: without its value, and as a use of it."""

        def ask() -> list[bool]:
            with self._pool.connection(deadline) as connection:
                connection.send(b"".join(b"mg %s t\r\n" % self._name(key) for key in keys))
                answers = [connection.line() for _ in keys]
                if not all(answer.startswith((b"HD", b"EN")) for answer in answers):
                    raise MemcachedError(f"it answered {answers[0][:60]!r} to mg: version 1.6 or later is needed")
                return [answer.startswith(b"HD") for answer in answers]

        return self.whole("look up", ask)

    def usage(self) -> Usage:
        """Of the whole memcached: it does not count by prefix, and counts what is flushed until it comes across it."""

        def ask() -> Usage:
            with self._pool.connection(time.monotonic() + _USAGE_S) as connection:
                connection.send(b"stats\r\n")
                figures: dict[bytes, bytes] = {}
                while (line := connection.answer()) != b"END":
                    _, name, value = line.split(b" ", 2)
                    figures[name] = value
                if not {b"bytes", b"limit_maxbytes", b"curr_items"} <= figures.keys():
                    raise MemcachedError("its stats say neither what it holds nor what it may")
                used, most = int(figures[b"bytes"]), int(figures[b"limit_maxbytes"])
                return Usage(used, int(figures[b"curr_items"]), max(0, most - used))

        return self.whole("tell its usage", ask)

    def medium(self) -> str:
        return f"memcached {self._settings.host}:{self._settings.port}, prefix {self._settings.prefix!r}"

    # --- one object -------------------------------------------------------------------------------------------
    def store_one(self, item: StoreItem, deadline: float) -> None:
        with self._pool.connection(deadline) as connection:
            connection.send(b"set %s 0 0 %d\r\n" % (self._name(item.key), item.nbytes), *item.buffers, b"\r\n")
            answer = connection.answer()
            if answer != b"STORED":
                raise MemcachedError(f"it answered {answer[:60]!r} to set")

    def load_one(self, item: LoadItem, deadline: float) -> Outcome:
        with self._pool.connection(deadline) as connection:
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

    def delete_one(self, key: bytes, deadline: float) -> None:
        with self._pool.connection(deadline) as connection:
            connection.send(b"delete %s\r\n" % self._name(key))
            answer = connection.answer()
            if answer not in (b"DELETED", b"NOT_FOUND"):
                raise MemcachedError(f"it answered {answer[:60]!r} to delete")

    def _name(self, key: bytes) -> bytes:
        return self._prefix + key.hex().encode()

    # --- what went wrong --------------------------------------------------------------------------------------
    def refused(self, what: str, error: Exception) -> Outcome:
        """A refusal is of one item; after any other trouble a new connection is made for the next one."""
        if not isinstance(error, RefusedError):
            return super().refused(what, error)
        result = Result.FULL if "out of memory" in str(error) else Result.FAILED
        return Outcome(result, error=f"tier {self._tier!r} cannot {what}: {error}")
