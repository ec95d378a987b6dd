"""What `wrap` in the settings of a tier names: `latency`, `faults` and `record`."""

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
Wrap = Callable[[str, L2Adapter], L2Adapter]


def latency(text: str | None) -> Wrap:
    """`latency:SECONDS[,BYTES]`. Raises `UsageError` that says what is wrong."""
    found = _LATENCY.fullmatch(text or "")
    try:
        seconds = float(found[1]) if found else -1.0
    except ValueError:
        seconds = -1.0
    if found is None or seconds < 0:
        raise UsageError(f"wrap {_written('latency', text)}: {_CURE}, as in latency:0.02 or latency:0.02,100000000")
    return partial(_slow, seconds, None if found[2] is None else int(found[2]) or None)


def faults(text: str | None) -> Wrap:
    """`faults:RULE; RULE`. Raises `UsageError` that says what is wrong."""
    from lmcache_mock.drills.faults import FaultRule

    rules = [FaultRule.parse(rule.strip()) for rule in (text or "").split(";") if rule.strip()]
    if not rules:
        raise UsageError(f"wrap {_written('faults', text)} has no rule: {_CURE}, as in faults:load error rate=0.1")
    return partial(_faulty, rules)


def record(text: str | None) -> Wrap:
    """`record`. Raises `UsageError` if something follows."""
    if text is not None:
        raise UsageError(f"wrap {_written('record', text)} is not known: {_CURE}")
    return _recorded


def _written(kind: str, text: str | None) -> str:
    return repr(kind if text is None else f"{kind}:{text}")


def _slow(seconds: float, bandwidth_bytes_s: int | None, tier: str, adapter: L2Adapter) -> L2Adapter:
    from lmcache_mock.drills.latency import LatencyAdapter

    return LatencyAdapter(adapter, latency_s=seconds, bandwidth_bytes_s=bandwidth_bytes_s)


def _faulty(rules: Sequence[object], tier: str, adapter: L2Adapter) -> L2Adapter:
    from lmcache_mock.drills.faults import FaultScript, FaultyAdapter

    return FaultyAdapter(adapter, FaultScript([str(rule) for rule in rules]))


def _recorded(tier: str, adapter: L2Adapter) -> L2Adapter:
    from lmcache_mock.drills.recording import Recorded, RecordingAdapter

    def tell(call: Recorded) -> None:
        answers = "" if call.answers is None else f", {len(call.answers)} answers"
        ended = answers if call.error is None else f", raised {call.error!r}"
        log.info("tier %s: %s of %d keys%s", tier, call.operation, len(call.keys), ended)

    return RecordingAdapter(adapter, calls_max=CALLS_KEPT, tell=tell)
