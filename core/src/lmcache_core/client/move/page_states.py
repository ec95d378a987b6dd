"""The states of what a job of pages has under way, and the tables that say how they move.

A *frame* is one question to the server, with the lease that comes of it. A *leased read* is all frames that a retrieve
asks at once, and the copies out of what they were granted. A job itself has no such state: it is over when it has its
result. That somebody gave it up is a flag, as it may come from any thread and from inside of any lock.
"""

from __future__ import annotations

from enum import Enum, auto

from lmcache_core.transitions import Transitions


class FrameState(Enum):
    """How far a question to the server has come."""

    WANTED = auto()  # there was no link yet
    ASKED = auto()  # it is sent, maybe behind the registration of its namespace
    HEARD = auto()  # answered, refused, or nobody wants the answer any more


class FrameEvent(Enum):
    """What happens to a question."""

    ASK = auto()  # it was sent
    ANSWER = auto()
    REFUSE = auto()  # there is no server to ask, or it answered with an error
    CANCEL = auto()
    REPEAT = auto()  # the server has forgotten the namespace: once more, from the start


FRAME_TRANSITIONS: Transitions[FrameState, FrameEvent] = Transitions(
    {
        (FrameState.WANTED, FrameEvent.ASK): FrameState.ASKED,
        (FrameState.ASKED, FrameEvent.ANSWER): FrameState.HEARD,
        (FrameState.ASKED, FrameEvent.REPEAT): FrameState.WANTED,
        (FrameState.WANTED, FrameEvent.REFUSE): FrameState.HEARD,
        (FrameState.ASKED, FrameEvent.REFUSE): FrameState.HEARD,
        (FrameState.WANTED, FrameEvent.CANCEL): FrameState.HEARD,
        (FrameState.ASKED, FrameEvent.CANCEL): FrameState.HEARD,
    }
)


class LeasedReadState(Enum):
    """How far the objects have come that a retrieve reads under leases."""

    ASKING = auto()  # not every frame is answered
    COPYING = auto()  # threads may be copying out of the slots
    OVER = auto()  # nothing was granted, or it is settled


class LeasedReadEvent(Enum):
    """What happens to them."""

    COPY = auto()  # the copies were begun
    END = auto()  # they were settled, or there are none


LEASED_READ_TRANSITIONS: Transitions[LeasedReadState, LeasedReadEvent] = Transitions(
    {
        (LeasedReadState.ASKING, LeasedReadEvent.COPY): LeasedReadState.COPYING,
        (LeasedReadState.ASKING, LeasedReadEvent.END): LeasedReadState.OVER,
        (LeasedReadState.COPYING, LeasedReadEvent.END): LeasedReadState.OVER,
    }
)
