"""Retries of a batch, all in one place.

A dozen lines of our own rather than a library: only failed items are retried, each outcome says whether it may be, and
the core's dependencies stay five.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Collection, Sequence
from threading import Event
from typing import TypeVar

from lmcache_core.errors import TierError
from lmcache_core.guard import guarded
from lmcache_core.limits import TIER_RETRIES_MAX, TIER_RETRY_PAUSE_S
from lmcache_core.tiers.answers import ANY_RESULT, found_of, outcomes_of
from lmcache_core.tiers.contract import Outcome, Result

Item = TypeVar("Item")


def retryable(outcome: Outcome) -> bool:
    return outcome.result is Result.THROTTLED or (outcome.result is Result.FAILED and outcome.retryable)


def _pause_s(attempt: int) -> float:
    return TIER_RETRY_PAUSE_S * float(2**attempt) * random.uniform(0.5, 1.5)


def call_batch(
    call: Callable[[Sequence[Item], float], Sequence[Outcome]],
    items: Sequence[Item],
    deadline: float,
    stop: Event,
    allowed: Collection[Result] = ANY_RESULT,
) -> list[Outcome]:
    """One outcome for each item, after the retries that are allowed. Blocks; ends by `deadline` if the adapter observes
    it, and at once when `stop` is set. An adapter that breaks its contract gets FAILED outcomes; `allowed` are the
    results that this call may have.
    """
    outcomes = [Outcome(Result.FAILED, error="not tried")] * len(items)
    todo = list(range(len(items)))
    attempt = 0
    while True:
        for position, outcome in zip(todo, _once(call, [items[i] for i in todo], deadline, allowed), strict=True):
            outcomes[position] = outcome
        todo = [position for position in todo if retryable(outcomes[position])]
        pause = _pause_s(attempt)
        if not todo or attempt >= TIER_RETRIES_MAX or time.monotonic() + pause >= deadline or stop.wait(pause):
            return outcomes
        attempt += 1


def _once(
    call: Callable[[Sequence[Item], float], Sequence[Outcome]],
    items: Sequence[Item],
    deadline: float,
    allowed: Collection[Result],
) -> Sequence[Outcome]:
    def failed(error: BaseException) -> Sequence[Outcome]:
        if isinstance(error, TierError):
            return [Outcome.of(error)] * len(items)
        return [Outcome(Result.FAILED, error=f"{type(error).__name__}: {error}")] * len(items)

    return outcomes_of(call, guarded(failed, call, items, deadline), len(items), allowed)


def ask_batch(
    call: Callable[[Sequence[bytes], float], Sequence[bool]], keys: Sequence[bytes], deadline: float, stop: Event
) -> list[bool]:
    """`exists` with retries. Raises `TierError` when the tier cannot answer."""
    attempt = 0
    while True:
        try:
            return found_of(call, call(keys, deadline), len(keys))
        except TierError as error:
            pause = _pause_s(attempt)
            late = time.monotonic() + pause >= deadline
            if not error.retryable or attempt >= TIER_RETRIES_MAX or late or stop.wait(pause):
                raise
            attempt += 1
