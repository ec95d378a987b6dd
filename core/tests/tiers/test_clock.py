"""The clock of the loop leaps, forwards or backwards, against that of the lanes and of the medium.

A suspended machine, a stopped process, a debugger: what was in time is late at once, or has time for ever. The worst
is a miss with its reason.
"""

from __future__ import annotations

import random

import pytest

from lmcache_core.tiers.l1 import TierReason

from .conftest import Doubles, Loop

LEAPS_S = (1000.0, -1000.0)


@pytest.fixture
def stocked(doubles: Doubles) -> Loop:
    """Objects 0 to 3 are on one tier; the L1 is empty."""
    adapter = doubles.adapter()
    loop = doubles.loop(doubles.l1(16), doubles.tier("mem", adapter))
    loop.store(doubles.contents(4))
    loop.idle()
    for _, key in list(loop.l1.ready):
        loop.l1.evict(key)
    loop.adapter = adapter
    return loop


@pytest.mark.parametrize("method", ["exists", "load"])
@pytest.mark.parametrize("leap_s", LEAPS_S)
def test_a_lookup_that_a_leap_makes_late_is_a_miss_and_the_next_one_a_hit(
    doubles: Doubles, stocked: Loop, method: str, leap_s: float
) -> None:
    stocked.adapter.hang(method)
    job = stocked.ask([doubles.key(0)], seconds=10.0)
    stocked.until(lambda: stocked.adapter.entered.acquire(blocking=False))
    stocked.jump(leap_s)
    if leap_s > 0:
        stocked.until(lambda: job.ended)
        assert (job.hits, job.reasons[0]) == (0, TierReason.LATE)
        stocked.adapter.release(method)
    else:
        stocked.until(lambda: True)
        assert not job.ended, "it has time"
        stocked.adapter.release(method)
        stocked.until(lambda: job.ended)
        assert job.hits == 1
    stocked.until(lambda: not stocked.l1.held)
    stocked.jump(-leap_s)
    stocked.until(lambda: stocked.tiering.status()["tiers"][0]["reads"]["breaker"] == "closed")
    assert stocked.fetch([doubles.key(1)]).hits == 1
    assert stocked.l1.get(doubles.key(1)) == doubles.content(1)


@pytest.mark.parametrize("leap_s", LEAPS_S)
def test_a_store_during_which_the_clock_leaps_holds_nothing_and_the_next_one_is_stored(
    doubles: Doubles, leap_s: float
) -> None:
    adapter = doubles.adapter()
    tier = doubles.tier("mem", adapter)
    loop = doubles.loop(doubles.l1(), tier)
    loop.idle()
    adapter.hang("store")
    loop.store(doubles.contents(2))
    loop.until(lambda: adapter.entered.acquire(blocking=False))
    loop.jump(leap_s)
    loop.until(lambda: True)
    adapter.release("store")
    loop.until(lambda: not loop.l1.held)
    assert tier.accounting.bytes_reserved == 0
    loop.store(doubles.contents(2, first=10))
    loop.until(lambda: len(adapter.objects) >= 4)
    loop.jump(-leap_s)
    loop.idle()


@pytest.mark.parametrize("leap_s", LEAPS_S)
def test_a_breaker_that_is_open_when_the_clock_leaps_closes_again(
    doubles: Doubles, stocked: Loop, leap_s: float
) -> None:
    adapter = stocked.adapter
    adapter.errors["exists"] = ConnectionError("gone")
    stocked.until(
        lambda: stocked.fetch([doubles.key(0)]) and stocked.tiering.status()["tiers"][0]["reads"]["breaker"] == "open"
    )
    stocked.jump(leap_s)
    del adapter.errors["exists"]
    stocked.until(lambda: True)
    stocked.jump(2000.0)  # backwards its pause only grew: it ends all the same
    stocked.until(lambda: stocked.tiering.status()["tiers"][0]["reads"]["breaker"] == "closed")
    assert stocked.fetch([doubles.key(0)]).hits == 1


@pytest.mark.parametrize("seed", range(8))
def test_leaps_at_any_moment_cost_misses_and_nothing_else(doubles: Doubles, seed: int) -> None:
    chance = random.Random(seed)
    adapter = doubles.adapter()
    dirty = chance.choice(["drop", "keep"])
    loop = doubles.loop(doubles.l1(20), doubles.tier("mem", adapter, deadline_s=5.0), config={"dirty": dirty})
    skew_s = latest_s = 0.0
    for _ in range(60):
        step = chance.randrange(5)
        if step == 0 and loop.l1.free:
            number = chance.randrange(24)
            if (doubles.namespace, doubles.key(number)) not in {*loop.l1.ready, *loop.l1.loading}:
                loop.store({doubles.key(number): doubles.content(number)})
        elif step == 1:
            loop.ask([doubles.key(chance.randrange(24)) for _ in range(3)], seconds=chance.choice([0.1, 3.0, 100.0]))
        elif step == 2:
            leap_s = chance.choice([-30.0, -1.0, 1.0, 6.0, 1000.0])
            skew_s += leap_s
            latest_s = max(latest_s, skew_s)
            loop.jump(leap_s)
        elif step == 3:
            method = chance.choice(["store", "exists", "load"])
            if method in adapter.gates:
                adapter.release(method)
            else:
                adapter.hang(method)
        else:
            for namespace, key in list(loop.l1.ready):
                if chance.random() < 0.3:
                    loop.l1.evict(key, namespace)
        loop.until(lambda: True)
        for number in range(24):
            assert loop.l1.get(doubles.key(number)) in (None, doubles.content(number))
    for method in list(adapter.gates):
        adapter.release(method)
    loop.jump(latest_s + 2000.0 - skew_s)
    loop.until(lambda: loop.tiering.drained and not loop.l1.held)
    loop.until(lambda: loop.tiering.status()["tiers"][0]["reads"]["breaker"] == "closed")
    for _, key in list(loop.l1.ready):
        loop.l1.evict(key)
    loop.store(doubles.contents(1, first=100))
    loop.until(lambda: any(name[:32] == doubles.key(100) for name in list(adapter.objects)))
    loop.l1.evict(doubles.key(100))
    assert loop.fetch([doubles.key(100)]).hits == 1
