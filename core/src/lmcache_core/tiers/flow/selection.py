"""Which of the keys that were found are worth loading. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from lmcache_core.tiers.flow.jobs import TierLookup, Wanted


class Selection(NamedTuple):
    """`positions` to load, ascending; `hits`: see `Job.hits`; `cut`: the first position that is not served
    (the number of keys, if all are)."""

    positions: Sequence[int]
    hits: int
    cut: int


def select(request: TierLookup, sources: Mapping[int, str]) -> Selection:
    """`sources`: missing position → the tier that has it."""
    count = len(request.keys)
    nowhere = [position for position in request.missing if position not in sources]
    if request.wanted is Wanted.SPARSE:
        loads = [position for position in request.missing if position in sources]
        return Selection(loads, count - len(nowhere), count)
    if request.wanted is Wanted.PREFIX:
        end = nowhere[0] if nowhere else count
        return Selection([position for position in request.missing if position < end], end, end)
    end = window_end(count, request.window, nowhere)
    start = max(0, end - request.window)
    return Selection([position for position in request.missing if start <= position < end], end, end)


def window_end(count: int, window: int, nowhere: Sequence[int]) -> int:
    """The largest end such that the `window` positions before it (or all, if there are fewer) can be served."""
    end = count
    for position in reversed(nowhere):
        if end - position > window:
            return end
        end = position
    return end
