"""Calls that may never return: a limit for how long they take, and where they are when they exceed it.

Time is counted in short waits of the watching thread. If the machine or the process is suspended, so are those waits,
and no call is late for that.
"""

from __future__ import annotations

import faulthandler
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Generic, TypeVar

T = TypeVar("T")
STEP_S = 0.02
RING_S = 1.0  # repeated: code that catches everything may catch an alarm
LAST_S = 60.0  # after the alarm: if a call in C ignores it, the process ends with all stacks printed
_FRAMES_SHOWN = 4


class NotBackError(AssertionError):
    """A call has not returned. `where`: the innermost lines of its thread. `knob`: the attribute of the test class that
    gives it more time."""

    def __init__(self, after_s: float, where: str, knob: str = "") -> None:
        more = f" (a slow medium gets more time by the class attribute {knob})" if knob else ""
        super().__init__(f"it had not come back after {after_s:.1f} s, and was in {where}{more}")
        self.where = where


class Watched(Generic[T]):
    """A call on a thread of its own. The thread is a daemon: one that never returns is left behind."""

    def __init__(self, call: Callable[[], T], name: str = "kit-call") -> None:
        self._call = call
        self._done = threading.Event()
        self._answer: list[T] = []
        self._error: BaseException | None = None
        self.thread = threading.Thread(target=self._run, name=name, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        try:
            self._answer.append(self._call())
        except BaseException as error:  # noqa: BLE001 - raised again by `answer`, in the thread that waits
            self._error = error
        finally:
            self._done.set()

    def wait(self, limit_s: float) -> bool:
        """Whether it has returned."""
        return any(self._done.wait(STEP_S) for _ in range(max(1, round(limit_s / STEP_S))))

    def answer(self, limit_s: float, knob: str = "") -> T:
        """Returns or raises what the call did. Raises `NotBackError`."""
        if not self.wait(limit_s):
            raise NotBackError(limit_s, self.where(), knob)
        if self._error is not None:
            raise self._error
        return self._answer[0]

    def where(self) -> str:
        """The innermost lines of its stack."""
        return _lines_of(sys._current_frames().get(self.thread.ident or 0))


def watched(call: Callable[[], T], limit_s: float, knob: str = "") -> T:
    """The call's result, if it returns within `limit_s`. Raises `NotBackError`, and what the call raises."""
    return Watched(call).answer(limit_s, knob)


def _lines_of(frame: FrameType | None) -> str:
    if frame is None:
        return "no line of Python"
    stack = traceback.extract_stack(frame)[-_FRAMES_SHOWN:]
    return " < ".join(f"{each.name} ({each.filename.rpartition('/')[2]}:{each.lineno})" for each in reversed(stack))


class _Rung(BaseException):
    """Not caught by any `except Exception` of the hanging code."""


@contextmanager
def alarm(limit_s: float) -> Iterator[None]:
    """Interrupts the block with `NotBackError` after `limit_s`, wherever it waits. Only in the main thread; in others
    there is no limit."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    where: list[str] = []

    def ring(number: int, frame: FrameType | None) -> None:
        where.append(_lines_of(frame))
        raise _Rung

    began_s, handler = time.monotonic(), signal.signal(signal.SIGALRM, ring)
    left_s, every_s = signal.setitimer(signal.ITIMER_REAL, limit_s, RING_S)
    if sys.__stderr__ is not None:
        faulthandler.dump_traceback_later(limit_s + LAST_S, exit=True, file=sys.__stderr__)
    try:
        yield
    except _Rung:
        raise NotBackError(limit_s, where[0], "limit_s") from None
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        faulthandler.cancel_dump_traceback_later()
        signal.signal(signal.SIGALRM, handler)
        if left_s:  # somebody else's, such as pytest-timeout's
            signal.setitimer(signal.ITIMER_REAL, max(0.001, left_s - (time.monotonic() - began_s)), every_s)
