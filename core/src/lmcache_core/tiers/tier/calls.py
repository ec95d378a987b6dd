"""What a tier is asked to do: calls that ask, load and store. Each has its work, on a lane, and its ends, on the loop's
thread, where the tier's accounts and breakers learn from it.

Whoever makes such a call extends it by what comes after that: `answered`, `loaded` and `given_up`, or `stored`.
"""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

from lmcache_core.guard import on_failure
from lmcache_core.tiers.contract import Outcome, Result
from lmcache_core.tiers.l1 import TierReason
from lmcache_core.tiers.object.transfer import Loaded, NoRoom, Transfer
from lmcache_core.tiers.tier.accounting import DroppedObject
from lmcache_core.tiers.tier.breaker_states import BreakerState
from lmcache_core.tiers.tier.call_states import CallState
from lmcache_core.tiers.tier.lanes import WRITE_BACK, Call, Priority
from lmcache_core.tiers.tier.order import KeyAccess, Watch
from lmcache_core.tiers.tier.tier import Tier


class ExistsCall(Call):
    """Asks which tier keys are there; `answered` follows once, if `begin` has begun it."""

    what = "lookup"

    def __init__(self, tier: Tier, keys: Sequence[bytes], deadline: float, priority: Priority) -> None:
        super().__init__(deadline, priority, deadline - tier.clock.now)
        self.tier = tier
        self.keys = keys

    @abstractmethod
    def answered(self, found: Sequence[bool] | None, reason: TierReason | None) -> None:
        """Whether each key is there, or why the tier does not say."""

    def begin(self) -> TierReason | None:
        """A returned reason means that nothing was asked, and no answer follows."""
        health = self.tier.health
        if health.reads.state is not BreakerState.CLOSED:
            return TierReason.TIER_ERROR
        # Only keys that were known before, and that do not change while the tier is asked.
        self._known = list(self.tier.accounting.known(self.keys))
        self._dropped = set(self.tier.accounting.drops_of(self.keys))  # their deletion may end before this does
        self._changed = self.tier.order.watch(self._known)
        if self.tier.medium.lookups.submit(self):
            return None
        self.tier.order.unwatch(self._changed, self._known)
        return health.throttled()

    def work(self) -> list[bool]:
        step = max(1, self.tier.adapter.capabilities.batch_keys_max)
        found: list[bool] = []
        for at in range(0, len(self.keys), step):
            found += self.tier.medium.exists(self.keys[at : at + step], self.deadline)
        return found

    def ended(self) -> None:
        tier, changed = self.tier, self._changed
        tier.order.unwatch(changed, self._known)
        tier.health.timed(self)
        if tier.health.returned_late(self, tier.health.lookups):
            return
        if self.error is not None:
            tier.health.failed(tier.health.lookups, self.what, self.failure)
            tier.losses.note(self.keys, TierReason.TIER_ERROR, tier.health.last_error)
            self.answered(None, TierReason.TIER_ERROR)
            return
        tier.health.went_well(tier.health.lookups, self.what)
        # Another server, or the medium itself, deleted these.
        found: Sequence[bool] = self.result
        expected = set(self._known)
        gone = [key for key, there in zip(self.keys, found, strict=True) if not there and key in expected]
        removed = [key for key in gone if not changed.saw(key)]
        tier.losses.note(removed, TierReason.GONE)
        tier.accounting.remove(removed)
        # A load of the hung would wait for a change that may never return.
        hidden = self._dropped | set(tier.accounting.drops_of(self.keys)) | tier.order.hung(self.keys)
        if hidden:
            found = [key not in hidden and there for key, there in zip(self.keys, found, strict=True)]
        self.answered(found, None)

    def late(self) -> None:
        tier = self.tier
        tier.order.unwatch(self._changed, self._known)
        tier.health.late(self, tier.health.lookups, tier.medium.lookups)
        tier.losses.note(self.keys, TierReason.LATE, tier.health.last_error)
        self.answered(None, TierReason.LATE)


