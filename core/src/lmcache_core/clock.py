"""The clock of a loop: it reads the time once a turn, and everything on that loop uses that time."""

from __future__ import annotations

import math
import time
from collections.abc import Callable


class Clock:
    """Monotonic seconds; `now` does not change during a turn. The loop's owner gives the clock to everything that lives
    on its thread, and nothing there keeps a time of its own.

    The loop calls `turn` once a turn, after it has waited, so that requests at the end of a long wait do not get the
    time at which the wait began.
    """

    __slots__ = ("now", "read", "rests_since_s")

    def __init__(self, read: Callable[[], float] = time.monotonic) -> None:
        self.read = read  # the current time, for measurements within a turn
        self.now = read()
        self.rests_since_s = self.now  # since when the loop has waited for something to do; infinite during a turn

    def turn(self) -> float:
        """Begin a turn: read the time, which is `now` until the next turn."""
        self.now = now = self.read()
        self.rests_since_s = math.inf
        return now
