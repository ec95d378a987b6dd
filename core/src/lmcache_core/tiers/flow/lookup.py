"""The lookup controller: asks the tiers for what the L1 lacks, plans the loads, and starts them."""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from lmcache_core.clock import Clock
from lmcache_core.errors import UsageError
from lmcache_core.guard import guarded
from lmcache_core.limits import LOOKUPS_WAITING_MAX, TIER_LOOKUP_S
from lmcache_core.policies.contracts import PrefetchPlan, PrefetchPolicy, TierView
from lmcache_core.tiers.flow.job_states import JobEvent, JobState
from lmcache_core.tiers.flow.jobs import Job, TierLookup, Wanted, select
from lmcache_core.tiers.flow.loads import LoadTable
from lmcache_core.tiers.l1 import L1Port, TierReason
from lmcache_core.tiers.object.epochs import Epochs
from lmcache_core.tiers.object.format import tier_key
from lmcache_core.tiers.observer import TierObserver
from lmcache_core.tiers.tier.calls import ExistsCall
from lmcache_core.tiers.tier.lanes import WAITED_FOR, WARM_UP, Priority
from lmcache_core.tiers.tier.tier import Tier

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class _Work:
    """The controller's private state of a job."""

    policy: PrefetchPolicy
    priority: Priority
    tier_names: list[str] = field(default_factory=list)  # in the order of the tiers
    waiting: set[str] = field(default_factory=set)  # asked, not answered yet
    found: dict[str, Sequence[bool]] = field(default_factory=dict)
    failed: list[TierReason] = field(default_factory=list)
    pending: set[int] = field(default_factory=set)  # positions being loaded
    own: dict[int, int] = field(default_factory=dict)  # temporary, loaded for this job only: position → generation
    cut: int = 0


