"""How many requests may be in progress at once: fewer when the service throttles, more again as it recovers."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

LOWER_AGAIN_S = 0.25  # requests that began before the limit fell say nothing about the new limit


class Gate:
    """A limit between 1 and `requests_max`. Halved by `throttled`, raised by one for each limit's worth of successes.

    Thread-safe. As TCP does with its window: many servers on one bucket find a fair share without coordination.
    """

    def __init__(self, requests_max: int) -> None:
        self._requests_max = max(1, requests_max)
        self._limit = float(self._requests_max)
        self._under_way = 0
        self._lowered_at = float("-inf")
        self._changed = threading.Condition()

    @property
    def limit(self) -> int:
        return int(self._limit)

    @property
    def under_way(self) -> int:
        return self._under_way

    @contextmanager
    def entered(self, deadline: float) -> Iterator[None]:
        """Raises `TimeoutError` if no place is free by `deadline` (monotonic seconds)."""
        with self._changed:
            free = self._changed.wait_for(
                lambda: self._under_way < int(self._limit), max(0.0, deadline - time.monotonic())
            )
            if not free:
                raise TimeoutError(f"{self._under_way} requests were under way and none ended in time")
            self._under_way += 1
        try:
            yield
        finally:
            with self._changed:
                self._under_way -= 1
                self._changed.notify()

    def throttled(self, now: float) -> None:
        with self._changed:
            if now - self._lowered_at >= LOWER_AGAIN_S:
                self._lowered_at = now
                self._limit = max(1.0, self._limit / 2)

    def succeeded(self) -> None:
        if self._limit >= self._requests_max:
            return  # read without the lock: the usual case costs nothing, and a late raise does no harm
        with self._changed:
            self._limit = min(float(self._requests_max), self._limit + 1.0 / self._limit)
            self._changed.notify()
