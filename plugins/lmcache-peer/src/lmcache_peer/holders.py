"""Who has what: which peers are worth asking for a name. Two ways, of which a cluster uses one.

`ByDigests`: the filter of each node, pulled from the node itself; a question costs memory alone. `ByEntries`: an entry
for each key in Redis, which its owner writes and a lookup reads. An entry names the owner's boot, so it counts only
while that node's own entry in the directory does: with its lease.
"""

from __future__ import annotations

import struct
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence

from lmcache_core.tiers.contract import AdapterContext
from lmcache_peer.client import Peer
from lmcache_peer.digest import NAME_BYTES, place_of
from lmcache_peer.directory import redis_replies, redis_settings
from lmcache_peer.limits import DIRECTORY_CALL_S, ENTRIES_AT_ONCE, ENTRIES_ROUND_S, ENTRIES_TTL_S
from lmcache_peer.settings import ClusterSettings
from lmcache_redis.client import Client
from lmcache_redis.transport.commands import Command, simple

_BOOT = struct.Struct("<Q")


class Holders(ABC):
    """What a reader asks."""

    @abstractmethod
    def of(self, names: Sequence[bytes], peers: Sequence[Peer], deadline: float) -> list[list[Peer]]:
        """For each of these tier keys the peers that seem to have it. Raises `TierError` if that cannot be known."""

    def close(self) -> None:  # noqa: B027
        """Release connections."""


class ByDigests(Holders):
    """Asks nobody."""

    def of(self, names: Sequence[bytes], peers: Sequence[Peer], deadline: float) -> list[list[Peer]]:
        return [[each for each in peers if each.digest.may_have(place)] for place in map(place_of, names)]


class ByEntries(Holders):
    """One round trip to Redis for a batch of names."""

    def __init__(self, settings: ClusterSettings, tier: str) -> None:
        """Connects when it is first used. Raises `SettingsError`."""
        self._entries = KeyEntries(settings, tier)

    def of(self, names: Sequence[bytes], peers: Sequence[Peer], deadline: float) -> list[list[Peer]]:
        by_boot = {each.boot: each for each in peers}
        until = min(deadline, time.monotonic() + DIRECTORY_CALL_S)
        return [[by_boot[boot] for boot in boots if boot in by_boot] for boots in self._entries.boots(names, until)]

    def close(self) -> None:
        self._entries.close()


class KeyEntries:
    """A set of boots for each name, epochs left out. A set that nobody renews expires."""

    def __init__(self, settings: ClusterSettings, tier: str) -> None:
        self._client = Client(redis_settings(settings), AdapterContext(tier=tier))
        self._prefix = f"lmcache-peer:{settings.cluster}:has:".encode()

    def boots(self, names: Sequence[bytes], deadline: float) -> list[list[int]]:
        """Who has these. Raises `TierError` if Redis does not answer."""
        keys = [self._prefix + name[:NAME_BYTES] for name in names]
        replies = redis_replies(self._client, [simple(b"SMEMBERS", key, key=key) for key in keys], deadline)
        return [
            [_BOOT.unpack(each)[0] for each in reply if isinstance(each, bytes) and len(each) == _BOOT.size]
            if isinstance(reply, list | set)
            else []
            for reply in replies
        ]

    def add(self, names: Sequence[bytes], boot: int, deadline: float) -> None:
        """This boot has these, for some minutes from now."""
        expiry = b"%d" % int(ENTRIES_TTL_S)
        commands: list[Command] = []
        for name in names:
            key = self._prefix + name
            commands.append(simple(b"SADD", key, _BOOT.pack(boot), key=key))
            commands.append(simple(b"EXPIRE", key, expiry, key=key))
        redis_replies(self._client, commands, deadline)

    def remove(self, names: Sequence[bytes], boot: int, deadline: float) -> None:
        """It has them no more."""
        keys = [self._prefix + name for name in names]
        redis_replies(self._client, [simple(b"SREM", key, _BOOT.pack(boot), key=key) for key in keys], deadline)

    def still_knows(self, boot: int, deadline: float) -> bool:
        """Whether Redis has what it was told of this boot: False after it has lost its data, and the first time."""
        key = self._prefix + b"told:" + _BOOT.pack(boot)
        expiry = b"%d" % int(ENTRIES_TTL_S)
        (before,) = redis_replies(self._client, [Command(key, (b"SET", key, b"1", b"EX", expiry, b"GET"))], deadline)
        return before is not None

    def close(self) -> None:
        self._client.close()


class PublishedEntries:
    """A node's own entries: what has come and gone is told once a round, and all of it again before it expires.
    What is more than a round has time for waits for the next."""

    def __init__(self, settings: ClusterSettings, boot: int) -> None:
        self._entries, self._boot = KeyEntries(settings, "peer"), boot
        self._told: dict[bytes, float] = {}  # until when to tell it again, monotonic

    def renew(self, names: set[bytes]) -> bool:
        """This is what the index has now. False: the round's time was over, and the next one goes on with the rest.
        Raises `TierError` if Redis is away: so it does then."""
        now = time.monotonic()
        if not self._entries.still_knows(self._boot, now + DIRECTORY_CALL_S):
            self._told.clear()
        gone = [name for name in self._told if name not in names]
        wanted = [name for name in names if self._told.get(name, 0.0) <= now]
        exchanges = [(self._take_back, gone[at : at + ENTRIES_AT_ONCE]) for at in range(0, len(gone), ENTRIES_AT_ONCE)]
        exchanges += [(self._tell, wanted[at : at + ENTRIES_AT_ONCE]) for at in range(0, len(wanted), ENTRIES_AT_ONCE)]
        for number, (exchange, some) in enumerate(exchanges):
            if number and time.monotonic() >= now + ENTRIES_ROUND_S:  # one at least, however long the rest took
                return False
            exchange(some)
        return True

    def _take_back(self, names: list[bytes]) -> None:
        self._entries.remove(names, self._boot, time.monotonic() + DIRECTORY_CALL_S)
        for name in names:
            del self._told[name]

    def _tell(self, names: list[bytes]) -> None:
        now = time.monotonic()
        self._entries.add(names, self._boot, now + DIRECTORY_CALL_S)
        self._told.update(dict.fromkeys(names, now + ENTRIES_TTL_S / 3))

    def close(self) -> None:
        """What is left counts no more once the node's own entry is gone, and expires."""
        self._entries.close()


def holders_of(settings: ClusterSettings, tier: str) -> Holders:
    """The way that these settings choose."""
    return ByEntries(settings, tier) if settings.who_has == "entries" else ByDigests()
