"""What one tier holds: bytes, objects, and the order of eviction. Pure; on the loop's thread.

Built by `scan` after a start. While the scan runs, stored objects are counted and kept aside in the order of their use;
the scanned objects are all older, and enter the policy first. If several servers share the medium, it is scanned again
and again to find what others stored and deleted.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

from lmcache_core.kernel.guard import GuardedPolicy
from lmcache_core.kernel.tenants import POSITIONS, Tenancy
from lmcache_core.limits import KEY_BYTES
from lmcache_core.policies.contracts import Entry, EvictionPolicy
from lmcache_core.tiers.contract import ScanEntry
from lmcache_core.tiers.object.format import TIER_KEY_BYTES, split_tier_key
from lmcache_core.tiers.tier.order import Watch

InDoubt = Callable[[Mapping[bytes, int]], None]
"""Called with keys, and their bytes, that a scan has found and that may have left since."""
_SHARDS = 1 << 10  # a dictionary stalls the loop while it grows: small ones do not
_DECAY = 8  # how many smaller objects it takes to lower the expectation by about as much


class TierEntry:
    """One object on the tier, as its eviction policy sees it."""

    __slots__ = ("damaged", "holds", "listed", "nbytes", "newer", "older", "policy_data", "seen", "tier_key")

    def __init__(self, tier_key: bytes, nbytes: int) -> None:
        self.tier_key = tier_key
        self.nbytes = nbytes
        self.holds = 0  # 1 while its delete is under way
        self.damaged = False  # it takes its room, but counts as missing: it is to be stored again
        self.listed = False  # the policy has it
        self.seen = 0  # the last rescan that found it, or that ran when it was used
        self.older: Any = None
        self.newer: Any = None
        self.policy_data: Any = None

    @property
    def key(self) -> bytes:
        return self.tier_key[:KEY_BYTES]

    @property
    def namespace(self) -> int:
        return split_tier_key(self.tier_key)[1] if len(self.tier_key) == TIER_KEY_BYTES else 0

    @property
    def epoch(self) -> int:
        return split_tier_key(self.tier_key)[2] if len(self.tier_key) == TIER_KEY_BYTES else 0


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
        self.bytes_leaving = 0  # by deletes under way
        self.objects = 0
        self.scanning = False
        self.leads = True  # on a shared medium another server may keep the headroom
        self._rescan = 0
        self._shards: list[dict[bytes, TierEntry]] = [{} for _ in range(_SHARDS)]
        self._aside: dict[TierEntry, None] = {}  # in the order of use, until the scan is done
        self._scanned: Iterator[ScanEntry] = iter(())
        if policy is not None and capacity_bytes is not None:
            policy.resize(capacity_bytes)
        self.on_removed: Callable[[list[bytes]], None] | None = None  # called with the keys that have left
        self._charged: dict[int, int] = {}  # bytes last told to `charge`, by namespace
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
        """Whether it is on the tier, sound, and not being deleted."""
        entry = self._shard(tier_key).get(tier_key)
        return entry is not None and not entry.holds and not entry.damaged

    def nbytes_of(self, tier_key: bytes) -> int | None:
        """The bytes it takes, or None if it is not accounted."""
        entry = self._shard(tier_key).get(tier_key)
        return None if entry is None else entry.nbytes

    def known(self, tier_keys: Sequence[bytes]) -> set[bytes]:
        """Those of the keys that it knows."""
        return {tier_key for tier_key in tier_keys if self.knows(tier_key)} if self.objects else set()

    def add(self, objects: Sequence[tuple[bytes, int]]) -> None:
        """These objects, with their bytes, are on the tier now. Known ones count as used, and get their new size."""
        known: list[bytes] = []
        fresh: list[TierEntry] = []
        for tier_key, nbytes in objects:
            entry = self._shard(tier_key).get(tier_key)
            if entry is not None:
                if entry.nbytes == nbytes:
                    entry.seen, entry.damaged = self._rescan, False
                    known.append(tier_key)
                    continue
                self._remove([tier_key])
                fresh = [other for other in fresh if other is not entry]  # twice in a batch, with two sizes
            entry = TierEntry(tier_key, nbytes)
            entry.seen = self._rescan
            self._count(entry)
            fresh.append(entry)
        if self.policy is None:
            return
        if self.tenancy is not None and fresh:
            self.tenancy.look()
        if self.scanning:
            for entry in fresh:
                self._aside[entry] = None
                self._charge(entry.namespace, entry.nbytes)
        elif fresh:
            self._list(fresh)
        self.touch(known)

    def damaged(self, tier_keys: Sequence[bytes]) -> None:
        """The objects under these keys are damaged: they wait to be removed or overwritten."""
        for tier_key in tier_keys:
            entry = self._shard(tier_key).get(tier_key)
            if entry is not None:
                entry.damaged = True

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

    def _remove(self, tier_keys: Sequence[bytes]) -> list[bytes]:
        """Returns the keys that were there."""
        listed: list[TierEntry] = []
        removed: list[bytes] = []
        for tier_key in tier_keys:
            entry = self._shard(tier_key).pop(tier_key, None)
            if entry is None:
                continue
            removed.append(tier_key)
            self.bytes_used -= entry.nbytes
            self.objects -= 1
            if entry.holds:
                self.bytes_leaving -= entry.nbytes
                self._charge(entry.namespace, entry.nbytes)
            if self._aside.pop(entry, entry) is None:
                self._charge(entry.namespace, -entry.nbytes)
            if entry.listed:
                listed.append(entry)
                entry.listed = False
        if listed and self.policy is not None:
            self.policy.remove(listed)
        return removed

    def shards(self) -> Iterator[list[TierEntry]]:
        """All entries, a small part at a time: a walk over everything takes many turns of the loop."""
        for shard in self._shards:
            yield list(shard.values())

    def _count(self, entry: TierEntry) -> None:
        self._shard(entry.tier_key)[entry.tier_key] = entry
        self.bytes_used += entry.nbytes
        self.objects += 1

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
            entry.holds = 1
            self.bytes_leaving += entry.nbytes
            self._charge(entry.namespace, -entry.nbytes)
        if self.policy is not None:
            self.policy.held([entry for entry in entries if entry.listed])

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
        entry.holds = 0
        entry.seen = self._rescan  # a page that was listed meanwhile says nothing about it
        self.bytes_leaving -= entry.nbytes
        self._charge(entry.namespace, entry.nbytes)
        if entry.listed and self.policy is not None:
            self.policy.released([entry])

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
        self._scanned = heapq.merge(*pages, key=lambda entry: entry.used_at_s)

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
                self.add([(found.key, found.nbytes)])
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
