"""The reference adapter: a dictionary with the contract of an adapter."""

from __future__ import annotations

import ctypes
import mmap
import threading
import time
from collections.abc import Sequence
from itertools import islice
from typing import Any, ClassVar

from lmcache_core.buffers import address_of
from lmcache_core.tiers.blocking import BlockingAdapter
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

_MAPPED_BYTES_MIN = 64 << 10  # from this size on, an object gets pages of its own

Content = bytes | bytearray | mmap.mmap


class MemoryAdapter(BlockingAdapter):
    """Objects in a dictionary of this process. `medium_bytes`: stores beyond it answer FULL; None: no limit.

    `objects` is the medium itself, for tests that look behind the adapter; change it under `lock`. Adapters built with
    the same `objects` share one medium. Each entry holds the content and the time of last use.
    """

    capabilities: ClassVar[Capabilities] = Capabilities()

    def __init__(
        self, settings: Any = None, context: AdapterContext | None = None, *, medium_bytes: int | None = None
    ) -> None:
        del settings  # there is nothing to set
        self.objects: dict[bytes, tuple[Content, float]] = {}
        self.lock = threading.Lock()
        self._medium_bytes = medium_bytes
        super().__init__(context or AdapterContext(tier="memory"))

    def exists(self, keys: Sequence[bytes], deadline: float) -> Sequence[bool]:
        self.check_open()
        with self.lock:
            return [key in self.objects for key in keys]

    def delete_one(self, key: bytes, deadline: float) -> None:
        with self.lock:
            self.objects.pop(key, None)

    def usage(self) -> Usage:
        self.check_open()
        with self.lock:
            used = sum(len(content) for content, _ in self.objects.values())
            free = None if self._medium_bytes is None else max(0, self._medium_bytes - used)
            return Usage(used, len(self.objects), free)

    def entries_after(self, key: bytes, count: int, deadline: float) -> Sequence[ScanEntry]:
        with self.lock:
            keys = sorted(each for each in list(self.objects) if each > key)
            found = ((each, self.objects.get(each)) for each in keys)  # adapters sharing them have other locks
            there = (ScanEntry(each, len(held[0]), held[1]) for each, held in found if held is not None)
            return list(islice(there, count))

    def store_one(self, item: StoreItem, deadline: float) -> Outcome:
        content = _joined(item)
        with self.lock:
            if self._medium_bytes is not None:
                others = sum(len(held) for key, (held, _) in self.objects.items() if key != item.key)
                if others + len(content) > self._medium_bytes:
                    return Outcome(Result.FULL, error=f"tier {self._tier!r} holds {self._medium_bytes:,} bytes at most")
            self.objects[item.key] = (content, time.time())
        return Outcome(Result.DONE, len(content))

    def load_one(self, item: LoadItem, deadline: float) -> Outcome:
        with self.lock:
            found = self.objects.get(item.key)
            if found is None:
                return Outcome(Result.MISS)
            content = found[0]
            self.objects[item.key] = (content, time.time())
        room = sum(buffer.nbytes for buffer in item.buffers)
        if len(content) > room:
            return Outcome(Result.DAMAGED, error=f"it has {len(content):,} bytes, and {room:,} were expected")
        at = 0
        for buffer in item.buffers:
            nbytes = min(buffer.nbytes, len(content) - at)
            _copy(buffer, 0, content, at, nbytes)
            at += nbytes
        return Outcome(Result.DONE, len(content))


def _joined(item: StoreItem) -> Content:
    """The object as the medium keeps it. The page faults of fresh heap memory would be taken under the GIL, 4 ns a
    byte, and delay the server's loop; those of a mapping are taken by the copy, which releases the GIL."""
    if item.nbytes < _MAPPED_BYTES_MIN:
        return b"".join(item.buffers)
    content = mmap.mmap(-1, item.nbytes)
    at = 0
    for buffer in item.buffers:
        _copy(content, at, buffer, 0, buffer.nbytes)
        at += buffer.nbytes
    return content


def _copy(target: memoryview | mmap.mmap, target_at: int, source: memoryview | Content, at: int, nbytes: int) -> None:
    ctypes.memmove(address_of(memoryview(target)) + target_at, address_of(memoryview(source)) + at, nbytes)
