"""What Mooncake's codes mean for an object, with words that a person can act on."""

from __future__ import annotations

from lmcache_core.errors import TierError
from lmcache_core.tiers.contract import Outcome, Result
from lmcache_mooncake.messages import BUSY, FULL

_MEANINGS = {
    -101: "no node has lent memory to the store",
    -103: "the master does not know this client (it may have restarted)",
    -707: "the lease ended before all bytes had come",
    -800: "a node did not send or take the bytes",
    -900: "the master does not answer",
    -901: "the master does not answer in time",
    -1010: "the master serves nobody at present",
}
_CURES = {
    -101: "start a node: mooncake_client --global_segment_size=…",
    -800: "see whether every node of the store is reachable from here; a dead one is forgotten after the master's "
    "client_ttl",
    -900: "see whether mooncake_master runs, and l2.NAME.master names it",
    -901: "see whether mooncake_master runs, and l2.NAME.master names it",
}
_FOR_GOOD = frozenset({-400, -600, -601, -1011})
_FULL_CURE = "start more nodes, or lower eviction_high_watermark_ratio of the master"


def refusal(tier: str, what: str, code: int) -> Outcome:
    """What a code that is no ordinary answer means for an object."""
    if code == FULL:
        error = TierError(f"tier {tier!r} is full, and the master has not evicted yet", cure=_FULL_CURE)
        return Outcome.of(error, Result.FULL)
    if code == BUSY:
        error = TierError(f"tier {tier!r} cannot {what}: another client stores or deletes the same key")
        return Outcome.of(error, Result.THROTTLED)
    meaning = _MEANINGS.get(code, "see mooncake's log")
    cure = _CURES.get(code, "").replace("l2.NAME", f"l2.{tier}")
    message = f"tier {tier!r} cannot {what}: Mooncake answered {code}: {meaning}"
    return Outcome.of(TierError(message, cure=cure, retryable=code not in _FOR_GOOD))
