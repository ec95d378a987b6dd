"""Tenants: whose objects are evicted, and whose are not."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from lmcache_core.errors import PluginError
from lmcache_lab.simulation import SimulatedEntry
from lmcache_policies.isolated import IsolatedPolicy
from lmcache_policies.settings import IsolatedSettings


def policy_of(quotas: dict[int, int], **more: Any) -> IsolatedPolicy:
    tenants = {f"t{n}": {"namespaces": [n], "quota_bytes": quota} for n, quota in quotas.items()}
    return IsolatedPolicy(IsolatedSettings.model_validate({"tenants": tenants, **more}))


def fill(policy: IsolatedPolicy, namespace: int, number: int, nbytes: int = 1) -> list[SimulatedEntry]:
    entries = [
        SimulatedEntry(bytes([namespace % 256]) + i.to_bytes(31, "big"), nbytes, namespace) for i in range(number)
    ]
    policy.insert(entries)
    return entries


def given_by(victims: Any) -> dict[int, int]:
    total: Counter[int] = Counter()
    for entry in victims:
        total[entry.namespace] += entry.nbytes
    return dict(total)


def test_a_tenant_over_its_quota_gives_first_even_when_its_entries_are_the_newest() -> None:
    policy = policy_of({1: 50, 2: 50})
    fill(policy, 1, 50)
    fill(policy, 2, 70)
    assert given_by(policy.victims(20)) == {2: 20}


def test_the_one_that_is_fullest_by_its_quota_gives_most() -> None:
    policy = policy_of({1: 10, 2: 100})
    fill(policy, 1, 40)  # four times its quota
    fill(policy, 2, 200)  # twice
    assert given_by(policy.victims(20)) == {1: 20}
    assert given_by(policy.victims(130)) == {1: 30, 2: 100}


def test_within_their_quotas_all_come_down_to_the_same_fullness() -> None:
    policy = policy_of({1: 100, 2: 50})
    fill(policy, 1, 90)
    fill(policy, 2, 45)
    assert given_by(policy.victims(30)) == {1: 20, 2: 10}


def hold(policy: IsolatedPolicy, entries: list[SimulatedEntry]) -> None:
    for entry in entries:
        entry.holds = 1
    policy.held(entries)


def test_what_cannot_go_is_not_made_up_by_those_within_their_quotas() -> None:
    policy = policy_of({1: 10, 2: 100})
    pinned = fill(policy, 1, 40)
    fill(policy, 2, 100)
    hold(policy, pinned)
    assert policy.victims(25) == [], "a store is answered FULL"
    for entry in pinned[:5]:
        entry.holds = 0
    policy.released(pinned[:5])
    assert given_by(policy.victims(25)) == {1: 5}
    assert policy.spares(fill(policy, 2, 0) or [SimulatedEntry(bytes(32), 1, 2)], 1)
    assert not policy.spares([SimulatedEntry(bytes(32), 1, 2)], 2), "it may give way to itself"


def test_what_cannot_go_is_made_up_by_others_that_are_over_their_quotas() -> None:
    policy = policy_of({1: 10, 2: 100, 3: 50})
    hold(policy, fill(policy, 1, 40))
    fill(policy, 2, 130)
    fill(policy, 3, 50)
    assert given_by(policy.victims(25)) == {2: 25}
    assert given_by(policy.victims(80)) == {2: 30}


def test_what_is_being_written_counts_as_used() -> None:
    policy = policy_of({1: 50, 2: 50})
    fill(policy, 1, 50)
    fill(policy, 2, 50)
    policy.charge(2, 10)
    assert given_by(policy.victims(10)) == {2: 10}
    assert given_by(policy.surplus(30)) == {2: 10}
    policy.charge(2, -10)
    assert policy.surplus(30) == [], "headroom is worth nothing that a quota covers"


def test_unlisted_namespaces_share_what_the_tenants_leave() -> None:
    policy = policy_of({1: 60})
    policy.resize(100)
    fill(policy, 1, 60)
    fill(policy, 77, 30)
    fill(policy, 78, 30)
    assert given_by(policy.victims(20)) == {77: 20}
    assert policy_of({1: 60}, others_quota_bytes=5).victims(1) == []


def test_unlisted_namespaces_with_no_quota_go_before_anyone_is_asked() -> None:
    policy = policy_of({1: 10}, others_quota_bytes=0)
    fill(policy, 1, 20)
    fill(policy, 5, 30)
    assert given_by(policy.victims(10)) == {5: 10}
    assert given_by(policy.victims(35)) == {5: 30, 1: 5}


def test_the_inner_policy_decides_within_a_tenant() -> None:
    policy = policy_of({1: 10}, inner="mru")
    entries = fill(policy, 1, 20)
    policy.access(entries[3:4])
    assert policy.victims(2) == [entries[3], entries[19]]


def test_the_inner_policy_takes_its_settings_and_is_told_the_quota() -> None:
    policy = policy_of({1: 30}, inner="s3fifo", inner_settings={"small_fraction": 0.5})
    entries = fill(policy, 1, 20)
    for _ in range(2):
        policy.access(entries[:4])
    # Half of the quota is the small queue's: four used ones leave it for the main queue, two go, and then it holds
    # less than fifteen, so the main queue gives.
    assert policy.victims(3) == [entries[4], entries[5], entries[0]]


def test_the_inner_policy_hears_of_holds() -> None:
    policy = policy_of({1: 30}, inner="lru")
    first, second = fill(policy, 1, 2)
    policy.held([first])
    policy.released([first])  # which is a use to LRU
    assert policy.victims(1) == [second]


@settings(
    max_examples=150, deadline=None, derandomize=True, database=None, suppress_health_check=[HealthCheck.too_slow]
)
@given(
    quotas=st.dictionaries(st.integers(1, 5), st.integers(0, 60), min_size=1),
    counts=st.lists(st.integers(0, 25), min_size=6, max_size=6),
    nbytes=st.integers(1, 300),
)
def test_nobody_within_its_quota_gives_while_another_is_over(
    quotas: dict[int, int], counts: list[int], nbytes: int
) -> None:
    policy = policy_of(quotas, others_quota_bytes=20)
    largest = 6
    used: Counter[int] = Counter()
    for namespace, count in enumerate(counts):
        size = 1 + namespace
        fill(policy, namespace, count, size)
        used[namespace if namespace in quotas else -1] += count * size
    quota = {**quotas, -1: 20}
    named = policy.victims(nbytes)
    gave: Counter[int] = Counter()
    for entry in named:
        gave[entry.namespace if entry.namespace in quotas else -1] += entry.nbytes
    assert sum(gave.values()) >= min(nbytes, sum(used.values()))
    assert sum(gave.values()) < nbytes + largest * 6
    if any(gave[tenant] and used[tenant] <= quota[tenant] for tenant in used):
        assert all(used[tenant] - gave[tenant] <= quota[tenant] + largest for tenant in used)


def test_ids_are_numbers_or_hexadecimal_text_and_belong_to_one_tenant() -> None:
    tenant = {"namespaces": ["0xffffffffffffffff", "ff", 3], "quota_bytes": "1GiB"}
    read = IsolatedSettings.model_validate({"tenants": {"a": tenant}}).tenants["a"]
    assert read.namespaces == ((1 << 64) - 1, 255, 3)
    assert read.quota_bytes == 1 << 30
    with pytest.raises(ValidationError, match="belongs to tenants 'a' and 'b'"):
        IsolatedSettings.model_validate({"tenants": {"a": tenant, "b": {"namespaces": [3], "quota_bytes": 1}}})
    with pytest.raises(ValidationError, match="less than 1844"):
        policy_of({1 << 64: 1})


def test_an_inner_policy_that_is_not_there_or_has_no_end_is_refused() -> None:
    with pytest.raises(PluginError, match="no eviction_policy 'lur'"):
        policy_of({1: 1}, inner="lur")
    with pytest.raises(ValidationError, match="has no end"):
        policy_of({1: 1}, inner="isolated")
