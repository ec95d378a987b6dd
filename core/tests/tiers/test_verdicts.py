"""A read that looks wrong is no licence to delete, and a name that looks like ours proves nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from lmcache_core.errors import TierError
from lmcache_core.limits import SECOND_LOOK_S, STRANGER_S, SUSPECTS_BULK
from lmcache_core.policies.lru import LruEviction
from lmcache_core.tiers.contract import Capabilities, LoadItem, Outcome, Result, ScanEntry, StoreItem
from lmcache_core.tiers.object.format import HEADER_BYTES, tier_key
from lmcache_core.tiers.tier.accounting import Accounting
from lmcache_core.tiers.tier.order import Watch
from lmcache_core.tiers.tier.tier import Tier

from .conftest import LAYOUT, Doubles, Loop, ScriptedAdapter

OBJECT_BYTES = HEADER_BYTES + LAYOUT.nbytes


def name(doubles: Doubles, number: int) -> bytes:
    return tier_key(doubles.key(number), doubles.namespace, 0)


def stocked(doubles: Doubles, count: int, shared: bool = True, **options: object) -> tuple[ScriptedAdapter, Tier, Loop]:
    adapter = doubles.adapter()
    adapter.capabilities = Capabilities(durable=True, shared=shared)
    tier = doubles.tier("far", adapter, **options)
    loop = doubles.loop(doubles.l1(64), tier)
    loop.store(doubles.contents(count))
    loop.idle()
    for number in range(count):
        loop.l1.evict(doubles.key(number))
    return adapter, tier, loop


class Way:
    """What lies between a tier and its medium: it spoils what loads bring."""

    def __init__(self, adapter: ScriptedAdapter, spoil: Any) -> None:
        self._load_one = adapter.load_one
        self.spoil = spoil
        adapter.load_one = self.load_one

    def load_one(self, item: LoadItem) -> Outcome:
        return self.spoil(item, self._load_one(item))


def page(item: LoadItem, outcome: Outcome) -> Outcome:
    item.buffers[0][:24] = b"<html>maintenance</html>"
    return Outcome(Result.DONE, 24)


def flipped(item: LoadItem, outcome: Outcome) -> Outcome:
    item.buffers[1][7] ^= 1
    return outcome


def shortened(item: LoadItem, outcome: Outcome) -> Outcome:
    return outcome._replace(nbytes=outcome.nbytes // 2)


def unreadable(item: LoadItem, outcome: Outcome) -> Outcome:
    return Outcome(Result.DAMAGED, error="input/output error")


SPOILS = [page, flipped, shortened, unreadable]


@pytest.mark.parametrize("spoil", SPOILS)
def test_a_broken_way_deletes_nothing_and_opens_the_breaker(doubles: Doubles, spoil: Any) -> None:
    adapter, tier, loop = stocked(doubles, 40)
    way = Way(adapter, spoil)
    for number in range(40):
        loop.fetch([doubles.key(number)])
    assert tier.health.reads.opened
    assert tier.verdicts.in_bulk
    for _ in range(6):
        loop.jump(SECOND_LOOK_S * 4)
        loop.fetch([doubles.key(0)])
        loop.until(lambda: tier.verdicts.next_at is not None)  # no look is under way
    assert len(adapter.objects) == 40
    assert not adapter.calls["delete"]
    way.spoil = lambda item, outcome: outcome
    loop.jump(700.0)
    loop.until(lambda: not len(tier.verdicts))
    loop.until(lambda: str(tier.health.reads.state) != "half_open")  # no probe is under way
    loop.jump(60.0)
    loop.until(lambda: str(tier.health.reads.state) == "closed")
    assert tier.accounting.known([name(doubles, number) for number in range(40)]) == {*adapter.objects}
    assert loop.fetch([doubles.key(number) for number in range(40)]).hits == 40


@pytest.mark.parametrize("spoil", SPOILS)
def test_a_few_reads_that_look_damaged_delete_nothing_while_no_other_object_is_read_well(
    doubles: Doubles, spoil: Any
) -> None:
    adapter, tier, loop = stocked(doubles, 3)
    Way(adapter, spoil)
    loop.fetch([doubles.key(0)])
    for _ in range(4):
        before = adapter.calls["load"]
        loop.jump(SECOND_LOOK_S * 8)
        loop.until(lambda before=before: adapter.calls["load"] > before and tier.verdicts.next_at is not None)
    assert len(adapter.objects) == 3


def test_a_read_that_looked_damaged_once_is_forgotten_when_the_next_is_well(doubles: Doubles) -> None:
    adapter, tier, loop = stocked(doubles, 3)
    way = Way(adapter, flipped)
    loop.fetch([doubles.key(0)])
    way.spoil = lambda item, outcome: outcome
    assert tier.accounting.known([name(doubles, 0)]) == set()
    loop.jump(SECOND_LOOK_S)
    loop.until(lambda: tier.verdicts.cleared == 1)
    assert tier.accounting.known([name(doubles, 0)]) == {name(doubles, 0)}
    assert len(adapter.objects) == 3


def test_damage_that_differs_each_time_is_the_ways(doubles: Doubles) -> None:
    adapter, tier, loop = stocked(doubles, 3)
    turn = iter(range(1, 200))

    def noise(item: LoadItem, outcome: Outcome) -> Outcome:
        if item.key == name(doubles, 0):
            item.buffers[1][next(turn)] ^= 1
        return outcome

    Way(adapter, noise)
    loop.fetch([doubles.key(0)])
    for _ in range(4):
        before = adapter.calls["load"]
        loop.jump(SECOND_LOOK_S * 8)
        loop.until(lambda before=before: adapter.calls["load"] > before and tier.verdicts.next_at is not None)
    assert len(adapter.objects) == 3


def other_object(item: LoadItem, outcome: Outcome) -> Outcome:
    item.buffers[0][8:72] = bytes(64)
    return outcome


@pytest.mark.parametrize("spoil", [page, other_object, lambda i, o: o._replace(nbytes=HEADER_BYTES - 1)])
def test_an_answer_without_the_objects_own_header_deletes_nothing_however_often_it_comes(
    doubles: Doubles, spoil: Any
) -> None:
    adapter, tier, loop = stocked(doubles, 12)
    few = {name(doubles, number) for number in range(3)}
    Way(adapter, lambda item, outcome: spoil(item, outcome) if item.key in few else outcome)
    for number in range(12):
        loop.fetch([doubles.key(number)])
    assert len(tier.verdicts) == len(few)
    for _ in range(4):
        before = adapter.calls["load"]
        loop.jump(SECOND_LOOK_S * 8)
        loop.until(lambda before=before: adapter.calls["load"] > before and tier.verdicts.next_at is not None)
    assert len(adapter.objects) == 12
    assert not adapter.calls["delete"]
    loop.store(doubles.contents(3))
    loop.idle()
    assert not len(tier.verdicts), "the next writer replaces them"


def test_damage_on_a_medium_of_this_node_alone_needs_no_header(doubles: Doubles) -> None:
    adapter, _, loop = stocked(doubles, 3, shared=False)
    Way(adapter, lambda item, outcome: page(item, outcome) if item.key == name(doubles, 1) else outcome)
    loop.fetch([doubles.key(1)])
    loop.jump(SECOND_LOOK_S)
    loop.until(lambda: name(doubles, 1) not in adapter.objects)


def cut_in_half(item: LoadItem, outcome: Outcome) -> Outcome:
    return outcome._replace(nbytes=outcome.nbytes // 2)


@pytest.mark.parametrize("spoil", [flipped, cut_in_half, lambda i, o: Outcome(Result.DAMAGED, error="too long")])
def test_damage_where_others_store_too_is_left_to_the_next_writer_whatever_it_looks_like(
    doubles: Doubles, spoil: Any
) -> None:
    """A cache on the way may keep one damaged copy for good, with the object's own header."""
    adapter, tier, loop = stocked(doubles, 12)
    victim = name(doubles, 1)
    Way(adapter, lambda item, outcome: spoil(item, outcome) if item.key == victim else outcome)
    for number in range(12):
        loop.fetch([doubles.key(number)])
    for _ in range(4):
        before = adapter.calls["load"]
        loop.jump(SECOND_LOOK_S * 8)
        loop.until(lambda before=before: adapter.calls["load"] > before and tier.verdicts.next_at is not None)
    assert not adapter.calls["delete"]
    loop.store(doubles.contents(2))
    loop.idle()
    assert not len(tier.verdicts), "replaced"


