"""Debts: what a tier lacks of what the L1 has is found and stored, and `status` counts it until then."""

from __future__ import annotations

from typing import Any

import pytest

from lmcache_core.errors import TierError
from lmcache_core.limits import BREAKER_PAUSE_MAX_S, WRITE_BACK_PAUSE_S, WRITE_BACK_PAUSE_S_MAX
from lmcache_core.policies.store import SkipL1Store
from lmcache_core.tiers.contract import Capabilities
from lmcache_core.tiers.l1 import Stored
from lmcache_core.tiers.object.format import tier_key

from .conftest import Doubles, Loop, ScriptedAdapter


def has(doubles: Doubles, adapter: ScriptedAdapter) -> set[int]:
    return {number for number in range(200) if tier_key(doubles.key(number), doubles.namespace, 0) in adapter.objects}


def dirty(loop: Loop) -> dict[str, int]:
    told: dict[str, int] = loop.tiering.status()["stores"]["dirty"]
    return told


def lost(loop: Loop) -> int:
    counts: dict[str, int] = loop.tiering.status()["stores"]["counts"]
    return sum(objects for name, objects in counts.items() if name.startswith("lost"))


def adopted(doubles: Doubles, count: int = 100, slots: int = 128) -> Any:
    """An L1 that had objects before there were any tiers."""
    l1 = doubles.l1(slots)
    for number in range(count):
        l1.put(doubles.key(number), doubles.content(number))
    return l1


@pytest.mark.parametrize("scan", [True, False])
@pytest.mark.parametrize("mode", ["drop", "keep", "wait"])
def test_objects_that_were_there_before_their_tier_reach_it(doubles: Doubles, scan: bool, mode: str) -> None:
    adapter = doubles.adapter()
    adapter.capabilities = Capabilities(durable=True, scan=scan)
    loop = doubles.loop(adopted(doubles), doubles.tier("mem", adapter), config={"dirty": mode})
    assert dirty(loop) == {"mem": 100}
    loop.until(lambda: not any(dirty(loop).values()) or len(adapter.objects) == 100)
    loop.idle()
    assert has(doubles, adapter) == set(range(100))
    assert dirty(loop) == {"mem": 0}
    assert not loop.l1.shielded


@pytest.mark.parametrize("scan", [True, False])
def test_only_what_a_tier_lacks_is_stored_again(doubles: Doubles, scan: bool) -> None:
    adapter = doubles.adapter()
    first = doubles.loop(doubles.l1(64), doubles.tier("mem", adapter))
    first.store(doubles.contents(50))
    first.idle()
    written = dict(adapter.objects)
    adapter.capabilities = Capabilities(durable=True, scan=scan)
    loop = doubles.loop(adopted(doubles), doubles.tier("mem", adapter))
    loop.until(lambda: len(adapter.objects) == 100)
    loop.idle()
    assert loop.tiering.status()["stores"]["counts"]["stored"] == 50
    assert all(adapter.objects[key] is content for key, content in written.items())


def test_of_two_tiers_each_gets_what_it_lacks_and_no_more(doubles: Doubles) -> None:
    whole, half = doubles.adapter(), doubles.adapter()
    former = doubles.loop(doubles.l1(128), doubles.tier("whole", whole), doubles.tier("half", half))
    former.store(doubles.contents(100))
    former.idle()
    for number in range(0, 100, 2):
        del half.objects[tier_key(doubles.key(number), doubles.namespace, 0)]
    before = whole.calls["store"]
    loop = doubles.loop(adopted(doubles), doubles.tier("whole", whole), doubles.tier("half", half))
    loop.until(lambda: len(half.objects) == 100)
    loop.idle()
    assert whole.calls["store"] == before
    assert loop.tiering.status()["stores"]["counts"]["stored"] == 50
    assert dirty(loop) == {"whole": 0, "half": 0}


