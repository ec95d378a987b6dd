"""`lmcache-core bench policy` measures every policy that is installed, through the harness."""

from __future__ import annotations

from argparse import ArgumentParser

import pytest

from lmcache_bench import policy
from lmcache_core import Kind
from lmcache_core.cli.bench.harness import Bench
from lmcache_core.plugins.loader import load_plugins


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policy, "RESIDENTS_QUICK", (100, 400))
    monkeypatch.setattr(policy, "BATCHES", 3)


def measured(*words: str) -> Bench:
    parser = ArgumentParser()
    policy.add_options(parser)
    bench = Bench("policy", quick=True, as_json=True)
    policy.run(parser.parse_args(words), bench)
    return bench


def test_every_installed_policy_is_measured_at_every_size(small: None) -> None:
    names = {spec.name for spec in load_plugins().components(Kind.EVICTION_POLICY)}
    results = measured().results
    assert names >= {"lru", "noop"}
    assert {result.name for result in results} == {
        f"{name} {operation}, {residents} residents"
        for name in names
        for operation in ("insert", "access", "evict", "hold", "life of an entry")
        for residents in (100, 400)
    } | {
        f"adaptive{what}, {residents} residents"
        for what in (" access with shadows", ", longest step at a change of order")
        for residents in (100, 400)
    }
    assert all(result.value > 0 for result in results)


def test_the_target_is_on_the_growth_with_the_residents(small: None) -> None:
    lives = {r.name: r for r in measured("--policy", "lru").results if "life" in r.name}
    fewest, most = lives["lru life of an entry, 100 residents"], lives["lru life of an entry, 400 residents"]
    assert (fewest.floor, fewest.target) == (None, None)
    assert (most.floor, most.target) == (fewest.value, policy.GROWTH_MAX)
