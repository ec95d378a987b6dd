"""Calls that find out whether a tier whose breaker is open answers again."""

from __future__ import annotations

from abc import abstractmethod

from lmcache_core.limits import TIER_BATCH_BYTES_MAX, TIER_LOOKUP_S
from lmcache_core.tiers.answers import LOAD_RESULTS, found_of, outcomes_of
from lmcache_core.tiers.contract import LoadItem, Result
from lmcache_core.tiers.object.format import HEADER_BYTES
from lmcache_core.tiers.tier.accounting import Accounting
from lmcache_core.tiers.tier.breaker import Breaker
from lmcache_core.tiers.tier.health import Health
from lmcache_core.tiers.tier.lanes import HOUSEKEEPING, Call, Lane
from lmcache_core.tiers.tier.medium import Medium

_PROBE_KEY = bytes(8)  # shorter than any tier key: it is never there


class Probe(Call):
    """One call of an operation: the tier is back if it returns without an error."""

    what = "probe"

    def __init__(self, of: str, health: Health, breaker: Breaker, lane: Lane, deadline: float) -> None:
        """`of`: the operation."""
        super().__init__(deadline, HOUSEKEEPING, deadline - health.clock.now)
        self._of = of
        self._health = health
        self._breaker = breaker
        self._lane = lane

    def begin(self) -> None:
        if not self._lane.submit(self):
            self._health.throttled()
            self._breaker.failed(self._health.clock.now, f"the queue of {self._of}s is full")

    @abstractmethod
    def work(self) -> None: ...

    def ended(self) -> None:
        if self._health.returned_late(self, self._breaker):
            return
        if self.error is not None:
            self._health.failed(self._breaker, self.what, self.failure)
        else:
            self._health.went_well(self._breaker, self.what)
            self._health.trouble.well(self._of, self._health.clock.now)  # a probe is one

    def late(self) -> None:
        self._health.late(self, self._breaker, self._lane)


class LookupProbe(Probe):
    """Asks for a key that never exists: any answer means that the tier is back."""

    def __init__(self, medium: Medium, health: Health) -> None:
        super().__init__("lookup", health, health.lookups, medium.lookups, medium.clock.now + TIER_LOOKUP_S)
        self._adapter = medium.adapter

    def work(self) -> None:
        found_of(self._adapter.exists, self._adapter.exists([_PROBE_KEY], self.deadline), 1)


class LoadProbe(Probe):
    """Loads some object, to nowhere. A disk may answer for a file that it does not have, and hang in each read."""

    def __init__(self, medium: Medium, health: Health, accounting: Accounting) -> None:
        super().__init__("load", health, health.loads, medium.loads, medium.clock.now + medium.config.deadline_s)
        self._adapter = medium.adapter
        entry = accounting.sample(TIER_BATCH_BYTES_MAX)
        self._key, self._nbytes = (_PROBE_KEY, HEADER_BYTES) if entry is None else (entry.tier_key, entry.nbytes)

    def work(self) -> None:
        item = LoadItem(self._key, [memoryview(bytearray(self._nbytes))])
        load = self._adapter.load
        (outcome,) = outcomes_of(load, load([item], self.deadline), 1, LOAD_RESULTS)
        if outcome.result is Result.FAILED:
            raise outcome.as_error()
