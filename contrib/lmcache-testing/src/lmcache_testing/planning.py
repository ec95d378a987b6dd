"""The contracts of store and prefetch policies, as tests.

class TestAcmeStorePolicy(StorePolicyContract):
    @pytest.fixture
    def make_policy(self):
        return lambda: AcmeStore(AcmeSettings())
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmcache_core.policies.contracts import (
    PrefetchPlan,
    PrefetchPolicy,
    StoreCandidate,
    StorePlan,
    StorePolicy,
    TierView,
)
from lmcache_testing import material
from lmcache_testing.cases import drawn
from lmcache_testing.contract import Contract
from lmcache_testing.purity import impure_calls, salted

_QUICK = drawn(50, shortest=False)  # to shorten a sequence of several batches takes up to five minutes
_TIERS = st.lists(
    st.builds(TierView, st.sampled_from(["ssd", "cold", "mock", "far"]), st.booleans()),
    max_size=4,
    unique_by=lambda tier: tier.name,
)
_CANDIDATES = st.lists(
    st.builds(
        StoreCandidate,
        st.integers(0, 30).map(material.key),
        st.integers(0, 3),
        st.integers(1, 1 << 32),
        st.booleans(),
    ),
    max_size=12,
    unique_by=lambda candidate: candidate.key,
)


Spell = Callable[[bytes], bytes]


def candidates(
    number: int, nbytes: int = 65536, *, reused: bool = False, first: int = 0, spell: Spell = bytes
) -> list[StoreCandidate]:
    return [StoreCandidate(spell(material.key(first + n)), 1 + n % 2, nbytes, reused) for n in range(number)]


TIERS = (TierView("ssd", True), TierView("cold", True))


class StorePolicyContract(Contract):
    """A plan names what exists, loses nothing, and depends only on what the policy was given."""

    discards: ClassVar[bool] = False  # True: the policy may drop objects from the L1 that it sends to no tier

    @pytest.fixture
    def make_policy(self) -> Callable[[], StorePolicy]:
        pytest.fail(f"{type(self).__name__} has no fixture 'make_policy': return a callable that makes a policy")

    def test_it_is_a_store_policy(self, make_policy: Callable[[], StorePolicy]) -> None:
        policy = make_policy()
        assert isinstance(policy, StorePolicy), f"a {type(policy).__name__} is no StorePolicy"
        assert isinstance(policy.wants_reuse, bool), f"wants_reuse is {policy.wants_reuse!r}: True or False"

    def test_an_empty_batch_is_an_empty_plan(self, make_policy: Callable[[], StorePolicy]) -> None:
        plan = make_policy().plan([], TIERS)
        assert not any(plan.targets.values()), "asked about no objects, it sends some"
        assert list(plan.drop) == [], f"asked about no objects, it drops {list(plan.drop)}"

    def test_without_tiers_nothing_is_sent_and_nothing_lost(self, make_policy: Callable[[], StorePolicy]) -> None:
        batch = candidates(5)
        plan = make_policy().plan(batch, ())
        self._check(plan, batch, ())

    def test_tiers_that_are_down_are_no_surprise(self, make_policy: Callable[[], StorePolicy]) -> None:
        policy, batch = make_policy(), candidates(5)
        down = [TierView(tier.name, False) for tier in TIERS]
        for tiers in (down, [TIERS[0], down[1]], TIERS):
            self._check(policy.plan(batch, tiers), batch, tiers)

    def test_any_plan_names_what_exists(self, make_policy: Callable[[], StorePolicy]) -> None:
        @_QUICK
        @given(story=st.lists(st.tuples(_CANDIDATES, _TIERS), min_size=1, max_size=4))
        def check(story: list[tuple[list[StoreCandidate], list[TierView]]]) -> None:
            policy = make_policy()
            for batch, tiers in story:
                if not policy.wants_reuse:
                    batch = [candidate._replace(reused=False) for candidate in batch]
                before = copy.deepcopy((batch, tiers))
                self._check(policy.plan(batch, tiers), batch, tiers)
                same = (batch, tiers) == before
                assert same, (
                    f"shown {len(before[0])} objects and {len(before[1])} tiers, it changed them: they are ours"
                )

        check()

    def test_two_policies_with_one_history_plan_the_same(self, make_policy: Callable[[], StorePolicy]) -> None:
        plans = [_stored(make_policy()) for _ in range(2)]
        wrong = next((at for at, pair in enumerate(zip(*plans, strict=True)) if pair[0] != pair[1]), None)
        assert wrong is None, f"two policies got the same calls, and plan {wrong} differs: no clock, no chance, no id()"

    def test_it_plans_the_same_in_every_process(self, make_policy: Callable[[], StorePolicy]) -> None:
        """Python's `hash` of bytes differs from process to process."""
        plans = [_stored(make_policy(), salted(salt)) for salt in range(3)]
        same = plans[0] == plans[1] == plans[2]
        assert same, "with the same calls, and other hashes of the same keys, it plans otherwise: it goes by hash(key)"

    def test_it_asks_no_clock_and_nobody_else(self, make_policy: Callable[[], StorePolicy]) -> None:
        """Pure: no I/O, no clock, no lock, no unseeded chance."""
        _stored(make_policy())  # so that late imports are done
        policy = make_policy()
        impure = impure_calls(lambda: _stored(policy))
        assert not impure, f"while it made four plans, it asked for {' and '.join(impure)}"

    def test_a_plan_stays_as_it_was_made(self, make_policy: Callable[[], StorePolicy]) -> None:
        """It is carried out after later plans have been made."""
        policy = make_policy()
        first = policy.plan(candidates(8, reused=policy.wants_reuse), TIERS)
        before = _plain(first)
        policy.plan(candidates(3, first=20), TIERS[:1])
        assert _plain(first) == before, "another plan was made, and the former one changed: each is its own"

    def _check(self, plan: StorePlan, batch: Sequence[StoreCandidate], tiers: Sequence[TierView]) -> None:
        assert isinstance(plan, StorePlan), f"a plan is a {type(plan).__name__}, and has to be a StorePlan"
        assert isinstance(plan.targets, Mapping), f"targets are a {type(plan.targets).__name__}: tier name to positions"
        unknown = set(plan.targets) - {tier.name for tier in tiers}
        assert not unknown, f"the plan sends objects to {unknown}, which do not exist"
        for name, positions in (*plan.targets.items(), ("drop", plan.drop)):
            kind = type(positions).__name__
            assert isinstance(positions, Sequence), f"{name}: positions are a {kind}: a list, a tuple or a range"
            listed = list(positions)
            odd = [each for each in listed if type(each) is not int]
            assert not odd, f"{name}: {odd[0]!r:.60} is no position in the batch: a whole number from 0" if odd else ""
            twice = len(listed) - len(set(listed))
            assert not twice, f"{name}: of {len(listed)} positions {twice} are named twice"
            outside = [position for position in listed if not 0 <= position < len(batch)]
            assert not outside, f"{name}: positions {outside} are outside a batch of {len(batch)}"
        if not self.discards:
            sent = {position for positions in plan.targets.values() for position in positions}
            lost = set(plan.drop) - sent
            assert not lost, f"positions {sorted(lost)} leave the L1 and go to no tier (discards = True allows it)"


