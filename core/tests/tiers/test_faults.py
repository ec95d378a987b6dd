"""A tier may be slow, hung, lying, full, gone or back: the worst that happens is a miss with its reason."""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from lmcache_core.errors import TierError
from lmcache_core.limits import (
    BREAKER_FAILURES,
    BREAKER_PAUSE_MAX_S,
    BREAKER_PAUSE_S,
    ERROR_CHARS_MAX,
    LANE_QUEUE_MAX,
    LOOKUPS_WAITING_MAX,
    RECOUNT_PAUSE_S,
    SECOND_LOOK_S,
    TIER_ERROR_KEPT_S,
    TIER_LOOKUP_S,
    WRITE_BACK_PAUSE_S_MAX,
)
from lmcache_core.tiers.contract import LoadItem, Outcome, Result, StoreItem
from lmcache_core.tiers.flow.job_states import JobState
from lmcache_core.tiers.l1 import TierReason
from lmcache_core.tiers.object.epochs import Epochs
from lmcache_core.tiers.object.format import tier_key
from lmcache_core.tiers.tier.breaker_states import BreakerState
from lmcache_core.tiers.tier.call_states import CallState
from lmcache_core.tiers.tier.lanes import Call, Lane
from lmcache_core.tiers.tier.trouble import Trouble
from lmcache_testing.embedded import Json

from .conftest import Doubles, Loop


@pytest.fixture
def stocked(doubles: Doubles) -> Loop:
    """A loop with two tiers, `near` and `far`, that both have objects 0 to 3; the L1 is empty."""
    near, far = doubles.adapter(), doubles.adapter()
    loop = doubles.loop(doubles.l1(16), doubles.tier("near", near), doubles.tier("far", far))
    loop.store(doubles.contents(4))
    loop.idle()
    for _, key in list(loop.l1.ready):
        loop.l1.evict(key)
    loop.near, loop.far = near, far
    return loop


def _breaker(loop: Loop, tier: int, side: str) -> str:
    return str(loop.tiering.status()["tiers"][tier][side]["breaker"])


def test_a_hung_tier_does_not_delay_what_another_can_answer(doubles: Doubles, stocked: Loop) -> None:
    stocked.near.hang("exists")
    job = stocked.fetch([doubles.key(i) for i in range(4)])
    assert job.hits == 4
    assert stocked.near.entered.acquire(timeout=60)
    stocked.near.release("exists")


def test_a_hung_lookup_is_given_up_and_the_others_decide(doubles: Doubles, stocked: Loop) -> None:
    stocked.near.hang("exists")
    del stocked.far.objects[tier_key(doubles.key(2), doubles.namespace, 0)]
    before = stocked.lookups_heard(stocked.far)
    job = stocked.ask([doubles.key(i) for i in range(4)])
    stocked.until(lambda: stocked.near.calls["exists"] and stocked.lookups_heard(stocked.far) > before)
    assert job.state is JobState.ASKING, "the silent tier may have the third key"
    stocked.jump(TIER_LOOKUP_S + 0.1)
    stocked.until(lambda: job.ended)
    assert job.hits == 2
    assert job.reasons[2] is TierReason.LATE
    stocked.near.release("exists")


def test_a_late_load_is_a_miss_now_and_its_slot_waits_for_the_lane(doubles: Doubles, stocked: Loop) -> None:
    for adapter in (stocked.near, stocked.far):
        adapter.hang("load")
    free = len(stocked.l1.free)
    job = stocked.ask([doubles.key(0)], seconds=5.0)
    stocked.until(lambda: stocked.near.calls["load"] or stocked.far.calls["load"])
    stocked.jump(6.0)
    stocked.until(lambda: job.ended)
    assert (job.hits, job.reasons) == (0, {0: TierReason.LATE})
    assert len(stocked.l1.quarantined) == 1
    assert len(stocked.l1.free) == free - 1, "the lane may still write to the slot"
    for adapter in (stocked.near, stocked.far):
        adapter.release("load")
    stocked.until(lambda: len(stocked.l1.free) == free)
    assert not stocked.l1.quarantined
    assert stocked.l1.get(doubles.key(0)) is None, "what came late is not served"


def test_a_load_that_comes_back_while_its_deadline_is_noticed_ends_once(
    doubles: Doubles, stocked: Loop, monkeypatch: pytest.MonkeyPatch
) -> None:
    stocked.near.hang("load")
    stocked.far.objects.clear()
    free = len(stocked.l1.free)
    job = stocked.ask([doubles.key(0)], seconds=5.0)
    stocked.until(lambda: stocked.near.calls["load"])
    expire = Lane.expire

    def noticed_and_back(lane: Lane, now: float) -> list[Call]:
        late = expire(lane, now)
        if late:
            stocked.near.release("load")
            for call in late:
                deadline = time.monotonic() + 60
                while call.state is not CallState.ENDED:
                    assert time.monotonic() < deadline, "the lane's thread did not end the call"
                    time.sleep(0.001)
        return late

    monkeypatch.setattr(Lane, "expire", noticed_and_back)
    stocked.jump(6.0)
    stocked.until(lambda: job.ended and len(stocked.l1.free) == free and not stocked.l1.quarantined)
    assert (job.hits, job.reasons) == (0, {0: TierReason.LATE})
    assert stocked.tiering.status()["faults"] == 0


