"""What one tier holds: bytes, objects, and the order of eviction. Pure; on the loop's thread.

Built by `scan` after a start. While the scan runs, stored objects are counted and kept aside in the order of their use;
the scanned objects are all older, and enter the policy first. If several servers share the medium, it is scanned again
and again to find what others stored and deleted.
"""

from __future__ import annotations

import heapq
import random
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

from lmcache_core.kernel.guard import GuardedPolicy
from lmcache_core.kernel.tenants import POSITIONS, Tenancy
from lmcache_core.limits import KEY_BYTES, TIER_DROPPED_MAX, TIER_STRANGERS_MAX, TIER_SUSPECTS_MAX
from lmcache_core.policies.contracts import Entry, EvictionPolicy
from lmcache_core.tiers.contract import ScanEntry
from lmcache_core.tiers.object.format import STORED_BYTES_MAX, TIER_KEY_BYTES, split_tier_key
from lmcache_core.tiers.tier.order import Watch

InDoubt = Callable[[Mapping[bytes, int]], None]
"""Called with keys, and their bytes, that a scan has found and that may have left since."""
_SHARDS = 1 << 10  # a dictionary stalls the loop while it grows: small ones do not
_SAMPLE_LOOKS = 8  # entries of a shard, for a sample
_LEAVES, _HANGS = 1, 2  # of an entry whose delete is under way: its room is about to be free, or may never be
_NEAR_BITS, _FEW_OBJECTS = 3, 8  # an object is alone if no other has an eighth of its size, of at least so many
_DECAY = 8  # how many smaller objects it takes to lower the expectation by about as much


class TierEntry:
    """One object on the tier, as its eviction policy sees it."""

    __slots__ = ("holds", "listed", "nbytes", "newer", "older", "ours", "policy_data", "seen", "suspect", "tier_key")

    def __init__(self, tier_key: bytes, nbytes: int, ours: int = -1) -> None:
        self.tier_key = tier_key
        self.nbytes = nbytes
        self.ours = ours  # proven, in the accounts' `trust` of that time: we have stored it, or loaded it whole
        self.holds = 0  # _LEAVES or _HANGS while its delete is under way
        self.suspect = False  # it takes its room, but counts as missing: it is to be stored again
        self.listed = False  # the policy has it
        self.seen = 0  # the last rescan that found it, or that ran when it was used
        self.older: Any = None
        self.newer: Any = None
        self.policy_data: Any = None

    @property
    def leaves(self) -> bool:
        """Whether its delete is under way and its room is about to be free."""
        return self.holds == _LEAVES

    @property
    def key(self) -> bytes:
        return self.tier_key[:KEY_BYTES]

    @property
    def namespace(self) -> int:
        return split_tier_key(self.tier_key)[1] if len(self.tier_key) == TIER_KEY_BYTES else 0

    @property
    def epoch(self) -> int:
        return split_tier_key(self.tier_key)[2] if len(self.tier_key) == TIER_KEY_BYTES else 0


class DroppedObject:
    """One object that is to be deleted. `stores`: of its key, begun since then and under way."""

    __slots__ = ("stores",)

    def __init__(self) -> None:
        self.stores = 0


