"""Durations, counted in fixed buckets."""

from __future__ import annotations

from bisect import bisect_left
from typing import Any

# Upper bounds, in seconds: from the speed of a memory tier to the length of a deadline.
BOUNDS_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)


class Latency:
    """A histogram. Adding a value costs some 0.2 µs."""

    __slots__ = ("counts", "seconds")

    def __init__(self) -> None:
        self.counts = [0] * (len(BOUNDS_S) + 1)  # the last one: above all bounds
        self.seconds = 0.0  # the sum of all durations

    def add(self, seconds: float) -> None:
        self.counts[bisect_left(BOUNDS_S, seconds)] += 1
        self.seconds += seconds

    def status(self) -> dict[str, Any]:
        """For `status`: counts by bucket (not cumulative), in the order of `BOUNDS_S`."""
        return {"bounds_s": list(BOUNDS_S), "counts": list(self.counts), "seconds": round(self.seconds, 6)}