def test_after_a_clear_who_asks_next_has_a_load_of_its_own(doubles: Doubles, stocked: Loop) -> None:
    """One that joined a load of before the clear would be told CLEARED when that returns."""
    stocked.near.hang("load")
    stocked.far.objects.clear()
    before = stocked.ask([doubles.key(0)])
    stocked.until(lambda: stocked.near.calls["load"])
    stocked.clear(doubles.namespace)
    stocked.l1.loading.clear()
    assert before.ended
    after = stocked.ask([doubles.key(0)])
    stocked.near.release("load")
    stocked.until(lambda: after.ended)
    assert (after.loaded, after.reasons) == ({0}, {})


def test_after_a_late_load_the_key_can_be_loaded_again_at_once(doubles: Doubles, stocked: Loop) -> None:
    stocked.near.hang("load")
    stocked.far.objects.clear()
    job = stocked.ask([doubles.key(0)], seconds=5.0)
    stocked.until(lambda: stocked.near.calls["load"])
    stocked.jump(6.0)
    stocked.until(lambda: job.ended)
    stocked.store({doubles.key(0): b"n" * doubles.layout.nbytes})
    stocked.near.release("load")
    stocked.until(lambda: not stocked.l1.quarantined and stocked.tiering.drained)
    assert stocked.l1.get(doubles.key(0)) == b"n" * doubles.layout.nbytes, "the late load wrote elsewhere"


def test_a_tier_that_keeps_failing_is_left_alone_and_used_again_when_it_is_back(
    doubles: Doubles, stocked: Loop
) -> None:
    stocked.near.errors["exists"] = TierError("connection refused", retryable=False)
    stocked.far.objects.clear()
    for _ in range(BREAKER_FAILURES):
        assert stocked.fetch([doubles.key(0)]).reasons == {0: TierReason.TIER_ERROR}
    assert _breaker(stocked, 0, "reads") == "open"
    asked = stocked.near.calls["exists"]
    assert stocked.fetch([doubles.key(0)]).reasons == {0: TierReason.TIER_ERROR}
    assert stocked.near.calls["exists"] == asked, "an open breaker asks nothing"
    stocked.jump(10.0)
    stocked.until(lambda: stocked.near.calls["exists"] > asked and _breaker(stocked, 0, "reads") == "open")
    del stocked.near.errors["exists"]
    stocked.jump(60.0)
    stocked.until(lambda: _breaker(stocked, 0, "reads") == "closed")  # by itself: no request was needed
    assert stocked.fetch([doubles.key(0)]).hits == 1


def test_the_last_error_has_a_time_and_goes_when_the_tier_is_well(doubles: Doubles, stocked: Loop) -> None:
    def told() -> tuple[str, float | None]:
        tier = stocked.tiering.status()["tiers"][0]
        return tier["last_error"], tier["last_error_age_s"]

    assert told() == ("", None)
    stocked.near.errors["exists"] = TierError("connection refused", retryable=False)
    stocked.far.objects.clear()
    stocked.fetch([doubles.key(0)])
    error, age_s = told()
    assert "connection refused" in error
    assert age_s is not None
    stocked.jump(5.0)
    later_s = told()[1]
    assert later_s is not None
    assert later_s >= age_s + 5.0
    del stocked.near.errors["exists"]
    assert stocked.fetch([doubles.key(0)]).hits == 1
    assert told() == ("", None)


def test_an_error_of_one_thing_outlives_the_success_of_another_for_a_while_only() -> None:
    trouble = Trouble("near", Counter())
    trouble.note("store", "no right to write", now=100.0)
    trouble.note("lookup", "no answer", now=101.0)
    assert (trouble.text, trouble.age_s(103.0)) == ("no answer", 2.0)
    trouble.well("lookup", 104.0)
    assert (trouble.text, trouble.age_s(104.0)) == ("no right to write", 4.0)
    trouble.well("lookup", 100.0 + TIER_ERROR_KEPT_S)
    assert trouble.text == "no right to write"
    trouble.well("lookup", 101.0 + TIER_ERROR_KEPT_S)
    assert (trouble.text, trouble.age_s(200.0)) == ("", None)


def test_objects_wait_for_a_tier_that_takes_no_stores_and_go_there_when_it_is_back(
    doubles: Doubles, stocked: Loop
) -> None:
    stocked.near.answers["store"] = Outcome(Result.FAILED, error="read-only file system")
    for i in range(BREAKER_FAILURES):
        stocked.store(doubles.contents(1, first=10 + i))
        stocked.until(lambda: stocked.tiering.drained)
    assert _breaker(stocked, 0, "writes") == "open"
    assert _breaker(stocked, 0, "reads") == "closed", "a read-only tier is still read"
    stored = stocked.near.calls["store"]
    stocked.store(doubles.contents(1, first=30))
    stocked.until(lambda: stocked.tiering.drained and tier_key(doubles.key(30), 7, 0) in stocked.far.objects)
    assert stocked.near.calls["store"] == stored
    del stocked.near.answers["store"]
    stocked.jump(60.0)
    stocked.until(lambda: tier_key(doubles.key(30), doubles.namespace, 0) in stocked.near.objects)
    stocked.until(lambda: _breaker(stocked, 0, "writes") == "closed")


