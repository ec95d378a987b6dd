"""Policies with one realistic fault each, and the contract test that has to notice it (`caught_by`)."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import pytest

from lmcache_core.policies import (
    Entry,
    EvictionPolicy,
    PrefetchPlan,
    PrefetchPolicy,
    StoreCandidate,
    StorePlan,
    StorePolicy,
    TierView,
)
from lmcache_core.policies.lru import LruEviction
from lmcache_core.testing import EvictionPolicyContract, PrefetchPolicyContract, StorePolicyContract


class Fifo(EvictionPolicy):
    """Correct, and slow: a dictionary in the order of insertion. The faults below are changes to it."""

    def __init__(self) -> None:
        self.entries: dict[Any, None] = {}

    def insert(self, entries: Sequence[Entry]) -> None:
        self.entries.update(dict.fromkeys(entries))

    def access(self, entries: Sequence[Entry]) -> None: ...

    def remove(self, entries: Sequence[Entry]) -> None:
        for entry in entries:
            self.entries.pop(entry, None)

    def victims(self, nbytes: int) -> list[Entry]:
        found: list[Entry] = []
        for entry in self.entries:
            if nbytes <= 0:
                break
            if not entry.holds:
                found.append(entry)
                nbytes -= entry.nbytes
        return found


class Wrong(EvictionPolicyContract):
    caught_by: ClassVar[str]
    faulty: ClassVar[type[EvictionPolicy]]

    @pytest.fixture
    def make_policy(self) -> Callable[[], EvictionPolicy]:
        return self.faulty


class TestEvictsHeld(Wrong):
    caught_by = "test_an_entry_with_holds_is_never_a_victim"

    class faulty(Fifo):
        def victims(self, nbytes: int) -> list[Entry]:
            return list(self.entries) if nbytes > 0 else []


class TestCountsEntriesForBytes(Wrong):
    caught_by = "test_victims_cover_the_bytes_asked_for_and_little_more"

    class faulty(Fifo):
        def victims(self, nbytes: int) -> list[Entry]:
            return super().victims(10**9)[: max(0, nbytes)]


class TestStopsOneShort(Wrong):
    caught_by = "test_victims_cover_the_bytes_asked_for_and_little_more"

    class faulty(Fifo):
        def victims(self, nbytes: int) -> list[Entry]:
            named = super().victims(nbytes)
            return named[:-1] if len(named) > 1 else named


class TestDrawsLots(Wrong):
    caught_by = "test_two_policies_with_one_history_name_the_same"

    class faulty(Fifo):
        def victims(self, nbytes: int) -> list[Entry]:
            named = super().victims(nbytes)
            random.shuffle(named)
            return named


class TestOrdersByASet(Wrong):
    caught_by = "test_two_policies_with_one_history_name_the_same"

    class faulty(Fifo):
        def victims(self, nbytes: int) -> list[Entry]:
            return list(dict.fromkeys(sorted(super().victims(nbytes), key=id)))


class TestForgetsReleased(Wrong):
    caught_by = "test_what_was_released_is_a_victim_again"

    class faulty(Fifo):
        def held(self, entries: Sequence[Entry]) -> None:
            self.remove(entries)


class TestForgetsToForget(Wrong):
    caught_by = "test_an_entry_that_is_removed_while_held_never_comes_back"

    class faulty(Fifo):
        def remove(self, entries: Sequence[Entry]) -> None:
            super().remove([entry for entry in entries if not entry.holds])


class TestEvictsByNaming(Wrong):
    caught_by = "test_victims_are_only_named"

    class faulty(Fifo):
        def victims(self, nbytes: int) -> list[Entry]:
            named = super().victims(nbytes)
            self.remove(named)
            return named


class TestReversesBatches(Wrong):
    caught_by = "test_a_batch_is_the_same_as_its_entries_one_by_one"

    class faulty(LruEviction):
        def access(self, entries: Sequence[Entry]) -> None:
            super().access(entries[::-1])


class TestWalksAllThatIsResident(Wrong):
    caught_by = "test_an_eviction_costs_the_same_whatever_is_resident"

    class faulty(Fifo):
        def victims(self, nbytes: int) -> list[Entry]:
            total = sum(entry.nbytes for entry in self.entries)
            return super().victims(min(nbytes, total))


class TestWalksPastHeldEntries(Wrong):
    caught_by = "test_held_entries_are_not_walked_past_again_and_again"
    faulty = Fifo


class TestRemembersEntries(Wrong):
    caught_by = "test_what_is_gone_is_forgotten"

    class faulty(LruEviction):
        def __init__(self) -> None:
            super().__init__()
            self.ghosts: list[Entry] = []

        def remove(self, entries: Sequence[Entry]) -> None:
            super().remove(entries)
            self.ghosts += entries


class TestCountsItsOwnHolds(Wrong):
    caught_by = "test_what_is_read_only_stays_as_it_is"

    class faulty(LruEviction):
        def held(self, entries: Sequence[Entry]) -> None:
            super().held(entries)
            for entry in entries:
                entry.holds += 1  # type: ignore[misc]


class TestLosesOneInAThousand(Wrong):
    caught_by = "test_everyone_is_named_once_until_nobody_is_left"

    class faulty(Fifo):
        def access(self, entries: Sequence[Entry]) -> None:
            for entry in entries[10:11]:
                self.entries.pop(entry, None)


# --- store and prefetch -----------------------------------------------------------------------------------------
class WrongStore(StorePolicyContract):
    caught_by: ClassVar[str]
    faulty: ClassVar[type[StorePolicy]]

    @pytest.fixture
    def make_policy(self) -> Callable[[], StorePolicy]:
        return self.faulty


class TestDropsWhatNoTierGets(WrongStore):
    caught_by = "test_without_tiers_nothing_is_sent_and_nothing_lost"

    class faulty(StorePolicy):
        def plan(self, batch: Sequence[StoreCandidate], tiers: Sequence[TierView]) -> StorePlan:
            return StorePlan({tier.name: range(len(batch)) for tier in tiers}, range(len(batch)))


class TestSendsToATierThatIsNotThere(WrongStore):
    caught_by = "test_without_tiers_nothing_is_sent_and_nothing_lost"

    class faulty(StorePolicy):
        def plan(self, batch: Sequence[StoreCandidate], tiers: Sequence[TierView]) -> StorePlan:
            return StorePlan({"ssd": range(len(batch))})


class TestCountsFromOne(WrongStore):
    caught_by = "test_any_plan_names_what_exists"

    class faulty(StorePolicy):
        def plan(self, batch: Sequence[StoreCandidate], tiers: Sequence[TierView]) -> StorePlan:
            return StorePlan({tier.name: range(1, len(batch) + 1) for tier in tiers})


class TestSortsWhatItIsShown(WrongStore):
    caught_by = "test_any_plan_names_what_exists"

    class faulty(StorePolicy):
        def plan(self, batch: Any, tiers: Sequence[TierView]) -> StorePlan:
            batch.sort(key=lambda candidate: candidate.nbytes)
            return StorePlan({tier.name: range(len(batch)) for tier in tiers})


class TestTossesACoin(WrongStore):
    caught_by = "test_two_policies_with_one_history_plan_the_same"

    class faulty(StorePolicy):
        def plan(self, batch: Sequence[StoreCandidate], tiers: Sequence[TierView]) -> StorePlan:
            return StorePlan({tier.name: [n for n in range(len(batch)) if random.random() < 0.5] for tier in tiers})


class WrongPrefetch(PrefetchPolicyContract):
    caught_by: ClassVar[str]
    faulty: ClassVar[type[PrefetchPolicy]]

    @pytest.fixture
    def make_policy(self) -> Callable[[], PrefetchPolicy]:
        return self.faulty


class TestTakesTheFirstTierBlindly(WrongPrefetch):
    caught_by = "test_each_key_comes_from_a_tier_that_has_it"

    class faulty(PrefetchPolicy):
        def plan(
            self, keys: Sequence[bytes], found: Mapping[str, Sequence[bool]], tiers: Sequence[TierView]
        ) -> PrefetchPlan:
            return PrefetchPlan([tiers[0].name if tiers else None] * len(keys))


class TestExpectsEveryTierToAnswer(WrongPrefetch):
    caught_by = "test_a_key_that_nobody_has_comes_from_nowhere"

    class faulty(PrefetchPolicy):
        def plan(
            self, keys: Sequence[bytes], found: Mapping[str, Sequence[bool]], tiers: Sequence[TierView]
        ) -> PrefetchPlan:
            return PrefetchPlan([next((t.name for t in tiers if found[t.name][n]), None) for n in range(len(keys))])


class TestLeavesOutTheMisses(WrongPrefetch):
    caught_by = "test_each_key_comes_from_a_tier_that_has_it"

    class faulty(PrefetchPolicy):
        def plan(
            self, keys: Sequence[bytes], found: Mapping[str, Sequence[bool]], tiers: Sequence[TierView]
        ) -> PrefetchPlan:
            sources = [next((t.name for t in tiers if found.get(t.name, [])[n : n + 1] == [True]), None)
                       for n in range(len(keys))]  # fmt: skip
            return PrefetchPlan([source for source in sources if source is not None])
