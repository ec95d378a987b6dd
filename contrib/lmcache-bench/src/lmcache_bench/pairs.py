"""Small differences on a noisy machine: two variants in ABBA order, and the uncertainty of the median of their ratios.
Medians of two separate series differ by some per cent even for equal variants. Consecutive measurements see the same
state of the machine, so each pair gives one ratio; the order alternates from pair to pair, so that trends affect both.
The interval is a bootstrap's: the pairs are drawn again, with replacement, many times. The machine's own noise is
measured in the same way, by pairs of a variant with itself.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from statistics import median
from typing import NamedTuple

DRAWS = 4000
OUTSIDE = 0.05  # of the draws, half of them on each side
NOISE_MAX = 1.02  # for a variant with itself


class Interval(NamedTuple):
    """The median of some ratios, and the interval that contains 95 % of the bootstrap's medians."""

    low: float
    middle: float
    high: float

    @property
    def too_noisy(self) -> bool:
        """For a variant with itself: whether noise alone moves the bound by more than a target can bear."""
        return max(self.high, 1 / self.low) > NOISE_MAX


def abba(pairs: int) -> Iterator[tuple[bool, bool]]:
    """For each pair, whether its first and its second measurement are of the second variant: A B, B A, A B, …"""
    for number in range(pairs):
        yield (False, True) if number % 2 == 0 else (True, False)


def ratios(measure: Callable[[bool], float], pairs: int) -> list[float]:
    """`measure(True)` ÷ `measure(False)` of each pair, in seconds or any other unit."""
    found = []
    for order in abba(pairs):
        took = {second: measure(second) for second in order}
        found.append(took[True] / took[False])
    return found


def interval(values: Sequence[float], draws: int = DRAWS) -> Interval:
    """Of at least one ratio. The same values in any order give the same interval."""
    if not values:
        raise ValueError("no pairs were measured")
    known, chooser = sorted(values), random.Random(len(values))
    medians = sorted(median(chooser.choices(known, k=len(known))) for _ in range(draws))
    out = int(draws * OUTSIDE / 2)
    return Interval(medians[out], median(known), medians[draws - 1 - out])
