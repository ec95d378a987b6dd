"""The exceptions of lmcache-core.

An ordinary result (a miss, a full pool, a throttled tier) is a value and never stands here. What stands
here is a broken promise, and every message says what happened, to which thing, and what to do next.
"""

from __future__ import annotations

from enum import StrEnum
from typing import ClassVar

__all__ = [
    "CacheError",
    "ClearedError",
    "DamagedObjectError",
    "DisconnectedError",
    "ForgottenError",
    "LeaseExpiredError",
    "LimitError",
    "MismatchedObjectError",
    "NotAttachedError",
    "NotEnoughMemoryError",
    "PluginError",
    "PoolBusyError",
    "PoolError",
    "PoolMismatchError",
    "ProtocolError",
    "Retry",
    "RowTakenError",
    "SettingsError",
    "StaleRegionError",
    "TierError",
    "UnknownNamespaceError",
    "UntrustedError",
    "UsageError",
    "VersionError",
]


class Retry(StrEnum):
    """Whether the same call may succeed later."""

    NEVER = "never"  # the call itself is wrong
    LATER = "later"  # the world was wrong for a moment: try again after a pause
    RECONNECT = "reconnect"  # the session is gone: a new one may try


class CacheError(Exception):
    """Base of everything this library raises. `code` is stable and travels on the wire. `cure`: the end of the message
    that says what to do, where it was given by itself."""

    code: ClassVar[str] = "ERROR"
    retry: ClassVar[Retry] = Retry.NEVER
    cure: str = ""

    def __init__(self, message: str = "", *, cure: str = "") -> None:
        super().__init__(f"{message}: {cure}" if cure else message)
        if cure:
            self.cure = cure


class UsageError(CacheError, ValueError):
    """The caller's arguments are wrong: a key of the wrong length, a tensor of the wrong dtype, …"""

    code = "USAGE"


class UnknownNamespaceError(UsageError):
    """The session has not registered the namespace, or so long ago that it is forgotten."""

    code = "NAMESPACE"


class StaleRegionError(UsageError):
    """The memory of registered pages was given back since, as by an engine that sleeps: register them anew."""

    code = "STALE_REGION"


class SettingsError(CacheError, ValueError):
    """The settings do not say a thing that can be built."""

    code = "SETTINGS"


class PluginError(CacheError):
    """A plugin is missing, broken or refused. The message names plugin, distribution and version."""

    code = "PLUGIN"


class PoolError(CacheError):
    """The shared-memory pool cannot be created, attached or used."""

    code = "POOL"


class PoolBusyError(PoolError):
    """A living server owns the pool of this name."""

    code = "POOL_BUSY"


class PoolMismatchError(PoolError):
    """What was found in the segment differs from what was expected; the message names both."""

    code = "POOL_MISMATCH"


class NotEnoughMemoryError(PoolError):
    """The memory asked for is not there; the message has the figures and the cure."""

    code = "NOT_ENOUGH_MEMORY"


class LeaseExpiredError(CacheError):
    """The lease id is stale: it expired, was settled long ago, or never was this session's."""

    code = "LEASE_EXPIRED"


class ClearedError(CacheError):
    """A `clear` ended the lease before it was committed; nothing of it became visible."""

    code = "CLEARED"


class NotAttachedError(CacheError):
    """The session has not shown that it maps the pool, so it is given no slots."""

    code = "NOT_ATTACHED"


class ProtocolError(CacheError):
    """The peer sent what the protocol does not allow."""

    code = "PROTOCOL"


class VersionError(ProtocolError):
    """The two sides speak no common version; the message names both."""

    code = "VERSION"


class LimitError(CacheError):
    """A named limit of `lmcache_core.limits` was reached."""

    code = "LIMIT"


class DisconnectedError(CacheError):
    """The server is not there, or went away during the call. The client reconnects by itself."""

    code = "DISCONNECTED"
    retry = Retry.RECONNECT


class ForgottenError(DisconnectedError):
    """The server answers, and does not know our session any more: it ended it to make room, or after a long silence. It
    has done nothing of what was asked, which may be asked again in a new session. Made by the client: on the wire it is
    `DISCONNECTED`."""

    code = "FORGOTTEN"


class RowTakenError(PoolError, DisconnectedError):
    """The worker row that a server gave us is another worker's: a new server has given it away since. The next
    connection gets another."""

    code = "ROW_TAKEN"


class UntrustedError(DisconnectedError):
    """What is at the other end, or on the way there, belongs to somebody whom we do not trust; nothing was taken from
    it, and nothing said to it. The message names the owner and the cure."""

    code = "UNTRUSTED"


class TierError(CacheError):
    """A tier failed as a whole (not one of its objects). `retryable` tells the lane whether to try again."""

    code = "TIER"
    retry = Retry.LATER

    def __init__(self, message: str, *, retryable: bool = True) -> None:
        super().__init__(message)
        self.retryable = retryable


class DamagedObjectError(CacheError):
    """Bytes that came back from a tier are not the object that was stored."""

    code = "DAMAGED"


class MismatchedObjectError(DamagedObjectError):
    """An intact object that this server cannot use: another layout, codec chain or key. Left where it is: whoever
    stored it can read it, and so can this server under other settings."""

    code = "MISMATCHED"


def _tree(root: type[CacheError]) -> dict[str, type[CacheError]]:
    found = {root.code: root}
    for sub in root.__subclasses__():
        found.update(_tree(sub))
    return found


def by_code(code: str) -> type[CacheError]:
    """The class for a code that came over the wire; CacheError for one this version does not know."""
    return _tree(CacheError).get(code, CacheError)


class InvariantError(RuntimeError):
    """Something that the safety of memory rests on does not hold: a bug of ours, and no answer to anybody. The step
    that found it has changed nothing."""
