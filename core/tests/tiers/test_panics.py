"""A library in Rust panics with a `BaseException`: it fails in words, lanes and loop go on, and no call is lost."""

from __future__ import annotations

from typing import Any, NoReturn

import pytest

from lmcache_core.policies.lru import LruEviction
from lmcache_core.pool.layout import Layout
from lmcache_core.serde.contract import Serde
from lmcache_testing.embedded import Json

from .conftest import Doubles, Loop


class Panic(BaseException):
    """As pyo3's is: no `Exception`."""


class Panicking(Serde):
    """Does nothing to the bytes, and panics in one of its methods while it is told to."""

    name = "panicking"

    def __init__(self) -> None:
        self.panics_in = ""

    def _enter(self, method: str) -> None:
        if method == self.panics_in:
            raise Panic("index out of bounds")

    def parameters(self) -> Json:
        self._enter("parameters")
        return {}

    def encoded_bytes_max(self, nbytes: int, layout: Layout) -> int:
        self._enter("encoded_bytes_max")
        return nbytes

    def encode(self, src: memoryview, layout: Layout, key: bytes) -> list[memoryview]:
        self._enter("encode")
        return [src]

    def decode(self, src: memoryview, into: memoryview, layout: Layout, key: bytes) -> None:
        self._enter("decode")
        into[:] = src


def made(doubles: Doubles) -> tuple[Any, Panicking, Any, dict[bytes, bytes]]:
    adapter, serde = doubles.adapter(), Panicking()
    loop = doubles.loop(doubles.l1(), doubles.tier("mem", adapter, serdes=[serde]))
    loop.idle()
    return adapter, serde, loop, doubles.contents(4)


def works(doubles: Doubles, loop: Loop) -> None:
    """Another object goes there and comes back."""
    loop.store(doubles.contents(1, first=100))
    loop.idle()
    loop.l1.evict(doubles.key(100))
    assert loop.fetch([doubles.key(100)]).hits == 1
    assert loop.l1.get(doubles.key(100)) == doubles.content(100)
    assert loop.l1.held == 0
    assert not loop.l1.shielded


@pytest.mark.parametrize("method", ["encode", "encoded_bytes_max", "parameters"])
def test_a_serde_that_panics_at_a_store_loses_these_objects_and_nothing_else(doubles: Doubles, method: str) -> None:
    _, serde, loop, contents = made(doubles)
    serde.panics_in = method
    loop.store(contents)
    loop.idle()
    told = loop.tiering.status()["stores"]
    assert told["counts"] == {"lost_tier_error": 4}
    assert told["reached_no_tier"]["objects"] == 0, "the pool still has them"
    serde.panics_in = ""
    loop.jump(60.0)
    works(doubles, loop)


@pytest.mark.parametrize("method", ["decode", "encoded_bytes_max"])
def test_a_serde_that_panics_at_a_load_makes_it_a_miss(doubles: Doubles, method: str) -> None:
    _, serde, loop, contents = made(doubles)
    loop.store(contents)
    loop.idle()
    for key in contents:
        loop.l1.evict(key)
    serde.panics_in = method
    job = loop.fetch(list(contents))
    assert job.hits == 0
    assert loop.l1.held == 0
    serde.panics_in = ""
    loop.jump(60.0)
    works(doubles, loop)


@pytest.mark.parametrize("method", ["store", "exists", "load", "delete", "scan"])
def test_an_adapter_that_panics_costs_its_call_and_nothing_else(doubles: Doubles, method: str) -> None:
    adapter, _, loop, contents = made(doubles)
    adapter.errors[method] = Panic("index out of bounds")
    loop.store(contents)
    loop.until(lambda: loop.tiering.drained)
    for key in contents:
        loop.l1.evict(key)
    job = loop.fetch(list(contents))
    assert job.ended
    loop.clear(None, tiers=True)
    del adapter.errors[method]
    loop.jump(60.0)
    works(doubles, loop)
    loop.until(lambda: not any(lane["running"] for lane in loop.tiering.status()["tiers"][0]["lanes"].values()))


METHODS = ["insert", "access", "remove", "held", "victims", "surplus"]


@pytest.mark.parametrize("method", METHODS)
def test_an_eviction_policy_that_panics_costs_room_on_its_tier_and_no_object(doubles: Doubles, method: str) -> None:
    class Policy(LruEviction):
        panics = False

    def panics(self: Policy, argument: object) -> object:
        if self.panics:
            raise Panic("index out of bounds")
        return getattr(LruEviction, method)(self, argument)

    setattr(Policy, method, panics)
    policy = Policy()
    adapter = doubles.adapter()
    tier = doubles.tier("mem", adapter, capacity_bytes=4 << 20, eviction=policy)
    loop = doubles.loop(doubles.l1(), tier)
    loop.idle()
    contents = doubles.contents(4)
    policy.panics = True
    loop.store(contents)
    loop.idle()
    for key in contents:
        loop.l1.evict(key)
    assert loop.fetch(list(contents)).hits == 4
    tier.accounting.remove([entry.tier_key for shard in tier.accounting.shards() for entry in shard][:1])
    tier.reclaim.medium_is_full()
    loop.idle()
    told = loop.tiering.status()
    assert told["faults"] == 0, "each was the policy's, and no call's"
    assert told["tiers"][0]["counts"]["eviction_failed"] > 0
    assert f"its eviction policy failed in {method}: Panic" in told["tiers"][0]["last_error"]
    assert told["tiers"][0]["bytes_reserved"] == 0
    policy.panics = False
    works(doubles, loop)


def test_a_fault_in_the_pool_at_a_load_costs_that_lookup_alone(
    doubles: Doubles, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, _, loop, contents = made(doubles)
    loop.store(contents)
    loop.idle()
    for key in contents:
        loop.l1.evict(key)

    def fails(*arguments: object) -> NoReturn:
        raise RuntimeError("a bug")

    with monkeypatch.context() as fault:
        fault.setattr(loop.l1, "begin_load", fails)
        assert loop.fetch(list(contents)).hits == 0
    assert loop.fetch(list(contents)).hits == 4, "nobody waits for the load that was never begun"
