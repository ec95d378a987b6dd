"""Whether a piece of code is still running in its thread: the question behind every "may this be let go of?"

A `finally` answers it only while nothing interrupts the `finally`, and a reference only while no traceback keeps it.
The interpreter knows: a call goes on as long as its frame is on its thread's stack.
"""

from __future__ import annotations

import sys
import threading
from types import FrameType


def runs_here(frame: FrameType) -> bool:
    """Whether the call with this frame is on this thread's stack."""
    each: FrameType | None = sys._getframe()
    while each is not None:
        if each is frame:
            return True
        each = each.f_back
    return False


def runs_elsewhere(frame: FrameType) -> bool:
    """Whether the call with this frame goes on in another thread. The interpreter says so when it is asked to clear
    the frame, which it does not do to one that runs; `sys._current_frames()` would say it too, but holds a lock of the
    interpreter's while it allocates, and in Python 3.11 a garbage collection in there ends in a deadlock."""
    if runs_here(frame):
        return False
    try:
        frame.clear()  # one that has ended, and that a traceback keeps, loses its variables
    except RuntimeError:
        return True
    return False


class Presence:
    """The call that made it, or one of its callers: `Presence(1)` is made in the caller's name, and so on."""

    __slots__ = ("_frame", "thread")

    def __init__(self, up: int = 0) -> None:
        self._frame = sys._getframe(1 + up)
        self.thread = threading.get_ident()

    @property
    def lasts(self) -> bool:
        """Whether that call still goes on."""
        return runs_here(self._frame) if self.is_ours else runs_elsewhere(self._frame)

    @property
    def is_ours(self) -> bool:
        """Whether it was made on this thread."""
        return self.thread == threading.get_ident()
