"""The exceptions of lmcache-core.

An ordinary result (a miss, a full pool, a throttled tier) is a value and not an exception. An exception means a broken
promise; its message says what happened, to which thing, and what to do next.
"""

from __future__ import annotations

from enum import StrEnum
from typing import ClassVar

from lmcache_core.limits import ERROR_CHARS_MAX

__all__ = [
    "CacheError",
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


def printable(text: str) -> str:
    """One line that steers no terminal and forges no other line, from a text that others wrote: a service's message, an
    exception of a plugin. What is not printable (control characters, ends of lines, marks of the writing direction) is
    a question mark."""
    return text if text.isprintable() else "".join(letter if letter.isprintable() else "?" for letter in text)


def excerpt(text: str) -> str:
    """As `printable`, and no longer than an error may be: a service may answer with a megabyte."""
    return printable(text if len(text) <= ERROR_CHARS_MAX else text[: ERROR_CHARS_MAX - 1] + "…")


class Retry(StrEnum):
    """Whether the same call may succeed later."""

    NEVER = "never"  # the call itself is wrong
    LATER = "later"  # a temporary condition: try again after a pause
    RECONNECT = "reconnect"  # the session is gone: a new one may succeed


class CacheError(Exception):
    """Base of everything that this library raises. `code` is stable and travels on the wire. `cure`: the last part of
    the message, which says what to do, if it was given separately."""

    code: ClassVar[str] = "ERROR"
    retry: ClassVar[Retry] = Retry.NEVER
    cure: str = ""

    def __init__(self, message: str = "", *, cure: str = "") -> None:
        super().__init__(f"{message}: {cure}" if cure else message)
        if cure:
            self.cure = cure

    @property
    def happened(self) -> str:
        """The message without the cure."""
        return str(self).removesuffix(f": {self.cure}")


class UsageError(CacheError, ValueError):
    """The caller's arguments are wrong: a key of the wrong length, a tensor of the wrong dtype, …"""

    code = "USAGE"


class UnknownNamespaceError(UsageError):
    """The session has not registered the namespace, or registered it so long ago that it was forgotten."""

    code = "NAMESPACE"


class StaleRegionError(UsageError):
    """The memory of registered pages was given back since, as by an engine that sleeps: register them anew."""

    code = "STALE_REGION"


class SettingsError(CacheError, ValueError):
    """The settings are invalid, or do not describe a server that can be built."""

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
    """The segment's content is not what was expected; the message names both."""

    code = "POOL_MISMATCH"


class NotEnoughMemoryError(PoolError):
    """There is not enough memory; the message has the figures and the cure."""

    code = "NOT_ENOUGH_MEMORY"


class LeaseExpiredError(CacheError):
    """The lease id is stale: it expired, was settled long ago, or never was this session's."""

    code = "LEASE_EXPIRED"


class NotAttachedError(CacheError):
    """The session has not proved that it maps the pool, so it gets no slots."""

    code = "NOT_ATTACHED"


class ProtocolError(CacheError):
    """The peer sent something that the protocol does not allow."""

    code = "PROTOCOL"


class VersionError(ProtocolError):
    """The two sides speak no common version; the message names both."""

    code = "VERSION"


class LimitError(CacheError):
    """A named limit of `lmcache_core.limits` was reached."""

    code = "LIMIT"


class DisconnectedError(CacheError):
    """The server is not reachable, or went away during the call. The client reconnects by itself."""

    code = "DISCONNECTED"
    retry = Retry.RECONNECT


class ForgottenError(DisconnectedError):
    """The server answers but has ended our session, to make room or after a long silence. It has not carried out the
    request, which may be sent again in a new session. The client raises this; on the wire it is `DISCONNECTED`."""

    code = "FORGOTTEN"


class RowTakenError(PoolError, DisconnectedError):
    """The worker row that a server gave us belongs to another worker by now: a new server has assigned it again. The
    next connection gets another row."""

    code = "ROW_TAKEN"


class UntrustedError(DisconnectedError):
    """The other end, or a step on the path to it, belongs to a user that we do not trust; nothing was read from it or
    sent to it. The message names the owner and the cure."""

    code = "UNTRUSTED"


class TierError(CacheError):
    """A tier as a whole failed, not one of its objects. `retryable` tells the lane whether to try again."""

    code = "TIER"
    retry = Retry.LATER

    def __init__(self, message: str, *, cure: str = "", retryable: bool = True) -> None:
        super().__init__(
            excerpt(message), cure=excerpt(cure)
        )  # the text of a medium's error enters here, of every adapter
        self.retryable = retryable


class DamagedObjectError(CacheError):
    """The bytes that a tier returned are not the object that was stored."""

    code = "DAMAGED"


class MismatchedObjectError(DamagedObjectError):
    """An intact object that this server cannot use: another layout, codec chain or key. It stays on the tier, because
    the server that stored it can read it, and so can this server with other settings."""

    code = "MISMATCHED"


def _tree(root: type[CacheError]) -> dict[str, type[CacheError]]:
    found = {root.code: root}
    for sub in root.__subclasses__():
        found.update(_tree(sub))
    return found


def by_code(code: str) -> type[CacheError]:
    """The class for a code from the wire; CacheError for a code that this version does not know."""
    return _tree(CacheError).get(code, CacheError)


class InvariantError(RuntimeError):
    """An invariant that memory safety depends on is violated: a bug in lmcache-core. The step that found it has changed
    nothing."""