def test_a_tier_that_is_added_gets_what_is_there(doubles: Doubles) -> None:
    adapter, second = doubles.adapter(), doubles.adapter()
    loop = doubles.loop(doubles.l1(64), doubles.tier("mem", adapter))
    loop.store(doubles.contents(40))
    loop.idle()
    loop.tiering.add_tier(doubles.tier("second", second))
    assert dirty(loop)["second"] == 40
    loop.idle()
    assert has(doubles, second) == set(range(40))


def test_a_tier_that_was_drained_gets_what_it_missed(doubles: Doubles) -> None:
    adapter = doubles.adapter()
    loop = doubles.loop(doubles.l1(64), doubles.tier("mem", adapter))
    loop.tiering.drain_tier("mem")
    loop.store(doubles.contents(20))
    loop.idle()
    assert not adapter.objects
    (tier,) = loop.tiering.tiers
    loop.tiering.reconfigure_tier("mem", tier.config)
    loop.idle()
    assert has(doubles, adapter) == set(range(20))


@pytest.mark.parametrize("retryable", [True, False])
def test_stores_that_failed_while_a_tier_was_down_are_made_up_for(doubles: Doubles, retryable: bool) -> None:
    adapter = doubles.adapter()
    loop = doubles.loop(doubles.l1(64), doubles.tier("mem", adapter), stands=True)
    loop.idle()
    adapter.errors["store"] = TierError("down", retryable=retryable)
    for number in range(20):
        loop.store(doubles.contents(1, first=number))
        loop.until(lambda: loop.tiering.drained)
    assert dirty(loop)["mem"] >= 20
    del adapter.errors["store"]
    loop.jump(BREAKER_PAUSE_MAX_S)
    loop.until(lambda: loop.tiering.status()["tiers"][0]["writes"]["breaker"] == "closed")  # with nothing committed
    for _ in range(6):
        assert dirty(loop)["mem"] > 0 or has(doubles, adapter) == set(range(20))
        loop.jump(max(BREAKER_PAUSE_MAX_S, WRITE_BACK_PAUSE_S_MAX))
        loop.idle()
    assert has(doubles, adapter) == set(range(20))
    assert dirty(loop) == {"mem": 0}
    for number in range(20):
        loop.l1.evict(doubles.key(number))
    assert loop.tiering.status()["stores"]["reached_no_tier"]["objects"] == 0


def test_an_object_that_a_tier_refuses_each_time_is_tried_ever_more_seldom(doubles: Doubles) -> None:
    adapter = doubles.adapter()
    loop = doubles.loop(doubles.l1(64), doubles.tier("mem", adapter), stands=True)
    loop.idle()
    adapter.errors["store"] = TierError("too large", retryable=False)
    loop.store(doubles.contents(1))
    for _ in range(1200):  # of half a second
        loop.until(lambda: not loop.tiering.status()["stores"]["in_flight_bytes"])
        loop.jump(0.5)
    loop.until(lambda: loop.tiering.drained)
    assert 2 <= adapter.calls["store"] <= 20
    assert dirty(loop)["mem"] >= 1
    assert loop.tiering.status()["stores"]["reached_no_tier"]["objects"] == 0, "the pool has it"
    loop.l1.evict(doubles.key(0))
    assert loop.tiering.status()["stores"]["reached_no_tier"]["objects"] == 1, "once, however often it was tried"
    assert dirty(loop) == {"mem": 0}, "nobody can have it any more"


def tried_again_in_s(loop: Loop) -> float:
    """How long the first retry of what was lost just now waits."""
    at: float = loop.tiering._write_back.next_at
    return at - loop.clock.now


