"""The states of a lookup in the tiers, and the one table that says how it moves between them (`Job.move`).

A job ends once: with its last position, at its deadline, by a clear, or when its request is cancelled.
"""

from __future__ import annotations

from enum import Enum, StrEnum, auto

from lmcache_core.transitions import Transitions


class JobState(StrEnum):
    """What a job waits for."""

    WAITING = "waiting"  # for a free place: the limit of prefetches in flight is reached
    ASKING = "asking"  # tiers are being asked which keys they have
    LOADING = "loading"  # the sources are chosen, and loads are under way
    DONE = "done"
    CANCELLED = "cancelled"


class JobEvent(Enum):
    """What happens to a job."""

    ASK = auto()  # a place is free
    CHOOSE = auto()  # enough tiers have answered; later answers are not considered
    END = auto()
    CANCEL = auto()  # its request was cancelled


JOB_TRANSITIONS: Transitions[JobState, JobEvent] = Transitions(
    {
        (JobState.WAITING, JobEvent.ASK): JobState.ASKING,
        (JobState.ASKING, JobEvent.CHOOSE): JobState.LOADING,
        (JobState.WAITING, JobEvent.END): JobState.DONE,
        (JobState.ASKING, JobEvent.END): JobState.DONE,
        (JobState.LOADING, JobEvent.END): JobState.DONE,
        (JobState.WAITING, JobEvent.CANCEL): JobState.CANCELLED,
        (JobState.ASKING, JobEvent.CANCEL): JobState.CANCELLED,
        (JobState.LOADING, JobEvent.CANCEL): JobState.CANCELLED,
    }
)
