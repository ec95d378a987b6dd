"""`adaptive` on loads of every kind: hardly ever behind the best of the others, whatever the load turns into."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from pydantic import ValidationError

from lmcache_core import Kind
from lmcache_core.errors import PluginError, SettingsError
from lmcache_core.plugins.loader import load_plugins
from lmcache_core.policies import Entry, EvictionPolicy
from lmcache_core.policies.lru import LruEviction
from lmcache_lab.simulation import Order, SimulatedEntry, replay
from lmcache_lab.workloads import SyntheticSettings, Trace, synthetic_trace
from lmcache_policies.adaptive import AdaptivePolicy
from lmcache_policies.expected_reuse import ExpectedReuse
from lmcache_policies.sample import SAMPLED_KEYS_MAX, SAMPLED_OBJECTS, Sample
from lmcache_testing.eviction_machine import run_machine

FIXED = ("lru", "lruk", "arc", "s3fifo", "fifo", "lfu", "mru")
REGISTRY = load_plugins()
CAPACITY = 300
BEHIND_MAX = 0.02  # of the best fixed policy, on loads so short that the first capacities of uses weigh much


def scan(chance: random.Random, requests: int, first: int = 10_000) -> list[list[int]]:
    """A few hot documents among many that are read once."""
    hot = [list(range(20 * number, 20 * number + 20)) for number in range(8)]
    found, fresh = [], first
    for _ in range(requests):
        if chance.random() < 0.4:
            found.append(chance.choice(hot))
        else:
            found.append(list(range(fresh, fresh + 20)))
            fresh += 20
    return found


def loop(chance: random.Random, requests: int) -> list[list[int]]:
    """More documents than fit, in turn."""
    documents = [list(range(50_000 + 20 * number, 50_020 + 20 * number)) for number in range(24)]
    return [documents[number % len(documents)] for number in range(6 * requests)]


def zipf(chance: random.Random, requests: int) -> list[list[int]]:
    """Documents of very different popularity, which does not change."""
    ranks = range(1, 400)
    weights = [1 / rank for rank in ranks]
    return [
        list(range(100_000 + 8 * rank, 100_008 + 8 * rank)) for rank in chance.choices(ranks, weights, k=3 * requests)
    ]


def sessions(chance: random.Random, requests: int) -> list[list[int]]:
    """Conversations that grow turn by turn."""
    trace = synthetic_trace(SyntheticSettings(sessions=requests // 8, active=20, seed=chance.randrange(100)))
    return [[200_000 + block for block in request] for request in trace.requests]


def mixed(chance: random.Random, requests: int) -> list[list[int]]:
    """One kind of load after another."""
    parts = (sessions, loop, scan, zipf)
    return [request for part in parts for request in part(chance, requests)]


@pytest.mark.parametrize("order", list(Order))
@pytest.mark.parametrize("load", [scan, loop, zipf, sessions, mixed])
def test_it_is_hardly_behind_the_best_of_the_others(
    load: Callable[[random.Random, int], list[list[int]]], order: Order
) -> None:
    trace = Trace(load.__name__, load(random.Random(7), 400))
    rates = {
        name: replay(trace, name, REGISTRY.build(Kind.EVICTION_POLICY, name), CAPACITY, order).hit_rate
        for name in FIXED
    }
    found = replay(trace, "adaptive", AdaptivePolicy(), CAPACITY, order).hit_rate
    best = max(rates, key=rates.__getitem__)
    assert found >= rates[best] - BEHIND_MAX, f"{found:.4f}, and {best} has {rates[best]:.4f}"


class _Restless(AdaptivePolicy):
    """Changes its order with every call."""

    def _judge(self) -> None:
        self.order = (self.order + 1) % len(self.sample.orders)


def test_a_change_of_order_at_every_step_keeps_every_promise() -> None:
    def made() -> EvictionPolicy:
        policy = _Restless()
        policy.resize(40)
        return policy

    run_machine(made, never_evicts=False, shortest=False)


def blocks(first: int, count: int, nbytes: int = 1) -> list[Any]:
    return [SimulatedEntry(number.to_bytes(32, "big"), nbytes) for number in range(first, first + count)]


def walk_forward(policy: AdaptivePolicy) -> list[Any]:
    """Requests that repeat each other, block by block from the first, until the policy is sure of the way. Returns
    those of each request."""
    prompt, more = blocks(0, 10), blocks(10, 10)
    for entry in prompt:
        policy.insert([entry])
    for repeat in range(12):
        policy.insert(blocks(1000 + repeat, 1))  # somebody else's request
        for entry in prompt:
            policy.access([entry])
        for entry in more:
            (policy.access if repeat else policy.insert)([entry])
    return [*prompt, *more]


def test_a_change_of_order_is_noted_with_its_reason_and_moves_nobody() -> None:
    lines: list[str] = []
    policy = AdaptivePolicy()
    policy.note = lines.append  # type: ignore[method-assign]
    policy.resize(CAPACITY)
    trace = Trace("loop", loop(random.Random(0), 800))
    replay(trace, "adaptive", policy, CAPACITY)
    assert lines
    assert "objects are evicted by" in lines[0]
    assert "standard deviations" in lines[0]
    assert policy.status()["changes"] == len(lines)
    assert len(set(policy.victims(1 << 40))) == CAPACITY


def test_the_sample_is_bounded_whatever_the_pool_holds() -> None:
    policy = AdaptivePolicy()
    policy.resize(100_000)
    for first in range(0, 200_000, 500):
        batch = blocks(first, 500)
        policy.insert(batch)
        policy.access(batch[::2])
        if first >= 100_000:
            policy.remove(policy.victims(500))
    sample = policy.sample
    assert SAMPLED_OBJECTS / 2 <= sample.capacity_bytes <= 1.5 * SAMPLED_OBJECTS
    assert len(sample) <= SAMPLED_KEYS_MAX
    assert 100_000 >> sample.bits == sample.capacity_bytes
    assert sample.uses < 1.2 * 300_000 / (1 << sample.bits)
    shown = policy.status()
    assert set(shown["hit_share"]) == {"lru", "lruk", "arc", "mru", "reuse"}
    assert set(shown["lru_hit_share_by_size"]) == {"0.5", "2", "4"}


def test_a_policy_that_is_watched_has_the_hits_that_it_would_have() -> None:
    trace = Trace("zipf", zipf(random.Random(3), 400))
    policy = REGISTRY.build(Kind.EVICTION_POLICY, "adaptive", {"watch": ["s3fifo", "fifo"]})
    replay(trace, "adaptive", policy, CAPACITY, Order.SUFFIX_FIRST)
    shown = policy.status()
    assert shown["sampled_one_in"] == 1
    assert shown["order"] in {"lru", "lruk", "arc", "mru", "reuse"}, "it is watched, not followed"
    for name in ("s3fifo", "fifo"):
        fixed: EvictionPolicy = REGISTRY.build(Kind.EVICTION_POLICY, name, None)
        assert shown["hit_share"][name] == pytest.approx(block_hits(trace, fixed), abs=0.02), name


def block_hits(trace: Trace, policy: EvictionPolicy) -> float:
    """The share of blocks, taken one by one, that are resident; the first 64 blocks come before the sample."""
    one_by_one = Trace(trace.name, [[block] for request in trace.requests for block in reversed(request)])
    return replay(one_by_one, "fixed", policy, CAPACITY).hit_rate


class Breaks(LruEviction):
    """Fails at its hundredth victim."""

    named = 0

    def victims(self, nbytes: int) -> list[Entry]:
        self.named += 1
        if self.named > 100:
            raise RuntimeError("no more")
        return super().victims(nbytes)


def test_a_policy_that_is_watched_and_fails_is_watched_no_longer(caplog: pytest.LogCaptureFixture) -> None:
    sample = Sample(CAPACITY, 1.0, ExpectedReuse(), {"breaks": Breaks, "lru2": LruEviction})
    for number in range(3000):
        sample.use(number, 1, number + 1)
    assert "breaks" not in sample.describe()["hit_share"]
    assert "lru2" in sample.describe()["hit_share"]
    assert [record.message for record in caplog.records] == [
        "the policy 'breaks' is watched no longer: its shadow cache failed"
    ]


class BreaksAtOnce(LruEviction):
    """Cannot be used, and cannot be built twice."""

    built = 0

    def __init__(self) -> None:
        super().__init__()
        BreaksAtOnce.built += 1
        if BreaksAtOnce.built > 1:
            raise RuntimeError("not again")

    def resize(self, capacity_bytes: int) -> None:
        raise RuntimeError("no size is right")


def test_a_policy_that_cannot_be_watched_is_not_and_nothing_else_fails(caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(2):  # as for a pool that grew
        sample = Sample(CAPACITY, 1.0, ExpectedReuse(), {"breaks": BreaksAtOnce, "lru2": LruEviction})
        sample.use(1, 1, 1)
        assert {"breaks", "lru2"} & sample.describe()["hit_share"].keys() == {"lru2"}
    assert [record.message for record in caplog.records] == [
        "the policy 'breaks' is watched no longer: its shadow cache failed"
    ] * 2
    assert [str(record.exc_info[1]) for record in caplog.records if record.exc_info] == [
        "no size is right",
        "not again",
    ]


@pytest.mark.parametrize(("name", "says"), [("arc", "has a shadow of 'arc' anyway"), ("s4fifo", "s4fifo")])
def test_what_cannot_be_watched_is_said_when_it_is_built(name: str, says: str) -> None:
    with pytest.raises((ValidationError, PluginError, SettingsError), match=says):
        REGISTRY.build(Kind.EVICTION_POLICY, "adaptive", {"watch": [name]})


def test_a_walk_from_first_to_last_is_turned_round() -> None:
    """The simulator gives blocks one by one from the first; a suffix still goes before its prefix."""
    policy = AdaptivePolicy()
    policy.resize(1000)
    walked = walk_forward(policy)
    policy.insert(blocks(2000, 1))
    named = policy.victims(1 << 40)
    assert named.index(walked[-1]) < named.index(walked[0])


@pytest.mark.parametrize("name", ["lru", "lruk", "arc", "mru", "reuse"])
def test_what_is_named_covers_the_bytes_while_a_request_is_on_its_way(name: str) -> None:
    """Its newcomer may go before all others; if they do not suffice the rest of the request goes, and it with them."""
    policy = AdaptivePolicy()
    policy.resize(1000)
    walk_forward(policy)
    policy.remove(policy.victims(1 << 40))
    policy.order = [order.name for order in policy.sample.orders].index(name)
    policy.insert(blocks(2000, 3, 10))
    for entry in blocks(3000, 6, 10):
        policy.insert([entry])
    named = policy.victims(70)
    assert sum(entry.nbytes for entry in named) == 70
    assert policy.victims(70) == named


class _Counting(AdaptivePolicy):
    """Counts one by one what its shelf keeps sums of."""

    def __init__(self) -> None:
        super().__init__()
        self.resize(1000)
        self.residents: dict[Any, None] = {}
        walk_forward(self)
        self.remove(self.victims(1 << 40))

    def insert(self, entries: Sequence[Any]) -> None:
        super().insert(entries)
        self.residents.update(dict.fromkeys(entries))

    def remove(self, entries: Sequence[Any]) -> None:
        super().remove(entries)
        for entry in entries:
            del self.residents[entry]

    def check(self) -> None:
        self.access([])  # ends the request that is on its way
        shelf = self._shelf
        assert shelf.count == len(self.residents)
        assert shelf.nbytes == sum(entry.nbytes for entry in self.residents)
        assert shelf.once_bytes == sum(entry.nbytes for entry in self.residents if not entry.policy_data.uses)


@pytest.mark.parametrize("used", [True, False], ids=["a resident", "a newcomer"])
def test_what_goes_and_comes_back_within_a_request_is_counted_right(used: bool) -> None:
    policy = _Counting()
    first, again = blocks(2000, 1, 10) + blocks(2000, 1, 10)
    policy.insert([first])
    if used:
        policy.access([])
        policy.access([first])
    policy.remove([first])
    policy.insert([again])
    policy.check()
    policy.insert(blocks(3000, 2, 10))
    policy.remove([again])
    policy.check()


@pytest.mark.parametrize("seed", range(8))
def test_the_shelf_is_counted_right_whatever_goes_within_a_request(seed: int) -> None:
    chance, policy = random.Random(seed), _Counting()
    for first in range(100, 600, 6):  # half of the keys were there before
        for number in chance.choices(range(first, first + 12), k=chance.randrange(1, 12)):
            found = next((each for each in policy.residents if each.key == number.to_bytes(32, "big")), None)
            if found is None:
                policy.insert(blocks(number, 1, 1 + number % 3))
            elif chance.random() < 0.5:
                policy.access([found])
            else:
                policy.remove([found])
        policy.check()
