"""Late is failed: the circuit breaker opens for a tier that hangs as for one that fails, and nobody waits for it."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from lmcache_core.errors import TierError
from lmcache_core.limits import (
    BREAKER_FAILURES,
    BREAKER_PAUSE_MAX_S,
    HANGING_TIER_S,
    LANE_REPLACEMENTS_MAX,
    LANE_STUCK_S,
    SCAN_TRIES_MAX,
)
from lmcache_core.policies.lru import LruEviction
from lmcache_core.policies.store import DefaultStore, SkipL1Store
from lmcache_core.tiers.contract import Capabilities, ScanPage
from lmcache_core.tiers.l1 import Stored, TierReason
from lmcache_core.tiers.object.format import HEADER_BYTES, tier_key
from lmcache_core.tiers.tier.rebuild_states import RebuildState

from .conftest import SAFETY_S, Doubles, Loop, ScriptedAdapter

SECONDS = 3.0  # that a lookup has


def the_tier(loop: Loop) -> Any:
    (tier,) = loop.tiering.status()["tiers"]
    return tier


def breaker(loop: Loop, what: str = "reads") -> str:
    return str(the_tier(loop)[what]["breaker"])


@pytest.fixture
def stocked(doubles: Doubles) -> Loop:
    """Objects 0 to 7 are on the tier; the L1 is empty."""
    adapter = doubles.adapter()
    loop = doubles.loop(doubles.l1(64), doubles.tier("mem", adapter, deadline_s=5.0), stands=True)
    loop.idle()  # a scan that finds more than a page pauses, and here no time goes by
    loop.store(doubles.contents(8))
    loop.idle()
    for _, key in list(loop.l1.ready):
        loop.l1.evict(key)
    loop.adapter = adapter
    return loop


def look_up_until_left_alone(loop: Loop, doubles: Doubles, method: str, seconds: float = SECONDS) -> int:
    """How many lookups wait for nothing until the breaker opens."""
    for number in range(8):
        job = loop.ask([doubles.key(number)], seconds=seconds)
        loop.until(lambda number=number: loop.adapter.calls[method] > number)
        loop.jump(seconds + 0.01)
        loop.until(lambda job=job: job.ended)
        if breaker(loop) != "closed":
            return number + 1
    return 99


@pytest.mark.parametrize("method", ["exists", "load"])
def test_a_tier_whose_calls_hang_is_left_alone_before_its_threads_are_used_up(
    doubles: Doubles, stocked: Loop, method: str
) -> None:
    adapter = stocked.adapter
    adapter.calls.clear()
    adapter.hang(method)
    assert look_up_until_left_alone(stocked, doubles, method) <= BREAKER_FAILURES
    job = stocked.ask([doubles.key(0)], seconds=SECONDS)
    stocked.until(lambda: job.ended)  # no time passes here
    assert (job.hits, job.reasons) == (0, {0: TierReason.TIER_ERROR})
    adapter.release(method)
    stocked.jump(BREAKER_PAUSE_MAX_S)
    stocked.until(lambda: breaker(stocked) == "closed")
    assert stocked.fetch([doubles.key(0)]).hits == 1


def test_calls_that_no_thread_takes_are_evidence_as_good_as_those_that_hang(doubles: Doubles) -> None:
    adapter = doubles.adapter()
    adapter.capabilities = Capabilities(thread_safe=False)
    loop = doubles.loop(doubles.l1(), doubles.tier("mem", adapter), stands=True)
    loop.idle()
    adapter.hang("store")  # and takes the one thread that there is
    loop.store(doubles.contents(1))
    loop.until(lambda: adapter.calls["store"])
    for _ in range(BREAKER_FAILURES):
        job = loop.ask([doubles.key(9)], seconds=SECONDS)
        loop.jump(SECONDS + 0.01)
        loop.until(lambda job=job: job.ended)
    assert adapter.calls["exists"] == 0
    assert breaker(loop) == "open"
    adapter.release("store")


def test_calls_that_wait_behind_others_that_return_are_no_evidence(doubles: Doubles, stocked: Loop) -> None:
    adapter = stocked.adapter
    adapter.hang("exists")
    adapter.calls.clear()
    ahead = [stocked.ask([doubles.key(number)], seconds=1000.0) for number in range(2)]
    stocked.until(lambda: adapter.calls["exists"] == 2)
    behind = [stocked.ask([doubles.key(number)], seconds=4.0) for number in range(2, 7)]
    gate = adapter.gates["exists"]
    adapter.hang("exists")  # for those behind
    gate.set()
    stocked.until(lambda: all(job.ended for job in ahead) and adapter.calls["exists"] == 4)
    stocked.jump(4.01)
    stocked.until(lambda: all(job.ended for job in behind))
    late = [job for job in behind if job.reasons.get(job.request.missing[0]) is TierReason.LATE]
    assert len(late) == 5
    (tier,) = stocked.tiering.tiers
    assert tier.health.lookups.opened == 1, "two that run are late; three that waited say nothing more"
    adapter.release("exists")


def test_callers_that_have_little_time_find_a_hung_tier_out_as_well(doubles: Doubles, stocked: Loop) -> None:
    adapter = stocked.adapter
    adapter.calls.clear()
    adapter.hang("exists")
    waited = 0
    while breaker(stocked) == "closed":
        job = stocked.ask([doubles.key(0)], seconds=0.1)
        begun = min(waited, 3)
        stocked.until(lambda begun=begun: adapter.calls["exists"] > begun)
        stocked.jump(0.11)
        stocked.until(lambda job=job: job.ended)
        waited += 1
        assert waited < 3 * LANE_STUCK_S / 0.1
    adapter.release("exists")


def test_lookups_that_succeed_do_not_close_the_breaker_of_loads(doubles: Doubles, stocked: Loop) -> None:
    adapter = stocked.adapter
    adapter.errors["load"] = TierError("input/output error", retryable=False)
    for number in range(BREAKER_FAILURES):
        assert breaker(stocked) == "closed"
        assert stocked.fetch([doubles.key(number)]).hits == 0
    assert breaker(stocked) == "open"
    stocked.jump(1.0)
    loads = adapter.calls["load"]
    stocked.until(lambda: adapter.calls["load"] > loads)  # it is probed with a load …
    stocked.until(lambda: breaker(stocked) == "open")
    assert adapter.calls["exists"] <= BREAKER_FAILURES
    del adapter.errors["load"]
    stocked.jump(BREAKER_PAUSE_MAX_S)
    stocked.until(lambda: breaker(stocked) == "closed")  # … and is back when that succeeds
    assert stocked.fetch([doubles.key(0)]).hits == 1


def test_who_waits_already_when_a_breaker_opens_waits_no_longer(doubles: Doubles, stocked: Loop) -> None:
    adapter = stocked.adapter
    adapter.calls.clear()
    adapter.hang("exists")
    hasty = [stocked.ask([doubles.key(number)], seconds=1.0) for number in range(2)]
    stocked.until(lambda: adapter.calls["exists"] == 2)
    patient = [stocked.ask([doubles.key(number)], seconds=4.9) for number in range(2, 6)]
    stocked.jump(1.01)
    stocked.until(lambda: all(job.ended for job in (*hasty, *patient)))
    adapter.release("exists")


@pytest.mark.parametrize("dirty", ["drop", "keep", "wait"])
def test_stores_that_hang_keep_nothing_in_the_pool_but_what_the_lanes_read(doubles: Doubles, dirty: str) -> None:
    adapter = doubles.adapter()
    adapter.capabilities = Capabilities(batch_keys_max=4)
    loop = doubles.loop(
        doubles.l1(64), doubles.tier("mem", adapter, deadline_s=5.0), stands=True, config={"dirty": dirty}
    )
    loop.idle()
    adapter.hang("store")
    loop.store(doubles.contents(40))
    loop.until(lambda: adapter.calls["store"] == 2)
    loop.jump(5.01)
    loop.until(lambda: breaker(loop, "writes") == "open" and not loop.l1.shielded)
    assert loop.l1.held == 8, "two calls read four objects each"
    assert loop.tiering.owed["mem"] >= 40, "and all is owed still"
    assert loop.tiering.drained, "the end of the server waits for none of it"
    loop.jump(1.0)
    loop.until(lambda: adapter.calls["store"] == 3)  # the probe: half open is not closed
    assert loop.tiering.drained
    loop.store(doubles.contents(4, first=50))
    loop.until(lambda: True)
    assert not loop.l1.shielded
    assert loop.l1.held == 9, "the probe is one object"
    adapter.release("store")
    loop.jump(BREAKER_PAUSE_MAX_S)
    loop.until(lambda: breaker(loop, "writes") == "closed")

    def stored() -> bool:
        loop.jump(BREAKER_PAUSE_MAX_S)
        loop.idle()
        return len(adapter.objects) == 44

    loop.until(stored)
    assert loop.tiering.owed == {"mem": 0}


def test_nobody_waits_for_stores_to_a_tier_that_is_left_alone(doubles: Doubles) -> None:
    adapter = doubles.adapter()
    loop = doubles.loop(doubles.l1(64), doubles.tier("mem", adapter), stands=True)
    loop.idle()
    adapter.hang("store")
    loop.store(doubles.contents(8))
    watch = loop.tiering.stored(doubles.namespace, [doubles.key(number) for number in range(8)])
    loop.until(lambda: adapter.calls["store"])
    assert not watch.settled()
    (tier,) = loop.tiering.tiers
    tier.health.stores.failed(loop.clock.now, "store not done by its deadline", late=True, at_once=True)
    assert watch.settled()
    (told,) = watch.answers()
    assert set(told.found) == {Stored.NO}
    assert {loss.reason for loss in told.losses} == {TierReason.TIER_ERROR}
    adapter.release("store")


def test_a_drain_waits_for_a_tier_whose_loads_hang_as_long_as_its_stores_return(doubles: Doubles) -> None:
    adapter = doubles.adapter()
    adapter.capabilities = Capabilities(durable=True, batch_keys_max=1)
    loop = doubles.loop(doubles.l1(64), doubles.tier("mem", adapter, deadline_s=1000.0), stands=True)
    loop.idle()
    adapter.hang("load")  # probes, too
    adapter.hang("store")
    loop.store(doubles.contents(8))
    (tier,) = loop.tiering.tiers
    tier.health.loads.failed(loop.clock.now, "load not done by its deadline", late=True, at_once=True)
    loop.tiering.begin_drain()
    for _ in range(3):  # each takes nearly as long as a tier that hangs is waited for
        had, gate = len(adapter.objects), adapter.gates["store"]
        loop.until(lambda had=had: adapter.calls["store"] == had + 2)
        loop.jump(0.9 * HANGING_TIER_S)
        loop.turn()
        assert not loop.tiering.drained
        adapter.hang("store")  # the next ones
        gate.set()
        loop.until(lambda had=had: len(adapter.objects) == had + 2 and tier.health.counts["store_done"] == had + 2)
    loop.turn()  # so that the last returns are seen before time passes
    loop.jump(HANGING_TIER_S)
    loop.turn()
    assert not loop.tiering.drained, "its stores took nearly as long, and returned"
    loop.jump(HANGING_TIER_S)
    loop.until(lambda: loop.tiering.drained)
    assert loop.tiering.owed == {"mem": 2}
    assert loop.tiering.given_up == {"mem": tier.health.last_error}
    adapter.release("store")
    adapter.release("load")


def test_a_drain_gives_up_no_slow_tier_whose_stores_return_though_its_loads_hang(doubles: Doubles) -> None:
    adapter = doubles.adapter()
    adapter.capabilities = Capabilities(durable=True, batch_keys_max=1)
    loop = doubles.loop(doubles.l1(64), doubles.tier("mem", adapter, deadline_s=1000.0), stands=True)
    loop.idle()
    (tier,) = loop.tiering.tiers

    def return_after(seconds: float) -> None:
        had, gate = len(adapter.objects), adapter.gates["store"]
        loop.until(lambda: adapter.calls["store"] == had + 2)
        loop.jump(seconds)
        loop.turn()
        assert not loop.tiering.drained
        adapter.hang("store")  # the next ones
        gate.set()
        loop.until(lambda: len(adapter.objects) == had + 2 and tier.health.counts["store_done"] == had + 2)

    adapter.hang("store")
    loop.store(doubles.contents(8))
    return_after(3 * HANGING_TIER_S)
    adapter.hang("load")  # probes, too
    tier.health.loads.failed(loop.clock.now, "load not done by its deadline", late=True, at_once=True)
    loop.tiering.begin_drain()
    loop.jump(100 * HANGING_TIER_S)  # no store is asked anything meanwhile
    for _ in range(2):
        return_after(3 * HANGING_TIER_S)
    assert loop.tiering.owed == {"mem": 2}
    adapter.release("store")
    loop.until(lambda: loop.tiering.drained)
    assert loop.tiering.owed == {"mem": 0}
    assert not loop.tiering.given_up
    adapter.release("load")


def test_a_drain_pays_by_stores_though_loads_and_deletes_hang(doubles: Doubles) -> None:
    adapter = doubles.adapter()
    adapter.capabilities = Capabilities(durable=True, batch_keys_max=1)
    loop = doubles.loop(doubles.l1(64), doubles.tier("mem", adapter, deadline_s=1000.0), stands=True)
    loop.store(doubles.contents(1, first=20))
    loop.idle()
    (tier,) = loop.tiering.tiers
    adapter.hang("delete")
    tier.remove([tier_key(doubles.key(20), doubles.namespace, 0)])
    loop.until(lambda: adapter.entered.acquire(blocking=False))
    adapter.hang("load")
    adapter.hang("store")
    loop.store(doubles.contents(2))
    loop.until(lambda: adapter.calls["store"] == 3)
    tier.health.loads.failed(loop.clock.now, "load not done by its deadline", late=True, at_once=True)
    loop.tiering.begin_drain()
    loop.jump(0.9 * HANGING_TIER_S)
    adapter.release("store")
    loop.until(lambda: loop.tiering.owed == {"mem": 0})
    loop.jump(0.9 * HANGING_TIER_S)
    loop.turn()
    assert loop.tiering.drained, "nothing but a delete that hangs is owed"
    adapter.release("delete")
    adapter.release("load")


def test_a_scan_that_hangs_takes_no_thread_from_others_and_nobody_waits_for_it(doubles: Doubles) -> None:
    adapter = doubles.adapter()
    adapter.hang("scan")
    loop = doubles.loop(doubles.l1(64), doubles.tier("mem", adapter, deadline_s=5.0), stands=True)
    loop.until(lambda: adapter.calls["scan"])
    for _ in range(8):
        loop.jump(BREAKER_PAUSE_MAX_S)
        loop.until(lambda: True)
    assert adapter.calls["scan"] <= LANE_REPLACEMENTS_MAX, "no more than are replaced"
    assert "scan" in the_tier(loop)["last_error"]
    loop.store(doubles.contents(2))
    loop.until(lambda: len(adapter.objects) == 2)
    watch = loop.tiering.stored(doubles.namespace, [doubles.key(5)])
    loop.until(watch.settled)
    loop.l1.evict(doubles.key(0))
    assert loop.fetch([doubles.key(0)]).hits == 1
    adapter.release("scan")
    loop.until(loop.scanned)


OBJECT_BYTES = HEADER_BYTES + 5000
THREADS = 2 + LANE_REPLACEMENTS_MAX  # for deletes: two by rights, and those that replace them


def evicting(doubles: Doubles, adapter: ScriptedAdapter, **options: object) -> Loop:
    """A loop with a tier that is full: it has objects 0 to 7, and room for no ninth."""
    tier = doubles.tier("mem", adapter, deadline_s=5.0, capacity_bytes=8 * OBJECT_BYTES, watermark=1.0, evict_ratio=0.0,
                        eviction=LruEviction())  # fmt: skip
    loop = doubles.loop(doubles.l1(64), tier, stands=True, **options)
    loop.idle()
    for number in range(8):
        loop.store(doubles.contents(1, first=number))
        loop.idle()
    assert len(adapter.objects) == 8
    return loop


def hang_one_delete(doubles: Doubles, loop: Loop, adapter: ScriptedAdapter, number: int) -> threading.Event:
    """Store object `number`; the delete that makes room for it is late, and returns once the event is set."""
    adapter.hang("delete")
    loop.store(doubles.contents(1, first=number))
    loop.until(lambda: adapter.entered.acquire(blocking=False))
    gate: threading.Event = adapter.gates.pop("delete")  # the next ones do not hang
    loop.jump(5.01)
    return gate


def test_one_delete_that_hangs_keeps_neither_other_deletes_nor_stores_from_going_on(doubles: Doubles) -> None:
    adapter = doubles.adapter()
    loop = evicting(doubles, adapter)
    gate = hang_one_delete(doubles, loop, adapter, 10)
    name = tier_key(doubles.key(0), doubles.namespace, 0)
    for number in range(10, 30):
        loop.until(lambda number=number: tier_key(doubles.key(number), doubles.namespace, 0) in adapter.objects)
        loop.store(doubles.contents(1, first=number + 1))
    loop.idle()
    assert (breaker(loop, "writes"), the_tier(loop)["deletes"]["hung"]) == ("closed", 1)
    assert the_tier(loop)["counts"]["delete_late"] == 1
    assert name in adapter.objects, "it may be there for good, and takes its room as long"
    assert the_tier(loop)["bytes_used"] == sum(map(len, adapter.objects.values())) == 8 * OBJECT_BYTES
    gate.set()
    loop.until(lambda: not the_tier(loop)["deletes"]["hung"])
    assert name not in adapter.objects
    assert the_tier(loop)["bytes_used"] == 7 * OBJECT_BYTES
    assert the_tier(loop)["bytes_leaving"] == 0


def test_an_object_whose_delete_hangs_is_neither_stored_anew_nor_waited_for(doubles: Doubles) -> None:
    adapter = doubles.adapter()
    loop = evicting(doubles, adapter)
    loop.l1.evict(doubles.key(0))
    gate = hang_one_delete(doubles, loop, adapter, 10)
    loop.idle()
    loop.l1.evict(doubles.key(5))
    job = loop.fetch([doubles.key(5), doubles.key(0)])
    assert (job.hits, job.loaded) == (1, {0}), "no time has passed"
    stores = adapter.calls["store"]
    loop.store(doubles.contents(1))
    loop.store(doubles.contents(1, first=11))
    loop.until(lambda: tier_key(doubles.key(11), doubles.namespace, 0) in adapter.objects)
    assert adapter.calls["store"] == stores + 1
    assert loop.tiering.owed["mem"], "it is stored once its delete has returned"
    gate.set()
    loop.until(lambda: not the_tier(loop)["deletes"]["hung"])
    for _ in range(30):
        loop.jump(BREAKER_PAUSE_MAX_S)
        loop.idle()
    assert tier_key(doubles.key(0), doubles.namespace, 0) in adapter.objects
    assert loop.tiering.owed == {"mem": 0}


def test_stores_rest_while_every_thread_for_deletes_hangs_and_go_on_once_one_returns(doubles: Doubles) -> None:
    adapter = doubles.adapter()
    loop = evicting(doubles, adapter)
    gates = []
    for number in range(THREADS):
        assert breaker(loop, "writes") == "closed"
        gates.append(hang_one_delete(doubles, loop, adapter, 10 + number))
        loop.until(lambda number=number: the_tier(loop)["deletes"]["hung"] == number + 1)
        if number < THREADS - 1:
            loop.idle()
    assert breaker(loop, "writes") == "open"
    assert "delete" in the_tier(loop)["last_error"]
    assert the_tier(loop)["lanes"]["mem-delete"]["hung"] == THREADS
    assert breaker(loop) == "closed", "what it has is read"
    stores = adapter.calls["store"]
    for _ in range(4):
        loop.jump(BREAKER_PAUSE_MAX_S)
        loop.until(lambda: True)
    assert (adapter.calls["store"], breaker(loop, "writes")) == (stores, "open"), "no probe says more about deletes"
    gates.pop().set()
    loop.until(lambda: breaker(loop, "writes") == "closed")
    loop.store(doubles.contents(1, first=30))
    loop.until(lambda: tier_key(doubles.key(30), doubles.namespace, 0) in adapter.objects)
    for gate in gates:
        gate.set()
    loop.until(lambda: not the_tier(loop)["deletes"]["hung"])
    loop.until(lambda: the_tier(loop)["bytes_used"] == sum(map(len, adapter.objects.values())))


def test_a_clear_goes_on_beside_a_delete_that_hangs(doubles: Doubles) -> None:
    adapter = doubles.adapter()
    loop = evicting(doubles, adapter)
    gate = hang_one_delete(doubles, loop, adapter, 10)
    loop.idle()
    loop.clear(doubles.namespace, tiers=True)
    loop.until(lambda: len(adapter.objects) == 1)
    gate.set()
    loop.until(lambda: not adapter.objects)


def test_deletes_that_hang_leave_the_threads_to_stores(doubles: Doubles) -> None:
    adapter = doubles.adapter()
    loop = doubles.loop(doubles.l1(64), doubles.tier("mem", adapter, deadline_s=5.0), stands=True)
    loop.idle()
    loop.store(doubles.contents(4))
    loop.idle()
    adapter.hang("delete")
    for number in range(THREADS - 1):
        loop.tiering.remove(doubles.namespace, [doubles.key(number)])
        loop.until(lambda number=number: adapter.calls["delete"] == number + 1)
        loop.jump(5.01)
        loop.until(lambda: True)
    loop.store(doubles.contents(2, first=20))
    loop.until(lambda: len(adapter.objects) == 6)
    adapter.release("delete")


@pytest.mark.parametrize("dirty", ["drop", "keep"])
def test_a_full_tier_whose_deletes_hang_keeps_nothing_in_the_pool(doubles: Doubles, dirty: str) -> None:
    adapter = doubles.adapter()
    tier = doubles.tier("mem", adapter, deadline_s=5.0, capacity_bytes=10 * 9096, eviction=LruEviction())
    loop = doubles.loop(doubles.l1(64), tier, stands=True, config={"dirty": dirty})
    loop.idle()
    adapter.hang("delete")
    loop.store(doubles.contents(40))
    loop.until(lambda: adapter.calls["delete"])
    for _ in range(4):
        loop.jump(5.01)
        loop.until(lambda: True)
    loop.until(lambda: breaker(loop, "writes") != "closed" and not loop.l1.shielded)
    assert loop.tiering.drained
    adapter.release("delete")

    def closed() -> bool:
        if breaker(loop, "writes") == "open":  # a probe that a busy machine made late
            loop.jump(BREAKER_PAUSE_MAX_S)
        return breaker(loop, "writes") == "closed"

    loop.until(closed)


def test_one_question_that_never_returns_does_not_end_all_questions_about_doubts(doubles: Doubles) -> None:
    adapter = doubles.adapter()
    loop = doubles.loop(
        doubles.l1(64), doubles.tier("mem", adapter, deadline_s=5.0, capacity_bytes=60_000), stands=True
    )
    loop.idle()
    adapter.errors["store"] = TierError("the answer was lost")
    adapter.hang("exists")
    loop.store(doubles.contents(1))
    loop.until(lambda: the_tier(loop)["deletes"]["in_doubt"] == 1 and adapter.calls["exists"])
    never = adapter.gates.pop("exists")  # it alone hangs
    del adapter.errors["store"]

    def settled() -> bool:
        loop.jump(0.5)  # not all at once: a question that is on its lane must not be late by that
        return not the_tier(loop)["deletes"]["in_doubt"]

    loop.until(settled)
    assert the_tier(loop)["bytes_reserved"] == 0
    never.set()


def test_one_page_that_never_returns_does_not_end_the_scan(doubles: Doubles) -> None:
    adapter = doubles.adapter()
    adapter.hang("scan")
    loop = doubles.loop(doubles.l1(64), doubles.tier("mem", adapter, deadline_s=5.0), stands=True)
    loop.until(lambda: adapter.calls["scan"] == 1)
    never = adapter.gates.pop("scan")
    loop.jump(BREAKER_PAUSE_MAX_S)
    loop.turn()
    loop.jump(BREAKER_PAUSE_MAX_S)
    loop.until(loop.scanned)
    never.set()


def test_what_was_dropped_while_it_was_being_stored_is_deleted_though_the_first_delete_fails(doubles: Doubles) -> None:
    adapter = doubles.adapter()
    loop = doubles.loop(doubles.l1(64), doubles.tier("mem", adapter, deadline_s=500.0), stands=True)
    loop.idle()
    key = doubles.key(0)
    adapter.hang("store")
    loop.store(doubles.contents(1))
    loop.until(lambda: adapter.calls["store"])
    loop.l1.evict(key)  # as the kernel does first
    loop.tiering.remove(doubles.namespace, [key])
    adapter.errors["delete"] = TierError("read-only for a moment")
    adapter.release("store")
    loop.until(lambda: the_tier(loop)["deletes"]["failed"])
    assert adapter.objects
    assert not any(loop.tiering.on_tiers(doubles.namespace, [key]))
    assert not loop.tiering.drained, "an orderly end waits for what is to be deleted"
    del adapter.errors["delete"]
    loop.jump(BREAKER_PAUSE_MAX_S)
    loop.until(lambda: not adapter.objects)
    loop.until(lambda: loop.tiering.drained)
    loop.store(doubles.contents(1))
    loop.until(lambda: adapter.objects)
    loop.idle()
    assert any(loop.tiering.on_tiers(doubles.namespace, [key])), "what is stored again counts again"


@pytest.mark.parametrize("policy", [DefaultStore, SkipL1Store])
def test_a_store_that_ends_on_a_replaced_tier_is_made_again_on_the_new_one(doubles: Doubles, policy: Any) -> None:
    old, new = doubles.adapter(), doubles.adapter()
    tier = doubles.tier("mem", old, deadline_s=500.0)
    loop = doubles.loop(doubles.l1(64), tier, stands=True, store_policy=policy(None))
    loop.idle()
    old.hang("store")
    loop.store(doubles.contents(1))
    loop.until(lambda: old.calls["store"])
    loop.tiering.replace_tier(doubles.tier("mem", new, deadline_s=500.0))
    old.release("store")
    loop.until(lambda: new.objects)
    assert old.objects.keys() == new.objects.keys()


def test_what_was_dropped_is_found_again_only_once_its_next_store_is_done(doubles: Doubles) -> None:
    adapter = doubles.adapter()
    loop = doubles.loop(doubles.l1(64), doubles.tier("mem", adapter, deadline_s=500.0), stands=True)
    loop.idle()
    key = doubles.key(0)
    loop.store(doubles.contents(1))
    loop.idle()
    loop.l1.evict(key)
    adapter.errors["delete"] = TierError("read-only for a moment")
    loop.tiering.remove(doubles.namespace, [key])
    loop.until(lambda: the_tier(loop)["deletes"]["failed"])
    adapter.hang("store")
    loop.store(doubles.contents(1))
    loop.until(lambda: adapter.calls["store"] == 2)
    assert not any(loop.tiering.on_tiers(doubles.namespace, [key])), (
        "it is being stored, and the dropped one is still there"
    )
    adapter.errors["store"] = TierError("refused", retryable=False)
    adapter.release("store")
    loop.until(lambda: not loop.tiering.status()["stores"]["in_flight_bytes"])
    assert not any(loop.tiering.on_tiers(doubles.namespace, [key])), "nobody has replaced it"
    del adapter.errors["delete"], adapter.errors["store"]
    loop.l1.evict(key)
    loop.jump(BREAKER_PAUSE_MAX_S)
    loop.until(lambda: not adapter.objects)
    loop.until(lambda: loop.tiering.drained)


def test_an_orderly_end_waits_for_no_delete_of_what_is_not_there(doubles: Doubles) -> None:
    adapter = doubles.adapter()
    loop = doubles.loop(doubles.l1(64), doubles.tier("mem", adapter, deadline_s=500.0), stands=True)
    loop.idle()
    adapter.errors["delete"] = TierError("read-only")
    loop.tiering.remove(doubles.namespace, [doubles.key(0)])
    loop.until(lambda: the_tier(loop)["deletes"]["failed"])
    assert not loop.tiering.drained
    loop.jump(BREAKER_PAUSE_MAX_S)
    loop.until(lambda: loop.tiering.drained)


def test_a_page_of_a_scan_that_was_given_up_begins_no_other_scan(
    doubles: Doubles, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is from the middle of the list: what stands before it would be forgotten."""
    adapter = doubles.adapter()
    tier = doubles.tier("mem", adapter, deadline_s=5.0, rescan_s=100.0)
    loop = doubles.loop(doubles.l1(64), tier, stands=True)
    loop.idle()
    loop.store(doubles.contents(12))
    loop.idle()
    rebuild, listed, hung = tier.rebuild, adapter.scan, threading.Event()
    failed: list[str | None] = []
    hanging: list[str | None] = []

    def scan(cursor: str | None, deadline: float) -> ScanPage:
        if cursor != "6" or hung.is_set():
            return listed(cursor, deadline)
        if len(failed) < SCAN_TRIES_MAX - LANE_REPLACEMENTS_MAX:
            failed.append(cursor)
            raise TierError("reset by peer")
        hanging.append(cursor)
        assert hung.wait(SAFETY_S)
        return listed(cursor, deadline)

    def jumped(to: RebuildState) -> bool:
        hangs = not hung.is_set() and len(hanging) > tier.medium.lookups.hung
        if rebuild.next_at is not None or hangs:  # otherwise a page would be late that is about to come
            loop.jump(1.0)
        return rebuild.state is to

    monkeypatch.setattr(adapter, "scan", scan)
    loop.jump(101.0)
    loop.until(lambda: jumped(RebuildState.DONE) and rebuild.refused)
    loop.until(lambda: jumped(RebuildState.RESCANNING))  # and no thread is left to list the first page
    hung.set()
    loop.until(lambda: not tier.medium.lookups.hung)
    loop.until(lambda: jumped(RebuildState.DONE) and not rebuild.refused)
    assert (tier.accounting.objects, rebuild.forgotten) == (12, 0)


