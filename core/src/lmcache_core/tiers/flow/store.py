"""The store controller: copies what is committed to the L1 to the tiers that the policy names, in the background.

An object waits in the queue of each of its tiers, as a few words of metadata; its bytes stay in the L1 and are pinned
only while a lane reads them. From its commit on the L1 evicts it last or, with `keep`, never for other objects. An
object that leaves the L1 before its turn is lost for the tiers, and counted. A tier whose breaker is open keeps its
queue and is stored to once it answers again.
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from itertools import groupby, islice, takewhile
from typing import Any

from lmcache_core.errors import UsageError
from lmcache_core.guard import guarded, on_failure
from lmcache_core.limits import DIRTY_OBJECTS_MAX, TIER_BATCH_BYTES_MAX
from lmcache_core.policies.contracts import StoreCandidate, StorePlan, StorePolicy, TierView
from lmcache_core.pool.layout import Layout
from lmcache_core.tiers.contract import Outcome, Result
from lmcache_core.tiers.flow.arrivals import NAMESPACE, PLAN_KEYS, Arrival, Arrivals, Dirty, Going, Shields
from lmcache_core.tiers.l1 import CommittedObject, L1Port, Named, TierReason
from lmcache_core.tiers.object.epochs import Epochs
from lmcache_core.tiers.object.format import tier_keys
from lmcache_core.tiers.object.transfer import NoRoom, Transfer
from lmcache_core.tiers.observer import TierObserver
from lmcache_core.tiers.tier.calls import StoreCall
from lmcache_core.tiers.tier.tier import Tier

logger = logging.getLogger(__name__)

_UNSHIELD_AT_ONCE = 256
_FORGET_AT_ONCE = 16
_UNREACHED_MAX = 1 << 16  # followed to where they are lost; beyond it the oldest is not counted
_LOOKS_FOR_LOST = 1024
_FAULT = "a fault of the server while a store was given to its lanes: see the log"


class StoreController:
    """Driven by Tiering: `on_committed` queues; `plan_some` and `submit_some` do one small piece of work each; a call
    on a lane ends in `stored`."""

    def __init__(
        self,
        l1: L1Port,
        tiers: dict[str, Tier],
        policy: StorePolicy,
        epochs: Epochs,
        *,
        in_flight_bytes_max: int,
        keep: bool,
        observer: TierObserver | None = None,
    ) -> None:
        self._l1 = l1
        self._tiers = tiers
        self.policy = policy
        self._epochs = epochs
        self._in_flight_bytes_max = in_flight_bytes_max
        self._keep = keep
        self._shields = Shields(l1, counts=policy.wants_reuse)
        self._arrived = Arrivals(l1, self._shields)
        self._queues: dict[str, deque[Dirty]] = {}
        self._going: dict[str, Going] = {}  # those in the queues or in flight
        self.moves = 0  # counts plans and ends
        self._in_flight: dict[str, int] = {}  # batches of each tier
        self._in_flight_bytes = 0
        self._blocked: set[str] = set()  # tiers that can take no batch until a call ends
        self._unshields = False  # shields may be left that should end
        self._unreached: dict[tuple[int, Named], tuple[CommittedObject, bytes]] = {}  # in the L1, at the last look
        self._lost_objects = self._lost_bytes = 0  # since the start
        self._turn = 0
        self.counts: Counter[str] = Counter()
        self._observer = observer
        self.on_lost: Callable[[str, int], None] = lambda name, objects: None  # stores that may succeed later
        self.on_ended: Callable[[str], None] = lambda name: None  # stores to this tier have ended

    # --- from the loop ------------------------------------------------------------------------------------
    def on_committed(self, objects: Sequence[CommittedObject]) -> None:
        """Queue what became visible in the L1. It is shielded from now on, because the next message may need its room;
        but not while a tier does not answer, because it could stay for good."""
        if not self.policy.wants_reuse:
            objects = [item for item in objects if not item.reused]
        self._arrived.add(objects, shields=self._all_answer)
        while self._arrived.objects > DIRTY_OBJECTS_MAX:
            self._lose_unplanned(self._arrived.take(), TierReason.THROTTLED)

    def on_owed(self, objects: Sequence[CommittedObject], lacking: Mapping[str, Set[int]]) -> None:
        """Queue what was committed before and some tiers lack: up to `PLAN_KEYS` of one namespace. `lacking`: tier →
        positions."""
        self._arrived.add_owed(objects, lacking, shields=self._all_answer)

    def has_room_for_owed(self, name: str) -> bool:
        """Whether nothing else waits for this tier."""
        tier, waiting = self._tiers[name], self._queues.get(name, ())
        return not self._arrived and tier.has_room_for_stores and len(waiting) < PLAN_KEYS

    def unblock(self) -> None:
        """Time has passed, or a call has ended: every tier may be able to take more."""
        self._blocked.clear()

    def plan_some(self) -> bool:
        """Plan one batch of the arrivals. False: there is none, or no tier takes more."""
        # A tier may not answer for a long time, and the L1 must not fill up with what waits for it.
        self._unshields = not self._all_answer and self._l1.unshield_some(_UNSHIELD_AT_ONCE) > 0
        if self._unshields:
            return True
        if not self._arrived:
            return False
        if not self._plans:
            return self._forget_unplanned()
        arrival = self._arrived.take()
        planned: set[int] = set()
        try:
            self._plan(arrival, planned)
        finally:
            if arrival.shielded and len(planned) < len(arrival.objects):
                left = [name for position, name in enumerate(arrival.names) if position not in planned]
                self._shields.give_back(arrival.namespace, left)
        return True

    def submit_some(self) -> bool:
        """Submit one batch to the next tier that takes one. False: none does until a call ends."""
        names = list(self._tiers)
        for turn in range(self._turn, self._turn + len(names)):
            name = names[turn % len(names)]
            if name in self._blocked:
                continue
            self._turn = turn % len(names) + 1  # the next tier goes first, also after a fault
            if self._submit_batch(name, self._tiers[name]):
                return True
            self._blocked.add(name)
        return False

    @property
    def has_work(self) -> bool:
        """Whether there is work that need not wait for a completion."""
        plans = bool(self._arrived) and self._plans
        return (
            self._unshields or plans or any(queue and name not in self._blocked for name, queue in self._queues.items())
        )

    def next_at(self, now: float) -> float | None:
        """When to retry a tier that does not answer, or to resume one that rests, if something waits for it. A tier
        whose time has come and that still takes nothing waits for a completion, for example for room."""
        times = [
            self._tiers[name].health.writes.probe_at
            for name, queue in self._queues.items()
            if queue and not self._answers(name)
        ]
        if self._arrived or any(self._queues.values()):
            times += [tier.stores_rest_until for tier in self._tiers.values()]
        return min((at for at in times if at > now), default=None)

    @property
    def idle(self) -> bool:
        """Nothing is waiting or under way, except for tiers that do not answer."""
        return (
            not (self._arrived and self._plans)
            and not any(batches for name, batches in self._in_flight.items() if self._answers(name))
            and not any(queue for name, queue in self._queues.items() if self._answers(name))
        )

    @property
    def owed(self) -> dict[str, int]:
        """How many objects each tier does not have yet: not planned yet, waiting, or under way."""
        return {
            name: (self._arrived.objects if tier.gets_stores else 0) + len(self._going.get(name, ()))
            for name, tier in self._tiers.items()
        }

    def has_for(self, name: str) -> bool:
        """Whether anything waits for a plan, or is planned for this tier."""
        return bool(self._arrived) or bool(self._going.get(name))

    @property
    def arrived(self) -> int:
        """The number of the latest arrival."""
        return self._arrived.last

    def has_planned(self, number: int) -> bool:
        """Whether every arrival up to this number is planned or lost."""
        return self._arrived.is_taken(number)

    def is_going(self, name: str, tier_key: bytes) -> bool:
        """Whether an object is planned for a tier, and neither stored nor lost yet."""
        going = self._going.get(name)
        return going is not None and tier_key in going

    def clear(self, namespace: int | None) -> None:
        """Cancel what has not begun. If the epoch moved, the tier deletes what is under way."""

        def stays(committed: CommittedObject) -> bool:
            return namespace is not None and committed.namespace != namespace

        for where, (item, _) in list(self._unreached.items()):
            if not stays(item):
                del self._unreached[where]
        for arrival in self._arrived.take_all(namespace):
            self._arrived.unshield(arrival)
        for name, queue in self._queues.items():
            gone = [dirty for dirty in queue if not stays(dirty.object)]
            if gone:
                self._queues[name] = deque(dirty for dirty in queue if stays(dirty.object))
                self._lost(name, gone, TierReason.CLEARED)

    def tier_removed(self, name: str) -> None:
        """What waits for it is lost for it."""
        self._lost(name, self._queues.pop(name, ()), TierReason.CANCELLED)
        self._in_flight.pop(name, None)
        self._going.pop(name, None)
        self.moves += 1

    def tier_replaced(self, name: str) -> None:
        """What is under way ends without it; what waits stays for the new tier."""
        self._in_flight.pop(name, None)

    def close(self) -> None:
        """Give up everything that waits."""
        for arrival in self._arrived.take_all(None):
            self._arrived.unshield(arrival)
        for name in list(self._queues):
            self.tier_removed(name)

    def status(self) -> dict[str, Any]:
        self._look_for_lost(_LOOKS_FOR_LOST)
        return {
            "arrived": self._arrived.objects,
            "in_flight_bytes": self._in_flight_bytes,
            "reached_no_tier": {"objects": self._lost_objects, "bytes": self._lost_bytes},
            "counts": dict(self.counts),
        }

    # --- plans --------------------------------------------------------------------------------------------
    @property
    def _plans(self) -> bool:
        """Whether to plan the arrivals now. If nothing holds them in the L1, planning waits until a tier takes more:
        with a slow tier most objects leave the L1 before their turn, and unplanned they cost next to nothing."""
        if self._keep:
            return True
        takers = False
        for name, tier in self._tiers.items():
            if not tier.gets_stores:
                continue
            takers = True
            # A tier that does not answer also gets this much: a batch to retry with when the time comes.
            if tier.has_room_for_stores and len(self._queues.get(name, ())) < PLAN_KEYS:
                return True
        return not takers

    def _forget_unplanned(self) -> bool:
        """Whether all objects of the oldest arrival had left the L1, unplanned."""
        gone = self._arrived.take_if_gone()
        if gone is not None:
            self._lose_unplanned(gone, TierReason.EVICTED)
        return gone is not None

    def _lose_unplanned(self, arrival: Arrival, reason: TierReason) -> None:
        """No tier gets these. They count for every tier: nobody knows where the policy would have sent them."""
        self.moves += 1
        self._arrived.unshield(arrival)
        names = tier_keys(arrival.keys, arrival.namespace, self._epochs.of(arrival.namespace))
        if any(tier.gets_stores for tier in self._tiers.values()):
            self._reached_none(zip(arrival.objects, names, strict=True))
        for tier in self._tiers.values():
            if tier.gets_stores:
                self.counts[f"lost_{reason}"] += len(names)
                tier.losses.note(names, reason)
                self._owe_again(tier.name, len(names), reason)

    def _plan(self, arrival: Arrival, planned_for: set[int]) -> None:
        """Adds to `planned_for` the positions that are stored on some tier."""
        self.moves += 1
        batch = arrival.objects
        takers = [tier for tier in self._tiers.values() if tier.gets_stores and tier.may_store(arrival.namespace)]
        views = [tier.view for tier in takers]
        epoch = self._epochs.of(arrival.namespace)
        names = tier_keys(arrival.keys, arrival.namespace, epoch)  # the same on every tier
        candidates = [
            StoreCandidate(item.key, item.namespace, item.nbytes, item.reused, item.generation) for item in batch
        ]

        def failed(error: BaseException) -> None:
            self.counts["policy_failed"] += len(batch)
            self._reached_none(zip(batch, names, strict=True))
            logger.error("the store policy failed: %d objects are not stored", len(batch), exc_info=error)

        plan = guarded(failed, _plan, self.policy, candidates, views)
        if plan is None:
            return
        dropped = set(plan.drop)
        planned: dict[int, Dirty] = {}
        for view in views:
            # Equal keys have equal bytes: an object that the tier has need not be stored again.
            known = self._tiers[view.name].accounting.known(names)
            waiting: list[Dirty] = []
            going = self._going.get(view.name)
            if going is None:
                going = self._going[view.name] = Going()
            lacks = None if arrival.lacking is None else arrival.lacking.get(view.name, ())
            for position in plan.targets.get(view.name, ()):
                if names[position] in known or (lacks is not None and position not in lacks):
                    continue
                dirty = planned.get(position)
                if dirty is None:
                    dirty = planned[position] = Dirty(batch[position], epoch, names[position], position in dropped)
                    dirty.shielded = arrival.shielded
                    planned_for.add(position)
                dirty.targets_left += 1
                going.add(dirty.tier_key)
                waiting.append(dirty)
            self._enqueue(view.name, waiting)
        if arrival.lacking is None:  # otherwise it was loaded, or kept on purpose, since it was committed
            self._drop([batch[position] for position in sorted(dropped) if position not in planned])

    def _enqueue(self, name: str, fresh: Sequence[Dirty]) -> None:
        if not fresh:
            return
        queue = self._queues.setdefault(name, deque())
        queue.extend(fresh)
        self._blocked.discard(name)  # it may have had nothing to take
        over = len(queue) - DIRTY_OBJECTS_MAX
        if over > 0:
            self._lost(name, [queue.popleft() for _ in range(over)], TierReason.THROTTLED)

    def _unshield(self, batch: Sequence[Dirty]) -> None:
        for namespace, group in groupby((dirty.object for dirty in batch if dirty.shielded), key=NAMESPACE):
            self._shields.give_back(namespace, [item.named for item in group])

    # --- batches ------------------------------------------------------------------------------------------
    def _answers(self, name: str) -> bool:
        tier = self._tiers.get(name)
        return tier is not None and tier.takes_stores  # a probe may hang, too

    @property
    def _all_answer(self) -> bool:
        """Whether all tiers that are stored to answer. Objects are shielded only then."""
        return all(self._answers(name) for name, tier in self._tiers.items() if tier.gets_stores)

    def _submit_batch(self, name: str, tier: Tier) -> bool:
        """Submit one batch to the tier's lanes. False: there is nothing to do, or a call has to end first."""
        queue = self._queues.get(name)
        if not queue:
            tier.room_is_not_wanted()
            return False
        if self._forget_gone(name, queue):
            return True
        batch = [queue.popleft()]  # from here on it is in a call, lost for this tier, or back in the queue
        with on_failure(
            lambda: self._fault_of(tier),
            lambda: self._lost(name, batch, TierReason.TIER_ERROR, _FAULT),
        ):
            goes_on = self._submit(name, tier, queue, batch)
        if goes_on is None:
            queue.appendleft(batch[0])
        return bool(goes_on)

    def _fault_of(self, tier: Tier) -> None:
        tier.health.stores.allows(tier.clock.now)  # of an open breaker this was the probe: another pause follows
        tier.health.failed(tier.health.stores, StoreCall.what, _FAULT)

    def _submit(self, name: str, tier: Tier, queue: deque[Dirty], batch: list[Dirty]) -> bool | None:
        """Submit the one in `batch`, and what can go with it. What is lost meanwhile leaves `batch`. False: the lane is
        full; None: it has to wait in the queue for the end of a call."""
        (head,) = batch
        if tier.order.hung((head.tier_key,)):  # it would hold its slot, and the batch, until it is late itself
            self._lose(name, batch, TierReason.TIER_ERROR, "an earlier call on its key has not returned")
            return True
        # A tier with nothing under way may always have one batch: otherwise a tier that hangs would block it.
        if self._in_flight.get(name) and self._in_flight_bytes + head.object.nbytes > self._in_flight_bytes_max:
            return None
        if tier.health.stores.waits(tier.clock.now):
            tier.room_is_not_wanted()  # while nothing may be stored
            return None

        def no_such_layout(error: BaseException) -> None:
            logger.error("tier %s cannot hold objects of layout %d", name, head.object.layout_id, exc_info=error)
            self._lose(name, batch, TierReason.TIER_ERROR, "it cannot hold this layout", for_good=True)

        first = guarded(no_such_layout, self._room_for_one, tier, head)
        if first is None:
            return True
        layout, nbytes, known = first
        room = tier.make_room(nbytes, head.object.namespace)
        if room in (TierReason.NO_ROOM, TierReason.TIER_ERROR):
            self.counts["full"] += 1
            self._lose(name, batch, room, tier.reclaim.last_error if room is TierReason.TIER_ERROR else "")
            return True
        if room is not None or not tier.stores_allowed():
            return None
        reserved = [nbytes]
        if known and self._answers(name):  # a probe is one object: its slot is held for as long as the tier hangs
            self._take_more(queue, tier, layout, batch, reserved)
        return self._store(name, tier, batch, reserved)

    def _room_for_one(self, tier: Tier, dirty: Dirty) -> tuple[Layout, int, bool]:
        """Its layout, and as `Tier.bytes_to_reserve`. Raises what the serdes raise, and for an unknown layout."""
        layout = self._l1.layout(dirty.object.layout_id)
        return layout, *tier.bytes_to_reserve(layout, dirty.nbytes_on_tier)

    def _forget_gone(self, name: str, queue: deque[Dirty]) -> bool:
        """Whether the head of the queue had left the L1 before its turn. Removes a few at once, whatever the tier does:
        a slow tier has thousands of them by its next batch."""
        namespace = queue[0].object.namespace
        head = takewhile(lambda dirty: dirty.object.namespace == namespace, islice(queue, _FORGET_AT_ONCE))
        gone = self._l1.leading_gone(namespace, (dirty.object.named for dirty in head))
        if gone:
            self._lost(name, [queue.popleft() for _ in range(gone)], TierReason.EVICTED)
        return gone > 0

    def _take_more(
        self, queue: deque[Dirty], tier: Tier, layout: Layout, batch: list[Dirty], reserved: list[int]
    ) -> None:
        """The next objects of one namespace, as many as one batch takes and the tier has room for."""
        first = batch[0].object
        of_kind = (first.namespace, first.layout_id)
        nbytes_max = min(TIER_BATCH_BYTES_MAX, self._in_flight_bytes_max // 2)  # two at once: one is encoded meanwhile
        most = max(1, min(tier.batch_keys_max, nbytes_max // max(1, first.nbytes)))
        total = reserved[0]
        while queue and len(batch) < most and (queue[0].object.namespace, queue[0].object.layout_id) == of_kind:
            nbytes, _ = tier.bytes_to_reserve(layout, queue[0].nbytes_on_tier)
            total += nbytes
            hung = tier.order.hung((queue[0].tier_key,))
            if hung or not tier.accounting.fits(total) or tier.accounting.over_limit(first.namespace, total):
                break
            batch.append(queue.popleft())
            reserved.append(nbytes)

    def _store(self, name: str, tier: Tier, batch: list[Dirty], reserved: list[int]) -> bool:
        first = batch[0].object
        pinned = self._l1.pin_for_store(first.namespace, [dirty.object.named for dirty in batch])
        positions = [position for position, slot in enumerate(pinned.slots) if slot is not None]
        with on_failure(lambda: self._l1.finish(pinned.lease, positions)):
            if len(positions) < len(batch):
                reserved = [reserved[position] for position in positions]
                gone = [dirty for dirty, slot in zip(batch, pinned.slots, strict=True) if slot is None]
                batch[:] = [batch[position] for position in positions]
                self._lost(name, gone, TierReason.EVICTED)
            if not batch:
                tier.health.stores.not_used()
                return True
            kind = tier.kind(self._l1.layout(first.layout_id))
            transfers = [
                Transfer(
                    dirty.object.key,
                    first.namespace,
                    dirty.epoch,
                    kind,
                    self._l1.view(slot.offset, kind.layout.nbytes),
                    slot.checksum,
                    suspect=slot.suspect,
                )
                for dirty, slot in zip(batch, filter(None, pinned.slots), strict=True)
            ]
            sent = StoreBatch(self, tier, transfers, reserved, batch, pinned.lease, positions, self._observer)
            refused = sent.begin()
        if refused is not None:
            tier.health.stores.not_used()
            self._l1.finish(pinned.lease, positions)
            self._lose(name, batch, refused)
            return False
        self._in_flight[name] = self._in_flight.get(name, 0) + 1
        self._in_flight_bytes += sent.nbytes
        return True

    def stored(self, batch: StoreBatch, outcomes: Sequence[Outcome]) -> None:
        """No lane reads the slots of the batch any more."""
        tier, name = batch.tier, batch.tier.name
        self._l1.finish(batch.lease, batch.positions)
        self._in_flight_bytes -= batch.nbytes
        if self._tiers.get(name) is tier and name in self._in_flight:
            self._in_flight[name] -= 1
        finished: list[Dirty] = []
        again: list[Dirty] = []
        for dirty, outcome in zip(batch.going, outcomes, strict=True):
            if self._tiers.get(name, tier) is not tier:
                self._enqueue(name, [dirty])  # whatever became of it: the tier was replaced, and the new one gets it
            elif outcome.result is Result.DONE:
                dirty.targets_left -= 1
                dirty.reached = True
                finished.append(dirty)
            elif isinstance(outcome, NoRoom) and name in self._tiers:
                dirty.nbytes_on_tier = outcome.nbytes  # with this much reserved it will fit
                again.append(dirty)
            else:
                full = outcome.result is Result.FULL
                self._lost(name, [dirty], TierReason.NO_ROOM if full else TierReason.TIER_ERROR, outcome.error)
        if again:
            self._queues.setdefault(name, deque()).extendleft(reversed(again))
        if finished:
            self.counts["stored"] += len(finished)
            self._gone(name, finished)
            if self._observer is not None:
                self._observer.stored(name, [dirty.object for dirty in finished])
        self._settle(finished)

    # --- ends ---------------------------------------------------------------------------------------------
    def _lose(
        self, name: str, batch: list[Dirty], reason: TierReason, text: str = "", *, for_good: bool = False
    ) -> None:
        """As `_lost`, for a batch on its way to a lane: they leave it."""
        lost = batch.copy()
        batch.clear()
        self._lost(name, lost, reason, text, for_good=for_good)

    def _lost(
        self,
        name: str,
        batch: Sequence[Dirty] | deque[Dirty],
        reason: TierReason,
        text: str = "",
        *,
        for_good: bool = False,
    ) -> None:
        """These are lost for one tier. `for_good`: it can never have them."""
        if batch:
            self.counts[f"lost_{reason}"] += len(batch)
        tier = self._tiers.get(name)
        if batch and not for_good:
            self._owe_again(name, len(batch), reason)
        if tier is not None and reason is not TierReason.CLEARED:  # the L1 itself knows of a clear
            tier.losses.note([dirty.tier_key for dirty in batch], reason, text)
        self._gone(name, batch)
        for dirty in batch:
            dirty.targets_left -= 1
            dirty.failed = True
            dirty.reached |= reason is TierReason.CLEARED  # a clear was asked for: that is no loss
        self._settle(batch)

    def _owe_again(self, name: str, objects: int, reason: TierReason) -> None:
        """They were lost because the tier failed or was behind: it gets them later, if the L1 still has them."""
        if name in self._tiers and reason in (TierReason.TIER_ERROR, TierReason.THROTTLED):
            self.on_lost(name, objects)

    def _gone(self, name: str, batch: Sequence[Dirty] | deque[Dirty]) -> None:
        """These are no longer planned for the tier."""
        self.moves += 1
        going = self._going.get(name)
        if going is not None:
            going.end([dirty.tier_key for dirty in batch])
            self.on_ended(name)

    def _settle(self, batch: Sequence[Dirty] | deque[Dirty]) -> None:
        """Settle the objects with no tier left: end the shield, and drop them from the L1 if the policy wants that."""
        done = [dirty for dirty in batch if dirty.targets_left == 0]
        self._unshield(done)
        self._reached_none((dirty.object, dirty.tier_key) for dirty in done if not dirty.reached)
        # An object that did not reach every tier stays in the L1: dropping it would lose it.
        self._drop([dirty.object for dirty in done if dirty.drop and not dirty.failed])

    def _reached_none(self, objects: Iterable[tuple[CommittedObject, bytes]]) -> None:
        """No store of these, given with their keys on tiers, has succeeded. They are lost once the L1 has lost them."""
        for item, tier_key in objects:
            if not any(tier.accounting.knows(tier_key) for tier in self._tiers.values()):
                self._unreached[item.namespace, item.named] = item, tier_key
                self._look_for_lost(2)  # so that they do not pile up
        while len(self._unreached) > _UNREACHED_MAX:
            del self._unreached[next(iter(self._unreached))]

    def _look_for_lost(self, at_once: int) -> None:
        """Count those of the oldest that have left the L1, and that no tier got meanwhile. The others go behind."""
        for where in list(islice(self._unreached, at_once)):
            item, tier_key = self._unreached.pop(where)
            if any(tier.accounting.knows(tier_key) for tier in self._tiers.values()):
                continue
            if self._l1.leading_gone(item.namespace, (item.named,)):
                self._lost_objects += 1
                self._lost_bytes += item.nbytes
            else:
                self._unreached[where] = item, tier_key

    def _drop(self, objects: Sequence[CommittedObject]) -> None:
        for namespace, group in groupby(objects, key=NAMESPACE):
            wanted = [item.named for item in group]
            self.counts["dropped"] += len(wanted)
            self._l1.drop(namespace, wanted)


class StoreBatch(StoreCall):
    """Objects on their way to one tier. `lease` and `positions` hold their slots."""

    def __init__(
        self,
        controller: StoreController,
        tier: Tier,
        transfers: Sequence[Transfer],
        reserved: Sequence[int],
        going: Sequence[Dirty],
        lease: int,
        positions: Sequence[int],
        observer: TierObserver | None,
    ) -> None:
        super().__init__(tier, transfers, reserved)
        self._controller = controller
        self.going = going
        self.lease = lease
        self.positions = positions
        self.nbytes = sum(dirty.object.nbytes for dirty in going)
        self._traced = None if observer is None else observer.storing(tier.name, [dirty.object for dirty in going])

    def stored(self, outcomes: Sequence[Outcome]) -> None:
        if self._traced is not None:
            self._traced(outcomes)
        self._controller.stored(self, outcomes)


def _plan(policy: StorePolicy, candidates: Sequence[StoreCandidate], views: Sequence[TierView]) -> StorePlan:
    """The policy's plan. Raises `UsageError` for a wrong one, before any of it is carried out."""
    plan = policy.plan(candidates, views)
    for what, positions in [*plan.targets.items(), ("drop", plan.drop)]:
        wrong = [at for at in positions if not 0 <= at < len(candidates)]
        if wrong:
            raise UsageError(
                f"the plan names position {wrong[0]} for {what}, and the batch has {len(candidates)} objects"
            )
    return plan
