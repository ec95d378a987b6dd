"""What a server's errors mean for an object, with words that a person can act on."""

from __future__ import annotations

from lmcache_core.tiers.contract import Result
from lmcache_redis.transport.commands import Broken, Refusal, Reply

_CURES = {
    "NOPERM": "give the user the rights ~PREFIX* +get +set +touch +unlink +strlen +scan +object +dbsize +info +ping "
    "(in a cluster also +cluster|slots +asking)",
    "NOAUTH": "set username and password",
    "WRONGPASS": "set username and password",
    "MISCONF": "the server cannot save to its disk and refuses writes: correct that, or turn saving off",
    "READONLY": "the server is a replica: name its primary, or use mode sentinel or cluster",
    "CLUSTERDOWN": "some slots have no primary: look at `redis-cli cluster info`",
    "LOADING": "the server is reading its data from disk",
    "MOVED": 'the server is a node of a cluster: set mode = "cluster"',
}
NO_CONNECTION_CURES = {
    "certificate": "set tls_ca to the CA that signed it",
    "user": "set username and password",
    "rights": "give it +hello +select",
    "protocol": "a server before Redis 6 needs protocol = 2",
}
_PASSING = frozenset({"LOADING", "CLUSTERDOWN", "READONLY", "MASTERDOWN", "TRYAGAIN", "MOVED", "ASK", "BUSY"})


_OTHERWISE = "look at the server's log"
_FULL = "set maxmemory-policy to allkeys-lru, or give the server more memory"


def parted(text: str, otherwise: str) -> tuple[str, str]:
    """The text of a failure, and the cure that it ends with; `otherwise` if none is known."""
    for cure in (*_CURES.values(), _FULL, _OTHERWISE, *NO_CONNECTION_CURES.values()):
        if text.endswith(f": {cure}"):
            return text.removesuffix(f": {cure}"), cure
    return text, otherwise


def explain(tier: str, what: str, reply: Reply) -> tuple[Result, str, bool]:
    """Result, message, and whether a retry may help, for an unexpected reply."""
    if isinstance(reply, Broken):
        return Result.FAILED, f"tier {tier!r} cannot {what}: {reply.text}", reply.retryable
    if not isinstance(reply, Refusal):
        return Result.FAILED, f"tier {tier!r} cannot {what}: the server answered {str(reply)[:80]!r}", False
    if reply.code == "OOM":
        return Result.FULL, f"tier {tier!r} is full and does not evict by itself: {_FULL}", False
    cure = _CURES.get(reply.code, _OTHERWISE)
    text = f"tier {tier!r} cannot {what}: the server answered {reply.code} {reply.text[:160]}: {cure}"
    return Result.FAILED, text, reply.code in _PASSING
