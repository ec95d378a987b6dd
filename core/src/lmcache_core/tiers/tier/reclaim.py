"""Deletes on a tier, all in the background: evictions, damaged objects, and leftovers of a clear."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from lmcache_core.limits import BREAKER_PAUSE_MAX_S, BREAKER_PAUSE_S
from lmcache_core.tiers.contract import Outcome, Result
from lmcache_core.tiers.l1 import TierReason
from lmcache_core.tiers.object.epochs import Epochs, former_epochs
from lmcache_core.tiers.tier.accounting import Accounting, TierEntry
from lmcache_core.tiers.tier.call_states import CallState
from lmcache_core.tiers.tier.doubts import Doubts
from lmcache_core.tiers.tier.lanes import DELETE, Call
from lmcache_core.tiers.tier.medium import Medium
from lmcache_core.tiers.tier.order import KeyAccess
from lmcache_core.tiers.tier.trouble import Losses

_TENANT_BATCHES_OUT = 4  # of deletes, while tenants over their limits are evicted
_SHARDS_A_STEP = 16  # some hundred entries of a million

_Method = Callable[[Sequence[bytes], float], Sequence[Outcome]]


class Reclaim:
    """Frees room on one tier. An adapter that cannot delete makes every method a no-op."""

    def __init__(
        self,
        medium: Medium,
        accounting: Accounting,
        losses: Losses,
        doubts: Doubts,
        epochs: Epochs,
    ) -> None:
        self._medium = medium
        self._accounting = accounting
        self._losses = losses
        self._doubts = doubts
        self._epochs = epochs
        self._clock = medium.clock
        self._batch_keys_max = medium.batch_keys_max
        self._deletes = medium.adapter.capabilities.delete
        self._paused_until = 0.0  # after a failed delete: the medium may be read-only …
        self._pause_s = BREAKER_PAUSE_S  # … and stay read-only, so the pauses grow
        self._walk: Iterator[list[TierEntry]] | None = None  # over all entries, for objects of former epochs
        self._former: list[TierEntry] = []
        self._out = 0
        self.deleted = 0
        self.evicted = 0
        self.failed = 0
        self.last_error = ""

    def step(self) -> None:
        """Evict down to the watermark, and continue with the objects of former epochs."""
        if self._clock.now < self._paused_until:
            return
        self._evict(self._accounting.victims())
        tenancy = self._accounting.tenancy
        if tenancy is not None and tenancy.working and self._out < _TENANT_BATCHES_OUT:
            self._evict(self._accounting.step_tenants(self._batch_keys_max))
        if self._out:
            return
        if self._walk is not None and len(self._former) < self._batch_keys_max:
            self._walk_on(self._walk)
        some = dict.fromkeys(self._former[-self._batch_keys_max :])
        batch = [entry for entry in some if self._accounting.stands(entry)]
        del self._former[-self._batch_keys_max :]
        self._accounting.leave(batch)
        self.delete([entry.tier_key for entry in batch])

    def _walk_on(self, walk: Iterator[list[TierEntry]]) -> None:
        for _ in range(_SHARDS_A_STEP):
            shard = next(walk, None)
            if shard is None:
                self._walk = None
                return
            self._former += [entry for entry in shard if entry.epoch < self._epochs.of(entry.namespace)]

    @property
    def waiting(self) -> int:
        """Objects that a clear has made unreachable and that are still to be deleted, as far as found."""
        return len(self._former)

    @property
    def next_at(self) -> float | None:
        """When `step` has work."""
        if self._clock.now < self._paused_until:
            return self._paused_until
        tenancy = self._accounting.tenancy
        if tenancy is not None and tenancy.working and self._out < _TENANT_BATCHES_OUT:
            return self._clock.now
        return self._clock.now if (self._former or self._walk is not None) and not self._out else None

    def make_room(self, nbytes: int, namespace: int) -> TierReason | None:
        """None: there is room. THROTTLED: deletes are making room, ask again. FULL: there will be none."""
        counts = self._accounting
        if counts.capacity_bytes is not None and nbytes > counts.capacity_bytes:
            return TierReason.NO_ROOM  # and nothing is evicted in vain
        over = counts.over_limit(namespace, nbytes)
        if over:
            if self._clock.now >= self._paused_until:
                self._evict(counts.victims_of(namespace, over))
            if counts.over_limit(namespace, nbytes):
                return TierReason.NO_ROOM  # its tenant's objects cannot be evicted, or are too small
        if not counts.fits(nbytes) and self._clock.now >= self._paused_until:
            self._evict(counts.victims(nbytes, namespace))
        if counts.fits(nbytes):
            return None
        waits = counts.bytes_leaving or counts.bytes_reserved or counts.scanning or self._clock.now < self._paused_until
        return TierReason.THROTTLED if waits else TierReason.NO_ROOM

    def medium_is_full(self) -> None:
        """The medium has less room than its configured capacity: evict a share of what is there."""
        self._evict(self._accounting.shrink())

    def forget_former_epochs(self) -> None:
        """Delete, bit by bit, what is unreachable since an epoch moved."""
        if self._deletes:
            self._walk, self._former = self._accounting.shards(), []

    def delete(self, keys: Sequence[bytes]) -> None:
        """Delete tier keys; missing ones are no error."""
        if self._deletes:
            self._submit(keys, self._medium.delete)

    def delete_former(self, keys: Sequence[bytes]) -> None:
        """Of these keys, just found or stored, delete those that a clear has made unreachable meanwhile."""
        self.delete(former_epochs(keys, self._epochs))

    def set_aside(self, keys: Sequence[bytes]) -> None:
        """Set damaged objects aside."""
        if self._deletes:
            self._submit(keys, self._medium.set_aside, checks=True)

    def _evict(self, entries: Sequence[TierEntry]) -> None:
        self.evicted += len(entries)
        keys = [entry.tier_key for entry in entries]
        self._losses.note(keys, TierReason.EVICTED, self._accounting.policy_name)
        self.delete(keys)

    def _submit(self, keys: Sequence[bytes], method: _Method, *, checks: bool = False) -> None:
        for at in range(0, len(keys), self._batch_keys_max):
            self._submit_batch(keys[at : at + self._batch_keys_max], method, checks)

    def _submit_batch(self, keys: Sequence[bytes], method: _Method, checks: bool) -> None:
        """`checks`: check that they are gone, because an object that cannot be set aside may stay where it is."""
        deadline = self._clock.now + self._medium.config.deadline_s
        sizes = {key: self._accounting.nbytes_of(key) for key in keys}

        def ended(call: Call) -> None:
            self._out -= 1
            outcomes: Sequence[Outcome] = call.result or [Outcome(Result.FAILED, error=repr(call.error))] * len(keys)
            gone: list[bytes] = []
            for key, outcome in zip(keys, outcomes, strict=True):
                if outcome.result in (Result.DONE, Result.MISS):
                    gone.append(key)
                else:
                    self._refused([key], outcome.error)
                    self._doubts.add({key: sizes[key]}, damaged=checks)
            self._accounting.remove(gone)
            if gone:
                self._went_well(everything=len(gone) == len(keys))
            if checks:
                self._doubts.add({key: sizes[key] for key in gone}, damaged=True)
            self.deleted += len(gone)

        def late(call: Call) -> None:
            if call.state is CallState.EXPIRED:
                self._out -= 1
                self._refused(keys, "delete not done by its deadline")

        call = Call(lambda: method(keys, deadline), deadline, DELETE, ended, late)
        if self._medium.order.submit(self._medium.stores, call, keys, KeyAccess.DELETE):
            self._out += 1
        else:
            self._refused(keys, "the queue of deletes is full")

    def _refused(self, keys: Sequence[bytes], error: str) -> None:
        if self._accounting.tenancy is not None:
            self._accounting.tenancy.look()
        for key in keys:
            self._accounting.stays(key)
            entry = self._accounting.entry_of(key)
            if entry is not None and entry.epoch < self._epochs.of(entry.namespace):
                self._former.append(entry)  # nobody reads it any more: it goes as soon as the medium allows
        self.failed += len(keys)
        self.last_error = error
        if self._clock.now >= self._paused_until:  # calls from before the pause say nothing new
            self._paused_until = self._clock.now + self._pause_s
            self._pause_s = min(BREAKER_PAUSE_MAX_S, 2 * self._pause_s)

    def _went_well(self, *, everything: bool) -> None:
        """The medium deletes some objects, if not all: the pause need not grow for ever."""
        self._pause_s = BREAKER_PAUSE_S
        if everything:
            self.last_error = ""
