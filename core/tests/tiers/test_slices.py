"""What tiers are owed is done in small pieces: the loop serves everybody between two of them."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import pytest

from lmcache_core.errors import TierError
from lmcache_core.limits import BREAKER_FAILURES, HOUSEKEEPING_S
from lmcache_core.policies.contracts import StoreCandidate, StorePlan, TierView
from lmcache_core.tiers.l1 import CommittedObject
from lmcache_core.tiers.tier.lanes import Lane

from .conftest import Doubles, FunctionCall

SAFETY_S = 60.0
GONE = 20_000  # objects that have left the L1 before their turn: planned, pinned, found to be gone


def test_a_backlog_is_worked_off_in_many_steps_and_each_says_that_there_is_more(doubles: Doubles) -> None:
    loop = doubles.loop(doubles.l1(), doubles.tier("mem", doubles.adapter()))
    loop.idle()
    loop.tiering.on_committed([CommittedObject(doubles.key(i), doubles.namespace, 1, 5000, 0) for i in range(GONE)])
    steps = 0
    while loop.tiering.status()["stores"]["counts"].get("lost_evicted", 0) < GONE:
        assert loop.tiering.next_deadline() <= loop.now(), "there is more"
        loop.tiering.step()
        steps += 1
    assert steps >= 20, "a step gives up some arrivals of 64 keys, and no more"


def test_what_arrives_during_a_backlog_of_one_tier_reaches_another(doubles: Doubles) -> None:
    near, far = doubles.adapter(), doubles.adapter()
    loop = doubles.loop(doubles.l1(), doubles.tier("near", near), doubles.tier("far", far))
    loop.idle()
    near.hang("store")
    far.hang("store")
    loop.tiering.on_committed(
        [CommittedObject(doubles.key(i), doubles.namespace, 1, 5000, 0) for i in range(1000, GONE)]
    )
    loop.store(doubles.contents(1))
    far.release("store")
    loop.until(lambda: far.objects)
    near.release("store")
    loop.idle()


def test_a_turn_in_which_nothing_has_changed_asks_no_tier(doubles: Doubles, monkeypatch: pytest.MonkeyPatch) -> None:
    tier = doubles.tier("mem", doubles.adapter())
    loop = doubles.loop(doubles.l1(), tier)
    loop.idle()
    loop.until(lambda: loop.tiering.next_deadline() > loop.now())
    stepped: list[float] = []
    monkeypatch.setattr(tier, "step", lambda: stepped.append(due))
    due = loop.tiering.next_deadline()
    for _ in range(100):
        loop.clock.now = due - HOUSEKEEPING_S / 2
        loop.tiering.step()
    assert stepped == []
    loop.clock.now = due
    loop.tiering.step()
    assert len(stepped) == 1


def test_large_commits_are_planned_in_parts_and_none_is_forgotten(doubles: Doubles) -> None:
    plans: list[int] = []

    class Counting(doubles.policy):  # type: ignore[misc]
        def plan(self, batch: Sequence[StoreCandidate], tiers: Sequence[TierView]) -> StorePlan:
            plans.append(len(batch))
            return super().plan(batch, tiers)

    adapter = doubles.adapter()
    loop = doubles.loop(doubles.l1(400), doubles.tier("mem", adapter), store_policy=Counting())
    loop.store(doubles.contents(300))
    loop.idle()
    assert sum(plans) == 300
    assert max(plans) <= 64
    assert len(adapter.objects) == 300


@pytest.mark.parametrize("dirty", ["drop", "keep", "wait"])
def test_what_is_shielded_for_a_tier_is_let_go_when_it_stops_answering(doubles: Doubles, dirty: str) -> None:
    adapter = doubles.adapter()
    loop = doubles.loop(doubles.l1(2000), doubles.tier("mem", adapter), config={"dirty": dirty})
    loop.idle()
    adapter.errors["store"] = TierError("gone", retryable=False)
    # Each failed call takes a batch of 64 with it; what waits behind the last of them is what this is about.
    loop.store(doubles.contents(BREAKER_FAILURES * 64 + 1000))
    loop.until(lambda: loop.tiering.status()["tiers"][0]["writes"]["breaker"] == "open")
    loop.until(lambda: not loop.l1.shielded)
    assert loop.l1.let_go
    assert max(loop.l1.let_go) <= 256, "in pieces"
    loop.store(doubles.contents(100, first=5000))
    assert not loop.l1.shielded, "it could stay for ever"
    del adapter.errors["store"]
    loop.jump(5.0)
    loop.until(lambda: len(adapter.objects) >= 500)
    loop.store(doubles.contents(100, first=6000))
    assert len(loop.l1.shielded) == 100
    loop.idle()
    assert loop.l1.held == 0
    assert not loop.l1.shielded


def test_the_backlog_of_a_lane_is_the_same_before_and_after_its_threads_wake_up() -> None:
    gate, ended = threading.Event(), threading.Semaphore(0)
    lane = Lane("test", 2, lambda call: ended.release())
    seen = []
    for _ in range(5):
        lane.submit(FunctionCall(lambda: gate.wait(SAFETY_S)))
        seen.append(lane.backlog)
    assert seen == [0, 0, 1, 2, 3]
    gate.set()
    for _ in range(5):
        assert ended.acquire(timeout=SAFETY_S)
    assert lane.backlog == 0
    lane.close()


@pytest.mark.parametrize("dirty", ["drop", "keep", "wait"])
def test_what_is_committed_is_shielded_from_then_on_and_no_longer_once_it_is_stored(
    doubles: Doubles, dirty: str
) -> None:
    near, far = doubles.adapter(), doubles.adapter()
    tiers = doubles.tier("near", near), doubles.tier("far", far)
    loop = doubles.loop(doubles.l1(), *tiers, config={"dirty": dirty})
    loop.idle()
    far.hang("store")
    loop.store(doubles.contents(10))
    assert len(loop.l1.shielded) == 10, "the next message may ask for their room, before any step"
    loop.until(lambda: len(near.objects) == 10)
    assert len(loop.l1.shielded) == 10, "one tier is still to get them"
    far.release("store")
    loop.idle()
    assert loop.tiering.status()["stores"]["counts"] == {"stored": 20}
    assert not loop.l1.shielded
    assert loop.l1.held == 0


@pytest.mark.parametrize("dirty", ["drop", "keep"])
@pytest.mark.parametrize("end", ["clear", "close", "nobody wants it", "the policy fails"])
def test_what_is_not_stored_after_all_is_shielded_no_longer(doubles: Doubles, end: str, dirty: str) -> None:
    class Unwilling(doubles.policy):  # type: ignore[misc]
        def plan(self, batch: Sequence[StoreCandidate], tiers: Sequence[TierView]) -> StorePlan:
            if end == "the policy fails":
                raise RuntimeError("of its own")
            return StorePlan({}) if end == "nobody wants it" else super().plan(batch, tiers)

    tier = doubles.tier("mem", doubles.adapter())
    loop = doubles.loop(doubles.l1(100), tier, config={"dirty": dirty}, store_policy=Unwilling())
    loop.idle()
    loop.store(doubles.contents(80))
    assert len(loop.l1.shielded) == 80
    if end == "clear":
        loop.clear(doubles.namespace)
    elif end == "close":
        loop.tiering.close()
    else:
        loop.until(lambda: loop.tiering.drained)
    assert not loop.l1.shielded
    assert loop.l1.held == 0
