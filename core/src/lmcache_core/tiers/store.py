"""The store controller: what is committed to the L1 goes to the tiers that the policy names, behind everyone's back.

An object waits for each of its tiers in that tier's queue, as a few words of metadata; its bytes stay in the L1
and are pinned only while a lane reads them (or from its commit on, where `keep` says so). What leaves the L1
before its turn is lost for the tiers, and counted. A tier whose breaker is open keeps its queue and stores it
once it is back.
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any

from lmcache_core.limits import DIRTY_OBJECTS_MAX, TIER_BATCH_BYTES_MAX
from lmcache_core.policies.contracts import StoreCandidate, StorePolicy
from lmcache_core.tiers.breaker import BreakerState
from lmcache_core.tiers.contract import Outcome, Result
from lmcache_core.tiers.epochs import Epochs
from lmcache_core.tiers.format import tier_key
from lmcache_core.tiers.l1 import L1, Committed, TierReason
from lmcache_core.tiers.tier import Tier
from lmcache_core.tiers.transfer import Transfer

logger = logging.getLogger(__name__)

_BATCHES_A_STEP = 8  # plans and batches made in one turn of the loop: about a millisecond


class Dirty:
    """A committed object on its way to its tiers."""

    __slots__ = ("drop", "epoch", "failed", "held", "object", "targets_left")

    def __init__(self, committed: Committed, epoch: int, targets: int, drop: bool) -> None:
        self.object = committed
        self.epoch = epoch
        self.targets_left = targets
        self.drop = drop
        self.failed = False
        self.held: tuple[int, int] | None = None  # lease and position, where it is kept in the L1 until stored


class StoreController:
    """Driven by Tiering: `on_committed` queues, `step` plans and submits, lanes end in `_stored`."""

    def __init__(
        self,
        l1: L1,
        tiers: dict[str, Tier],
        policy: StorePolicy,
        epochs: Epochs,
        *,
        in_flight_bytes_max: int,
        keep: bool,
    ) -> None:
        self._l1 = l1
        self._tiers = tiers
        self.policy = policy
        self._epochs = epochs
        self._in_flight_bytes_max = in_flight_bytes_max
        self._keep = keep
        self._arrived: deque[Sequence[Committed]] = deque()
        self._queues: dict[str, deque[Dirty]] = {}
        self._in_flight: dict[str, int] = {}  # batches a tier
        self._in_flight_bytes = 0
        self._blocked: set[str] = set()  # tiers that wait for something that a completion will end
        self.counts: Counter[str] = Counter()

    # --- from the loop ------------------------------------------------------------------------------------
    def on_committed(self, objects: Sequence[Committed]) -> None:
        self._arrived.append(objects)

    def step(self) -> None:
        """Plan what has arrived, hand out what can go."""
        for _ in range(min(_BATCHES_A_STEP, len(self._arrived))):
            self._plan(self._arrived.popleft())
        self._blocked.clear()
        for name, tier in self._tiers.items():
            for _ in range(_BATCHES_A_STEP):
                if not self._submit_batch(name, tier):
                    self._blocked.add(name)
                    break

    @property
    def has_work(self) -> bool:
        """Whether `step` could do something now, without a completion before it."""
        return bool(self._arrived) or any(queue and name not in self._blocked for name, queue in self._queues.items())

    @property
    def next_at(self) -> float | None:
        """When a tier that is not answering should be tried again, if something waits for it."""
        times = [
            self._tiers[name].writes.probe_at
            for name, queue in self._queues.items()
            if queue and not self._answers(name)
        ]
        return min(times, default=None)

    @property
    def idle(self) -> bool:
        """Nothing is waiting or under way, apart from what waits for a tier that is not answering."""
        return (
            not self._arrived
            and not any(self._in_flight.values())
            and not any(queue for name, queue in self._queues.items() if self._answers(name))
        )

    def clear(self, namespace: int | None) -> None:
        """Take back what has not been begun. What is under way is deleted by the tier if the epoch has moved."""

        def stays(committed: Committed) -> bool:
            return namespace is not None and committed.namespace != namespace

        self._arrived = deque(kept for batch in self._arrived if (kept := [item for item in batch if stays(item)]))
        for name, queue in self._queues.items():
            gone = [dirty for dirty in queue if not stays(dirty.object)]
            if gone:
                self._queues[name] = deque(dirty for dirty in queue if stays(dirty.object))
                self._lost(gone, TierReason.CLEARED)

    def tier_removed(self, name: str) -> None:
        """What waits for it will not be stored there."""
        self._lost(self._queues.pop(name, ()), TierReason.CANCELLED)
        self._in_flight.pop(name, None)

    def tier_replaced(self, name: str) -> None:
        """What is under way ends without it; what waits stays for the new one."""
        self._in_flight.pop(name, None)

    def close(self) -> None:
        """Give up what waits."""
        self._arrived.clear()
        for name in list(self._queues):
            self.tier_removed(name)

    def status(self) -> dict[str, Any]:
        return {
            "arrived": sum(map(len, self._arrived)),
            "dirty": {name: len(queue) for name, queue in self._queues.items()},
            "in_flight_bytes": self._in_flight_bytes,
            "counts": dict(self.counts),
        }

    # --- plans --------------------------------------------------------------------------------------------
    def _plan(self, batch: Sequence[Committed]) -> None:
        if not self.policy.wants_reuse:
            batch = [item for item in batch if not item.reused]
        views = [tier.view for tier in self._tiers.values() if not tier.draining]
        candidates = [StoreCandidate(item.key, item.namespace, item.nbytes, item.reused) for item in batch]
        try:
            plan = self.policy.plan(candidates, views)
        except Exception:  # a policy may be someone else's code
            self.counts["policy_failed"] += len(batch)
            logger.exception("the store policy failed: %d objects are not stored", len(batch))
            return
        names = [view.name for view in views]
        wanted: dict[int, list[str]] = {}
        for name in names:
            tier = self._tiers[name]
            for position in plan.targets.get(name, ()):
                item = batch[position]
                # Equal keys have equal bytes: what the tier has need not be stored again.
                if not tier.accounting.knows(tier_key(item.key, item.namespace, self._epochs.of(item.namespace))):
                    wanted.setdefault(position, []).append(name)
        dropped = set(plan.drop)
        self._drop([batch[position] for position in sorted(dropped) if position not in wanted])
        fresh: list[Dirty] = []
        for position, targets in wanted.items():
            item = batch[position]
            dirty = Dirty(item, self._epochs.of(item.namespace), len(targets), position in dropped)
            fresh.append(dirty)
            for name in targets:
                self._enqueue(name, dirty)
        if self._keep:
            self._hold(fresh)

    def _enqueue(self, name: str, dirty: Dirty) -> None:
        queue = self._queues.setdefault(name, deque())
        if len(queue) >= DIRTY_OBJECTS_MAX:
            self._lost([queue.popleft()], TierReason.THROTTLED)
        queue.append(dirty)

    def _hold(self, fresh: Sequence[Dirty]) -> None:
        """Pin objects until they are stored. Not for tiers that are not answering: they could stay for ever."""
        for namespace, group in groupby(fresh, key=lambda dirty: dirty.object.namespace):
            some = [dirty for dirty in group if dirty.targets_left]
            pinned = self._l1.pin_for_store(namespace, [dirty.object.key for dirty in some])
            for position, (dirty, offset) in enumerate(zip(some, pinned.offsets, strict=True)):
                if offset is not None:
                    dirty.held = (pinned.lease, position)

    def _release(self, dirty: Dirty) -> None:
        if dirty.held is not None:
            lease, position = dirty.held
            dirty.held = None
            self._l1.finish(lease, [position])

    # --- batches ------------------------------------------------------------------------------------------
    def _answers(self, name: str) -> bool:
        tier = self._tiers.get(name)
        return tier is not None and tier.writes.state is not BreakerState.OPEN

    def _submit_batch(self, name: str, tier: Tier) -> bool:
        """Hand one batch to the tier's lanes. False: nothing to do, or something has to end first."""
        queue = self._queues.get(name)
        if not queue:
            return False
        if not self._answers(name) and self._keep:
            for dirty in queue:  # the tier may be gone for long, and the L1 must not fill up with its objects
                self._release(dirty)
        if self._in_flight_bytes and self._in_flight_bytes + queue[0].object.nbytes > self._in_flight_bytes_max:
            return False
        try:
            nbytes = tier.stored_bytes(self._l1.layout(queue[0].object.layout_id))
        except Exception:  # a serde may be someone else's code, and may not know this layout
            logger.exception("tier %s cannot hold objects of layout %d", name, queue[0].object.layout_id)
            self._lost([queue.popleft()], TierReason.TIER_ERROR)
            return True
        room = tier.reclaim.make_room(nbytes)
        if room is TierReason.FULL:
            self.counts["full"] += 1
            self._lost([queue.popleft()], TierReason.FULL)
            return True
        if room is not None or not tier.stores_allowed():
            return False
        return self._store(name, tier, self._take(queue, tier))

    def _take(self, queue: deque[Dirty], tier: Tier) -> list[Dirty]:
        """The next objects of one namespace that make a batch."""
        batch: list[Dirty] = []
        nbytes = stored_bytes = 0
        while queue and len(batch) < tier.batch_keys_max:
            item = queue[0].object
            # One namespace has one layout: a batch is of one kind.
            if batch and item.namespace != batch[0].object.namespace:
                break
            nbytes += item.nbytes
            stored_bytes += tier.stored_bytes(self._l1.layout(item.layout_id))
            if batch and (nbytes > TIER_BATCH_BYTES_MAX or not tier.accounting.fits(stored_bytes)):
                break
            batch.append(queue.popleft())
        return batch

    def _store(self, name: str, tier: Tier, batch: list[Dirty]) -> bool:
        namespace = batch[0].object.namespace
        pinned = self._l1.pin_for_store(namespace, [dirty.object.key for dirty in batch])
        positions = [position for position, offset in enumerate(pinned.offsets) if offset is not None]
        self._lost([dirty for dirty, offset in zip(batch, pinned.offsets, strict=True) if offset is None],
                   TierReason.EVICTED)  # fmt: skip
        if not positions:
            tier.writes.not_used()
            return True
        going = [batch[position] for position in positions]
        transfers = []
        for position, dirty in zip(positions, going, strict=True):
            offset = pinned.offsets[position]
            assert offset is not None
            kind = tier.kind(self._l1.layout(dirty.object.layout_id))
            view = self._l1.view(offset, kind.layout.nbytes)
            transfers.append(Transfer(dirty.object.key, namespace, dirty.epoch, kind, view))
        nbytes = sum(dirty.object.nbytes for dirty in going)
        ended = self._at_end(name, tier, pinned.lease, positions, going, nbytes)
        refused = tier.store(transfers, ended)
        if refused is not None:
            tier.writes.not_used()
            self._l1.finish(pinned.lease, positions)
            self._lost(going, refused)
            return False
        self._in_flight[name] = self._in_flight.get(name, 0) + 1
        self._in_flight_bytes += nbytes
        return True

    def _at_end(
        self, name: str, tier: Tier, lease: int, positions: Sequence[int], going: Sequence[Dirty], nbytes: int
    ) -> Callable[[Sequence[Outcome]], None]:
        def ended(outcomes: Sequence[Outcome]) -> None:
            self._l1.finish(lease, positions)
            self._in_flight_bytes -= nbytes
            if self._tiers.get(name) is tier and name in self._in_flight:
                self._in_flight[name] -= 1
            finished: list[Dirty] = []
            for dirty, outcome in zip(going, outcomes, strict=True):
                if outcome.result is Result.DONE:
                    self.counts["stored"] += 1
                    dirty.targets_left -= 1
                    finished.append(dirty)
                elif outcome.retryable and self._tiers.get(name, tier) is not tier:
                    self._enqueue(name, dirty)  # the tier was replaced before it began: the new one gets it
                else:
                    full = outcome.result is Result.FULL
                    self._lost([dirty], TierReason.FULL if full else TierReason.TIER_ERROR)
            self._settle(finished)

        return ended

    # --- ends ---------------------------------------------------------------------------------------------
    def _lost(self, batch: Sequence[Dirty] | deque[Dirty], reason: TierReason) -> None:
        """One tier will not get these."""
        for dirty in batch:
            self.counts[f"lost_{reason}"] += 1
            dirty.targets_left -= 1
            dirty.failed = True
        self._settle(batch)

    def _settle(self, batch: Sequence[Dirty] | deque[Dirty]) -> None:
        """Those without a tier left to go to: let go, and out of the L1 if the policy said so."""
        done = [dirty for dirty in batch if dirty.targets_left == 0]
        for dirty in done:
            self._release(dirty)
        # What did not reach every tier stays in the L1: dropping it would lose it.
        self._drop([dirty.object for dirty in done if dirty.drop and not dirty.failed])

    def _drop(self, objects: Sequence[Committed]) -> None:
        for namespace, group in groupby(objects, key=lambda item: item.namespace):
            keys = [item.key for item in group]
            self.counts["dropped"] += len(keys)
            self._l1.drop(namespace, keys)
