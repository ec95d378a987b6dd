"""The built-in store and prefetch policies."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from lmcache_core.limits import PREFETCHES_REMEMBERED
from lmcache_core.policies.contracts import StoreCandidate, TierView
from lmcache_core.policies.prefetch import DefaultPrefetch, RetainPrefetch
from lmcache_core.policies.store import DefaultStore, SkipL1Store

TIERS = [TierView("near", True), TierView("far", False)]
BATCH = [StoreCandidate(bytes([i]) * 32, 1, 100) for i in range(3)]


def test_the_default_stores_everything_everywhere_and_keeps_it() -> None:
    plan = DefaultStore(None).plan(BATCH, TIERS)
    assert {name: list(positions) for name, positions in plan.targets.items()} == {
        "near": [0, 1, 2],
        "far": [0, 1, 2],
    }
    assert list(plan.drop) == []


def test_skip_l1_drops_everything_but_never_without_a_tier() -> None:
    assert list(SkipL1Store(None).plan(BATCH, TIERS).drop) == [0, 1, 2]
    assert list(SkipL1Store(None).plan(BATCH, []).drop) == []


@given(st.lists(st.tuples(st.booleans(), st.booleans()), max_size=8), st.booleans())
def test_each_key_comes_from_the_first_tier_in_order_that_has_it(where: list[tuple[bool, bool]], silent: bool) -> None:
    keys = [bytes([i]) * 32 for i in range(len(where))]
    found = {"far": [far for _, far in where]}
    if not silent:
        found["near"] = [near for near, _ in where]
    expected = ["near" if near and not silent else "far" if far else None for near, far in where]
    for policy, retain in ((DefaultPrefetch(None), False), (RetainPrefetch(None), True)):
        plan = policy.plan(keys, found, TIERS)
        assert (list(plan.sources), plan.retain) == (expected, retain)


def test_what_was_loaded_before_stays_and_what_there_is_room_for() -> None:
    policy = DefaultPrefetch(None)
    keys = [bytes([i]) * 32 for i in range(4)]
    assert list(policy.retains(keys[:2], 0)) == [False, False]
    assert list(policy.retains(keys, 0)) == [True, True, False, False]
    assert list(DefaultPrefetch(None).retains(keys, 3)) == [True, True, True, False]
    assert list(DefaultPrefetch(None).retains([], 3)) == []


def test_what_is_remembered_of_loads_is_bounded_and_the_last_half_of_it_is_there() -> None:
    policy = DefaultPrefetch(None)
    keys = [number.to_bytes(32, "big") for number in range(2 * PREFETCHES_REMEMBERED)]
    policy.retains(keys, 0)
    assert policy.remembered <= PREFETCHES_REMEMBERED
    assert all(policy.retains(keys[-PREFETCHES_REMEMBERED // 2 :], 0))
    assert not any(policy.retains(keys[:1000], 0))