class LoadCall(Call):
    """Loads objects of one layout into their views. `loaded` follows if it ran.

    `given_up(running)` comes first if the deadline passes. If not `running`, the call never ran: no `loaded` follows,
    and no lane writes to the views.
    """

    what = "load"

    def __init__(self, tier: Tier, batch: Sequence[Transfer], deadline: float, priority: Priority) -> None:
        super().__init__(deadline, priority, deadline - tier.clock.now)
        self.tier = tier
        self.batch = batch
        self.keys = [transfer.tier_key for transfer in batch]
        self._changed = Watch()

    @abstractmethod
    def loaded(self, results: Sequence[Loaded]) -> None:
        """No lane writes to the views any more."""

    @abstractmethod
    def given_up(self, *, running: bool) -> None:
        """The deadline has passed."""

    def begin(self) -> TierReason | None:
        """A returned reason means that nothing was begun, and nothing follows."""
        health, medium = self.tier.health, self.tier.medium
        if health.reads.state is not BreakerState.CLOSED:
            return TierReason.TIER_ERROR
        begun = medium.order.submit(medium.loads, self, self.keys, KeyAccess.LOAD, self._changed)
        return None if begun else health.throttled()

    def cancel(self) -> bool:
        """True: it never runs, and nothing follows."""
        return self.tier.order.cancel(self)

    def work(self) -> list[Loaded]:
        return self.tier.carrier.load(self.batch, self.deadline)

    def ended(self) -> None:
        tier, health = self.tier, self.tier.health
        health.timed(self)
        results: Sequence[Loaded] = self.result or [
            Loaded(TierReason.TIER_ERROR, error=self.failure) for _ in self.batch
        ]
        looks_damaged = any(result.evidence is not None for result in results)
        room_bytes = tier.stored_bytes(self.batch[0].kind.layout) if looks_damaged else 0
        broken_way = tier.verdicts.load_ended(self.keys, results, room_bytes, self._changed)
        if not health.returned_late(self, health.loads):
            if broken_way:
                health.failed(health.loads, self.what, broken_way, at_once=True)
            else:
                errors = [result.error for result in results if result.reason is TierReason.TIER_ERROR]
                health.judge(health.loads, self.what, errors, len(results))
        self._note(results)
        self.loaded(results)

    def late(self) -> None:
        tier = self.tier
        tier.health.late(self, tier.health.loads, tier.medium.loads)
        tier.losses.note(self.keys, TierReason.LATE, tier.health.last_error)
        # not "is LATE": it may have returned since it was reported late, and its end still follows
        self.given_up(running=self.state is not CallState.EXPIRED)

    def _note(self, results: Sequence[Loaded]) -> None:
        """Update the accounts, for the whole batch at once: it may have hundreds of objects. The result for a key that
        was changed meanwhile is out of date."""
        tier, counts, changed = self.tier, self.tier.health.counts, self._changed
        there: list[tuple[bytes, int]] = []
        gone: list[bytes] = []
        for key, result in zip(self.keys, results, strict=True):
            if result.reason is None:
                there.append((key, result.nbytes))
                continue
            counts[f"load_{result.reason}"] += 1
            if changed.saw(key):
                continue
            tier.losses.note([key], result.reason, result.error)
            if result.reason is TierReason.GONE:
                gone.append(key)
            if result.reason is TierReason.DAMAGED:
                tier.health.trouble.note(self.what, result.error, tier.clock.now)
        counts["loaded"] += len(there)
        counts["loaded_bytes"] += sum(nbytes for _, nbytes in there)
        found = [each for each in there if not changed.saw(each[0])]
        tier.accounting.add(found, ours=True)  # including what another server stored
        tier.accounting.remove(gone)
        tier.verdicts.clear(gone)


class EncodedSizes(NamedTuple):
    """What a store reports before each call of the adapter: see `Carrier.store`. Posted like an end."""

    call: StoreCall
    sizes: Sequence[int]
    room_bytes: int
    guessed_bytes: int

    def tell_end(self) -> None:
        self.call.encoded(self)


