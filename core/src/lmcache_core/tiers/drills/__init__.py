"""Wrappers around a real tier, named in its settings: they show how a server behaves when the tier is in trouble."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Sequence
from functools import partial

from lmcache_core.errors import UsageError
from lmcache_core.tiers.contract import L2Adapter

log = logging.getLogger(__name__)

CALLS_KEPT = 1000  # of a recorded tier
_CURE = "use latency:SECONDS[,BYTES a second], faults:RULE[; RULE …], or record"
_LATENCY = re.compile(r"\s*([0-9.]+)\s*(?:,\s*([0-9]+)\s*)?")
_Wrap = Callable[[str, L2Adapter], L2Adapter]


def parse_wrap(text: str) -> _Wrap:
    """The wrapper for one word of `wrap`. Raises `UsageError` that says what is wrong with it."""
    kind, colon, rest = text.partition(":")
    match kind.strip():
        case "latency":
            found = _LATENCY.fullmatch(rest)
            try:
                seconds = float(found[1]) if found else -1.0
            except ValueError:
                seconds = -1.0
            if found is None or seconds < 0:
                raise UsageError(f"wrap {text!r}: {_CURE}, as in latency:0.02 or latency:0.02,100000000")
            return partial(_slow, seconds, None if found[2] is None else int(found[2]) or None)
        case "faults":
            from lmcache_core.tiers.drills.faults import FaultRule

            rules = [FaultRule.parse(rule.strip()) for rule in rest.split(";") if rule.strip()]
            if not rules:
                raise UsageError(f"wrap {text!r} has no rule: {_CURE}, as in faults:load error rate=0.1")
            return partial(_faulty, rules)
        case "record" if not colon:
            return _recorded
    raise UsageError(f"wrap {text!r} is not known: {_CURE}")


def wrapped(tier: str, adapter: L2Adapter, wrap: Sequence[str]) -> L2Adapter:
    """The adapter in its wrappers: the first word is the outermost one, which the server calls."""
    if wrap:
        log.warning("tier %s is wrapped for a drill: %s", tier, " | ".join(wrap))
    for text in reversed(wrap):
        adapter = parse_wrap(text)(tier, adapter)
    return adapter


def _slow(seconds: float, bandwidth_bytes_s: int | None, tier: str, adapter: L2Adapter) -> L2Adapter:
    from lmcache_core.tiers.drills.latency import LatencyAdapter

    return LatencyAdapter(adapter, latency_s=seconds, bandwidth_bytes_s=bandwidth_bytes_s)


def _faulty(rules: Sequence[object], tier: str, adapter: L2Adapter) -> L2Adapter:
    from lmcache_core.tiers.drills.faults import FaultScript, FaultyAdapter

    return FaultyAdapter(adapter, FaultScript([str(rule) for rule in rules]))


def _recorded(tier: str, adapter: L2Adapter) -> L2Adapter:
    from lmcache_core.tiers.drills.recording import Recorded, RecordingAdapter

    def tell(call: Recorded) -> None:
        answers = "" if call.answers is None else f", {len(call.answers)} answers"
        ended = answers if call.error is None else f", raised {call.error!r}"
        log.info("tier %s: %s of %d keys%s", tier, call.operation, len(call.keys), ended)

    return RecordingAdapter(adapter, calls_max=CALLS_KEPT, tell=tell)