class Accounting:
    """Entries by tier key, the bytes they take, and the victims when they take too many.

    `capacity_bytes` None: unlimited. Without a policy nothing is evicted, and a full tier answers FULL.
    """

    def __init__(
        self,
        capacity_bytes: int | None,
        watermark: float,
        evict_ratio: float,
        policy: EvictionPolicy | None,
        policy_name: str = "",
    ) -> None:
        """`policy_name`: the policy's name for people; without one, the name of its class."""
        self.capacity_bytes = capacity_bytes
        self._watermark = watermark
        self._evict_ratio = evict_ratio
        self.policy = policy
        self.policy_name = policy_name or type(policy.inner if isinstance(policy, GuardedPolicy) else policy).__name__
        self.bytes_used = 0
        self.bytes_reserved = 0  # by stores under way
        self.bytes_guessed = 0  # of that, for objects that may turn out smaller: nothing is evicted for them
        self.bytes_leaving = 0  # by deletes under way, without those that hang: nobody counts on their room
        self.objects = 0
        self.scanning = False
        self.leads = True  # on a shared medium another server may keep the headroom
        self._rescan = 0
        self._trust = 0  # counts the media that may have been here
        self._shards: list[dict[bytes, TierEntry]] = [{} for _ in range(_SHARDS)]
        self._sampled = 0  # the shard that `sample` looked at last
        self._dropped: dict[bytes, DroppedObject] = {}  # to be deleted, and not stored again since: the oldest first
        self._suspects: dict[bytes, None] = {}  # that have no entry yet: a load was faster than the scan
        self._foreign: dict[bytes, float] = {}  # names in our form that are not ours → until when they are skipped
        self._aside: dict[TierEntry, None] = {}  # in the order of use, until the scan is done
        self._scanned: Iterator[ScanEntry] = iter(())
        self._sizes: Counter[int] = Counter()  # objects, by the bits of their size
        if policy is not None and capacity_bytes is not None:
            policy.resize(capacity_bytes)
        # Called with the keys for which `knows` may say something else from now on, but not with those of a scan.
        self.on_changed: Callable[[list[bytes]], None] | None = None
        self.on_removed: Callable[[list[bytes]], None] | None = None  # called with the keys that have left
        # Called with all keys that are in the accounts from now on, or still, however they were found: `Reclaim`
        # deletes what a clear has made unreachable.
        self.on_counted: Callable[[Sequence[bytes]], None] = lambda keys: None
        self._charged: dict[int, int] = {}  # bytes last passed to `charge`, by namespace
        self.tenancy: Tenancy | None = None  # without an eviction policy there is none
        if isinstance(policy, GuardedPolicy):
            self.tenancy = Tenancy(policy, self._bytes_taken, self._charged, self)

    # --- owners ---------------------------------------------------------------------------------------------
    def reserve(self, namespace: int, nbytes: int) -> None:
        """Reserve bytes for a namespace (negative: release them)."""
        self.bytes_reserved += nbytes
        self._charge(namespace, nbytes)

    def _charge(self, namespace: int, nbytes: int) -> None:
        left = self._charged.get(namespace, 0) + nbytes
        if left:
            self._charged[namespace] = left
        else:
            self._charged.pop(namespace, None)
        if self.policy is not None and self.policy.wants_charges:
            self.policy.charge(namespace, nbytes)

    # --- entries ------------------------------------------------------------------------------------------
    def _shard(self, tier_key: bytes) -> dict[bytes, TierEntry]:
        # The bits that the shard's own dictionary uses last. A bytes object caches its hash: it is computed once.
        return self._shards[hash(tier_key) >> 40 & _SHARDS - 1]

    def knows(self, tier_key: bytes) -> bool:
        """Whether it is on the tier, not suspect, and neither being deleted nor to be deleted."""
        entry = self._shard(tier_key).get(tier_key)
        return entry is not None and not entry.holds and not entry.suspect and tier_key not in self._dropped

    def nbytes_of(self, tier_key: bytes) -> int | None:
        """The bytes it takes, or None if it is not accounted."""
        entry = self._shard(tier_key).get(tier_key)
        return None if entry is None else entry.nbytes

    def known(self, tier_keys: Sequence[bytes]) -> set[bytes]:
        """Those of the keys that it knows."""
        return {tier_key for tier_key in tier_keys if self.knows(tier_key)} if self.objects else set()

    def add(self, objects: Sequence[tuple[bytes, int]], *, ours: bool = False) -> None:
        """These objects, with their bytes, are on the tier now. Known ones count as used, and get their new size.
        `ours`: we have just stored them, or loaded them whole."""
        self._changed(self._add(objects, ours=ours))

    def _changed(self, tier_keys: list[bytes]) -> None:
        if tier_keys and self.on_changed is not None:
            self.on_changed(tier_keys)

    def _add(self, objects: Sequence[tuple[bytes, int]], *, ours: bool) -> list[bytes]:
        """Returns the keys that nobody could find before."""
        added = self._enter(objects, ours=ours)
        self.on_counted([tier_key for tier_key, _ in objects])
        return added

    def _enter(self, objects: Sequence[tuple[bytes, int]], *, ours: bool) -> list[bytes]:
        known: list[bytes] = []
        fresh: list[TierEntry] = []
        sound: list[bytes] = []
        for tier_key, nbytes in objects:
            entry = self._shard(tier_key).get(tier_key)
            if entry is not None:
                if entry.nbytes == nbytes:
                    entry.seen = self._rescan
                    if ours:
                        if entry.suspect:
                            sound.append(tier_key)
                        entry.ours, entry.suspect = self._trust, False
                    known.append(tier_key)
                    continue
                self._remove([tier_key])
                if entry.suspect:
                    self._suspects[tier_key] = None
                fresh = [other for other in fresh if other is not entry]  # twice in a batch, with two sizes
            entry = TierEntry(tier_key, nbytes, self._trust if ours else -1)
            entry.seen = self._rescan
            self._count(entry)
            fresh.append(entry)
        added = [entry.tier_key for entry in fresh] + sound
        if self.policy is None:
            return added
        if self.tenancy is not None and fresh:
            self.tenancy.look()
        if self.scanning:
            for entry in fresh:
                self._aside[entry] = None
                self._charge(entry.namespace, entry.nbytes)
        elif fresh:
            self._list(fresh)
        self.touch(known)
        return added

    def suspect(self, tier_keys: Iterable[bytes], *, suspect: bool = True) -> None:
        """The objects under these keys are not to be trusted (or are again): their next writers replace them. What
        is not known yet is suspect when a scan finds it."""
        changed: list[bytes] = []
        for tier_key in tier_keys:
            entry = self._shard(tier_key).get(tier_key)
            if entry is None:
                self._suspects.pop(tier_key, None)
                if suspect:
                    self._suspects[tier_key] = None
                    if len(self._suspects) > TIER_SUSPECTS_MAX:
                        del self._suspects[next(iter(self._suspects))]
            elif entry.suspect is not suspect:
                entry.suspect = suspect
                changed.append(tier_key)
        self._changed(changed)

    def drop(self, tier_keys: Sequence[bytes]) -> None:
        """These are to be deleted, also what a store that is under way makes of them: nobody finds them from now on."""
        known = list(self.known(tier_keys))
        for tier_key in tier_keys:
            self._dropped.pop(tier_key, None)
            self._dropped[tier_key] = DroppedObject()
        while len(self._dropped) > TIER_DROPPED_MAX:
            del self._dropped[next(iter(self._dropped))]
        self._changed(known)

    @property
    def drops(self) -> int:
        """How many objects are still to be deleted because they were dropped."""
        return len(self._dropped)

    def drops_of(self, tier_keys: Iterable[bytes]) -> dict[bytes, DroppedObject]:
        """The drops of these keys until now, for `end_drops`."""
        dropped = self._dropped
        return {key: dropped[key] for key in tier_keys if key in dropped} if dropped else {}

    def end_drops(self, drops: Mapping[bytes, DroppedObject]) -> None:
        """What was dropped then is deleted, or has been stored again. What was dropped since still is."""
        ended = [key for key, drop in drops.items() if self._dropped.get(key) is drop]
        for tier_key in ended:
            del self._dropped[tier_key]
        self._changed([key for key in ended if self.knows(key)])

    def is_unwanted(self, tier_key: bytes) -> bool:
        """Whether it is to be deleted because it was dropped, and no store of it has begun since."""
        drop = self._dropped.get(tier_key)
        return drop is not None and not drop.stores

    def proven(self, tier_keys: Sequence[bytes]) -> set[bytes]:
        """Those of the keys whose objects are known to be ours."""
        return {
            key for key in tier_keys if (entry := self._shard(key).get(key)) is not None and entry.ours == self._trust
        }

    def distrust(self) -> None:
        """The medium may be another one: nothing on it is known to be ours any more."""
        self._trust += 1

    def disown(self, tier_keys: Sequence[bytes], until_s: float) -> None:
        """Under these keys are objects that are not ours: forget them, and do not count them before then."""
        self.remove(tier_keys)
        for tier_key in tier_keys:
            self._foreign.pop(tier_key, None)
            self._foreign[tier_key] = until_s
            if len(self._foreign) > TIER_STRANGERS_MAX:
                del self._foreign[next(iter(self._foreign))]

    def is_counted(self, tier_key: bytes, nbytes: int, now: float) -> bool:
        """Whether what a scan has found is an object to count: a name in our form, not known as foreign, and no more
        bytes than an object can have. A sparse file of a petabyte must not evict all others."""
        if len(tier_key) != TIER_KEY_BYTES or nbytes > STORED_BYTES_MAX:
            return False
        return not self._foreign or self._foreign.get(tier_key, now) <= now

    @property
    def foreign(self) -> int:
        """Objects of others that lie under names in our form, as far as found."""
        return len(self._foreign)

    def some(self, count: int, but_not: Container[bytes]) -> list[tuple[bytes, int]]:
        """Keys and bytes of a few objects that nobody suspects."""
        found: list[tuple[bytes, int]] = []
        start = random.randrange(_SHARDS)
        for at in range(start, start + _SHARDS):
            for entry in islice(self._shards[at % _SHARDS].values(), count):
                if not entry.holds and not entry.suspect and entry.tier_key not in but_not:
                    found.append((entry.tier_key, entry.nbytes))
                    if len(found) == count:
                        return found
        return found

    def touch(self, tier_keys: Sequence[bytes]) -> None:
        """These were used."""
        if self.policy is None:
            return
        listed = []
        for tier_key in tier_keys:
            entry = self._shard(tier_key).get(tier_key)
            if entry is None:
                continue
            if entry.listed:
                listed.append(entry)
            elif self._aside.pop(entry, entry) is None:
                self._aside[entry] = None
        if listed:
            self.policy.access(listed)

    def remove(self, tier_keys: Sequence[bytes]) -> None:
        """These are no longer on the tier. Unknown keys are no error."""
        removed = self._remove(tier_keys)
        if removed and self.on_removed is not None:
            self.on_removed(removed)
        self._changed(removed)

    def _remove(self, tier_keys: Sequence[bytes]) -> list[bytes]:
        """Returns the keys that were there."""
        listed: list[TierEntry] = []
        removed: list[bytes] = []
        for tier_key in tier_keys:
            entry = self._shard(tier_key).pop(tier_key, None)
            if entry is None:
                self._suspects.pop(tier_key, None)
                continue
            removed.append(tier_key)
            self.bytes_used -= entry.nbytes
            self.objects -= 1
            self._sizes[entry.nbytes.bit_length()] -= 1
            self._returns(entry)
            if self._aside.pop(entry, entry) is None:
                self._charge(entry.namespace, -entry.nbytes)
            if entry.listed:
                listed.append(entry)
                entry.listed = False
        if listed and self.policy is not None:
            self.policy.remove(listed)
        return removed

    def sample(self, nbytes_max: int) -> TierEntry | None:
        """Some sound object of up to so many bytes, if one is found quickly: another one each time."""
        for _ in range(_SHARDS if self.objects else 0):
            self._sampled = (self._sampled + 1) % _SHARDS
            for entry in islice(self._shards[self._sampled].values(), _SAMPLE_LOOKS):
                if entry.nbytes <= nbytes_max and not entry.holds and not entry.suspect:
                    return entry
        return None

    def shards(self) -> Iterator[list[TierEntry]]:
        """All entries, a small part at a time: a walk over everything takes many turns of the loop."""
        for shard in self._shards:
            yield list(shard.values())

    def _count(self, entry: TierEntry) -> None:
        was_suspect = self._suspects.pop(entry.tier_key, entry) is None
        entry.suspect = was_suspect and entry.ours != self._trust
        self._shard(entry.tier_key)[entry.tier_key] = entry
        self.bytes_used += entry.nbytes
        self.objects += 1
        self._sizes[entry.nbytes.bit_length()] += 1

    def _list(self, entries: Sequence[TierEntry]) -> None:
        assert self.policy is not None
        for entry in entries:
            entry.listed = True
        self.policy.insert(entries)

    def resize(self, capacity_bytes: int | None, watermark: float, evict_ratio: float) -> None:
        """Set another capacity; `victims` enforces it."""
        self._watermark, self._evict_ratio = watermark, evict_ratio
        if capacity_bytes != self.capacity_bytes:
            self.capacity_bytes = capacity_bytes
            if self.policy is not None and capacity_bytes is not None:
                self.policy.resize(capacity_bytes)

    # --- room ---------------------------------------------------------------------------------------------
    def fits(self, nbytes: int) -> bool:
        """Whether this much may be stored now, counting everything under way."""
        if self.capacity_bytes is None:
            return True
        return self.bytes_used + self.bytes_reserved + nbytes <= self.capacity_bytes

    @property
    def headroom_bytes(self) -> int | None:
        """What can be stored without an eviction; None: unlimited."""
        if self.capacity_bytes is None:
            return None
        taken = self.bytes_used + self.bytes_reserved - self.bytes_leaving
        return max(0, int(self._watermark * self.capacity_bytes) - taken)

    def victims(self, wanted_bytes: int = 0, namespace: int = 0) -> list[TierEntry]:
        """What to evict now: enough to be below the watermark by `evict_ratio`, with `wanted_bytes` more of a namespace
        arriving. They count as leaving from now on; `remove` or `stays` follows for each."""
        if self.capacity_bytes is None or self.policy is None:
            return []
        self._charge(namespace, wanted_bytes)
        try:
            return self._victims(wanted_bytes)
        finally:
            self._charge(namespace, -wanted_bytes)

    def _victims(self, wanted_bytes: int) -> list[TierEntry]:
        assert self.capacity_bytes is not None
        certain = self.bytes_used + self.bytes_reserved - self.bytes_guessed
        expected = certain + wanted_bytes - self.bytes_leaving
        # A server that does not lead makes room only when there is none: two servers that both kept headroom on one
        # medium would evict the same share twice.
        over = expected - int((self._watermark if self.leads else 1.0) * self.capacity_bytes)
        if over <= 0:
            return []
        goal = max(over, int(self._evict_ratio * self.capacity_bytes)) if self.leads else over
        return self._leave(goal, needed=expected - self.capacity_bytes)

    def shrink(self) -> list[TierEntry]:
        """The medium itself is full, below the configured capacity: evict a share of what is there."""
        if self.policy is None or self.bytes_leaving:
            return []
        if self.capacity_bytes is None:
            self.policy.resize(self.bytes_used)  # this much fits, as the medium has just shown
        nbytes = max(1, int(self._evict_ratio * self.bytes_used))
        return self._leave(nbytes, needed=nbytes)

    def _leave(self, nbytes: int, needed: int) -> list[TierEntry]:
        """`needed` of these bytes are for objects that are arriving, the rest is headroom."""
        assert self.policy is not None
        named = self.policy.surplus(nbytes)
        if sum(entry.nbytes for entry in named) < needed:
            named = self.policy.victims(needed)
        chosen = [entry for entry in named if isinstance(entry, TierEntry)]
        self.leave(chosen)
        return chosen

    def leave(self, entries: Sequence[TierEntry]) -> None:
        """Their delete has begun."""
        for entry in entries:
            entry.holds = _LEAVES
            self.bytes_leaving += entry.nbytes
            self._charge(entry.namespace, -entry.nbytes)
        if self.policy is not None:
            self.policy.held([entry for entry in entries if entry.listed])
        self._changed([entry.tier_key for entry in entries])

    def stands(self, entry: TierEntry) -> bool:
        """Whether it is still the entry of its key, and not being deleted."""
        return not entry.holds and self._shard(entry.tier_key).get(entry.tier_key) is entry

    def entry_of(self, tier_key: bytes) -> TierEntry | None:
        """The entry under this key."""
        return self._shard(tier_key).get(tier_key)

    def stays(self, tier_key: bytes) -> None:
        """Its delete failed."""
        entry = self._shard(tier_key).get(tier_key)
        if entry is None or not entry.holds:
            return
        self._returns(entry)
        entry.seen = self._rescan  # a page that was listed meanwhile says nothing about it
        if entry.listed and self.policy is not None:
            self.policy.released([entry])
        self._changed([tier_key])

    def hang(self, tier_keys: Sequence[bytes]) -> None:
        """Their delete has not returned in time: they take their room until it does, and something else has to go."""
        fresh: list[TierEntry] = []
        for tier_key in tier_keys:
            entry = self._shard(tier_key).get(tier_key)
            if entry is None:
                continue
            if not entry.holds:
                fresh.append(entry)
            self._returns(entry)
            entry.holds = _HANGS
        if self.policy is not None:
            self.policy.held([entry for entry in fresh if entry.listed])
        self._changed([entry.tier_key for entry in fresh])

    def _returns(self, entry: TierEntry) -> None:
        """Its delete is over, or nobody counts on it any more."""
        if entry.leaves:
            self.bytes_leaving -= entry.nbytes
            self._charge(entry.namespace, entry.nbytes)
        entry.holds = 0

    # --- tenants ------------------------------------------------------------------------------------------
    def over_limit(self, namespace: int, wanted_bytes: int) -> int:
        """Bytes by which the namespace's owner is over its limit, with this many more arriving."""
        if self.tenancy is None or self.tenancy.policy is None:
            return 0
        self._charge(namespace, wanted_bytes)
        over = self.tenancy.over_limit(namespace)
        self._charge(namespace, -wanted_bytes)
        return over

    def victims_of(self, namespace: int, nbytes: int) -> list[TierEntry]:
        """What to evict from the namespace's owner for its own store; empty if all that may go is less than that. As
        for `victims`, `remove` or `stays` follows."""
        assert self.tenancy is not None
        chosen = [e for e in self.tenancy.victims_of(namespace, nbytes) if isinstance(e, TierEntry)]
        if sum(entry.nbytes for entry in chosen) < nbytes:
            return []
        self.leave(chosen)
        return chosen

    def step_tenants(self, objects_max: int) -> list[TierEntry]:
        """One bounded step: update owners, and return what to evict because it is over a limit. As for `victims`,
        `remove` or `stays` follows."""
        chosen: list[TierEntry] = []

        def leave(named: Sequence[Entry]) -> int:
            chosen.extend(e for e in named[:objects_max] if isinstance(e, TierEntry) and not e.holds)
            self.leave(chosen)
            return len(chosen)

        if self.tenancy is not None:
            mean = max(1, self.bytes_used // max(1, self.objects))
            self.tenancy.step(objects_max * mean, leave)
        return chosen

    def _bytes_taken(self) -> int:
        """Sums the policy's entries and the charges."""
        return self.bytes_used - sum(entry.nbytes for entry in self._aside) + sum(self._charged.values())

    def position(self, entry: Entry) -> int:
        """For `TenantWalk`: orders by shard first."""
        assert isinstance(entry, TierEntry)
        return hash(entry.tier_key) >> 34 & POSITIONS - 1

    def entries_from(self, namespaces: frozenset[int], low: int, objects_max: int) -> tuple[list[Entry], int]:
        """For `TenantWalk`: the policy's entries."""
        a_shard = POSITIONS // _SHARDS
        found: list[Entry] = []
        looked = 0
        while low < POSITIONS and looked < 4 * objects_max:
            shard = self._shards[low // a_shard]
            end = (low // a_shard + 1) * a_shard
            high = min(end, low + max(1, a_shard * objects_max // max(1, len(shard))))
            looked += len(shard)
            found += [
                entry
                for entry in shard.values()
                if entry.listed and low <= self.position(entry) < high and entry.namespace in namespaces
            ]
            low = high
        return found, low

    # --- the scan -----------------------------------------------------------------------------------------
    def scan_begins(self) -> None:
        self.scanning = True

    def scan_ended(self, pages: Sequence[Sequence[ScanEntry]]) -> None:
        """Take what the scan found; each page is sorted by `used_at_s`. `adopt` does the work."""
        sizes = Counter(found.nbytes.bit_length() for page in pages for found in page)
        believed = ([found._replace(nbytes=self._believed(found.nbytes, sizes, 1)) for found in page] for page in pages)
        self._scanned = heapq.merge(*believed, key=lambda entry: entry.used_at_s)

    def _believed(self, nbytes: int, sizes: Counter[int], itself: int) -> int:
        """The size with which a listed object is counted. One false size, of a sparse file or by a fault of the
        service, would evict all sound objects to make room: so it is no more than the tier holds and, if no other
        object comes near it, eight times the largest of them. A load or a store shows the true one."""
        if self.capacity_bytes is None:
            return nbytes
        bits = nbytes.bit_length()
        near = sum(count for each, count in sizes.items() if each >= bits - _NEAR_BITS)
        if near <= itself and sum(sizes.values()) >= _FEW_OBJECTS:
            others = (each for each, count in sizes.items() if count > 0 and each < bits - _NEAR_BITS)
            nbytes = min(nbytes, 1 << max(others, default=bits) + _NEAR_BITS)
        return min(nbytes, self.capacity_bytes)

    def adopt(self, entries_max: int, deleted: Watch, in_doubt: InDoubt) -> bool:
        """Enter the next scanned objects, oldest first. True: that was the last of them. `deleted`: what may have left
        the medium since it was listed; `in_doubt` is called with those that no running call will settle."""
        batch = list(islice(self._scanned, entries_max))
        fresh = []
        for found in batch:
            if found.key in self._shard(found.key):
                continue
            if deleted.saw(found.key):
                if deleted.undecided(found.key):
                    in_doubt({found.key: found.nbytes})
                continue
            entry = TierEntry(found.key, found.nbytes)
            entry.seen = self._rescan
            self._count(entry)
            fresh.append(entry)
        if self.policy is not None and fresh:
            self._list(fresh)
            if self.tenancy is not None:
                self.tenancy.look()
        self.on_counted([entry.tier_key for entry in fresh])
        if len(batch) == entries_max:
            return False
        self.scanning = False
        aside, self._aside = list(self._aside), {}
        if self.policy is not None and aside:
            for entry in aside:
                self._charge(entry.namespace, -entry.nbytes)
            self._list(aside)
            leaving = [entry for entry in aside if entry.holds]
            if leaving:
                self.policy.held(leaving)
        return True

    # --- again, for what others did -----------------------------------------------------------------------
    def rescan_begins(self) -> None:
        """From now until `gone` has been walked: what is neither found nor used has left the medium."""
        self._rescan += 1

    def found(self, entries: Sequence[ScanEntry], changed: Watch, in_doubt: InDoubt) -> None:
        """These are on the medium, except those `changed` since they were listed. An unknown object counts as the
        newest. `in_doubt`: as for `adopt`."""
        for found in entries:
            entry = self._shard(found.key).get(found.key)
            if changed.saw(found.key):
                if changed.undecided(found.key):
                    if entry is not None:
                        entry.seen = self._rescan
                    in_doubt({found.key: found.nbytes})
            elif entry is None or entry.nbytes != found.nbytes:
                self._add([(found.key, self._believed(found.nbytes, self._sizes, 0))], ours=False)
            else:
                entry.seen = self._rescan

    def gone(self) -> Iterator[int]:
        """Remove what the rescan did not find, a small part at a time; yields the number removed each time."""
        for shard in self.shards():
            lost = [entry for entry in shard if entry.seen != self._rescan and not entry.holds]
            self.remove([entry.tier_key for entry in lost])
            yield len(lost)


class Sizes:
    """How large objects are once encoded: for each layout, the recent maximum. If the guess is too high, room is kept
    from others until the object is encoded; if it is too low, the object must be encoded again."""

    def __init__(self) -> None:
        self._seen: dict[int, int] = {}  # fingerprint → bytes

    def learn(self, fingerprint: int, nbytes: int) -> None:
        """An object of this layout takes this many bytes."""
        seen = self._seen.get(fingerprint, nbytes)
        self._seen[fingerprint] = max(nbytes, seen - (seen - nbytes) // _DECAY)

    def expected(self, fingerprint: int) -> int | None:
        """Bytes, or None if nothing is known yet."""
        return self._seen.get(fingerprint)