class LookupController:
    """Driven by Tiering. `job_states` says where a job stands."""

    def __init__(
        self,
        l1: L1Port,
        tiers: dict[str, Tier],
        policy: PrefetchPolicy,
        epochs: Epochs,
        clock: Clock,
        in_flight_max: int,
        observer: TierObserver | None = None,
    ) -> None:
        self._l1 = l1
        self._tiers = tiers
        self._epochs = epochs
        self._in_flight_max = in_flight_max
        self.policy = policy
        self.loads = LoadTable(l1, tiers, epochs, clock, self._settled, observer)
        self.counts: Counter[str] = Counter()
        self._ids = count(1)
        self._clock = clock
        self._waiting: deque[Job] = deque()
        self._warm_ups: deque[Job] = deque()
        self._active: dict[Job, None] = {}
        self._work: dict[Job, _Work] = {}
        self._finished: deque[Job] = deque()
        self._soonest = float("inf")

    # --- from the loop ------------------------------------------------------------------------------------
    def lookup(self, request: TierLookup, on_done: Callable[[Job], None], policy: PrefetchPolicy | None) -> Job:
        for name in request.options.tiers or ():
            if name not in self._tiers:
                raise UsageError(f"no tier is named {name!r}: there are {', '.join(self._tiers) or 'none'}")
        job = Job(next(self._ids), request, on_done)
        priority = WARM_UP if request.options.warm_up else WAITED_FOR
        self._work[job] = _Work(policy or self.policy, priority, cut=len(request.keys))
        self._soonest = min(self._soonest, request.deadline)
        if len(self._waiting) + len(self._warm_ups) >= LOOKUPS_WAITING_MAX:
            self._end(job, TierReason.THROTTLED)
            return job
        (self._warm_ups if request.options.warm_up else self._waiting).append(job)
        self._start_waiting()
        return job

    def step(self) -> None:
        """End jobs past their deadline, start waiting jobs, and call `on_done` for those that ended."""
        now = self._clock.now
        if now >= self._soonest:
            for job in [job for job in self._work if job.request.deadline <= now]:
                self._end(job, TierReason.LATE)
            self._soonest = min((job.request.deadline for job in self._work), default=float("inf"))
        self._start_waiting()
        self.notify()

    def notify(self) -> None:
        """Call `on_done` of the jobs that have ended."""
        while self._finished:
            job = self._finished.popleft()
            on_done, job.on_done = job.on_done, None
            if on_done is not None:
                on_done(job)

    @property
    def has_work(self) -> bool:
        return bool(self._finished)

    @property
    def next_deadline(self) -> float:
        return self._soonest

    @property
    def idle(self) -> bool:
        return not self._work and not self._finished

    def layouts_in_use(self) -> set[int]:
        return {job.request.layout_id for job in self._work}

    def cancel(self, job: Job) -> None:
        if not job.ended:
            self._end(job, TierReason.CANCELLED, JobEvent.CANCEL)
            self.notify()

    def clear(self, namespace: int | None) -> None:
        for job in list(self._work):
            if namespace is None or job.request.namespace == namespace:
                self._end(job, TierReason.CLEARED)
        self.loads.clear(namespace)

    def cancel_all(self) -> None:
        for job in list(self._work):
            self._end(job, TierReason.CANCELLED, JobEvent.CANCEL)
        self.notify()

    def status(self) -> dict[str, Any]:
        return {
            "in_flight": len(self._active),
            "waiting": len(self._waiting) + len(self._warm_ups),
            "loads_out": len(self.loads),
            "counts": dict(self.counts),
        }

    # --- asking -------------------------------------------------------------------------------------------
    def _start_waiting(self) -> None:
        while len(self._active) < self._in_flight_max and (self._waiting or self._warm_ups):
            job = (self._waiting or self._warm_ups).popleft()
            if not job.ended:
                self._ask(job)

    def _ask(self, job: Job) -> None:
        request, work = job.request, self._work[job]
        job.move(JobEvent.ASK)
        self._active[job] = None
        epoch = self._epochs.of(request.namespace)
        keys = [tier_key(request.keys[position], request.namespace, epoch) for position in request.missing]
        deadline = min(request.deadline, self._clock.now + TIER_LOOKUP_S)
        tiers = request.options.tiers
        names = [name for name in self._tiers if tiers is None or name in tiers]
        if keys:
            work.tier_names = names
            for name in names:
                refused = _ExistsForJob(self, job, self._tiers[name], keys, deadline, work.priority).begin()
                if refused is None:
                    work.waiting.add(name)
                else:
                    work.failed.append(refused)
        self._decide_if_clear(job)

    def answered(self, job: Job, name: str, found: Sequence[bool] | None, reason: TierReason | None) -> None:
        """A tier has answered, or will not."""
        work = self._work.get(job)
        if work is None:
            return
        work.waiting.discard(name)
        if job.state is JobState.LOADING:
            if found is not None:  # too late for the plan, but a source to fall back on when a load fails
                there = [p for p, has in zip(job.request.missing, found, strict=True) if has]
                self.loads.offer(job, there, name)
            return
        if found is not None:
            work.found[name] = found
        elif reason is not None:
            work.failed.append(reason)
        self._decide_if_clear(job)

    def _decide_if_clear(self, job: Job) -> None:
        """Decide once no outstanding answer could change the number of hits."""
        work = self._work[job]
        if work.waiting and not all(any(column) for column in zip(*work.found.values(), strict=True)):
            return
        if work.waiting and not work.found:
            return
        self._decide(job, work)

    def _decide(self, job: Job, work: _Work) -> None:
        job.move(JobEvent.CHOOSE)
        request = job.request
        views = [self._tiers[name].view for name in work.tier_names if name in self._tiers]

        def nothing(error: BaseException) -> PrefetchPlan:
            self._policy_failed(error, "nothing is loaded")
            return PrefetchPlan([None] * len(request.missing))

        plan = guarded(nothing, _plan, work.policy, [request.keys[at] for at in request.missing], work.found, views)
        sources: dict[int, Sequence[str]] = {}
        answered = [name for name in work.tier_names if name in work.found]
        for index, (position, source) in enumerate(zip(request.missing, plan.sources, strict=True)):
            # If a policy names a tier that does not have the key, the load would only miss.
            if source is not None and source in work.found and work.found[source][index]:
                others = [name for name in answered if name != source and work.found[name][index]]
                sources[position] = [source, *others]
        chosen = select(request, {position: names[0] for position, names in sources.items()})
        job.hits, work.cut = chosen.hits, chosen.cut
        wanted = set(chosen.positions)
        nowhere = work.failed[0] if work.failed else TierReason.NOWHERE
        for position in request.missing:
            if position not in wanted:
                job.reasons[position] = TierReason.CUT if position in sources else nowhere
        if not wanted:
            self._finish(job, JobEvent.END)
            return
        work.pending = wanted
        retained = set(chosen.positions) if plan.retain else self._retained(work.policy, request, chosen.positions)
        self.loads.begin(job, {position: sources[position] for position in chosen.positions}, retained, work.priority)

    def _retained(self, policy: PrefetchPolicy, request: TierLookup, positions: Sequence[int]) -> set[int]:
        """Those of the positions that stay in the L1 even if the plan does not retain them."""
        if not self._l1.evicts:  # they would stay for good, and stores and loads would find no room
            return set()

        def stay() -> set[int]:
            stays = policy.retains([request.keys[at] for at in positions], self._l1.room_for(request.layout_id))
            return {at for at, stay in zip(positions, stays, strict=True) if stay}

        def nothing(error: BaseException) -> set[int]:
            self._policy_failed(error, "nothing that is loaded stays")
            return set()

        return guarded(nothing, stay)

    def _policy_failed(self, error: BaseException, so: str) -> None:
        self.counts["policy_failed"] += 1
        logger.error("the prefetch policy failed: %s", so, exc_info=error)

    # --- loading ------------------------------------------------------------------------------------------
    def _settled(self, job: Job, position: int, reason: TierReason | None, own: int, source: str) -> None:
        """One position of a job is loaded, or has failed."""
        work = self._work.get(job)
        if work is None or position not in work.pending:
            return
        work.pending.discard(position)
        if reason is None:
            job.loaded.add(position)
            if source:
                job.came_from[position] = source
            self.counts["loaded"] += 1
            if own:
                work.own[position] = own
        else:
            self._failed(job, work, position, reason)
        if not work.pending:
            self._finish(job, JobEvent.END)

    def _failed(self, job: Job, work: _Work, position: int, reason: TierReason) -> None:
        job.reasons[position] = reason
        self.counts[f"failed_{reason}"] += 1
        assert job.hits is not None
        if job.request.wanted is Wanted.SPARSE:
            job.hits -= 1
            return
        # Positions after a hole cannot be used; with a hole in its window, nothing can.
        work.cut = min(work.cut, position) if job.request.wanted is Wanted.PREFIX else 0
        job.hits = min(job.hits, work.cut)
        useless = sorted(other for other in work.pending if other >= work.cut)
        work.pending.difference_update(useless)
        for other in useless:
            job.reasons.setdefault(other, TierReason.CUT)
        self.loads.cancel(job, useless)

    # --- ends ---------------------------------------------------------------------------------------------
    def _end(self, job: Job, reason: TierReason, end: JobEvent = JobEvent.END) -> None:
        """End a job now, in whatever state."""
        work = self._work.get(job)
        if work is None:
            return
        request = job.request
        left = [p for p in request.missing if p not in job.loaded and p not in job.reasons]
        for position in left:
            job.reasons[position] = reason
        pending, work.pending = sorted(work.pending), set()
        if left:
            hole = left[0] if request.wanted is Wanted.PREFIX else 0
            if request.wanted is Wanted.SPARSE:
                job.hits = len(request.keys) - sum(p in job.reasons for p in request.missing)
            else:
                work.cut = min(work.cut, hole)
                job.hits = work.cut if job.hits is None else min(job.hits, work.cut)
        if end is JobEvent.CANCEL or reason is TierReason.CLEARED:
            work.cut = 0  # nobody will read what was loaded
        self._finish(job, end)
        self.loads.cancel(job, pending)

    def _finish(self, job: Job, end: JobEvent) -> None:
        work = self._work.pop(job)
        job.move(end)
        self._active.pop(job, None)
        self.counts[str(job.state)] += 1
        if job in self._waiting:
            self._waiting.remove(job)
        elif job in self._warm_ups:
            self._warm_ups.remove(job)
        unread = sorted(p for p in work.own if p >= work.cut) if job.request.wanted is not Wanted.SPARSE else []
        if job.state is JobState.CANCELLED:
            unread = sorted(work.own)
        if unread:
            self._l1.drop(job.request.namespace, [(job.request.keys[p], work.own[p]) for p in unread])
            for position in unread:
                job.loaded.discard(position)
                job.came_from.pop(position, None)
                job.reasons.setdefault(position, TierReason.CUT)
        self._finished.append(job)


def _plan(
    policy: PrefetchPolicy, keys: Sequence[bytes], found: Mapping[str, Sequence[bool]], views: Sequence[TierView]
) -> PrefetchPlan:
    """The policy's plan. Raises `UsageError` for one that does not fit."""
    plan = policy.plan(keys, found, views)
    if len(plan.sources) != len(keys):
        raise UsageError(f"the plan has {len(plan.sources)} sources for {len(keys)} keys")
    return plan


class _ExistsForJob(ExistsCall):
    """What one tier has of the keys that a job misses."""

    def __init__(
        self,
        controller: LookupController,
        job: Job,
        tier: Tier,
        keys: Sequence[bytes],
        deadline: float,
        priority: Priority,
    ) -> None:
        super().__init__(tier, keys, deadline, priority)
        self._controller = controller
        self._job = job

    def answered(self, found: Sequence[bool] | None, reason: TierReason | None) -> None:
        self._controller.answered(self._job, self.tier.name, found, reason)
