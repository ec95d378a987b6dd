"""For how long nothing returns from a lane before it counts as one that hangs."""

from __future__ import annotations

import threading

from lmcache_core.limits import HANGING_TIER_S
from lmcache_core.tiers.tier.lanes import WRITE_BACK, Call, Lane


class _Waits(Call):
    def __init__(self, began: threading.Semaphore, gate: threading.Event, deadline: float = 1e9) -> None:
        super().__init__(deadline, WRITE_BACK)
        self._began, self._gate = began, gate

    def work(self) -> None:
        self._began.release()
        self._gate.wait()

    def ended(self) -> None: ...

    def late(self) -> None: ...


def test_hours_in_which_nothing_is_asked_are_no_silence_though_an_old_call_hangs() -> None:
    began, ended = threading.Semaphore(0), threading.Semaphore(0)
    never, at_once = threading.Event(), threading.Event()
    at_once.set()
    lane = Lane("t", 2, lambda call: ended.release())
    lane.expire(0.0)
    lane.submit(_Waits(began, never, deadline=5.0))
    assert began.acquire(timeout=60)
    for now in (6.0, 3600.0):  # it hangs; an hour passes
        lane.expire(now)
    lane.submit(_Waits(began, at_once))
    assert ended.acquire(timeout=60)
    lane.expire(3600.5)
    lane.submit(_Waits(began, never))
    lane.expire(3600.5 + HANGING_TIER_S)
    assert lane.silent(3600.5, 3600.5 + HANGING_TIER_S)
    never.set()
    for _ in range(2):
        assert ended.acquire(timeout=60)
    lane.close()