def test_a_tier_that_was_down_at_start_is_scanned_and_used_once_it_is_up(doubles: Doubles) -> None:
    adapter = doubles.adapter()
    adapter.objects[tier_key(doubles.key(0), doubles.namespace, 0)] = b"x" * 5000
    adapter.errors = dict.fromkeys(("scan", "exists"), TierError("connection refused", retryable=False))
    loop = doubles.loop(doubles.l1(), doubles.tier("mem", adapter))
    loop.until(lambda: adapter.calls["scan"])
    assert loop.fetch([doubles.key(0)]).hits == 0
    adapter.errors.clear()
    loop.jump(60.0)
    loop.idle()
    assert loop.tiering.status()["tiers"][0]["objects"] == 1


def test_a_scan_that_fails_says_so_and_is_no_empty_tier(doubles: Doubles) -> None:
    adapter = doubles.adapter()
    adapter.errors["scan"] = TierError("the directory may not be read: give the right to", retryable=False)
    loop = doubles.loop(doubles.l1(), doubles.tier("disk", adapter))
    loop.until(lambda: adapter.calls["scan"] and loop.tiering.status()["tiers"][0]["last_error"])
    tier = loop.tiering.status()["tiers"][0]
    assert tier["scan"] in ("scanning", "unlisted")
    assert "give the right to" in tier["last_error"]
    assert tier["counts"] == {"scan_failed": 1}
    del adapter.errors["scan"]
    loop.jump(BREAKER_PAUSE_S)
    loop.until(loop.scanned)


def test_a_full_queue_answers_throttled_at_once(doubles: Doubles) -> None:
    adapter = doubles.adapter()
    loop = doubles.loop(
        doubles.l1(), doubles.tier("mem", adapter), config={"prefetch_in_flight_max": LANE_QUEUE_MAX + 10}
    )
    loop.idle()
    adapter.hang("exists")
    jobs = [loop.ask([doubles.key(i)]) for i in range(LANE_QUEUE_MAX + 6)]
    loop.until(lambda: loop.done)
    throttled = [job for job in jobs if job.ended]
    assert {reason for job in throttled for reason in job.reasons.values()} == {TierReason.THROTTLED}
    assert len(throttled) <= 6
    adapter.release("exists")
    loop.until(lambda: all(job.ended for job in jobs))


def test_lookups_beyond_the_limit_wait_and_beyond_the_queue_are_throttled(doubles: Doubles) -> None:
    adapter = doubles.adapter()
    loop = doubles.loop(doubles.l1(), doubles.tier("mem", adapter), config={"prefetch_in_flight_max": 2})
    loop.idle()
    adapter.hang("exists")
    jobs = [loop.ask([doubles.key(i)]) for i in range(LOOKUPS_WAITING_MAX + 3)]
    assert [job.state for job in jobs[:3]] == [JobState.ASKING, JobState.ASKING, JobState.WAITING]
    assert jobs[-1].reasons == {0: TierReason.THROTTLED}
    adapter.release("exists")
    loop.until(lambda: all(job.ended for job in jobs))
    assert len(loop.done) == len(jobs)


def test_eight_hung_prefetches_do_not_stop_prefetching_for_ever(doubles: Doubles, stocked: Loop) -> None:
    stocked.near.hang("load")
    stocked.far.hang("load")
    jobs = [stocked.ask([doubles.key(i % 4)], seconds=3.0) for i in range(8)]
    stocked.until(lambda: any(job.state is JobState.LOADING for job in jobs))
    stocked.jump(4.0)
    stocked.until(lambda: all(job.ended for job in jobs))
    stocked.near.release("load")
    stocked.far.release("load")
    stocked.until(lambda: not stocked.l1.held)
    assert stocked.fetch([doubles.key(0)]).hits == 1


def test_a_tier_whose_old_calls_never_return_is_used_again_by_fresh_threads(doubles: Doubles) -> None:
    adapter = doubles.adapter()
    loop = doubles.loop(doubles.l1(), doubles.tier("mem", adapter, connections=1))
    loop.store(doubles.contents(1))
    loop.idle()
    loop.l1.evict(doubles.key(0))
    adapter.hang("load")
    job = loop.ask([doubles.key(0)], seconds=3.0)
    loop.until(lambda: adapter.calls["load"])
    loop.jump(4.0)
    loop.until(lambda: job.ended)
    hung = adapter.gates.pop("load")  # the medium is well again, and the old call is not
    assert loop.fetch([doubles.key(0)]).hits == 1
    hung.set()
    loop.until(lambda: not loop.l1.held)


