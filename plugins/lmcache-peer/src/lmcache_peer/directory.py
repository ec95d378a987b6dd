"""Who belongs to a cluster: each node has an entry, which it renews, and which goes when it does not.

A way to keep them has three methods: `register`, `entries` and `leave`. Three are built: Redis (also Cluster,
Sentinel and what speaks its protocol), etcd (`etcd`), and a fixed list of addresses.
"""

from __future__ import annotations

import contextlib
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence

import msgspec
from pydantic import ValidationError

from lmcache_core.errors import SettingsError, TierError
from lmcache_core.protocol.hostport import HostPort
from lmcache_core.textfiles import read_text_file
from lmcache_core.tiers.contract import AdapterContext
from lmcache_peer.limits import DIRECTORY_CALL_S, DIRECTORY_TTL_S, NODES_MAX
from lmcache_peer.messages import VERSION, NodeName, Text
from lmcache_peer.settings import ClusterSettings
from lmcache_redis.client import Client
from lmcache_redis.settings import RedisSettings
from lmcache_redis.transport.commands import Broken, Command, Refusal, Reply, simple


class NodeEntry(msgspec.Struct, frozen=True):
    """A node, and where it is. `boot`: another after each start of its helper; 0: not known before it is asked.
    `version`: of the protocol between nodes."""

    node: NodeName
    boot: int
    endpoint: Text
    version: int

    @property
    def at(self) -> HostPort:
        """Raises `ValueError` for an endpoint that is none."""
        return HostPort.parse(self.endpoint, port_min=1)


class Directory(ABC):
    """Every call ends within two seconds, and raises `TierError` if the directory does not answer."""

    def register(self, entry: NodeEntry) -> None:  # noqa: B027 - where nobody needs to, nothing is done
        """This node is there, for ten seconds from now."""

    def leave(self, entry: NodeEntry) -> None:  # noqa: B027
        """This node ends. What cannot be said expires."""

    @abstractmethod
    def entries(self) -> list[NodeEntry]:
        """All nodes that are there now."""

    def close(self) -> None:  # noqa: B027
        """Release connections."""


_entry_decoder = msgspec.msgpack.Decoder(NodeEntry)


def entry_of(value: bytes) -> NodeEntry | None:
    """What stands in a directory under a node's name. None for what is another version's, or not ours."""
    try:
        return _entry_decoder.decode(value)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return None


def another_is_registered(other: NodeEntry) -> TierError:
    """What a node is told that finds another's entry in the place of its own."""
    return TierError(f"another node is registered as {other.node}, at {other.endpoint}: set peer.node of one")


class FixedNodes(Directory):
    """The addresses in the settings. A node is known by its address until it says its name."""

    def __init__(self, nodes: Sequence[str]) -> None:
        self._entries = [NodeEntry(each, 0, each, VERSION) for each in nodes]

    def entries(self) -> list[NodeEntry]:
        return list(self._entries)


