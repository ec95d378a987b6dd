"""Pairs in ABBA order and their bootstrap, against what is known of both."""

from __future__ import annotations

from math import comb

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmcache_bench.pairs import OUTSIDE, Interval, abba, interval, ratios

RATIOS = st.lists(st.floats(0.5, 2.0), min_size=1, max_size=40)


def test_the_order_turns_round_from_pair_to_pair() -> None:
    ways = ["AB"[second] for pair in abba(4) for second in pair]
    assert "".join(ways) == "ABBAABBA"


def test_what_grows_with_time_falls_on_both_ways() -> None:
    grown = iter(range(100, 1000))
    found = ratios(lambda second: float(next(grown)), 2)  # each measurement takes longer than the last one
    assert found == [101 / 100, 102 / 103]


def test_a_ratio_is_of_the_second_way_to_the_first() -> None:
    assert ratios(lambda second: 3.0 if second else 2.0, 5) == [1.5] * 5


@pytest.mark.parametrize("count", [9, 21, 81])
def test_the_interval_is_the_one_that_the_binomial_gives(count: int) -> None:
    """The median of a draw is at most the k-th of n values if more than half of its n items are among the first k."""

    def at_most(k: int) -> float:
        p = k / count
        return sum(comb(count, hits) * p**hits * (1 - p) ** (count - hits) for hits in range(count // 2 + 1, count + 1))

    low = next(k for k in range(1, count + 1) if at_most(k) > OUTSIDE / 2)
    high = next(k for k in range(1, count + 1) if at_most(k) >= 1 - OUTSIDE / 2)
    found = interval([float(number) for number in range(1, count + 1)])
    assert abs(found.low - low) <= 1
    assert abs(found.high - high) <= 1
    assert found.middle == (count + 1) / 2


@given(RATIOS, st.randoms())
def test_order_does_not_matter_and_the_median_lies_inside(values: list[float], chooser: object) -> None:
    found = interval(values, draws=200)
    shuffled = list(values)
    chooser.shuffle(shuffled)  # type: ignore[attr-defined]
    assert interval(shuffled, draws=200) == found
    assert min(values) <= found.low <= found.middle <= found.high <= max(values)


@given(RATIOS)
def test_a_unit_changes_the_figures_and_not_the_interval(values: list[float]) -> None:
    found, doubled = interval(values, draws=200), interval([2 * each for each in values], draws=200)
    assert doubled == Interval(2 * found.low, 2 * found.middle, 2 * found.high)


def test_equal_runs_have_no_width_and_none_are_refused() -> None:
    assert interval([1.25] * 7) == (1.25, 1.25, 1.25)
    with pytest.raises(ValueError, match="no pairs"):
        interval([])


@pytest.mark.parametrize(
    ("same", "noisy"),
    [((0.99, 1.0, 1.015), False), ((0.99, 1.0, 1.021), True), ((0.97, 1.0, 1.001), True), ((1.03, 1.04, 1.05), True)],
)
def test_a_way_that_differs_from_itself_says_too_noisy(same: tuple[float, float, float], noisy: bool) -> None:
    assert Interval(*same).too_noisy is noisy
