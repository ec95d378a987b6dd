"""The contract of an eviction policy, as tests.

class TestAcmePolicy(EvictionPolicyContract):
    @pytest.fixture
    def make_policy(self):
        return lambda: AcmePolicy(AcmeSettings())
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar

import pytest

from lmcache_core.kernel.contracts import EvictionPolicy
from lmcache_testing.contract import Contract, not_claimed, raised
from lmcache_testing.eviction_machine import Resident, run_machine
from lmcache_testing.purity import impure_calls, kept_bytes, salted
from lmcache_testing.speeds import Kit

Make = Callable[[], EvictionPolicy]
ALL = 1 << 40  # more bytes than any store of these tests holds


def residents(
    number: int, nbytes: int = 1, *, first: int = 0, spell: Callable[[bytes], bytes] = bytes
) -> list[Resident]:
    """Entries of three namespaces, with distinct keys."""
    numbers = range(first, first + number)
    return [Resident(spell(i.to_bytes(32, "big")), nbytes, namespace=1 + i % 3) for i in numbers]


def keys(entries: Sequence[Resident]) -> list[bytes]:
    return [entry.key for entry in entries]


class EvictionPolicyContract(Contract):
    """What the kernel and the tiers rely on. `make_policy` gives a new policy, always with the same settings."""

    never_evicts: ClassVar[bool] = False  # True: `victims` is promised to be always empty
    excess_entries_max: ClassVar[int] = 1  # victims may exceed the request by less than this many entries
    capacity_bytes: ClassVar[int] = 1000  # what the owner says in `resize`
    remembers_keys_max: ClassVar[int] = 5000  # of evicted objects, with that capacity

    @pytest.fixture
    def make_policy(self) -> Make:
        pytest.fail(f"{type(self).__name__} has no fixture 'make_policy': return a callable that makes a policy")

    @pytest.fixture
    def make(self, make_policy: Make) -> Make:
        def made() -> EvictionPolicy:
            policy = make_policy()
            policy.resize(self.capacity_bytes)
            return policy

        return made

    @pytest.fixture
    def policy(self, make: Make) -> EvictionPolicy:
        return make()

    def _needs_victims(self) -> None:
        if self.never_evicts:
            not_claimed("that it evicts: never_evicts is promised")

    def test_it_is_an_eviction_policy_that_starts_empty(self, make: Make) -> None:
        policy = make()
        assert isinstance(policy, EvictionPolicy), f"a {type(policy).__name__} is no EvictionPolicy"
        assert make() is not policy, "make_policy gave the same policy twice"
        _expect_named(policy, 1, [], "nobody was inserted")
        for method in (policy.insert, policy.access, policy.remove, policy.held, policy.released):
            method([])
        _expect_named(policy, ALL, [], "given empty batches")

    def test_who_never_evicts_names_nobody(self, policy: EvictionPolicy) -> None:
        if not self.never_evicts:
            not_claimed("never_evicts")
        policy.insert(residents(50))
        for nbytes in (1, ALL):
            _expect_named(policy, nbytes, [], "fifty are resident, and never_evicts is promised")

    @pytest.mark.parametrize("nbytes", [1, 2, 9, 10, 55, 100, 549, 550])
    def test_victims_cover_the_bytes_asked_for_and_little_more(self, policy: EvictionPolicy, nbytes: int) -> None:
        self._needs_victims()
        entries = [Resident(bytes([i]) * 32, 1 + i % 10, namespace=i % 3) for i in range(100)]
        policy.insert(entries)
        policy.access(entries[::3])
        named = policy.victims(nbytes)
        covered = sum(entry.nbytes for entry in named)
        message = (
            f"a hundred entries of 1 to 10 bytes are resident: asked for {nbytes} bytes, it named {len(named)} entries"
        )
        assert covered >= nbytes, f"{message} of {covered} bytes together, and has to cover what is asked for"
        most = nbytes + 10 * self.excess_entries_max
        assert covered < most, f"{message} of {covered} bytes together: {most} are too many (excess_entries_max)"
        assert len(set(named)) == len(named), f"{message}, and some of them twice"
        strangers = len(set(named) - set(entries))
        assert not strangers, f"{message}, and {strangers} of them were never inserted"

    def test_all_there_are_is_the_answer_to_more_than_there_are(self, policy: EvictionPolicy) -> None:
        self._needs_victims()
        entries = residents(20, 5)
        policy.insert(entries)
        _expect_named(policy, ALL, entries, "twenty are resident")
        for nbytes in (0, -5):
            _expect_named(policy, nbytes, [], "twenty are resident")

    def test_victims_are_only_named(self, policy: EvictionPolicy) -> None:
        self._needs_victims()
        entries = residents(30, 3)
        policy.insert(entries)
        policy.access(entries[5:20:2])
        first = policy.victims(20)
        _expect_same(first, policy.victims(20), "asked for victims twice, and none was removed in between")
        _expect_named(policy, ALL, entries, "asked for some victims before")
        _expect_same(first, policy.victims(20), "asked for victims, then for all there are, and then again")

    def test_everyone_is_named_once_until_nobody_is_left(self, policy: EvictionPolicy) -> None:
        self._needs_victims()
        entries = residents(60, 4)
        policy.insert(entries)
        policy.access(entries[::2])
        gone: list[Resident] = []
        while named := policy.victims(6):
            covered, wanted = sum(entry.nbytes for entry in named), min(6, 4 * (60 - len(gone)))
            assert covered >= wanted, f"{len(gone)} of 60 are gone: asked for {wanted} bytes, it named {covered}"
            policy.remove(named)
            gone += named  # type: ignore[arg-type]  # its entries are ours
        twice = len(gone) - len(set(gone))
        assert not twice, f"sixty were evicted one by one, and {twice} were named twice"
        left = len(set(entries) - set(gone))
        assert not left, f"it names nobody any more, and {left} of 60 are still resident"

    # --- holds ----------------------------------------------------------------------------------------------
    def test_an_entry_with_holds_is_never_a_victim(self, policy: EvictionPolicy) -> None:
        self._needs_victims()
        entries = residents(40, 2)
        policy.insert(entries)
        held = entries[::3]
        _hold(policy, held)
        policy.access(held[::2])
        _expect_named(policy, ALL, [entry for entry in entries if entry not in held], "a third of forty is held")
        _hold(policy, [entry for entry in entries if not entry.holds])
        _expect_named(policy, 1, [], "all are held")

    def test_an_entry_that_comes_with_holds_is_no_victim_until_it_is_released(self, policy: EvictionPolicy) -> None:
        self._needs_victims()
        held, free = residents(2)
        held.hold(1)  # a load whose reader is already waiting
        policy.insert([held, free])
        policy.held([held])
        _expect_named(policy, ALL, [free], "one came with holds, and one without")
        _release(policy, [held])
        _expect_named(policy, ALL, [held, free], "the one that came with holds is released")

    def test_what_was_released_is_a_victim_again(self, policy: EvictionPolicy) -> None:
        self._needs_victims()
        entries = residents(40, 2)
        policy.insert(entries)
        for step in (2, 3, 5):
            _hold(policy, entries[::step])
            policy.victims(ALL)
            _release(policy, entries[::step])
            _expect_named(policy, ALL, entries, f"each {step}th of forty was held and released")

    def test_an_entry_that_is_removed_while_held_never_comes_back(self, policy: EvictionPolicy) -> None:
        self._needs_victims()
        entries = residents(20)
        policy.insert(entries)
        _hold(policy, entries[:10])
        policy.victims(ALL)
        policy.remove(entries[:10])
        _expect_named(policy, ALL, entries[10:], "ten of twenty were removed while they were held")
        for entry in entries[:10]:
            entry.hold(0)  # its last reader is done; the policy does not hear of entries that were removed
        _expect_named(policy, ALL, entries[10:], "the last readers of those that were removed are done")
        policy.remove(entries[10:])
        _expect_named(policy, ALL, [], "all were removed")

    # --- order ----------------------------------------------------------------------------------------------
    def test_two_policies_with_one_history_name_the_same(self, make: Make) -> None:
        histories = [_history(make()) for _ in range(2)]
        at = next((at for at, pair in enumerate(zip(*histories, strict=False)) if pair[0] != pair[1]), None)
        assert histories[0] == histories[1], (
            f"two policies got the same calls, and the victim at place {at if at is not None else 'the end'} of "
            f"{len(histories[0])} differs: a clock, chance without a seed, or the order of a set"
        )

    def test_it_names_the_same_in_every_process(self, make: Make) -> None:
        """Python's `hash` of bytes differs from process to process, and with it the order of a set of keys."""
        histories = [_history(make(), salted(salt)) for salt in range(3)]
        same = histories[0] == histories[1] == histories[2]
        assert same, (
            "with the same calls, and other hashes of the same keys, it names others: it goes by hash(key), or a set"
        )

    def test_it_asks_no_clock_and_nobody_else(self, make: Make) -> None:
        """Pure: no I/O, no clock, no lock, no unseeded chance. A replay gives the same result."""
        _history(make())  # so that late imports are done
        policy = make()
        impure = impure_calls(lambda: _history(policy))
        assert not impure, f"while it ordered some two hundred entries, it asked for {' and '.join(impure)}"

    def test_one_key_in_two_namespaces_is_two_entries(self, policy: EvictionPolicy) -> None:
        self._needs_victims()
        key = bytes(32)
        one, other = Resident(key, 5, namespace=1), Resident(key, 5, namespace=2)
        policy.insert([one, other])
        policy.access([one])
        _expect_named(policy, ALL, [one, other], "one key is resident in two namespaces")
        policy.remove([other])
        _expect_named(policy, ALL, [one], "the key was removed in one of two namespaces")

    def test_a_batch_is_the_same_as_its_entries_one_by_one(self, make: Make) -> None:
        orders = []
        for step in (1, 7, 100):
            policy, entries = make(), residents(100, 2)
            for method, subject in (
                (policy.insert, entries),
                (policy.access, entries[::3] + entries[::6]),  # some appear twice
                (policy.remove, entries[::4]),
                (policy.access, entries[1::4]),
            ):
                for start in range(0, len(subject), step):
                    method(subject[start : start + step])
            orders.append(keys(policy.victims(ALL)))  # type: ignore[arg-type]
        same = orders[0] == orders[1] == orders[2]
        assert same, "given one by one, seven by seven and all at once, it names victims in three orders"

    def test_any_history_keeps_the_promises(self, make: Make, kit: Kit) -> None:
        run_machine(make, never_evicts=self.never_evicts, shortest=not kit.quick)

    # --- cost -----------------------------------------------------------------------------------------------
    def test_an_eviction_costs_the_same_whatever_is_resident(self, make: Make) -> None:
        self._needs_victims()
        looks = {}
        for number in (500, 4000):
            policy, entries = make(), residents(number)
            policy.resize(number)
            policy.insert(entries)
            policy.access(entries[::2])
            Resident.looks = 0
            for _ in range(100):
                policy.remove(policy.victims(1))
            looks[number] = Resident.looks
        _expect_level(looks, "100 evictions")

    def test_a_use_costs_the_same_whatever_is_resident(self, make: Make) -> None:
        looks = {}
        for number in (500, 4000):
            policy, entries = make(), residents(number)
            policy.resize(number)
            policy.insert(entries)
            policy.victims(1)
            fresh = residents(100, first=10_000)
            Resident.looks = 0
            for used, newcomer in zip(entries, fresh, strict=False):
                policy.access([used])
                policy.insert([newcomer])
                policy.remove([newcomer])
            looks[number] = Resident.looks
        _expect_level(looks, "100 uses, inserts and removes")

    def test_held_entries_are_not_walked_past_again_and_again(self, make: Make) -> None:
        self._needs_victims()
        policy, entries = make(), residents(4000)
        policy.insert(entries)
        _hold(policy, entries[:1950] + entries[2050:])  # held entries block the way, from either end
        policy.victims(ALL)  # it may look at them once
        Resident.looks = 0
        for _ in range(10):
            policy.victims(1)
        assert Resident.looks <= 2000, (
            f"of 4,000 entries 100 are not held: asked ten times for one of them, it looked at entries "
            f"{Resident.looks:,} times (2,000 would pass): what is held is set apart, and not walked past each time"
        )

    def test_what_is_gone_is_forgotten(self, policy: EvictionPolicy) -> None:
        """A policy may remember keys, within bounds, but not entries: those are the kernel's memory."""
        gone = [weakref.ref(entry) for entry in _inserted_used_and_removed(policy)]
        gc.collect()
        kept = sum(reference() is not None for reference in gone)
        assert not kept, f"{len(gone)} entries were inserted and removed, and it still refers to {kept} of them"

    def test_what_it_remembers_of_the_gone_is_bounded(self, make: Make) -> None:
        """By the capacity, or a number: otherwise keys that never return fill the server's memory."""
        policy, most = make(), self.remembers_keys_max

        def turn_over(first: int, last: int) -> None:
            for start in range(first, last, 100):
                entries = residents(100, first=start)
                policy.insert(entries)
                policy.access(entries[::2])
                policy.victims(100)
                policy.remove(entries)

        grown = kept_bytes(lambda: turn_over(0, most), lambda: turn_over(most, 4 * most))
        assert grown < 16 * 3 * most, (
            f"{most:,} objects came and went, and {3 * most:,} more: it keeps {grown:,} bytes more after these than "
            "before, so it forgets none (remembers_keys_max is how many it may remember)"
        )

    def test_the_list_of_victims_is_the_callers(self, policy: EvictionPolicy) -> None:
        self._needs_victims()
        entries = residents(30)
        policy.insert(entries)
        named = policy.victims(ALL)
        before = list(named)
        policy.remove(before[:5])
        assert named == before, "five of its victims were removed, and the list that it had given changed by itself"
        named.clear()
        _expect_named(policy, ALL, before[5:], "five were removed, and the caller emptied the list that it was given")  # type: ignore[arg-type]

    def test_what_is_read_only_stays_as_it_is(self, policy: EvictionPolicy) -> None:
        entries = residents(10, 7)  # their key, namespace, nbytes and holds raise when set
        try:
            policy.insert(entries)
            policy.access(entries)
            _hold(policy, entries[:5])
            policy.victims(ALL)
            _release(policy, entries[:5])
            policy.remove(policy.victims(20))
        except AttributeError as error:
            raise AssertionError(
                "ten entries were inserted, used, held, released and removed, and it set, or asked for, what an entry "
                f"does not give a policy: {raised(error)}"
            ) from error

    def test_charges_come_and_go_and_leave_nothing_behind(self, make: Make) -> None:
        """A write, load or reservation is charged before it becomes an entry, and the charge is then removed."""
        charged, plain = make(), make()
        for policy in (charged, plain):
            policy.insert(residents(50))
        for namespace in range(5):
            charged.charge(namespace, 100)
            charged.charge(namespace, -60)
            charged.charge(namespace, -40)
        for nbytes in (1, 10, 50, ALL):
            named, wanted = charged.victims(nbytes), plain.victims(nbytes)
            same = [entry.key for entry in named] == [entry.key for entry in wanted]
            assert same, f"asked for {nbytes} bytes, it names others after charges that came and went"

    def test_a_surplus_is_of_victims_and_nothing_held_is_in_it(self, policy: EvictionPolicy) -> None:
        entries = residents(50)
        policy.insert(entries)
        _hold(policy, entries[::2])
        named = policy.surplus(5)
        assert len(named) < 5 + self.excess_entries_max, f"asked for a surplus of 5 bytes, it names {len(named)}"
        surplus, victims, free = set(policy.surplus(ALL)), set(policy.victims(ALL)), set(entries[1::2])
        assert surplus <= victims, f"{len(surplus - victims)} of its surplus are no victims"
        assert victims <= free, f"{len(victims - free)} of its victims are held"

    def test_it_says_what_must_stay_for_whom(self, policy: EvictionPolicy) -> None:
        entries = residents(9)
        policy.insert(entries)
        stay = policy.spares([], 1)
        assert stay is False, f"asked whether any of no entries must stay, it said {stay!r}: False"
        stay = policy.spares(entries, 1)
        assert isinstance(stay, bool), f"asked whether any of nine entries must stay, it said {stay!r}: True or False"
        own = [entry for entry in entries if entry.namespace == 1]
        stay = policy.spares(own, 1)
        assert stay is False, (
            f"asked whether any of {len(own)} entries must stay for an object of their namespace, it said {stay!r}: "
            "an object may always take the place of its own namespace's"
        )

    def test_another_capacity_is_taken_at_any_time(self, policy: EvictionPolicy) -> None:
        entries = residents(50, 10)
        policy.insert(entries)
        for capacity in (100, 10_000, 1, 500):
            policy.resize(capacity)
            policy.access(entries[::3])
        if not self.never_evicts:
            _expect_named(policy, ALL, entries, "its capacity changed four times")
            policy.resize(100)
            covered = sum(entry.nbytes for entry in policy.victims(10))
            assert covered < 10 + 10 * self.excess_entries_max, (
                f"its capacity became less than what is resident: asked for 10 bytes, it named {covered}, and the "
                "owner asks for all that it needs"
            )


