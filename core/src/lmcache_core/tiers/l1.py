"""What tiering needs of the L1: a small interface that the server's loop implements over kernel and pool.

Every method is called on the loop's thread only. Lanes see only the memoryviews that `view` gave. Leases are plain
numbers; positions are indexes into the keys of the lease.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import IntEnum, StrEnum
from typing import NamedTuple, Protocol

from lmcache_core.pool.layout import Layout

# Where a key is, as bits of one byte.
IN_POOL, ON_TIER, ON_REMOTE_TIER = 1, 2, 4  # other nodes use a remote tier's medium, too
NOT_KNOWN = 2  # shifted left by this: no tier of the kind is known to have it, and one is still listing its medium


class TierReason(StrEnum):
    """Why a key was not served from the tiers, or why an object did not get there. Reasons shared with `Reason` have
    the same name."""

    NOWHERE = "nowhere"  # no tier that answered has it
    GONE = "gone"  # a tier had it at the lookup, but not at the load
    DAMAGED = "damaged"  # header, checksum or length are not what was stored
    TIER_ERROR = "tier_error"  # the tier failed, or its breaker is open
    THROTTLED = "throttled"  # a queue was full
    LATE = "late"  # not done by its deadline
    CANCELLED = "cancelled"  # the request was cancelled
    CLEARED = "cleared"  # a `clear` ended it
    NO_ROOM = "no_room"  # in the L1 for a load, on the tier for a store
    BUSY = "busy"  # the key is being written in the L1
    EVICTED = "evicted"  # left the L1 before it could be stored
    CUT = "cut"  # a key before it in the prefix was not served


class Stored(IntEnum):
    """What a tier's accounts say about one key."""

    NO = 0  # not there, and not on its way
    YES = 1
    ON_ITS_WAY = 2


class LoadGrant(StrEnum):
    """The L1's answer for one key to load."""

    GRANTED = "granted"  # there is a slot
    EXISTS = "exists"  # it is in the L1 by now: nothing to load
    BUSY = "busy"  # someone else is writing or loading it
    FULL = "full"  # no room, a quota, too large, or the pool is still warming up


Named = tuple[bytes, int]  # key and generation: one incarnation, within its namespace


class CommittedObject(NamedTuple):
    """One incarnation that was just committed to the L1 (never by `commit_load`: its tier has it already).

    A key may have had another incarnation with other bytes by the time it is stored: `generation` tells them apart.
    """

    key: bytes
    namespace: int
    layout_id: int
    nbytes: int
    generation: int
    reused: bool = False  # it was read again, not committed; only for policies with `wants_reuse`

    @property
    def named(self) -> Named:
        return self.key, self.generation


class Slot(NamedTuple):
    """Where a held incarnation is, and all that is needed to transfer its bytes."""

    offset: int
    layout_id: int
    checksum: int | None  # xxh3_64 of its bytes; None or 0: unknown
    suspect: bool = False  # adopted, and nobody has compared the two yet


class StorePin(NamedTuple):
    """A read lease of session 0. `slots[i]` is None for an incarnation that is gone."""

    lease: int
    slots: Sequence[Slot | None]


class Loading(NamedTuple):
    """A load lease of session 0. `offsets[i]` is valid only if `grants[i]` is GRANTED; only these positions have to be
    settled, by `commit_load` or `abort_load`, each exactly once. The loaded objects get this `generation`."""

    lease: int
    grants: Sequence[LoadGrant]
    offsets: Sequence[int]
    generation: int


class LoadWait(Protocol):
    """A load that waits for room."""

    def cancel(self) -> None:
        """Nobody waits for it any more: its callback is dropped."""
        ...


class L1Port(Protocol):
    """The caller (tiering) settles every position that it was granted. The implementation never calls back from inside
    a method, and later only for a `begin_load` that waits."""

    def leading_gone(self, namespace: int, wanted: Iterable[Named]) -> int:
        """How many of these incarnations precede the first that is still there. Stops looking at that one."""
        ...

    def shield(self, namespace: int, wanted: Sequence[Named]) -> None:
        """These incarnations are on their way to tiers: evict them last or, in some modes, never for other objects."""
        ...

    def unshield(self, namespace: int, wanted: Sequence[Named]) -> None:
        """These are on every tier that will get them. One that was not shielded, or is gone, is no error."""
        ...

    def unshield_some(self, objects_max: int) -> int:
        """As `unshield`, for the first shielded ones; returns how many."""
        ...

    def pin_for_store(self, namespace: int, wanted: Sequence[Named]) -> StorePin:
        """Hold exactly these incarnations so that a lane can read them. Positions without a slot hold nothing."""
        ...

    def finish(self, lease: int, positions: Sequence[int]) -> None:
        """End the hold on these positions."""
        ...

    def drop(self, namespace: int, wanted: Sequence[Named]) -> None:
        """Remove these incarnations from the L1 (a pinned one when its last pin ends). If one is gone that is no error,
        and its successor stays."""
        ...

    @property
    def evicts(self) -> bool:
        """Whether the L1 evicts objects when it needs the room."""
        ...

    def room_for(self, layout_id: int) -> int:
        """How many more objects of this layout fit without an eviction, now or soon."""
        ...

    def begin_load(
        self,
        namespace: int,
        layout_id: int,
        keys: Sequence[bytes],
        deadline: float,
        granted: Callable[[Loading], None],
    ) -> Loading | LoadWait:
        """Reserve slots, in state LOADING, for objects of this layout. Granted in part, never all or nothing.

        If making room takes a while, `granted` is called with the answer later, by the deadline, unless the returned
        wait is cancelled. Nothing is reserved until then.

        The lease expires at the deadline: its keys are free from then on, and a slot that was not settled, to which a
        lane may still be writing, stays in quarantine until its `abort_load`.
        """
        ...

    def commit_load(
        self, lease: int, positions: Sequence[int], retain: bool, checksums: Sequence[int | None]
    ) -> Sequence[int]:
        """Publish loaded objects. `retain` False: each leaves the L1 after its first reader. `checksums[i]` is the
        verified xxh3_64 of the object at `positions[i]`, or None if a codec chain makes it unknown. Returns the
        positions that became ready; the others were cleared in the meantime, and their slots are free.
        """
        ...

    def abort_load(self, lease: int, positions: Sequence[int], reason: TierReason) -> None:
        """These will not be loaded, and nobody writes to their slots from now on: free them, also from quarantine."""
        ...

    def view(self, offset: int, nbytes: int) -> memoryview:
        """Writable bytes of the pool, one-dimensional. Valid while the position is held."""
        ...

    @property
    def ready_objects(self) -> int:
        """How many objects are ready, including adopted ones that `walk` does not find yet."""
        ...

    @property
    def walkable(self) -> bool:
        """Whether `walk` finds every object."""
        ...

    def walk(self) -> Iterator[CommittedObject | None]:
        """Each slot, in order: its object if it is ready and not loaded for one reader only. Finds every object that
        stays where it is until the walk ends; others may come and go."""
        ...

    def layout(self, layout_id: int) -> Layout:
        """The registered layout of this id."""
        ...
