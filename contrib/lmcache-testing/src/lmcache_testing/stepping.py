"""A scheduler: one call of an adapter, stopped at each of its own lines while another thread looks.

Interleavings between two lines happen in each run, not once in a million. Lines of libraries and of C are passed in one
step: races within them are not tested.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any, Generic, TypeVar

from lmcache_core.tiers.contract import L2Adapter
from lmcache_testing.watch import STEP_S, Watched

T = TypeVar("T")
STOPS_MAX = 250
LOOK_S = 0.3  # a longer look waits for something that the stopped call holds: the call continues beside it
_CORE = "lmcache_core"


class _SteppedThread(threading.local):
    stepped = False


_this_thread = _SteppedThread()


def is_stepped() -> bool:
    """Whether the calling thread is under a scheduler: then it runs everything itself, in sequence."""
    return _this_thread.stepped


def own_modules(component: object, base: type = L2Adapter) -> frozenset[str]:
    """The packages that define a component's classes; the core's own are listed module by module."""
    found = set()
    for cls in type(component).__mro__:
        if cls is not base and issubclass(cls, base):
            package = cls.__module__.partition(".")[0]
            found.add(cls.__module__ if package == _CORE else package)
    return frozenset(found)


class Stepped(Generic[T]):
    """`call`, stopped at each line of `modules` until `look` has returned. `stops` counts the stops. `only`: look at
    this line only, counted from 0 in the order in which they run; None: at all lines.

    If a look needs something that the stopped call holds (a lock), the call continues, and there is no other look until
    this one has returned. If a look raises, there are no more looks, and `run` raises the error once the call has
    ended."""

    def __init__(
        self,
        call: Callable[[], T],
        modules: frozenset[str],
        look: Callable[[], Any],
        stops_max: int = STOPS_MAX,
        only: int | None = None,
    ) -> None:
        self._call = call
        self._modules = modules
        self._look = look
        self._stops_max = stops_max
        self._only = only
        self._pending: Watched[Any] | None = None
        self._error: BaseException | None = None
        self.stops = 0

    def run(self, limit_s: float) -> T:
        """The call's answer. Raises what the call, or a look, raises, and `NotBackError`."""
        answer = Watched(self._traced, "kit-stepped").answer(limit_s)
        if self._pending is not None and self._error is None:
            self._pending.answer(limit_s)
        if self._error is not None:
            raise self._error
        return answer

    def _traced(self) -> T:
        _this_thread.stepped = True
        sys.settrace(self._entered)
        try:
            return self._call()
        finally:
            sys.settrace(None)

    def _entered(self, frame: FrameType, event: str, argument: object) -> Callable[..., Any] | None:
        name = frame.f_globals.get("__name__", "")
        own = name in self._modules or name.partition(".")[0] in self._modules
        return self._line if own else None

    def _line(self, frame: FrameType, event: str, argument: object) -> Callable[..., Any]:
        if event == "line" and self.stops < self._stops_max and self._error is None:
            self.stops += 1
            if self._only is None or self.stops == self._only + 1:
                self._have_a_look()
        return self._line

    def _have_a_look(self) -> None:
        wait_s = STEP_S
        if self._pending is None:
            self._pending, wait_s = Watched(self._look, "kit-look"), LOOK_S
        if self._pending.wait(wait_s):
            looked, self._pending = self._pending, None
            try:
                looked.answer(STEP_S)
            except BaseException as error:  # noqa: BLE001 - raised by `run`
                self._error = error


def in_line(
    calls: Sequence[Callable[[], Any]], otherwise: Callable[[Sequence[Callable[[], Any]]], list[Any]]
) -> list[Any]:
    """The kit's `AdapterContext.run_parallel`: sequential under a scheduler, otherwise parallel."""
    return [call() for call in calls] if is_stepped() else otherwise(calls)
