"""How often to measure: a number of rounds, or as many as time allows."""

from __future__ import annotations

import time
from collections.abc import Iterator

QUICK_S = 10.0  # for all rounds of a quick run; start, stop and the last rounds fit into the rest of its 30 s


class Rounds:
    """Counts the rounds of a whole run. In a quick run they end early once its time is over."""

    def __init__(self, *, quick: bool) -> None:
        self._until_s = time.monotonic() + QUICK_S if quick else float("inf")

    def of(self, count: int) -> Iterator[bool]:
        """`count` rounds after a warm-up. True for rounds that count: at least one does."""
        yield False
        for number in range(count):
            if number and time.monotonic() > self._until_s:
                return
            yield True
