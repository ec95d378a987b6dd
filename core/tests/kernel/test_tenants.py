"""Tenants of the pool while it runs: objects change hands, caps hold from the first byte, and reserves."""

from __future__ import annotations

import hashlib
import random
from collections import Counter
from collections.abc import Callable, Sequence

import pytest

from lmcache_core.kernel.adoption import Found
from lmcache_core.kernel.answers import Grant, Grants
from lmcache_core.kernel.config import KernelConfig
from lmcache_core.kernel.contracts import Entry, EvictionPolicy
from lmcache_core.kernel.effects import PolicyNoted
from lmcache_core.kernel.kernel import Kernel
from lmcache_core.kernel.states import State
from lmcache_core.kernel.tenants import OTHERS, Quota
from lmcache_core.limits import PAGE_BYTES
from lmcache_core.policies.lru import LruEviction

SLOTS = 4096
SESSION, LAYOUT = 1, 1


def key(number: int) -> bytes:
    return hashlib.sha256(number.to_bytes(8)).digest()


class Pool:
    """A kernel over slots of a page each, with a session that writes."""

    def __init__(
        self, slots: int = SLOTS, *, watermark: float = 1.0, make: Callable[[], EvictionPolicy] = LruEviction
    ) -> None:
        config = KernelConfig(slots * PAGE_BYTES, slab_bytes=256 * PAGE_BYTES, watermark=watermark)
        self.kernel = Kernel(config, make(), 1, make)
        self.kernel.add_memory(slots * PAGE_BYTES)
        self.kernel.register_layout(LAYOUT, PAGE_BYTES)
        self.kernel.open_session(SESSION, 0)
        self.kernel.attach_session(SESSION, 0)
        self.number = 0

    def prepare(self, namespace: int, count: int) -> Grants:
        keys = [key(self.number + n) for n in range(count)]
        self.number += count
        return self.kernel.prepare_store(SESSION, namespace, LAYOUT, keys, 0.0)

    def store(self, namespace: int, count: int) -> Counter[Grant]:
        """In pages of 256."""
        told: Counter[Grant] = Counter()
        while count:
            grants = self.prepare(namespace, min(count, 256))
            told += Counter(map(Grant, grants.statuses))
            if Grant.GRANTED in told:
                self.kernel.commit_store(SESSION, grants.lease_id, 0.0)
            count -= min(count, 256)
            self.kernel.take_effects()
        return told

    def settle(self) -> int:
        steps = 0
        while self.kernel.working:
            self.kernel.step(0.0)
            self.kernel.take_touched()
            steps += 1
        self.kernel.take_effects()
        return steps

    def used(self) -> dict[str, int]:
        """In slots, by tenant."""
        return {each.name: each.used_bytes // PAGE_BYTES for each in self.kernel.usage().tenants}

    def counted(self) -> Counter[int]:
        """Ready objects by namespace, one by one: the second door."""
        table = self.kernel.residents.table.namespaces
        return Counter({n: sum(item.state is State.READY for item in found) for n, found in table.items()})

    def limit(self, name: str, *namespaces: int, slots: int | None = None, reserved: int | None = None) -> None:
        quota = Quota(
            None if reserved is None else reserved * PAGE_BYTES, None if slots is None else slots * PAGE_BYTES
        )
        self.kernel.set_tenant(name, frozenset(namespaces), quota, 0.0)


def test_a_limit_that_is_set_on_a_full_pool_holds_after_bounded_steps() -> None:
    pool = Pool()
    pool.store(1, 3000)
    pool.store(2, 1000)
    pool.limit("a", 1, slots=500)
    pool.kernel.call_objects_max, pool.kernel.long_calls = 2048, []
    steps = pool.settle()
    assert steps > 5, "in one step it would be a stall"
    assert not pool.kernel.long_calls
    assert pool.counted() == {1: 500, 2: 1000}
    assert pool.used() == {"a": 500, OTHERS: 1000}


def test_what_is_being_written_counts_from_the_first_byte() -> None:
    pool = Pool()
    pool.limit("a", 1, slots=100)
    pool.settle()
    grants = pool.prepare(1, 150)
    assert Counter(map(Grant, grants.statuses)) == {Grant.GRANTED: 100, Grant.QUOTA: 50}
    assert pool.used()["a"] == 100
    assert Counter(map(Grant, pool.prepare(1, 10).statuses)) == {Grant.QUOTA: 10}, "nothing of it can go yet"
    assert Counter(map(Grant, pool.prepare(2, 10).statuses)) == {Grant.GRANTED: 10}
    pool.kernel.abort_store(SESSION, grants.lease_id, 0.0)
    assert pool.used()["a"] == 0
    assert pool.store(1, 100) == {Grant.GRANTED: 100}


def test_a_tenant_at_its_limit_makes_room_of_its_own() -> None:
    pool = Pool()
    pool.limit("a", 1, slots=300)
    pool.settle()
    pool.store(2, 500)
    assert pool.store(1, 1000) == {Grant.GRANTED: 1000}
    assert pool.counted() == {1: 300, 2: 500}


def test_a_store_at_a_limit_evicts_nothing_that_it_says_exists() -> None:
    """What a prefix has already is used by that store last to first: its end is the coldest of the tenant."""
    pool = Pool()
    pool.limit("a", 1, slots=100)
    pool.settle()
    pool.store(1, 100)
    pool.number = 0
    grants = pool.prepare(1, 110)
    assert Counter(map(Grant, grants.statuses)) == {Grant.EXISTS: 100, Grant.QUOTA: 10}
    assert pool.counted() == {1: 100}
    pool.number = 60
    grants = pool.prepare(1, 50)
    assert Counter(map(Grant, grants.statuses)) == {Grant.EXISTS: 40, Grant.GRANTED: 10}
    assert pool.counted() == {1: 90}, "the others are colder"
    found = pool.kernel.lookup(SESSION, 1, [key(n) for n in range(60, 100)], 0.0).statuses
    assert Counter(map(Grant, found)) == {Grant.GRANTED: 40}


@pytest.mark.parametrize("why", ["it drains", "it is too large", "it is beyond the limit by itself"])
def test_nothing_of_a_tenant_goes_for_what_is_refused_all_the_same(why: str) -> None:
    pool, large = Pool(), 2
    pool.kernel.register_layout(large, PAGE_BYTES * (2 * SLOTS if why == "it is too large" else 101))
    pool.limit("a", 1, slots=100)
    pool.settle()
    pool.store(1, 100)
    if why == "it drains":
        pool.kernel.begin_drain()
    layout = LAYOUT if why == "it drains" else large
    grants = pool.kernel.prepare_store(SESSION, 1, layout, [key(9999)], 0.0)
    refusals = {"it drains": Grant.DRAINING, "it is too large": Grant.TOO_LARGE}
    assert [Grant(status) for status in grants.statuses] == [refusals.get(why, Grant.QUOTA)]
    assert pool.counted() == {1: 100}


def test_a_large_object_finds_room_among_thousands_of_its_tenants_small_ones() -> None:
    """More of them have to go than one call evicts: each call makes some room, and one of them has it."""
    pool, large = Pool(), 2
    pool.kernel.register_layout(large, 1500 * PAGE_BYTES)
    pool.limit("a", 1, slots=2000)
    pool.settle()
    pool.store(1, 2000)
    told = [Grant(pool.kernel.prepare_store(SESSION, 1, large, [key(9999)], 0.0).statuses[0]) for _ in range(3)]
    assert told == [Grant.QUOTA, Grant.QUOTA, Grant.GRANTED]
    assert pool.used()["a"] <= 2000


class _Noting(LruEviction):
    """Notes what it is asked for."""

    def victims(self, nbytes: int) -> list[Entry]:
        self.note(f"{nbytes // PAGE_BYTES} slots are to go")
        return super().victims(nbytes)


def test_what_a_tenants_policy_notes_is_heard_like_the_others() -> None:
    """Whether it was made with the first quota or with a later one."""
    pool = Pool(make=_Noting)
    pool.limit("a", 1, slots=100)
    pool.limit("b", 2, slots=200)
    pool.settle()
    pool.store(1, 100)
    pool.store(2, 200)
    pool.store(3, SLOTS - 300)
    for namespace, count in ((1, 7), (2, 8), (3, 9)):
        pool.prepare(namespace, count)
        assert PolicyNoted(f"{count} slots are to go") in pool.kernel.take_effects(), namespace


class _Forgets(LruEviction):
    """Fails whenever something is to be taken from it."""

    def remove(self, entries):  # type: ignore[no-untyped-def]
        raise RuntimeError("so")


def test_a_policy_that_fails_as_objects_change_hands_does_not_keep_the_loop_busy_for_ever() -> None:
    pool = Pool()
    pool.kernel = Kernel(KernelConfig(SLOTS * PAGE_BYTES, slab_bytes=256 * PAGE_BYTES), _Forgets(), 1, LruEviction)
    pool.kernel.add_memory(SLOTS * PAGE_BYTES)
    pool.kernel.register_layout(LAYOUT, PAGE_BYTES)
    pool.kernel.open_session(SESSION, 0)
    pool.kernel.attach_session(SESSION, 0)
    pool.store(1, 1000)
    pool.limit("a", 1, slots=2000)
    for _ in range(1000):
        if not pool.kernel.working:
            break
        pool.kernel.step(0.0)
    assert not pool.kernel.working
    assert pool.used() == {"a": 1000, OTHERS: 0}
    assert pool.kernel.usage().policy_error.startswith("remove")


def test_writes_under_way_when_a_tenant_is_made_are_the_tenants() -> None:
    pool = Pool()
    grants = pool.prepare(1, 100)
    pool.limit("a", 1, slots=50)
    assert pool.used() == {"a": 100, OTHERS: 0}
    assert Counter(map(Grant, pool.prepare(1, 1).statuses)) == {Grant.QUOTA: 1}
    pool.kernel.commit_store(SESSION, grants.lease_id, 0.0)
    pool.kernel.trim(0.0)
    pool.settle()
    assert pool.counted() == {1: 50}


def test_what_is_reserved_is_taken_by_nobody_while_another_is_over() -> None:
    pool = Pool(1024)
    pool.store(2, 1024)
    pool.limit("a", 1, reserved=512)
    pool.settle()
    assert pool.store(1, 512) == {Grant.GRANTED: 512}
    pool.store(2, 2000)
    assert pool.counted() == {1: 512, 2: 512}


def test_a_tenant_without_a_reserve_counts_with_an_even_part_of_the_rest() -> None:
    pool = Pool(1024)
    pool.limit("a", 1, slots=900)
    pool.settle()
    pool.store(1, 900)
    pool.store(2, 2000)
    assert pool.counted() == {1: 512, 2: 512}


def test_a_tenant_that_is_removed_loses_its_limit_and_nothing_else() -> None:
    pool = Pool()
    pool.limit("a", 1, slots=100)
    pool.store(1, 100)
    pool.kernel.remove_tenant("a", 0.0)
    pool.settle()
    assert pool.used() == {OTHERS: 100}
    assert pool.store(1, 400) == {Grant.GRANTED: 400}
    assert pool.counted() == {1: 500}


def test_a_clear_under_way_and_held_objects_change_hands_like_all_others() -> None:
    pool = Pool()
    pool.store(1, 3000)
    pool.store(2, 100)
    some = [item.key for item in list(pool.kernel.residents.table.of(1))[:50]]
    held = pool.kernel.prepare_retrieve(SESSION, 1, some, 0.0)
    pool.limit("a", 1, slots=10)
    pool.kernel.step(0.0)
    clearing = pool.kernel.begin_clear(0.0, 1)
    while not clearing.done:
        pool.kernel.free_cleared(0.0, 100)
        pool.kernel.step(0.0)
    pool.settle()
    assert pool.used() == {"a": 50, OTHERS: 100}, "what is held takes room until it is let go of"
    pool.kernel.finish_read(SESSION, held.lease_id, 0.0)
    assert pool.used() == {"a": 0, OTHERS: 100}


def test_what_tiers_lack_goes_for_a_tenants_own_stores_where_it_may_be_lost() -> None:
    pool = Pool()
    pool.store(2, 2000)
    pool.store(1, 100)
    for namespace in (2, 1):
        table = pool.kernel.residents.table.of(namespace)
        pool.kernel.shield(namespace, [(item.key, item.generation) for item in table])
    pool.limit("a", 1, slots=100)
    pool.settle()
    assert pool.store(1, 50) == {Grant.GRANTED: 50}
    assert pool.counted() == {1: 100, 2: 2000}


def test_what_is_held_goes_once_it_may() -> None:
    pool = Pool()
    pool.store(1, 100)
    keys = [item.key for item in pool.kernel.residents.table.of(1)]
    held = pool.kernel.prepare_retrieve(SESSION, 1, keys, 0.0)
    pool.limit("a", 1, slots=10)
    pool.settle()
    assert pool.counted() == {1: 100}
    pool.kernel.finish_read(SESSION, held.lease_id, 0.0)
    pool.kernel.trim(0.0)  # as the server's housekeeping does every second
    pool.settle()
    assert pool.counted() == {1: 10}


class Left:
    """What a dead server left: 200 objects of namespace 1 and 100 of namespace 2, in two slabs."""

    def __init__(self) -> None:
        self.there = {PAGE_BYTES * at: (key(at), 1 + (at >= 200)) for at in range(300)}
        self.objects, self.nbytes = 300, 300 * PAGE_BYTES

    @property
    def pending(self) -> int:
        return len(self.there)

    def take(self, most: int) -> list[Found]:
        return [(*self.there.pop(at), at, LAYOUT, None, 0) for at in list(self.there)[:most]]

    def touch(self, namespace: int, keys: Sequence[bytes]) -> list[Found]:
        found = [at for at, (k, n) in self.there.items() if n == namespace and k in keys]
        return [(*self.there.pop(at), at, LAYOUT, None, 0) for at in found]

    def slab(self, offset: int, most: int) -> list[Found]:
        found = [at for at in self.there if offset <= at < offset + 256 * PAGE_BYTES][:most]
        return [(*self.there.pop(at), at, LAYOUT, None, 0) for at in found]

    def slabs(self) -> list[tuple[int, int, int, int, int, int, list[int]]]:
        end, unit = 300 * PAGE_BYTES, 256 * PAGE_BYTES
        return [(0, unit, PAGE_BYTES, 256, 256, unit, []), (unit, unit, PAGE_BYTES, 44, 44, end, [])]

    def waiting(self) -> list[tuple[int, int, int]]:
        return []

    def layout_of(self, namespace: int) -> int:
        return LAYOUT


@pytest.mark.parametrize("before", [True, False], ids=["kept from before", "set meanwhile"])
def test_quotas_that_are_set_while_a_pool_is_adopted_count_each_object_once(before: bool) -> None:
    config = KernelConfig(SLOTS * PAGE_BYTES, slab_bytes=256 * PAGE_BYTES, data_offset=0)
    pool = Pool()
    pool.kernel = kernel = Kernel(config, LruEviction(), 2, LruEviction)
    kernel.add_memory(SLOTS * PAGE_BYTES)
    kernel.register_layout(LAYOUT, PAGE_BYTES)
    if before:
        pool.limit("a", 9, slots=1000)
    kernel.adoption.begin(Left(), [])
    kernel.open_session(SESSION, 0)
    kernel.attach_session(SESSION, 0)
    kernel.lookup(SESSION, 1, [key(at) for at in range(50)], 0.0)  # warm
    kernel.adoption.step(40)
    pool.number = 1000
    under_way = pool.prepare(1, 30)
    pool.limit("a", 1, slots=1000)
    kernel.lookup(SESSION, 1, [key(at) for at in range(50, 60)], 0.0)
    assert pool.store(1, 20) == {Grant.GRANTED: 20}
    while kernel.adoption.step():
        kernel.take_effects()
    pool.settle()
    kernel.commit_store(SESSION, under_way.lease_id, 0.0)
    pool.settle()
    assert pool.counted() == {1: 250, 2: 100}
    assert pool.used() == {"a": 250, OTHERS: 100}
    assert kernel.usage().policy_error == ""


class _Checked(LruEviction):
    """Knows what it was given, and fails on what is another's."""

    def __init__(self) -> None:
        super().__init__()
        self.mine: set[int] = set()

    def insert(self, entries):  # type: ignore[no-untyped-def]
        assert not self.mine & {id(e) for e in entries}
        self.mine |= {id(e) for e in entries}
        super().insert(entries)

    def remove(self, entries):  # type: ignore[no-untyped-def]
        assert self.mine >= {id(e) for e in entries}
        self.mine -= {id(e) for e in entries}
        super().remove(entries)

    def access(self, entries):  # type: ignore[no-untyped-def]
        assert self.mine >= {id(e) for e in entries}
        super().access(entries)


@pytest.mark.parametrize("seed", range(12))
def test_no_disorder_makes_a_tenants_account_wrong(seed: int) -> None:
    """Stores, aborts, reads, clears and changes of quotas in any order: every account is the sum of what there is."""
    rng = random.Random(seed)
    made: list[EvictionPolicy] = []

    def make() -> EvictionPolicy:
        made.append(_Checked())
        return made[-1]

    pool = Pool(2048, make=make)
    kernel, leases, clearings = pool.kernel, [], []
    owners: dict[str, set[int]] = {}
    for _ in range(400):
        match rng.randrange(9):
            case 0 | 1 | 2:
                pool.store(rng.randrange(1, 5), rng.randrange(1, 300))
            case 3:
                leases.append(pool.prepare(rng.randrange(1, 5), rng.randrange(1, 100)).lease_id)
            case 4 if leases:
                end = rng.choice([kernel.abort_store, kernel.commit_store])
                end(SESSION, leases.pop(), 0.0)
            case 5:
                name = rng.choice("ab")
                taken = set().union(*(theirs for other, theirs in owners.items() if other != name))
                mine = {n for n in range(1, 5) if n not in taken and rng.random() < 0.5} or {9 + ord(name)}
                owners[name] = mine
                pool.limit(name, *mine, slots=rng.choice([None, 0, 300, 1500]), reserved=rng.choice([None, 200]))
            case 6 if owners:
                name = rng.choice(list(owners))
                del owners[name]
                kernel.remove_tenant(name, 0.0)
            case 7:
                clearings.append(kernel.begin_clear(0.0, rng.choice([None, 1, 2])))
            case _:
                for _ in range(rng.randrange(20)):
                    kernel.step(0.0)
                    kernel.free_cleared(0.0, 50)
        kernel.take_effects()
    while kernel.clearing:
        kernel.free_cleared(0.0)
    kernel.trim(0.0)
    pool.settle()
    assert kernel.usage().policy_error == ""
    ready = pool.counted()
    charged = Counter({n: nbytes // PAGE_BYTES for n, nbytes in kernel.residents.charged.items()})
    for name, used in pool.used().items():
        theirs = owners.get(name) or set(range(1, 5)).difference(*owners.values())
        assert used == sum(ready[n] + charged[n] for n in theirs), name
