"""Whether a piece of code is still running in its thread: the question behind every "may this be let go of?"

A `finally` answers it only while nothing interrupts the `finally`, and a reference only while no traceback keeps it.
The interpreter knows: a call goes on as long as its frame is on its thread's stack.
"""

from __future__ import annotations

import sys
import threading
from types import FrameType


class Presence:
    """The call that made it, or one of its callers: `Presence(1)` is made in the caller's name, and so on."""

    __slots__ = ("_frame", "thread")

    def __init__(self, up: int = 0) -> None:
        self._frame = sys._getframe(1 + up)
        self.thread = threading.get_ident()

    @property
    def lasts(self) -> bool:
        """Whether that call still goes on. Of another thread's the interpreter says so when it is asked to clear the
        frame, which it does not do to one that runs; `sys._current_frames()` would say it too, but holds a lock of the
        interpreter's while it allocates, and in Python 3.11 a garbage collection in there ends in a deadlock."""
        if not self.is_ours:
            try:
                self._frame.clear()  # one that has ended, and that a traceback keeps, loses its variables
            except RuntimeError:
                return True
            return False
        frame: FrameType | None = sys._getframe()
        while frame is not None:
            if frame is self._frame:
                return True
            frame = frame.f_back
        return False

    @property
    def is_ours(self) -> bool:
        """Whether it was made on this thread."""
        return self.thread == threading.get_ident()
