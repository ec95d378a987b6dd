"""What a server's errors mean for an object, with words that a person can act on."""

from __future__ import annotations

from lmcache_core.errors import TierError
from lmcache_core.tiers.contract import Outcome, Result
from lmcache_redis.transport.commands import Broken, Refusal, Reply

_CURES = {
    "NOPERM": "give the user the rights ~PREFIX* +get +getrange +set +touch +unlink +strlen +scan +object +dbsize "
    "+info +ping (in a cluster also +cluster|slots +asking)",
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


def explain(tier: str, what: str, reply: Reply) -> Outcome:
    """What an unexpected reply means for an object."""
    message, cure, result, retryable = f"tier {tier!r} cannot {what}", "", Result.FAILED, False
    if isinstance(reply, Broken):
        message, cure, retryable = f"{message}: {reply.text}", reply.cure, reply.retryable
    elif not isinstance(reply, Refusal):
        message = f"{message}: the server answered {str(reply)[:80]!r}"
    elif reply.code == "OOM":
        message, cure, result = f"tier {tier!r} is full and does not evict by itself", _FULL, Result.FULL
    else:
        message = f"{message}: the server answered {reply.code} {reply.text[:160]}"
        cure, retryable = _CURES.get(reply.code, _OTHERWISE), reply.code in _PASSING
    return Outcome.of(TierError(message, cure=cure, retryable=retryable), result)
