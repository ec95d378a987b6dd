"""Workers' own counts of what they found and read without a call: summed, but only as far as plausible.

A worker's line in the pool is its own claim. A figure that decreases, or grows faster than any worker could, is not
accepted, nor is anything else in its line at that reading; `doubted` counts it, and later readings are compared with
the new line. So an overwritten line costs the hits of one reading, and no total ever decreases.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Iterable

from lmcache_core.limits import TALLY_BYTES_PER_S_MAX, TALLY_HITS_PER_S_MAX, TALLY_SLACK_S, TALLY_THREADS_MAX
from lmcache_core.pool.segment import Segment
from lmcache_core.pool.tally import Tally

_WORDS = len(Tally)
_LINE = struct.Struct(f"={_WORDS}Q")
# For each word, in the order of `Tally`: the most that it may grow in a second.
_PER_S = (
    TALLY_HITS_PER_S_MAX,
    TALLY_HITS_PER_S_MAX,
    10**9 * TALLY_THREADS_MAX,
    TALLY_HITS_PER_S_MAX,
    TALLY_HITS_PER_S_MAX,
    TALLY_BYTES_PER_S_MAX,
    10**9 * TALLY_THREADS_MAX,
)


class WorkerTallies:
    """One line for each row in use. Lives on the loop's thread."""

    def __init__(self, segment: Segment) -> None:
        self._segment = segment
        self._total = [0] * _WORDS
        self._seen: dict[int, tuple[tuple[int, ...], float]] = {}  # for each row its line, and when it was read
        self.doubted = 0

    def adopt(self, rows: Iterable[int]) -> None:
        """Rows of a former server's workers: what they have counted so far belongs to that server."""
        for row in rows:
            self._seen[row] = (self._read(row), time.monotonic())

    def watch(self, row: int, *, chosen: bool = False) -> None:
        """A worker gets this row, and counts from 0. `chosen`: it chose the row itself, has cleared its line, and may
        have begun to count."""
        if not chosen:
            self._segment.clear_tally(row)
        self._seen[row] = ((0,) * _WORDS, time.monotonic())

    def fold(self, row: int) -> None:
        """The row is about to be released: add its worker's counts to the total."""
        self._look(row)
        self._seen.pop(row, None)

    def totals(self) -> dict[Tally, int]:
        """Everything that all workers have counted since the start, as far as plausible."""
        for row in list(self._seen):
            self._look(row)
        return dict(zip(Tally, self._total, strict=True))

    def _look(self, row: int) -> None:
        seen = self._seen.get(row)
        if seen is None:
            return
        line, now, (before, at_s) = self._read(row), time.monotonic(), seen
        self._seen[row] = (line, now)
        if line == before:
            return
        allowed_s = now - at_s + TALLY_SLACK_S
        grown = [new - old for new, old in zip(line, before, strict=True)]
        if all(0 <= each <= per_s * allowed_s for each, per_s in zip(grown, _PER_S, strict=True)):
            self._total = [total + each for total, each in zip(self._total, grown, strict=True)]
        else:
            self.doubted += 1

    def _read(self, row: int) -> tuple[int, ...]:
        return _LINE.unpack_from(self._segment.tables.tally(row).cast("B"))