class StoreCall(Call):
    """Stores objects of one kind; `stored` follows when no lane reads their views any more.

    The caller has checked `Tier.stores_allowed` and `reserved` room, in bytes for each object; an object that turns out
    larger is `NoRoom`.
    """

    what = "store"

    def __init__(self, tier: Tier, batch: Sequence[Transfer], reserved: Sequence[int]) -> None:
        now = tier.clock.now
        deadline = now + tier.config.deadline_s
        super().__init__(deadline, WRITE_BACK, deadline - now)
        self.tier = tier
        self.keys = [transfer.tier_key for transfer in batch]
        if len(tier.verdicts):
            batch = [each._replace(replaces=key in tier.verdicts) for each, key in zip(batch, self.keys, strict=True)]
        self.batch = batch
        self.reserved = reserved
        self._namespace = batch[0].namespace
        self._drops: dict[bytes, DroppedObject] = {}  # of its keys, before it began
        self._held_bytes = self._guessed_bytes = 0
        self._used_s = 0.0

    @abstractmethod
    def stored(self, outcomes: Sequence[Outcome]) -> None:
        """One outcome for each object."""

    def begin(self) -> TierReason | None:
        """A returned reason means that nothing was begun, and nothing follows."""
        medium = self.tier.medium
        self._drops = self.tier.accounting.drops_of(self.keys)
        with on_failure(self._not_begun):
            for drop in self._drops.values():
                drop.stores += 1
            self._hold(sum(self.reserved), 0 if self.tier.chain.is_identity else sum(self.reserved))
            begun = medium.order.submit(medium.stores, self, self.keys, KeyAccess.STORE)  # last: a lane may have it now
        if not begun:
            self._not_begun()
        return None if begun else self.tier.health.throttled()

    def _not_begun(self) -> None:
        self._hold(0)
        for drop in self._drops.values():
            drop.stores -= 1

    def work(self) -> list[Outcome]:
        began_s = time.thread_time()
        try:
            if self.tier.chain.is_identity:
                return self.tier.carrier.store(self.batch, self.deadline)
            return self.tier.carrier.store(self.batch, self.deadline, self.reserved, self._report)
        finally:
            self._used_s = time.thread_time() - began_s

    def _report(self, sizes: Sequence[int], room_bytes: int, guessed_bytes: int) -> None:
        self.tier.post(EncodedSizes(self, sizes, room_bytes, guessed_bytes))

    def encoded(self, seen: EncodedSizes) -> None:
        """Some objects are encoded: their sizes are known."""
        for nbytes in seen.sizes:
            self.tier.sizes.learn(self.batch[0].kind.layout.fingerprint, nbytes)
        self._hold(seen.room_bytes, seen.guessed_bytes)

    def ended(self) -> None:
        health = self.tier.health
        health.timed(self)
        self.tier.store_cpu.charge(self._used_s)
        self._hold(0)
        outcomes: Sequence[Outcome] = self.result or [
            Outcome(Result.FAILED, nbytes, error=self.failure) for nbytes in self.reserved
        ]
        if not outcomes:
            health.stores.not_used()  # nothing was left to store when a thread had it
        elif not health.returned_late(self, health.stores):
            errors = [outcome.error for outcome in outcomes if outcome.result is Result.FAILED]
            health.judge(health.stores, self.what, errors, len(outcomes))
        self._over([key for key, outcome in zip(self.keys, outcomes, strict=True) if outcome.result is Result.DONE])
        self._note(outcomes)
        self.stored(outcomes)

    def late(self) -> None:
        self.tier.health.late(self, self.tier.health.stores, self.tier.medium.stores)
        if self.state is CallState.EXPIRED:  # otherwise the lane is still reading: wait for its end
            self._hold(0)
            self._over(())
            self.stored([Outcome(Result.FAILED, error="not stored in time", retryable=True)] * len(self.batch))

    def _over(self, done: Sequence[bytes]) -> None:
        """What was dropped before this store began is replaced, or is still to be deleted."""
        if self._drops:
            for drop in self._drops.values():
                drop.stores -= 1
            self.tier.accounting.end_drops({key: self._drops[key] for key in done if key in self._drops})
            self.tier.reclaim.look_at(self._drops.keys() - set(done))

    def _hold(self, nbytes: int, guessed_bytes: int = 0) -> None:
        """Reserve so much room from now on. `guessed_bytes`: of that, for objects that are not encoded yet."""
        self.tier.accounting.reserve(self._namespace, nbytes - self._held_bytes)
        self.tier.accounting.bytes_guessed += guessed_bytes - self._guessed_bytes
        self._held_bytes, self._guessed_bytes = nbytes, guessed_bytes

    def _note(self, outcomes: Sequence[Outcome]) -> None:
        """Update the accounts, for the whole batch at once."""
        tier, counts = self.tier, self.tier.health.counts
        there: list[tuple[bytes, int]] = []
        unknown: dict[bytes, int | None] = {}  # a failed store, or an earlier attempt, may have been done
        full = False
        for key, outcome in zip(self.keys, outcomes, strict=True):
            if outcome.result is Result.DONE:
                there.append((key, outcome.nbytes))
                continue
            if isinstance(outcome, NoRoom):
                counts["store_encoded_again"] += 1
                continue
            counts[f"store_{outcome.result}"] += 1
            unknown[key] = outcome.nbytes
            full |= outcome.result is Result.FULL
            if outcome.error:
                tier.health.trouble.note(self.what, outcome.error, tier.clock.now)
        counts["store_done"] += len(there)
        counts["stored_bytes"] += sum(nbytes for _, nbytes in there)
        tier.accounting.add(there, ours=True)
        tier.verdicts.clear([key for key, _ in there])
        tier.doubts.add(unknown)
        if there:
            tier.reclaim.medium_took()
        if full:
            tier.reclaim.medium_is_full()
