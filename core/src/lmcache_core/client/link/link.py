"""A link: one session with a server, with its pool, life lock and namespaces."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeVar, TypeVarTuple

from lmcache_core.client.link.address import CurveKeys
from lmcache_core.client.link.channel import Channel, expect
from lmcache_core.client.link.connection import Connection, LifelineConnection, ZmqConnection
from lmcache_core.client.tracing import with_trace
from lmcache_core.errors import NotAttachedError, UnknownNamespaceError, UsageError
from lmcache_core.limits import (
    CALL_TIMEOUT_S,
    CHUNK_TOKENS_MAX,
    CONNECT_TIMEOUT_S,
    LINK_WAIT_PAUSE_S,
    NAMESPACES_KNOWN_MAX,
    NAMESPACES_PER_SESSION_MAX,
)
from lmcache_core.pool.backing import LIFELINE_NAME
from lmcache_core.pool.index import open_index
from lmcache_core.pool.layout import Layout
from lmcache_core.pool.lifelock import LifeLock
from lmcache_core.pool.segment import PoolInfo, Segment
from lmcache_core.protocol import messages as m
from lmcache_core.protocol.address import named_root, server_directory
from lmcache_core.protocol.codec import pool_info_from_wire
from lmcache_core.tokens.namespace import Namespace
from lmcache_core.trust import Trust

if TYPE_CHECKING:
    from lmcache_core._native import Index
    from lmcache_core.client.link.channel import Pending
    from lmcache_core.descriptors import Descriptor

_V = TypeVar("_V")
_Ts = TypeVarTuple("_Ts")
MAPS_POOL = "maps_pool"  # capability: this client wants slots, not only answers
Clock = Callable[[], float]  # monotonic seconds


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
    server_uid: int | None = None  # besides ours and root's
    chunk_tokens: int | None = None  # of this client's keys; None: not declared

    call_timeout_s: float = CALL_TIMEOUT_S
    connect_timeout_s: float = CONNECT_TIMEOUT_S
    wait_s: float = LINK_WAIT_PAUSE_S
    clock: Clock = time.monotonic  # the clock for every deadline of this client
    trace: Callable[[], str] | None = None  # finds the trace of the calling thread, for requests that are given none

    @property
    def trust(self) -> Trust:
        """Which users we may connect to."""
        return Trust.of_client(self.server_uid, named_root(self.runtime_dir))

    def __post_init__(self) -> None:
        if self.chunk_tokens is not None and not 1 <= self.chunk_tokens <= CHUNK_TOKENS_MAX:
            raise UsageError(f"chunk_tokens is {self.chunk_tokens}: give 1 to {CHUNK_TOKENS_MAX:,}")
        for name in ("call_timeout_s", "connect_timeout_s", "wait_s"):
            if not getattr(self, name) > 0:
                raise UsageError(f"{name} is {getattr(self, name)}: give a positive number of seconds")

    def connection(self) -> Connection:
        """A connection that is not made yet; it is made in steps. Raises `DisconnectedError`."""
        if self.open_pair is not None:
            return self.open_pair()
        if self.address is not None:
            return ZmqConnection(self.address, self.curve, self.trust)
        return LifelineConnection.to(server_directory(self.name, self.runtime_dir) / LIFELINE_NAME, self.trust)

    def __str__(self) -> str:
        return self.address or f"{self.name!r}"


class Link:
    """Made by a `Handshake`. Ends with its channel; the mapping and the open leases move to the next link."""

    def __init__(
        self, channel: Channel, welcome: m.Welcome, previous: Link | None, *, trace: Callable[[], str] | None = None
    ) -> None:
        self.channel = channel
        self.epoch = welcome.epoch
        self.index_epoch = welcome.epoch  # of the server that answers for the index, maybe a successor in the pool
        self.session = welcome.session
        self.row = welcome.row
        self.uid = welcome.uid  # of the server
        self.wants_blocks = m.WANTS_BLOCKS in welcome.capabilities  # of engines, by `ReportBlocks`
        self.companions = welcome.companions  # name → what it has for workers
        self._takes_traces = m.TRACES in welcome.capabilities
        self._trace = trace
        self.chunk_tokens = welcome.chunk_tokens
        self.write_ttl_s = welcome.write_ttl_s
        self.read_ttl_s = welcome.read_ttl_s
        self.pool = pool_info_from_wire(welcome.pool)
        self.segment: Segment | None = None
        self.life_lock: LifeLock | None = None
        self.index: Index | None = None  # of the segment, if this client reads it
        self.why_not_mapped = "it was connected with maps_pool=False"
        self._lock = threading.Lock()
        self.left = False  # the next link is open
        self.bound: dict[int, int] = {}  # namespace → layout id, as this session has registered them
        self._binding: dict[int, Pending] = {}  # registrations that nobody waits for, shared by all lookups under way
        # The same for all sessions on this pool, where ids never change their meaning.
        self.known: dict[int, _Known] = {}
        # Namespaces of this client instance, including those of earlier sessions.
        self.registered: dict[int, None] = {} if previous is None else dict(previous.registered)

    def bind(self, namespace: Namespace) -> int:
        """Register a namespace and its layout with this session, once. Returns the layout's id."""
        layout_id = self.bound.get(namespace.id)
        return self.bind_id(namespace.id, namespace.layout, namespace.public_label) if layout_id is None else layout_id

    def bind_id(self, namespace_id: int, layout: Layout, label: str = "") -> int:
        """The same for a namespace known only by its id, for tools that find it on a tier."""
        layout_id = self.bound.get(namespace_id)
        if layout_id is None:
            reply = self.channel.call(_registering(namespace_id, layout, label))
            layout_id = self.note_bound(namespace_id, layout, reply)
        return layout_id

    def start_binding(self, namespace: Namespace) -> Pending | None:
        """Like `bind`, for callers that must not wait: they send a request next, and `poll` notes both answers. Returns
        the pending call; None if none is needed."""
        if namespace.id in self.bound:
            return None
        under_way = self._binding.get(namespace.id)
        if under_way is None or not (not under_way.settled or isinstance(under_way.reply, m.LayoutRegistered)):
            request = _registering(namespace.id, namespace.layout, namespace.public_label)
            under_way = self.channel.start(request, blocks=False)
            with self._lock:  # the answer may never come, so these are forgotten by age, too
                _remember(self._binding, namespace.id, under_way, NAMESPACES_PER_SESSION_MAX)
        return under_way

    def note_bound(self, namespace_id: int, layout: Layout, reply: m.Reply) -> int:
        """The server has answered a registration. Returns the layout's id."""
        layout_id = expect(reply, m.LayoutRegistered).layout
        with self._lock:
            self._binding.pop(namespace_id, None)
            _remember(self.bound, namespace_id, layout_id, NAMESPACES_PER_SESSION_MAX)
            _remember(self.known, namespace_id, _Known(layout_id, layout.fingerprint), NAMESPACES_KNOWN_MAX)
            _remember(self.registered, namespace_id, None, NAMESPACES_KNOWN_MAX)
        return layout_id

    def poll(self, namespace: Namespace, pending: Pending) -> m.Reply | None:
        """The answer to a request that was sent after `start_binding`, if it has come. Raises the channel's errors, and
        those of the registration: the server answers in order, so it has registered the namespace before that."""
        binding = self._binding.get(namespace.id)
        if binding is not None and binding.rid < pending.rid:
            bound = self.channel.poll(binding)
            if bound is None:
                return None
            self.note_bound(namespace.id, namespace.layout, bound)
        return self.channel.poll(pending)

    def in_namespace(self, namespace: Namespace, call: Callable[[*_Ts], _V], *given: *_Ts) -> _V:
        """Make a call once its namespace is registered, and again if the server has forgotten the namespace by then: a
        session with very many forgets the oldest."""
        if namespace.id not in self.bound:
            self.bind(namespace)
        try:
            return call(*given)
        except UnknownNamespaceError:
            self.remove_binding(namespace)
            self.bind(namespace)
            return call(*given)

    def remove_binding(self, namespace: Namespace) -> None:
        """The server has forgotten it: register it again before the next use."""
        with self._lock:
            self.bound.pop(namespace.id, None)

    def traced(self, request: m.Message, traceparent: str) -> m.Message:
        """The request with its trace (empty: the current one, if this client propagates it), if the server accepts
        any."""
        if not self._takes_traces:
            return request
        return with_trace(request, traceparent or ("" if self._trace is None else self._trace()))

    def searched(self, namespace: Namespace) -> tuple[Index, int] | None:
        """The index that this process may search for a namespace, and the id of the layout there. None: the server must
        be asked. Makes no call."""
        index = self.index
        if index is None or (known := self.known.get(namespace.id)) is None:
            return None
        return index, known.layout_id

    def follows(self) -> bool:
        """Whether another server answers for this same pool now. Its index can be used before there is a link to that
        server. Layout ids keep their meaning; those that do not are forgotten."""
        segment = self.segment
        if segment is None:
            return False
        serving = segment.serving
        if serving in (0, self.index_epoch):
            return False
        with self._lock:
            if not segment.still(self.pool):
                return False  # it was made anew, perhaps with other places for everything
            rows = segment.layouts
            self.known = {
                namespace: known
                for namespace, known in self.known.items()
                if (row := rows.get(known.layout_id)) is not None and row.fingerprint == known.fingerprint
            }
            self.index_epoch = serving
        return True

    def mapped(self) -> Segment:
        """The pool. Raises `NotAttachedError` with the reason if there is none."""
        if self.segment is None:
            raise NotAttachedError(f"this client does not map the pool: {self.why_not_mapped}")
        return self.segment

    def map(self, passed: Descriptor, previous: Link | None, target: Target, token: Descriptor) -> tuple[int, int]:
        """Map the pool (or keep the mapping of the same pool) and lock our row; returns the row, and the proof that we
        map it. Takes the descriptors that the server has passed. Raises `PoolError`."""
        if previous is not None and previous.segment is not None and previous.pool == self.pool:
            segment = previous.segment
            self.index = previous.index or self._open_index(segment, target)
            self.known = dict(previous.known)
            passed.close()
        else:
            segment = _map(self.pool, passed, self.uid, target.trust)
            self.index = self._open_index(segment, target)
        self.segment = segment
        lock = LifeLock.acquire(segment, self.row) if token.closed else LifeLock.with_token(segment, self.row, token)
        self.life_lock = lock
        row = self.life_lock.row  # over ZMQ we choose it: the server gives rows only to clients that map the pool
        segment.clear_tally(row)
        if self.index is not None:
            self.index.count_in(segment.tally_offset(row))
        return row, segment.shown(row)

    @staticmethod
    def _open_index(segment: Segment, target: Target) -> Index | None:
        return open_index(segment) if target.use_index else None

    def unmap(self, why: str) -> None:
        """Continue without the pool: a client on another machine can look up, clear and ask."""
        self.segment, self.index, self.life_lock, self.why_not_mapped = None, None, None, why

    def say_goodbye(self, leases: Sequence[int] | None, timeout_s: float) -> None:
        """End the session, so that nobody has to prove our death, and release every lease. If only these `leases` may
        be released, the session stays: it ends with its life lock. Waits up to `timeout_s` until the server has."""
        channel = self.channel
        if not channel.lost:
            settled = None if leases is None else list(leases)
            goodbye = channel.start(m.EndSession(0, leases is None, settled), blocks=False)
            channel.wait_for(goodbye, min(timeout_s, CONNECT_TIMEOUT_S))

    def close_in_child(self) -> None:
        """In a forked child: close our copies of the descriptors, without telling the server."""
        self._lock = threading.Lock()  # a thread that does not exist here may have held it
        self.channel.connection.close_in_child()
        self.index = None
        self.known = {}
        self.life_lock = None  # it has closed itself

    def close(self) -> None:
        """Drop the connection and the life lock, which lives on for occupied holdings. The mapping stays while there
        are views of it."""
        self.life_lock = None  # first: whoever sees the connection end checks the lock
        self.channel.close()

    def __del__(self) -> None:
        self.life_lock = None  # before the connection, which ends with the channel


def _map(pool: PoolInfo, passed: Descriptor, uid: int, trust: Trust) -> Segment:
    if not passed.closed:
        return Segment.attach_fd(passed, pool, trust=trust)
    return Segment.attach_name(pool.name, pool, uid=uid, trust=trust)


class _Known(NamedTuple):
    """The layout of a namespace's objects in one pool."""

    layout_id: int
    fingerprint: int


def _registering(namespace_id: int, layout: Layout, label: str) -> m.RegisterLayout:
    return m.RegisterLayout(
        0, namespace_id, layout.dtype, list(layout.shape), layout.memory_format, layout.fingerprint, label
    )


def _remember(table: dict[int, _V], namespace_id: int, value: _V, most: int) -> None:
    """Add as the newest; if there are too many, remove the oldest."""
    table.pop(namespace_id, None)
    table[namespace_id] = value
    if len(table) > most:
        del table[next(iter(table))]