@pytest.mark.parametrize("hung", ["exists", "load", "store", "delete", "scan"])
def test_close_never_waits_for_a_hung_lane(doubles: Doubles, hung: str) -> None:
    adapter = doubles.adapter()
    loop = doubles.loop(doubles.l1(), doubles.tier("mem", adapter))
    if hung != "scan":
        loop.store(doubles.contents(1))
        loop.idle()
        loop.l1.evict(doubles.key(0))
    adapter.hang(hung)
    before = adapter.calls[hung]
    if hung == "store":
        loop.store(doubles.contents(1, first=1))
    elif hung == "delete":
        loop.clear(None, tiers=True)
    elif hung != "scan":
        loop.ask([doubles.key(0)])
    loop.until(lambda: adapter.calls[hung] > before)
    assert not loop.tiering.close(), "the call is out: the pool must stay mapped"
    assert not adapter.closed
    assert all(job.ended for job in loop.done)
    adapter.release(hung)
    for _ in itertools.count():
        if adapter.closed:
            break
        loop.woken.wait(0.01)


def test_retries_stop_at_the_first_success_and_only_what_failed_goes_again(doubles: Doubles) -> None:
    adapter = doubles.adapter()
    loop = doubles.loop(doubles.l1(), doubles.tier("mem", adapter))
    loop.store(doubles.contents(2))
    loop.idle()
    seen = []
    real = adapter.load_one

    def flaky(item: LoadItem) -> Outcome:
        seen.append(item.key)
        if len(seen) == 1:
            return Outcome(Result.FAILED, error="reset by peer", retryable=True)
        outcome: Outcome = real(item)
        return outcome

    adapter.load_one = flaky
    for i in range(2):
        loop.l1.evict(doubles.key(i))
    assert loop.fetch([doubles.key(0), doubles.key(1)]).hits == 2
    first, second = (tier_key(doubles.key(i), doubles.namespace, 0) for i in range(2))
    assert seen == [first, second, first]


@pytest.mark.parametrize("answers", [[], [Outcome(Result.DONE)] * 3])
def test_an_adapter_that_miscounts_fails_with_a_message(doubles: Doubles, answers: list[Outcome]) -> None:
    adapter = doubles.adapter()
    loop = doubles.loop(doubles.l1(), doubles.tier("mem", adapter))
    loop.store(doubles.contents(1))
    loop.idle()
    loop.l1.evict(doubles.key(0))
    adapter.load = lambda items, deadline: answers
    job = loop.fetch([doubles.key(0)])
    assert job.reasons == {0: TierReason.TIER_ERROR}
    assert "outcomes for 1 items" in loop.tiering.status()["tiers"][0]["last_error"]


def test_a_tier_in_trouble_says_so_in_the_log_once_and_not_once_an_object(
    doubles: Doubles, caplog: pytest.LogCaptureFixture
) -> None:
    adapter = doubles.adapter()
    adapter.answers["store"] = Outcome(Result.FAILED, error="the disk is on fire", retryable=False)
    loop = doubles.loop(doubles.l1(), doubles.tier("mem", adapter))
    for _ in range(3):
        loop.store(doubles.contents(2))
        loop.idle()
    assert [record.getMessage() for record in caplog.records] == ["tier mem: the disk is on fire"]


@pytest.mark.parametrize("content", [b"", b"short", bytes(4096), bytes(9096), bytes(10_000)])
def test_bytes_that_are_no_object_are_a_miss(doubles: Doubles, content: bytes) -> None:
    adapter = doubles.adapter()
    loop = doubles.loop(doubles.l1(), doubles.tier("mem", adapter))
    name = tier_key(doubles.key(0), doubles.namespace, 0)
    loop.store(doubles.contents(1, first=1))  # shows that the way is well
    loop.idle()
    adapter.objects[name] = content
    job = loop.fetch([doubles.key(0)])
    assert job.reasons == {0: TierReason.DAMAGED}
    loop.jump(SECOND_LOOK_S)
    loop.until(lambda: name not in adapter.objects)
    assert not loop.l1.held


def test_no_room_in_the_l1_ends_the_prefix(doubles: Doubles) -> None:
    adapter = doubles.adapter()
    loop = doubles.loop(doubles.l1(4), doubles.tier("mem", adapter))
    loop.store(doubles.contents(4))
    loop.idle()
    for i in range(2):
        loop.l1.evict(doubles.key(i))
    loop.l1.put(doubles.key(90), b"other")
    job = loop.fetch([doubles.key(0), doubles.key(1)])
    assert (job.hits, job.reasons) == (1, {1: TierReason.NO_ROOM})


