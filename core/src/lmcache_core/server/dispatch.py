"""A handler for each request. All are quick: they run on the loop, between two system calls."""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from lmcache_core.errors import (
    CacheError,
    LimitError,
    PoolMismatchError,
    ProtocolError,
    UnknownNamespaceError,
    UsageError,
    VersionError,
)
from lmcache_core.kernel.answers import Reason, Settled
from lmcache_core.limits import BATCH_KEYS_MAX, BLOCK_HASH_BYTES_MAX, SESSION_NAME_BYTES_MAX
from lmcache_core.pool.layout import Layout
from lmcache_core.protocol import messages as m
from lmcache_core.protocol.codec import (
    decode_request,
    encode,
    error_reply,
    pool_info_to_wire,
    rid_of,
    split_keys,
    unpack_positions,
    unpack_u64,
)
from lmcache_core.server.session import Peer, Session
from lmcache_core.server.store_waits import granted
from lmcache_core.settings.present import plain

if TYPE_CHECKING:
    from lmcache_core.server.parts import Parts

log = logging.getLogger(__name__)
MAPS_POOL = "maps_pool"


class Dispatch:
    """Frames in, replies out. Nothing that a peer sends can end or stall the loop."""

    def __init__(self, parts: Parts, status: Callable[[], dict[str, Any]]) -> None:
        """`status` answers `StatusRequest`."""
        kernel, lookups = parts.kernel, parts.lookups
        self._kernel = kernel
        self._l1 = parts.l1
        self._sessions = parts.sessions
        self._lookups = lookups
        self._explains = parts.explains
        self._stored_waits = parts.stored_waits
        self._stores = parts.stores
        self._namespaces = parts.namespaces
        self._clears = parts.clears
        self._companions = parts.companions
        self._recording = parts.recording
        self._settings = parts.settings
        self._status = status
        self.counters: Counter[str] = Counter()
        self.handlers: dict[type, Callable[[Session, Any], m.Message | None]] = {
            m.Attach: self._attach,
            m.RegisterLayout: self._register_layout,
            m.LookupRequest: self._lookup,
            m.TracedLookup: self._lookup,
            m.Cancel: self._cancel,
            m.QueryPrefetchStatus: lambda s, r: lookups.status_of(s, r.rid, r.job),
            m.QueryLookupHits: lambda s, r: lookups.hits_of(s, r.rid, r.job),
            m.FreeLookupLocks: self._free_lookup_locks,
            m.RedeemPromise: self._redeem_promise,
            m.PrepareStore: self._prepare_store,
            m.TracedPrepareStore: self._prepare_store,
            m.CommitStore: self._commit_store,
            m.AbortStore: self._settle(partial(kernel.abort_store, reason=Reason.ABORTED)),
            m.FinishRead: self._settle(kernel.finish_read),
            m.PrepareRetrieve: self._prepare_retrieve,
            m.ReportDamaged: self._settle(self._report_damaged),
            m.RenewLease: self._renew_lease,
            m.LeaseStatusOf: self._lease_status,
            m.EndSession: self._end_session,
            m.Clear: self._clear,
            m.Drop: self._drop,
            m.Explain: parts.explains.explain,
            m.WaitStored: parts.stored_waits.wait,
            m.Pin: self._pin,
            m.Unpin: self._unpin,
            m.Tiers: lambda s, r: parts.tier_changes.describe(r.rid),
            m.ChangeTier: parts.tier_changes.change,
            m.ReportBlocks: self._report_blocks,
            m.ChangeRecording: parts.recording.change,
            m.QuotasRequest: parts.quotas.describe,
            m.SetQuota: parts.quotas.set,
            m.RemoveQuota: parts.quotas.remove,
            m.Operate: parts.companions.operate,
            m.CallOperation: parts.operations.call,
            m.GetChunkSize: lambda s, r: m.ChunkSize(r.rid, parts.settings.chunk_tokens),
            m.StatusRequest: lambda s, r: m.StatusReply(r.rid, status()),
            m.ConfigRequest: self._config,
            m.Ping: lambda s, r: m.Pong(r.rid, r.payload),
            m.Noop: lambda s, r: m.Done(r.rid),
        }

    def on_frame(self, peer: Peer, frame: memoryview) -> None:
        """Serve one frame of a peer."""
        try:
            request = decode_request(frame)
        except ProtocolError as error:
            self.counters["garbage"] += 1
            peer.send(encode(error_reply(rid_of(frame), error)))
            return
        reply = self._answer(peer, request)
        self._l1.apply()
        if self._recording.on:
            self._recording.served(peer.session, request, reply)
        if reply is not None:
            peer.send(encode(reply))

    def _answer(self, peer: Peer, request: m.Request) -> m.Message | None:
        session = peer.session
        try:
            if session is None:
                return self._hello(peer, request)
            session.heard_at_s = self._l1.clock.now
            handler = self.handlers.get(type(request))
            if handler is None:
                raise ProtocolError("this session has already said hello")
            return handler(session, request)
        except CacheError as error:
            self.counters[f"error_{error.code.lower()}"] += 1
            return error_reply(request.rid, error)
        except KeyboardInterrupt:
            raise
        except BaseException:  # a policy or a companion may be third-party code, even in Rust
            # A bug of ours must not take down the node's cache; the peer gets an error, and the log has the traceback.
            log.exception("request %s failed", type(request).__name__)
            self.counters["internal_errors"] += 1
            return m.Error(
                request.rid, "INTERNAL", "the server failed on this request; its log has the traceback", "never"
            )

    # --- the session --------------------------------------------------------------------------------------

    def _hello(self, peer: Peer, request: m.Request) -> m.Message | None:
        if not isinstance(request, m.Hello):
            return m.Error(request.rid, "DISCONNECTED", "this server knows no such session: say hello", "reconnect")
        if not request.version_min <= m.PROTOCOL_VERSION_MAX or not request.version_max >= m.PROTOCOL_VERSION_MIN:
            raise VersionError(
                f"the client speaks protocol {request.version_min} to {request.version_max}, this server "
                f"{m.PROTOCOL_VERSION_MIN} to {m.PROTOCOL_VERSION_MAX}: install the same lmcache-core on both sides"
            )
        if len(request.client_id) != 16 or len(request.name.encode()) > SESSION_NAME_BYTES_MAX:
            raise ProtocolError(f"a client id has 16 bytes and a name at most {SESSION_NAME_BYTES_MAX}")
        maps_pool = MAPS_POOL in request.capabilities
        segment, settings = self._l1.segment, self._settings
        session = self._sessions.open(
            peer, request.client_id, request.name, request.pid, self._l1.clock.now, wants_pool=maps_pool
        )
        if self._l1.taps is not None:
            self._l1.taps.session_opened(session)
        welcome = m.Welcome(
            request.rid,
            min(request.version_max, m.PROTOCOL_VERSION_MAX),
            session.id,
            settings.name,
            self._kernel.epoch,
            pool_info_to_wire(segment.info),
            session.row,
            settings.chunk_tokens,
            settings.lease.write_ttl_s,
            settings.lease.read_ttl_s,
            self._capabilities(),
            uid=os.geteuid(),
            companions=self._companions.offers(),
        )
        if not (maps_pool and peer.can_pass_fd):
            return welcome
        fd = segment.worker_fd()
        try:
            peer.send(encode(welcome), fd)
        finally:
            os.close(fd)
        return None

    def _capabilities(self) -> list[str]:
        """Capabilities, so that clients do not send requests in vain."""
        said = [] if self._l1.tracing is None else [m.TRACES]
        if self._l1.taps is not None and self._l1.taps.wants_blocks:
            said.append(m.WANTS_BLOCKS)
        return said

    def _attach(self, session: Session, request: m.Attach) -> m.Message:
        held = self._sessions.attach(session, request.row, request.nonce, request.held, self._l1.clock.now)
        return m.Attached(request.rid, held)

    def _clear(self, session: Session, request: m.Clear) -> m.Message | None:
        _check_may("clear", session, request.namespace)
        return self._clears.clear(session, request)

    def _drop(self, session: Session, request: m.Drop) -> m.Message:
        _check_may("drop objects of", session, request.namespace)
        keys, incarnations = split_keys(request.keys), unpack_u64(request.incarnations)
        if len(keys) != len(incarnations):
            raise UsageError(f"{len(keys)} keys and {len(incarnations)} incarnations: give one for each key")
        wanted = [(key, number) for key, number in zip(keys, incarnations, strict=True) if number]
        if request.damaged:
            self.counters["reported_damaged"] += len(wanted)
        reason = Reason.DAMAGED if request.damaged else Reason.DROPPED
        return m.Done(request.rid, self._l1.remove(request.namespace, wanted, reason, tiers=request.tiers))

    def _register_layout(self, session: Session, request: m.RegisterLayout) -> m.Message:
        layout = Layout(request.dtype, tuple(request.shape), request.memory_format)
        if layout.fingerprint != request.fingerprint:
            raise PoolMismatchError(
                f"layout {layout} has fingerprint {layout.fingerprint:x} here and {request.fingerprint:x} at the "
                "client: install the same lmcache-core on both sides"
            )
        layout_id = self._namespaces.register(session, request.namespace, layout)
        return m.LayoutRegistered(request.rid, layout_id, layout.nbytes)

    def _end_session(self, session: Session, request: m.EndSession) -> m.Message | None:
        if not request.goodbye:
            self._stores.session_ends(session)
            self._kernel.end_session(session.id, self._l1.clock.now, request.leases)
            return m.Done(request.rid)
        session.send(m.Done(request.rid))
        self._sessions.goodbye(session, self._l1.clock.now)
        return None

    # --- lookups ------------------------------------------------------------------------------------------

    def _layout_of(self, session: Session, namespace: int) -> int:
        layout_id = session.namespaces.get(namespace)
        if layout_id is None:
            raise UnknownNamespaceError(
                f"namespace {namespace:016x} is not registered in this session: register_layout first"
            )
        return layout_id

    def _lookup(self, session: Session, request: m.LookupRequest) -> m.Message | None:
        self._layout_of(session, request.namespace)
        return self._lookups.lookup(session, request, split_keys(request.keys))

    def _cancel(self, session: Session, request: m.Cancel) -> m.Message:
        waiting = (self._lookups, self._explains, self._stored_waits)
        return m.Done(request.rid, sum(each.cancel(session, request.lookup) for each in waiting))

    def _free_lookup_locks(self, session: Session, request: m.FreeLookupLocks) -> m.Message:
        if len(request.promises) > BATCH_KEYS_MAX:
            raise LimitError(f"{len(request.promises)} promises in one frame, and the limit is {BATCH_KEYS_MAX}")
        freed = self._kernel.free_lookup_locks(session.id, request.promises, self._l1.clock.now)
        self._lookups.freed(session, request.promises)
        return m.Done(request.rid, freed)

    def _redeem_promise(self, session: Session, request: m.RedeemPromise) -> m.Message:
        self._layout_of(session, request.namespace)
        keys, now = split_keys(request.keys), self._l1.clock.now
        return m.Done(request.rid, self._kernel.redeem_promise(request.promise, request.namespace, keys, now))

    # --- the two phases -----------------------------------------------------------------------------------

    def _prepare_store(self, session: Session, request: m.PrepareStore) -> m.Message | None:
        reply = self._stores.prepare(session, request, self._layout_of(session, request.namespace))
        if self._l1.tracing is not None:
            self._l1.tracing.store_asked(session, request, reply)
        return reply

    def _prepare_retrieve(self, session: Session, request: m.PrepareRetrieve) -> m.Message:
        layout_id = self._layout_of(session, request.namespace)
        now = self._l1.clock.now
        grants = self._kernel.prepare_retrieve(
            session.id,
            request.namespace,
            split_keys(request.keys),
            now,
            promise_id=request.promise,
            lease_id=request.lease,
            prefix=request.prefix,
            layout_id=layout_id,
            verify=request.verify,
            identify=request.identify,
        )
        object_bytes = self._l1.layouts[layout_id].nbytes
        self._l1.traffic.retrieved(
            request.namespace, grants.statuses, grants.reasons, object_bytes, begins=not request.lease
        )
        return granted(request.rid, grants, now)

    def _settle(self, settle: Callable[..., bytearray]) -> Callable[[Session, m.Settle], m.Message]:
        def handle(session: Session, request: m.Settle) -> m.Message:
            positions = _positions_of(request)
            outcomes = settle(session.id, request.lease, self._l1.clock.now, positions)
            if self._l1.tracing is not None:
                self._l1.tracing.settled(request.lease, positions, outcomes)
            return m.SettledReply(request.rid, bytes(outcomes))

        return handle

    def _commit_store(self, session: Session, request: m.CommitStore) -> m.Message:
        checksums = unpack_u64(request.checksums) if request.checksums else None
        positions = _positions_of(request)
        outcomes = self._kernel.commit_store(
            session.id, request.lease, self._l1.clock.now, positions, checksums=checksums
        )
        if self._l1.tracing is not None:
            self._l1.tracing.settled(request.lease, positions, outcomes)
        return m.SettledReply(request.rid, bytes(outcomes))

    def _report_damaged(self, session_id: int, lease_id: int, now: float, positions: Sequence[int]) -> bytearray:
        """A worker is trusted with this because it is trusted with the bytes of the pool: it could have changed
        them."""
        outcomes = self._kernel.report_damaged(session_id, lease_id, now, positions)
        self.counters["reported_damaged"] += len(positions)
        return outcomes

    def _renew_lease(self, session: Session, request: m.RenewLease) -> m.Message:
        now = self._l1.clock.now
        return m.Renewed(request.rid, self._kernel.renew_lease(session.id, request.lease, now) - now)

    def _lease_status(self, session: Session, request: m.LeaseStatusOf) -> m.Message:
        now = self._l1.clock.now
        found = self._kernel.lease_status(session.id, request.lease, now)
        return m.LeaseState(
            request.rid,
            "expired" if found.expired else "open" if found.open else "settled",
            found.kind.name.lower(),
            max(0.0, found.deadline - now) if found.open else 0.0,
            len(found.answers),
            found.answers.count(Settled.OPEN),
        )

    # --- the rest -----------------------------------------------------------------------------------------

    def _config(self, session: Session, request: m.ConfigRequest) -> m.Message:
        if session.uid not in (0, os.geteuid()):
            raise UsageError("only the server's own user may see its settings: run the command as that user")
        return m.StatusReply(request.rid, plain(self._settings))

    def _report_blocks(self, session: Session, request: m.ReportBlocks) -> m.Message:
        self._layout_of(session, request.namespace)
        keys = split_keys(request.keys)
        if not keys or len(request.hashes) % len(keys) or not request.hashes or request.block_size < 1:
            raise UsageError(
                f"{len(request.hashes)} hashes of blocks of {request.block_size} tokens for {len(keys)} keys: give the "
                "same number for each key, and a size above 0"
            )
        hashes = [*request.hashes, *(() if request.parent is None else (request.parent,))]
        if any(not 0 < len(each) <= BLOCK_HASH_BYTES_MAX for each in hashes):
            raise UsageError(f"a block's hash has 1 to {BLOCK_HASH_BYTES_MAX} bytes")
        taps = self._l1.taps
        if taps is None or not taps.wants_blocks:
            return m.Done(request.rid, 0)
        taps.blocks(request, keys, self._l1.media_of(request.namespace, keys))
        return m.Done(request.rid, len(keys))

    def _pin(self, session: Session, request: m.Pin) -> m.Message:
        self._layout_of(session, request.namespace)
        statuses = self._kernel.pin(
            session.id, request.namespace, split_keys(request.keys), request.ttl_s, self._l1.clock.now
        )
        return m.PinnedReply(request.rid, bytes(statuses))

    def _unpin(self, session: Session, request: m.Unpin) -> m.Message:
        self._layout_of(session, request.namespace)
        statuses = self._kernel.unpin(session.id, request.namespace, split_keys(request.keys), self._l1.clock.now)
        return m.PinnedReply(request.rid, bytes(statuses))


def _check_may(what: str, session: Session, namespace: int | None) -> None:
    """A session may clear and drop what it has registered. Our own user and root, who run the command line, may do so
    everywhere."""
    if namespace in session.namespaces or session.uid in (os.geteuid(), 0):
        return
    scope = "everything" if namespace is None else f"namespace {namespace:016x}"
    cure = "" if namespace is None else "register_layout first, or "
    raise (UsageError if namespace is None else UnknownNamespaceError)(
        f"this session may not {what} {scope}, which it has not registered: {cure}do it as the server's own "
        f"user (uid {os.geteuid()}) over the lifeline"
    )


def _positions_of(request: m.Settle) -> Sequence[int]:
    if request.count > BATCH_KEYS_MAX or request.first < 0:
        raise LimitError(f"{request.count} positions in one frame, and the limit is {BATCH_KEYS_MAX}")
    if request.count:
        return range(request.first, request.first + request.count)
    return unpack_positions(request.positions)
