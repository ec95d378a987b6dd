"""A link: one session with a server, and what came with it: the pool, the life lock, the namespaces."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from lmcache_core.client.address import CurveKeys
from lmcache_core.client.channel import Channel, expect
from lmcache_core.client.connection import Connection, LifelineConnection, ZmqConnection
from lmcache_core.errors import NotAttachedError, PoolError
from lmcache_core.limits import CONNECT_TIMEOUT_S
from lmcache_core.pool.index import open_index
from lmcache_core.pool.layout import Layout
from lmcache_core.pool.lifelock import LifeLock
from lmcache_core.pool.segment import PoolInfo, Segment
from lmcache_core.protocol import messages as m
from lmcache_core.protocol.address import server_directory
from lmcache_core.protocol.codec import pool_info_from_wire
from lmcache_core.tokens.namespace import Namespace

if TYPE_CHECKING:
    from lmcache_core._native import Index
    from lmcache_core.client.leases import Lease

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
    use_index: bool = True

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
        self.index: Index | None = None  # of the segment, where this client reads it
        self._why_not_mapped = why_not_mapped
        self._lock = threading.Lock()
        self._leases: set[object] = set()  # in whose slots a thread of ours may be at work
        self._declared = False  # the next link's server has been, or will be told which of them it is to keep
        self._left = False
        self._heir: Link | None = None  # the next link to the same server: our leases are its now
        self._layouts: dict[int, int] = {}
        self.registered: set[int] = set()  # namespaces of this client instance, in earlier sessions too

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
            self.registered.add(namespace_id)
        return layout_id

    def layout_of(self, namespace: Namespace) -> int | None:
        """The layout's id, if the namespace was bound to this session. Asks nobody."""
        return self._layouts.get(namespace.id)

    def mapped(self) -> Segment:
        """The pool. Raises `NotAttachedError` with the reason why there is none."""
        if self.segment is None:
            raise NotAttachedError(f"this client does not map the pool: {self._why_not_mapped}")
        return self.segment

    def view(self, offset: int, layout: Layout) -> memoryview:
        """The bytes of one slot."""
        return self.mapped().view(offset, layout.nbytes)

    def attach(
        self, welcome: m.Welcome, fd: int, previous: Link | None, held: Sequence[int], *, use_index: bool
    ) -> None:
        """Map the pool (or keep the mapping of the same pool), lock our row, and say so to the server."""
        if previous is not None and previous.segment is not None and previous.pool == self.pool:
            segment = previous.segment
            self.index = previous.index
            if fd >= 0:
                os.close(fd)
        else:
            segment = _map(self.pool, fd)
            self.index = open_index(segment) if use_index else None
        self.segment = segment
        self.life_lock = LifeLock.acquire(segment, welcome.row)
        nonce = segment.row_nonce(welcome.row)
        self.channel.call(lambda rid: m.Attach(rid, welcome.row, nonce, list(held)), CONNECT_TIMEOUT_S)

    def lease_opens(self, lease: object) -> None:
        """A lease is about to be asked for over this link. Before it is granted, or a link made meanwhile would not
        know that someone is going to write."""
        with self._lock:
            self._leases.add(lease)

    def lease_granted(self, lease: Lease, open_leases: dict[int, Lease]) -> bool:
        """Note an open lease, by its id. False: it comes too late for what the next link declares, and the server
        gives its slots to others."""
        with self._lock:
            if not self._declared:
                open_leases[lease.id] = lease
            return lease.id in open_leases

    def declare(self, open_leases: dict[int, Lease]) -> list[int]:
        """The link is lost, and another one is about to be made: the leases that it is to go on with."""
        with self._lock:
            self._declared = True
            return list(open_leases)

    def lease_ended(self, lease: object) -> None:
        """No thread of ours touches its slots any more."""
        with self._lock:
            self._leases.discard(lease)
            self._let_go_if_idle()
            heir = self._heir
        if heir is not None:
            heir.lease_ended(lease)

    def leave(self, successor: Link) -> None:
        """The next link is open. Where it is to another server, that one keeps the slots of our leases from
        everybody for as long as our old row says that we live: the lock is let go with the last of these leases.
        The same server has heard what we hold, and holds it under the new row."""
        with self._lock:
            self._left = True
            if successor.epoch == self.epoch and successor.life_lock is not None:
                self._heir = successor
                successor._leases |= self._leases
                self._leases.clear()
            elif successor.pool != self.pool:
                self._leases.clear()  # nobody has that pool any more
            self._let_go_if_idle()

    def _let_go_if_idle(self) -> None:
        if self._left and not self._leases and self.life_lock is not None:
            self.life_lock.close()
            self.life_lock = None

    @property
    def gone(self) -> bool:
        """Nothing of it is needed any more."""
        return self._left and self.life_lock is None

    def say_goodbye(self) -> None:
        """Release every lease and end the session, so that nobody needs to prove that we are dead."""
        if not self.channel.lost:
            self.channel.call(lambda rid: m.EndSession(rid, goodbye=True), CONNECT_TIMEOUT_S)

    def abandon(self) -> None:
        """In a forked child: close our copies of the descriptors. Nothing is said to the server."""
        self._lock = threading.Lock()  # a thread that did not come along may have held it
        self.channel.connection.abandon()
        self.index = None
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
    link: Link | None = None
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
        if previous is not None:
            link.registered |= previous.registered
        fd = connection.take_fd()
        if target.maps_pool:
            try:
                link.attach(welcome, fd, previous, held, use_index=target.use_index)
            except PoolError as error:
                if connection.carrier == "lifeline":
                    raise
                # A ZMQ client may be on another machine: it can look up, clear and ask.
                link.segment, link.index, link._why_not_mapped = None, None, str(error)
                if link.life_lock is not None:
                    link.life_lock.close()
                    link.life_lock = None
        if previous is not None:
            previous.leave(link)  # only now: until here the old row had to say that we live
        return link
    except BaseException:
        channel.close("the session could not be opened")
        if link is not None and link.life_lock is not None:
            link.life_lock.close()  # or that row would seem to be taken for as long as we live
        raise


def _map(pool: PoolInfo, fd: int) -> Segment:
    return Segment.attach_fd(fd, pool) if fd >= 0 else Segment.attach_name(pool.name, pool)