class RedisDirectory(Directory):
    """One key with a time to live for each node, and a set of their names. Entries of nodes that are gone leave the set
    when somebody sees that they have expired."""

    def __init__(self, settings: ClusterSettings, tier: str) -> None:
        """Connects when it is first used. Raises `SettingsError` for a file or a URL that cannot be read."""
        self._client = Client(redis_settings(settings), AdapterContext(tier=tier))
        self._names = f"lmcache-peer:{settings.cluster}:nodes".encode()
        self._prefix = f"lmcache-peer:{settings.cluster}:node:".encode()
        self._registered: NodeEntry | None = None

    def register(self, entry: NodeEntry) -> None:
        """Whoever started last has the name: a node that was restarted takes it over, and one that finds another's
        entry in the place of its own leaves it, so that the others do not take turns with both."""
        key, name = self._key(entry.node), entry.node.encode()
        other = self._entry_at(key)
        if self._registered == entry and other is not None and other.boot != entry.boot:
            raise another_is_registered(other)
        value = msgspec.msgpack.encode(entry)
        expiry = b"%d" % int(DIRECTORY_TTL_S * 1000)
        self._ask([
            Command(key, (b"SET", key, value, b"PX", expiry)), simple(b"SADD", self._names, name, key=self._names)
        ])  # fmt: skip
        self._registered = entry

    def leave(self, entry: NodeEntry) -> None:
        key = self._key(entry.node)
        with contextlib.suppress(TierError):
            if self._entry_at(key) == entry:
                self._ask([simple(b"DEL", key, key=key)])

    def entries(self) -> list[NodeEntry]:
        (names,) = self._ask([simple(b"SMEMBERS", self._names, key=self._names)])
        # RESP3 has sets, which redis-py gives as such.
        members = [each for each in names if isinstance(each, bytes)] if isinstance(names, list | set) else []
        members = sorted(members)[:NODES_MAX]
        keys = [self._key(each.decode(errors="replace")) for each in members]
        values = self._ask([simple(b"GET", key, key=key) for key in keys]) if keys else []
        found, gone = [], []
        for name, value in zip(members, values, strict=True):
            if value is None:
                gone.append(name)
            elif (entry := _entry_in(value)) is not None and entry.node.encode() == name:
                found.append(entry)
        if gone:
            self._ask([simple(b"SREM", self._names, *gone, key=self._names)])
        return found

    def close(self) -> None:
        self._client.close()

    def _entry_at(self, key: bytes) -> NodeEntry | None:
        (value,) = self._ask([simple(b"GET", key, key=key)])
        return _entry_in(value)

    def _key(self, node: str) -> bytes:
        return self._prefix + node.encode()

    def _ask(self, commands: Sequence[Command]) -> list[Reply]:
        return redis_replies(self._client, commands, time.monotonic() + DIRECTORY_CALL_S)


def _entry_in(reply: Reply) -> NodeEntry | None:
    return entry_of(reply) if isinstance(reply, bytes) else None


def redis_replies(client: Client, commands: Sequence[Command], deadline: float) -> list[Reply]:
    """One for each command. Raises `TierError` if Redis does not answer, or refuses."""
    replies = client.ask(commands, deadline) if commands else []
    for reply in replies:
        if isinstance(reply, Broken):
            raise TierError(f"the directory does not answer: {reply.text}")
        if isinstance(reply, Refusal):
            raise TierError(f"the directory refuses: {reply.code} {reply.text}")
    return replies


def redis_settings(settings: ClusterSettings) -> RedisSettings:
    """Of the directory, as `lmcache-redis` has them. Raises `SettingsError`."""
    url = settings.redis_url
    if settings.redis_url_file is not None:
        try:
            url = read_text_file(settings.redis_url_file).strip()
        except OSError as error:
            raise SettingsError(f"cannot read redis_url_file {settings.redis_url_file}: {error.strerror}") from error
        except ValueError as error:
            raise SettingsError(f"redis_url_file: {error}") from error
    # Only what is set: their model says what fits together.
    given: dict[str, object] = {"mode": settings.redis_mode, "transport": "plain"}
    given |= {"url": url} if url is not None else {}
    given |= {"nodes": settings.redis_nodes} if settings.redis_nodes else {}
    try:
        return RedisSettings.model_validate(given)
    except ValidationError as error:  # without what was read: it may have a password
        why = "; ".join(each["msg"] for each in error.errors(include_input=False, include_url=False))
        where = "redis_url" if settings.redis_url_file is None else f"redis_url_file {settings.redis_url_file}"
        raise SettingsError(f"{where}: {why}") from None


def directory_of(settings: ClusterSettings, tier: str) -> Directory:
    """The way that these settings choose."""
    if settings.etcd_nodes:
        from lmcache_peer.etcd import EtcdDirectory

        return EtcdDirectory(settings)
    return RedisDirectory(settings, tier) if settings.has_directory else FixedNodes(settings.nodes)
