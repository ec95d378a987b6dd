"""Pins end when they should, and to pin again costs nothing."""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest
from kernel_words import NS, WORKER, keys, store

from lmcache_core.errors import UsageError
from lmcache_core.kernel import Grant, Kernel
from lmcache_core.kernel.objects import Incarnation


def pin(kernel: Kernel, numbers: range, ttl_s: float, now: float) -> None:
    assert set(kernel.pin(WORKER, NS, keys(*numbers), ttl_s, now)) == {Grant.GRANTED}


def pinned(kernel: Kernel, now: float) -> int:
    while (due := kernel.next_deadline()) is not None and due <= now:  # in bounded steps
        kernel.expire(now)
    return kernel.usage().pinned_objects


def listed() -> int:
    """Objects in lists, whoever has them: other tests may have left some."""
    gc.collect()
    lists = [each for each in gc.get_objects() if type(each) is list and each and type(each[0]) is Incarnation]
    return sum(map(len, lists))


def test_a_pin_that_was_made_to_last_longer_ends_then_and_not_before(kernel: Kernel) -> None:
    store(kernel, 0, 1, 2)
    pin(kernel, range(3), 10, now=0)
    pin(kernel, range(1), 30, now=5)
    pin(kernel, range(1, 2), 1, now=6)  # shorter than what it has: nothing changes
    assert pinned(kernel, 9) == 3
    assert pinned(kernel, 10) == 1
    assert pinned(kernel, 34) == 1
    assert pinned(kernel, 35) == 0


def test_to_pin_the_same_again_and_again_keeps_no_list_of_each_time(make_kernel: Callable[..., Kernel]) -> None:
    kernel = make_kernel(8, pinned_fraction_max=1.0)
    numbers = range(8)
    store(kernel, *numbers)
    before = listed()
    for moment in range(2000):
        pin(kernel, numbers, 3600, now=moment / 100)
        if moment % 3 == 0:
            kernel.unpin(WORKER, NS, keys(*numbers[:4]), moment / 100)
    assert listed() < before + 10_000
    pin(kernel, numbers, 3600, now=20)
    assert pinned(kernel, 3619) == 8
    assert pinned(kernel, 3620) == 0


@pytest.mark.parametrize("ttl_s", [0.0, -1.0, float("nan"), float("inf")])
def test_every_pin_ends(kernel: Kernel, ttl_s: float) -> None:
    store(kernel, 1)
    with pytest.raises(UsageError, match="give a positive ttl_s, after which it ends"):
        kernel.pin(WORKER, NS, keys(1), ttl_s, 0.0)
