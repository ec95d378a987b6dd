"""Reused memory for encoding and decoding: a new large allocation costs 4 ns per byte, for each object."""

from __future__ import annotations

import mmap

from lmcache_core.limits import PAGE_BYTES, SCRATCH_BYTES_MAX

_FIRST_BYTES = 1 << 20


class Scratch:
    """Page-aligned buffers for one thread, taken one after another and released all at once.

    The caller must not use a view after `reset`. A buffer larger than SCRATCH_BYTES_MAX is allocated separately and not
    kept.
    """

    def __init__(self) -> None:
        self._region = memoryview(b"")
        self._used_bytes = 0

    @property
    def nbytes(self) -> int:
        """What it keeps for the next time."""
        return self._region.nbytes

    def take(self, nbytes: int) -> memoryview:
        """A writable view of `nbytes`, page-aligned, with undefined content."""
        rounded = -(-nbytes // PAGE_BYTES) * PAGE_BYTES
        if rounded > SCRATCH_BYTES_MAX:
            return _allocate(rounded)[:nbytes]
        if self._used_bytes + rounded > self._region.nbytes:
            # Views of the old region keep it alive; the new one is twice as large.
            grown = min(SCRATCH_BYTES_MAX, max(_FIRST_BYTES, 2 * (self._region.nbytes + rounded)))
            self._region = _allocate(max(grown, rounded))
            self._used_bytes = 0
        start = self._used_bytes
        self._used_bytes += rounded
        return self._region[start : start + nbytes]

    def reset(self) -> None:
        """Invalidate all views that were taken."""
        self._used_bytes = 0


def _allocate(nbytes: int) -> memoryview:
    # Anonymous and private: a fork must not share a buffer that a lane of the parent is writing to.
    return memoryview(mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
