"""Seeded disorder: faults of every kind on two tiers, while requests come, end and are cancelled.

Whatever happens: no wrong bytes, nothing held at the end, every request answered once, and a recovery without a
restart.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from lmcache_core.errors import TierError
from lmcache_core.policies.contracts import (
    PrefetchPlan,
    PrefetchPolicy,
    StoreCandidate,
    StorePlan,
    StorePolicy,
    TierView,
)
from lmcache_core.policies.lru import LruEviction
from lmcache_core.policies.prefetch import DefaultPrefetch, RetainPrefetch
from lmcache_core.policies.store import DefaultStore, SkipL1Store
from lmcache_core.tiers.contract import AdapterContext, Outcome, Result

from .conftest import Doubles, Loop, ScriptedAdapter

KEYS = 24


def _fault(chance: random.Random, adapter: ScriptedAdapter) -> None:
    """One more thing goes wrong, or right again."""
    method = chance.choice(["store", "exists", "load", "delete", "scan"])
    kind = chance.choice(["error", "answer", "hang", "corrupt", "lose", "swap", "well", "well"])
    names = list(adapter.objects)
    if kind == "error":
        adapter.errors[method] = TierError("connection reset", retryable=False)
    elif kind == "answer" and method in ("store", "load"):
        adapter.answers[method] = Outcome(chance.choice([Result.FULL, Result.MISS, Result.DAMAGED, Result.FAILED]))
    elif kind == "hang" and method not in adapter.gates:
        adapter.hang(method)
    elif kind == "corrupt" and names:
        with suppress(KeyError):  # a lane may have deleted it meanwhile
            adapter.corrupt(chance.choice(names))
    elif kind == "lose" and names:
        adapter.objects.pop(chance.choice(names), None)
    elif kind == "swap" and len(names) > 1:
        one, other = chance.sample(names, 2)
        adapter.objects[one] = adapter.objects.get(other, b"")
    elif kind == "well":
        _heal(adapter)


def _heal(adapter: ScriptedAdapter) -> None:
    adapter.errors.clear()
    adapter.answers.clear()
    for method in list(adapter.gates):
        adapter.release(method)


def _evict_some(chance: random.Random, loop: Loop) -> None:
    for namespace, key in list(loop.l1.ready):
        if chance.random() < 0.6:
            loop.l1.evict(key, namespace)


def _check_bytes(doubles: Doubles, loop: Loop) -> None:
    for number in range(KEYS):
        got = loop.l1.get(doubles.key(number))
        assert got is None or got == doubles.content(number)


@pytest.mark.parametrize("seed", range(12))
def test_whatever_tiers_do_bytes_are_right_and_nothing_stays_held(doubles: Doubles, seed: int) -> None:
    chance = random.Random(seed)
    adapters = [doubles.adapter(), doubles.adapter()]
    tiers = [
        doubles.tier(name, adapter, capacity_bytes=12 * 9096, eviction=LruEviction(None))
        for name, adapter in zip(("near", "far"), adapters, strict=True)
    ]
    loop = doubles.loop(
        doubles.l1(20),
        *tiers,
        store_policy=chance.choice([DefaultStore, SkipL1Store])(None),
        prefetch_policy=chance.choice([DefaultPrefetch, RetainPrefetch])(None),
        config={"dirty": chance.choice(["drop", "keep"]), "prefetch_in_flight_max": 4},
    )
    jobs: list[Any] = []
    for _ in range(120):
        action = chance.random()
        number = chance.randrange(KEYS)
        if action < 0.35 and loop.l1.free and (7, doubles.key(number)) not in {*loop.l1.ready, *loop.l1.loading}:
            loop.store({doubles.key(number): doubles.content(number)})
        elif action < 0.65:
            keys = [doubles.key((number + i) % KEYS) for i in range(chance.randrange(1, 8))]
            wanted = chance.choice([{}, {}, {"prefix": False}, {"window": 2}])
            jobs.append(loop.ask(keys, seconds=chance.choice([1.0, 100.0]), **wanted))
        elif action < 0.72 and jobs:
            loop.tiering.cancel(chance.choice(jobs))
        elif action < 0.76:
            loop.clear(7, tiers=chance.random() < 0.5)
            for namespace, key in list(loop.l1.ready):
                loop.l1.evict(key, namespace)
        elif action < 0.9:
            _fault(chance, chance.choice(adapters))
        elif action < 0.95:
            loop.jump(chance.choice([0.5, 3.0, 40.0]))
        _evict_some(chance, loop) if chance.random() < 0.3 else None
        for _ in range(chance.randrange(4)):
            loop.clock.turn()
            loop.tiering.step()
        _check_bytes(doubles, loop)
    for adapter in adapters:
        _heal(adapter)
    loop.jump(200.0)
    loop.until(lambda: all(job.ended for job in jobs) and not loop.l1.held and loop.tiering.drained)
    assert sorted(job.id for job in loop.done) == sorted(job.id for job in jobs), "each is answered once"
    assert not loop.l1.quarantined
    assert loop.tiering.status()["faults"] == 0
    _check_bytes(doubles, loop)
    # Everybody is well again: what is stored now comes back.
    loop.jump(200.0)
    loop.until(lambda: all(str(tier.health.reads.state) == "closed" for tier in tiers))
    loop.jump(200.0)
    for namespace, key in list(loop.l1.ready):
        loop.l1.evict(key, namespace)
    for attempt in range(10):  # a half-open breaker takes the first as its probe, and a pause may have doubled
        fresh = doubles.contents(2, first=100 + 10 * attempt)
        loop.store(fresh)
        loop.idle()
        for namespace, key in list(loop.l1.ready):
            loop.l1.evict(key, namespace)
        job = loop.fetch(list(fresh))
        if job.hits == 2:
            break
        loop.jump(200.0)
    assert job.hits == 2
    assert {key: loop.l1.get(key) for key in fresh} == fresh
    loop.until(lambda: all(tier.accounting.bytes_leaving == 0 for tier in tiers))


def test_a_policy_that_raises_loses_its_plan_and_nothing_else(doubles: Doubles) -> None:
    class Broken(StorePolicy, PrefetchPolicy):
        def plan(self, *arguments: object) -> Any:
            raise ZeroDivisionError

    class Short(PrefetchPolicy):
        def plan(self, *arguments: object) -> PrefetchPlan:
            return PrefetchPlan([])

    class Wild(StorePolicy):
        def plan(self, batch: Sequence[StoreCandidate], tiers: Sequence[TierView]) -> StorePlan:
            return StorePlan({"mem": [0], "moon": [0]})

    for policy in (Broken(), Short()):
        adapter = doubles.adapter()
        loop = doubles.loop(doubles.l1(), doubles.tier("mem", adapter), store_policy=Wild(), prefetch_policy=policy)
        loop.store(doubles.contents(1))
        loop.idle()
        assert len(adapter.objects) == 1
        loop.l1.evict(doubles.key(0))
        assert loop.fetch([doubles.key(0)]).hits == 0
    loop = doubles.loop(doubles.l1(), doubles.tier("mem", doubles.adapter()), store_policy=Broken())
    loop.store(doubles.contents(1))
    loop.idle()
    assert loop.tiering.status()["stores"]["counts"]["policy_failed"] == 1


def test_on_a_real_disk_bytes_survive_restarts_and_flipped_bits_are_misses(doubles: Doubles, tmp_path: Path) -> None:
    pytest.importorskip("lmcache_fs")
    from lmcache_fs.adapter import FsAdapter
    from lmcache_fs.settings import FsSettings

    def loop() -> Any:
        adapter = FsAdapter(FsSettings(path=tmp_path / "tier"), AdapterContext(tier="disk"))
        tier = doubles.tier("disk", adapter, capacity_bytes=40 * 9096, eviction=LruEviction(None))
        return doubles.loop(doubles.l1(), tier)

    first, contents = loop(), doubles.contents(12)
    first.store(contents)
    first.idle()
    first.tiering.close()
    second = loop()
    second.idle()
    (tier,) = second.tiering.status()["tiers"]
    assert (tier["objects"], tier["bytes_used"]) == (12, 12 * 9096)
    files = sorted(path for path in (tmp_path / "tier" / "objects").rglob("*") if path.is_file())
    victim = files[5]
    content = bytearray(victim.read_bytes())
    content[6000] ^= 4
    victim.write_bytes(content)
    job = second.fetch(list(contents), prefix=False)
    (bad,) = job.reasons
    assert job.hits == 11
    assert list(contents)[bad].hex() in victim.name
    second.until(lambda: not victim.exists() and len(list((tmp_path / "tier" / "damaged").iterdir())) == 1)
    _check_bytes(doubles, second)
