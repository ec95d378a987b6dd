"""The server's copy of the tables: memory that no worker maps, written through to the pool.

Every worker maps the pool writable, so the server must not base decisions on its content. The server reads this copy;
where the pool differs from it, the pool was overwritten, and is repaired and counted.
"""

from __future__ import annotations

import mmap

from lmcache_core.limits import PAGE_BYTES

_STEP_BYTES = 64 << 10  # compared at once; only differing steps are compared word by word


class Master:
    """The master copy of the front of one pool, for the parts that only the server writes. For one thread."""

    def __init__(self, pool: memoryview, often: tuple[int, int], seldom: tuple[int, int]) -> None:
        """`pool`: the front of the mapping. `often`, `seldom`: (start, end), whole words, that only the server writes:
        the first is repaired in each step, the second a part at a time."""
        nbytes = -(-len(pool) // PAGE_BYTES) * PAGE_BYTES
        # Pages that are never written cost nothing.
        memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._pool = pool
        self._often, self._seldom = often, seldom
        self._at = seldom[0]
        self.buffer = memoryview(memory)[: len(pool)]
        self.repaired = 0  # words

    def write(self, offset: int, data: bytes) -> None:
        """Write to this copy first, then to the pool."""
        self.buffer[offset : offset + len(data)] = data
        self._pool[offset : offset + len(data)] = data

    def repair(self, nbytes: int) -> int:
        """One step: rewrite what differs, in about this many bytes; returns the number of words."""
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
