"""Everything that a server reports as it happens: one list of typed events.

The loop does not build them. It queues what happened on the bus, and the bus's thread calls the makers below. Events
contain keys, sizes and names, and never the content of an object, a token or a salt. The class's tag is the event's
name everywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby
from operator import attrgetter
from typing import Protocol

import msgspec

from lmcache_core.tiers.l1 import IN_POOL, NOT_KNOWN, ON_REMOTE_TIER, ON_TIER

__all__ = [
    "EVENTS",
    "IN_POOL",
    "NOT_KNOWN",
    "ON_REMOTE_TIER",
    "ON_TIER",
    "BlocksReported",
    "CacheCleared",
    "CacheEvent",
    "DrainBegun",
    "EventsMissed",
    "EvictionChanged",
    "LeaseTimedOut",
    "LookupAnswered",
    "Maker",
    "ObjectsAdmitted",
    "ObjectsEvent",
    "ObjectsEvicted",
    "ObjectsLoaded",
    "ObjectsOnTiers",
    "ObjectsRemoved",
    "ObjectsTiered",
    "ObjectsUntiered",
    "PoolAdopted",
    "ServerFault",
    "SessionClosed",
    "SessionOpened",
    "SlotsQuarantined",
    "TierListChanged",
    "TierStateChanged",
    "TiersRecounted",
    "of_objects",
    "one",
]


class CacheEvent(msgspec.Struct, tag_field="event", frozen=True, kw_only=True):
    """Something that has happened. `at_s`: Unix seconds, when the server noticed."""

    at_s: float

    @property
    def name(self) -> str:
        """Its name in logs, files and metrics."""
        return str(self.__struct_config__.tag)


class ObjectsEvent(CacheEvent, frozen=True):
    """Objects of one namespace. `nbytes`: total bytes of their slots."""

    namespace: int
    keys: list[bytes]
    nbytes: int


class ObjectsAdmitted(ObjectsEvent, tag="admitted", frozen=True):
    """Workers stored these: readers can find them."""


class ObjectsLoaded(ObjectsEvent, tag="loaded", frozen=True):
    """These were loaded from tiers: readers can find them."""


class ObjectsEvicted(ObjectsEvent, tag="evicted", frozen=True):
    """These left the L1 to make room. `policy`: the eviction policy that chose them."""

    policy: str


class ObjectsRemoved(ObjectsEvent, tag="removed", frozen=True):
    """These left the L1 for another reason: `cleared`, `dropped`, `damaged`, …"""

    reason: str


class ObjectsTiered(ObjectsEvent, tag="tier_stored", frozen=True):
    """A tier has these now."""

    tier: str


class ObjectsUntiered(CacheEvent, tag="tier_removed", frozen=True):
    """A tier no longer has these: evicted, damaged, or deleted by others. What a clear has made unreachable is not
    reported."""

    namespace: int
    keys: list[bytes]
    tier: str


class ObjectsOnTiers(CacheEvent, tag="on_tiers", frozen=True):
    """Whether tiers have these, asked of the accounts of all of them: after one tier's have changed, or because a
    subscriber wanted to know. `there`: for each key the bits ON_TIER (a tier of this node) and ON_REMOTE_TIER (one that
    other nodes use, too), each shifted left by NOT_KNOWN where no such tier is known to have the key and one is still
    listing its medium. Only if a subscriber wants blocks."""

    namespace: int
    keys: list[bytes]
    there: bytes
    asked: bool


class BlocksReported(CacheEvent, tag="blocks_reported", frozen=True):
    """An engine reported which of its blocks these keys hold, `len(hashes) // len(keys)` blocks each, in prefix order:
    each block follows the one before it, the first one `parent`. `media`: for each key the bits of the places that have
    it: IN_POOL, ON_TIER, ON_REMOTE_TIER. `token_ids`: of all blocks, if they were to be reported; never shown."""

    namespace: int
    keys: list[bytes]
    hashes: list[bytes]
    parent: bytes | None
    media: bytes
    block_size: int
    lora_id: int | None
    lora_name: str | None
    group: int | None
    token_ids: list[int]


class EventsMissed(CacheEvent, tag="missed", frozen=True):
    """This many events were not delivered because the bus was full."""

    events: int


class TierStateChanged(CacheEvent, tag="tier_state", frozen=True):
    """A tier's breaker moved. `what`: reads or writes; `state`: closed (the tier is used), open (it is not called)."""

    tier: str
    what: str
    state: str
    error: str


