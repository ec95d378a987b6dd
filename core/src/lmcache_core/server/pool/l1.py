"""The L1 for everything outside the kernel: the kernel's decisions, carried out on the pool.

`apply` runs after every call into the kernel and before any reply: a slot is marked in the pool's table before anyone
learns that it was granted.
"""

from __future__ import annotations

import contextlib
import logging
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from functools import partial
from itertools import count
from typing import TYPE_CHECKING

from lmcache_core.clock import Clock
from lmcache_core.errors import LeaseExpiredError, LimitError
from lmcache_core.guard import guarded
from lmcache_core.kernel.answers import Grant, Grants, Reason, Settled
from lmcache_core.kernel.effects import (
    Committed,
    Effect,
    Evicted,
    LeaseExpired,
    PolicyFailed,
    PolicyNoted,
    Read,
    Removed,
    RowLeft,
    SlabAssigned,
    SlotsMarked,
)
from lmcache_core.kernel.kernel import Kernel
from lmcache_core.kernel.objects import Incarnation
from lmcache_core.kernel.rooms import Preparation
from lmcache_core.kernel.sessions import SERVER_SESSION
from lmcache_core.limits import INDEX_SWEEP_KEYS_MAX, LAYOUTS_MAX, ROOM_WAIT_S, TIER_WARNING_PAUSE_S
from lmcache_core.pool.layout import Layout
from lmcache_core.pool.segment import Segment
from lmcache_core.server.peers.shares import Share
from lmcache_core.server.peers.tallies import WorkerTallies
from lmcache_core.server.pool.observer import ServerObserver
from lmcache_core.server.pool.publishing import open_publisher
from lmcache_core.tiers import l1 as contract
from lmcache_core.tiers.l1 import (
    IN_POOL,
    ON_REMOTE_TIER,
    ON_TIER,
    LoadGrant,
    Loading,
    LoadWait,
    Named,
    Slot,
    StorePin,
    TierReason,
)

if TYPE_CHECKING:
    from lmcache_core.protocol.messages import Message
    from lmcache_core.server.peers.session import Session
    from lmcache_core.tiers.tiering import Tiering

log = logging.getLogger(__name__)
CANCELLED_KEPT = 64  # too few to be worth removing
_OF_MEMORY = frozenset((SlotsMarked, SlabAssigned))  # half of all effects: carried out, and of no interest to peers

REASONS = {
    TierReason.NOWHERE: Reason.NONE,  # the kernel knows better why it has left the L1
    TierReason.GONE: Reason.EVICTED,
    TierReason.DAMAGED: Reason.DAMAGED,
    TierReason.TIER_ERROR: Reason.TIER_ERROR,
    TierReason.THROTTLED: Reason.LATE,
    TierReason.LATE: Reason.LATE,
    TierReason.CANCELLED: Reason.NONE,
    TierReason.CLEARED: Reason.CLEARED,
    TierReason.NO_ROOM: Reason.NO_ROOM,
    TierReason.BUSY: Reason.BEING_WRITTEN,
    TierReason.EVICTED: Reason.EVICTED,
    TierReason.CUT: Reason.NONE,
}
_LOAD_GRANTS = {
    Grant.GRANTED: LoadGrant.GRANTED,
    Grant.EXISTS: LoadGrant.EXISTS,
    Grant.BUSY: LoadGrant.BUSY,
    Grant.LOADING: LoadGrant.BUSY,
}


