"""The states of an incarnation, and the one table that says how it moves between them.

The table drives the code (`Residents.move` looks up every step in it), the assertion (a step that is not in it stops
the kernel), the diagram in the docs and the test machine.
"""

from __future__ import annotations

from enum import IntEnum

from lmcache_core.transitions import Transitions


class State(IntEnum):
    """What may be done with the bytes of one slot. The pool's slot table holds these values."""

    FREE = 0  # belongs to nobody
    WRITING = 1  # a session writes it under a write lease; invisible
    READY = 2  # visible, never written again
    DOOMED = 3  # out of the index, still held by readers
    QUARANTINED = 4  # out of the index, but someone may still be writing to it
    LOADING = 5  # a lane writes it from a tier; otherwise like WRITING


class Event(IntEnum):
    """What happens to an incarnation."""

    GRANT = 0  # prepare_store
    LOAD = 1  # prepare_store by a lane
    COMMIT = 2
    ABORT = 3  # by the owner, or because the owner is dead
    EXPIRE = 4  # the write lease ran out: the key is free, the slot is not
    CLEAR = 5  # a clear found it being written
    REMOVE = 6  # evicted, cleared or dropped, and nobody holds it
    REMOVE_HELD = 7  # cleared or dropped under its readers
    LAST_RELEASE = 8  # the last of those readers is done
    ANSWER = 9  # the owner of a quarantined slot said it is done, or is dead


TRANSITIONS: Transitions[State, Event] = Transitions(
    {
        (State.FREE, Event.GRANT): State.WRITING,
        (State.FREE, Event.LOAD): State.LOADING,
        (State.WRITING, Event.COMMIT): State.READY,
        (State.WRITING, Event.ABORT): State.FREE,
        (State.WRITING, Event.EXPIRE): State.QUARANTINED,
        (State.WRITING, Event.CLEAR): State.QUARANTINED,
        (State.LOADING, Event.COMMIT): State.READY,
        (State.LOADING, Event.ABORT): State.FREE,
        (State.LOADING, Event.EXPIRE): State.QUARANTINED,
        (State.LOADING, Event.CLEAR): State.QUARANTINED,
        (State.READY, Event.REMOVE): State.FREE,
        (State.READY, Event.REMOVE_HELD): State.DOOMED,
        (State.DOOMED, Event.LAST_RELEASE): State.FREE,
        (State.QUARANTINED, Event.ANSWER): State.FREE,
    }
)

NO_ROW = 0xFFFF  # instead of a worker's row: the server itself, a lane, or nobody

INDEXED = frozenset({State.WRITING, State.LOADING, State.READY})  # a key has at most one incarnation in these