def test_real_damage_is_set_aside_after_a_second_look_and_not_before(doubles: Doubles) -> None:
    adapter, tier, loop = stocked(doubles, 3, shared=False)
    adapter.corrupt(name(doubles, 1))
    assert loop.fetch([doubles.key(1)]).reasons[0] == "damaged"
    loop.turn()
    assert name(doubles, 1) in adapter.objects
    loop.jump(SECOND_LOOK_S)
    loop.until(lambda: name(doubles, 1) not in adapter.objects)
    loop.until(lambda: tier.verdicts.confirmed == 1)
    assert tier.accounting.objects == 2


def test_more_damage_than_objects_break_at_once_is_left_to_the_next_writers(doubles: Doubles) -> None:
    many = SUSPECTS_BULK + 3
    adapter, tier, loop = stocked(doubles, 40)
    for number in range(many):
        adapter.corrupt(name(doubles, number))
    for number in range(40):
        loop.fetch([doubles.key(number)])
    for _ in range(3):
        loop.jump(SECOND_LOOK_S * 8)
        loop.until(lambda: tier.verdicts.next_at is not None)
        loop.turn()
    assert len(adapter.objects) == 40
    loop.store(doubles.contents(many))
    loop.idle()
    assert not len(tier.verdicts), "replaced"


