"""Tiers that are added, resized, replaced and removed while calls are out."""

from __future__ import annotations

from typing import Any

import pytest

from lmcache_core.errors import SettingsError
from lmcache_core.policies.lru import LruEviction
from lmcache_core.serde.identity import IdentitySerde
from lmcache_core.tiers.contract import Capabilities
from lmcache_core.tiers.object.format import HEADER_BYTES, tier_key
from lmcache_core.tiers.tier.tier import TierConfig

from .conftest import Doubles

OBJECT_BYTES = HEADER_BYTES + 5000


def _small_batches(doubles: Doubles) -> Any:
    class SmallBatches(doubles.adapter):
        capabilities = Capabilities(durable=True, batch_keys_max=4)

    return SmallBatches()


def _hung_with_a_queue(doubles: Doubles) -> tuple[Any, Any]:
    adapter = _small_batches(doubles)
    loop = doubles.loop(doubles.l1(), doubles.tier("mem", adapter))
    loop.until(loop.scanned)
    adapter.hang("store")
    loop.store(doubles.contents(40))
    lane = {"queued": 2, "running": 2}  # both threads have taken theirs, and the queue is full behind them
    loop.until(lambda: lane.items() <= loop.tiering.status()["tiers"][0]["lanes"]["mem-store"].items())
    return loop, adapter


def test_close_gives_up_what_is_queued_and_settles_it(doubles: Doubles) -> None:
    loop, adapter = _hung_with_a_queue(doubles)
    assert not loop.tiering.close()
    assert loop.l1.held == 8, "only what the two running calls still read"
    adapter.release("store")


def test_a_tier_removed_and_added_again_forgets_the_calls_of_the_first(doubles: Doubles) -> None:
    loop, adapter = _hung_with_a_queue(doubles)
    loop.tiering.remove_tier("mem")
    again = doubles.adapter()
    loop.tiering.add_tier(doubles.tier("mem", again))
    adapter.release("store")
    loop.until(lambda: loop.l1.held == 0)
    loop.store(doubles.contents(1, first=50))
    loop.idle()
    assert set(again.objects) == {tier_key(key, namespace, 0) for namespace, key in loop.l1.ready}


def test_what_waits_and_what_had_not_begun_goes_to_the_tier_that_replaces_it(doubles: Doubles) -> None:
    loop, adapter = _hung_with_a_queue(doubles)
    successor = doubles.adapter()
    loop.tiering.replace_tier(doubles.tier("mem", successor))
    loop.idle()
    assert len(successor.objects) == 32, "all but the eight of the two calls that had begun"
    adapter.release("store")
    loop.until(lambda: loop.l1.held == 0)
    assert loop.tiering.status()["stores"]["in_flight_bytes"] == 0


def test_a_drained_tier_is_stored_to_again_with_its_new_figures(doubles: Doubles) -> None:
    adapter = doubles.adapter()
    tier = doubles.tier("mem", adapter, capacity_bytes=20 * OBJECT_BYTES, eviction=LruEviction(None))
    loop = doubles.loop(doubles.l1(), tier)
    loop.store(doubles.contents(10))
    loop.idle()
    loop.tiering.drain_tier("mem")
    loop.store(doubles.contents(5, first=20))
    loop.idle()
    assert len(adapter.objects) == 10
    loop.tiering.reconfigure_tier("mem", TierConfig(capacity_bytes=5 * OBJECT_BYTES))
    loop.until(lambda: tier.accounting.bytes_used <= 5 * OBJECT_BYTES and not tier.accounting.bytes_leaving)
    loop.store(doubles.contents(1, first=30))
    # What it has missed is owed to it, too, and may evict it again.
    loop.until(lambda: tier_key(doubles.key(30), doubles.namespace, 0) in adapter.objects)


class _Follower:
    """An adapter of another server on the same medium that does not lead."""

    @staticmethod
    def of(doubles: Doubles) -> Any:
        class Follows(doubles.adapter):
            def try_to_lead(self) -> bool:
                return False

        return Follows()


def test_a_rescan_takes_in_what_others_stored_and_forgets_what_they_deleted(doubles: Doubles) -> None:
    adapter = doubles.adapter()
    tier = doubles.tier("mem", adapter, rescan_s=10.0, eviction=LruEviction(None))
    loop = doubles.loop(doubles.l1(), tier)
    loop.store(doubles.contents(6))
    loop.idle()
    foreign = tier_key(doubles.key(99), doubles.namespace, 0)
    adapter.objects[foreign] = bytes(OBJECT_BYTES)
    gone = tier_key(doubles.key(2), doubles.namespace, 0)
    del adapter.objects[gone]
    assert tier.accounting.knows(gone)
    loop.jump(11.0)
    loop.until(lambda: tier.accounting.knows(foreign) and not tier.accounting.knows(gone))
    assert tier.accounting.objects == 6
    assert tier.accounting.bytes_used == sum(map(len, adapter.objects.values()))
    assert tier.rebuild.forgotten == 1


@pytest.mark.parametrize("leads", [True, False])
def test_who_does_not_lead_evicts_only_what_it_must(doubles: Doubles, leads: bool) -> None:
    adapter = doubles.adapter() if leads else _Follower.of(doubles)
    tier = doubles.tier("mem", adapter, capacity_bytes=10 * OBJECT_BYTES, eviction=LruEviction(None))
    loop = doubles.loop(doubles.l1(), tier)
    loop.idle()
    for number in range(11):
        loop.store(doubles.contents(1, first=number))
        loop.idle()
        loop.until(lambda: tier.accounting.bytes_leaving == 0)
    assert tier.accounting.leads is leads
    assert (tier.accounting.objects == 10) is not leads


class _LoadsOnly:
    """An adapter of a medium that others fill."""

    @staticmethod
    def of(doubles: Doubles) -> Any:
        class LoadsOnly(doubles.adapter):
            capabilities = Capabilities(stores=False, delete=False, scan=False)

        return LoadsOnly()


def test_nothing_is_owed_to_a_tier_that_never_stores(doubles: Doubles) -> None:
    mem, others = doubles.adapter(), _LoadsOnly.of(doubles)
    loop = doubles.loop(doubles.l1(), doubles.tier("others", others), doubles.tier("mem", mem))
    loop.store(doubles.contents(5))
    loop.idle()
    assert (len(mem.objects), len(others.objects)) == (5, 0)
    assert set(loop.tiering.status()["stores"]["dirty"].values()) == {0}
    loop.tiering.reconfigure_tier("others", TierConfig())
    loop.store(doubles.contents(5, first=10))
    loop.idle()
    assert not others.objects


def test_a_tier_that_never_stores_takes_no_serde(doubles: Doubles) -> None:
    with pytest.raises(SettingsError, match=r"leave l2\.others\.serde out"):
        doubles.tier("others", _LoadsOnly.of(doubles), serdes=[IdentitySerde()])