class TierListChanged(CacheEvent, tag="tier_changed", frozen=True):
    """A tier was added to a running server, drained, removed or reconfigured."""

    tier: str
    action: str


class TiersRecounted(CacheEvent, tag="recounted", frozen=True):
    """The tiers may have any number of objects more or less than was reported: a medium was listed, or another server
    has cleared namespaces."""


class LookupAnswered(CacheEvent, tag="lookup", frozen=True):
    """A lookup that reached the server, so not one answered by the index. `hits`: its keys that are in the L1 now;
    `loaded`: of these, those that tiers loaded for it; `reasons`: why the others missed, and `behind_a_miss` for those
    after the end of a prefix; `tiers`: whether any was asked."""

    namespace: int
    keys: int
    hits: int
    loaded: int
    reasons: dict[str, int]
    tiers: bool
    duration_s: float


class EvictionChanged(CacheEvent, tag="eviction_changed", frozen=True):
    """The eviction policy orders otherwise from now on. `reason`: its own words."""

    policy: str
    reason: str


class LeaseTimedOut(CacheEvent, tag="lease_expired", frozen=True):
    """A session did not answer in time."""

    session: int
    lease: int
    kind: str


class SlotsQuarantined(CacheEvent, tag="quarantined", frozen=True):
    """Slots wait for a writer that may still be writing. `row`: the worker's; -1: a tier's lane."""

    slots: int
    row: int


class SessionOpened(CacheEvent, tag="session_opened", frozen=True):
    """A client said hello."""

    session: int
    client: str
    carrier: str
    pid: int
    uid: int


class SessionClosed(CacheEvent, tag="session_ended", frozen=True):
    """A session has ended. `how`: goodbye, die, drop, return (it came back as another), shut (the server stops)."""

    session: int
    client: str
    how: str


class PoolAdopted(CacheEvent, tag="adopted", frozen=True):
    """The server continues with the pool of a dead one."""

    objects: int
    nbytes: int


class CacheCleared(CacheEvent, tag="cleared", frozen=True):
    """A clear has begun: nothing in its scope is found any more. `namespace` None: everything."""

    namespace: int | None
    tiers: bool
    session: int


class DrainBegun(CacheEvent, tag="drain", frozen=True):
    """The server accepts nothing new, and ends within `drain_s`."""

    drain_s: float


class ServerFault(CacheEvent, tag="fault", frozen=True):
    """A fault that the server survived, in itself or in a plugin; its log has the traceback."""

    where: str


EVENTS: tuple[type[CacheEvent], ...] = (
    *ObjectsEvent.__subclasses__(),
    *(kind for kind in CacheEvent.__subclasses__() if kind is not ObjectsEvent),
)

Maker = Callable[..., Iterable[CacheEvent]]
"""`maker(at_s, *arguments)`: makes the events of what the loop queued. Called on the bus's thread."""

_NAMESPACE = attrgetter("namespace")


class _Object(Protocol):
    """The fields of an object that never change, so that another thread may read them."""

    @property
    def key(self) -> bytes: ...
    @property
    def namespace(self) -> int: ...
    @property
    def nbytes(self) -> int: ...


def of_objects(
    at_s: float, kind: type[ObjectsEvent], objects: Sequence[_Object], /, **more: str
) -> Iterator[CacheEvent]:
    """An event for each namespace among them, in order."""
    for namespace, run in groupby(objects, key=_NAMESPACE):
        items = list(run)
        keys, nbytes = [item.key for item in items], sum([item.nbytes for item in items])
        yield kind(at_s=at_s, namespace=namespace, keys=keys, nbytes=nbytes, **more)


def one(at_s: float, kind: type[CacheEvent], /, **fields: object) -> Iterator[CacheEvent]:
    """One event. An event may have a field of any name, `kind` too."""
    yield kind(at_s=at_s, **fields)
