"""Policies with one realistic fault each, and the contract test that has to notice it (`caught_by`)."""

from __future__ import annotations

import os
import random
import threading
import time
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
from lmcache_testing import EvictionPolicyContract, PrefetchPolicyContract, StorePolicyContract


class Fifo(EvictionPolicy):
    """Correct, and slow: a dictionary in the order of insertion. The faults below are changes to it."""

    def __init__(self) -> None:
        self.entries: dict[Entry, None] = {}

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


# --- store and prefetch ---------------------------------------------------------------------------------------------
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


# --- eviction, what else it promises --------------------------------------------------------------------------------
class TestNamesHeldOnesForHeadroom(Wrong):
    caught_by = "test_a_surplus_is_of_victims_and_nothing_held_is_in_it"

    class faulty(Fifo):
        def surplus(self, nbytes: int) -> list[Entry]:
            return list(self.entries)


class TestSparesItsOwn(Wrong):
    caught_by = "test_it_says_what_must_stay_for_whom"

    class faulty(Fifo):
        def spares(self, entries: Sequence[Entry], namespace: int) -> bool:
            return bool(entries)


class TestKeepsCharges(Wrong):
    caught_by = "test_charges_come_and_go_and_leave_nothing_behind"

    class faulty(Fifo):
        charged = 0

        def charge(self, namespace: int, nbytes: int) -> None:
            self.charged += abs(nbytes)

        def victims(self, nbytes: int) -> list[Entry]:
            return super().victims(nbytes + self.charged if nbytes > 0 else 0)


class TestForgetsAllWhenItsCapacityChanges(Wrong):
    caught_by = "test_another_capacity_is_taken_at_any_time"

    class faulty(Fifo):
        def resize(self, capacity_bytes: int) -> None:
            self.entries.clear()


class TestNamesSomebodyForNothing(Wrong):
    caught_by = "test_all_there_are_is_the_answer_to_more_than_there_are"

    class faulty(Fifo):
        def victims(self, nbytes: int) -> list[Entry]:
            return super().victims(max(1, nbytes))


class TestEvictsAlthoughItPromisedNot(Wrong):
    caught_by = "test_who_never_evicts_names_nobody"
    never_evicts = True
    faulty = Fifo


class TestSharesItsListWithEveryOther(Wrong):
    caught_by = "test_two_policies_with_one_history_name_the_same"

    class faulty(Fifo):
        everybodys: ClassVar[dict[Entry, None]] = {}

        def __init__(self) -> None:
            self.entries = self.everybodys


class TestIsAlwaysTheSameOne(Wrong):
    caught_by = "test_it_is_an_eviction_policy_that_starts_empty"
    only = Fifo()

    @pytest.fixture
    def make_policy(self) -> Callable[[], EvictionPolicy]:
        return lambda: self.only


class TestGoesByKeyAlone(Wrong):
    caught_by = "test_one_key_in_two_namespaces_is_two_entries"

    class faulty(Fifo):
        def __init__(self) -> None:
            self.by_key: dict[bytes, Entry] = {}

        @property
        def entries(self) -> dict[Entry, None]:  # type: ignore[override]
            return dict.fromkeys(self.by_key.values())

        def insert(self, entries: Sequence[Entry]) -> None:
            self.by_key.update({entry.key: entry for entry in entries})

        def remove(self, entries: Sequence[Entry]) -> None:
            for entry in entries:
                self.by_key.pop(entry.key, None)


class TestTakesHoldsForAReason(Wrong):
    caught_by = "test_an_entry_that_comes_with_holds_is_no_victim_until_it_is_released"

    class faulty(Fifo):
        def insert(self, entries: Sequence[Entry]) -> None:
            super().insert([entry for entry in entries if not entry.holds])  # "it will be inserted when it is free"


class TestNamesTheFirstTwice(Wrong):
    caught_by = "test_victims_cover_the_bytes_asked_for_and_little_more"

    class faulty(Fifo):
        def victims(self, nbytes: int) -> list[Entry]:
            named = super().victims(nbytes)
            return [*named[:1], *named]


