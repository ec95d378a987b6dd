"""The one object that the rooms of a server report to: it counts, emits events and passes requests to a tracer.

Figures are always counted. `listens` says whether the settings name a subscriber or a tracer; where it is false, only
what counts something has to be reported, and nothing else is built or called.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from lmcache_core.kernel.effects import Committed, Effect, Evicted, LeaseExpired, PolicyNoted, Removed, SlotsMarked
from lmcache_core.kernel.states import State
from lmcache_core.observe.bus import EventBus
from lmcache_core.observe.events import (
    BlocksReported,
    CacheCleared,
    DrainBegun,
    EvictionChanged,
    LeaseTimedOut,
    LookupAnswered,
    ObjectsAdmitted,
    ObjectsEvicted,
    ObjectsLoaded,
    ObjectsOnTiers,
    ObjectsRemoved,
    ObjectsTiered,
    ObjectsUntiered,
    PoolAdopted,
    ServerFault,
    SessionClosed,
    SessionOpened,
    SlotsQuarantined,
    TierListChanged,
    TiersRecounted,
    TierStateChanged,
    of_objects,
    one,
)
from lmcache_core.observe.tracer import RequestTracer
from lmcache_core.pool.tables import NO_ROW
from lmcache_core.protocol import messages as m
from lmcache_core.server.peers.late_answers import LateAnswers
from lmcache_core.server.pool.traffic import Traffic, missed

if TYPE_CHECKING:
    from lmcache_core.kernel.answers import Grants, KernelLookup
    from lmcache_core.kernel.kernel import Kernel
    from lmcache_core.kernel.objects import Incarnation
    from lmcache_core.server.peers.session import Session
    from lmcache_core.server.process.loop import Loop
    from lmcache_core.tiers.contract import Outcome
    from lmcache_core.tiers.l1 import CommittedObject
    from lmcache_core.tiers.object.transfer import Loaded
    from lmcache_core.tiers.tiering import Tiering


class ServerObserver:
    """Lives on the loop's thread; implements `tiers.observer.TierObserver`."""

    def __init__(self, kernel: Kernel, loop: Loop | None = None, eviction_policy: str = "") -> None:
        """Counts from now on; see `watch`. `loop`: None if no subscriber will ask for anything."""
        self.figures = Traffic()
        self.events: EventBus | None = None
        self.tracer: RequestTracer | None = None
        self.listens = False
        self.wants_blocks = self.wants_tokens = False
        self._kernel = kernel
        self._loop = loop
        self._policy = eviction_policy
        self._emit: Callable[..., None] = _ignore
        self._spans = RequestTracer()
        self._tiering: Tiering | None = None
        self._faults = 0
        self._pending_stores = LateAnswers[tuple[m.PrepareStore, Hashable]](self._store_answered)

    def watch(
        self,
        events: EventBus | None,
        tracer: RequestTracer | None,
        *,
        wants_blocks: bool = False,
        wants_tokens: bool = False,
    ) -> None:
        """What the settings ask for, before the server answers anybody: the bus of the subscribers, and what these want
        to know of engines; and a tracer."""
        self.events, self.tracer = events, tracer
        self.listens = events is not None or tracer is not None
        self.wants_blocks, self.wants_tokens = wants_blocks, wants_tokens
        if events is not None:
            self._emit = events.emit
        if tracer is not None:
            self._spans = tracer

    def begin_tiering(self, tiering: Tiering) -> None:
        """There are tiers from now on."""
        self._tiering = tiering

    # --- requests -------------------------------------------------------------------------------------------

    def lookup(self, session: Session, request: m.LookupRequest, found: KernelLookup, absent: int) -> None:
        """The L1 has answered a lookup; `absent` of its keys are missing."""
        keys = len(found.statuses)
        reasons = missed(found.statuses, found.reasons) if absent else {}
        self.figures.looked_up(request.namespace, keys, keys - absent, reasons, session.chunk_tokens)
        if self.listens:
            self._lookup_ended(self.trace_of(request), request.namespace, keys, keys - absent, 0, reasons, False, 0.0)

    def trace_of(self, request: m.LookupRequest | m.PrepareStore) -> Hashable | None:
        """A request begins that is answered later. Returns what its loads and its end are reported with."""
        return self._spans.begin(getattr(request, "traceparent", "")) if self.listens else None

    def lookup_ended(
        self,
        session: Session,
        trace: Hashable | None,
        namespace: int,
        keys: int,
        hits: int,
        loaded: int,
        reasons: dict[str, int],
        duration_s: float,
        came_from: Iterable[str],
    ) -> None:
        """A lookup that tiers were asked for has ended. See `Traffic.loaded`."""
        self.figures.loaded(namespace, keys, hits, loaded, reasons, duration_s, came_from, session.chunk_tokens)
        if self.listens:
            self._lookup_ended(trace, namespace, keys, hits, loaded, reasons, True, duration_s)

    def _lookup_ended(
        self,
        trace: Hashable | None,
        namespace: int,
        keys: int,
        hits: int,
        loaded: int,
        reasons: dict[str, int],
        tiers: bool,
        duration_s: float,
    ) -> None:
        self._emit(
            one,
            LookupAnswered,
            namespace=namespace,
            keys=keys,
            hits=hits,
            loaded=loaded,
            reasons=reasons,
            tiers=tiers,
            duration_s=duration_s,
        )
        if trace is not None:
            self._spans.lookup_ended(trace, namespace, keys, hits, loaded)

    def retrieve(self, request: m.PrepareRetrieve, grants: Grants, object_bytes: int) -> None:
        """A page of a retrieve was granted."""
        begins = not request.lease
        self.figures.retrieved(request.namespace, grants.statuses, grants.reasons, object_bytes, begins=begins)

    def store(self, session: Session, request: m.PrepareStore, reply: m.Message | None) -> None:
        """Slots were requested: the answer, or None if it follows. Only if somebody `listens`."""
        trace = self.trace_of(request)
        if trace is None:
            return
        if reply is None:
            self._pending_stores.keep(session, request.rid, (request, trace))
        else:
            self._store_answered((request, trace), reply)

    def _store_answered(self, pending: tuple[m.PrepareStore, Hashable], reply: m.Message | None) -> None:
        request, trace = pending
        if isinstance(reply, m.Granted) and reply.lease:
            self._spans.store_granted(trace, request.namespace, request.keys, reply.lease, reply.statuses)
        else:
            why = "unanswered" if reply is None else reply.code.lower() if isinstance(reply, m.Error) else ""
            self._spans.store_refused(trace, request.namespace, request.keys, why)

    def settled(self, lease: int, positions: Sequence[int], outcomes: bytes | bytearray) -> None:
        """Positions of a lease were committed, aborted or read. Only if somebody `listens`."""
        self._spans.settled(lease, positions, outcomes)

    # --- the kernel -----------------------------------------------------------------------------------------

    def effect(self, effect: Effect) -> None:
        """The kernel decided this, and it was carried out. Only if somebody `listens`."""
        emit = self._emit
        match effect:
            case Committed():
                kind = ObjectsLoaded if effect.loaded else ObjectsAdmitted
                emit(of_objects, kind, effect.objects, keeps=len(effect.objects))
            case Evicted():
                emit(of_objects, ObjectsEvicted, effect.objects, keeps=len(effect.objects), policy=self._policy)
            case Removed():
                reason = effect.reason.name.lower()
                emit(of_objects, ObjectsRemoved, effect.objects, keeps=len(effect.objects), reason=reason)
            case PolicyNoted():
                emit(one, EvictionChanged, policy=self._policy, reason=effect.text)
            case LeaseExpired():
                kind_of_lease = effect.kind.name.lower()
                emit(one, LeaseTimedOut, session=effect.session_id, lease=effect.lease_id, kind=kind_of_lease)
            case SlotsMarked(state=State.QUARANTINED):
                row = -1 if effect.row is None or effect.row == NO_ROW else effect.row
                emit(one, SlotsQuarantined, slots=len(effect.offsets), row=row)

    # --- tiers ----------------------------------------------------------------------------------------------

    def stored(self, tier: str, objects: Sequence[CommittedObject]) -> None:
        self._emit(of_objects, ObjectsTiered, objects, keeps=len(objects), tier=tier)

    def removed(self, tier: str, namespace: int, keys: Sequence[bytes]) -> None:
        self._emit(one, ObjectsUntiered, keeps=len(keys), namespace=namespace, keys=list(keys), tier=tier)

    def changed(self, namespace: int, keys: Sequence[bytes]) -> None:
        self._emit_on_tiers(namespace, keys, asked=False)

    def ask_tiers(self, namespace: int, keys: Sequence[bytes]) -> None:
        """A subscriber wants to know: from any thread, and it does not wait."""
        if self._loop is not None:
            self._loop.call(partial(self._emit_on_tiers, namespace, keys, asked=True))

    def _emit_on_tiers(self, namespace: int, keys: Sequence[bytes], *, asked: bool) -> None:
        if self.wants_blocks:
            there, keys = self.on_tiers(namespace, keys), list(keys)
            self._emit(one, ObjectsOnTiers, keeps=len(keys), namespace=namespace, keys=keys, there=there, asked=asked)

    def on_tiers(self, namespace: int, keys: Sequence[bytes]) -> bytes:
        """`Tiering.on_tiers`, and zeros without tiers."""
        return bytes(len(keys)) if self._tiering is None else self._tiering.on_tiers(namespace, keys)

    def for_tiers(self, namespace: int, keys: Sequence[bytes]) -> Sequence[Incarnation]:
        """The incarnations that the pool has of these keys, and tiers may be given; none without tiers."""
        return () if self._tiering is None else self._kernel.kept(namespace, keys)

    def loaded(
        self,
        tier: str,
        began_s: float,
        returned_s: float,
        waiters: Mapping[Any, Sequence[int]],
        nbytes: int,
        results: Sequence[Loaded],
    ) -> None:
        self._spans.loaded(tier, began_s, returned_s, waiters, nbytes, results)

    def load_failed(self, tier: str, began_s: float, waiters: Mapping[Any, Sequence[int]], reason: str) -> None:
        self._spans.load_failed(tier, began_s, waiters, reason)

    def storing(self, tier: str, objects: Sequence[CommittedObject]) -> Callable[[Sequence[Outcome]], None] | None:
        return self._spans.storing(tier, objects)

    def recounted(self) -> None:
        self._emit(one, TiersRecounted)

    def blocks(self, request: m.ReportBlocks, keys: Sequence[bytes], media: bytes) -> None:
        """An engine has reported which of its blocks these keys hold."""
        self._emit(
            one,
            BlocksReported,
            keeps=len(keys) + len(request.hashes),
            namespace=request.namespace,
            keys=list(keys),
            hashes=request.hashes,
            parent=request.parent,
            media=media,
            block_size=request.block_size,
            lora_id=request.lora_id,
            lora_name=request.lora_name,
            group=request.group,
            token_ids=request.token_ids if self.wants_tokens else [],
        )

    def breaker_moved(self, tier: str, what: str, state: str, error: str) -> None:
        self._emit(one, TierStateChanged, tier=tier, what=what, state=state, error=error)

    def tier_changed(self, tier: str, action: str) -> None:
        """Tiers were changed while the server runs."""
        self._emit(one, TierListChanged, tier=tier, action=action)

    # --- sessions and the server ----------------------------------------------------------------------------

    def session_opened(self, session: Session) -> None:
        self._emit(
            one,
            SessionOpened,
            session=session.id,
            client=session.name,
            carrier=session.carrier,
            pid=session.pid,
            uid=session.uid,
        )

    def session_ended(self, session: Session) -> None:
        if session.client_id:  # it has said hello
            self._emit(one, SessionClosed, session=session.id, client=session.name, how=session.ended_by)

    def adopted(self, objects: int, nbytes: int) -> None:
        self._emit(one, PoolAdopted, objects=objects, nbytes=nbytes)

    def cleared(self, namespace: int | None, tiers: bool, session: int) -> None:
        self._emit(one, CacheCleared, namespace=namespace, tiers=tiers, session=session)

    def drain_begun(self, drain_s: float) -> None:
        self._emit(one, DrainBegun, drain_s=drain_s)

    def check(self, faults: int) -> None:
        """Called about once a second: `faults` of the loop and of requests so far; also disables subscribers that
        hang."""
        if faults > self._faults:
            self._faults = faults
            self._emit(one, ServerFault, where="the loop, or a request")
        if self.events is not None:
            self.events.check()
        self._spans.check()

    def status(self) -> dict[str, Any]:
        """For `status`. None: nobody asked for these."""
        return {"tracing": self._spans.status(), "events": None if self.events is None else self.events.status()}

    def close(self) -> None:
        """Deliver what is left, for a moment at most."""
        with contextlib.ExitStack() as ends:
            ends.callback(self._spans.close)
            if self.events is not None:
                ends.callback(self.events.close)


def _ignore(*arguments: Any, **more: Any) -> None:
    """Stands for `EventBus.emit` where there is no subscriber."""
