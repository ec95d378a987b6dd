"""The L1 as everybody but the kernel sees it: the kernel's decisions, carried out on the pool.

Its `apply` runs after every call into the kernel and before any reply: a slot is marked in the pool's table
before anyone hears that it was granted.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from lmcache_core.errors import ClearedError, LeaseExpiredError
from lmcache_core.kernel.answers import Grant, Reason, Settled
from lmcache_core.kernel.effects import (
    Committed,
    Evicted,
    LeaseExpired,
    LoadDoomed,
    Read,
    Removed,
    SlabAssigned,
    SlotsMarked,
)
from lmcache_core.kernel.kernel import Kernel
from lmcache_core.kernel.objects import Incarnation
from lmcache_core.kernel.sessions import SERVER_SESSION
from lmcache_core.pool.layout import Layout
from lmcache_core.pool.segment import Segment
from lmcache_core.tiers import l1 as contract
from lmcache_core.tiers.l1 import LoadGrant, Loading, Pinned, TierReason

if TYPE_CHECKING:
    from lmcache_core.tiers.tiering import Tiering

REASONS = {
    TierReason.NOWHERE: Reason.NONE,  # the kernel knows better why it is not in the L1 any more
    TierReason.GONE: Reason.EVICTED,
    TierReason.DAMAGED: Reason.DAMAGED,
    TierReason.TIER_ERROR: Reason.TIER_ERROR,
    TierReason.THROTTLED: Reason.LATE,
    TierReason.LATE: Reason.LATE,
    TierReason.CANCELLED: Reason.NONE,
    TierReason.CLEARED: Reason.CLEARED,
    TierReason.FULL: Reason.NO_ROOM,
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
    """Implements `tiers.l1.L1` over kernel and segment. Lives on the loop's thread."""

    def __init__(self, kernel: Kernel, segment: Segment, notify: Callable[[LeaseExpired], None]) -> None:
        self.kernel = kernel
        self.segment = segment
        self.layouts: dict[int, Layout] = {}
        self.tiering: Tiering | None = None  # set once, when there are tiers
        self.wants_reuse = False
        self.now = 0.0  # monotonic seconds, moved by the loop once a turn
        self.counters: Counter[str] = Counter()
        self._notify = notify

    def apply(self) -> None:
        """Carry out what the kernel decided since the last time."""
        if not self.kernel.effects:
            return
        for effect in self.kernel.take_effects():
            match effect:
                case SlotsMarked():
                    self.segment.mark_slots(effect.offsets, effect.state, effect.row)
                case Committed():
                    self.counters["committed"] += len(effect.objects)
                    if self.tiering is not None and not effect.loaded:
                        self._to_tiers(effect.objects, reused=False)
                case Read():
                    self.counters["read"] += len(effect.objects)
                    if self.wants_reuse:
                        self._to_tiers(effect.objects, reused=True)
                case Evicted():
                    self.counters["evicted"] += len(effect.objects)
                case Removed():
                    self.counters[f"removed_{effect.reason.name.lower()}"] += len(effect.objects)
                case LeaseExpired():
                    self._notify(effect)
                case SlabAssigned():
                    self.segment.tables.mark_slab(effect.offset, effect.nbytes, effect.slot_bytes)
                case LoadDoomed():
                    pass  # tiering hears of a clear by itself, and of a deadline by its own clock

    def _to_tiers(self, objects: Sequence[Incarnation], *, reused: bool) -> None:
        assert self.tiering is not None
        layouts = self.layouts
        self.tiering.on_committed(
            [contract.Committed(o.key, o.namespace, o.layout_id, layouts[o.layout_id].nbytes, reused) for o in objects]
        )

    # --- what tiering asks of the L1 ----------------------------------------------------------------------

    def pin_for_store(self, namespace: int, keys: Sequence[bytes]) -> Pinned:
        grants = self.kernel.prepare_retrieve(SERVER_SESSION, namespace, keys, self.now)
        return Pinned(grants.lease_id, [offset or None for offset in grants.offsets])

    def finish(self, lease: int, positions: Sequence[int]) -> None:
        self.kernel.finish_read(SERVER_SESSION, lease, self.now, positions)

    def drop(self, namespace: int, keys: Sequence[bytes]) -> None:
        self.kernel.drop(namespace, keys, self.now, Reason.DROPPED)

    def begin_load(self, namespace: int, layout_id: int, keys: Sequence[bytes], deadline: float) -> Loading:
        ttl_s = max(0.0, deadline - self.now)
        grants = self.kernel.prepare_store(
            SERVER_SESSION, namespace, layout_id, keys, self.now, loading=True, ttl_s=ttl_s
        )
        self.apply()
        answers = [_LOAD_GRANTS.get(Grant(status), LoadGrant.FULL) for status in grants.statuses]
        return Loading(grants.lease_id, answers, grants.offsets)

    def commit_load(self, lease: int, positions: Sequence[int], retain: bool) -> Sequence[int]:
        try:
            outcomes = self.kernel.commit_store(SERVER_SESSION, lease, self.now, positions, retain=retain)
        except (LeaseExpiredError, ClearedError):  # too late, or cleared: the kernel has taken the slots back
            return []
        ready = [at for at, outcome in zip(positions, outcomes, strict=True) if outcome == Settled.COMMITTED]
        self.counters["loaded"] += len(ready)
        return ready

    def abort_load(self, lease: int, positions: Sequence[int], reason: TierReason) -> None:
        with contextlib.suppress(LeaseExpiredError, ClearedError):  # then this was the answer it waited for
            self.kernel.abort_store(SERVER_SESSION, lease, self.now, positions, reason=REASONS[reason])

    def late_load(self, lease: int, positions: Sequence[int]) -> None:
        """The lease has the load's deadline: the kernel has expired it, or does so in this very turn."""

    def view(self, offset: int, nbytes: int) -> memoryview:
        return self.segment.view(offset, nbytes)

    def layout(self, layout_id: int) -> Layout:
        return self.layouts[layout_id]
