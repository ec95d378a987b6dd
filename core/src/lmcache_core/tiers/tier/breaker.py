"""A circuit breaker: a tier that keeps failing is not called for a while, then probed. Pure: takes `now`."""

from __future__ import annotations

import math
from collections.abc import Callable

from lmcache_core.limits import BREAKER_FAILURES, BREAKER_PAUSE_MAX_S, BREAKER_PAUSE_S
from lmcache_core.tiers.tier.breaker_states import BREAKER_TRANSITIONS, BreakerEvent, BreakerState


class Breaker:
    """Opens after `failures_max` failed calls in a row; each failed probe doubles the pause, up to half a minute.

    The caller asks `allows` before each call, and reports its end once, by `succeeded` or `failed`. A call that is not
    done by its deadline has failed then, whether a thread has it or not: if threads hang, there is none to try it.
    """

    def __init__(
        self,
        failures_max: int = BREAKER_FAILURES,
        pause_s: float = BREAKER_PAUSE_S,
        pause_max_s: float = BREAKER_PAUSE_MAX_S,
    ) -> None:
        self._failures_max = failures_max
        self._first_pause_s = pause_s
        self._pause_max_s = pause_max_s
        self._pause_s = pause_s
        self._failures = 0
        self.state = BreakerState.CLOSED
        self.probe_at = 0.0  # when an open breaker lets the next probe through
        self.opened = 0  # how often it has opened
        self.last_error = ""
        self._tripped_late = False
        self.on_move: Callable[[BreakerState], None] | None = None  # called when it opens, and when it closes

    def move(self, event: BreakerEvent) -> None:
        """The only way to change the state. A step that is not in the table is a bug of the caller: `KeyError`."""
        self.state = BREAKER_TRANSITIONS[self.state, event]

    @property
    def hangs(self) -> bool:
        """Whether it is not closed because of a late call: what runs will hardly return."""
        return self._tripped_late and self.state is not BreakerState.CLOSED

    def waits(self, now: float) -> bool:
        """Whether no call may start now: it is open, and the pause is not over, or the probe is under way."""
        is_due = self.state is BreakerState.OPEN and now >= self.probe_at
        return self.state is not BreakerState.CLOSED and not is_due

    def allows(self, now: float) -> bool:
        """Whether a call may start now. When open, after the pause, True once: the call is the probe."""
        if self.waits(now):
            return False
        if self.state is BreakerState.OPEN:
            self.move(BreakerEvent.PROBE)
        return True

    def succeeded(self) -> None:
        """A call came back, with any ordinary answer."""
        was = self.state
        self.move(BreakerEvent.SUCCEED)
        self._failures = 0
        self._pause_s = self._first_pause_s
        if was is not BreakerState.CLOSED and self.on_move is not None:
            self.on_move(self.state)

    def failed(self, now: float, error: str, *, late: bool = False, at_once: bool = False) -> None:
        """A call failed, or was `late`. Calls that started before it opened no longer count. `at_once`: this one alone
        proves that further calls would be in vain."""
        self.last_error = error
        if self.state is BreakerState.OPEN:
            return
        self._failures += 1
        if at_once or self.state is BreakerState.HALF_OPEN or self._failures >= self._failures_max:
            self.move(BreakerEvent.TRIP)
            self.opened += 1
            self._tripped_late = late
            self.probe_at = now + self._pause_s
            self._pause_s = min(self._pause_max_s, 2 * self._pause_s)
            if self.on_move is not None:
                self.on_move(self.state)

    def came_back(self, now: float) -> None:
        """A call that was given up has returned after all: probe without waiting for the pause."""
        if self.state is BreakerState.OPEN:
            self.probe_at = min(self.probe_at, now)

    def not_used(self) -> None:
        """The call that `allows` permitted was not made."""
        if self.state is BreakerState.HALF_OPEN:
            self.move(BreakerEvent.SKIP)


class Breakers:
    """The breakers of operations that are of use only together, seen as one: it is closed while all of them are. Each
    is opened and closed by its own operation alone: lookups that succeed say nothing about loads."""

    def __init__(self, *parts: Breaker) -> None:
        self._parts = parts
        self.on_move: Callable[[BreakerState], None] | None = None  # as for a single one
        for part in parts:
            part.on_move = self._moved

    def _moved(self, state: BreakerState) -> None:
        if self.on_move is not None and (state is BreakerState.OPEN or self.state is BreakerState.CLOSED):
            self.on_move(state)

    @property
    def state(self) -> BreakerState:
        """OPEN if one of them is, CLOSED if all are."""
        states = [part.state for part in self._parts]
        for worst in (BreakerState.OPEN, BreakerState.HALF_OPEN):
            if worst in states:
                return worst
        return BreakerState.CLOSED

    @property
    def hangs(self) -> bool:
        """Whether one of them does."""
        return any(part.hangs for part in self._parts)

    @property
    def opened(self) -> int:
        """How often one of them has opened."""
        return sum(part.opened for part in self._parts)

    @property
    def last_error(self) -> str:
        """Of the first that is not closed."""
        away = (part.last_error for part in self._parts if part.state is not BreakerState.CLOSED)
        return next(away, "")

    @property
    def probe_at(self) -> float:
        """When the first that is open may be probed; infinity if none is."""
        return min((part.probe_at for part in self._parts if part.state is BreakerState.OPEN), default=math.inf)