# --- store, what else it promises -----------------------------------------------------------------------------------
class TestLooksAtTheFirstOfNone(WrongStore):
    caught_by = "test_an_empty_batch_is_an_empty_plan"

    class faulty(StorePolicy):
        def plan(self, batch: Sequence[StoreCandidate], tiers: Sequence[TierView]) -> StorePlan:
            largest = max(candidate.nbytes for candidate in batch)
            return StorePlan({tier.name: range(len(batch)) for tier in tiers if largest})


class TestNeedsAHealthyTier(WrongStore):
    caught_by = "test_tiers_that_are_down_are_no_surprise"

    class faulty(StorePolicy):
        def plan(self, batch: Sequence[StoreCandidate], tiers: Sequence[TierView]) -> StorePlan:
            if not batch or not tiers:
                return StorePlan({})
            return StorePlan({next(tier.name for tier in tiers if tier.healthy): range(len(batch))})


class TestNamesAPositionTwice(WrongStore):
    caught_by = "test_any_plan_names_what_exists"

    class faulty(StorePolicy):
        def plan(self, batch: Sequence[StoreCandidate], tiers: Sequence[TierView]) -> StorePlan:
            return StorePlan({tier.name: [*range(len(batch)), *range(len(batch))] for tier in tiers})


class TestRemembersForEveryPolicy(WrongStore):
    caught_by = "test_two_policies_with_one_history_plan_the_same"
    seen: ClassVar[set[bytes]] = set()

    class faulty(StorePolicy):
        def plan(self, batch: Sequence[StoreCandidate], tiers: Sequence[TierView]) -> StorePlan:
            seen = TestRemembersForEveryPolicy.seen
            fresh = [n for n, candidate in enumerate(batch) if candidate.key not in seen]
            seen.update(candidate.key for candidate in batch)
            return StorePlan({tier.name: fresh for tier in tiers})


class TestPlansPairs(WrongStore):
    caught_by = "test_without_tiers_nothing_is_sent_and_nothing_lost"

    class faulty(StorePolicy):
        def plan(self, batch: Sequence[StoreCandidate], tiers: Sequence[TierView]) -> StorePlan:
            return {tier.name: range(len(batch)) for tier in tiers}, ()


class TestDropsWhatItKeepsFromASlowTier(WrongStore):
    caught_by = "test_tiers_that_are_down_are_no_surprise"

    class faulty(StorePolicy):
        def plan(self, batch: Sequence[StoreCandidate], tiers: Sequence[TierView]) -> StorePlan:
            return StorePlan({t.name: range(len(batch)) for t in tiers if t.healthy}, range(len(batch)))


class TestWantsReuseInWords(WrongStore):
    caught_by = "test_it_is_a_store_policy"

    class faulty(StorePolicy):
        wants_reuse: Any = "second use"

        def plan(self, batch: Sequence[StoreCandidate], tiers: Sequence[TierView]) -> StorePlan:
            return StorePlan({})


# --- prefetch, what else it promises --------------------------------------------------------------------------------
class First(PrefetchPolicy):
    """Correct: the first tier that has it."""

    def plan(
        self, keys: Sequence[bytes], found: Mapping[str, Sequence[bool]], tiers: Sequence[TierView]
    ) -> PrefetchPlan:
        return PrefetchPlan([self.source(n, found, tiers) for n in range(len(keys))])

    def source(self, n: int, found: Mapping[str, Sequence[bool]], tiers: Sequence[TierView]) -> str | None:
        return next((tier.name for tier in tiers if found.get(tier.name) and found[tier.name][n]), None)


class TestStopsAtTheFirstMiss(WrongPrefetch):
    caught_by = "test_each_key_comes_from_a_tier_that_has_it"

    class faulty(First):
        def plan(
            self, keys: Sequence[bytes], found: Mapping[str, Sequence[bool]], tiers: Sequence[TierView]
        ) -> PrefetchPlan:
            sources = list(super().plan(keys, found, tiers).sources)
            return PrefetchPlan(sources[: sources.index(None)] if None in sources else sources)


class TestNeedsAKey(WrongPrefetch):
    caught_by = "test_no_keys_are_no_sources"

    class faulty(First):
        def plan(
            self, keys: Sequence[bytes], found: Mapping[str, Sequence[bool]], tiers: Sequence[TierView]
        ) -> PrefetchPlan:
            first = self.source(0, found, tiers) if keys[0] else None
            return PrefetchPlan([first, *(self.source(n, found, tiers) for n in range(1, len(keys)))])


