"""What the contract promises of every eviction policy, the built-in LRU among them."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lmcache_core import Kind
from lmcache_core.plugins.loader import load_plugins
from lmcache_core.policies import EvictionPolicy
from lmcache_lab.simulation import SimulatedEntry
from lmcache_policies.lfu import LfuPolicy

TENANTS = {"a": {"namespaces": [1], "quota_bytes": 40}, "b": {"namespaces": [2], "quota_bytes": 10}}
SETTINGS: dict[str, dict[str, object]] = {"isolated": {"tenants": TENANTS, "inner": "lfu"}}
NAMES = ["adaptive", "arc", "fifo", "isolated", "lfu", "lru", "lruk", "mru", "s3fifo"]
REGISTRY = load_plugins()


def build(name: str) -> EvictionPolicy:
    policy: EvictionPolicy = REGISTRY.build(Kind.EVICTION_POLICY, name, SETTINGS.get(name))
    policy.resize(100)
    return policy


class Watched(SimulatedEntry):
    """Counts how often anybody asks for its holds."""

    looks = 0

    @property
    def holds(self) -> int:
        Watched.looks += 1
        return self._holds

    @holds.setter
    def holds(self, value: int) -> None:
        self._holds = value


def blocks(number: int, nbytes: int = 1, kind: type[SimulatedEntry] = SimulatedEntry) -> list[SimulatedEntry]:
    return [kind(i.to_bytes(32, "big"), nbytes, namespace=1 + i % 3) for i in range(number)]


def hold(policy: EvictionPolicy, entries: list[SimulatedEntry]) -> None:
    for entry in entries:
        entry.holds = 1
    policy.held(entries)


def release(policy: EvictionPolicy, entries: list[SimulatedEntry]) -> None:
    for entry in entries:
        entry.holds = 0
    policy.released(entries)


def test_every_eviction_policy_of_this_package_is_under_test() -> None:
    owned = {
        spec.name
        for plugin in REGISTRY.plugins
        if plugin.name == "policies"
        for spec in plugin.components
        if spec.kind is Kind.EVICTION_POLICY
    }
    assert owned == set(NAMES) - {"lru"}


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=60, deadline=None, derandomize=True, database=None, suppress_health_check=[HealthCheck.too_slow])
@given(sizes=st.lists(st.integers(1, 9), min_size=1, max_size=30), bits=st.integers(0), nbytes=st.integers(0, 120))
def test_victims_cover_the_bytes_with_none_to_spare_and_none_that_is_held(
    name: str, sizes: list[int], bits: int, nbytes: int
) -> None:
    policy = build(name)
    entries = [SimulatedEntry(bytes([i]) * 32, size, namespace=i % 4) for i, size in enumerate(sizes)]
    policy.insert(entries)
    policy.access([entry for i, entry in enumerate(entries) if bits >> i & 1])
    held = [entry for i, entry in enumerate(entries) if bits >> (2 * i) & 1]
    hold(policy, held)
    named = policy.victims(nbytes)
    assert policy.victims(nbytes) == named
    assert len(set(named)) == len(named)
    assert not [entry for entry in named if entry.holds]
    loose = sum(entry.nbytes for entry in entries) - sum(entry.nbytes for entry in held)
    covered = sum(entry.nbytes for entry in named)
    if name != "isolated" or not held:  # who is over its quota and held gives nothing, and nobody else gives for it
        assert covered >= min(nbytes, loose)
    if name != "isolated":  # whose tenants each round up
        assert covered - (named[-1].nbytes if named else 0) < max(1, nbytes)
    release(policy, held)
    assert set(policy.victims(10_000)) == set(entries)


@pytest.mark.parametrize("name", NAMES)
def test_held_entries_are_met_once_and_not_again(name: str) -> None:
    policy = build(name)
    entries = blocks(3000, kind=Watched)
    policy.insert(entries)
    policy.access(entries[:1500])
    hold(policy, entries[100:2900])
    first = policy.victims(1)
    Watched.looks = 0
    assert policy.victims(1) == first
    assert Watched.looks <= 4


@pytest.mark.parametrize("name", NAMES)
def test_an_eviction_does_not_look_at_what_is_resident(name: str) -> None:
    policy = build(name)
    entries = blocks(5000, kind=Watched)
    policy.insert(entries)
    for _ in range(3):
        policy.access(entries)
    Watched.looks = 0
    assert len(policy.victims(1)) == 1
    assert Watched.looks <= 1100  # s3fifo may pass on 1,024 used ones


@pytest.mark.parametrize("name", NAMES)
def test_an_entry_that_was_removed_while_held_never_comes_back(name: str) -> None:
    policy = build(name)
    doomed, kept = blocks(2)
    policy.insert([doomed, kept])
    hold(policy, [doomed])
    assert policy.victims(2) == [kept]
    policy.remove([doomed])
    doomed.holds = 0
    assert policy.victims(2) == [kept]
    assert doomed.older is None
    assert doomed.newer is None


@pytest.mark.parametrize("name", NAMES)
def test_a_removed_entry_keeps_no_neighbour_alive(name: str) -> None:
    policy = build(name)
    entries = blocks(9)
    policy.insert(entries)
    policy.access(entries[3:])
    policy.remove(entries)
    assert {(entry.older, entry.newer) for entry in entries} == {(None, None)}
    assert policy.victims(1) == []


@pytest.mark.parametrize("name", NAMES)
def test_one_batch_is_the_same_as_its_entries_one_by_one(name: str) -> None:
    orders = []
    for step in (1, 7, 60):
        policy, entries = build(name), blocks(60, nbytes=2)
        for method, subject in ((policy.insert, entries), (policy.access, entries[::3]), (policy.access, entries[::7])):
            for start in range(0, len(subject), step):
                method(subject[start : start + step])
        orders.append([entry.key for entry in policy.victims(1000)])
    assert orders[0] == orders[1] == orders[2]


@pytest.mark.parametrize("name", NAMES)
def test_what_was_named_and_then_used_is_still_counted(name: str) -> None:
    """The server names victims, may evict only some of them, and goes on."""
    policy, entries = build(name), blocks(30, nbytes=3)
    policy.insert(entries)
    named = policy.victims(30)
    policy.access(named[::2])
    hold(policy, named[1::2])
    release(policy, named[1::2])
    policy.remove(policy.victims(6))
    assert sum(entry.nbytes for entry in policy.victims(1000)) == 84


def test_lfu_keeps_no_level_that_nobody_is_on() -> None:
    policy, entries = LfuPolicy(), blocks(10)
    policy.insert(entries)
    for used in range(100):
        policy.access(entries[used % 10 :])
    assert set(policy.levels) == set(policy.counts) == {1 + 10 * n for n in range(1, 11)}
    policy.remove(entries)
    assert not policy.levels
    assert not policy.counts


SCRIPT = """
from lmcache_core import Kind
from lmcache_core.plugins.loader import load_plugins
from lmcache_lab.simulation import replay
from lmcache_lab.workloads import SyntheticSettings, synthetic_trace
registry = load_plugins()
trace = synthetic_trace(SyntheticSettings(sessions=60))
settings = {"isolated": {"tenants": {"a": {"namespaces": [0], "quota_bytes": 50}}, "inner": "arc"}}
for name in NAMES:
    print(name, replay(trace, name, registry.build(Kind.EVICTION_POLICY, name, settings.get(name)), 300).hits)
"""


@pytest.fixture(scope="module")
def two_processes() -> list[list[str]]:
    script = SCRIPT.replace("NAMES", repr(NAMES))
    return [
        subprocess.run(
            [sys.executable, "-c", script], env={"PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True
        ).stdout.splitlines()
        for seed in ("1", "2")
    ]


@pytest.mark.parametrize("position", range(len(NAMES)), ids=NAMES)
def test_two_processes_agree(two_processes: list[list[str]], position: int) -> None:
    one, other = two_processes
    assert one[position] == other[position]
    assert int(one[position].split()[1]) > 0