def _history(policy: EvictionPolicy, spell: Callable[[bytes], bytes] = bytes) -> list[bytes]:
    """A sample workload. Returns the keys of the victims in it."""
    entries = residents(200, 3, spell=spell)
    policy.insert(entries)
    policy.access(entries[::7] + entries[::5])
    named: list[Resident] = []
    for turn in range(20):
        victims = policy.victims(10)
        named += victims  # type: ignore[arg-type]  # its entries are ours
        policy.remove(victims)
        fresh = residents(3, 3, first=1000 + 3 * turn, spell=spell)
        policy.insert(fresh)
        policy.access(fresh[:1])
        _hold(policy, fresh[1:])
        _release(policy, fresh[2:])
    return keys(named) + keys(policy.victims(ALL))  # type: ignore[arg-type]


def _inserted_used_and_removed(policy: EvictionPolicy) -> list[Resident]:
    entries = residents(50)
    policy.insert(entries)
    policy.access(entries[::2])
    _hold(policy, entries[:10])
    policy.victims(20)
    _release(policy, entries[:5])
    policy.remove(entries)
    return entries


def _expect_named(policy: EvictionPolicy, nbytes: int, expected: Sequence[Resident], done: str) -> None:
    """Exactly these, in any order."""
    named = policy.victims(nbytes)
    missing, more = set(expected) - set(named), set(named) - set(expected)
    amount = "all bytes" if nbytes == ALL else f"{nbytes} bytes"
    message = f"{done}: asked for {amount}, it named {len(named)} entries"
    assert not more, f"{message}, and {len(more)} of them may not go"
    assert not missing, f"{message}, and {len(missing)} more may go"
    assert len(named) == len(set(named)), f"{message}, some of them twice"


def _expect_same(first: Sequence[object], again: Sequence[object], done: str) -> None:
    others = sum(one is not other for one, other in zip(first, again, strict=False))
    same = len(first) == len(again) and not others
    assert same, f"{done}: it named {len(first)} entries and then {len(again)}, {others} of them in other places"


def _expect_level(looks: Mapping[int, int], done: str) -> None:
    """`looks`: number of residents → how often entries were looked at."""
    (few, at_few), (many, at_many) = sorted(looks.items())
    assert at_many <= 2 * at_few + 1000, (
        f"{done} took {at_few:,} looks at entries where {few:,} are resident, and {at_many:,} where {many:,} are: the "
        "cost must not grow with what is resident"
    )


def _hold(policy: EvictionPolicy, entries: Sequence[Resident]) -> None:
    for entry in entries:
        entry.hold(1)
    policy.held(entries)


def _release(policy: EvictionPolicy, entries: Sequence[Resident]) -> None:
    for entry in entries:
        entry.hold(0)
    policy.released(entries)