@pytest.mark.parametrize("tiers", [False, True])
@pytest.mark.parametrize("step", ["asking", "loading"])
def test_a_clear_ends_lookups_and_nothing_of_them_is_served(
    doubles: Doubles, stocked: Loop, tiers: bool, step: str
) -> None:
    method = "exists" if step == "asking" else "load"
    stocked.near.hang(method)
    stocked.far.hang(method)
    job = stocked.ask([doubles.key(0)])
    stocked.until(lambda: stocked.near.calls[method] or stocked.far.calls[method])
    stocked.clear(doubles.namespace, tiers=tiers)
    stocked.until(lambda: job.ended)
    assert (job.hits, job.reasons) == (0, {0: TierReason.CLEARED})
    stocked.near.release(method)
    stocked.far.release(method)
    stocked.until(lambda: not stocked.l1.held and stocked.tiering.drained)
    assert stocked.l1.get(doubles.key(0)) is None
    assert stocked.fetch([doubles.key(0)]).hits == (0 if tiers else 1)


def test_a_store_that_a_clear_overtakes_is_deleted_again(doubles: Doubles) -> None:
    adapter = doubles.adapter()
    loop = doubles.loop(doubles.l1(), doubles.tier("mem", adapter))
    adapter.hang("store")
    loop.store(doubles.contents(1))
    loop.until(lambda: adapter.calls["store"])
    loop.clear(doubles.namespace, tiers=True)
    adapter.release("store")
    loop.until(lambda: adapter.calls["delete"] and not adapter.objects)
    loop.idle()
    loop.l1.evict(doubles.key(0))
    assert loop.fetch([doubles.key(0)]).reasons == {0: TierReason.NOWHERE}


def test_a_clear_deletes_what_it_made_unreachable_and_nothing_else(doubles: Doubles) -> None:
    adapter = doubles.adapter()
    loop = doubles.loop(doubles.l1(), doubles.tier("mem", adapter))
    loop.store(doubles.contents(5))
    loop.tiering.on_committed([loop.l1.put(doubles.key(7), doubles.content(7), namespace=99)])
    loop.idle()
    loop.clear(doubles.namespace, tiers=True)
    loop.until(lambda: len(adapter.objects) == 1)
    assert list(adapter.objects) == [tier_key(doubles.key(7), 99, 0)]
    loop.until(lambda: loop.tiering.status()["tiers"][0]["objects"] == 1)


def test_what_was_cleared_before_a_restart_is_deleted_by_a_server_whose_medium_was_down_at_start(
    doubles: Doubles, tmp_path: Path
) -> None:
    """The scan that finds it is not the first one: that one was refused."""
    adapter = doubles.adapter()
    left = tier_key(doubles.key(0), doubles.namespace, 0)
    adapter.objects[left] = b"x" * 5000
    adapter.objects[tier_key(doubles.key(0), doubles.namespace, 1)] = b"x" * 5000
    Epochs(tmp_path / "epochs").move(doubles.namespace)
    adapter.errors["scan"] = TierError("connection refused", retryable=False)
    loop = doubles.loop(doubles.l1(), doubles.tier("mem", adapter), epochs=Epochs(tmp_path / "epochs"))
    loop.until(lambda: adapter.calls["scan"] and loop.tiering.status()["tiers"][0]["scan"] == "unlisted")
    adapter.errors.clear()
    loop.jump(60.0)
    loop.until(lambda: left not in adapter.objects)
    loop.idle()
    assert loop.tiering.status()["tiers"][0]["objects"] == len(adapter.objects) == 1


def test_what_another_server_stores_under_a_former_epoch_is_deleted_once_a_scan_finds_it(doubles: Doubles) -> None:
    adapter = doubles.adapter()
    loop = doubles.loop(doubles.l1(), doubles.tier("mem", adapter, rescan_s=10.0))
    loop.idle()
    loop.clear(doubles.namespace, tiers=True)
    loop.idle()
    for number in range(3):  # by a server that has not read of the clear yet
        adapter.objects[tier_key(doubles.key(number), doubles.namespace, 0)] = b"x" * 5000
    loop.jump(11.0)
    loop.until(lambda: not adapter.objects)
    loop.idle()
    tier = loop.tiering.status()["tiers"][0]
    assert (tier["objects"], tier["bytes_leaving"], tier["deletes"]["waiting"]) == (0, 0, 0)


def test_what_a_clear_could_not_delete_is_deleted_once_the_medium_lets_it(doubles: Doubles) -> None:
    adapter = doubles.adapter()
    loop = doubles.loop(doubles.l1(16), doubles.tier("mem", adapter))
    loop.store(doubles.contents(4))
    loop.idle()
    adapter.errors["delete"] = TierError("read-only", retryable=False)
    loop.clear(doubles.namespace, tiers=True)
    loop.until(lambda: adapter.calls["delete"] >= 1 and loop.tiering.status()["tiers"][0]["deletes"]["failed"] >= 4)
    assert len(adapter.objects) == 4
    adapter.errors.clear()
    loop.jump(BREAKER_PAUSE_S + 0.1)
    loop.until(lambda: not loop.tiering.status()["tiers"][0]["objects"])
    assert adapter.objects == {}
    assert loop.tiering.status()["tiers"][0]["bytes_leaving"] == 0