class TestTakesTurns(WrongPrefetch):
    caught_by = "test_two_policies_that_are_told_the_same_plan_the_same"
    turn: ClassVar[list[int]] = [0]

    class faulty(First):
        def source(self, n: int, found: Mapping[str, Sequence[bool]], tiers: Sequence[TierView]) -> str | None:
            TestTakesTurns.turn[0] += 1
            having = [tier.name for tier in tiers if found.get(tier.name) and found[tier.name][n]]
            return having[TestTakesTurns.turn[0] % len(having)] if having else None


class TestRetainsByANumber(WrongPrefetch):
    caught_by = "test_each_key_comes_from_a_tier_that_has_it"

    class faulty(First):
        def plan(
            self, keys: Sequence[bytes], found: Mapping[str, Sequence[bool]], tiers: Sequence[TierView]
        ) -> StorePlan:
            return super().plan(keys, found, tiers)._replace(retain=0.5)  # type: ignore[arg-type]


class TestSaysWhatFitsAndNoMore(WrongPrefetch):
    caught_by = "test_what_stays_is_said_for_each_key"

    class faulty(First):
        def retains(self, keys: Sequence[bytes], room: int) -> Sequence[bool]:
            return [True] * min(len(keys), room)


class TestRetainsByChance(WrongPrefetch):
    caught_by = "test_what_stays_is_said_for_each_key"

    class faulty(First):
        def retains(self, keys: Sequence[bytes], room: int) -> Sequence[bool]:
            return [random.random() < 0.5 for _ in keys]


# --- what a policy asks for, and what it keeps ----------------------------------------------------------------------
class TestGoesByTheClock(Wrong):
    caught_by = "test_it_asks_no_clock_and_nobody_else"

    class faulty(Fifo):
        def insert(self, entries: Sequence[Entry]) -> None:
            self.seen_s = {entry: time.monotonic() for entry in entries}
            super().insert(entries)


class TestWritesALine(Wrong):
    caught_by = "test_it_asks_no_clock_and_nobody_else"

    class faulty(Fifo):
        def remove(self, entries: Sequence[Entry]) -> None:
            with open(os.devnull, "a") as file:
                file.write(f"{len(entries)} went\n")
            super().remove(entries)


class TestLocksItself(Wrong):
    caught_by = "test_it_asks_no_clock_and_nobody_else"

    class faulty(Fifo):
        def __init__(self) -> None:
            super().__init__()
            self.lock = threading.Lock()

        def access(self, entries: Sequence[Entry]) -> None:
            with self.lock:
                super().access(entries)


class TestSamplesFiveWithOneSeedForAll(Wrong):
    caught_by = "test_it_asks_no_clock_and_nobody_else"

    class faulty(Fifo):
        def victims(self, nbytes: int) -> list[Entry]:
            random.seed(len(self.entries))  # everybody's generator begins anew
            named = super().victims(nbytes)
            return random.sample(named, len(named))


class TestOrdersByASetOfKeys(Wrong):
    caught_by = "test_it_names_the_same_in_every_process"

    class faulty(Fifo):
        def victims(self, nbytes: int) -> list[Entry]:
            named = {(entry.key, entry.namespace): entry for entry in super().victims(nbytes)}
            return [named[name] for name in set(named)]


class TestCountsAUseTwiceInABatchOnce(Wrong):
    caught_by = "test_a_batch_is_the_same_as_its_entries_one_by_one"

    class faulty(Fifo):
        def __init__(self) -> None:
            super().__init__()
            self.uses: dict[Entry, int] = {}

        def access(self, entries: Sequence[Entry]) -> None:
            for entry in dict.fromkeys(entries):
                self.uses[entry] = self.uses.get(entry, 0) + 1

        def victims(self, nbytes: int) -> list[Entry]:
            return sorted(super().victims(nbytes), key=lambda entry: self.uses.get(entry, 0))


