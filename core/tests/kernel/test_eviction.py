"""Room is made when it is needed, counted in bytes, in the policy's order."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from kernel_words import BIG, LAYOUT, MIB, NS, OTHER, WORKER, found, keys, names, offer, read, reasons, store, used

from lmcache_core.kernel import Grant, Kernel, KernelConfig, Reason
from lmcache_core.kernel.effects import Evicted
from lmcache_core.policies.lru import LruEviction
from lmcache_core.policies.noop import NoopEviction

HALF, QUARTER = 3, 4  # layouts of 512 and 256 KiB


@pytest.fixture
def small(make_kernel: Callable[..., Kernel]) -> Kernel:
    """Four units of 1 MiB."""
    kernel = make_kernel(slots=4)
    kernel.register_layout(HALF, MIB // 2)
    kernel.register_layout(QUARTER, MIB // 4)
    return kernel


def test_a_store_evicts_what_it_needs_then_and_there_and_not_more(small: Kernel) -> None:
    store(small, 1, 2, 3, 4)
    small.take_effects()
    store(small, 5, 6)
    assert [item.key for e in small.take_effects() if isinstance(e, Evicted) for item in e.objects] == keys(4, 3)
    assert found(small, 1, 2, 3, 4, 5, 6) == [True, True, False, False, True, True]
    assert reasons(small, 3) == [Reason.EVICTED]


def test_sustained_stores_over_capacity_lose_nothing_but_the_oldest(small: Kernel) -> None:
    for number in range(100):
        store(small, number)
    assert found(small, 95, 96, 97, 98, 99) == [False, True, True, True, True]
    assert small.usage().counters["evictions"] == 96


def test_a_suffix_goes_before_its_prefix(small: Kernel) -> None:
    store(small, 1, 2, 3, 4)
    small.finish_read(WORKER, read(small, 1, 2, 3, 4).lease_id, 0.0)
    store(small, 5)
    assert found(small, 1, 2, 3, 4) == [True, True, True, False]
    store(small, 6)
    assert found(small, 1, 2, 3) == [True, True, False]


def test_a_read_and_a_store_of_what_exists_are_uses(small: Kernel) -> None:
    for number in (1, 2, 3, 4):
        store(small, number)
    small.finish_read(WORKER, read(small, 1).lease_id, 0.0)
    assert names(offer(small, 2).statuses) == ["EXISTS"]
    store(small, 5, 6)
    assert found(small, 1, 2, 3, 4) == [True, True, False, False]


def test_what_is_held_written_or_just_said_to_exist_is_never_evicted(small: Kernel) -> None:
    store(small, 1, 2, 3)
    read(small, 1)
    offer(small, 4, session=OTHER)
    grants = offer(small, 2, 5, 6)
    assert names(grants.statuses) == ["EXISTS", "GRANTED", "FULL"]
    assert found(small, 1, 2, 3) == [True, True, False]


def test_the_noop_policy_answers_full_instead(make_kernel: Callable[..., Kernel]) -> None:
    kernel = make_kernel(slots=2, policy=NoopEviction())
    store(kernel, 1, 2)
    assert names(offer(kernel, 3).statuses) == ["FULL"]
    kernel.drop(NS, keys(1), 0.0, Reason.DROPPED)
    assert names(offer(kernel, 3).statuses) == ["GRANTED"]


def test_a_starving_class_takes_the_slab_of_the_coldest_whole(small: Kernel) -> None:
    store(small, 1, 2, layout=HALF)  # the coldest slab
    store(small, 3, 4, 5)
    small.finish_read(WORKER, read(small, 1).lease_id, 0.0)  # 1 is warm now, 2 is the coldest of all
    store(small, *range(10, 14), layout=QUARTER)
    assert found(small, 1, 2, 3, 4, 5) == [False, False, True, True, True]
    assert found(small, *range(10, 14)) == [True] * 4
    assert used(small) == 4


def test_a_slab_with_a_held_object_is_passed_over(small: Kernel) -> None:
    store(small, 1, 2, layout=HALF)
    store(small, 3, 4, 5)
    read(small, 1)
    store(small, *range(10, 14), layout=QUARTER)
    assert found(small, 1, 2, 5) == [True, True, False]


def test_a_large_object_gets_neighbouring_slabs(small: Kernel) -> None:
    store(small, 1, 2, 3, 4)
    read(small, 2)  # the second unit stays
    assert names(offer(small, 9, layout=BIG).statuses) == ["GRANTED"]
    assert found(small, 1, 2, 3, 4) == [True, True, False, False]


def test_nothing_is_evicted_for_a_run_that_ends_in_a_shorter_unit(make_kernel: Callable[..., Kernel]) -> None:
    kernel = make_kernel(pool_bytes=3 * MIB + MIB // 2)
    kernel.register_layout(HALF, MIB // 2)
    store(kernel, *range(7), layout=HALF)
    read(kernel, *range(2, 4))  # the middle unit stays: two MiB in a row are nowhere to be had
    assert names(offer(kernel, 9, layout=BIG).statuses) == ["FULL"]
    assert found(kernel, *range(7)) == [True] * 7


def test_own_objects_go_first_where_they_are_the_coldest(small: Kernel) -> None:
    store(small, 1, layout=HALF)
    store(small, 2, layout=HALF)
    store(small, 3, 4, 5)
    store(small, 6, 7, layout=HALF)
    assert found(small, 1, 2, 3, 4, 5, 6, 7) == [False, False, True, True, True, True, True]


def test_one_page_may_take_many_slabs(make_kernel: Callable[..., Kernel]) -> None:
    kernel = make_kernel(slots=64)
    kernel.register_layout(QUARTER, MIB // 4)
    store(kernel, *range(64))
    grants = offer(kernel, *range(100, 356), layout=QUARTER)
    assert set(grants.statuses) == {Grant.GRANTED}
    assert found(kernel, *range(64)) == [False] * 64


def test_full_is_answered_when_every_slab_is_held(small: Kernel) -> None:
    store(small, 1, 2, layout=HALF)
    store(small, 3, 4, 5)
    read(small, 1, 3, 4, 5)
    assert names(offer(small, 10, layout=QUARTER).statuses) == ["FULL"]
    assert found(small, 1, 2) == [True, True], "nothing was evicted in vain"


def test_the_watermark_keeps_headroom_in_bounded_steps(make_kernel: Callable[..., Kernel]) -> None:
    kernel = make_kernel(slots=10, watermark=0.8, evict_ratio=0.3)
    store(kernel, *range(8))
    assert kernel.trim(0.0) == 0
    store(kernel, 8)
    evicted = 0
    while step := kernel.trim(0.0):
        evicted += step
    assert evicted == 3
    assert used(kernel) == 6


def test_a_background_step_is_bounded_whatever_is_to_go() -> None:
    kernel = Kernel(KernelConfig(pool_bytes=16 * MIB, slab_bytes=MIB, evict_ratio=1.0), LruEviction(), epoch=1)
    kernel.add_memory(16 * MIB)
    kernel.register_layout(LAYOUT, 4096)
    kernel.open_session(WORKER, uid=1)
    kernel.attach_session(WORKER, 1)
    for first in range(0, 4096, 1024):
        store(kernel, *range(first, first + 1024))
    steps = []
    while step := kernel.trim(0.0):
        steps.append(step)
    assert sum(steps) == 4096
    assert max(steps) <= 512
    assert used(kernel) == 0


def test_a_trim_that_finds_everything_held_gives_up_and_tries_again_later(make_kernel: Callable[..., Kernel]) -> None:
    kernel = make_kernel(slots=4, watermark=0.5)
    store(kernel, 1, 2, 3, 4)
    lease = read(kernel, 1, 2, 3, 4).lease_id
    assert kernel.trim(0.0) == 0
    kernel.finish_read(WORKER, lease, 0.0)
    assert kernel.trim(0.0) > 0


def test_the_policy_learns_the_pools_size_once_before_the_first_insert(make_kernel: Callable[..., Kernel]) -> None:
    told: list[object] = []

    class Told(LruEviction):
        def resize(self, capacity_bytes: int) -> None:
            told.append(capacity_bytes)

        def insert(self, entries: object) -> None:
            told.append("insert")
            super().insert(entries)  # type: ignore[arg-type]

    kernel = make_kernel(slots=4, policy=Told())
    store(kernel, 1, 2)
    assert told == [4 * MIB, "insert"]
