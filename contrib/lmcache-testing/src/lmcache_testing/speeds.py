"""How thorough the kit is."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import NamedTuple

QUICK_S = 1.0  # of processor time: a local medium finishes in a quarter of it


class Kit(NamedTuple):
    """`--kit`, `--kit-seconds` and `--kit-seed`. Each speed includes `quick`, and does more."""

    speed: str = "quick"
    seconds: float = 60.0
    seed: int = 0

    @property
    def quick(self) -> bool:
        return self.speed == "quick"


class Allowance:
    """How long a repeating test may run at the quick speed. It counts processor time of this process and its children,
    so that a busy machine tests no less and waiting for a slow medium is free. The other speeds have no limit."""

    def __init__(self, kit: Kit, seconds: float = QUICK_S) -> None:
        self._end_s = _used_s() + seconds if kit.quick else None

    def left(self) -> bool:
        """Whether to go on."""
        return self._end_s is None or _used_s() < self._end_s


def _used_s() -> float:
    return sum(os.times()[:4])


def spread(count: int) -> Iterator[int]:
    """0 to `count` - 1, far apart first: wherever the loop stops, the whole range was sampled."""
    step = 1 << max(0, count - 1).bit_length()
    if count:
        yield 0
    while step > 1:
        yield from range(step // 2, count, step)
        step //= 2