def test_walks_that_lose_nothing_make_no_pause_longer(doubles: Doubles) -> None:
    adapter = doubles.adapter()
    loop = doubles.loop(doubles.l1(64), doubles.tier("mem", adapter), stands=True)
    loop.store(doubles.contents(1))
    loop.idle()
    (tier,) = loop.tiering.tiers
    for _ in range(6):
        loop.tiering.drain_tier("mem")
        loop.tiering.reconfigure_tier("mem", tier.config)
        loop.idle()
    adapter.errors["store"] = TierError("once", retryable=False)
    loop.store(doubles.contents(1, first=1))
    loop.until(lambda: lost(loop) == 1)
    assert 0 < tried_again_in_s(loop) <= WRITE_BACK_PAUSE_S


def test_a_pause_is_short_again_once_all_that_was_lost_is_stored(doubles: Doubles) -> None:
    adapter = doubles.adapter()
    loop = doubles.loop(doubles.l1(64), doubles.tier("mem", adapter), stands=True)
    loop.idle()
    pauses_s = []
    for first in (0, 1):
        adapter.errors["store"] = TierError("for a while", retryable=False)
        loop.store(doubles.contents(1, first=first))
        before = lost(loop)
        for tries in range(1, 4):
            loop.until(lambda wanted=before + tries: lost(loop) == wanted)
            loop.until(lambda: loop.tiering._write_back.next_at is not None)
            pauses_s.append(tried_again_in_s(loop))
            loop.jump(pauses_s[-1])
            if tries == 3:
                del adapter.errors["store"]
        loop.until(lambda wanted=first + 1: len(adapter.objects) == wanted and loop.tiering.drained)
    assert pauses_s == pytest.approx([1, 2, 4, 1, 2, 4])


def test_a_walk_drops_nothing_that_its_tiers_have(doubles: Doubles) -> None:
    adapter = doubles.adapter()
    former = doubles.loop(doubles.l1(64), doubles.tier("mem", adapter))
    former.store(doubles.contents(10))
    former.idle()
    l1 = adopted(doubles, 20, 64)
    loop = doubles.loop(l1, doubles.tier("mem", adapter), store_policy=SkipL1Store())
    loop.until(lambda: len(adapter.objects) == 20)
    loop.idle()
    assert {key for _, key in l1.ready} == set(doubles.contents(10)), "ten were stored now, and dropped then"


def test_fresh_commits_go_before_debts(doubles: Doubles) -> None:
    adapter = doubles.adapter()
    adapter.hang("store")
    loop = doubles.loop(adopted(doubles, 1000, 1200), doubles.tier("mem", adapter))
    loop.until(lambda: adapter.calls["store"] == 2 and not loop.tiering.status()["stores"]["arrived"])
    assert dirty(loop)["mem"] >= 990
    assert loop.l1.held <= 4 * 64, "and waits as what is in the L1 anyway"
    loop.store({doubles.key(5000): doubles.content(0)})
    adapter.release("store")
    loop.until(lambda: len(adapter.objects) == 1001)
    loop.idle()
    assert [key[:32] for key in adapter.objects].index(doubles.key(5000)) < 1000, "in the order of their stores"


def test_a_drain_stores_what_was_to_be_tried_again_later(doubles: Doubles) -> None:
    adapter = doubles.adapter()
    loop = doubles.loop(doubles.l1(64), doubles.tier("mem", adapter))
    loop.idle()
    adapter.errors["store"] = TierError("for a moment", retryable=False)
    loop.store(doubles.contents(1))
    loop.until(lambda: lost(loop) == 1)
    del adapter.errors["store"]
    loop.tiering.begin_drain()
    loop.until(lambda: loop.tiering.drained)
    assert has(doubles, adapter) == {0}
    assert dirty(loop) == {"mem": 0}


def test_a_drain_goes_on_while_a_tier_that_is_well_may_take_what_it_refused(doubles: Doubles) -> None:
    adapter = doubles.adapter()
    loop = doubles.loop(doubles.l1(64), doubles.tier("mem", adapter), stands=True)
    loop.idle()
    adapter.errors["store"] = TierError("for a moment", retryable=False)
    loop.store(doubles.contents(1))
    loop.tiering.begin_drain()
    for tries in (1, 2):
        loop.until(lambda tries=tries: lost(loop) == tries)
        loop.turn()
        assert not loop.tiering.drained
        loop.jump(WRITE_BACK_PAUSE_S)
    del adapter.errors["store"]
    loop.jump(WRITE_BACK_PAUSE_S)
    loop.until(lambda: loop.tiering.drained)
    assert has(doubles, adapter) == {0}


