"""Behind a tier that takes no more, commits wait unplanned: most leave the L1 before their turn, and cost little."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from lmcache_core.policies.contracts import StoreCandidate, StorePlan, TierView
from lmcache_core.policies.store import DefaultStore
from lmcache_core.tiers.l1 import TierReason
from lmcache_core.tiers.object.format import tier_key
from lmcache_testing.embedded import Json

from .conftest import Doubles, Loop

SLOTS = 600


class Counting(DefaultStore):
    """Says what it was asked about."""

    def __init__(self) -> None:
        super().__init__()
        self.planned: list[bytes] = []

    def plan(self, batch: Sequence[StoreCandidate], tiers: Sequence[TierView]) -> StorePlan:
        self.planned += [candidate.key for candidate in batch]
        return super().plan(batch, tiers)


@pytest.fixture
def behind(doubles: Doubles) -> Loop:
    """A tier whose stores hang, and more behind it than its lanes take: 500 objects, the last 100 of them unplanned
    at least."""
    adapter, policy = doubles.adapter(), Counting()
    tier = doubles.tier("slow", adapter, eviction=None)
    loop = doubles.loop(doubles.l1(SLOTS), tier, store_policy=policy)
    loop.idle()
    adapter.hang("store")
    for first in range(0, 500, 20):
        loop.store(doubles.contents(20, first=first))
        loop.until(lambda: True)
    loop.adapter, loop.policy, loop.tier = adapter, policy, tier
    assert stores(loop)["arrived"] >= 100
    return loop


def stores(loop: Loop) -> Json:
    told: Json = loop.tiering.status()["stores"]
    return told


def test_what_waits_unplanned_is_stored_in_order_once_the_tier_takes_more(doubles: Doubles, behind: Loop) -> None:
    assert not behind.tiering.drained
    behind.adapter.release("store")
    behind.idle()
    assert behind.policy.planned == [doubles.key(number) for number in range(500)]
    assert len(behind.adapter.objects) == 500
    assert stores(behind)["arrived"] == 0
    assert "lost_evicted" not in stores(behind)["counts"]


def test_what_leaves_the_l1_unplanned_is_lost_and_counted_and_the_tier_says_why(doubles: Doubles, behind: Loop) -> None:
    planned = set(behind.policy.planned)
    unplanned = [doubles.key(number) for number in range(500) if doubles.key(number) not in planned]
    for key in unplanned:
        behind.l1.evict(key)
    behind.store(doubles.contents(1, first=500))  # the next commit looks at what has gone
    behind.until(lambda: stores(behind)["arrived"] == 1)
    assert stores(behind)["counts"]["lost_evicted"] == len(unplanned)
    assert behind.policy.planned == [doubles.key(number) for number in range(len(planned))], "nobody planned them"
    loss = behind.tier.losses.find(tier_key(unplanned[-1], doubles.namespace, 0))
    assert loss is not None
    assert loss.reason is TierReason.EVICTED
    behind.adapter.release("store")
    behind.idle()
    assert len(behind.adapter.objects) == len(planned) + 1


def test_an_arrival_of_which_something_is_left_waits_for_its_turn(doubles: Doubles, behind: Loop) -> None:
    left = doubles.key(499)
    for number in range(480, 499):
        behind.l1.evict(doubles.key(number))
    behind.adapter.release("store")
    behind.idle()
    assert sum(name.startswith(left) for name in behind.adapter.objects) == 1
    assert stores(behind)["counts"]["lost_evicted"] == 19


def test_what_waits_unplanned_is_bounded_and_the_oldest_goes(
    doubles: Doubles, behind: Loop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lmcache_core.tiers.flow.store.DIRTY_OBJECTS_MAX", 60)
    waiting = stores(behind)["arrived"]
    behind.store(doubles.contents(20, first=500))
    assert stores(behind)["arrived"] == 60
    assert stores(behind)["counts"]["lost_throttled"] == waiting + 20 - 60
    behind.adapter.release("store")
    behind.idle()
    assert all(any(name.startswith(doubles.key(number)) for name in behind.adapter.objects) for number in (460, 519))


def test_another_tier_that_takes_more_gets_everything_at_once(doubles: Doubles) -> None:
    slow, quick = doubles.adapter(), doubles.adapter()
    loop = doubles.loop(doubles.l1(SLOTS), doubles.tier("slow", slow), doubles.tier("quick", quick))
    loop.idle()
    slow.hang("store")
    loop.store(doubles.contents(400))
    loop.until(lambda: len(quick.objects) == 400)
    assert stores(loop)["arrived"] == 0
    slow.release("store")
    loop.idle()
    assert len(slow.objects) == 400


def test_what_is_kept_is_planned_at_once_for_it_takes_room(doubles: Doubles) -> None:
    adapter, policy = doubles.adapter(), Counting()
    loop = doubles.loop(doubles.l1(SLOTS), doubles.tier("slow", adapter), store_policy=policy, config={"dirty": "keep"})
    loop.idle()
    adapter.hang("store")
    loop.store(doubles.contents(500))
    loop.until(lambda: len(policy.planned) == 500)
    adapter.release("store")
    loop.idle()
    assert len(adapter.objects) == 500
    assert loop.l1.held == 0


def test_a_clear_takes_the_unplanned_of_its_namespace_alone(doubles: Doubles, behind: Loop) -> None:
    other = doubles.namespace + 1
    committed = [behind.l1.put(doubles.key(number), doubles.content(number), other) for number in range(40)]
    behind.tiering.on_committed(committed)
    behind.clear(doubles.namespace)
    assert stores(behind)["arrived"] == 40
    behind.adapter.release("store")
    behind.idle()
    names = [name for name in behind.adapter.objects if int.from_bytes(name[32:40], "little") == other]
    assert len(names) == 40


def test_with_every_tier_draining_nothing_waits(doubles: Doubles) -> None:
    adapter = doubles.adapter()
    loop = doubles.loop(doubles.l1(SLOTS), doubles.tier("old", adapter))
    loop.idle()
    loop.tiering.drain_tier("old")
    loop.store(doubles.contents(300))
    loop.idle()
    assert stores(loop)["arrived"] == 0
    assert adapter.objects == {}


def test_behind_a_tier_that_does_not_answer_some_is_ready_to_try_it_with(doubles: Doubles) -> None:
    adapter = doubles.adapter()
    loop = doubles.loop(doubles.l1(SLOTS), doubles.tier("mem", adapter))
    loop.idle()
    adapter.errors["store"] = ConnectionError("down")
    first = 0
    while loop.tiering.status()["tiers"][0]["writes"]["breaker"] == "closed":
        loop.store(doubles.contents(1, first=first))
        loop.until(lambda: loop.tiering.drained)
        first += 1
    loop.store(doubles.contents(300, first=first))
    loop.until(lambda: stores(loop)["dirty"]["mem"] >= 64)
    assert stores(loop)["arrived"] > 0
    loop.until(lambda: loop.tiering.drained)  # nothing is owed that could be done now
    assert stores(loop)["dirty"]["mem"] - stores(loop)["arrived"] < 128, "two plans at most"
    assert stores(loop)["dirty"]["mem"] >= 300, "and the rest waits"
    assert loop.tiering.status()["tiers"][0]["writes"]["breaker"] == "open"
    del adapter.errors["store"]
    loop.until(lambda: all(any(n.startswith(doubles.key(first + i)) for n in list(adapter.objects)) for i in (0, 299)))
    loop.idle()


def test_while_the_lanes_are_full_nothing_is_planned_in_the_place_of_what_has_gone(
    doubles: Doubles, behind: Loop
) -> None:
    planned = len(behind.policy.planned)
    for number in range(480):
        behind.l1.evict(doubles.key(number))
    behind.store(doubles.contents(1, first=500))
    behind.until(lambda: stores(behind)["arrived"] == 21)
    assert len(behind.policy.planned) == planned
    behind.adapter.release("store")
    behind.idle()
    assert all(any(name.startswith(doubles.key(number)) for name in behind.adapter.objects) for number in (480, 500))


def test_what_was_planned_for_another_tier_too_and_has_gone_is_forgotten_while_this_one_hangs(doubles: Doubles) -> None:
    slow, quick = doubles.adapter(), doubles.adapter()
    loop = doubles.loop(doubles.l1(SLOTS), doubles.tier("slow", slow), doubles.tier("quick", quick))
    loop.idle()
    slow.hang("store")
    loop.store(doubles.contents(400))
    loop.until(lambda: stores(loop)["dirty"]["quick"] == 0)
    waiting = stores(loop)["dirty"]["slow"] - loop.l1.held
    assert waiting >= 400 - 4 * 64, "all but what the lanes have"
    for _, key in list(loop.l1.ready):
        loop.l1.evict(key)
    loop.store(doubles.contents(1, first=400))
    loop.until(lambda: stores(loop)["counts"].get("lost_evicted") == waiting)
    slow.release("store")
    loop.idle()
    assert len(slow.objects) == 400 - waiting + 1


@pytest.mark.parametrize(
    "plan", [StorePlan({"slow": [0, 9]}), StorePlan({"slow": [0, -1]}), StorePlan({"slow": [0]}, drop=[9]), None]
)
def test_a_plan_that_names_what_is_not_in_its_batch_shields_nothing_for_ever(doubles: Doubles, plan: Any) -> None:
    class Wrong(DefaultStore):
        def plan(self, batch: Sequence[StoreCandidate], tiers: Sequence[TierView]) -> StorePlan:
            return plan  # type: ignore[no-any-return]

    adapter = doubles.adapter()
    loop = doubles.loop(doubles.l1(), doubles.tier("slow", adapter), store_policy=Wrong(), config={"dirty": "keep"})
    loop.idle()
    loop.store(doubles.contents(3))
    loop.idle()
    assert loop.l1.shielded == {}
    assert stores(loop)["counts"]["policy_failed"] == 3
    assert stores(loop)["reached_no_tier"]["objects"] == 0
    for number in range(3):
        loop.l1.evict(doubles.key(number))
    assert stores(loop)["reached_no_tier"]["objects"] == 3
    assert adapter.objects == {}
