"""KV events for routers: which engine blocks this server's cache has, published in vLLM's format.

Keys cannot be turned back into an engine's hashes, so engines report them (`client.report_block_allocation`); the
server keeps a report as long as the object is in the pool or on a tier. A router that subscribes learns what is stored
and removed from then on, and can ask for what it missed (`replay`) or for everything there is (`snapshot`, which vLLM
lacks).
"""

from __future__ import annotations

import threading
from array import array
from collections import Counter, OrderedDict, deque
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from lmcache_core.observe.events import (
    IN_POOL,
    NOT_KNOWN,
    ON_REMOTE_TIER,
    ON_TIER,
    BlocksReported,
    CacheCleared,
    CacheEvent,
    EventsMissed,
    ObjectsAdmitted,
    ObjectsEvicted,
    ObjectsLoaded,
    ObjectsOnTiers,
    ObjectsRemoved,
    TierListChanged,
    TiersRecounted,
)
from lmcache_core.observe.subscriber import EventSubscriber, SubscriberContext
from lmcache_kv_events.batches import in_batches, merged
from lmcache_kv_events.format import (
    KvAllCleared,
    KvBlocksRemoved,
    KvBlocksStored,
    KvEvent,
    Locality,
    Medium,
    as_hash,
)
from lmcache_kv_events.limits import ASKED_KEYS, KNOWN_BYTES_MAX, PENDING_BYTES_MAX, PENDING_MAX
from lmcache_kv_events.publisher import Publisher, Snapshot
from lmcache_kv_events.settings import KvEventsSettings

_PLACES: dict[int, tuple[Medium, Locality]] = {
    IN_POOL: ("CPU", "LOCAL"),
    ON_TIER: ("STORAGE", "LOCAL"),
    ON_REMOTE_TIER: ("STORAGE", "REMOTE"),
}
_TIERS = (ON_TIER, ON_REMOTE_TIER)
_Key = tuple[int, bytes]


class _Blocks(NamedTuple):
    """An engine's report about one object."""

    hashes: tuple[bytes, ...]
    parent: bytes | None
    block_size: int
    lora_id: int | None
    lora_name: str | None
    group: int | None
    token_ids: array[int]

    @property
    def nbytes(self) -> int:
        """What it costs in memory, about: a bytes object has 33 bytes around it, and its place 8."""
        return 640 + sum(map(len, self.hashes)) + 41 * len(self.hashes) + 4 * len(self.token_ids)


class _KnownBlocks:
    __slots__ = ("blocks", "media")

    def __init__(self, blocks: _Blocks) -> None:
        self.blocks = blocks
        self.media = 0


