"""Loads from tiers into the L1: one at a time for each key, shared by all jobs that want it.

A load in the table may be joined; a late or cleared one is not in the table, even if its slot is not settled yet.
`load_states` says where a load stands. Its slot is settled in the L1 exactly once.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Container, Hashable, Iterable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

from lmcache_core.clock import Clock
from lmcache_core.guard import guarded
from lmcache_core.limits import BATCH_KEYS_MAX, TIER_BATCH_BYTES_MAX
from lmcache_core.tiers.flow.jobs import Job
from lmcache_core.tiers.flow.load_states import LOAD_TRANSITIONS, LoadEvent, LoadState
from lmcache_core.tiers.l1 import L1Port, LoadGrant, Loading, LoadWait, TierReason
from lmcache_core.tiers.object.epochs import Epochs
from lmcache_core.tiers.object.format import ObjectKind
from lmcache_core.tiers.object.transfer import Loaded, Transfer
from lmcache_core.tiers.observer import TierObserver
from lmcache_core.tiers.tier.calls import LoadCall
from lmcache_core.tiers.tier.lanes import Priority
from lmcache_core.tiers.tier.tier import Tier

logger = logging.getLogger(__name__)

_SPREAD = 4  # a job's loads are cut into about this many calls, so that lanes share them
_SPREAD_BYTES_MIN = 1 << 20  # smaller calls cost more than sharing gains

# job, position, why it failed (None: loaded), the generation if only this job caused the load and keeps it alive (else
# 0), and the tier that it came from (empty if the L1 had it by then)
Settle = Callable[[Job, int, TierReason | None, int, str], None]


class LoadTerms(NamedTuple):
    """What loads begun together have in common. The lease and the lanes share the deadline, so that both call a load
    late at the same moment."""

    layout_id: int
    deadline: float
    priority: Priority


class Load:
    """One key on its way from a tier into a slot."""

    __slots__ = ("alternatives", "batch", "checksum", "epoch", "generation", "key", "lease", "namespace", "nbytes",
                 "page", "position", "retain", "shared", "source", "state", "terms", "view", "waiters")  # fmt: skip

    def __init__(
        self,
        key: bytes,
        namespace: int,
        epoch: int,
        nbytes: int,
        terms: LoadTerms,
        sources: Sequence[str],
        retain: bool,
    ) -> None:
        self.key = key
        self.namespace = namespace
        self.epoch = epoch
        self.nbytes = nbytes
        self.terms = terms
        self.source, *self.alternatives = sources
        self.retain = retain
        self.state = LoadState.WANTED
        self.shared = False
        self.waiters: list[tuple[Job, int]] = []
        self.page: _Page | None = None  # while it waits for its slot
        self.batch: LoadBatch | None = None  # while a call for it is out
        self.lease = 0
        self.position = 0
        self.generation = 0  # of the incarnation that it makes in the L1
        self.checksum: int | None = None  # of its bytes, once they are loaded and verified
        self.view: memoryview = memoryview(b"")  # the bytes of its slot

    def move(self, event: LoadEvent) -> None:
        """The only way to change the state. A step that is not in the table is a bug of the caller: `KeyError`."""
        self.state = LOAD_TRANSITIONS[self.state, event]
        if self.state is not LoadState.OUT:
            self.batch = None
        if self.state is LoadState.OVER:  # so that its lane keeps no view of the pool alive
            self.view = memoryview(b"")


class _Page:
    """Loads that wait for their slots."""

    __slots__ = ("loads", "wait")

    def __init__(self, loads: Sequence[Load], wait: LoadWait) -> None:
        self.loads = loads
        self.wait = wait
        for load in loads:
            load.page = self


class LoadBatch(LoadCall):
    """The loads that one call of one tier serves."""

    def __init__(self, table: LoadTable, tier: Tier, loads: Sequence[Load], kind: ObjectKind, began_s: float) -> None:
        terms = loads[0].terms
        transfers = [Transfer(load.key, load.namespace, load.epoch, kind, load.view) for load in loads]
        super().__init__(tier, transfers, terms.deadline, terms.priority)
        self.table = table
        self.loads = loads
        self.began_s = began_s

    def loaded(self, results: Sequence[Loaded]) -> None:
        self.table.loaded(self, results)

    def given_up(self, *, running: bool) -> None:
        self.table.given_up(self, running)

    def traces(self) -> dict[Hashable, list[int]]:
        """The positions that traced lookups wait for."""
        found: dict[Hashable, list[int]] = {}
        for at, load in enumerate(self.loads if self.table.observer is not None else ()):
            for job, _ in load.waiters:
                if job.request.trace is not None:
                    found.setdefault(job.request.trace, []).append(at)
        return found


class LoadTable:
    """Begins, shares, settles and cancels loads."""

    def __init__(
        self,
        l1: L1Port,
        tiers: dict[str, Tier],
        epochs: Epochs,
        clock: Clock,
        settle: Settle,
        observer: TierObserver | None,
    ) -> None:
        self._l1 = l1
        self._tiers = tiers
        self._epochs = epochs
        self._settle = settle
        self._table: dict[tuple[int, bytes], Load] = {}
        self._batches: dict[LoadBatch, None] = {}  # their calls have not returned
        self._clock = clock
        self.observer = observer

    def __len__(self) -> int:
        """Loads that are out, late ones included."""
        return sum(len(batch.loads) for batch in self._batches)

    # --- begin --------------------------------------------------------------------------------------------
    def begin(self, job: Job, sources: dict[int, Sequence[str]], retained: Container[int], priority: Priority) -> None:
        """Join or begin the loads of a job. `sources`: position → the tiers that have it, best first; `retained`:
        positions that stay in the L1 after they are read.

        Refusals of the L1 are settled before any load starts: the job may `cancel` positions that are no longer worth
        loading.
        """
        request = job.request
        namespace, epoch = request.namespace, self._epochs.of(request.namespace)
        nbytes = self._l1.layout(request.layout_id).nbytes
        allowed_s = max((self._tiers[name].config.deadline_s for names in sources.values() for name in names[:1]
                         if name in self._tiers), default=0.0)  # fmt: skip
        terms = LoadTerms(request.layout_id, min(request.deadline, self._clock.now + allowed_s), priority)
        fresh: list[Load] = []
        for position, names in sources.items():
            key = request.keys[position]
            load = self._table.get((namespace, key))
            if load is None:
                load = Load(key, namespace, epoch, nbytes, terms, names, position in retained)
                self._table[namespace, key] = load
                fresh.append(load)
            else:
                load.shared = True
                load.retain |= position in retained
            load.waiters.append((job, position))
        refused: list[tuple[Load, TierReason | None]] = []
        try:
            for first in range(0, len(fresh), BATCH_KEYS_MAX):
                page = fresh[first : first + BATCH_KEYS_MAX]
                granted = partial(self._granted, page)
                keys = [load.key for load in page]
                answer = self._l1.begin_load(namespace, terms.layout_id, keys, terms.deadline, granted)
                if isinstance(answer, Loading):
                    refused += self._take_slots(page, answer)
                else:
                    _Page(page, answer)
        except BaseException:  # a load that was not begun must not block the next one of its key
            for load in fresh:
                if load.state is LoadState.GRANTED:
                    self._abort(load, TierReason.TIER_ERROR)
                elif load.page is None:
                    self._refuse(load, TierReason.TIER_ERROR)
            raise
        self._start([load for load in fresh if load.page is None], refused)

    def offer(self, job: Job, positions: Sequence[int], name: str) -> None:
        """One more tier has these positions."""
        for position in positions:
            load = self._table.get((job.request.namespace, job.request.keys[position]))
            if load is not None and name != load.source and name not in load.alternatives:
                load.alternatives.append(name)

    def _granted(self, loads: Sequence[Load], loading: Loading) -> None:
        """The L1 has made room for loads that were waiting for it."""
        self._start(loads, self._take_slots(loads, loading))

    def _take_slots(self, loads: Sequence[Load], loading: Loading) -> list[tuple[Load, TierReason | None]]:
        """Give loads their slots. Returns the loads that got none, and why (None: the L1 has the object by now)."""
        refused: list[tuple[Load, TierReason | None]] = []
        for index, (load, grant) in enumerate(zip(loads, loading.grants, strict=True)):
            load.page = None
            if grant is LoadGrant.GRANTED:
                load.lease, load.position, load.generation = loading.lease, index, loading.generation
                load.view = self._l1.view(loading.offsets[index], load.nbytes)
                load.move(LoadEvent.GRANT)
            elif grant is LoadGrant.EXISTS:
                refused.append((load, None))
            else:
                refused.append((load, TierReason.BUSY if grant is LoadGrant.BUSY else TierReason.NO_ROOM))
        return refused

    def _start(self, loads: Sequence[Load], refused: Sequence[tuple[Load, TierReason | None]]) -> None:
        """Settle the loads without a slot, then submit the others to their tiers."""
        for load, reason in refused:
            self._refuse(load, reason)
        by_tier: dict[str, list[Load]] = defaultdict(list)
        for load in loads:
            if load.state is not LoadState.GRANTED:
                continue
            if load.waiters:
                by_tier[load.source].append(load)
            else:
                self._abort(load, TierReason.CUT)
        for name, group in by_tier.items():
            for part in _parts(group, self._tiers[name].batch_keys_max if name in self._tiers else 1):
                self._submit(name, part)

    def _submit(self, name: str, loads: Sequence[Load]) -> None:
        """Submit these loads to one tier; if it refuses, to the next that has them."""
        terms, tier = loads[0].terms, self._tiers.get(name)
        kind = None if tier is None else self._kind(tier, terms.layout_id)
        refused = TierReason.TIER_ERROR
        if tier is not None and kind is not None:
            batch = LoadBatch(self, tier, loads, kind, self._clock.now)
            reason = batch.begin()
            if reason is None:
                self._batches[batch] = None
                for load in loads:
                    load.move(LoadEvent.SUBMIT)
                    load.batch = batch
                return
            refused = reason
        self._elsewhere([(load, refused) for load in loads])

    def _kind(self, tier: Tier, layout_id: int) -> ObjectKind | None:
        """The kind of objects of this layout on this tier. None: none can be stored there, because the codec chain
        cannot describe them."""

        def none(error: BaseException) -> None:
            logger.error("tier %s cannot hold objects of layout %d", tier.name, layout_id, exc_info=error)

        return guarded(none, lambda: tier.kind(self._l1.layout(layout_id)))

    # --- ends ---------------------------------------------------------------------------------------------
    def loaded(self, batch: LoadBatch, results: Sequence[Loaded]) -> None:
        """The batch has returned: no lane writes to the slots any more."""
        del self._batches[batch]
        traces = batch.traces()
        returned_s = self._clock.read() if traces else 0.0
        good: list[Load] = []
        bad: list[tuple[Load, TierReason]] = []
        for load, result in zip(batch.loads, results, strict=True):
            if load.state is LoadState.LATE:
                load.move(LoadEvent.RETURN)
                self._l1.abort_load(load.lease, [load.position], TierReason.LATE)
            elif not load.waiters:
                load.move(LoadEvent.RETURN)
                self._abort(load, TierReason.CANCELLED)
            elif result.reason is None:
                load.checksum = result.checksum
                good.append(load)
            else:
                load.move(LoadEvent.RETURN)
                bad.append((load, result.reason))
        for load, reason in self._commit(good):
            self._tell(load, reason)
        if bad:
            self._elsewhere(bad)
        if self.observer is not None and traces:
            self.observer.loaded(batch.tier.name, batch.began_s, returned_s, traces, batch.loads[0].nbytes, results)

    def given_up(self, batch: LoadBatch, running: bool) -> None:
        """The deadline has passed. `running`: a lane may still be writing, and `loaded` follows."""
        if not running:
            del self._batches[batch]
        if self.observer is not None and (traces := batch.traces()):
            self.observer.load_failed(batch.tier.name, batch.began_s, traces, TierReason.LATE)
        for load in batch.loads:
            if running:
                load.move(LoadEvent.EXPIRE)
                self._tell(load, TierReason.LATE)
            else:
                load.move(LoadEvent.RETURN)
                self._abort(load, TierReason.LATE)

    def _commit(self, loads: Sequence[Load]) -> list[tuple[Load, TierReason | None]]:
        """Publish what was loaded. Returns the outcome of each: None, or CLEARED if a clear came first."""
        together: dict[tuple[int, bool], list[Load]] = defaultdict(list)
        for load in loads:
            together[load.lease, load.retain].append(load)
        outcomes: list[tuple[Load, TierReason | None]] = []
        for (lease, retain), group in together.items():
            positions, checksums = [load.position for load in group], [load.checksum for load in group]
            ready = set(self._l1.commit_load(lease, positions, retain, checksums))
            for load in group:
                load.move(LoadEvent.COMMIT)
                outcomes.append((load, None if load.position in ready else TierReason.CLEARED))
        return outcomes

    def _elsewhere(self, failed: Iterable[tuple[Load, TierReason]]) -> None:
        """These failed on their tier: try the next that has them, into the same slots."""
        again: dict[str, list[Load]] = defaultdict(list)
        for load, reason in failed:
            if load.alternatives and load.waiters and self._clock.now < load.terms.deadline:
                load.source = load.alternatives.pop(0)
                again[load.source].append(load)
            else:
                self._abort(load, reason)
        for name, loads in again.items():
            self._submit(name, loads)

    def _refuse(self, load: Load, reason: TierReason | None) -> None:
        """End a load that has no slot."""
        load.move(LoadEvent.REFUSE)
        self._tell(load, reason)

    def _abort(self, load: Load, reason: TierReason) -> None:
        """End a load whose slot no lane writes to, and that no further tier is asked for."""
        self._l1.abort_load(load.lease, [load.position], reason)
        load.move(LoadEvent.ABORT)
        self._tell(load, reason)

    def _tell(self, load: Load, reason: TierReason | None) -> None:
        """Tell every job that waits for the load (`reason` None: it is loaded)."""
        if self._table.get((load.namespace, load.key)) is load:
            del self._table[load.namespace, load.key]
        waiters, load.waiters = load.waiters, []
        own = load.generation if reason is None and not load.shared and not load.retain else 0
        source = load.source if load.generation else ""
        for job, position in waiters:
            self._settle(job, position, reason, own, source)

    # --- giving up ----------------------------------------------------------------------------------------
    def cancel(self, job: Job, positions: Sequence[int]) -> None:
        """The job no longer waits for these. Loads that no job waits for are cancelled if they have not begun."""
        batches: dict[LoadBatch, None] = {}
        pages: dict[_Page, None] = {}
        for position in positions:
            load = self._table.get((job.request.namespace, job.request.keys[position]))
            if load is None:
                continue
            load.waiters = [waiter for waiter in load.waiters if waiter != (job, position)]
            if load.batch is not None:
                batches[load.batch] = None
            elif load.page is not None:
                pages[load.page] = None
        for page in pages:
            self._cancel_page(page)
        for batch in batches:
            self._cancel_batch(batch)

    def _cancel_page(self, page: _Page) -> None:
        """Stop making room for a page if no job waits for any of its loads."""
        if not any(load.waiters for load in page.loads):
            page.wait.cancel()
            for load in page.loads:
                load.page = None
                self._refuse(load, TierReason.CANCELLED)

    def _cancel_batch(self, batch: LoadBatch) -> None:
        """Cancel the call of a batch if no job waits for any of its loads, unless it has begun."""
        if self._tiers.get(batch.tier.name) is not batch.tier or any(load.waiters for load in batch.loads):
            return
        if batch.cancel():
            del self._batches[batch]
            for load in batch.loads:
                load.move(LoadEvent.RETURN)
                self._abort(load, TierReason.CANCELLED)

    def clear(self, namespace: int | None) -> None:
        """End the loads of this scope for every job; a slot that a lane is writing to is freed when the lane
        returns."""
        self._remove([name for name in self._table if namespace in (None, name[0])])

    def remove(self, namespace: int, keys: Sequence[bytes]) -> None:
        """As `clear`, for these keys: what the tiers have under them is out of date."""
        self._remove([(namespace, key) for key in keys])

    def _remove(self, names: Sequence[tuple[int, bytes]]) -> None:
        for name in names:
            load = self._table.pop(name, None)
            if load is None:
                continue
            waiters, load.waiters = load.waiters, []
            if load.page is not None:
                self._cancel_page(load.page)
            for job, position in waiters:
                self._settle(job, position, TierReason.CLEARED, 0, "")


def _parts(loads: list[Load], keys_max: int) -> Iterator[list[Load]]:
    """Cut loads into calls, in order: few enough keys for the adapter, small enough for lanes to share."""
    total = sum(load.nbytes for load in loads)
    bytes_max = min(TIER_BATCH_BYTES_MAX, max(_SPREAD_BYTES_MIN, -(-total // _SPREAD)))
    part: list[Load] = []
    nbytes = 0
    for load in loads:
        if part and (len(part) >= keys_max or nbytes + load.nbytes > bytes_max):
            yield part
            part, nbytes = [], 0
        part.append(load)
        nbytes += load.nbytes
    if part:
        yield part
