"""What the kernel wants done, in the order of its decisions.

The caller takes the list after every call (even one that raised) and applies it before it replies: a slot is marked in
the pool before anyone is told of the grant. Effects carry whole batches.
"""

from __future__ import annotations

from dataclasses import dataclass

from lmcache_core.kernel.answers import LeaseKind, Reason
from lmcache_core.kernel.objects import Incarnation
from lmcache_core.kernel.states import State


@dataclass(slots=True)
class SlotsMarked:
    """Slots at these offsets are now in `state`. `row` is their writer's row in the worker table, or NO_ROW. None keeps
    the row that is noted there."""

    offsets: list[int]
    state: State
    row: int | None


@dataclass(slots=True)
class SlabAssigned:
    """`nbytes` from `offset` on now belong to the size class of `slot_bytes`; 0: to no class."""

    offset: int
    nbytes: int
    slot_bytes: int


@dataclass(slots=True)
class Committed:
    """These became visible. `loaded`: they came from a tier."""

    objects: list[Incarnation]
    loaded: bool


@dataclass(slots=True)
class Read:
    """A session has finished reading these; some may have been dropped at that."""

    objects: list[Incarnation]


@dataclass(slots=True)
class Evicted:
    """These left the index to make room; their slots are free."""

    objects: list[Incarnation]


@dataclass(slots=True)
class Removed:
    """These left the index for another reason. Slots that are still held are freed later."""

    objects: list[Incarnation]
    reason: Reason


@dataclass(slots=True)
class LeaseExpired:
    """Tell the session to answer (commit, abort or finish) when its copies are done."""

    session_id: int
    lease_id: int
    kind: LeaseKind


@dataclass(slots=True)
class RowLeft:
    """No slot names this row of the worker table any more: everything its worker still holds has the new row."""

    row: int


@dataclass(slots=True)
class PolicyFailed:
    """The eviction policy raised in `method`. Nothing has to be done, but it should be logged."""

    method: str
    error: BaseException


@dataclass(slots=True, frozen=True)
class PolicyNoted:
    """The eviction policy has a line for the operator."""

    text: str


Effect = (
    SlotsMarked
    | SlabAssigned
    | Committed
    | Read
    | Evicted
    | Removed
    | LeaseExpired
    | RowLeft
    | PolicyFailed
    | PolicyNoted
)
