"""Whether a piece of code is still running in its thread, and so whether what it uses may be released.

A `finally` answers that only if nothing interrupts the `finally`, and a reference only if no traceback keeps it. The
interpreter knows: a call lasts as long as its frame is on its thread's stack.
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
    """Whether the call with this frame is running in another thread. The interpreter refuses to clear the frame of a
    running call. `sys._current_frames()` would say it, too, but allocates while it holds a lock of the interpreter, and
    in Python 3.11 a garbage collection in there deadlocks."""
    if runs_here(frame):
        return False
    try:
        frame.clear()  # clears the variables of a call that has ended and that a traceback keeps
    except RuntimeError:
        return True
    return False


class Presence:
    """The call that made it, or one of its callers: `Presence(1)` stands for the caller, and so on."""

    __slots__ = ("_frame", "thread")

    def __init__(self, up: int = 0) -> None:
        self._frame = sys._getframe(1 + up)
        self.thread = threading.get_ident()

    @property
    def lasts(self) -> bool:
        """Whether that call is still running."""
        return runs_here(self._frame) if self.is_ours else runs_elsewhere(self._frame)

    @property
    def is_ours(self) -> bool:
        """Whether it was made on this thread."""
        return self.thread == threading.get_ident()