class L1:
    """Implements `tiers.l1.L1Port` over kernel and segment. Lives on the loop's thread."""

    def __init__(
        self,
        kernel: Kernel,
        segment: Segment,
        clock: Clock,
        notify: Callable[[LeaseExpired], None],
        layout_share: Share | None = None,
        *,
        former_layouts: Mapping[int, tuple[int, int]] | None = None,
        former_described: Mapping[int, Layout] | None = None,
        on_effect: Callable[[Effect], None] | None = None,
        observer: ServerObserver | None = None,
    ) -> None:
        """`former_layouts`: id → (fingerprint, nbytes) of what was adopted; they have no owner until they are
        registered. `former_described`: those of which the pool says what they are. `on_effect`: gets each
        effect at once, and calls nobody; `observer`: None for one that only counts."""
        self.kernel = kernel
        self.segment = segment
        self.layouts: dict[int, Layout] = {}
        self.former_layouts = dict(former_layouts or {})
        self.former_described = dict(former_described or {})
        self._layout_share = Share(LAYOUTS_MAX - 1) if layout_share is None else layout_share
        self._layout_share.take("", len(self.former_layouts))
        self._brought_by: dict[int, str] = {}  # layout id → the holder whose share it counts in
        self.index = open_publisher(segment)
        self.tiering: Tiering | None = None  # see `begin_tiering`
        self._on_effect = on_effect
        self.observer = ServerObserver(kernel) if observer is None else observer
        self.tallies = WorkerTallies(segment)
        self.wants_reuse = False
        self.clock = clock
        self.counters: Counter[str] = Counter()
        self.notify = notify
        self._undelivered: deque[Effect] = deque()
        self.preparing: deque[tuple[Preparation, Callable[[], None]]] = deque()  # callers that wait for room
        self._policy_quiet_until_s = 0.0

    def layout_id(self, layout: Layout, in_use: Callable[[], Set[int]], holder: str = "") -> int:
        """The id of a layout: the one that it had with a former server if objects of it were adopted, otherwise a new
        unused one. `in_use`: returns the ids that namespaces use. If no id is left, unused layouts are forgotten.
        Raises `LimitError` if all are in use, or `holder` has used up its share."""
        for known, each in self.layouts.items():
            if each == layout:
                return known
        former = (layout.fingerprint, layout.nbytes)
        for known, each_former in self.former_layouts.items():
            if each_former == former and known not in self.layouts:
                return known
        share = self._layout_share
        if share.full_for(holder):
            self._remove_unused_layouts(in_use)
        if share.full_for(holder):
            raise LimitError(
                f"{share.taken} of {share.total} layouts are in use, by sessions or by objects in the pool; "
                f"{share.of(holder)} of these belong to {holder or 'the server'}: clear namespaces whose objects are "
                "no longer needed"
            )
        taken = self.layouts.keys() | self.former_layouts.keys()
        return next(free for free in count(1) if free not in taken)

    def _remove_unused_layouts(self, in_use: Callable[[], Set[int]]) -> None:
        """Forget every unused layout: one without a namespace, a lookup under way, or an object in a slot, which covers
        all that leases hold and stores to tiers read."""
        if self.kernel.adoption.under_way:  # not all objects are known yet
            return
        self.apply()
        used = in_use() if self.tiering is None else in_use() | self.tiering.layouts_in_use()
        for layout_id in [*self.layouts, *self.former_layouts.keys() - self.layouts.keys()]:
            if layout_id in used or self.kernel.uses_layout(layout_id):
                continue
            self._brought_by.setdefault(layout_id, "")  # adopted: nobody's
            self._forget_layout(layout_id)
            self.former_layouts.pop(layout_id, None)
            self.former_described.pop(layout_id, None)
            self.counters["layouts_forgotten"] += 1

    def _forget_layout(self, layout_id: int) -> None:
        """Also one that was added in part."""
        self.kernel.remove_layout(layout_id)
        if self.index is not None:
            self.index.remove_layout(layout_id)
        self.segment.remove_layout(layout_id)
        self.layouts.pop(layout_id, None)
        holder = self._brought_by.pop(layout_id, None)
        if holder is not None:
            self._layout_share.free(holder)

    def add_layout(self, layout_id: int, layout: Layout, holder: str = "") -> None:
        """Accept objects of this layout; it counts in the holder's share until it is forgotten. Raises `UsageError` if
        the pool cannot hold them."""
        if layout_id not in self.former_layouts:
            self.kernel.undo.add((self._forget_layout, (layout_id,)))
        self.kernel.register_layout(layout_id, layout.nbytes)
        self.segment.add_layout(layout_id, layout.fingerprint, layout.nbytes, layout.text)
        if self.index is not None:
            self.index.add_layout(layout_id, layout.nbytes)
        self._take_place(layout_id, layout, holder)

    def _take_place(self, layout_id: int, layout: Layout, holder: str) -> None:
        self.layouts[layout_id] = layout
        if layout_id in self.former_layouts:
            self._layout_share.free("")
        self._layout_share.take(holder)
        self._brought_by[layout_id] = holder

    def begin_tiering(self, tiering: Tiering) -> None:
        """The first tier has come: there are tiers from now on."""
        self.tiering = tiering
        self.wants_reuse = tiering.wants_reuse
        self.observer.begin_tiering(tiering)

    def serve_index(self, answers: bool) -> None:
        """Set whether clients may find hits in the index."""
        if self.index is not None:
            self.segment.serve(self.kernel.epoch if answers else 0)

    # --- what the kernel decided --------------------------------------------------------------------------

    def apply(self) -> None:
        """Carry out what the kernel has decided since the last call. Never raises.

        Memory comes first, in the kernel's order: an evicted object leaves the index before its slot is marked as
        another's, and a committed one enters it once its slot is marked ready. Companions are informed at once and call
        nobody, so nothing can come in between. Everybody else is informed afterwards; one of them may call the kernel
        and come here again, for example because a peer that got a notice of an expiry turned out to be gone.
        """
        if not self.kernel.effects and not self._undelivered:
            return
        listeners = self._on_effect is not None or self.observer.listens
        while self.kernel.effects:
            for effect in self.kernel.take_effects():
                try:
                    self._to_memory(effect)
                except Exception:  # not `guarded`, which would cost each effect 0.2 µs; nor below
                    log.exception("%s failed as a batch: its objects follow one by one", type(effect).__name__)
                    self.counters["apply_faults"] += 1
                    self._one_by_one(effect)
                if type(effect) not in _OF_MEMORY:
                    self._undelivered.append(effect)
                if not listeners:
                    continue
                try:
                    self._show(effect)
                except Exception:
                    log.exception("%s could not be reported to every listener", type(effect).__name__)
                    self.counters["apply_faults"] += 1
        while self._undelivered:
            effect = self._undelivered.popleft()
            try:
                self._tell(effect)
            except Exception:
                log.exception("%s was not delivered to every listener", type(effect).__name__)
                self.counters["apply_faults"] += 1

    def answer(self, session: Session, reply: Message) -> None:
        """Answer a request that was held back. Pending decisions of the kernel are carried out first, so that a client
        that learns of an object finds it in the index."""
        self.apply()
        session.send(reply)

    def _show(self, effect: Effect) -> None:
        """Inform those who only listen."""
        if self._on_effect is not None:
            self._on_effect(effect)
        if self.observer.listens:
            self.observer.effect(effect)

    def _to_memory(self, effect: Effect) -> None:
        """Update the pool's tables and index."""
        index = self.index
        match effect:
            case SlotsMarked():
                self.segment.mark_slots(effect.offsets, effect.state, effect.row)
            case Committed():
                if index is not None:
                    index.publish(effect.objects)
            case Evicted():
                if index is not None:
                    index.remove(effect.objects, Reason.EVICTED)
            case Removed():
                if index is not None:
                    index.remove(effect.objects, effect.reason)
            case SlabAssigned():
                self.segment.tables.mark_slab(effect.offset, effect.nbytes, effect.slot_bytes)

    def _one_by_one(self, effect: Effect) -> None:
        """Finish a failed batch object by object. What cannot be removed from the index by its key is removed by its
        slot, which may be granted again from here on; any other failure now costs hits, but nobody's bytes."""
        index = self.index
        match effect:
            case SlotsMarked():
                parts: list[Callable[[], object]] = [
                    partial(self.segment.mark_slots, [offset], effect.state, effect.row) for offset in effect.offsets
                ]
            case Committed() if index is not None:
                parts = [partial(index.publish, [item]) for item in effect.objects]
            case Evicted() | Removed() if index is not None:
                reason = effect.reason if isinstance(effect, Removed) else Reason.EVICTED
                parts = [partial(index.remove_surely, item, reason) for item in effect.objects]
            case _:
                return
        for part in parts:
            guarded(partial(self._left_out, effect), part)

    def _left_out(self, effect: Effect, error: BaseException) -> None:
        log.error("one object of %s failed", type(effect).__name__, exc_info=error)
        self.counters["apply_faults"] += 1

    def _tell(self, effect: Effect) -> None:
        """Update counters, and inform tiers and peers."""
        match effect:
            case Committed():
                self.counters["committed"] += len(effect.objects)
                layout = self._known_layout(effect.objects[0].layout_id)  # one lease has one layout
                if layout is not None and not effect.loaded:
                    self.counters["stored_objects"] += len(effect.objects)
                    self.counters["stored_bytes"] += len(effect.objects) * layout.nbytes
                if self.tiering is not None and not effect.loaded:
                    self._to_tiers(self.tiering, effect.objects, reused=False)
            case Read():
                self.counters["read"] += len(effect.objects)
                if self.wants_reuse and self.tiering is not None:
                    self._to_tiers(self.tiering, effect.objects, reused=True)
            case Evicted():
                self.counters["evicted"] += len(effect.objects)
            case Removed():
                self.counters[f"removed_{effect.reason.name.lower()}"] += len(effect.objects)
            case LeaseExpired():
                self.notify(effect)
            case PolicyFailed():
                self._policy_failed(effect)
            case PolicyNoted():
                log.info("eviction: %s", effect.text)
            case RowLeft():
                self.segment.release_row(effect.row)

    def _policy_failed(self, effect: PolicyFailed) -> None:
        """`status` counts every fault; the log gets a traceback from time to time."""
        if self.clock.now >= self._policy_quiet_until_s:
            self._policy_quiet_until_s = self.clock.now + TIER_WARNING_PAUSE_S
            log.error(
                "the eviction policy failed in %s: stores may be answered FULL", effect.method, exc_info=effect.error
            )

    def _to_tiers(self, tiering: Tiering, objects: Sequence[Incarnation], *, reused: bool) -> None:
        layouts = self.layouts
        if self.former_layouts:  # tiers know nothing of adopted objects whose layout no session has registered
            objects = [item for item in objects if item.layout_id in layouts]
        tiering.on_committed(
            [
                contract.CommittedObject(
                    o.key, o.namespace, o.layout_id, layouts[o.layout_id].nbytes, o.generation, reused
                )
                for o in objects
            ]
        )

    def remove(self, namespace: int, wanted: Sequence[Named], reason: Reason, *, tiers: bool) -> int:
        """Stop serving these incarnations; returns how many were in the pool. `tiers`: also remove what tiers have
        under their keys. A successor in the pool stays, and is stored again if a tier was thought to have it."""
        dropped = self.kernel.drop_incarnations(namespace, wanted, self.clock.now, reason)
        self.apply()
        if tiers and self.tiering is not None:
            had = self.tiering.remove(namespace, [key for key, _ in wanted])
            self._to_tiers(self.tiering, self.kernel.kept(namespace, had), reused=False)
        return dropped

    # --- what workers read without a call -----------------------------------------------------------------

    def note_uses(self) -> bool:
        """Tell the eviction policy in one bounded step what workers have read. True: there is more."""
        if self.index is None:
            return False
        marked = self.index.take_marks(self.clock.now)
        if marked:
            self.kernel.used(marked, self.clock.now)
        return len(marked) == INDEX_SWEEP_KEYS_MAX

    def before_store(self, layout_id: int, keys: int) -> None:
        """This many objects of a layout are about to be stored. If that may cost evictions, reads are reported first:
        what a worker has just read must not count as the coldest."""
        if self.index is not None and self.kernel.may_evict(layout_id, keys):
            self.note_uses()

    def media_of(self, namespace: int, keys: Sequence[bytes]) -> bytes:
        """Where the keys are, as far as is known: one byte of IN_POOL, ON_TIER and ON_REMOTE_TIER for each."""
        ready = {item.key for item in self.kernel.kept(namespace, keys)}
        on_tiers = self.observer.on_tiers(namespace, keys)
        known = ON_TIER | ON_REMOTE_TIER
        return bytes((IN_POOL if key in ready else 0) | at & known for key, at in zip(keys, on_tiers, strict=True))

    # --- what tiering asks of the L1 ----------------------------------------------------------------------

    def leading_gone(self, namespace: int, wanted: Iterable[Named]) -> int:
        return self.kernel.leading_gone(namespace, wanted)

    def shield(self, namespace: int, wanted: Sequence[Named]) -> None:
        self.kernel.shield(namespace, wanted)

    def unshield(self, namespace: int, wanted: Sequence[Named]) -> None:
        self.kernel.unshield(namespace, wanted)

    def unshield_some(self, objects_max: int) -> int:
        return self.kernel.unshield_some(objects_max)

    def pin_for_store(self, namespace: int, wanted: Sequence[Named]) -> StorePin:
        lease, held = self.kernel.hold_incarnations(namespace, wanted, self.clock.now)
        return StorePin(
            lease, [None if o is None else Slot(o.offset, o.layout_id, o.checksum, o.unverified) for o in held]
        )

    def finish(self, lease: int, positions: Sequence[int]) -> None:
        self.kernel.finish_read(SERVER_SESSION, lease, self.clock.now, positions)

    def drop(self, namespace: int, wanted: Sequence[Named]) -> None:
        self.kernel.drop_incarnations(namespace, wanted, self.clock.now, Reason.DROPPED)

    @property
    def evicts(self) -> bool:
        return self.kernel.evicts

    def room_for(self, layout_id: int) -> int:
        return self.kernel.room_for(layout_id)

    def begin_load(
        self,
        namespace: int,
        layout_id: int,
        keys: Sequence[bytes],
        deadline: float,
        granted: Callable[[Loading], None],
    ) -> Loading | LoadWait:
        ttl_s = max(0.0, deadline - self.clock.now)
        self.before_store(layout_id, len(keys))
        answer = self.kernel.begin_store(
            SERVER_SESSION,
            namespace,
            layout_id,
            keys,
            self.clock.now,
            loading=True,
            ttl_s=ttl_s,
            wait_s=ROOM_WAIT_S,
        )
        self.apply()
        if isinstance(answer, Grants):
            return _loading(answer)
        wait = _LoadWait(self.kernel, answer)
        self.answer_later(answer, lambda: granted(wait.loading()))
        return wait

    # --- grants that wait for room ------------------------------------------------------------------------

    def answer_later(self, preparation: Preparation, answer: Callable[[], None]) -> None:
        """Call `answer` once the preparation is done, unless it was cancelled."""
        self.preparing.append((preparation, answer))

    def make_room(self) -> bool:
        """One bounded step of the kernel's pending work. Returns whether there is more: then the next turn of the loop
        should come at once, after everybody's next message."""
        kernel, preparing = self.kernel, self.preparing
        if not kernel.working and not preparing:
            return False
        kernel.step(self.clock.now)
        self.apply()  # a slot is marked before anybody learns that it was granted
        while preparing and preparing[0][0].done:  # they finish in order, apart from cancelled ones
            preparation, answer = preparing.popleft()
            if not preparation.cancelled:
                answer()
        if len(preparing) > CANCELLED_KEPT + 2 * kernel.preparing:  # else cancelled ones pile up behind the oldest
            self.preparing = deque(each for each in preparing if not each[0].cancelled)
        return kernel.working

    def commit_load(
        self, lease: int, positions: Sequence[int], retain: bool, checksums: Sequence[int | None]
    ) -> Sequence[int]:
        try:
            outcomes = self.kernel.commit_store(
                SERVER_SESSION, lease, self.clock.now, positions, retain=retain, checksums=checksums
            )
        except LeaseExpiredError:  # too late: the kernel has taken the slots back
            return []
        ready = [at for at, outcome in zip(positions, outcomes, strict=True) if outcome == Settled.COMMITTED]
        self.counters["loaded"] += len(ready)
        return ready

    def abort_load(self, lease: int, positions: Sequence[int], reason: TierReason) -> None:
        with contextlib.suppress(LeaseExpiredError):  # then this was the answer that it waited for
            self.kernel.abort_store(SERVER_SESSION, lease, self.clock.now, positions, reason=REASONS[reason])

    def view(self, offset: int, nbytes: int) -> memoryview:
        return self.segment.view(offset, nbytes)

    @property
    def ready_objects(self) -> int:
        return self.kernel.ready_objects

    @property
    def walkable(self) -> bool:
        return not self.kernel.adoption.under_way

    def walk(self) -> Iterator[contract.CommittedObject | None]:
        for item in self.kernel.walk():
            layout = None if item is None else self._known_layout(item.layout_id)
            if item is None or layout is None:
                yield None
            else:
                yield contract.CommittedObject(item.key, item.namespace, item.layout_id, layout.nbytes, item.generation)

    def layout(self, layout_id: int) -> Layout:
        layout = self._known_layout(layout_id)
        if layout is None:
            raise KeyError(layout_id)
        return layout

    def _known_layout(self, layout_id: int) -> Layout | None:
        return self.layouts.get(layout_id) or self.former_described.get(layout_id)


class _LoadWait:
    """Implements `tiers.l1.LoadWait`."""

    def __init__(self, kernel: Kernel, preparation: Preparation) -> None:
        self._kernel = kernel
        self._preparation = preparation

    def cancel(self) -> None:
        self._kernel.cancel_store(self._preparation)

    def loading(self) -> Loading:
        """What it was granted."""
        grants = self._preparation.grants
        if grants is not None:
            return _loading(grants)
        return Loading(0, [LoadGrant.FULL] * len(self._preparation.keys), [], 0)  # the kernel refused it


def _loading(grants: Grants) -> Loading:
    answers = [_LOAD_GRANTS.get(Grant(status), LoadGrant.FULL) for status in grants.statuses]
    return Loading(grants.lease_id, answers, grants.offsets, grants.generation)
