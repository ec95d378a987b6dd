"""Work that gives way: what it may take in the long run, in a time of the test's own."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmcache_core.cpu_share import SAVED_UP_S, CpuShare


class Time:
    now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def test_a_burst_goes_at_full_speed_and_then_the_debt_is_paid() -> None:
    time = Time()
    share = CpuShare(0.1, time)
    share.charge(0.1 * SAVED_UP_S)
    assert not share.rests
    share.charge(0.5)
    assert share.rests
    assert share.rests_until == pytest.approx(time.now_s + 5.0)
    time.now_s += 4.9
    assert share.rests
    time.now_s += 0.2
    assert not share.rests


@given(
    st.floats(0.01, 4.0),
    st.lists(st.tuples(st.floats(0.001, 3.0), st.floats(0.0, 20.0)), min_size=1, max_size=50),
)
def test_in_the_long_run_no_more_than_the_share_is_used(share: float, asked: list[tuple[float, float]]) -> None:
    """Whoever asks before each piece of work, and charges it after, overdraws by one piece at most."""
    time = Time()
    bucket, used_s, began_s = CpuShare(share, time), 0.0, time.now_s
    for cost_s, pause_s in asked:
        if not bucket.rests:
            assert used_s <= share * (SAVED_UP_S + time.now_s - began_s) + 1e-6
            bucket.charge(cost_s)
            used_s += cost_s
        time.now_s += pause_s
    assert bucket.used_s == pytest.approx(used_s)


def test_a_long_pause_saves_up_no_more_than_a_burst() -> None:
    time = Time()
    share = CpuShare(0.5, time)
    time.now_s += 1e6
    share.charge(0.5 * SAVED_UP_S + 0.1)
    assert share.rests


def test_a_larger_share_ends_a_rest_sooner_and_an_infinite_one_never_binds() -> None:
    time = Time()
    share = CpuShare(0.1, time)
    share.charge(0.1 * SAVED_UP_S + 1.0)
    share.share = 1.0
    assert share.rests_until == pytest.approx(time.now_s + 1.0)
    free = CpuShare(math.inf, time)
    for _ in range(3):
        free.charge(1e9)
        assert not free.rests
        time.now_s += 1.0