@pytest.mark.parametrize("stored_anew", [False, True])
def test_what_was_dropped_and_could_not_be_deleted_goes_later_unless_it_is_stored_anew(
    doubles: Doubles, stored_anew: bool
) -> None:
    adapter = doubles.adapter()
    tier = doubles.tier("mem", adapter)
    loop = doubles.loop(doubles.l1(16), tier)
    loop.store(doubles.contents(3))
    loop.idle()
    loop.l1.evict(doubles.key(1))
    adapter.errors["delete"] = TierError("read-only", retryable=False)
    name = tier_key(doubles.key(1), doubles.namespace, 0)
    tier.remove([name])
    loop.until(lambda: tier.reclaim.failed)
    if stored_anew:
        loop.store({doubles.key(1): doubles.contents(2)[doubles.key(1)]})
        loop.idle()
    del adapter.errors["delete"]
    loop.jump(60)
    if stored_anew:
        loop.turn()
        assert name in adapter.objects
        loop.l1.evict(doubles.key(1))
        assert loop.fetch([doubles.key(1)]).hits == 1
    else:
        loop.until(lambda: name not in adapter.objects)


def test_what_a_clear_could_not_delete_in_time_is_deleted_later(doubles: Doubles) -> None:
    adapter = doubles.adapter()
    loop = doubles.loop(doubles.l1(16), doubles.tier("mem", adapter, deadline_s=5.0), stands=True)
    loop.idle()
    loop.store(doubles.contents(4))
    loop.idle()
    adapter.hang("delete")
    for number in (0, 1):  # as many as there are threads
        loop.tiering.remove(doubles.namespace, [doubles.key(100 + number)])
        loop.until(lambda number=number: adapter.calls["delete"] == 1 + number)
    loop.tiering.remove(doubles.namespace, [doubles.key(number) for number in range(4)])
    assert loop.tiering.status()["tiers"][0]["lanes"]["mem-delete"]["queued"]
    loop.clear(doubles.namespace, tiers=True)
    loop.jump(5.01)
    loop.until(lambda: loop.tiering.status()["tiers"][0]["deletes"]["failed"])
    assert adapter.calls["delete"] == 2, "it expired before any lane had it"
    adapter.release("delete")
    loop.jump(6.0)
    loop.until(lambda: not adapter.objects and loop.tiering.status()["tiers"][0]["deletes"]["waiting"] == 0)


def test_what_a_medium_does_not_let_go_of_is_tried_again_ever_more_seldom(doubles: Doubles) -> None:
    adapter = doubles.adapter()
    loop = doubles.loop(doubles.l1(16), doubles.tier("mem", adapter), stands=True)
    loop.idle()  # a scan that finds more than a page pauses, and here no time goes by
    loop.store(doubles.contents(4))
    loop.idle()
    adapter.errors["delete"] = TierError("read-only file system", retryable=False)
    loop.clear(doubles.namespace, tiers=True)

    def deletes() -> Json:
        return loop.tiering.status()["tiers"][0]["deletes"]

    def lane() -> Json:
        return loop.tiering.status()["tiers"][0]["lanes"]["mem-delete"]

    for _ in range(600):  # of half a second
        loop.turn()
        loop.until(lambda: deletes()["waiting"] and not any(lane().values()))
        loop.jump(0.5)
    assert 10 <= adapter.calls["delete"] <= 20
    assert deletes()["last_error"] == "read-only file system"
    adapter.errors.clear()
    loop.jump(31.0)
    loop.until(lambda: not adapter.objects and deletes()["waiting"] == 0)
    assert deletes()["last_error"] == "", "it is well again"


def test_a_store_that_was_done_and_refused_when_tried_again_is_accounted(doubles: Doubles) -> None:
    class Forgetful(type(doubles.adapter())):  # type: ignore[misc]
        """Keeps what it is given, loses the answer, and has no room for the same object once more."""

        def store(self, items: Sequence[StoreItem], deadline: float) -> Sequence[Outcome]:
            super().store(items, deadline)
            again = self.calls["store"] > 1
            return [Outcome(Result.FULL) if again else Outcome(Result.FAILED, retryable=True) for _ in items]

    adapter = Forgetful()
    loop = doubles.loop(doubles.l1(16), doubles.tier("mem", adapter))
    loop.store(doubles.contents(2))
    loop.until(lambda: adapter.calls["store"] == 2)
    loop.jump(BREAKER_PAUSE_S + 0.1)
    loop.until(lambda: loop.tiering.status()["tiers"][0]["objects"] == 2)
    assert len(adapter.objects) == 2


