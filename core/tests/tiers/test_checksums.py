"""Checksums that are known already: given by the writer, or verified by a load."""

from __future__ import annotations

from typing import Any

import pytest

from lmcache_core.pool.layout import Layout
from lmcache_core.serde.contract import Serde
from lmcache_core.tiers.object import transfer
from lmcache_core.tiers.object.format import HEADER_BYTES, payload_checksum, read_header, tier_key

from .conftest import Doubles


class Inverting(Serde):
    """Flips every bit: what is on the medium is not what is in the pool."""

    name = "inverting"

    def encoded_bytes_max(self, nbytes: int, layout: Layout) -> int:
        return nbytes

    def encode(self, src: memoryview, layout: Layout, key: bytes) -> list[memoryview]:
        return [memoryview(bytes(each ^ 0xFF for each in src))]

    def decode(self, src: memoryview, into: memoryview, layout: Layout, key: bytes) -> None:
        into[:] = bytes(each ^ 0xFF for each in src)


@pytest.fixture
def summed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Sizes of what lanes have computed a checksum of."""
    sizes: list[int] = []

    def counting(parts: Any) -> int:
        sizes.append(sum(memoryview(part).nbytes for part in parts))
        return payload_checksum(parts)

    monkeypatch.setattr(transfer, "payload_checksum", counting)
    return sizes


def _stored(doubles: Doubles, checksum: int | None, **options: object) -> Any:
    adapter = doubles.adapter()
    loop = doubles.loop(doubles.l1(), doubles.tier("mem", adapter, **options))
    content = doubles.content(1)
    loop.tiering.on_committed([loop.l1.put(doubles.key(1), content, checksum=checksum)])
    loop.idle()
    loop.on_medium = adapter.objects[tier_key(doubles.key(1), doubles.namespace, 0)]
    loop.header = read_header(memoryview(loop.on_medium)[:HEADER_BYTES])
    loop.l1.evict(doubles.key(1))
    return loop


def test_a_checksum_that_the_writer_gave_is_not_computed_again(doubles: Doubles, summed: list[int]) -> None:
    given = payload_checksum([doubles.content(1)])
    loop = _stored(doubles, given)
    assert summed == []
    assert loop.header.checksum == given
    assert loop.fetch([doubles.key(1)]).hits == 1
    assert loop.l1.get(doubles.key(1)) == doubles.content(1)


@pytest.mark.parametrize("unknown", [None, 0])
def test_a_checksum_that_nobody_gave_is_computed(doubles: Doubles, summed: list[int], unknown: int | None) -> None:
    loop = _stored(doubles, unknown)
    assert summed == [doubles.layout.nbytes]
    assert loop.header.checksum == payload_checksum([doubles.content(1)])


def test_a_wrong_checksum_costs_a_miss_and_never_a_wrong_byte(doubles: Doubles) -> None:
    loop = _stored(doubles, 1234)
    job = loop.fetch([doubles.key(1)])
    assert (job.hits, job.reasons[0]) == (0, "damaged")


def test_encoded_bytes_have_a_checksum_of_their_own(doubles: Doubles, summed: list[int]) -> None:
    given = payload_checksum([doubles.content(1)])
    loop = _stored(doubles, given, serdes=[Inverting()])
    assert summed == [doubles.layout.nbytes]
    assert loop.header.checksum == payload_checksum([loop.on_medium[HEADER_BYTES:]]) != given
    assert loop.fetch([doubles.key(1)]).hits == 1
    assert loop.l1.get(doubles.key(1)) == doubles.content(1)
    assert loop.l1.checksums == {(doubles.namespace, doubles.key(1)): given}, "what was decoded has none in the L1"


def test_a_load_hands_on_the_checksum_that_it_verified(doubles: Doubles) -> None:
    loop = _stored(doubles, None)
    assert loop.fetch([doubles.key(1)]).hits == 1
    assert loop.l1.checksums == {(doubles.namespace, doubles.key(1)): payload_checksum([doubles.content(1)])}


@pytest.mark.parametrize("serdes", [[], [Inverting()]])
def test_damaged_bytes_of_an_adopted_pool_reach_no_tier(doubles: Doubles, serdes: list[Serde]) -> None:
    """Encoded, they would have a right checksum there."""
    adapter = doubles.adapter()
    loop = doubles.loop(doubles.l1(), doubles.tier("mem", adapter, serdes=serdes))
    loop.l1.adopted = True
    whole = payload_checksum([doubles.content(2)])
    loop.tiering.on_committed(
        [
            loop.l1.put(doubles.key(1), doubles.content(1), checksum=1234),
            loop.l1.put(doubles.key(2), doubles.content(2), checksum=whole),
        ]
    )
    loop.idle()
    assert list(adapter.objects) == [tier_key(doubles.key(2), doubles.namespace, 0)]
