"""What tiering needs of the L1: a small interface that the server's loop implements over kernel and pool.

Every method is called on the loop's thread, and only there. Lanes see nothing of it but the memoryviews that
`view` gave. Leases are plain numbers; positions are indexes into the keys that made the lease.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import StrEnum
from typing import NamedTuple, Protocol

from lmcache_core.pool.layout import Layout


class TierReason(StrEnum):
    """Why a key was not served from the tiers, or why an object did not get there."""

    NOWHERE = "nowhere"  # no tier that answered has it
    GONE = "gone"  # a tier had it at the lookup, and not at the load
    DAMAGED = "damaged"  # header, checksum or length are not what was stored
    TIER_ERROR = "tier_error"  # the tier failed, or its breaker is open
    THROTTLED = "throttled"  # a queue was full
    LATE = "late"  # not done by its deadline
    CANCELLED = "cancelled"  # the request went away
    CLEARED = "cleared"  # a `clear` ended it
    FULL = "full"  # no room (in the L1 for a load, on the tier for a store)
    BUSY = "busy"  # the L1 is being written with this key
    EVICTED = "evicted"  # left the L1 before it could be stored
    CUT = "cut"  # a key before it in the prefix was not served


class LoadGrant(StrEnum):
    """What the L1 answers for one key that is to be loaded."""

    GRANTED = "granted"  # there is a slot
    EXISTS = "exists"  # it is there by now: nothing to load
    BUSY = "busy"  # someone else is writing or loading it
    FULL = "full"  # no room, a quota, too large, or the pool is still warming up


class Committed(NamedTuple):
    """An object that was just committed to the L1 (never one that `commit_load` made: its tier has it)."""

    key: bytes
    namespace: int
    layout_id: int
    nbytes: int
    reused: bool = False  # was read again, rather than committed; only for policies with `wants_reuse`
    checksum: int | None = None  # xxh3_64 of its bytes, where who wrote them has told; None or 0: not known


class Pinned(NamedTuple):
    """A read lease of session 0. `offsets[i]` is None for a key that is no longer there."""

    lease: int
    offsets: Sequence[int | None]


class Loading(NamedTuple):
    """A load lease of session 0. `offsets[i]` counts only where `grants[i]` is GRANTED; only these positions
    have to be settled, by `commit_load` or `abort_load`, each exactly once."""

    lease: int
    grants: Sequence[LoadGrant]
    offsets: Sequence[int]


class L1(Protocol):
    """The caller (tiering) settles every position it was granted; the implementation never calls back."""

    def leading_misses(self, namespace: int, keys: Iterable[bytes]) -> int:
        """How many of the keys come before the first that is there. Looks no further than that."""
        ...

    def pin_for_store(self, namespace: int, keys: Sequence[bytes]) -> Pinned:
        """Hold ready objects so that a lane can read them. Positions without an offset hold nothing."""
        ...

    def finish(self, lease: int, positions: Sequence[int]) -> None:
        """End the hold on these positions."""
        ...

    def drop(self, namespace: int, keys: Sequence[bytes]) -> None:
        """Remove objects from the L1 (with the last pin where there are pins). Missing keys are no error."""
        ...

    def begin_load(self, namespace: int, layout_id: int, keys: Sequence[bytes], deadline: float) -> Loading:
        """Reserve slots, in state LOADING, for objects of this layout. Granted in part, never all or nothing."""
        ...

    def commit_load(
        self, lease: int, positions: Sequence[int], retain: bool, checksums: Sequence[int | None]
    ) -> Sequence[int]:
        """Publish loaded objects. `retain` False: each leaves the L1 with its first reader. `checksums[i]` is the
        xxh3_64 of the object at `positions[i]`, as it was verified, or None where a codec chain makes it unknown.
        Returns the positions that became ready; the others were cleared in the meantime, and their slots are free.
        """
        ...

    def abort_load(self, lease: int, positions: Sequence[int], reason: TierReason) -> None:
        """These will not be loaded, and nobody writes to their slots from now on: free, also from quarantine."""
        ...

    def late_load(self, lease: int, positions: Sequence[int]) -> None:
        """The deadline has passed and a lane may still be writing: free the keys now, quarantine the slots.
        `abort_load` for the same positions follows when the lane's call has returned. An implementation whose
        lease has expired by the deadline that `begin_load` was given need do nothing."""
        ...

    def view(self, offset: int, nbytes: int) -> memoryview:
        """Writable bytes of the pool, one-dimensional. Valid for as long as the position is held."""
        ...

    def layout(self, layout_id: int) -> Layout:
        """The registered layout of this id."""
        ...