class TestGivesItsOwnList(Wrong):
    caught_by = "test_the_list_of_victims_is_the_callers"

    class faulty(Fifo):
        def __init__(self) -> None:
            super().__init__()
            self.order: list[Entry] = []

        def insert(self, entries: Sequence[Entry]) -> None:
            super().insert(entries)
            self.order += entries

        def remove(self, entries: Sequence[Entry]) -> None:
            super().remove(entries)
            for entry in entries:
                if entry in self.order:
                    self.order.remove(entry)

        def victims(self, nbytes: int) -> list[Entry]:
            named = super().victims(nbytes)
            return self.order if named == self.order else named  # a copy saved


class TestFreesAllForHeadroom(Wrong):
    caught_by = "test_a_surplus_is_of_victims_and_nothing_held_is_in_it"

    class faulty(Fifo):
        def surplus(self, nbytes: int) -> list[Entry]:
            return self.victims(1 << 40)


class TestShrinksByItself(Wrong):
    caught_by = "test_another_capacity_is_taken_at_any_time"

    class faulty(Fifo):
        capacity_bytes = 1 << 60

        def resize(self, capacity_bytes: int) -> None:
            self.capacity_bytes = capacity_bytes

        def victims(self, nbytes: int) -> list[Entry]:
            over = sum(entry.nbytes for entry in self.entries) - self.capacity_bytes
            return super().victims(max(nbytes, over) if nbytes > 0 else 0)


class TestLooksForTheLeastUsed(Wrong):
    caught_by = "test_an_eviction_costs_the_same_whatever_is_resident"

    class faulty(Fifo):
        def __init__(self) -> None:
            super().__init__()
            self.uses: dict[Entry, int] = {}

        def insert(self, entries: Sequence[Entry]) -> None:
            super().insert(entries)
            self.uses.update(dict.fromkeys(entries, 0))

        def remove(self, entries: Sequence[Entry]) -> None:
            super().remove(entries)
            for entry in entries:
                self.uses.pop(entry, None)

        def victims(self, nbytes: int) -> list[Entry]:
            least = min(self.uses, key=self.uses.__getitem__, default=None)
            return [least] if nbytes == 1 and least is not None else super().victims(nbytes)


class TestTakesEachUseOutOfAList(Wrong):
    caught_by = "test_a_use_costs_the_same_whatever_is_resident"

    class faulty(Fifo):
        def __init__(self) -> None:
            super().__init__()
            self.order: list[Entry] = []

        def insert(self, entries: Sequence[Entry]) -> None:
            super().insert(entries)
            self.order += entries

        def remove(self, entries: Sequence[Entry]) -> None:
            super().remove(entries)
            for entry in entries:
                self.order.remove(entry)

        def access(self, entries: Sequence[Entry]) -> None:
            for entry in entries:
                self.order.remove(entry)
                self.order.append(entry)


class TestRemembersEveryKey(Wrong):
    caught_by = "test_what_it_remembers_of_the_gone_is_bounded"

    class faulty(Fifo):
        def __init__(self) -> None:
            super().__init__()
            self.ghosts: set[bytes] = set()

        def remove(self, entries: Sequence[Entry]) -> None:
            super().remove(entries)
            self.ghosts |= {entry.key for entry in entries}


# --- store and prefetch: what a plan is made of ---------------------------------------------------------------------
class TestStoresByTheClock(WrongStore):
    caught_by = "test_it_asks_no_clock_and_nobody_else"

    class faulty(StorePolicy):
        last_s = 0.0

        def plan(self, batch: Sequence[StoreCandidate], tiers: Sequence[TierView]) -> StorePlan:
            self.last_s = time.time()  # so many bytes in a second
            return StorePlan({tier.name: range(len(batch)) for tier in tiers})


class TestLogsItsPlans(WrongStore):
    caught_by = "test_it_asks_no_clock_and_nobody_else"

    class faulty(StorePolicy):
        def plan(self, batch: Sequence[StoreCandidate], tiers: Sequence[TierView]) -> StorePlan:
            print(f"{len(batch)} objects")
            return StorePlan({tier.name: range(len(batch)) for tier in tiers})


