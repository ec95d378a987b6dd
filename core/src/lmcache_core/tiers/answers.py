"""What an adapter answered, checked where it enters: what does not keep the contract is the adapter's failure, in words
that name the call. Nothing behind this meets a result, a length or a text of another type than the contract's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from typing import Any

from lmcache_core.errors import TierError, excerpt
from lmcache_core.tiers.contract import Outcome, Result, ScanEntry, ScanPage

__all__ = ["ANY_RESULT", "DELETE_RESULTS", "LOAD_RESULTS", "STORE_RESULTS", "found_of", "outcomes_of", "page_of"]

ANY_RESULT = frozenset(Result)
STORE_RESULTS = frozenset({Result.DONE, Result.FULL, Result.THROTTLED, Result.FAILED})
LOAD_RESULTS = frozenset({Result.DONE, Result.MISS, Result.DAMAGED, Result.THROTTLED, Result.FAILED})
DELETE_RESULTS = frozenset({Result.DONE, Result.MISS, Result.THROTTLED, Result.FAILED})  # MISS: it was not there
_KEY_BYTES_MAX = 64
_BYTES_MAX = 1 << 63  # of a file


def outcomes_of(
    call: Callable[..., object], answer: Any, count: int, allowed: Collection[Result] = ANY_RESULT
) -> list[Outcome]:
    """One outcome for each of `count` items; those that are none are FAILED. Texts of services are one printable line
    from here on: they go into logs, answers and terminals."""
    if not isinstance(answer, Sequence) or isinstance(answer, Outcome):
        return [_broken(call, f"{type(answer).__name__} instead of a list of outcomes")] * count
    if len(answer) != count:
        return [_broken(call, f"{len(answer)} outcomes for {count} items")] * count
    return [_outcome_of(call, each, allowed) for each in answer]


def found_of(call: Callable[..., object], answer: Any, count: int) -> list[bool]:
    """Whether each of `count` keys is there. Raises `TierError` if the answer does not say so of each."""
    found = list(answer)
    if len(found) != count:
        raise TierError(_broken(call, f"{len(found)} answers for {count} keys").error, retryable=False)
    if not all(each in (True, False) for each in found):
        raise TierError(_broken(call, "something else than True or False for a key").error, retryable=False)
    return [bool(each) for each in found]


def page_of(call: Callable[..., object], answer: Any) -> ScanPage:
    """A page of a scan. Raises `TierError` if it is none."""
    if not isinstance(answer, ScanPage) or not (answer.cursor is None or isinstance(answer.cursor, str)):
        raise TierError(_broken(call, "no ScanPage with a cursor of text").error, retryable=False)
    entries = list(answer.entries)
    for entry in entries:
        if not _is_entry(entry):
            raise TierError(_broken(call, f"an entry that is none: {excerpt(repr(entry))}").error, retryable=False)
    return answer._replace(entries=entries)


def _outcome_of(call: Callable[..., object], outcome: Any, allowed: Collection[Result]) -> Outcome:
    if not isinstance(outcome, Outcome):
        return _broken(call, f"{type(outcome).__name__} instead of an Outcome")
    result, nbytes, error, version, cure = _untyped(outcome)
    if not isinstance(result, Result):  # a plain text equals it, and is not it
        return _broken(call, f"an Outcome whose result is of type {type(result).__name__}, and no Result")
    if not (isinstance(error, str) and isinstance(version, str) and isinstance(cure, str)):
        return _broken(call, "an Outcome whose error, version or cure is no text")
    if not isinstance(nbytes, int) or not 0 <= nbytes <= _BYTES_MAX:
        return _broken(call, "an Outcome whose nbytes is no number of bytes")
    if result not in allowed:
        return outcome._replace(
            result=Result.FAILED,
            error=excerpt(error) or _broken(call, f"{result}, which is no answer to it").error,
            cure=excerpt(cure),
        )
    return outcome._replace(error=excerpt(error), cure=excerpt(cure)) if error else outcome


def _untyped(outcome: Outcome) -> tuple[Any, ...]:
    return outcome.result, outcome.nbytes, outcome.error, outcome.version, outcome.cure


def _is_entry(entry: Any) -> bool:
    return (
        isinstance(entry, ScanEntry)
        and isinstance(entry.key, bytes)
        and 0 < len(entry.key) <= _KEY_BYTES_MAX
        and isinstance(entry.nbytes, int)
        and 0 <= entry.nbytes <= _BYTES_MAX
        and isinstance(entry.used_at_s, int | float)
        and math.isfinite(entry.used_at_s)
    )


def _broken(call: Callable[..., object], text: str) -> Outcome:
    name = getattr(call, "__name__", "").strip("_") or "a call"
    return Outcome(Result.FAILED, error=excerpt(f"the adapter does not keep its contract: {name} returned {text}"))
