"""What the kernel answers: one byte per key on the wire, and the types around those bytes."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from enum import IntEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lmcache_core.kernel.tenants import TenantUsage

__all__ = ["Reason"]  # what callers see


class Grant(IntEnum):
    """The status of one key in the answer to a prepare, a lookup or a pin."""

    GRANTED = 0
    EXISTS = 1  # already stored: nothing to write
    BUSY = 2  # someone, perhaps this batch, is writing it
    FULL = 3  # no room, even after eviction
    WARMING = 4  # no room yet: the pool is still being populated
    TOO_LARGE = 5  # no pool of this size can hold it
    QUOTA = 6  # the tenant's limit, the session's quarantine cap or the cap on pinned bytes is reached
    MISS = 7  # the reason is given beside it
    LOADING = 8  # a lane is bringing it from a tier
    DRAINING = 9  # the server is shutting down and takes nothing new


class Settled(IntEnum):
    """The outcome of one position of a lease."""

    COMMITTED = 0
    ABORTED = 1
    FINISHED = 2
    CLEARED = 3  # a clear came first: it did not become visible
    NOT_HELD = 4  # never granted
    OPEN = 5  # granted and not settled yet; only `lease_status` answers it


class Reason(IntEnum):
    """Why a key was not served. Its name in lower case is used everywhere: `str(reason)`, `explain`, `status`, the
    metrics and the docs."""

    NONE = 0  # it was served, or nothing is known
    NEVER_STORED = 1  # or so long ago that it was forgotten
    EVICTED = 2
    EXPIRED = 3  # its writer did not commit in time
    CLEARED = 4
    QUOTA = 5
    TIER_ERROR = 6
    LATE = 7
    DAMAGED = 8
    DROPPED = 9  # stored to the tiers and deleted from the L1, or dropped after its one reader
    WRITER_DIED = 10
    BEING_WRITTEN = 11
    NO_ROOM = 12  # refused because the pool was full
    OTHER_LAYOUT = 13  # stored under another layout than the one asked for
    ABORTED = 14  # its writer gave up
    UNVERIFIABLE = 15  # its reader verifies everything, and it has no checksum

    def __str__(self) -> str:
        return self.name.lower()

    def __format__(self, spec: str) -> str:
        return format(str(self), spec)


class LeaseKind(IntEnum):
    """The three kinds of lease."""

    PROMISE = 0
    READ = 1
    WRITE = 2


@dataclass(slots=True)
class Grants:
    """The answer to a prepare: all columns are positional with the keys of the call.

    `offsets` are absolute in the pool, 0 where nothing was granted. `reasons` is empty when no key is a MISS.
    """

    lease_id: int
    deadline: float
    statuses: bytearray
    reasons: bytearray
    offsets: array[int]
    checksums: array[int] | None = None  # for a read: if asked for, or if the reader must verify; else 0
    generation: int = 0  # of the slots that a write was granted: the same for the whole page
    first: int = 0  # position of the page's first key in its lease
    incarnations: array[int] | None = None  # for a read, if asked for: which one was granted; else 0


@dataclass(slots=True)
class KernelLookup:
    """The answer to a lookup. `promise_id` is 0 if nothing was held."""

    statuses: bytearray
    reasons: bytearray
    promise_id: int = 0
    deadline: float = 0.0
    incarnations: array[int] | None = None  # if asked for: which one was found; else 0


@dataclass(slots=True)
class LeaseStatus:
    """`answers[i]` is the `Settled` of position i."""

    lease_id: int
    kind: LeaseKind
    open: bool  # some positions are not settled
    expired: bool
    deadline: float
    answers: bytearray


@dataclass(slots=True)
class ClearedCount:
    """`objects` and `nbytes` left the index; `doomed` more were being written or loaded and will not appear."""

    objects: int
    nbytes: int
    doomed: int


@dataclass(slots=True)
class ClassUsage:
    """One size class of the allocator."""

    slot_bytes: int
    slabs: int
    slots: int
    slots_used: int


@dataclass(slots=True)
class HolderUsage:
    """What one holder (all sessions of a uid or a key) or one session keeps from eviction or reuse."""

    sessions: int
    promised_bytes: int
    read_bytes: int
    pinned_bytes: int
    written_bytes: int  # open to write; of a holder, with all its sessions
    quarantined_bytes: int


@dataclass(slots=True)
class KernelUsage:
    """What the kernel holds now. Every figure is kept up to date; reading it does not cost more with more residents."""

    pool_bytes: int
    populated_bytes: int
    used_bytes: int  # bytes of all slots that are not free
    bytes_by_state: dict[str, int]
    objects_by_state: dict[str, int]
    leases_by_kind: dict[str, int]
    sessions: int
    sessions_lost: int  # their connection ended, but their death is not proven
    quarantine_by_holder: dict[str, int]  # overdue bytes, to find the culprit
    quarantine_by_session: dict[int, int]
    holders: dict[str, HolderUsage]  # by uid, or over ZMQ by key
    held_by_session: dict[int, HolderUsage]  # only sessions that keep anything
    pinned_bytes: int
    pinned_objects: int
    fragmentation: float  # share of the free populated bytes that only their own size class can use
    emptying_bytes: int  # of used slots, in slabs that are being emptied for a waiting store
    slabs_free: int  # units that belong to no class
    policy_error: str  # the last error that the eviction policy raised
    tenants: list[TenantUsage]  # namespaces without a tenant come last; empty if there are no tenants
    classes: list[ClassUsage] = field(default_factory=list)
    counters: dict[str, int] = field(default_factory=dict)