class KvEvents(EventSubscriber):
    """Turns events about objects into events about an engine's blocks. `hear` makes and queues batches; a separate
    thread owns the sockets."""

    wants_blocks = True

    def __init__(self, settings: KvEventsSettings, context: SubscriberContext) -> None:
        self.wants_tokens = settings.token_ids
        self._settings = settings
        self._known: OrderedDict[_Key, _KnownBlocks] = OrderedDict()
        self._known_bytes = 0
        # How many objects have a block in a place: objects of two namespaces may have the same one.
        self._holders: Counter[tuple[int, int | None, int | bytes]] = Counter()
        # Reported, and stored nowhere: not yet, or not now. Engines decide how many and how large these are.
        self._pending: OrderedDict[_Key, int] = OrderedDict()  # with their bytes
        self._pending_bytes = 0
        self._ask_tiers = context.ask_tiers
        self._unsure: deque[_Key] = deque()  # to ask the tiers about: they may have these, or not any more
        self._querying = False  # and one page of them has no answer yet
        self._lock = threading.Lock()  # of `_known`: a snapshot reads it
        self._publisher = Publisher(settings, self._snapshot)

    def hear(self, events: Sequence[CacheEvent]) -> None:
        changes: list[KvEvent] = []
        with self._lock:
            for event in events:
                self._take(event, changes)
            if changes:
                for batch in in_batches(merged(changes)):
                    self._publisher.publish(events[-1].at_s, batch)

    def close(self) -> None:
        self._publisher.close()

    # --- what it means for blocks ---------------------------------------------------------------------------

    def _take(self, event: CacheEvent, changes: list[KvEvent]) -> None:
        match event:
            case BlocksReported():
                self._reported(event, changes)
            case ObjectsAdmitted() | ObjectsLoaded():
                self._arrived(event.namespace, event.keys, IN_POOL, changes)
            case ObjectsOnTiers():
                self._seen(event, changes)
            case ObjectsEvicted() | ObjectsRemoved():
                self._left(event.namespace, event.keys, IN_POOL, changes)
            case CacheCleared(tiers=True, namespace=None):
                self._clear_all(changes)
            case CacheCleared(tiers=True, namespace=int(namespace)):
                keys = [key for owner, key in self._known if owner == namespace]
                for place in _TIERS:
                    self._left(namespace, keys, place, changes)
            case EventsMissed():
                self._forget_all(changes)  # better to report too little than something wrong
            case TierListChanged() | TiersRecounted():
                self._unsure = deque(self._known)
                self._ask_next()

    def _seen(self, event: ObjectsOnTiers, changes: list[KvEvent]) -> None:
        """The tiers of a kind say what they have together: what one of them has lost, another may have."""
        found = list(zip(event.keys, event.there, strict=True))
        for place in _TIERS:
            there = [key for key, at in found if at & place]
            gone = [key for key, at in found if not at & (place | place << NOT_KNOWN)]
            self._arrived(event.namespace, there, place, changes)
            self._left(event.namespace, gone, place, changes)
        if event.asked and self._querying:
            self._querying = False
            self._ask_next()

    def _ask_next(self) -> None:
        """Ask about the next page of what is unsure; the answer comes as an event, in order with all others."""
        while self._unsure and not self._querying:
            namespace = self._unsure[0][0]
            keys: list[bytes] = []
            while self._unsure and self._unsure[0][0] == namespace and len(keys) < ASKED_KEYS:
                name = self._unsure.popleft()
                if name in self._known:
                    keys.append(name[1])
            if keys:
                self._querying = True
                self._ask_tiers(namespace, keys)

    def _reported(self, event: BlocksReported, changes: list[KvEvent]) -> None:
        each = len(event.hashes) // len(event.keys)
        tokens = each * event.block_size
        for at, key in enumerate(event.keys):
            first = at * each
            blocks = _Blocks(
                tuple(event.hashes[first : first + each]),
                event.hashes[first - 1] if first else event.parent,
                event.block_size,
                event.lora_id,
                event.lora_name,
                event.group,
                array("I", event.token_ids[at * tokens : (at + 1) * tokens]),
            )
            name = (event.namespace, key)
            known = self._known.get(name)
            if known is not None and known.blocks == blocks:
                self._arrived_at(name, known, event.media[at], changes)
                continue
            if known is not None:
                self._forget(name, changes)
            self._make_room(blocks.nbytes, changes)
            self._known[name] = known = _KnownBlocks(blocks)
            self._known_bytes += blocks.nbytes
            if event.media[at]:
                self._arrived_at(name, known, event.media[at], changes)
            else:
                self._wait(name, changes)

    def _wait(self, name: _Key, changes: list[KvEvent]) -> None:
        """It is stored nowhere now: keep the engine's report, for when it is."""
        nbytes = self._known[name].blocks.nbytes
        self._pending_bytes += nbytes - self._pending.pop(name, 0)
        self._pending[name] = nbytes
        while len(self._pending) > PENDING_MAX or self._pending_bytes > PENDING_BYTES_MAX:
            self._forget(next(iter(self._pending)), changes)

    def _arrived_at(self, name: _Key, known: _KnownBlocks, media: int, changes: list[KvEvent]) -> None:
        for place in _PLACES:
            if media & place and not known.media & place:
                self._arrive(name, known, place, changes)

    def _make_room(self, nbytes: int, changes: list[KvEvent]) -> None:
        while self._known and (
            len(self._known) >= self._settings.blocks_max or self._known_bytes + nbytes > KNOWN_BYTES_MAX
        ):
            self._forget(next(iter(self._known)), changes)

    def _arrived(self, namespace: int, keys: Iterable[bytes], place: int, changes: list[KvEvent]) -> None:
        for key in keys:
            known = self._known.get((namespace, key))
            if known is not None and not known.media & place:
                self._arrive((namespace, key), known, place, changes)

    def _arrive(self, name: _Key, known: _KnownBlocks, place: int, changes: list[KvEvent]) -> None:
        if not known.media:
            self._pending_bytes -= self._pending.pop(name, 0)
        known.media |= place
        event = self._stored(known.blocks, place)
        self._holders.update((place, event.group_idx, each) for each in event.block_hashes)
        changes.append(event)

    def _left(self, namespace: int, keys: Iterable[bytes], place: int, changes: list[KvEvent]) -> None:
        for key in keys:
            known = self._known.get((namespace, key))
            if known is not None and known.media & place:
                known.media &= ~place
                changes += self._removed(known.blocks, place)
                if not known.media:
                    self._wait((namespace, key), changes)

    def _forget(self, name: _Key, changes: list[KvEvent]) -> None:
        known = self._known.pop(name)
        self._known_bytes -= known.blocks.nbytes
        self._pending_bytes -= self._pending.pop(name, 0)
        for place in _PLACES:
            if known.media & place:
                changes += self._removed(known.blocks, place)

    def _clear_all(self, changes: list[KvEvent]) -> None:
        """Nothing is stored any more; what is stored from now on may have been reported before."""
        changes[:] = [KvAllCleared()]
        self._holders.clear()
        for name in [name for name, known in self._known.items() if known.media]:
            self._known[name].media = 0
            self._wait(name, changes)

    def _forget_all(self, changes: list[KvEvent]) -> None:
        self._known.clear()
        self._holders.clear()
        self._pending.clear()
        self._known_bytes = self._pending_bytes = 0
        self._unsure.clear()
        self._querying = False
        changes[:] = [KvAllCleared()]

    def _stored(self, blocks: _Blocks, place: int) -> KvBlocksStored:
        shape = self._settings.hashes
        medium, locality = _PLACES[place]
        return KvBlocksStored(
            [as_hash(each, shape) for each in blocks.hashes],
            None if blocks.parent is None else as_hash(blocks.parent, shape),
            list(blocks.token_ids),
            blocks.block_size,
            blocks.lora_id,
            medium,
            blocks.lora_name,
            group_idx=blocks.group,
            locality=locality,
        )

    def _removed(self, blocks: _Blocks, place: int) -> list[KvBlocksRemoved]:
        """Of the blocks that no other object has there; empty if there is none."""
        gone: list[int | bytes] = []
        for each in blocks.hashes:
            holder = place, blocks.group, as_hash(each, self._settings.hashes)
            self._holders[holder] -= 1
            if self._holders[holder] <= 0:
                del self._holders[holder]
                gone.append(holder[-1])
        medium, locality = _PLACES[place]
        return [KvBlocksRemoved(gone, medium, blocks.group, locality)] if gone else []

    def _snapshot(self) -> Snapshot:
        """Everything that is stored, and the number of the last batch it includes; -1: none."""
        with self._lock:  # briefly, also where a million objects are known: `hear` waits for it
            there = [(known.blocks, known.media) for known in self._known.values()]
            seq = self._publisher.last_seq

        def events() -> Iterator[KvEvent]:
            return (self._stored(blocks, at) for blocks, media in there for at in _PLACES if media & at)

        return Snapshot(seq, events)
