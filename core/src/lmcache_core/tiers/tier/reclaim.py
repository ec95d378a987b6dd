"""What is deleted on a tier to free room, all in the background: evictions, and leftovers of a clear."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from lmcache_core.limits import BREAKER_PAUSE_MAX_S, BREAKER_PAUSE_S, FRUITLESS_EVICTIONS_MAX, STRANGER_S
from lmcache_core.tiers.contract import Outcome, Result
from lmcache_core.tiers.l1 import TierReason
from lmcache_core.tiers.object.epochs import Epochs, former_epochs
from lmcache_core.tiers.tier.accounting import Accounting, TierEntry
from lmcache_core.tiers.tier.call_states import CallState
from lmcache_core.tiers.tier.deletes import NotOurs
from lmcache_core.tiers.tier.doubts import Doubts
from lmcache_core.tiers.tier.lanes import DELETE, Call
from lmcache_core.tiers.tier.medium import Medium
from lmcache_core.tiers.tier.order import KeyAccess
from lmcache_core.tiers.tier.trouble import Losses

_TENANT_BATCHES_OUT = 4  # of deletes, while tenants over their limits are evicted
_SHARDS_A_STEP = 16  # some hundred entries of a million


class Reclaim:
    """Frees room on one tier. An adapter that cannot delete makes every method a no-op."""

    def __init__(
        self,
        medium: Medium,
        accounting: Accounting,
        losses: Losses,
        doubts: Doubts,
        epochs: Epochs,
        on_late: Callable[[Call], None],
    ) -> None:
        """`on_late`: called with each delete that is not done by its deadline."""
        self._medium = medium
        self._accounting = accounting
        accounting.on_counted = self._counted
        self._losses = losses
        self._doubts = doubts
        self._epochs = epochs
        self._on_late = on_late
        self._clock = medium.clock
        self._batch_keys_max = medium.batch_keys_max
        self._deletes = medium.adapter.capabilities.delete
        self._paused_until = 0.0  # after a failed delete: the medium may be read-only …
        self._pause_s = BREAKER_PAUSE_S  # … and stay read-only, so the pauses grow
        self._walk: Iterator[list[TierEntry]] | None = None  # over all entries, for objects of former epochs
        self._former: list[TierEntry] = []  # of them, what is to be deleted next
        self._out = 0  # calls that are not late
        self._deleting = 0  # objects in calls that have not ended
        self._hung: set[_DeleteCall] = set()  # past their deadline: their lane gets other threads, a few times
        self.vain = 0  # calls in a row that deleted nothing of what they should
        self.deleted = 0
        self.evicted = 0
        self._fruitless = 0  # evictions for a full medium, since it last took something
        self.failed = 0
        self.last_error = ""

    def step(self) -> None:
        """Evict down to the watermark, and continue with the objects of former epochs."""
        if self._rests:
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
        batch = [entry for entry in some if self._accounting.stands(entry) and self._unwanted(entry)]
        del self._former[-self._batch_keys_max :]
        self._accounting.leave(batch)
        self.delete([entry.tier_key for entry in batch])

    def _walk_on(self, walk: Iterator[list[TierEntry]]) -> None:
        for _ in range(_SHARDS_A_STEP):
            shard = next(walk, None)
            if shard is None:
                self._walk = None
                return
            self._former += filter(self._unwanted, shard)

    @property
    def waiting(self) -> int:
        """Objects that are still to be deleted, as far as found, those in calls under way among them."""
        return len(self._former) + self._deleting

    @property
    def hung(self) -> int:
        """Calls that are past their deadline and have not returned."""
        return len(self._hung)

    @property
    def hung_drops(self) -> int:
        """Objects that were dropped, and whose delete hangs."""
        return sum(len(self._accounting.drops_of(call.keys)) for call in self._hung)

    @property
    def next_at(self) -> float | None:
        """When `step` has work."""
        if self._clock.now < self._paused_until:
            return self._paused_until
        tenancy = self._accounting.tenancy
        if tenancy is not None and tenancy.working and self._out < _TENANT_BATCHES_OUT:
            return self._clock.now
        return self._clock.now if (self._former or self._walk is not None) and not self._out else None

    @property
    def _rests(self) -> bool:
        """Whether nothing is to be deleted now: a delete has just failed."""
        return self._clock.now < self._paused_until

    def make_room(self, nbytes: int, namespace: int) -> TierReason | None:
        """None: there is room. THROTTLED: deletes are making room, ask again. NO_ROOM: there will be none. TIER_ERROR:
        none as long as some deletes hang."""
        counts = self._accounting
        if counts.capacity_bytes is not None and nbytes > counts.capacity_bytes:
            return TierReason.NO_ROOM  # and nothing is evicted in vain
        over = counts.over_limit(namespace, nbytes)
        if over:
            if not self._rests:
                self._evict(counts.victims_of(namespace, over))
            if counts.over_limit(namespace, nbytes):
                return TierReason.NO_ROOM  # its tenant's objects cannot be evicted, or are too small
        if not counts.fits(nbytes) and not self._rests:
            self._evict(counts.victims(nbytes, namespace))
        if counts.fits(nbytes):
            return None
        if counts.bytes_leaving or counts.bytes_reserved or counts.scanning or self._rests:
            return TierReason.THROTTLED
        return TierReason.TIER_ERROR if self.hung else TierReason.NO_ROOM

    def medium_is_full(self) -> None:
        """The medium has less room than its configured capacity: evict a share of what is there. If that did not help
        before, its objects stay: it may lack something else than bytes, or return them later."""
        if self._fruitless < FRUITLESS_EVICTIONS_MAX:
            entries = self._accounting.shrink()
            self._fruitless += bool(entries)
            self._evict(entries)

    def medium_took(self) -> None:
        """The medium has stored something: if it is full again, an eviction may help."""
        self._fruitless = 0

    def forget_former_epochs(self) -> None:
        """Delete, bit by bit, what is unreachable since an epoch moved. What enters the accounts later is checked
        then (`_counted`)."""
        if self._deletes:
            self._walk, self._former = self._accounting.shards(), []

    def look_at(self, keys: Iterable[bytes]) -> None:
        """These may be unwanted again: a store that was to replace them has failed."""
        self._counted(list(keys))

    def _counted(self, keys: Sequence[bytes]) -> None:
        """These have entered the accounts: stored or loaded when a clear came, or found by a scan long after it."""
        if self._deletes:
            unwanted = [*former_epochs(keys, self._epochs), *filter(self._accounting.is_unwanted, keys)]
            found = map(self._accounting.entry_of, unwanted)
            self._former += [entry for entry in found if entry is not None]

    def delete(self, keys: Sequence[bytes]) -> None:
        """Delete tier keys; missing ones are no error."""
        if not self._deletes:
            return
        hung = self._medium.order.hung(keys)  # what waits for these may wait for good, with all of its batch
        for some in ([key for key in keys if key not in hung], list(hung)) if hung else (keys,):
            for at in range(0, len(some), self._batch_keys_max):
                self._submit_batch(some[at : at + self._batch_keys_max])

    def was_set_aside(self, key: bytes, nbytes: int | None) -> None:
        """A damaged object is out of the way, as its adapter says: the medium is asked whether it is."""
        self._accounting.remove([key])
        self.deleted += 1
        self._doubts.add({key: nbytes}, damaged=True)

    def stayed(self, key: bytes, nbytes: int | None, error: str) -> None:
        """A damaged object could not be set aside."""
        self._refused([key], error)
        self._doubts.add({key: nbytes}, damaged=True)

    def _evict(self, entries: Sequence[TierEntry]) -> None:
        self.evicted += len(entries)
        keys = [entry.tier_key for entry in entries]
        self._losses.note(keys, TierReason.EVICTED, self._accounting.policy_name)
        self.delete(keys)

    def _submit_batch(self, keys: Sequence[bytes]) -> None:
        call = _DeleteCall(self, self._medium, self._accounting, keys)
        if self._medium.order.submit(self._medium.removals, call, call.keys, KeyAccess.DELETE):
            self._out += 1
            self._deleting += len(call.keys)
        else:
            self._refused(call.keys, "the queue of deletes is full")

    def ended(self, call: _DeleteCall) -> None:
        """A delete has returned."""
        self._deleting -= len(call.keys)
        if call.was_late:
            self._hung.discard(call)
            self._paused_until = 0.0  # the medium answers again
        else:
            self._out -= 1
        failed = Outcome(Result.FAILED, error=call.failure)
        outcomes: Sequence[Outcome] = call.result or [failed] * len(call.keys)
        gone: list[bytes] = []
        strange: list[bytes] = []
        failed_keys: set[bytes] = set()
        for key, outcome in zip(call.keys, outcomes, strict=True):
            if outcome.result in (Result.DONE, Result.MISS):
                gone.append(key)
            elif isinstance(outcome, NotOurs):
                strange.append(key)
            else:
                failed_keys.add(key)
                self._refused([key], outcome.error)
                self._doubts.add({key: call.sizes[key]})
        self._accounting.remove(gone)
        self._accounting.end_drops({key: drop for key, drop in call.drops.items() if key not in failed_keys})
        self._accounting.disown(strange, self._clock.now + STRANGER_S)
        self.vain = 0 if gone else self.vain + bool(failed_keys)
        if gone:
            self._went_well(everything=len(gone) == len(call.keys))
        self.deleted += len(gone)

    def late(self, call: _DeleteCall) -> None:
        """A delete is not done by its deadline."""
        error = "delete not done by its deadline"
        self._out -= 1
        self.vain += 1
        if call.state is CallState.EXPIRED:
            self._deleting -= len(call.keys)
            self._refused(call.keys, error)
        else:
            self._hung.add(call)
            self._accounting.hang(call.keys)
            self.last_error = error
        self._on_late(call)

    def _unwanted(self, entry: TierEntry) -> bool:
        """Whether nobody may read it: it was cleared or dropped, and nothing was stored under its key since."""
        return self._accounting.is_unwanted(entry.tier_key) or entry.epoch < self._epochs.of(entry.namespace)

    def _refused(self, keys: Sequence[bytes], error: str) -> None:
        if self._accounting.tenancy is not None:
            self._accounting.tenancy.look()
        for key in keys:
            self._accounting.stays(key)
            entry = self._accounting.entry_of(key)
            if entry is not None and self._unwanted(entry):
                self._former.append(entry)  # nobody reads it any more: it goes as soon as the medium allows
            elif entry is None and self._accounting.is_unwanted(key):
                self._doubts.add({key: None})  # it was dropped, and the accounts do not say whether there is anything
        self.failed += len(keys)
        self.last_error = error
        if self._clock.now >= self._paused_until:  # calls from before the pause say nothing new
            self._paused_until = self._clock.now + self._pause_s
            self._pause_s = min(BREAKER_PAUSE_MAX_S, 2 * self._pause_s)

    def _went_well(self, *, everything: bool) -> None:
        """The medium deletes some objects, if not all: the pause need not grow for good."""
        self._pause_s = BREAKER_PAUSE_S
        if everything:
            self.last_error = ""


class _DeleteCall(Call):
    """Deletes a batch, those of its keys that are ours."""

    what = "delete"

    def __init__(self, reclaim: Reclaim, medium: Medium, accounting: Accounting, keys: Sequence[bytes]) -> None:
        super().__init__(medium.clock.now + medium.config.deadline_s, DELETE)
        self._reclaim = reclaim
        self._deletes = medium.deletes
        self.sizes = {key: accounting.nbytes_of(key) for key in keys}
        self.keys = list(self.sizes)
        self._proven = accounting.proven(self.keys)
        self.drops = accounting.drops_of(self.keys)

    def work(self) -> list[Outcome]:
        return self._deletes.delete(self.sizes, self._proven, self.deadline)

    def ended(self) -> None:
        self._reclaim.ended(self)

    def late(self) -> None:
        self._reclaim.late(self)
