"""Results of operations: a status for each key. Ordinary results are values."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from enum import StrEnum
from typing import TypeVar

import msgspec

from lmcache_core.client.promises import Promise
from lmcache_core.errors import (
    CacheError,
    DisconnectedError,
    LeaseExpiredError,
    LimitError,
    NotAttachedError,
    ProtocolError,
    SettingsError,
    UsageError,
)
from lmcache_core.kernel.answers import Grant, Reason, Settled
from lmcache_core.protocol.codec import unpack_u64


class Status(StrEnum):
    """What became of one key."""

    STORED = "stored"
    HIT = "hit"
    GRANTED = "granted"  # a slot was granted; two-phase calls only
    EXISTS = "exists"  # it was there already, so there is nothing to do
    BUSY = "busy"  # another client is writing it
    FULL = "full"  # no room at the moment
    WARMING = "warming"  # the pool is still being populated
    TOO_LARGE = "too_large"  # an object of this layout never fits in the pool
    QUOTA = "quota"  # a cap was reached; `status` says whose
    MISS = "miss"
    LOADING = "loading"  # on its way from a tier
    CLEARED = "cleared"  # a clear came before the commit
    EXPIRED = "expired"  # the lease expired before the commit
    ABORTED = "aborted"
    DRAINING = "draining"  # the server is shutting down and accepts nothing new
    UNREACHABLE = "unreachable"  # no server; stores and lookups continue without it


FROM_GRANT = {
    Grant.GRANTED: Status.GRANTED,
    Grant.EXISTS: Status.EXISTS,
    Grant.BUSY: Status.BUSY,
    Grant.FULL: Status.FULL,
    Grant.WARMING: Status.WARMING,
    Grant.TOO_LARGE: Status.TOO_LARGE,
    Grant.QUOTA: Status.QUOTA,
    Grant.MISS: Status.MISS,
    Grant.LOADING: Status.LOADING,
    Grant.DRAINING: Status.DRAINING,
}
FROM_SETTLED = {
    Settled.COMMITTED: Status.STORED,
    Settled.ABORTED: Status.ABORTED,
    Settled.FINISHED: Status.HIT,
    Settled.CLEARED: Status.CLEARED,
}
_MISUSE = (UsageError, NotAttachedError, SettingsError, LeaseExpiredError)
_SETTLED = [FROM_SETTLED.get(outcome, Status.EXPIRED) for outcome in sorted(Settled)]
_GRANTS = [FROM_GRANT[grant] for grant in sorted(Grant)]
_REASONS = sorted(Reason)
_T = TypeVar("_T")
_ZERO = array("Q", [0])


def grant_statuses(blob: bytes, count: int) -> list[Status]:
    """The statuses of a reply to prepare_*, one for each of `count` keys. Raises `ProtocolError` for anything else, as
    all readers of replies here do."""
    return _named_by(_GRANTS, blob, count)


def settled_statuses(blob: bytes, count: int) -> list[Status]:
    """The statuses of a reply to commit, abort or finish."""
    return _named_by(_SETTLED, blob, count)


def _named_by(names: Sequence[_T], blob: bytes, count: int) -> list[_T]:
    if len(blob) != count or max(blob, default=0) >= len(names):
        raise ProtocolError(f"the server has answered {count} keys with {len(blob)} bytes: {blob[:16]!r}…")
    return list(map(names.__getitem__, blob))


def refused(error: CacheError) -> tuple[Status, Reason]:
    """The status of each key of an operation that failed with this error: a limit is a quota, and anything else that
    prevents service counts as an unreachable server. Raises the error if it is the caller's mistake."""
    if isinstance(error, LimitError):
        return Status.QUOTA, Reason.QUOTA
    if isinstance(error, _MISUSE) and not isinstance(error, DisconnectedError):
        raise error
    return Status.UNREACHABLE, Reason.NONE


def numbers_of(blob: bytes, count: int) -> array[int]:
    """The u64 values of a reply, 0 if it has none."""
    if blob and len(blob) != 8 * count:
        raise ProtocolError(f"the server has answered {count} keys with {len(blob)} bytes of numbers")
    return unpack_u64(blob) if blob else _ZERO * count


def miss_reasons(blob: bytes, count: int) -> list[Reason]:
    """The reasons in a reply; an empty blob means that nothing missed."""
    return _named_by(_REASONS, blob, count) if blob else [Reason.NONE] * count


class StoreResult(msgspec.Struct, frozen=True):
    """One status for each key, in order."""

    statuses: Sequence[Status]

    @property
    def stored(self) -> int:
        """How many keys can be read now: stored by this call, or already there."""
        return sum(status in (Status.STORED, Status.EXISTS) for status in self.statuses)


class RetrieveResult(msgspec.Struct, frozen=True):
    """One status and one miss reason for each key, in order. `incarnations`: which incarnation of the key was read, a
    number that is unique for the key, for `Client.drop` and `Client.report_damaged`; 0 if none was read, or it is
    unknown."""

    statuses: Sequence[Status]
    reasons: Sequence[Reason]
    incarnations: Sequence[int]

    @property
    def hits(self) -> int:
        """How many keys were read, counted like a lookup's hits. With `prefix` that is its length: nothing after the
        first miss is a hit."""
        return list(self.statuses).count(Status.HIT)


class LookupResult(msgspec.Struct, frozen=True):
    """`hits`: length of the prefix that can be served, now or, while not `done`, once its loads have ended. Without
    `prefix` it counts all keys that can be served; for a window it is the end: `keys[hits - window:hits]` are there.
    `promise`, with `hold`, is redeemed by `prepare_retrieve` or `retrieve` of its keys, or given back with
    `free_lookup_locks`. `incarnations`, with `identify`: which incarnation of each key was found, as in
    `RetrieveResult`."""

    statuses: Sequence[Status]
    reasons: Sequence[Reason]
    hits: int
    done: bool = True
    promise: Promise | None = None
    job: int = 0
    incarnations: Sequence[int] = ()
