"""The history of what is gone stays within its bounds."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lmcache_core import Kind
from lmcache_core.plugins.loader import load_plugins
from lmcache_lab.simulation import SimulatedEntry
from lmcache_policies.arc import ArcPolicy
from lmcache_policies.ghosts import Ghosts, fingerprint
from lmcache_policies.lruk import LrukPolicy
from lmcache_policies.s3fifo import S3FifoPolicy
from lmcache_policies.settings import S3FifoSettings


def entry(number: int, nbytes: int = 1, namespace: int = 0) -> SimulatedEntry:
    return SimulatedEntry(number.to_bytes(32, "big"), nbytes, namespace)


@settings(
    max_examples=100, deadline=None, derandomize=True, database=None, suppress_health_check=[HealthCheck.too_slow]
)
@given(st.lists(st.tuples(st.sampled_from(["put", "put", "take", "trim"]), st.integers(0, 9)), max_size=60))
def test_ghosts_are_an_ordered_mapping_with_two_bounds(steps: list[tuple[str, int]]) -> None:
    ghosts = Ghosts(keys_max=5)
    model: dict[int, int] = {}
    for verb, number in steps:
        if verb == "put":
            note = f"note {number}"
            expelled = model.pop(number, None)
            if expelled is None and len(model) == 5:
                expelled = next(iter(model))
                del model[expelled]
            elif expelled is not None:
                expelled = number
            model[number] = number + 1
            assert ghosts.put(entry(number, number + 1), note) == (None if expelled is None else f"note {expelled}")
        elif verb == "take":
            found = ghosts.take(entry(number))
            assert found == (f"note {number}" if model.pop(number, None) else None)
        else:
            gone = []
            while sum(model.values()) > number:
                gone.append(f"note {next(iter(model))}")
                del model[next(iter(model))]
            assert ghosts.trim(number) == gone
        assert len(ghosts) == len(model)
        assert ghosts.nbytes == sum(model.values())


def test_a_ghost_belongs_to_its_namespace() -> None:
    ghosts = Ghosts()
    ghosts.put(entry(1, namespace=7))
    assert ghosts.take(entry(1, namespace=8)) is None
    assert ghosts.take(entry(1, namespace=7)) is True


def test_fingerprints_are_the_same_in_every_process_and_take_any_id() -> None:
    assert fingerprint(bytes(32), 7) == 0xEE386D05674E1E2E
    assert fingerprint(bytes(32), (1 << 64) - 1) != fingerprint(bytes(32), 0)


@pytest.mark.parametrize("values", [{"capacity_bytes": 10, "ghost_keys_max": 1000}, {"ghost_keys_max": 6}])
@pytest.mark.parametrize("name", ["arc", "s3fifo", "lruk"])
def test_a_long_life_leaves_a_bounded_history(name: str, values: dict[str, int]) -> None:
    policy = load_plugins().build(Kind.EVICTION_POLICY, name, values)
    resident: dict[SimulatedEntry, None] = {}
    longest = 0
    for number in range(500):
        policy.access([block for block in resident if block.key[31] % 3 == 0])
        block = entry(number)
        resident[block] = None
        policy.insert([block])
        if number >= 10:
            victims = policy.victims(1)
            policy.remove(victims)
            for victim in victims:
                del resident[victim]
        longest = max(longest, history_of(policy))
    assert 5 <= longest <= (12 if "capacity_bytes" not in values else 40)
    if isinstance(policy, LrukPolicy):
        uses = 0
        use = policy.timeline.newer
        while use is not policy.timeline:
            uses, use = uses + 1, use.newer
        assert uses <= 2 * len(resident) + history_of(policy)


def history_of(policy: ArcPolicy | S3FifoPolicy | LrukPolicy) -> int:
    if isinstance(policy, ArcPolicy):
        return len(policy.once.ghosts) + len(policy.again.ghosts)
    return len(policy.ghosts)


def test_a_capacity_in_the_settings_wins_over_the_owners() -> None:
    told, fixed, alone = S3FifoPolicy(), S3FifoPolicy(S3FifoSettings(capacity_bytes=50)), S3FifoPolicy()
    for policy in (told, fixed):
        policy.resize(1000)
    assert (told.capacity_bytes, fixed.capacity_bytes) == (1000, 50)
    alone.insert([entry(1, 30), entry(2, 40)])
    alone.remove(alone.victims(30))
    assert alone.capacity_bytes == 70
    assert alone.resident_bytes == 40
