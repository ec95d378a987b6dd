"""Where events are produced: from the kernel's effects, tiers' completions and sessions, a batch at a time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from lmcache_core.kernel.effects import Committed, Effect, Evicted, LeaseExpired, Removed, SlotsMarked
from lmcache_core.kernel.states import State
from lmcache_core.observe.bus import EventBus
from lmcache_core.observe.events import (
    BlocksReported,
    CacheCleared,
    DrainBegun,
    LeaseTimedOut,
    LookupAnswered,
    ObjectsAdmitted,
    ObjectsEvicted,
    ObjectsLoaded,
    ObjectsRemoved,
    ObjectsTiered,
    ObjectsUntiered,
    PoolAdopted,
    ServerFault,
    SessionClosed,
    SessionOpened,
    SlotsQuarantined,
    TierListChanged,
    TierStateChanged,
    of_objects,
    one,
)
from lmcache_core.pool.tables import NO_ROW
from lmcache_core.protocol import messages as m

if TYPE_CHECKING:
    from lmcache_core.server.session import Session
    from lmcache_core.tiers.l1 import CommittedObject


class EventTaps:
    """Exists only if there are subscribers; otherwise none of this runs. Lives on the loop's thread; implements
    `tiers.observer.TierObserver`."""

    def __init__(self, bus: EventBus, eviction_policy: str, wants_blocks: bool, wants_tokens: bool) -> None:
        self.bus = bus
        self.wants_blocks = wants_blocks
        self.wants_tokens = wants_tokens
        self._policy = eviction_policy
        self._faults = 0

    def effect(self, effect: Effect) -> None:
        """The kernel decided this, and it was carried out."""
        emit = self.bus.emit
        match effect:
            case Committed():
                kind = ObjectsLoaded if effect.loaded else ObjectsAdmitted
                emit(of_objects, kind, effect.objects, keeps=len(effect.objects))
            case Evicted():
                emit(of_objects, ObjectsEvicted, effect.objects, keeps=len(effect.objects), policy=self._policy)
            case Removed():
                reason = effect.reason.name.lower()
                emit(of_objects, ObjectsRemoved, effect.objects, keeps=len(effect.objects), reason=reason)
            case LeaseExpired():
                kind_of_lease = effect.kind.name.lower()
                emit(one, LeaseTimedOut, session=effect.session_id, lease=effect.lease_id, kind=kind_of_lease)
            case SlotsMarked(state=State.QUARANTINED):
                row = -1 if effect.row is None or effect.row == NO_ROW else effect.row
                emit(one, SlotsQuarantined, slots=len(effect.offsets), row=row)

    def stored(self, tier: str, objects: Sequence[CommittedObject]) -> None:
        self.bus.emit(of_objects, ObjectsTiered, objects, keeps=len(objects), tier=tier)

    def removed(self, tier: str, namespace: int, keys: Sequence[bytes]) -> None:
        self.bus.emit(one, ObjectsUntiered, keeps=len(keys), namespace=namespace, keys=list(keys), tier=tier)

    def blocks(self, request: m.ReportBlocks, keys: Sequence[bytes], media: bytes) -> None:
        """An engine has said which of its blocks these keys hold."""
        self.bus.emit(
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
        self.bus.emit(one, TierStateChanged, tier=tier, what=what, state=state, error=error)

    def tier_changed(self, tier: str, action: str) -> None:
        """Tiers were changed while the server runs."""
        self.bus.emit(one, TierListChanged, tier=tier, action=action)

    def lookup(
        self, namespace: int, keys: int, hits: int, loaded: int, reasons: dict[str, int], tiers: bool, duration_s: float
    ) -> None:
        """A lookup that came as a call has ended."""
        self.bus.emit(
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

    def session_opened(self, session: Session) -> None:
        self.bus.emit(
            one,
            SessionOpened,
            session=session.id,
            client=session.name,
            carrier=session.carrier,
            pid=session.pid,
            uid=session.uid,
        )

    def session_ended(self, session: Session) -> None:
        self.bus.emit(one, SessionClosed, session=session.id, client=session.name, how=session.ended_by)

    def adopted(self, objects: int, nbytes: int) -> None:
        self.bus.emit(one, PoolAdopted, objects=objects, nbytes=nbytes)

    def cleared(self, namespace: int | None, tiers: bool, session: int) -> None:
        self.bus.emit(one, CacheCleared, namespace=namespace, tiers=tiers, session=session)

    def drain_begun(self, drain_s: float) -> None:
        self.bus.emit(one, DrainBegun, drain_s=drain_s)

    def look(self, faults: int) -> None:
        """Called regularly: `faults` of the loop and of requests so far; also disables subscribers that hang."""
        if faults > self._faults:
            self._faults = faults
            self.bus.emit(one, ServerFault, where="the loop, or a request")
        self.bus.check()
