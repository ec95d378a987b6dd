"""Room on a tier is held for what objects turn out to take, as soon as that is known; and never for less."""

from __future__ import annotations

import random
from typing import Any

import pytest

from lmcache_core.policies.lru import LruEviction
from lmcache_core.pool.layout import Layout
from lmcache_core.serde.contract import Serde
from lmcache_core.tiers.object.format import HEADER_BYTES, tier_key
from lmcache_core.tiers.tier.accounting import Sizes

from .conftest import Doubles

PLAIN_BYTES = 5000  # of the doubles' layout
SMALL_BYTES = 400


class Shrinking(Serde):
    """Keeps as many bytes as the first two of the object say: encoded sizes differ, and none is known before."""

    name = "shrinking"

    def encoded_bytes_max(self, nbytes: int, layout: Layout) -> int:
        return nbytes

    def encode(self, src: memoryview, layout: Layout, key: bytes) -> list[memoryview]:
        return [memoryview(bytes(src[: int.from_bytes(src[:2], "little")]))]

    def decode(self, src: memoryview, into: memoryview, layout: Layout, key: bytes) -> None:
        into[: src.nbytes] = src
        into[src.nbytes :] = bytes(into.nbytes - src.nbytes)


def content(encoded_bytes: int) -> bytes:
    return encoded_bytes.to_bytes(2, "little") + bytes(PLAIN_BYTES - 2)


def made(doubles: Doubles, capacity_bytes: int, slots: int = 64) -> tuple[Any, Any, Any]:
    adapter = doubles.adapter()
    tier = doubles.tier(
        "mem", adapter, capacity_bytes=capacity_bytes, serdes=[Shrinking()], eviction=LruEviction(None)
    )  # fmt: skip
    loop = doubles.loop(doubles.l1(slots), tier)
    loop.idle()
    return adapter, tier, loop


def test_what_fits_once_it_is_encoded_evicts_nothing(doubles: Doubles) -> None:
    objects, taken = 60, SMALL_BYTES + HEADER_BYTES
    adapter, tier, loop = made(doubles, int(objects * taken / 0.78))
    for first in range(0, objects, 20):
        loop.store({doubles.key(first + at): content(SMALL_BYTES) for at in range(20)})
        loop.until(lambda: True)
    loop.idle()
    assert tier.reclaim.evicted == 0
    assert len(adapter.objects) == objects
    assert tier.accounting.bytes_used == objects * taken
    assert tier.accounting.bytes_reserved == 0


def test_a_reservation_shrinks_before_the_medium_has_the_object(doubles: Doubles) -> None:
    adapter, tier, loop = made(doubles, 100 * (PLAIN_BYTES + HEADER_BYTES))
    adapter.hang("store")
    loop.store({doubles.key(0): content(SMALL_BYTES)})
    loop.until(lambda: tier.accounting.bytes_reserved == SMALL_BYTES + HEADER_BYTES)
    assert not adapter.objects, "it is still being written"
    adapter.release("store")
    loop.idle()
    assert tier.accounting.bytes_reserved == 0


def test_an_object_that_turns_out_larger_than_its_fellows_is_stored_all_the_same(doubles: Doubles) -> None:
    adapter, tier, loop = made(doubles, 12 * (SMALL_BYTES + HEADER_BYTES))
    for number in range(6):
        loop.store({doubles.key(number): content(SMALL_BYTES)})
        loop.idle()
    loop.store({doubles.key(10): content(PLAIN_BYTES), doubles.key(11): content(SMALL_BYTES)})
    loop.idle()
    assert loop.tiering.status()["stores"]["counts"]["stored"] == 8
    assert len(adapter.objects) >= 7
    assert tier.health.counts["store_encoded_again"] >= 1, "too little was held for it, and that was noticed"


def test_objects_that_cannot_fit_are_refused_without_evicting_the_rest(doubles: Doubles) -> None:
    adapter, tier, loop = made(doubles, HEADER_BYTES + 2 * SMALL_BYTES)
    there = tier_key(doubles.key(0), doubles.namespace, 0)
    tier.accounting.add([(there, SMALL_BYTES)])
    adapter.objects[there] = bytes(SMALL_BYTES)
    for number in range(1, 4):
        loop.store({doubles.key(number): content(PLAIN_BYTES)})
        loop.idle()
    assert loop.tiering.status()["stores"]["counts"]["lost_no_room"] == 3
    assert loop.tiering.status()["stores"]["reached_no_tier"]["objects"] == 0
    for number in range(1, 4):
        loop.l1.evict(doubles.key(number))
    assert loop.tiering.status()["stores"]["reached_no_tier"]["objects"] == 3
    assert list(adapter.objects) == [there]


@pytest.mark.parametrize("capacity_objects", [1, 3, 12])
@pytest.mark.parametrize("seed", range(5))
def test_whatever_sizes_come_the_medium_never_holds_more_than_the_capacity(
    doubles: Doubles, capacity_objects: int, seed: int
) -> None:
    rng = random.Random(seed)
    capacity = capacity_objects * (PLAIN_BYTES + HEADER_BYTES)
    adapter, tier, loop = made(doubles, capacity, slots=130)
    peak = 0

    def quiet() -> bool:
        nonlocal peak
        peak = max(peak, sum(map(len, list(adapter.objects.values()))))
        return bool(loop.tiering.drained)

    for first in range(0, 120, 30):
        sizes = [rng.choice((2, SMALL_BYTES, rng.randint(2, PLAIN_BYTES), PLAIN_BYTES)) for _ in range(30)]
        loop.store({doubles.key(first + at): content(size) for at, size in enumerate(sizes)})
        loop.until(quiet)
    loop.until(lambda: not tier.accounting.bytes_leaving)
    assert peak <= capacity
    assert loop.tiering.status()["stores"]["counts"] == {"stored": 120}, "none is lost, none goes round for ever"
    assert tier.accounting.bytes_reserved == 0
    assert tier.accounting.bytes_used == sum(map(len, adapter.objects.values()))


def test_the_most_of_late_is_expected() -> None:
    sizes = Sizes()
    assert sizes.expected(1) is None
    for nbytes in (100, 900, 100):
        sizes.learn(1, nbytes)
    assert sizes.expected(1) == 800
    for _ in range(60):
        sizes.learn(1, 100)
    assert 100 <= (sizes.expected(1) or 0) <= 110
    sizes.learn(1, 500)
    assert sizes.expected(1) == 500
    assert sizes.expected(2) is None
