"""Replay a request trace through a pool with one tier behind it: what the tier hits, and what is written for it."""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple

from lmcache_core.limits import KEY_BYTES
from lmcache_core.policies.contracts import EvictionPolicy, StoreCandidate, StorePolicy, TierView
from lmcache_lab.simulation import Order, SimulatedEntry, check_capacity
from lmcache_lab.workloads import Trace


class TieredResult(NamedTuple):
    """In blocks. `hits` and `tier_hits`: leading blocks that were in the pool, and in the tier. `written`: to the tier.
    `tier`: its capacity."""

    trace: str
    policy: str
    store_policy: str
    capacity: int
    tier: int
    hits: int
    tier_hits: int
    written: int
    references: int

    @property
    def hit_rate(self) -> float:
        return self.hits / self.references if self.references else 0.0

    @property
    def tier_hit_rate(self) -> float:
        return self.tier_hits / self.references if self.references else 0.0

    @property
    def writes_per_hit(self) -> float | None:
        return self.written / self.tier_hits if self.tier_hits else None


class _Tier:
    """Keeps what was stored or read last."""

    def __init__(self, capacity: int) -> None:
        self.view = TierView("tier", healthy=True, capacity_bytes=capacity)
        self.written = 0
        self._capacity = capacity
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def __contains__(self, block: int) -> bool:
        return block in self._blocks

    def read(self, block: int) -> None:
        self._blocks.move_to_end(block)

    def store(self, block: int) -> None:
        if block not in self._blocks:
            self.written += 1
            self._blocks[block] = None
            if len(self._blocks) > self._capacity:
                self._blocks.popitem(last=False)


class _Pool:
    """The residents of an L1, and how often it has taken one in."""

    def __init__(self, policy: EvictionPolicy, capacity: int) -> None:
        policy.resize(capacity)
        self._policy = policy
        self._capacity = capacity
        self._resident: dict[int, tuple[SimulatedEntry, int]] = {}
        self._generation = 0

    def __contains__(self, block: int) -> bool:
        return block in self._resident

    def drop(self, block: int) -> None:
        """The store policy wants it in the tier only."""
        if block in self._resident:
            self._policy.remove((self._resident.pop(block)[0],))

    def use(self, block: int) -> tuple[StoreCandidate, bool] | None:
        """Access it, or take it in (True). None: the policy named no victim for it."""
        fresh = block not in self._resident
        if fresh and len(self._resident) >= self._capacity:
            victims = self._policy.victims(1)
            self._policy.remove(victims)
            for victim in victims:
                del self._resident[int.from_bytes(victim.key, "big")]
            if not victims:
                return None
        if fresh:
            self._generation += 1
            entry = SimulatedEntry(block.to_bytes(KEY_BYTES, "big"))
            self._resident[block] = entry, self._generation
            self._policy.insert((entry,))
        else:
            self._policy.access((self._resident[block][0],))
        entry, generation = self._resident[block]
        return StoreCandidate(entry.key, 0, 1, False, generation), fresh


def replay_tiered(
    trace: Trace,
    names: tuple[str, str],
    policy: EvictionPolicy,
    store_policy: StorePolicy,
    capacity: int,
    tier: int,
    order: Order = Order.FORWARD,
) -> TieredResult:
    """As `replay`, with a tier of `tier` blocks, which loses first what was used longest ago. Leading blocks that the
    pool lacks and the tier has are loaded, and stay in the pool. `names`: of the two policies, for the result."""
    check_capacity(capacity)
    check_capacity(tier)
    pool, behind = _Pool(policy, capacity), _Tier(tier)
    hits = tier_hits = references = 0
    for blocks in trace.requests:
        found = 0
        for block in blocks:
            if block in pool:
                hits += 1
            elif block in behind:
                tier_hits += 1
                behind.read(block)
            else:
                break
            found += 1
        references += len(blocks)
        leading = set(blocks[:found])
        read: dict[int, StoreCandidate] = {}
        computed: dict[int, StoreCandidate] = {}
        for block in blocks if order is Order.FORWARD else blocks[::-1]:
            used = pool.use(block)
            if used is None:
                continue
            if block in leading:
                read[block] = used[0]._replace(reused=True)
            elif used[1]:
                computed[block] = used[0]
        for batch in (read, computed) if store_policy.wants_reuse else (computed,):
            plan = store_policy.plan(list(batch.values()), [behind.view])
            stored = list(batch)
            for at in plan.targets.get(behind.view.name, ()):
                behind.store(stored[at])
            for at in plan.drop:
                pool.drop(stored[at])
    return TieredResult(trace.name, *names, capacity, tier, hits, tier_hits, behind.written, references)