class PrefetchPolicyContract(Contract):
    """Each key comes from a tier that has it, or from none."""

    declines: ClassVar[bool] = False  # True: the policy may leave a key unloaded although a healthy tier has it

    @pytest.fixture
    def make_policy(self) -> Callable[[], PrefetchPolicy]:
        pytest.fail(f"{type(self).__name__} has no fixture 'make_policy': return a callable that makes a policy")

    def test_it_is_a_prefetch_policy(self, make_policy: Callable[[], PrefetchPolicy]) -> None:
        policy = make_policy()
        assert isinstance(policy, PrefetchPolicy), f"a {type(policy).__name__} is no PrefetchPolicy"

    def test_no_keys_are_no_sources(self, make_policy: Callable[[], PrefetchPolicy]) -> None:
        plan = make_policy().plan([], {"ssd": [], "cold": []}, TIERS)
        assert list(plan.sources) == [], f"asked about no keys, it names {len(plan.sources)} sources"

    def test_a_key_that_nobody_has_comes_from_nowhere(self, make_policy: Callable[[], PrefetchPolicy]) -> None:
        keys = [material.key(number) for number in range(3)]
        for found in ({}, {"ssd": [False] * 3}, {"ssd": [False] * 3, "cold": [False] * 3}):
            sources = list(make_policy().plan(keys, found, TIERS).sources)
            assert sources == [None] * 3, (
                f"no tier has any of three keys ({len(found)} answered), and they come from {sources}"
            )

    def test_each_key_comes_from_a_tier_that_has_it(self, make_policy: Callable[[], PrefetchPolicy]) -> None:
        keys = [material.key(number) for number in range(4)]
        found = {"ssd": [True, False, False, True], "cold": [False, True, False, True]}
        plan = make_policy().plan(keys, found, TIERS)
        self._check(plan, keys, found, TIERS)
        if not self.declines:
            named = list(plan.sources)[:3]
            assert named == ["ssd", "cold", None], f"ssd has the first of three keys, cold the second: it named {named}"

    def test_any_plan_names_a_tier_that_has_the_key(self, make_policy: Callable[[], PrefetchPolicy]) -> None:
        @_QUICK
        @given(tiers=_TIERS, count=st.integers(0, 10), bits=st.integers(0, 1 << 40), late=st.integers(0, 4))
        def check(tiers: list[TierView], count: int, bits: int, late: int) -> None:
            policy = make_policy()
            keys = [material.key(number) for number in range(count)]
            found = {
                tier.name: [bool(bits >> (10 * row + column) & 1) for column in range(count)]
                for row, tier in enumerate(tiers)
                if row != late
            }
            before = copy.deepcopy((keys, found, tiers))
            plan = policy.plan(keys, found, tiers)
            self._check(plan, keys, found, tiers)
            same = (keys, found, tiers) == before
            assert same, (
                f"shown {count} keys, {len(before[2])} tiers and what these have, it changed them: they are ours"
            )
            same = _plain(make_policy().plan(keys, found, tiers)) == _plain(plan)
            assert same, (
                f"a fresh policy, given the same of {count} keys and {len(tiers)} tiers, plans otherwise: no clock, no "
                "chance, no id()"
            )

        check()

    def test_two_policies_that_are_told_the_same_plan_the_same(self, make_policy: Callable[[], PrefetchPolicy]) -> None:
        plans = [_fetched(make_policy()) for _ in range(2)]
        wrong = next((at for at, pair in enumerate(zip(*plans, strict=True)) if pair[0] != pair[1]), None)
        assert wrong is None, f"two policies got the same calls, and plan {wrong} differs: no clock, no chance, no id()"

    def test_it_plans_the_same_in_every_process(self, make_policy: Callable[[], PrefetchPolicy]) -> None:
        """Python's `hash` of bytes differs from process to process."""
        plans = [_fetched(make_policy(), salted(salt)) for salt in range(3)]
        same = plans[0] == plans[1] == plans[2]
        assert same, "with the same calls, and other hashes of the same keys, it plans otherwise: it goes by hash(key)"

    def test_it_asks_no_clock_and_nobody_else(self, make_policy: Callable[[], PrefetchPolicy]) -> None:
        """Pure: no I/O, no clock, no lock, no unseeded chance."""
        _fetched(make_policy())  # so that late imports are done
        policy = make_policy()
        impure = impure_calls(lambda: _fetched(policy))
        assert not impure, f"while it made some plans, it asked for {' and '.join(impure)}"

    def test_a_plan_stays_as_it_was_made(self, make_policy: Callable[[], PrefetchPolicy]) -> None:
        """It is carried out after later plans have been made."""
        policy = make_policy()
        keys = [material.key(number) for number in range(4)]
        first = policy.plan(keys, {"ssd": [True] * 4}, TIERS)
        before = _plain(first)
        policy.plan(keys[:2], {"cold": [True] * 2}, TIERS)
        assert _plain(first) == before, "another plan was made, and the former one changed: each is its own"

    def test_what_stays_is_said_for_each_key(self, make_policy: Callable[[], PrefetchPolicy]) -> None:
        for count in (0, 1, 5):
            keys = [material.key(number) for number in range(count)]
            for room in (0, 2, 1000):
                stays = list(make_policy().retains(keys, room))
                assert len(stays) == count, f"asked what stays of {count} keys, it gave {len(stays)} answers"
                odd = [stay for stay in stays if not isinstance(stay, bool)]
                question = f"asked what stays of {count} keys with room for {room}"
                assert not odd, f"{question}, it said {odd[0]!r:.60}: True or False for each" if odd else ""
                other = sum(one != two for one, two in zip(stays, make_policy().retains(keys, room), strict=False))
                assert not other, f"{question}, a fresh policy says otherwise for {other} of them: no clock, no chance"

    def _check(
        self, plan: PrefetchPlan, keys: Sequence[bytes], found: Mapping[str, Sequence[bool]], tiers: Sequence[TierView]
    ) -> None:
        assert isinstance(plan, PrefetchPlan), f"a plan is a {type(plan).__name__}, and has to be a PrefetchPlan"
        assert isinstance(plan.retain, bool), f"retain is {plan.retain!r}: True or False"
        kind = type(plan.sources).__name__
        assert isinstance(plan.sources, Sequence), f"sources are a {kind}: a list or a tuple, one for each key"
        count = len(plan.sources)
        assert count == len(keys), f"asked about {len(keys)} keys, it names {count} sources: one each, or None"
        for position, source in enumerate(plan.sources):
            if source is not None:
                assert source in {tier.name for tier in tiers}, f"tier {source!r} does not exist"
                assert found.get(source, ())[position : position + 1] == [True], f"{source!r} has no key {position}"
            elif not self.declines:
                having = [tier.name for tier in tiers if tier.healthy and any(found.get(tier.name, ())[position:][:1])]
                assert not having, f"key {position} is not loaded, and {having} have it (declines = True allows it)"


def _stored(policy: StorePolicy, spell: Spell = bytes) -> list[object]:
    """Several plans."""
    batches = [candidates(8, spell=spell), candidates(8, first=4, spell=spell)]
    batches += [candidates(8, 1 << 20, first=6, spell=spell)]
    batches += [candidates(6, reused=True, spell=spell)] if policy.wants_reuse else []
    return [_plain(policy.plan(batch, TIERS)) for batch in batches]


def _fetched(policy: PrefetchPolicy, spell: Spell = bytes) -> list[object]:
    """Several plans, and which keys stay."""
    plans: list[object] = []
    for count in (1, 3, 4, 1):
        keys = [spell(material.key(number)) for number in range(count)]
        plans.append(_plain(policy.plan(keys, {tier.name: [True] * count for tier in TIERS}, TIERS)))
        plans.append(list(policy.retains(keys, 2)))
    return plans


def _plain(plan: StorePlan | PrefetchPlan) -> object:
    """A plan by its values, whatever sequence types it uses."""
    if isinstance(plan, StorePlan):
        return {name: list(positions) for name, positions in plan.targets.items()}, list(plan.drop)
    return list(plan.sources), plan.retain