def test_an_orderly_end_waits_for_no_delete_that_hangs(doubles: Doubles) -> None:
    adapter = doubles.adapter()
    loop = doubles.loop(doubles.l1(64), doubles.tier("mem", adapter, deadline_s=5.0), stands=True)
    loop.idle()
    loop.store(doubles.contents(2))
    loop.idle()
    adapter.hang("delete")
    loop.tiering.remove(doubles.namespace, [doubles.key(0)])
    loop.until(lambda: adapter.calls["delete"])
    assert not loop.tiering.drained
    loop.jump(5.01)
    loop.until(lambda: loop.tiering.drained)
    assert loop.tiering.owed_deletes == {"mem": 1}, "and says so"
    adapter.release("delete")
    loop.until(lambda: not loop.tiering.owed_deletes["mem"])


def test_an_orderly_end_waits_for_no_delete_that_fails_again_and_again(doubles: Doubles) -> None:
    adapter = doubles.adapter()
    loop = doubles.loop(doubles.l1(64), doubles.tier("mem", adapter, deadline_s=500.0), stands=True)
    loop.idle()
    loop.store(doubles.contents(2))
    loop.idle()
    adapter.errors["delete"] = TierError("read-only")
    loop.tiering.remove(doubles.namespace, [doubles.key(0)])
    for calls in range(1, BREAKER_FAILURES + 1):
        assert not loop.tiering.drained
        loop.until(lambda calls=calls: the_tier(loop)["deletes"]["failed"] >= calls)  # type: ignore[misc]
        loop.jump(BREAKER_PAUSE_MAX_S)
    loop.until(lambda: loop.tiering.drained)
    assert loop.tiering.owed_deletes == {"mem": 1}
    del adapter.errors["delete"]
    loop.jump(BREAKER_PAUSE_MAX_S)
    loop.until(lambda: not loop.tiering.owed_deletes["mem"])


def test_an_orderly_end_gives_up_deletes_at_once_where_stores_fail_too(doubles: Doubles) -> None:
    adapter = doubles.adapter()
    loop = doubles.loop(doubles.l1(64), doubles.tier("mem", adapter, deadline_s=500.0), stands=True)
    loop.idle()
    loop.store(doubles.contents(2))
    loop.idle()
    for what in ("store", "delete"):
        adapter.errors[what] = TierError("gone", retryable=False)
    for calls in range(2, 2 + BREAKER_FAILURES):
        loop.store(doubles.contents(1, first=10 + calls))
        loop.until(lambda calls=calls: adapter.calls["store"] == calls)  # type: ignore[misc]
    loop.until(lambda: breaker(loop, "writes") == "open")
    loop.tiering.remove(doubles.namespace, [doubles.key(0)])
    assert not loop.tiering.drained
    loop.until(lambda: the_tier(loop)["deletes"]["failed"])
    loop.until(lambda: loop.tiering.drained)
    assert loop.tiering.owed["mem"]
    assert loop.tiering.owed_deletes == {"mem": 1}
