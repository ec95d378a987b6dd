"""A lookup in the tiers: the request, which of the found keys are worth loading, and the job that answers it."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from lmcache_core.protocol.requests import ORDINARY_LOOKUP, LookupOptions
from lmcache_core.tiers.flow.job_states import JOB_TRANSITIONS, JobEvent, JobState
from lmcache_core.tiers.l1 import TierReason


class Wanted(StrEnum):
    """Which of a request's keys are worth loading."""

    PREFIX = "prefix"  # the contiguous prefix; if the first key is nowhere, nothing is worth loading
    SPARSE = "sparse"  # each position counts by itself
    WINDOW = "window"  # the last `LookupOptions.window` keys of the longest run that ends in them (sliding attention)


def wanted_by(options: LookupOptions) -> Wanted:
    """Which keys a lookup with these options wants."""
    if options.window:
        return Wanted.WINDOW
    return Wanted.PREFIX if options.prefix else Wanted.SPARSE


class TierLookup(NamedTuple):
    """One request. `keys` are all keys in order; `missing` are the positions that the L1 lacks, ascending; `deadline`
    is in monotonic seconds."""

    namespace: int
    layout_id: int
    keys: Sequence[bytes]
    missing: Sequence[int]
    deadline: float
    options: LookupOptions = ORDINARY_LOOKUP
    trace: Hashable | None = None  # passed to a `TierObserver` with its loads; None: not traced

    @property
    def wanted(self) -> Wanted:
        return wanted_by(self.options)


@dataclass(eq=False)
class Job:
    """One lookup and its progress, readable at any time. `on_done(job)` is called once, from `Tiering.step` or
    `Tiering.cancel`, never from inside `Tiering.lookup`. It is dropped then: the job and its callback would keep each
    other alive, and the server's collector does not scan old objects."""

    id: int
    request: TierLookup
    on_done: Callable[[Job], None] | None
    state: JobState = JobState.WAITING
    # Length of the prefix that will be served (all keys before it are in the L1 or are being loaded); with SPARSE and
    # WINDOW the number of keys. None until the tiers have answered; falls when a load fails.
    hits: int | None = None
    loaded: set[int] = field(default_factory=set)  # positions now in the L1 because of this job's load or another's
    came_from: dict[int, str] = field(default_factory=dict)  # for those that were loaded: the tier
    reasons: dict[int, TierReason] = field(default_factory=dict)  # position → why it was not served

    def move(self, event: JobEvent) -> None:
        """The only way to change the state. A step that is not in the table is a bug of the caller: `KeyError`."""
        self.state = JOB_TRANSITIONS[self.state, event]

    @property
    def ended(self) -> bool:
        return self.state in (JobState.DONE, JobState.CANCELLED)


class Selection(NamedTuple):
    """`positions` to load, ascending; `hits`: see `Job.hits`; `cut`: the first position that is not served, or the
    number of keys if all are."""

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
    end = window_end(count, request.options.window, nowhere)
    start = max(0, end - request.options.window)
    return Selection([position for position in request.missing if start <= position < end], end, end)


def window_end(count: int, window: int, nowhere: Sequence[int]) -> int:
    """The largest end such that the `window` positions before it (or all, if there are fewer) can be served."""
    end = count
    for position in reversed(nowhere):
        if end - position > window:
            return end
        end = position
    return end
