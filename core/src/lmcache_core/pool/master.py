"""The tables as their server knows them: memory that no worker maps, written through to the pool.

Every worker maps the pool writable, so nothing that stands there may decide anything for the server. What it has to
know it reads here; what differs in the pool was scribbled there, is written again, and counted.
"""

from __future__ import annotations

import mmap

from lmcache_core.limits import PAGE_BYTES

_STEP_BYTES = 64 << 10  # compared at once; only where something differs is it looked at word by word


class Master:
    """The master copy of the front of one pool, and of what in it only the server writes. One thread uses it."""

    def __init__(self, pool: memoryview, often: tuple[int, int], seldom: tuple[int, int]) -> None:
        """`pool`: the front of the mapping. `often`, `seldom`: (start, end), whole words, in which only the server
        writes: the first is repaired in each step, the second a part at a time."""
        nbytes = -(-len(pool) // PAGE_BYTES) * PAGE_BYTES
        # Pages that nothing was written to cost nothing.
        memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._pool = pool
        self._often, self._seldom = often, seldom
        self._at = seldom[0]
        self.buffer = memoryview(memory)[: len(pool)]
        self.repaired = 0  # words

    def write(self, offset: int, data: bytes) -> None:
        """Here first, and then in the pool."""
        self.buffer[offset : offset + len(data)] = data
        self._pool[offset : offset + len(data)] = data

    def repair(self, nbytes: int) -> int:
        """One step: write again what differs, in about so many bytes; how many words did."""
        start, end = self._seldom
        behind = min(self._at + nbytes, end)
        repaired = self._repair(*self._often) + self._repair(self._at, behind)
        self._at = behind if behind < end else start
        self.repaired += repaired
        return repaired

    def _repair(self, start: int, end: int) -> int:
        repaired = 0
        for first in range(start, end, _STEP_BYTES):
            behind = min(first + _STEP_BYTES, end)
            if self.buffer[first:behind].tobytes() == self._pool[first:behind].tobytes():
                continue
            ours, theirs = self.buffer[first:behind].cast("Q"), self._pool[first:behind].cast("Q")
            for at, word in enumerate(ours):
                if theirs[at] != word:
                    theirs[at] = word
                    repaired += 1
        return repaired