def test_the_next_writer_replaces_a_suspect_and_is_told_to(doubles: Doubles) -> None:
    adapter, tier, loop = stocked(doubles, 2)
    told: list[bool] = []
    store = adapter.store

    def noting(items: Sequence[StoreItem], deadline: float) -> Sequence[Outcome]:
        told.extend(item.replaces for item in items)
        return store(items, deadline)

    adapter.store = noting
    adapter.corrupt(name(doubles, 0))
    loop.fetch([doubles.key(0)])
    loop.store(doubles.contents(2, first=0))
    loop.idle()
    assert told == [True], "the sound one is there already, the other is to be stored in any case"
    loop.l1.evict(doubles.key(0))
    assert loop.fetch([doubles.key(0)]).hits == 1
    assert not len(tier.verdicts)


@pytest.mark.parametrize("by", ["the scan", "a rescan", "a store"])
def test_an_object_that_looked_damaged_before_it_was_counted_is_a_suspect(by: str) -> None:
    """After a restart loads are faster than the scan: what it counts later is not sound for that."""
    books = Accounting(None, 0.8, 0.2, LruEviction(None))
    found = [ScanEntry(key, OBJECT_BYTES, 0.0) for key in (bytes(44), b"\x01" * 44)]
    if by == "the scan":
        books.scan_begins()
    books.suspect([found[0].key])
    if by == "the scan":
        books.scan_ended([found])
        assert books.adopt(8, Watch(), lambda doubts: None)
    elif by == "a rescan":
        books.rescan_begins()
        books.found(found, Watch(), lambda doubts: None)
        books.found([each._replace(nbytes=700) for each in found], Watch(), lambda doubts: None)
    else:
        books.add([(each.key, each.nbytes) for each in found], ours=True)
    assert [books.knows(each.key) for each in found] == [by == "a store", True]
    books.suspect([found[0].key], suspect=False)
    assert books.knows(found[0].key)


def test_a_suspect_that_is_gone_before_it_was_counted_is_forgotten() -> None:
    books = Accounting(None, 0.8, 0.2, LruEviction(None))
    books.suspect([bytes(44)])
    books.remove([bytes(44)])
    books.add([(bytes(44), OBJECT_BYTES)])
    assert books.knows(bytes(44))


# --- whose it is ------------------------------------------------------------------------------------------
STRANGERS = {
    b"\xca\xfe": b"short",
    b"\xde\xad\xbe\xef": bytes(3 * OBJECT_BYTES),
    bytes(32): bytes(3 * OBJECT_BYTES),
    bytes(range(44)): bytes(3 * OBJECT_BYTES),  # as long as ours
    b"\x01" * 44: b"short",
}


def test_a_name_in_our_form_is_not_evicted_without_our_header(doubles: Doubles) -> None:
    adapter = doubles.adapter()
    adapter.capabilities = Capabilities(durable=True, shared=True)
    adapter.objects.update(STRANGERS)
    tier = doubles.tier("far", adapter, capacity_bytes=8 * OBJECT_BYTES, eviction=LruEviction(None))
    loop = doubles.loop(doubles.l1(64), tier)
    loop.until(loop.scanned)
    for number in range(24):
        loop.store(doubles.contents(1, first=number))
        loop.until(lambda: loop.tiering.drained)
    assert {key: adapter.objects.get(key) for key in STRANGERS} == STRANGERS
    assert name(doubles, 23) in adapter.objects
    assert tier.accounting.foreign >= 1
    loop.jump(60.0)
    tier._recount.ask()
    loop.idle()
    assert not tier.accounting.known(list(STRANGERS)), "a later scan does not count them either"
    assert tier.accounting.is_counted(bytes(range(44)), 4096, loop.now() + STRANGER_S), "they are looked at again"


