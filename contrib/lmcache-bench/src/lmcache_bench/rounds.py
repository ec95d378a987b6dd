"""How often to measure: a number of rounds, or as many as time allows."""

from __future__ import annotations

import time
from collections.abc import Iterator

QUICK_S = 10.0  # for all rounds of a quick run; starting, stopping and the last rounds fit into the rest of its 30 s


class Rounds:
    """Counts rounds for the whole of a run. In a quick run they end early once its time is over."""

    def __init__(self, *, quick: bool) -> None:
        self._until_s = time.monotonic() + QUICK_S if quick else float("inf")

    def of(self, count: int) -> Iterator[bool]:
        """`count` rounds and one before them. True where it counts: the first one warms up, and at least one counts."""
        yield False
        for number in range(count):
            if number and time.monotonic() > self._until_s:
                return
            yield True
