"""A link: one session with a server, and what came with it: the pool, the life lock, the namespaces."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from lmcache_core.client.address import CurveKeys
from lmcache_core.client.channel import Channel, expect
from lmcache_core.client.connection import Connection, LifelineConnection, ZmqConnection
from lmcache_core.errors import NotAttachedError, PoolError
from lmcache_core.limits import CONNECT_TIMEOUT_S
from lmcache_core.pool.layout import Layout
from lmcache_core.pool.lifelock import LifeLock
from lmcache_core.pool.segment import PoolInfo, Segment
from lmcache_core.protocol import messages as m
from lmcache_core.protocol.address import server_directory
from lmcache_core.protocol.codec import pool_info_from_wire
from lmcache_core.tokens.namespace import Namespace

SOCKET_NAME = "lifeline"
MAPS_POOL = "maps_pool"  # capability: this client wants slots, not only answers


@dataclass(frozen=True)
class Target:
    """Where to connect and how to introduce oneself."""

    name: str
    runtime_dir: Path | None
    address: str | None  # ZMQ; None: the lifeline of `name`
    curve: CurveKeys | None
    client_name: str
    maps_pool: bool
    open_pair: Callable[[], Connection] | None = None  # embedded mode

    def connect(self) -> Connection:
        """A new connection. Raises `DisconnectedError`."""
        if self.open_pair is not None:
            return self.open_pair()
        if self.address is not None:
            return ZmqConnection(self.address, self.curve)
        return LifelineConnection.open(server_directory(self.name, self.runtime_dir) / SOCKET_NAME)


class Link:
    """Made by `open_link`. Dies with its channel; the mapping and the open leases go over to the next link."""

    def __init__(self, channel: Channel, welcome: m.Welcome, why_not_mapped: str = "") -> None:
        self.channel = channel
        self.epoch = welcome.epoch
        self.session = welcome.session
        self.chunk_tokens = welcome.chunk_tokens
        self.write_ttl_s = welcome.write_ttl_s
        self.read_ttl_s = welcome.read_ttl_s
        self.pool = pool_info_from_wire(welcome.pool)
        self.segment: Segment | None = None
        self.life_lock: LifeLock | None = None
        self._why_not_mapped = why_not_mapped
        self._layouts: dict[int, int] = {}

    def bind(self, namespace: Namespace) -> int:
        """Register a namespace and its layout with this session, once. Returns the layout's id."""
        layout_id = self._layouts.get(namespace.id)
        return self.bind_id(namespace.id, namespace.layout, namespace.model) if layout_id is None else layout_id

    def bind_id(self, namespace_id: int, layout: Layout, label: str = "") -> int:
        """The same for a namespace of which only the id is known, as tools do that find it on a tier."""
        layout_id = self._layouts.get(namespace_id)
        if layout_id is None:
            reply = self.channel.call(
                lambda rid: m.RegisterLayout(
                    rid,
                    namespace_id,
                    layout.dtype,
                    list(layout.shape),
                    layout.memory_format,
                    layout.fingerprint,
                    label,
                )
            )
            layout_id = self._layouts[namespace_id] = expect(reply, m.LayoutRegistered).layout
        return layout_id

    def mapped(self) -> Segment:
        """The pool. Raises `NotAttachedError` with the reason why there is none."""
        if self.segment is None:
            raise NotAttachedError(f"this client does not map the pool: {self._why_not_mapped}")
        return self.segment

    def view(self, offset: int, layout: Layout) -> memoryview:
        """The bytes of one slot."""
        return self.mapped().view(offset, layout.nbytes)

    def attach(self, welcome: m.Welcome, fd: int, previous: Link | None, held: Sequence[int]) -> None:
        """Map the pool (or keep the mapping of the same pool), lock our row, and say so to the server."""
        if previous is not None and previous.segment is not None and previous.pool == self.pool:
            segment = previous.segment
            if fd >= 0:
                os.close(fd)
        else:
            segment = _map(self.pool, fd)
        self.segment = segment
        self.life_lock = LifeLock.acquire(segment, welcome.row)
        nonce = segment.row_nonce(welcome.row)
        self.channel.call(lambda rid: m.Attach(rid, welcome.row, nonce, list(held)), CONNECT_TIMEOUT_S)
        if previous is not None and previous.life_lock is not None:
            previous.life_lock.close()  # only now: until here the old row had to say that we live

    def say_goodbye(self) -> None:
        """Release every lease and end the session, so that nobody needs to prove that we are dead."""
        if not self.channel.lost:
            self.channel.call(lambda rid: m.EndSession(rid, goodbye=True), CONNECT_TIMEOUT_S)

    def abandon(self) -> None:
        """In a forked child: close our copies of the descriptors. Nothing is said to the server."""
        self.channel.connection.abandon()
        if self.life_lock is not None:
            self.life_lock.close()
            self.life_lock = None

    def close(self) -> None:
        """Drop the connection and the life lock. The mapping stays while views of it are out."""
        self.channel.close()
        if self.life_lock is not None:
            self.life_lock.close()
            self.life_lock = None


def open_link(
    target: Target,
    client_id: bytes,
    held: Sequence[int],
    previous: Link | None,
    on_notice: Callable[[m.LeaseExpired], None],
) -> Link:
    """Connect, say hello, attach. Raises `DisconnectedError` where no server answers, `VersionError`, `PoolError`."""
    connection = target.connect()
    channel = Channel(connection, on_notice)
    try:
        welcome = expect(
            channel.call(
                lambda rid: m.Hello(
                    rid,
                    m.PROTOCOL_VERSION_MIN,
                    m.PROTOCOL_VERSION_MAX,
                    client_id,
                    target.client_name,
                    os.getpid(),
                    [MAPS_POOL] if target.maps_pool else [],
                ),
                CONNECT_TIMEOUT_S,
            ),
            m.Welcome,
        )
        link = Link(channel, welcome, "it was connected with maps_pool=False")
        fd = connection.take_fd()
        if target.maps_pool:
            try:
                link.attach(welcome, fd, previous, held)
            except PoolError as error:
                if connection.carrier == "lifeline":
                    raise
                # A ZMQ client may be on another machine: it can look up, clear and ask.
                link.segment, link._why_not_mapped = None, str(error)
        return link
    except BaseException:
        channel.close("the session could not be opened")
        raise


def _map(pool: PoolInfo, fd: int) -> Segment:
    return Segment.attach_fd(fd, pool) if fd >= 0 else Segment.attach_name(pool.name, pool)