def test_what_another_server_of_ours_stored_is_evicted_by_its_header(doubles: Doubles) -> None:
    adapter, _, first = stocked(doubles, 8)
    first.tiering.close()
    tier = doubles.tier("far", adapter, capacity_bytes=8 * OBJECT_BYTES, eviction=LruEviction(None))
    loop = doubles.loop(doubles.l1(64), tier)
    loop.until(loop.scanned)
    loop.until(lambda: tier.reclaim.deleted > 0)
    assert len(adapter.objects) < 8


def test_an_eviction_waits_while_headers_cannot_be_read(doubles: Doubles) -> None:
    adapter, _, first = stocked(doubles, 8)
    first.tiering.close()
    adapter.errors["load"] = TierError("away", retryable=False)
    tier = doubles.tier("far", adapter, capacity_bytes=8 * OBJECT_BYTES, eviction=LruEviction(None))
    loop = doubles.loop(doubles.l1(64), tier)
    loop.until(lambda: tier.reclaim.failed)
    assert len(adapter.objects) == 8
    assert tier.accounting.objects == 8, "they still count"


# --- a medium that may not be listed ----------------------------------------------------------------------
def test_a_medium_that_may_not_be_listed_evicts_what_we_stored_and_says_so(doubles: Doubles) -> None:
    adapter = doubles.adapter()
    adapter.errors["scan"] = TierError("access denied", retryable=False)
    tier = doubles.tier("far", adapter, capacity_bytes=8 * OBJECT_BYTES, eviction=LruEviction(None))
    loop = doubles.loop(doubles.l1(64), tier)
    for number in range(24):
        loop.store(doubles.contents(1, first=number))
        loop.until(lambda: loop.tiering.drained)
    assert name(doubles, 23) in adapter.objects
    assert sum(map(len, adapter.objects.values())) <= 8 * OBJECT_BYTES
    status = loop.tiering.status()["tiers"][0]
    assert status["scan"] == "unlisted"
    assert "access denied" in status["last_error"]
    del adapter.errors["scan"]
    loop.jump(60.0)
    loop.idle()
    assert loop.tiering.status()["tiers"][0]["scan"] == "done"


def test_a_listing_that_keeps_failing_is_not_waited_for(doubles: Doubles) -> None:
    adapter = doubles.adapter()
    adapter.errors["scan"] = TierError("internal error", retryable=True)
    loop = doubles.loop(doubles.l1(64), doubles.tier("far", adapter))
    for _ in range(8):
        loop.jump(31.0)
        calls = adapter.calls["scan"]
        loop.until(lambda calls=calls: adapter.calls["scan"] > calls)
        loop.turn()
    loop.until(lambda: loop.tiering.status()["tiers"][0]["scan"] == "unlisted")
    assert not next(iter(loop.tiering.tiers)).accounting.scanning


# --- a medium that is full --------------------------------------------------------------------------------
def test_a_medium_that_stays_full_does_not_evict_itself_to_nothing(doubles: Doubles) -> None:
    adapter, _tier, loop = stocked(doubles, 30, capacity_bytes=100 * OBJECT_BYTES, eviction=LruEviction(None))
    adapter.answers["store"] = Outcome(Result.FULL)
    for number in range(40, 60):
        loop.store(doubles.contents(1, first=number))
        loop.until(lambda: loop.tiering.drained)
    assert len(adapter.objects) > 15
    del adapter.answers["store"]
    loop.store(doubles.contents(1, first=61))
    loop.idle()
    assert name(doubles, 61) in adapter.objects


def test_one_object_that_fails_among_many_is_no_failure_of_the_tier(doubles: Doubles) -> None:
    adapter, tier, loop = stocked(doubles, 8)

    def one_fails(item: LoadItem, outcome: Outcome) -> Outcome:
        return Outcome(Result.FAILED, error="bad") if item.key == name(doubles, 3) else outcome

    Way(adapter, one_fails)
    for _ in range(8):
        loop.fetch([doubles.key(number) for number in range(8)])
        for number in range(8):
            if (doubles.namespace, doubles.key(number)) in loop.l1.ready:
                loop.l1.evict(doubles.key(number))
    assert str(tier.health.reads.state) == "closed"
    assert tier.accounting.known([name(doubles, 3)]) == set(), "its next writer replaces it"
