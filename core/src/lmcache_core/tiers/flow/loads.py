"""Loads from tiers into the L1: one for each key at a time, whoever asks for it.

A load is in one of three places: in the table (under way, others may join), out of it but still out (late or
cleared: its lane has not returned), or settled. It may have to wait for its slot first, together with its page. The
slot is settled in the L1 exactly once, and never before the lane has stopped writing to it.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Container, Hashable, Iterator, Sequence

from lmcache_core.clock import Clock
from lmcache_core.limits import BATCH_KEYS_MAX, TIER_BATCH_BYTES_MAX
from lmcache_core.tiers.flow.jobs import Job, TierLookup
from lmcache_core.tiers.l1 import L1Port, LoadGrant, Loading, LoadWait, TierReason
from lmcache_core.tiers.object.epochs import Epochs
from lmcache_core.tiers.object.transfer import Loaded, Transfer
from lmcache_core.tiers.observer import TierTracer
from lmcache_core.tiers.tier.lanes import Call, Priority
from lmcache_core.tiers.tier.tier import Tier

logger = logging.getLogger(__name__)

_SPREAD = 4  # a job's loads are cut into about so many calls, so that lanes share them
_SPREAD_BYTES_MIN = 1 << 20  # smaller calls cost more than sharing them gains

# job, position, why it failed (None: loaded), the generation of what this job alone caused and keeps alive, else 0, and
# the tier that it came from, empty where the L1 had it by then
Settle = Callable[[Job, int, TierReason | None, int, str], None]


class Load:
    """One key on its way from a tier into a slot."""

    __slots__ = ("alternatives", "call", "checksum", "epoch", "generation", "key", "lease", "namespace", "nbytes",
                 "out", "page", "position", "retain", "shared", "source", "transfer_view", "waiters")  # fmt: skip

    def __init__(
        self, key: bytes, namespace: int, epoch: int, nbytes: int, sources: Sequence[str], retain: bool
    ) -> None:
        self.key = key
        self.namespace = namespace
        self.epoch = epoch
        self.nbytes = nbytes
        self.source, *self.alternatives = sources
        self.retain = retain
        self.shared = False
        self.waiters: list[tuple[Job, int]] = []
        self.page: _Page | None = None  # while it waits for its slot
        self.out = False  # given up, while its lane may still be writing
        self.call: Call | None = None
        self.lease = 0
        self.position = 0
        self.generation = 0  # of what it makes in the L1
        self.checksum: int | None = None  # of its bytes, once they are there and verified
        self.transfer_view: memoryview = memoryview(b"")


class _Page:
    """Loads that wait for their slots."""

    __slots__ = ("loads", "wait")

    def __init__(self, loads: Sequence[Load], wait: LoadWait) -> None:
        self.loads = loads
        self.wait = wait


class LoadTable:
    """Begins, shares, settles and gives up loads."""

    def __init__(self, l1: L1Port, tiers: dict[str, Tier], epochs: Epochs, clock: Clock, settle: Settle) -> None:
        self._l1 = l1
        self._tiers = tiers
        self._epochs = epochs
        self._settle = settle
        self._table: dict[tuple[int, bytes], Load] = {}
        self._groups: dict[Call, list[Load]] = {}
        self._clock = clock
        self.tracer: TierTracer | None = None

    def __len__(self) -> int:
        """Loads that are out, late ones included."""
        return sum(map(len, self._groups.values()))

    # --- begin --------------------------------------------------------------------------------------------
    def begin(
        self, job: Job, sources: dict[int, Sequence[str]], retained: Container[int], priority: Priority
    ) -> Callable[[], None]:
        """Join or begin the loads of a job. `sources`: position → the tiers that have it, the best first; `retained`:
        positions that stay in the L1 after their reader.

        Returns what starts the new ones: the caller first learns, through `settle`, what the L1 refused, and
        may `detach` positions that are not worth loading any more.
        """
        request = job.request
        namespace, epoch = request.namespace, self._epochs.of(request.namespace)
        nbytes = self._l1.layout(request.layout_id).nbytes
        fresh: list[Load] = []
        for position, names in sources.items():
            key = request.keys[position]
            load = self._table.get((namespace, key))
            if load is None:
                load = self._table[namespace, key] = Load(key, namespace, epoch, nbytes, names, position in retained)
                fresh.append(load)
            else:
                load.shared = True
                load.retain |= position in retained
            load.waiters.append((job, position))
        # The lease and the lanes share one deadline, so that both call a load late at the same moment.
        allowed_s = max((self._tiers[name].config.deadline_s for names in sources.values() for name in names[:1]
                         if name in self._tiers), default=0.0)  # fmt: skip
        deadline = min(request.deadline, self._clock.now + allowed_s)
        refused: list[tuple[Load, TierReason | None]] = []
        begun: list[Load] = []
        try:
            for first in range(0, len(fresh), BATCH_KEYS_MAX):
                page = fresh[first : first + BATCH_KEYS_MAX]
                self._ask_for_slots(page, request, deadline, priority, begun, refused)
        except BaseException:  # a load that is not begun must not stand in the way of the next one of its key
            self._abort(begun, TierReason.TIER_ERROR)
            for load in fresh:
                if load.page is None:
                    self._over(load, TierReason.TIER_ERROR)
            raise
        for load, reason in refused:
            self._over(load, reason)
        return lambda: self._start(begun, request.layout_id, deadline, priority)

    def offer(self, job: Job, positions: Sequence[int], name: str) -> None:
        """One more tier has these."""
        for position in positions:
            load = self._table.get((job.request.namespace, job.request.keys[position]))
            if load is not None and name != load.source and name not in load.alternatives:
                load.alternatives.append(name)

    def _ask_for_slots(
        self,
        loads: Sequence[Load],
        request: TierLookup,
        deadline: float,
        priority: Priority,
        begun: list[Load],
        refused: list[tuple[Load, TierReason | None]],
    ) -> None:
        """Slots for a page of a job's loads: at once, or later, and then they are started as soon as they have them."""

        def granted(loading: Loading) -> None:
            begun: list[Load] = []
            refused: list[tuple[Load, TierReason | None]] = []
            self._granted(loads, loading, begun, refused)
            for load, reason in refused:
                self._over(load, reason)
            self._start(begun, request.layout_id, deadline, priority)

        answer = self._l1.begin_load(
            request.namespace, request.layout_id, [load.key for load in loads], deadline, granted
        )
        if isinstance(answer, Loading):
            self._granted(loads, answer, begun, refused)
        else:
            page = _Page(loads, answer)
            for load in loads:
                load.page = page

    def _granted(
        self,
        loads: Sequence[Load],
        loading: Loading,
        begun: list[Load],
        refused: list[tuple[Load, TierReason | None]],
    ) -> None:
        for index, (load, grant) in enumerate(zip(loads, loading.grants, strict=True)):
            load.page = None
            if grant is LoadGrant.GRANTED:
                load.lease, load.position, load.generation = loading.lease, index, loading.generation
                load.transfer_view = self._l1.view(loading.offsets[index], load.nbytes)
                begun.append(load)
            elif grant is LoadGrant.EXISTS:
                refused.append((load, None))
            else:
                refused.append((load, TierReason.BUSY if grant is LoadGrant.BUSY else TierReason.FULL))

    def _start(self, loads: Sequence[Load], layout_id: int, deadline: float, priority: Priority) -> None:
        by_tier: dict[str, list[Load]] = defaultdict(list)
        for load in loads:
            if load.waiters:
                by_tier[load.source].append(load)
            else:
                self._abort([load], TierReason.CUT)
        for name, group in by_tier.items():
            for part in _parts(group, self._tiers[name].batch_keys_max if name in self._tiers else 1):
                self._submit(name, part, layout_id, deadline, priority)

    def _submit(self, name: str, part: list[Load], layout_id: int, deadline: float, priority: Priority) -> None:
        tier = self._tiers.get(name)
        refused: TierReason | None = TierReason.TIER_ERROR
        if tier is not None:
            try:
                kind = tier.kind(self._l1.layout(layout_id))
            except KeyboardInterrupt:
                raise
            except BaseException:  # such objects cannot have been stored there: the chain does not even describe itself
                logger.exception("tier %s cannot hold objects of layout %d", name, layout_id)
                self._elsewhere(part, [TierReason.TIER_ERROR] * len(part), layout_id, deadline, priority)
                return
            batch = [Transfer(load.key, load.namespace, load.epoch, kind, load.transfer_view) for load in part]
            calls: list[Call] = []
            tracer, began_s = self.tracer, self._clock.now

            def ended(results: Sequence[Loaded]) -> None:
                self._groups.pop(calls.pop(), None)  # popped: call and callback must not keep each other alive
                waiters = _traces(part) if tracer is not None else None
                returned_s = self._clock.read() if waiters else 0.0
                self._ended(part, results, layout_id, deadline, priority)
                if tracer is not None and waiters:
                    tracer.loaded(name, began_s, returned_s, waiters, part[0].nbytes, results)

            def late(running: bool) -> None:
                if not running:
                    self._groups.pop(calls.pop(), None)
                if tracer is not None and (waiters := _traces(part)):
                    tracer.load_failed(name, began_s, waiters, TierReason.LATE)
                self._late(part, running)

            call = tier.load(batch, deadline, priority, ended, late)
            if isinstance(call, Call):
                calls.append(call)
                self._groups[call] = part
                for load in part:
                    load.call = call
                return
            refused = call
        self._elsewhere(part, [refused] * len(part), layout_id, deadline, priority)

    # --- ends ---------------------------------------------------------------------------------------------
    def _ended(
        self, part: list[Load], results: Sequence[Loaded], layout_id: int, deadline: float, priority: Priority
    ) -> None:
        good: list[Load] = []
        bad: list[Load] = []
        reasons: list[TierReason | None] = []
        for load, result in zip(part, results, strict=True):
            load.call = None
            if load.out:
                self._l1.abort_load(load.lease, [load.position], TierReason.LATE)
                load.transfer_view = memoryview(b"")
            elif not load.waiters:
                self._abort([load], TierReason.CANCELLED)
            elif result.reason is None:
                load.checksum = result.checksum
                good.append(load)
            else:
                bad.append(load)
                reasons.append(result.reason)
        self._commit(good)
        if bad:
            self._elsewhere(bad, reasons, layout_id, deadline, priority)

    def _commit(self, loads: Sequence[Load]) -> None:
        batches: dict[tuple[int, bool], list[Load]] = defaultdict(list)
        for load in loads:
            batches[load.lease, load.retain].append(load)
        for (lease, retain), batch in batches.items():
            positions, checksums = [load.position for load in batch], [load.checksum for load in batch]
            ready = set(self._l1.commit_load(lease, positions, retain, checksums))
            for load in batch:
                self._over(load, None if load.position in ready else TierReason.CLEARED)

    def _elsewhere(
        self,
        part: Sequence[Load],
        reasons: Sequence[TierReason | None],
        layout_id: int,
        deadline: float,
        priority: Priority,
    ) -> None:
        """These did not come from their tier: try the next that has them, into the same slots."""
        again: dict[str, list[Load]] = defaultdict(list)
        for load, reason in zip(part, reasons, strict=True):
            if load.alternatives and load.waiters and self._clock.now < deadline:
                load.source = load.alternatives.pop(0)
                again[load.source].append(load)
            else:
                self._abort([load], reason or TierReason.TIER_ERROR)
        for name, loads in again.items():
            self._submit(name, loads, layout_id, deadline, priority)

    def _late(self, part: Sequence[Load], running: bool) -> None:
        for load in part:
            if load.out:
                continue
            if running:
                load.out = True
                self._l1.late_load(load.lease, [load.position])
                self._over(load, TierReason.LATE)
            else:
                self._abort([load], TierReason.LATE)

    def _abort(self, loads: Sequence[Load], reason: TierReason) -> None:
        """Nobody writes to their slots any more."""
        for load in loads:
            self._l1.abort_load(load.lease, [load.position], reason)
            self._over(load, reason)

    def _over(self, load: Load, reason: TierReason | None) -> None:
        """Tell everyone who waits for it."""
        if self._table.get((load.namespace, load.key)) is load:
            del self._table[load.namespace, load.key]
        if not load.out:
            load.transfer_view = memoryview(b"")
        waiters, load.waiters = load.waiters, []
        own = load.generation if reason is None and not load.shared and not load.retain else 0
        source = load.source if load.generation else ""
        for job, position in waiters:
            self._settle(job, position, reason, own, source)

    # --- giving up ----------------------------------------------------------------------------------------
    def detach(self, job: Job, positions: Sequence[int]) -> None:
        """The job does not wait for these any more. What nobody waits for is taken back, if it has not begun."""
        calls: dict[Call, None] = {}
        pages: dict[_Page, None] = {}
        for position in positions:
            load = self._table.get((job.request.namespace, job.request.keys[position]))
            if load is None:
                continue
            load.waiters = [waiter for waiter in load.waiters if waiter != (job, position)]
            if load.call is not None and not load.waiters:
                calls[load.call] = None
            elif load.page is not None and not load.waiters:
                pages[load.page] = None
        for page in pages:
            self._give_up_if_idle(page)
        for call in calls:
            group = self._groups.get(call, [])
            if group and not any(load.waiters for load in group) and self._tiers_cancel(group[0].source, call):
                del self._groups[call]
                self._abort(group, TierReason.CANCELLED)

    def _give_up_if_idle(self, page: _Page) -> None:
        """Where nobody waits for any of its loads, no room is made for it."""
        if not any(load.waiters for load in page.loads):
            page.wait.cancel()
            for load in page.loads:
                load.page = None
                self._over(load, TierReason.CANCELLED)

    def _tiers_cancel(self, name: str, call: Call) -> bool:
        tier = self._tiers.get(name)
        return tier is not None and tier.cancel(call)

    def clear(self, namespace: int | None) -> None:
        """Loads of this scope are over for everyone; what a lane still writes is freed when it returns."""
        self._doom([name for name in self._table if namespace in (None, name[0])])

    def forget(self, namespace: int, keys: Sequence[bytes]) -> None:
        """As `clear`, for these keys: what tiers have there is not wanted any more."""
        self._doom([(namespace, key) for key in keys])

    def _doom(self, names: Sequence[tuple[int, bytes]]) -> None:
        for name in names:
            load = self._table.pop(name, None)
            if load is None:
                continue
            waiters, load.waiters = load.waiters, []
            if load.page is not None:
                self._give_up_if_idle(load.page)
            for job, position in waiters:
                self._settle(job, position, TierReason.CLEARED, 0, "")


def _traces(part: Sequence[Load]) -> dict[Hashable, list[int]]:
    """What traced lookups wait for, by position in the part."""
    found: dict[Hashable, list[int]] = {}
    for at, load in enumerate(part):
        for job, _ in load.waiters:
            if job.request.trace is not None:
                found.setdefault(job.request.trace, []).append(at)
    return found


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