def test_what_is_in_doubt_stays_so_while_a_store_of_it_is_given_up_before_it_began(doubles: Doubles) -> None:
    class Mute(type(doubles.adapter())):  # type: ignore[misc]
        """Keeps the first that it is given, and loses the answer."""

        def store(self, items: Sequence[StoreItem], deadline: float) -> Sequence[Outcome]:
            stored = super().store(items, deadline)
            if self.calls["store"] == 1:
                raise TierError("connection reset", retryable=False)
            return stored

    adapter = Mute()
    loop = doubles.loop(doubles.l1(16), doubles.tier("mem", adapter))
    loop.idle()  # the scan has ended: it would find, and account, what is to be in doubt
    adapter.hang("exists")
    loop.store(doubles.contents(2))
    loop.until(lambda: adapter.calls["exists"])  # it is being asked whether they are there
    (tier,) = loop.tiering.tiers
    adapter.hang("store")
    for first in (2, 3):  # both threads of the lane
        loop.store(doubles.contents(1, first))
        adapter.entered.acquire(timeout=60)
        loop.until(lambda so_many=first: adapter.calls["store"] == so_many)
    loop.store(doubles.contents(2))  # once more, behind those
    loop.until(lambda: tier.order.busy(next(iter(adapter.objects))))
    loop.jump(tier.config.deadline_s + 1)
    loop.until(lambda: not tier.order.busy(next(iter(adapter.objects))))
    assert len(tier.doubts)
    adapter.release("exists")
    adapter.release("store")
    loop.jump(BREAKER_PAUSE_MAX_S)  # they are asked again, as the answer was late
    loop.until(lambda: not len(tier.doubts))
    loop.until(lambda: loop.tiering.status()["tiers"][0]["objects"] == len(adapter.objects) == 4)


def test_what_a_scan_lists_while_it_cannot_be_set_aside_is_accounted_in_the_end(
    doubles: Doubles, stocked: Loop
) -> None:
    adapter = stocked.near
    loop = doubles.loop(doubles.l1(16), doubles.tier("again", adapter))  # the next server over what is there
    adapter.hang("scan")
    loop.until(lambda: adapter.calls["scan"])  # nothing is accounted yet
    adapter.corrupt(next(iter(adapter.objects)))
    adapter.errors["delete"] = TierError("read-only", retryable=False)
    loop.fetch(list(doubles.contents(4)))
    loop.jump(SECOND_LOOK_S)
    loop.until(lambda: adapter.calls["delete"])
    loop.until(lambda: adapter.calls["exists"] >= 2)  # whether it is gone
    adapter.release("scan")
    loop.idle()
    loop.jump(RECOUNT_PAUSE_S + 0.1)
    loop.until(lambda: loop.tiering.status()["tiers"][0]["objects"] == len(adapter.objects) == 4)


def test_what_turns_out_to_be_there_after_a_clear_is_deleted(doubles: Doubles) -> None:
    class Mute(type(doubles.adapter())):  # type: ignore[misc]
        """Stores, and loses the answer."""

        def store(self, items: Sequence[StoreItem], deadline: float) -> Sequence[Outcome]:
            super().store(items, deadline)
            raise TierError("connection reset", retryable=False)

    adapter = Mute()
    loop = doubles.loop(doubles.l1(16), doubles.tier("mem", adapter))
    adapter.hang("exists")
    loop.store(doubles.contents(2))
    loop.until(lambda: adapter.calls["exists"])  # it is being asked whether they are there
    loop.clear(doubles.namespace, tiers=True)
    (reclaim,) = [tier.reclaim for tier in loop.tiering.tiers]
    loop.until(lambda: reclaim.next_at is None)  # all that was accounted has been looked at
    adapter.release("exists")
    loop.until(lambda: not adapter.objects)
    loop.until(lambda: loop.tiering.status()["tiers"][0]["objects"] == 0)


def test_a_tier_without_room_that_is_due_to_be_tried_again_does_not_keep_the_loop_busy(doubles: Doubles) -> None:
    adapter = doubles.adapter()
    tier = doubles.tier("mem", adapter, capacity_bytes=9096)
    loop = doubles.loop(doubles.l1(16), tier)
    adapter.hang("store")
    loop.store(doubles.contents(1))
    loop.until(lambda: adapter.calls["store"])  # its room is reserved for as long as this hangs
    for _ in range(BREAKER_FAILURES):
        tier.health.stores.failed(loop.clock.now, "connection reset")
    loop.store(doubles.contents(1, first=5))
    loop.jump(BREAKER_PAUSE_S + 0.1)
    loop.until(lambda: loop.tiering.next_deadline() > loop.clock.now)
    adapter.release("store")
    loop.until(lambda: len(adapter.objects) == 1)


def test_tiers_come_and_go_while_running(doubles: Doubles, stocked: Loop) -> None:
    third = doubles.adapter()
    stocked.tiering.add_tier(doubles.tier("third", third))
    stocked.store(doubles.contents(1, first=8))
    stocked.idle()
    assert len(third.objects) == 1
    stocked.tiering.drain_tier("near")
    stocked.store(doubles.contents(1, first=9))
    stocked.idle()
    assert len(stocked.near.objects) == 5
    assert len(third.objects) == 2
    stocked.near.hang("load")
    job = stocked.ask([doubles.key(0)], tiers=["near"])
    stocked.until(lambda: stocked.near.calls["load"])
    stocked.tiering.remove_tier("near")
    stocked.until(lambda: job.ended)
    assert [tier["name"] for tier in stocked.tiering.status()["tiers"]] == ["far", "third"]
    stocked.near.release("load")
    stocked.until(lambda: not stocked.l1.held)
    assert stocked.fetch([doubles.key(0)]).hits == 1


