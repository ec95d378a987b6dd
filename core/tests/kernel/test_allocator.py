"""Slots, slabs, and how slabs change hands."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_words import MIB

from lmcache_core.errors import UsageError
from lmcache_core.kernel.allocator import Allocator, SizeClass, slab_bytes_for
from lmcache_core.kernel.objects import Incarnation
from lmcache_core.kernel.states import State
from lmcache_core.limits import PAGE_BYTES, SLAB_BYTES, SLAB_BYTES_MIN

START = 8 * MIB


def area(units: int, unit_bytes: int = MIB, extra: int = 0) -> Allocator:
    allocator = Allocator(units * unit_bytes + extra, START, unit_bytes)
    allocator.populate(allocator.pool_bytes)
    return allocator


def take(allocator: Allocator, size_class: SizeClass, count: int) -> list[Incarnation]:
    made = []
    for _ in range(count):
        item = Incarnation()
        item.state, item.holds = State.READY, 0
        made.append(item)
    return made[: allocator.place(size_class, made)]


def give_back(allocator: Allocator, items: list[Incarnation]) -> None:
    for item in items:
        item.state = State.FREE
    allocator.free(items)


def test_the_unit_follows_the_pool() -> None:
    assert slab_bytes_for(1 << 40) == SLAB_BYTES
    assert slab_bytes_for(1 << 30) == 16 * MIB
    assert slab_bytes_for(1) == SLAB_BYTES_MIN


def test_a_pool_smaller_than_a_slab_is_refused_with_both_figures() -> None:
    with pytest.raises(UsageError, match=r"4,096 .* 1,048,576"):
        Allocator(4096, 0, MIB)


def test_classes_are_exact_to_the_page() -> None:
    allocator = area(4)
    assert allocator.size_class(1).slot_bytes == PAGE_BYTES
    assert allocator.size_class(70_000).slot_bytes == 18 * PAGE_BYTES
    assert allocator.size_class(69_700) is allocator.size_class(70_000)


def test_a_fresh_slab_gives_its_slots_in_order_and_a_used_one_its_warmest_first() -> None:
    allocator = area(1)
    quarter = allocator.size_class(MIB // 4)
    items = take(allocator, quarter, 3)
    assert [item.offset for item in items] == [START + i * MIB // 4 for i in range(3)]
    give_back(allocator, [items[0], items[2]])
    assert [item.offset for item in take(allocator, quarter, 1)] == [items[2].offset]


def test_room_is_given_in_part() -> None:
    allocator = area(2)
    assert len(take(allocator, allocator.size_class(MIB), 5)) == 2
    assert len(take(allocator, allocator.size_class(PAGE_BYTES), 1)) == 0


def test_an_object_larger_than_a_unit_takes_neighbouring_units() -> None:
    allocator = area(7)
    large = take(allocator, allocator.size_class(3 * MIB), 5)
    assert len(large) == 2
    assert {item.offset for item in large} == {START, START + 3 * MIB}
    assert len(take(allocator, allocator.size_class(MIB), 5)) == 1


def test_a_slot_that_fits_a_unit_badly_gets_slabs_of_several() -> None:
    allocator = area(8)
    items = take(allocator, allocator.size_class(700 << 10), 100)
    assert len(items) > 8, "one in each unit would waste a third"


def test_the_last_unit_may_be_shorter() -> None:
    allocator = area(1, extra=MIB // 2)
    assert len(take(allocator, allocator.size_class(MIB // 2), 9)) == 3
    allocator = area(1, extra=MIB // 2)
    assert len(take(allocator, allocator.size_class(MIB), 9)) == 1


def test_an_empty_slab_goes_to_whoever_asks_next() -> None:
    allocator = area(2)
    small, large = allocator.size_class(MIB // 2), allocator.size_class(2 * MIB)
    items = take(allocator, small, 4)
    assert not take(allocator, large, 1)
    give_back(allocator, items)
    assert small.slabs == 2, "it stays until someone needs it"
    assert take(allocator, large, 1)
    assert (small.slabs, small.slots, large.slabs) == (0, 0, 1)


def test_a_slab_that_changes_its_class_leaves_an_effect() -> None:
    allocator = area(1)
    give_back(allocator, take(allocator, allocator.size_class(MIB // 2), 1))
    take(allocator, allocator.size_class(MIB), 1)
    assert allocator.assigned == [(START, MIB, MIB // 2), (START, MIB, 0), (START, MIB, MIB)]


def test_fragmentation_counts_what_only_one_class_can_use() -> None:
    allocator = area(4)
    half = allocator.size_class(MIB // 2)
    items = take(allocator, half, 8)
    assert allocator.empty_bytes == 0
    give_back(allocator, items[:2])
    assert allocator.empty_bytes == MIB
    give_back(allocator, items[2::2])
    assert allocator.empty_bytes == MIB


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.lists(st.tuples(st.sampled_from([4096, 60_000, 700_000, MIB, 2_500_000]), st.integers(1, 40), st.randoms())))
def test_no_two_slots_overlap_whatever_comes_and_goes(
    steps: list[tuple[int, int, object]],
) -> None:
    allocator = area(9, extra=MIB // 2)
    held: list[Incarnation] = []
    for nbytes, count, chance in steps:
        held += take(allocator, allocator.size_class(nbytes), count)
        spans = sorted((item.offset, item.offset + item.slab.slot_bytes) for item in held)
        assert all(end <= start for (_, end), (start, _) in pairwise(spans))
        assert all(start >= START and end <= START + allocator.pool_bytes for start, end in spans)
        assert allocator.used_bytes == sum(end - start for start, end in spans)
        chance.shuffle(held)  # type: ignore[attr-defined]
        half = len(held) // 2
        give_back(allocator, held[:half])
        del held[:half]
    give_back(allocator, held)
    assert allocator.used_bytes == 0
    assert allocator.empty_bytes == allocator.pool_bytes
