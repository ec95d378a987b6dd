"""The clock of a loop: the time is read once a turn, and everything on that loop goes by it."""

from __future__ import annotations

import time
from collections.abc import Callable


class Clock:
    """Monotonic seconds, `now` standing still during a turn. Who owns the loop gives the clock to all that lives on
    its thread, and nobody keeps a time of their own.

    The loop calls `turn` once a turn, after it has waited: what was asked for at the end of a long wait was asked for
    then, and not when the wait began.
    """

    __slots__ = ("now", "read")

    def __init__(self, read: Callable[[], float] = time.monotonic) -> None:
        self.read = read  # the time at this moment, for what has to be measured within a turn
        self.now = read()

    def turn(self) -> float:
        """Begin a turn: the time is read, and is `now` until the next one."""
        self.now = now = self.read()
        return now
