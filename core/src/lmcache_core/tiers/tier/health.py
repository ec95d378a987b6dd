"""How well one tier answers: its breakers, counters, latencies and last errors. Every call reports its end here."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from lmcache_core.clock import Clock
from lmcache_core.limits import LANE_STUCK_S
from lmcache_core.tiers.l1 import TierReason
from lmcache_core.tiers.tier.breaker import Breaker, Breakers
from lmcache_core.tiers.tier.breaker_states import BreakerState
from lmcache_core.tiers.tier.call_states import CallState
from lmcache_core.tiers.tier.lanes import Call, Lane
from lmcache_core.tiers.tier.latency import Latency
from lmcache_core.tiers.tier.trouble import Trouble

_LATE_COUNTS_S = 0.25  # a call with less time than this says nothing about the tier's health


class Health:
    """Of one tier; on the loop's thread. `clock`: the server's, once the tier has started."""

    def __init__(self, name: str) -> None:
        self.clock = Clock()
        self.counts: Counter[str] = Counter()
        self.latencies = {what: Latency() for what in ("lookup", "load", "store")}  # of calls, including their wait
        self.trouble = Trouble(name, self.counts)
        self.lookups, self.loads = Breaker(), Breaker()
        self.reads = Breakers(self.lookups, self.loads)  # what is found must be loaded: a lookup alone is of no use
        # `deletes` is open while every thread for deletes hangs: nothing can make room then, or undo a store.
        self.stores, self.deletes = Breaker(), Breaker()
        self.writes = Breakers(self.stores, self.deletes)

    @property
    def last_error(self) -> str:
        """Empty if the tier is well."""
        return self.trouble.text

    @property
    def last_error_age_s(self) -> float | None:
        age = self.trouble.age_s(self.clock.now)
        return None if age is None else round(age, 3)

    def throttled(self) -> TierReason:
        """A lane took no call."""
        self.counts["throttled"] += 1
        return TierReason.THROTTLED

    def timed(self, call: Call) -> None:
        """A call has returned."""
        self.latencies[call.what].add(self.clock.now - (call.deadline - call.allowed_s))

    def late(self, call: Call, breaker: Breaker, lane: Lane) -> None:
        """Late is failed. A call that no thread took counts as much as one that hangs, unless the lane was busy with
        calls that returned: then it was only too much."""
        what, now = call.what, self.clock.now
        self.counts[f"{what}_late"] += 1
        error = f"{what} not done by its deadline"
        self.trouble.note(what, error, now)
        counts = call.allowed_s >= _LATE_COUNTS_S and (call.starved or call.state is not CallState.EXPIRED)
        hung = lane.stuck and (counts or lane.stuck_for_s(now) >= LANE_STUCK_S)
        if hung or counts or breaker.state is BreakerState.HALF_OPEN:  # in which case it was the probe
            breaker.failed(now, error, late=True, at_once=hung)

    def returned_late(self, call: Call, breaker: Breaker) -> bool:
        """Whether a call that has returned was late, so that its end says nothing more."""
        if call.was_late and call.error is None:
            breaker.came_back(self.clock.now)
        return call.was_late

    def failed(self, breaker: Breaker, what: str, error: str, *, at_once: bool = False) -> None:
        self.trouble.failed(what, error, self.clock.now)
        breaker.failed(self.clock.now, error, at_once=at_once)

    def went_well(self, breaker: Breaker, what: str) -> None:
        breaker.succeeded()
        self.trouble.well(what, self.clock.now)

    def judge(self, breaker: Breaker, what: str, errors: Sequence[str], objects: int) -> None:
        """A batch of so many objects went well but for these errors. A failure of the tier makes the whole call a
        failure; a few objects that fail among many that do not are bad objects of a tier that is well."""
        if errors and 2 * len(errors) >= objects:
            self.failed(breaker, what, errors[0])
        elif errors:
            self.trouble.note(what, errors[0], self.clock.now)
            breaker.succeeded()
        else:
            self.went_well(breaker, what)
