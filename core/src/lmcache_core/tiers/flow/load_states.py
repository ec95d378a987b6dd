"""The states of a load, and the one table that says how it moves between them.

The states differ in who may write to the slot: there is no slot yet, it is ours, or a lane may be writing to it. A slot
is given back to the L1 once, and never while a lane may write to it. The number of waiting jobs is not part of the
state: a load that every job has given up continues until its lane returns.

The table feeds the code (`Load.move` looks every step up in it), the diagram in the docs and the tests.
"""

from __future__ import annotations

from enum import IntEnum

from lmcache_core.transitions import Transitions


class LoadState(IntEnum):
    """Where a load stands."""

    WANTED = 0  # no slot yet
    GRANTED = 1  # it has a slot, and no tier is writing to it
    OUT = 2  # a tier's call may be writing to its slot
    LATE = 3  # the same, after the deadline: no job waits for it any more
    OVER = 4  # its slot is settled in the L1, or it never had one


class LoadEvent(IntEnum):
    """What happens to a load."""

    GRANT = 0  # the L1 gave it a slot
    REFUSE = 1  # the L1 has the object by now, gives no slot, or is no longer asked for one
    SUBMIT = 2  # a tier has taken the call
    RETURN = 3  # the call brought nothing, or will never run: the slot is ours again
    EXPIRE = 4  # the deadline has passed while a lane may be writing
    COMMIT = 5  # the object is there, whole and checked
    ABORT = 6  # no further tier will be asked


LOAD_TRANSITIONS: Transitions[LoadState, LoadEvent] = Transitions(
    {
        (LoadState.WANTED, LoadEvent.GRANT): LoadState.GRANTED,
        (LoadState.WANTED, LoadEvent.REFUSE): LoadState.OVER,
        (LoadState.GRANTED, LoadEvent.SUBMIT): LoadState.OUT,
        (LoadState.GRANTED, LoadEvent.ABORT): LoadState.OVER,
        (LoadState.OUT, LoadEvent.RETURN): LoadState.GRANTED,
        (LoadState.OUT, LoadEvent.EXPIRE): LoadState.LATE,
        (LoadState.OUT, LoadEvent.COMMIT): LoadState.OVER,
        (LoadState.LATE, LoadEvent.RETURN): LoadState.OVER,
    }
)
