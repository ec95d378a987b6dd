"""What is read again while a tier is still to get it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from lmcache_core.policies.contracts import StoreCandidate, StorePlan, StorePolicy, TierView

from .conftest import Doubles


class Once(StorePolicy):
    """What was committed goes everywhere; its reads are looked at, and change nothing."""

    wants_reuse = True

    def plan(self, batch: Sequence[StoreCandidate], tiers: Sequence[TierView]) -> StorePlan:
        positions = [at for at, candidate in enumerate(batch) if not candidate.reused]
        return StorePlan({tier.name: positions for tier in tiers})


class Always(StorePolicy):
    """What is read goes everywhere once more."""

    wants_reuse = True

    def plan(self, batch: Sequence[StoreCandidate], tiers: Sequence[TierView]) -> StorePlan:
        return StorePlan({tier.name: list(range(len(batch))) for tier in tiers})


@pytest.mark.parametrize("policy", [Once, Always])
def test_what_waits_for_a_tier_stays_shielded_though_it_is_read_meanwhile(doubles: Doubles, policy: Any) -> None:
    adapter = doubles.adapter()
    tier = doubles.tier("mem", adapter, connections=1)
    loop = doubles.loop(doubles.l1(), tier, store_policy=policy(), config={"dirty": "keep"}, stands=True)
    loop.idle()
    adapter.hang("store")
    tier.batch_keys_max = 1
    committed = [loop.l1.put(key, content) for key, content in doubles.contents(8).items()]
    loop.tiering.on_committed(committed)
    loop.until(lambda: adapter.entered.acquire(blocking=False))
    shielded = set(loop.l1.shielded)
    assert len(shielded) == 8
    loop.tiering.on_committed([item._replace(reused=True) for item in committed])
    loop.until(lambda: not loop.tiering.status()["stores"]["arrived"])
    assert set(loop.l1.shielded) == shielded, "none of them is on the tier yet"
    adapter.release("store")
    loop.idle()
    assert len(adapter.objects) == 8
    assert not loop.l1.shielded


class Noting(StorePolicy):
    """Stores nothing, and notes what it is shown."""

    wants_reuse = True

    def __init__(self) -> None:
        self.seen: list[tuple[bool, int]] = []
        self.capacities: list[int | None] = []

    def plan(self, batch: Sequence[StoreCandidate], tiers: Sequence[TierView]) -> StorePlan:
        self.seen += [(candidate.reused, candidate.generation) for candidate in batch]
        self.capacities = [tier.capacity_bytes for tier in tiers]
        return StorePlan({})


def test_a_policy_sees_by_the_generation_that_the_l1_had_lost_an_object(doubles: Doubles) -> None:
    policy = Noting()
    tiers = [doubles.tier("small", doubles.adapter(), capacity_bytes=1 << 20), doubles.tier("any", doubles.adapter())]
    loop = doubles.loop(doubles.l1(), *tiers, store_policy=policy)
    ((key, content),) = doubles.contents(1).items()
    first = loop.l1.put(key, content)
    loop.tiering.on_committed([first])
    loop.idle()
    loop.tiering.on_committed([first._replace(reused=True)])
    loop.idle()
    loop.l1.evict(key)
    again = loop.l1.put(key, content)
    loop.tiering.on_committed([again._replace(reused=True)])
    loop.idle()
    (_, before), (_, same), (_, after) = policy.seen
    assert [reused for reused, _ in policy.seen] == [False, True, True]
    assert before == same != after
    assert policy.capacities == [1 << 20, None]
