"""The states of a circuit breaker, and the one table that says how it moves between them."""

from __future__ import annotations

from enum import Enum, StrEnum, auto

from lmcache_core.transitions import Transitions


class BreakerState(StrEnum):
    """Whether calls go through."""

    CLOSED = "closed"  # they do
    OPEN = "open"  # no call goes through until the pause is over
    HALF_OPEN = "half_open"  # one call is under way to see whether the tier is back


class BreakerEvent(Enum):
    """What moves a breaker."""

    TRIP = auto()  # too many calls have failed in a row, or the probe has
    PROBE = auto()  # the pause is over, and one call may probe
    SKIP = auto()  # that call was not made
    SUCCEED = auto()  # a call succeeded, possibly one from before it opened


BREAKER_TRANSITIONS: Transitions[BreakerState, BreakerEvent] = Transitions(
    {
        (BreakerState.CLOSED, BreakerEvent.TRIP): BreakerState.OPEN,
        (BreakerState.OPEN, BreakerEvent.PROBE): BreakerState.HALF_OPEN,
        (BreakerState.HALF_OPEN, BreakerEvent.TRIP): BreakerState.OPEN,
        (BreakerState.HALF_OPEN, BreakerEvent.SKIP): BreakerState.OPEN,
        (BreakerState.CLOSED, BreakerEvent.SUCCEED): BreakerState.CLOSED,
        (BreakerState.OPEN, BreakerEvent.SUCCEED): BreakerState.CLOSED,
        (BreakerState.HALF_OPEN, BreakerEvent.SUCCEED): BreakerState.CLOSED,
    }
)
