"""The states of a call on a lane, and the one table that says how it moves between them (`Call.move`).

The states differ in whether the call's work may be running, and in what its caller has been told. A call that runs past
its deadline is reported twice: late when the deadline passes, ended when it returns.
"""

from __future__ import annotations

from enum import Enum, auto

from lmcache_core.transitions import Transitions


class CallState(Enum):
    """Where a call stands."""

    QUEUED = auto()  # before its lane, or in the lane's queue
    RUNNING = auto()  # a thread is running its work
    LATE = auto()  # the same, past its deadline
    ENDED = auto()  # its work has returned or raised
    EXPIRED = auto()  # its deadline passed before a thread took it: it never ran
    CANCELLED = auto()  # cancelled before it ran


class CallEvent(Enum):
    """What happens to a call."""

    TAKE = auto()  # a thread begins its work
    RETURN = auto()
    EXPIRE = auto()  # the deadline has passed, or nothing can run it in time
    CANCEL = auto()


CALL_TRANSITIONS: Transitions[CallState, CallEvent] = Transitions(
    {
        (CallState.QUEUED, CallEvent.TAKE): CallState.RUNNING,
        (CallState.QUEUED, CallEvent.EXPIRE): CallState.EXPIRED,
        (CallState.QUEUED, CallEvent.CANCEL): CallState.CANCELLED,
        (CallState.RUNNING, CallEvent.EXPIRE): CallState.LATE,
        (CallState.RUNNING, CallEvent.RETURN): CallState.ENDED,
        (CallState.LATE, CallEvent.RETURN): CallState.ENDED,
    }
)