def test_a_drain_does_not_wait_for_a_scan(doubles: Doubles) -> None:
    adapter = doubles.adapter()
    adapter.hang("scan")
    loop = doubles.loop(adopted(doubles), doubles.tier("mem", adapter))
    loop.tiering.begin_drain()
    loop.until(lambda: loop.tiering.drained)
    adapter.release("scan")
    assert has(doubles, adapter) == set(range(100))


def test_who_waits_for_a_store_waits_for_what_write_back_is_about_to_store(doubles: Doubles) -> None:
    loop = doubles.loop(doubles.l1(128), doubles.tier("mem", doubles.adapter()))
    loop.store(doubles.contents(100))
    loop.idle()
    second = doubles.adapter()
    second.capabilities = Capabilities(durable=True, scan=False)  # otherwise its scan is waited for
    second.hang("store")
    loop.tiering.add_tier(doubles.tier("second", second))
    watch = loop.tiering.stored(doubles.namespace, [doubles.key(number) for number in range(90, 100)])
    assert not watch.settled(), "the walk has not begun"
    loop.until(lambda: second.entered.acquire(blocking=False))
    assert not watch.settled()
    second.release("store")
    loop.until(watch.settled)
    assert [list(answer.found or ()) for answer in watch.answers()] == [[Stored.YES] * 10] * 2


def test_what_no_tier_gets_from_a_walk_is_settled_at_its_end(doubles: Doubles) -> None:
    loop = doubles.loop(doubles.l1(64), doubles.tier("mem", doubles.adapter()))
    loop.store(doubles.contents(10))
    loop.idle()
    (tier,) = loop.tiering.tiers
    loop.tiering.drain_tier("mem")
    loop.tiering.reconfigure_tier("mem", tier.config)
    watch = loop.tiering.stored(doubles.namespace, [doubles.key(50)])  # which is not in the L1
    assert not watch.settled()
    moves = loop.tiering.moves
    loop.until(watch.settled)
    assert loop.tiering.moves > moves, "otherwise nobody would ask again"
    assert [answer.found for answer in watch.answers()] == [[Stored.NO]]


def test_nobody_waits_for_a_store_that_failed_and_is_tried_again_some_day(doubles: Doubles) -> None:
    adapter = doubles.adapter()
    loop = doubles.loop(doubles.l1(64), doubles.tier("mem", adapter), stands=True)
    loop.idle()
    adapter.errors["store"] = TierError("too large", retryable=False)
    loop.store(doubles.contents(1))
    loop.until(lambda: lost(loop) == 1)
    loop.until(lambda: dirty(loop) == {"mem": 1})
    assert loop.tiering.stored(doubles.namespace, [doubles.key(0)]).settled()
    assert loop.tiering.stored(doubles.namespace, [doubles.key(1)]).settled()


def test_a_tier_that_is_stored_to_again_gets_what_is_owed_at_once(doubles: Doubles) -> None:
    adapter = doubles.adapter()
    loop = doubles.loop(doubles.l1(64), doubles.tier("mem", adapter), stands=True)
    loop.idle()
    adapter.errors["store"] = TierError("for a moment", retryable=False)
    loop.store(doubles.contents(1))
    loop.until(lambda: lost(loop) == 1)
    del adapter.errors["store"]
    (tier,) = loop.tiering.tiers
    loop.tiering.drain_tier("mem")
    loop.tiering.reconfigure_tier("mem", tier.config)
    loop.idle()
    assert has(doubles, adapter) == {0}