@pytest.mark.parametrize("what", ["store", "exists", "load", "delete", "scan"])
@pytest.mark.parametrize("raises", [TierError, RuntimeError, None], ids=["tier error", "any error", "outcome"])
def test_a_megabyte_of_error_text_is_cut_where_it_enters(doubles: Doubles, what: str, raises: Any) -> None:
    """Whatever keeps an error keeps an excerpt of it, of every call of every adapter."""
    adapter, text = doubles.adapter(), "\x1b[31m<error>\n" * (1 << 17)
    if raises is None and what not in ("store", "load"):
        pytest.skip("it answers no outcomes")
    tier = doubles.tier("mem", adapter, deadline_s=500.0)
    loop = doubles.loop(doubles.l1(64), tier)
    loop.store(doubles.contents(4))
    loop.idle()
    if raises is None:
        adapter.answers[what] = Outcome(Result.FAILED, error=text, cure=text)
    elif what == "scan":
        adapter.scan = lambda cursor, deadline: (_ for _ in ()).throw(raises(text))  # type: ignore[method-assign]
        tier.rebuild.again()
    else:
        adapter.errors[what] = raises(text)
    loop.l1.evict(doubles.key(0))
    if what == "store":
        loop.store(doubles.contents(1, first=40))
    elif what == "delete":
        loop.tiering.remove(doubles.namespace, [doubles.key(0)])
    elif what in ("load", "exists"):
        loop.ask([doubles.key(60 if what == "exists" else 0)])
    kept = lambda: [  # noqa: E731
        tier.health.last_error,
        tier.reclaim.last_error,
        *(part.last_error for part in (tier.health.reads, tier.health.writes, tier.health.stores, tier.health.loads)),
        str(tier.status()),
    ]
    loop.until(lambda: any("<error>" in each for each in kept()))
    assert all(len(each) <= 8 * ERROR_CHARS_MAX and each.isprintable() for each in kept())


@pytest.mark.parametrize(
    "place",
    ["tier.make_room", "tier.stores_allowed", "tier.order.hung", "tier.order.submit", "tier.accounting.reserve",
     "tier.accounting.fits", "tier.accounting.drops_of", "l1.pin_for_store", "l1.view"],
)  # fmt: skip
def test_a_fault_while_a_store_is_given_to_the_lanes_is_counted_and_leaves_nothing(
    doubles: Doubles, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    adapter = doubles.adapter()
    loop = doubles.loop(doubles.l1(64), doubles.tier("mem", adapter), stands=True)
    loop.idle()
    (tier,) = loop.tiering.tiers
    *path, name = place.split(".")
    part: Any = {"tier": tier, "l1": loop.l1}[path[0]]
    for each in path[1:]:
        part = getattr(part, each)
    work, faults = getattr(part, name), [RuntimeError("a fault of ours, or of a policy")]

    def failing(*args: Any) -> Any:
        if faults:
            raise faults.pop()
        return work(*args)

    monkeypatch.setattr(part, name, failing)
    loop.store(doubles.contents(4))
    watch = loop.tiering.stored(doubles.namespace, [doubles.key(number) for number in range(4)])
    loop.until(watch.settled)  # long before the deadline of whoever waits
    loop.idle()
    assert not faults
    status = loop.tiering.status()
    assert status["faults"] == 1
    assert (loop.l1.held, loop.l1.shielded, tier.accounting.bytes_reserved) == (0, {}, 0)
    loop.jump(WRITE_BACK_PAUSE_S_MAX)
    loop.until(lambda: len(adapter.objects) == 4)  # what is owed is paid after all
    assert _breaker(loop, 0, "writes") == "closed"


def test_faults_that_go_on_stop_the_stores_of_one_tier_and_not_those_of_others(
    doubles: Doubles, monkeypatch: pytest.MonkeyPatch
) -> None:
    bad, good = doubles.adapter(), doubles.adapter()
    loop = doubles.loop(doubles.l1(64), doubles.tier("bad", bad), doubles.tier("good", good), stands=True)
    loop.idle()
    tier = next(iter(loop.tiering.tiers))

    def failing(*args: Any) -> Any:
        raise RuntimeError("a fault of ours")

    monkeypatch.setattr(tier, "make_room", failing)
    for number in range(32):
        loop.store(doubles.contents(1, first=number))
    loop.until(lambda: len(good.objects) == 32)
    assert loop.tiering.status()["faults"] == BREAKER_FAILURES
    assert tier.health.writes.state is BreakerState.OPEN
    loop.jump(BREAKER_PAUSE_S)
    loop.until(lambda: loop.tiering.status()["faults"] == BREAKER_FAILURES + 1)
    for _ in range(8):
        loop.turn()
    assert loop.tiering.status()["faults"] == BREAKER_FAILURES + 1, "it was the probe: another pause begins"
    monkeypatch.undo()
    loop.jump(2 * BREAKER_PAUSE_S)
    loop.until(lambda: len(bad.objects) >= 32 - BREAKER_FAILURES - 1)
