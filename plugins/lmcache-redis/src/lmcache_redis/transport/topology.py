"""Which server owns a key: the one that was configured, the one Sentinels name, or the one a cluster's slots name."""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from redis import exceptions
from redis.crc import REDIS_CLUSTER_HASH_SLOTS, key_slot

from lmcache_core.tiers import budget
from lmcache_redis.settings import RedisSettings
from lmcache_redis.transport.commands import Broken, Command, Reply, simple
from lmcache_redis.transport.connections import Address, address_of, find_primary
from lmcache_redis.transport.exchange import broken_by

_SLOTS_BYTES_MAX = 4 << 20  # of some thousand ranges with their nodes
Ask = Callable[[Address, Sequence[Command], float], list[Reply]]


class Topology(ABC):
    """Shared by threads. `version` changes when a refresh has found something new."""

    fails_over = True  # another server may take over, so waiting can help

    def __init__(self) -> None:
        self.version = 0
        self._lock = threading.Lock()

    @abstractmethod
    def owner(self, key: bytes) -> Address | None:
        """The server of a key; None: no owner is known."""

    @abstractmethod
    def primaries(self) -> list[Address]:
        """All servers that own slots, in a stable order."""

    def refresh(self, deadline: float, seen: int, hint: Address | None = None) -> Broken | None:
        """Refresh, unless another thread has since `seen`. Returns why it failed."""
        try:
            with budget.within(deadline), budget.locked(self._lock):
                if self.version != seen:
                    return None
                broken = self._find(deadline, hint)
                if broken is None:
                    self.version += 1
                return broken
        except TimeoutError:
            return Broken("no answer in time", late=True)

    @abstractmethod
    def _find(self, deadline: float, hint: Address | None) -> Broken | None:
        """Called under the lock."""


class OneServer(Topology):
    """The server in the settings."""

    fails_over = False

    def __init__(self, settings: RedisSettings) -> None:
        super().__init__()
        path = settings.socket_path
        self._address = Address(path, 0) if path is not None else Address(*settings.server)
        self.version = 1

    def owner(self, key: bytes) -> Address:
        return self._address

    def primaries(self) -> list[Address]:
        return [self._address]

    def _find(self, deadline: float, hint: Address | None) -> None:
        return None


class BySentinel(Topology):
    """The primary of a service."""

    def __init__(self, settings: RedisSettings) -> None:
        super().__init__()
        self._settings = settings
        self._address: Address | None = None

    def owner(self, key: bytes) -> Address | None:
        return self._address

    def primaries(self) -> list[Address]:
        return [self._address] if self._address is not None else []

    def _find(self, deadline: float, hint: Address | None) -> Broken | None:
        left = deadline - time.monotonic()
        if left <= 0:
            return Broken("no answer in time", late=True)
        each = min(self._settings.connect_timeout_s, left / len(self._settings.nodes))
        try:
            self._address = find_primary(self._settings, each)
        except (exceptions.RedisError, OSError) as error:
            broken = broken_by(error)
            service = self._settings.sentinel_service
            text = f"no Sentinel names a primary of service {service!r}: {broken.text}"
            return broken._replace(text=text, late=False)
        return None


class BySlots(Topology):
    """A cluster's slots, as one of its nodes reports them."""

    def __init__(self, settings: RedisSettings, ask: Ask) -> None:
        super().__init__()
        self._ask = ask
        self._timeout_s = settings.connect_timeout_s
        self._seeds = [address_of(node) for node in settings.nodes] or [Address(*settings.server)]
        self._slots: list[Address | None] = [None] * REDIS_CLUSTER_HASH_SLOTS
        self._known: list[Address] = []  # primaries, then replicas
        self._primaries: list[Address] = []

    def owner(self, key: bytes) -> Address | None:
        return self._slots[key_slot(key)]

    def primaries(self) -> list[Address]:
        return self._primaries

    def _find(self, deadline: float, hint: Address | None) -> Broken | None:
        """Ask one node after the other. A node that a redirection has just named is surely alive, so it comes first."""
        broken = Broken("no node of the cluster is known")
        for address in _distinct([*([hint] if hint is not None else []), *self._known, *self._seeds]):
            if time.monotonic() >= deadline:
                return Broken("no answer in time", late=True)
            limit = min(deadline, time.monotonic() + self._timeout_s)
            reply = self._ask(address, [simple("CLUSTER", "SLOTS", reply_bytes_max=_SLOTS_BYTES_MAX)], limit)[0]
            if isinstance(reply, list) and reply:
                try:
                    self._take(reply, address)
                except (TypeError, ValueError, IndexError, UnicodeDecodeError) as error:
                    broken = Broken(f"{address} returned invalid slots: {error}")
                    continue
                return None
            if isinstance(reply, Broken):
                broken = reply
            else:
                why = "it owns no slots" if reply == [] else str(getattr(reply, "text", reply))
                broken = Broken(f"{address} did not return the cluster's slots: {why}", retryable=reply == [])
        return broken._replace(late=False)

    def _take(self, ranges: list[Any], node: Address) -> None:
        slots: list[Address | None] = [None] * REDIS_CLUSTER_HASH_SLOTS
        primaries: list[Address] = []
        replicas: list[Address] = []
        for first, last, primary, *others in ranges:
            if not (isinstance(first, int) and isinstance(last, int) and 0 <= first <= last < REDIS_CLUSTER_HASH_SLOTS):
                raise ValueError(f"slots {str(first)[:20]} to {str(last)[:20]}")
            owner = _node(primary, node)
            slots[first : last + 1] = [owner] * (last + 1 - first)
            primaries.append(owner)
            replicas += [_node(other, node) for other in others]
        self._slots = slots
        self._primaries = sorted(set(primaries))
        self._known = _distinct([*primaries, *replicas])


def _node(entry: Sequence[Any], node: Address) -> Address:
    """A node without a known host is the one that was asked. Raises `ValueError` for an invalid node."""
    host = entry[0].decode() if isinstance(entry[0], bytes) else (entry[0] or "")
    if not isinstance(host, str) or not isinstance(entry[1], int) or not 0 < entry[1] < 65536:
        raise ValueError(f"a node at {str(host)[:80]!r}, port {str(entry[1])[:20]}")
    return Address(host if host and host != "?" else node.host, entry[1])


def _distinct(addresses: Iterable[Address]) -> list[Address]:
    return list(dict.fromkeys(addresses))