class TestSpreadsByTheHashOfAKey(WrongStore):
    caught_by = "test_it_plans_the_same_in_every_process"

    class faulty(StorePolicy):
        def plan(self, batch: Sequence[StoreCandidate], tiers: Sequence[TierView]) -> StorePlan:
            turn = [hash(candidate.key) for candidate in batch]
            return StorePlan(
                {t.name: [n for n in range(len(batch)) if turn[n] % len(tiers) == at] for at, t in enumerate(tiers)}
            )


class TestPlansOnceToRead(WrongStore):
    caught_by = "test_tiers_that_are_down_are_no_surprise"

    class faulty(StorePolicy):
        def plan(self, batch: Sequence[StoreCandidate], tiers: Sequence[TierView]) -> StorePlan:
            return StorePlan({tier.name: (n for n in range(len(batch))) for tier in tiers})  # type: ignore[misc]


class TestNamesKeysForPositions(WrongStore):
    caught_by = "test_tiers_that_are_down_are_no_surprise"

    class faulty(StorePolicy):
        def plan(self, batch: Sequence[StoreCandidate], tiers: Sequence[TierView]) -> StorePlan:
            return StorePlan({tier.name: [candidate.key for candidate in batch] for tier in tiers})  # type: ignore[misc]


class TestUsesOnePlanAgain(WrongStore):
    caught_by = "test_a_plan_stays_as_it_was_made"

    class faulty(StorePolicy):
        def __init__(self) -> None:
            self.targets: dict[str, Sequence[int]] = {}

        def plan(self, batch: Sequence[StoreCandidate], tiers: Sequence[TierView]) -> StorePlan:
            self.targets.clear()
            self.targets.update({tier.name: range(len(batch)) for tier in tiers})
            return StorePlan(self.targets)


class TestLoadsByTheClock(WrongPrefetch):
    caught_by = "test_it_asks_no_clock_and_nobody_else"

    class faulty(First):
        def source(self, n: int, found: Mapping[str, Sequence[bool]], tiers: Sequence[TierView]) -> str | None:
            self.at_s = time.perf_counter()  # who was quick the last time
            return super().source(n, found, tiers)


class TestTossesACoinForEachKey(WrongPrefetch):
    caught_by = "test_it_asks_no_clock_and_nobody_else"

    class faulty(First):
        def source(self, n: int, found: Mapping[str, Sequence[bool]], tiers: Sequence[TierView]) -> str | None:
            random.seed(n)
            having = [tier.name for tier in tiers if found.get(tier.name) and found[tier.name][n]]
            return random.choice(having) if having else None


class TestLoadsByTheHashOfAKey(WrongPrefetch):
    caught_by = "test_it_plans_the_same_in_every_process"

    class faulty(First):
        def plan(
            self, keys: Sequence[bytes], found: Mapping[str, Sequence[bool]], tiers: Sequence[TierView]
        ) -> PrefetchPlan:
            return PrefetchPlan(
                [self.source(n, found, tiers[:: 1 - 2 * (hash(key) % 2)]) for n, key in enumerate(keys)]
            )


class TestNamesSourcesOnceToRead(WrongPrefetch):
    caught_by = "test_each_key_comes_from_a_tier_that_has_it"

    class faulty(First):
        def plan(
            self, keys: Sequence[bytes], found: Mapping[str, Sequence[bool]], tiers: Sequence[TierView]
        ) -> StorePlan:
            return PrefetchPlan(self.source(n, found, tiers) for n in range(len(keys)))  # type: ignore[arg-type]


class TestUsesOneListAgain(WrongPrefetch):
    caught_by = "test_a_plan_stays_as_it_was_made"

    class faulty(First):
        def __init__(self) -> None:
            self.sources: list[str | None] = []

        def plan(
            self, keys: Sequence[bytes], found: Mapping[str, Sequence[bool]], tiers: Sequence[TierView]
        ) -> PrefetchPlan:
            self.sources[:] = super().plan(keys, found, tiers).sources
            return PrefetchPlan(self.sources)


class TestStaysByTheHashOfAKey(WrongPrefetch):
    caught_by = "test_it_plans_the_same_in_every_process"

    class faulty(First):
        def retains(self, keys: Sequence[bytes], room: int) -> Sequence[bool]:
            return [hash(key) % 2 == 0 for key in keys]
