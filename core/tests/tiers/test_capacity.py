"""Capacity, eviction and accounting of a tier."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from lmcache_core.errors import SettingsError
from lmcache_core.kernel.contracts import Entry
from lmcache_core.kernel.guard import GuardedPolicy
from lmcache_core.kernel.tenants import Quota
from lmcache_core.policies.lru import LruEviction
from lmcache_core.policies.noop import NoopEviction
from lmcache_core.tiers.contract import Capabilities, Outcome, Result, ScanEntry
from lmcache_core.tiers.object.format import HEADER_BYTES, tier_key
from lmcache_core.tiers.tier.accounting import Accounting
from lmcache_core.tiers.tier.order import Watch

from .conftest import Doubles, Loop

OBJECT_BYTES = HEADER_BYTES + 5000


def _names(doubles: Doubles, numbers: Sequence[int]) -> set[bytes]:
    return {tier_key(doubles.key(i), doubles.namespace, 0) for i in numbers}


def _store_one_by_one(doubles: Doubles, loop: Loop, numbers: Sequence[int]) -> None:
    for i in numbers:
        loop.store(doubles.contents(1, first=i))
        loop.idle()


def test_a_tier_over_its_capacity_evicts_the_least_recently_used(doubles: Doubles) -> None:
    adapter = doubles.adapter()
    tier = doubles.tier("mem", adapter, capacity_bytes=10 * OBJECT_BYTES, watermark=0.8, evict_ratio=0.2,
                        eviction=LruEviction(None))  # fmt: skip
    loop = doubles.loop(doubles.l1(), tier)
    _store_one_by_one(doubles, loop, range(8))
    loop.l1.evict(doubles.key(0))
    assert loop.fetch([doubles.key(0)]).hits == 1  # used: 1 and 2 are the oldest now
    _store_one_by_one(doubles, loop, range(8, 10))
    loop.until(lambda: tier.accounting.bytes_leaving == 0)
    assert _names(doubles, [0, 8, 9]) <= set(adapter.objects)
    assert not _names(doubles, [1, 2]) & set(adapter.objects)
    assert sum(map(len, adapter.objects.values())) == tier.accounting.bytes_used <= 8 * OBJECT_BYTES


def test_the_medium_never_holds_more_than_the_capacity(doubles: Doubles) -> None:
    adapter = doubles.adapter()
    capacity = 6 * OBJECT_BYTES
    tier = doubles.tier("mem", adapter, capacity_bytes=capacity, eviction=LruEviction(None))
    loop = doubles.loop(doubles.l1(40), tier)
    peak = 0

    def note() -> bool:
        nonlocal peak
        peak = max(peak, sum(map(len, list(adapter.objects.values()))))
        return bool(loop.tiering.drained)

    loop.store(doubles.contents(40))
    loop.until(note)
    assert 0 < peak <= capacity
    assert loop.tiering.status()["stores"]["counts"]["stored"] == 40


@pytest.mark.parametrize("eviction", [None, NoopEviction(None)])
def test_a_tier_that_cannot_evict_says_full_and_takes_no_more(doubles: Doubles, eviction: object) -> None:
    adapter = doubles.adapter()
    loop = doubles.loop(doubles.l1(), doubles.tier("mem", adapter, capacity_bytes=3 * OBJECT_BYTES, eviction=eviction))
    loop.store(doubles.contents(5))
    loop.idle()
    assert len(adapter.objects) == 3
    assert loop.tiering.status()["stores"]["counts"]["lost_no_room"] == 2
    assert loop.l1.held == 0


def test_an_object_larger_than_the_tier_is_refused_without_evicting_the_rest(doubles: Doubles) -> None:
    adapter = doubles.adapter()
    tier = doubles.tier("mem", adapter, capacity_bytes=OBJECT_BYTES - 1, eviction=LruEviction(None))
    loop = doubles.loop(doubles.l1(), tier)
    loop.store(doubles.contents(1))
    loop.idle()
    assert adapter.calls["store"] == adapter.calls["delete"] == 0


def test_a_full_medium_makes_room_and_takes_the_next_object(doubles: Doubles) -> None:
    adapter = doubles.adapter()
    tier = doubles.tier("mem", adapter, capacity_bytes=100 * OBJECT_BYTES, eviction=LruEviction(None))
    loop = doubles.loop(doubles.l1(), tier)
    loop.store(doubles.contents(10))
    loop.idle()
    adapter.answers["store"] = Outcome(Result.FULL)
    loop.store(doubles.contents(1, first=10))
    loop.until(lambda: len(adapter.objects) == 8)
    assert str(tier.health.writes.state) == "closed", "a full medium is no broken one"
    del adapter.answers["store"]
    loop.store(doubles.contents(1, first=11))
    loop.idle()
    assert _names(doubles, [11]) <= set(adapter.objects)


def test_accounting_and_order_of_use_survive_a_restart(doubles: Doubles) -> None:
    adapter = doubles.adapter()
    loop = doubles.loop(doubles.l1(), doubles.tier("mem", adapter))
    _store_one_by_one(doubles, loop, range(8))
    loop.tiering.close()

    order = sorted(adapter.objects)  # the scripted medium's idea of the order of use
    tier = doubles.tier("mem", adapter, capacity_bytes=10 * OBJECT_BYTES, watermark=0.9, evict_ratio=0.2,
                        eviction=LruEviction(None))  # fmt: skip
    loop = doubles.loop(doubles.l1(), tier)
    adapter.hang("scan")
    loop.store(doubles.contents(1, first=20))  # while it is scanned, the tier takes objects
    loop.until(lambda: len(adapter.objects) == 9)
    adapter.release("scan")
    loop.idle()
    assert tier.accounting.bytes_used == 9 * OBJECT_BYTES
    loop.store(doubles.contents(1, first=21))
    loop.idle()
    loop.until(lambda: tier.accounting.bytes_leaving == 0)
    assert not set(order[:2]) & set(adapter.objects), "the oldest went first"
    assert {*order[2:], *_names(doubles, [20, 21])} == set(adapter.objects)


def test_what_another_server_deleted_is_forgotten_and_stored_again(doubles: Doubles) -> None:
    adapter = doubles.adapter()
    tier = doubles.tier("mem", adapter)
    loop = doubles.loop(doubles.l1(), tier)
    loop.store(doubles.contents(2))
    loop.idle()
    adapter.objects.clear()
    for i in range(2):
        loop.l1.evict(doubles.key(i))
    assert loop.fetch([doubles.key(0), doubles.key(1)]).hits == 0
    assert tier.accounting.objects == 0
    loop.store(doubles.contents(2))
    loop.idle()
    assert len(adapter.objects) == 2


def test_deletes_that_fail_are_tried_again_after_a_pause(doubles: Doubles) -> None:
    adapter = doubles.adapter()
    tier = doubles.tier("mem", adapter, capacity_bytes=4 * OBJECT_BYTES, watermark=0.5, eviction=LruEviction(None))
    loop = doubles.loop(doubles.l1(), tier)
    adapter.errors["delete"] = PermissionError("no")
    loop.store(doubles.contents(4))
    loop.until(lambda: tier.reclaim.failed and len(adapter.objects) == 4)
    assert tier.accounting.bytes_used == 4 * OBJECT_BYTES
    tried = adapter.calls["delete"]
    loop.until(lambda: True)
    assert adapter.calls["delete"] <= tried + 1, "no hot loop"
    del adapter.errors["delete"]
    loop.jump(5.0)
    loop.until(lambda: len(adapter.objects) <= 2)


def test_a_full_medium_that_cannot_delete_loses_nothing_in_the_books(doubles: Doubles) -> None:
    class Fixed(doubles.adapter):  # type: ignore[misc]
        capabilities = Capabilities(delete=False)

    adapter = Fixed()
    tier = doubles.tier("mem", adapter, eviction=LruEviction(None))
    loop = doubles.loop(doubles.l1(), tier)
    loop.store(doubles.contents(10))
    loop.idle()
    adapter.answers["store"] = Outcome(Result.FULL)
    loop.store(doubles.contents(1, first=10))
    loop.idle()
    assert tier.accounting.known(list(adapter.objects)) == set(adapter.objects)
    assert tier.accounting.bytes_leaving == 0
    assert tier.reclaim.evicted == 0


def test_a_capacity_without_a_way_to_delete_is_refused_with_the_setting_to_change(doubles: Doubles) -> None:
    class Keeps(doubles.adapter):  # type: ignore[misc]
        capabilities = Capabilities(delete=False)

    with pytest.raises(SettingsError, match=r"l2\.mem\.eviction"):
        doubles.tier("mem", Keeps(), capacity_bytes=1 << 20, eviction=LruEviction(None))


def test_bytes_used_is_the_sum_of_what_is_there_whatever_the_order_of_events() -> None:
    accounting = Accounting(10_000, 0.8, 0.2, LruEviction(None))
    names = [bytes([i]) * 44 for i in range(6)]
    sizes: dict[bytes, int] = {}
    for name, nbytes in zip(itertools.cycle(names), range(100, 2500, 83), strict=False):
        accounting.add([(name, nbytes)])
        sizes[name] = nbytes
        for entry in accounting.victims():
            if entry.nbytes % 2:
                accounting.remove([entry.tier_key])
                del sizes[entry.tier_key]
            else:
                accounting.stays(entry.tier_key)
        assert accounting.bytes_used == sum(sizes.values())
        assert accounting.objects == len(sizes)
        assert accounting.bytes_leaving == 0
    for name in names:
        accounting.remove([name])
    assert (accounting.bytes_used, accounting.objects) == (0, 0)


def test_a_scan_is_taken_over_oldest_first_across_pages_and_below_what_is_new() -> None:
    accounting = Accounting(None, 0.8, 0.2, LruEviction(None))
    accounting.scan_begins()
    old = [bytes([i]) * 44 for i in range(6)]
    new = b"n" * 44
    accounting.add([(new, 1)])
    pages = [[ScanEntry(old[i], 1, float(i)) for i in page] for page in ((1, 3, 5), (0, 2, 4))]
    accounting.scan_ended(pages)
    while not accounting.adopt(2, Watch(), lambda found: None):
        pass
    assert accounting.policy is not None
    order = [entry.tier_key for entry in accounting.policy.victims(7)]  # type: ignore[attr-defined]
    assert order == [*old, new]


class _Told(LruEviction):
    """Notes what it is told, and when."""

    def __init__(self) -> None:
        super().__init__(None)
        self.told: list[object] = []

    def resize(self, capacity_bytes: int) -> None:
        self.told.append(capacity_bytes)

    def insert(self, entries: Sequence[Entry]) -> None:
        self.told.append("insert")
        super().insert(entries)


def test_the_policy_of_a_tier_learns_its_capacity_before_the_first_insert(doubles: Doubles) -> None:
    policy = _Told()
    loop = doubles.loop(doubles.l1(), doubles.tier("mem", doubles.adapter(), capacity_bytes=1 << 20, eviction=policy))
    loop.store(doubles.contents(2))
    loop.idle()
    assert policy.told[0] == 1 << 20
    assert policy.told.count(1 << 20) == 1


def test_a_medium_that_is_full_before_any_capacity_tells_the_policy_how_much_fits() -> None:
    policy = _Told()
    counts = Accounting(None, 0.8, 0.2, policy)
    for i in range(10):
        counts.add([(tier_key(bytes([i]) * 32, 1, 0), 100)])
    assert sum(entry.nbytes for entry in counts.shrink()) == 200
    assert policy.told[-1] == 1000


def test_an_object_beyond_its_tenants_limit_is_refused_without_evicting_the_rest_of_the_tenant() -> None:
    counts = Accounting(None, 0.8, 0.2, GuardedPolicy(LruEviction(), lambda method, error: None))
    assert counts.tenancy is not None
    counts.tenancy.make = LruEviction
    counts.tenancy.change("a", frozenset({1}), Quota(limit_bytes=1000), 0)
    counts.add([(tier_key(bytes([number]) * 32, 1, 0), 100) for number in range(10)])
    while counts.tenancy.working:
        counts.step_tenants(100)
    assert counts.over_limit(1, 300) == 300
    assert counts.victims_of(1, counts.over_limit(1, 1001)) == []
    assert len(counts.victims_of(1, 300)) == 3, "and what makes enough room does go"


NAMES = [tier_key(bytes([number]) * 32, 7, 0) for number in range(6)]
SOME = st.lists(st.sampled_from(NAMES), max_size=4, unique=True)


class FollowedBooks(RuleBasedStateMachine):
    """Whoever asks again about the keys that the accounts name to it knows what the accounts know."""

    def __init__(self) -> None:
        super().__init__()
        self.view: set[bytes] = set()
        self.left: list[bytes] = []
        self.books = Accounting(10_000, 0.8, 0.2, LruEviction(None))
        self.books.on_changed = self.follow
        self.books.on_removed = self.left.extend

    def follow(self, names: list[bytes]) -> None:
        for name in names:
            (self.view.add if self.books.knows(name) else self.view.discard)(name)

    @rule(names=SOME, nbytes=st.integers(100, 101), ours=st.booleans())
    def add(self, names: list[bytes], nbytes: int, ours: bool) -> None:
        self.books.add([(name, nbytes) for name in names], ours=ours)

    @rule(names=SOME, suspect=st.booleans())
    def suspect(self, names: list[bytes], suspect: bool) -> None:
        self.books.suspect(names, suspect=suspect)

    @rule(names=SOME)
    def delete(self, names: list[bytes]) -> None:
        entries = [self.books.entry_of(name) for name in names]
        self.books.leave([entry for entry in entries if entry is not None and not entry.holds])

    @rule(wanted=st.integers(0, 10_000))
    def evict(self, wanted: int) -> None:
        self.books.victims(wanted)

    @rule(names=SOME)
    def hang(self, names: list[bytes]) -> None:
        self.books.hang(names)

    @rule(name=st.sampled_from(NAMES))
    def stays(self, name: bytes) -> None:
        self.books.stays(name)

    @rule(names=SOME)
    def remove(self, names: list[bytes]) -> None:
        there = [name for name in names if self.books.nbytes_of(name) is not None]
        self.left.clear()
        self.books.remove(names)
        assert self.left == there

    @rule(names=SOME)
    def disown(self, names: list[bytes]) -> None:
        self.books.disown(names, 10.0)

    @invariant()
    def the_view_is_what_the_books_know(self) -> None:
        assert self.view == self.books.known(NAMES)


TestFollowedBooks = FollowedBooks.TestCase
TestFollowedBooks.settings = settings(max_examples=60, stateful_step_count=20, deadline=None)
