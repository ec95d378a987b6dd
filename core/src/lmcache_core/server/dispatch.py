"""A handler for each request. All are quick: they run on the loop, between two system calls."""

from __future__ import annotations

import contextlib
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
from lmcache_core.guard import guarded
from lmcache_core.kernel.answers import Grants, Reason, Settled
from lmcache_core.limits import BATCH_KEYS_MAX, CHUNK_TOKENS_MAX, SESSION_NAME_BYTES_MAX
from lmcache_core.pool.layout import Layout
from lmcache_core.protocol import messages as m
from lmcache_core.protocol.codec import (
    UNREADABLE,
    encode,
    error_reply,
    pool_info_to_wire,
    read_request,
    refusal_of,
    rid_of,
    split_keys,
    unpack_positions,
    unpack_u64,
)
from lmcache_core.server.peers.session import Peer, Session
from lmcache_core.server.waiting.tier_waits import granted
from lmcache_core.settings.present import plain

if TYPE_CHECKING:
    from lmcache_core.server.server_parts import Parts

log = logging.getLogger(__name__)
MAPS_POOL = "maps_pool"


class Dispatch:
    """Frames in, replies out. Nothing that a peer sends can end or stall the loop."""

    def __init__(self, parts: Parts, status: Callable[[], dict[str, Any]]) -> None:
        """`status` answers `StatusRequest`."""
        self._parts = parts
        kernel, lookups = parts.kernel, parts.lookups
        self.counters: Counter[str] = Counter()
        self.handlers: dict[type, Callable[[Session, Any], m.Message | None]] = {
            m.Attach: self._attach,
            m.AttachUnlocked: self._attach,
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
            m.QuotasRequest: parts.quotas.describe,
            m.SetQuota: parts.quotas.change,
            m.RemoveQuota: parts.quotas.change,
            m.Operate: parts.companions.operate,
            m.CallOperation: parts.operations.call,
            m.GetChunkSize: lambda s, r: m.ChunkSize(r.rid, parts.settings.chunk_tokens),
            m.StatusRequest: lambda s, r: m.StatusReply(r.rid, _for(s, status())),
            m.ConfigRequest: self._config,
            m.Ping: lambda s, r: m.Pong(r.rid, r.payload),
            m.Noop: lambda s, r: m.Done(r.rid),
        }

    def on_frame(self, peer: Peer, frame: memoryview) -> None:
        """Serve one frame of a peer."""
        try:
            request = read_request(frame)
        except UNREADABLE as error:
            self.counters["garbage"] += 1
            peer.send(encode(error_reply(rid_of(frame), refusal_of(frame, error))))
            return
        parts = self._parts
        undo = parts.kernel.undo
        undo.begin()
        try:
            reply = self._answer(peer, request)
            answer = None if reply is None else encode(reply)
        except BaseException as error:  # noqa: BLE001 - third-party code, even in Rust; `_failed` tells of it
            reply = self._failed(request, error)
            answer = encode(reply)
        undo.end()
        parts.l1.apply()
        if parts.request_watch.on:
            parts.request_watch.served(peer.session, request, reply)
        if answer is not None:
            peer.send(answer)

    def _answer(self, peer: Peer, request: m.Request) -> m.Message | None:
        session = peer.session
        if session is None:
            return self._hello(peer, request)
        session.seen_at_s = self._parts.clock.now
        handler = self.handlers.get(type(request))
        if handler is None:
            raise ProtocolError("this session has already said hello")
        return handler(session, request)

    def _failed(self, request: m.Request, error: BaseException) -> m.Message:
        """Take back what the request has changed, and return its answer. A bug of ours must not take down the node's
        cache; the peer gets an error, and the log has the traceback."""
        parts = self._parts
        failures = [error]
        guarded(failures.append, parts.kernel.undo.back)

        def left(failure: BaseException) -> None:
            what = "not everything that %s had changed could be taken back"
            log.error(what, type(request).__name__, exc_info=failure)
            self.counters["undo_faults"] += 1

        for each in failures:
            guarded(left, parts.kernel.put_right, each)
        if isinstance(error, CacheError):
            self.counters[f"error_{error.code.lower()}"] += 1
            return error_reply(request.rid, error)
        if isinstance(error, KeyboardInterrupt):
            parts.kernel.undo.end()
            raise error
        log.error("request %s failed", type(request).__name__, exc_info=error)
        self.counters["internal_errors"] += 1
        return m.Error(request.rid, "INTERNAL", "the server failed on this request; its log has the traceback", "never")

    # --- the session --------------------------------------------------------------------------------------

    def _hello(self, peer: Peer, request: m.Request) -> m.Message | None:
        parts = self._parts
        if not isinstance(request, m.Hello):
            return m.Error(request.rid, "DISCONNECTED", "this server knows no such session: say hello", "reconnect")
        if not request.version_min <= m.PROTOCOL_VERSION_MAX or not request.version_max >= m.PROTOCOL_VERSION_MIN:
            raise VersionError(
                f"the client speaks protocol {request.version_min} to {request.version_max}, this server "
                f"{m.PROTOCOL_VERSION_MIN} to {m.PROTOCOL_VERSION_MAX}: install the same lmcache-core on both sides"
            )
        if len(request.name.encode()) > SESSION_NAME_BYTES_MAX:
            raise ProtocolError(f"a session's name has at most {SESSION_NAME_BYTES_MAX} bytes")
        maps_pool = MAPS_POOL in request.capabilities
        segment, settings = parts.segment, parts.settings
        session = parts.sessions.open(
            peer,
            request.client_id,
            request.name,
            request.pid,
            parts.clock.now,
            wants_pool=maps_pool,
            takes_token=m.LIFE_TOKEN in request.capabilities,
            chunk_tokens=_declared_chunk(request.capabilities),
        )
        parts.observer.session_opened(session)
        welcome = m.Welcome(
            request.rid,
            min(request.version_max, m.PROTOCOL_VERSION_MAX),
            session.id,
            settings.name,
            parts.kernel.epoch,
            pool_info_to_wire(segment.info),
            session.row,
            settings.chunk_tokens,
            settings.lease.write_ttl_s,
            settings.lease.read_ttl_s,
            self._capabilities(),
            uid=os.geteuid(),
            companions=parts.companions.offers(),
        )
        if not (maps_pool and peer.can_pass_fd):
            return welcome
        fd = segment.worker_fd()
        try:
            with contextlib.closing(parts.sessions.give_token(session)) as token:
                passed = (fd,) if token.closed else (fd, token.fileno())
                peer.send(encode(welcome), *passed)
        finally:
            os.close(fd)
        return None

    def _capabilities(self) -> list[str]:
        """Capabilities, so that clients do not send requests in vain."""
        observer = self._parts.observer
        return [m.TRACES] * (observer.tracer is not None) + [m.WANTS_BLOCKS] * observer.wants_blocks

    def _attach(self, session: Session, request: m.Attach) -> m.Message:
        locked, now = not isinstance(request, m.AttachUnlocked), self._parts.clock.now
        held = self._parts.sessions.attach(session, request.row, request.nonce, request.held, now, locked=locked)
        return m.Attached(request.rid, held)

    def _clear(self, session: Session, request: m.Clear) -> m.Message | None:
        _check_may("clear", session, request.namespace)
        return self._parts.clears.clear(session, request)

    def _drop(self, session: Session, request: m.Drop) -> m.Message:
        _check_may("drop objects of", session, request.namespace)
        keys, incarnations = split_keys(request.keys), unpack_u64(request.incarnations)
        if len(keys) != len(incarnations):
            raise UsageError(f"{len(keys)} keys and {len(incarnations)} incarnations: give one for each key")
        wanted = [(key, number) for key, number in zip(keys, incarnations, strict=True) if number]
        if request.damaged:
            self.counters["reported_damaged"] += len(wanted)
        reason = Reason.DAMAGED if request.damaged else Reason.DROPPED
        return m.Done(request.rid, self._parts.l1.remove(request.namespace, wanted, reason, tiers=request.tiers))

    def _register_layout(self, session: Session, request: m.RegisterLayout) -> m.Message:
        layout = Layout(request.dtype, tuple(request.shape), request.memory_format)
        if layout.fingerprint != request.fingerprint:
            raise PoolMismatchError(
                f"layout {layout} has fingerprint {layout.fingerprint:x} here and {request.fingerprint:x} at the "
                "client: install the same lmcache-core on both sides"
            )
        layout_id = self._parts.namespaces.register(session, request.namespace, layout, request.label)
        return m.LayoutRegistered(request.rid, layout_id, layout.nbytes)

    def _end_session(self, session: Session, request: m.EndSession) -> m.Message | None:
        parts = self._parts
        if not request.goodbye:
            parts.stores.session_ends(session)
            parts.kernel.end_session(session.id, parts.clock.now, request.leases)
            return m.Done(request.rid)
        session.send(m.Done(request.rid))
        parts.sessions.goodbye(session, parts.clock.now)
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
        return self._parts.lookups.lookup(session, request, split_keys(request.keys))

    def _cancel(self, session: Session, request: m.Cancel) -> m.Message:
        parts = self._parts
        waiting = (parts.lookups, parts.explains, parts.stored_waits, parts.stores)
        promise = session.promised.pop(request.lookup, 0)
        ended = sum(each.cancel(session, request.lookup) for each in waiting)
        if promise:  # its answer was on its way when the client gave it up
            parts.kernel.free_lookup_locks(session.id, [promise], parts.clock.now)
            parts.lookups.freed(session, [promise])
        return m.Done(request.rid, ended)

    def _free_lookup_locks(self, session: Session, request: m.FreeLookupLocks) -> m.Message:
        parts = self._parts
        if len(request.promises) > BATCH_KEYS_MAX:
            raise LimitError(f"{len(request.promises)} promises in one frame, and the limit is {BATCH_KEYS_MAX}")
        freed = parts.kernel.free_lookup_locks(session.id, request.promises, parts.clock.now)
        parts.lookups.freed(session, request.promises)
        return m.Done(request.rid, freed)

    def _redeem_promise(self, session: Session, request: m.RedeemPromise) -> m.Message:
        self._layout_of(session, request.namespace)
        keys, now = split_keys(request.keys), self._parts.clock.now
        return m.Done(request.rid, self._parts.kernel.redeem_promise(request.promise, request.namespace, keys, now))

    # --- the two phases -----------------------------------------------------------------------------------

    def _prepare_store(self, session: Session, request: m.PrepareStore) -> m.Message | None:
        parts, keys = self._parts, split_keys(request.keys)
        layout_id = self._layout_of(session, request.namespace)
        parts.l1.before_store(layout_id, len(keys))
        now, wait_s = parts.clock.now, parts.stores.wait_s(session)
        answer = parts.kernel.begin_store(
            session.id, request.namespace, layout_id, keys, now, lease_id=request.lease, wait_s=wait_s
        )
        reply = None
        if isinstance(answer, Grants):
            reply = parts.tier_waits.answer(session, request, layout_id, keys, answer)
        else:
            parts.stores.wait(session, request, layout_id, keys, answer)
        if parts.observer.listens:
            parts.observer.store(session, request, reply)
        return reply

    def _prepare_retrieve(self, session: Session, request: m.PrepareRetrieve) -> m.Message:
        layout_id = self._layout_of(session, request.namespace)
        parts = self._parts
        now = parts.clock.now
        grants = parts.kernel.prepare_retrieve(
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
        parts.observer.retrieve(request, grants, parts.l1.layouts[layout_id].nbytes)
        return granted(request.rid, grants, now)

    def _settle(self, settle: Callable[..., bytearray]) -> Callable[[Session, m.Settle], m.Message]:
        parts = self._parts

        def handle(session: Session, request: m.Settle) -> m.Message:
            positions = _positions_of(request)
            outcomes = settle(session.id, request.lease, parts.clock.now, positions)
            if parts.observer.listens:
                parts.observer.settled(request.lease, positions, outcomes)
            return m.SettledReply(request.rid, bytes(outcomes))

        return handle

    def _commit_store(self, session: Session, request: m.CommitStore) -> m.Message:
        checksums = unpack_u64(request.checksums) if request.checksums else None
        positions = _positions_of(request)
        parts = self._parts
        outcomes = parts.kernel.commit_store(session.id, request.lease, parts.clock.now, positions, checksums=checksums)
        if parts.observer.listens:
            parts.observer.settled(request.lease, positions, outcomes)
        return m.SettledReply(request.rid, bytes(outcomes))

    def _report_damaged(self, session_id: int, lease_id: int, now: float, positions: Sequence[int]) -> bytearray:
        """A worker is trusted with this because it is trusted with the bytes of the pool: it could have changed
        them."""
        outcomes = self._parts.kernel.report_damaged(session_id, lease_id, now, positions)
        self.counters["reported_damaged"] += len(positions)
        return outcomes

    def _renew_lease(self, session: Session, request: m.RenewLease) -> m.Message:
        now = self._parts.clock.now
        return m.Renewed(request.rid, self._parts.kernel.renew_lease(session.id, request.lease, now) - now)

    def _lease_status(self, session: Session, request: m.LeaseStatusOf) -> m.Message:
        now = self._parts.clock.now
        found = self._parts.kernel.lease_status(session.id, request.lease, now)
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
        if not session.operates:
            raise UsageError("only the server's own user may see its settings: run the command as that user")
        return m.StatusReply(request.rid, plain(self._parts.settings))

    def _report_blocks(self, session: Session, request: m.ReportBlocks) -> m.Message:
        self._layout_of(session, request.namespace)
        keys = split_keys(request.keys)
        if not keys or len(request.hashes) % len(keys) or not request.hashes:
            raise UsageError(
                f"{len(request.hashes)} hashes of blocks of {request.block_size} tokens for {len(keys)} keys: give the "
                "same number for each key"
            )
        observer = self._parts.observer
        if not observer.wants_blocks:
            return m.Done(request.rid, 0)
        observer.blocks(request, keys, self._parts.l1.media_of(request.namespace, keys))
        return m.Done(request.rid, len(keys))

    def _pin(self, session: Session, request: m.Pin) -> m.Message:
        self._layout_of(session, request.namespace)
        statuses = self._parts.kernel.pin(
            session.id, request.namespace, split_keys(request.keys), request.ttl_s, self._parts.clock.now
        )
        return m.PinnedReply(request.rid, bytes(statuses))

    def _unpin(self, session: Session, request: m.Unpin) -> m.Message:
        self._layout_of(session, request.namespace)
        statuses = self._parts.kernel.unpin(
            session.id, request.namespace, split_keys(request.keys), self._parts.clock.now
        )
        return m.PinnedReply(request.rid, bytes(statuses))


def _check_may(what: str, session: Session, namespace: int | None) -> None:
    """A session may clear and drop what it has registered. Our own user and root, who run the command line, may do so
    everywhere."""
    if namespace in session.namespaces or session.operates:
        return
    scope = "everything" if namespace is None else f"namespace {namespace:016x}"
    cure = "" if namespace is None else "register_layout first, or "
    raise (UsageError if namespace is None else UnknownNamespaceError)(
        f"this session may not {what} {scope}, which it has not registered: {cure}do it as the server's own "
        f"user (uid {os.geteuid()}) over the lifeline"
    )


def _for(session: Session, status: dict[str, Any]) -> dict[str, Any]:
    """A status without namespaces that are others': whoever knows the id of one may use it, and clear it."""
    if not session.operates:
        shown = {f"{each:016x}" for each in session.namespaces} | {"other"}
        for table in (status, status["traffic"]):
            table["namespaces"] = {name: row for name, row in table["namespaces"].items() if name in shown}
    return status


def _positions_of(request: m.Settle) -> Sequence[int]:
    if request.count:
        return range(request.first, request.first + request.count)
    return unpack_positions(request.positions)


def _declared_chunk(capabilities: Sequence[str]) -> int:
    """How many tokens make one of the client's keys, as it says; 0: it does not say, or nothing sensible."""
    declared = next((each.removeprefix(m.CHUNK_TOKENS) for each in capabilities if each.startswith(m.CHUNK_TOKENS)), "")
    tokens = int(declared) if declared.isascii() and declared.isdigit() and len(declared) < 8 else 0
    return tokens if tokens <= CHUNK_TOKENS_MAX else 0
