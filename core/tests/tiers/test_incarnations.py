"""What waits for a tier, or is dropped after it, is one incarnation: a successor of its key is another object."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import pytest

from lmcache_core.policies.store import SkipL1Store
from lmcache_core.tiers.contract import LoadItem, Outcome
from lmcache_core.tiers.l1 import TierReason
from lmcache_core.tiers.object.format import payload_checksum, tier_key

from .conftest import Doubles


@pytest.mark.parametrize("dirty", ["drop", "keep"])
def test_bytes_stored_again_under_a_key_never_travel_with_the_checksum_of_the_former_ones(
    doubles: Doubles, dirty: str
) -> None:
    adapter = doubles.adapter()
    loop = doubles.loop(doubles.l1(), doubles.tier("slow", adapter), config={"dirty": dirty})
    loop.idle()
    adapter.hang("store")
    for number in range(100, 104):  # what the lanes are busy with
        loop.store(doubles.contents(1, first=number))
        loop.until(lambda: True)
    key = doubles.key(1)
    for version in range(5):
        if version:
            loop.l1.evict(key)
        content = doubles.content(1000 + version)
        loop.tiering.on_committed([loop.l1.put(key, content, checksum=payload_checksum([content]))])
        loop.until(lambda: True)
    adapter.release("store")
    loop.idle()
    loop.l1.evict(key)
    job = loop.fetch([key])
    assert (job.hits, dict(job.reasons)) == (1, {})
    assert loop.l1.get(key) in [doubles.content(1000 + version) for version in range(5)]
    assert loop.tiering.status()["tiers"][0]["counts"].get("load_damaged", 0) == 0


def test_what_is_dropped_once_the_tier_has_it_is_never_its_successor(doubles: Doubles) -> None:
    adapter = doubles.adapter()
    loop = doubles.loop(doubles.l1(), doubles.tier("slow", adapter), store_policy=SkipL1Store())
    loop.idle()
    adapter.hang("store")
    loop.store(doubles.contents(1, first=1))
    loop.until(lambda: adapter.calls["store"])
    key = doubles.key(1)
    loop.l1.evict(key)  # held: its slot follows with the end of the store
    loop.l1.put(key, doubles.content(2))
    adapter.release("store")
    loop.idle()
    assert loop.l1.get(key) == doubles.content(2), "nobody has stored this one yet"
    assert tier_key(key, doubles.namespace, 0) in adapter.objects


def test_a_load_that_was_under_way_brings_nothing_back_of_what_was_dropped(doubles: Doubles) -> None:
    adapter = doubles.adapter()
    loop = doubles.loop(doubles.l1(), doubles.tier("slow", adapter))
    key, other = doubles.key(1), doubles.key(2)
    loop.store(doubles.contents(2, first=1))
    loop.idle()
    loop.l1.evict(key)
    loop.l1.evict(other)
    load, read, go = adapter.load, threading.Semaphore(0), threading.Event()

    def hangs_once_it_has_read(items: Sequence[LoadItem], deadline: float) -> Sequence[Outcome]:
        outcomes = load(items, deadline)
        read.release()
        assert go.wait(60.0)
        return outcomes

    adapter.load = hangs_once_it_has_read
    jobs = [loop.ask([key]), loop.ask([other])]
    loop.until(lambda: read.acquire(blocking=False))
    loop.until(lambda: read.acquire(blocking=False))
    assert loop.tiering.remove(doubles.namespace, [key]) == [key]
    go.set()
    loop.until(lambda: jobs[1] in loop.done and loop.l1.held == 0)
    loop.idle()
    assert loop.l1.get(key) is None
    assert (jobs[0].hits, jobs[0].reasons) == (0, {0: TierReason.CLEARED})
    assert loop.l1.get(other) == doubles.content(2)
    assert loop.fetch([key]).hits == 0
