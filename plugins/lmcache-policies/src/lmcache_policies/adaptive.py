"""Follows the order of eviction that has the most hits, as shadow caches over a sample of the keys say."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from lmcache_core import Kind
from lmcache_core.policies import Entry, EvictionPolicy
from lmcache_policies.capacity import SizedPolicy
from lmcache_policies.direction import Direction
from lmcache_policies.expected_reuse import ExpectedReuse
from lmcache_policies.ghosts import GHOST_KEYS_MAX, Ghosts, fingerprint
from lmcache_policies.orders import Shelf
from lmcache_policies.pasts import Past
from lmcache_policies.sample import REMEMBERED_CAPACITIES, Sample
from lmcache_policies.settings import AdaptiveSettings

FIRST_ORDER = 1  # lruk, until there is evidence
DRIFT = 4  # by which the mean size of objects changes before another sample is taken
SETTLING_OBJECTS = 64  # whose sizes say how many fit


class AdaptivePolicy(SizedPolicy):
    """Orders residents as one of `lru`, `lruk`, `arc`, `mru` or `reuse` does (`orders.py`): the one whose shadow cache
    leads by more than chance (two standard deviations, over the last sixteen capacities of uses).

    Residents stand in chains by class, and an order only looks at the ends of these: a change of order moves nothing,
    and no resident is lost by it. `reuse` is our own (`expected_reuse.py`). Costs O(1) per entry.

    An entry that was skipped because it was held comes back at the old end of its class.
    """

    def __init__(self, settings: AdaptiveSettings | None = None) -> None:
        super().__init__(None)
        self._watched = _makers(settings.watch) if settings and settings.watch else {}
        self.order = FIRST_ORDER
        self.changes = 0
        self._now = 0
        self._shelf = Shelf()
        self._direction = Direction()
        self._ghosts = Ghosts(GHOST_KEYS_MAX)
        self._inserted = 0
        self._mean_bytes = 0.0
        self._expected = ExpectedReuse()
        self.sample = Sample(1, 1.0, self._expected)
        self._sampled_for = (0.0, 0.0)

    def insert(self, entries: Sequence[Entry]) -> None:
        for entry in entries:
            self._admit(entry.nbytes)
            self._measure(entry.nbytes)
            number = fingerprint(entry.key, entry.namespace)
            entry.policy_data = self._ghosts.take_fingerprint(number) or Past(number)
        self._arrive(entries, fresh=True)

    def access(self, entries: Sequence[Entry]) -> None:
        self._arrive(entries, fresh=False)

    def _arrive(self, entries: Sequence[Entry], *, fresh: bool) -> None:
        """Take the uses in the order that the contract has: the end of a request before its beginning."""
        direction = self._direction
        if len(entries) != 1:
            self._use(direction.end())
            self._use([(entry, fresh) for entry in entries])
        else:
            self._use(direction.follow(entries[0], fresh))
        self._judge()

    def _use(self, uses: Sequence[tuple[Any, bool]]) -> None:
        shelf, sample, expected = self._shelf, self.sample, self._expected
        for entry, fresh in uses:
            self._now += 1
            past = entry.policy_data
            left = past.grade
            past.use(self._now)
            if not past.number & sample.mask:
                sample.use(past.number, entry.nbytes, self._now)
            expected.use(left, past)
            if fresh:
                shelf.add(entry)
            else:
                shelf.use(entry, left)

    def remove(self, entries: Sequence[Entry]) -> None:
        for entry in entries:
            past = entry.policy_data
            self._use(self._direction.forget(entry))
            self._shelf.drop(entry)
            entry.policy_data = None
            self.resident_bytes -= entry.nbytes
            self._ghosts.put_fingerprint(past.number, entry.nbytes, past)
        self._resized()

    def victims(self, nbytes: int) -> list[Entry]:
        found: list[Entry] = []
        wanted = nbytes  # of the shelf
        order = self.sample.orders[self.order]
        newcomer = self._direction.newcomer()
        if newcomer is not None and nbytes > 0:
            # A request walked forward is on its way. Its end would have come first and may be what goes first now.
            self._shelf.name(1, order, self._now, found)
            as_used = newcomer.policy_data.used_at(self._now + 1)
            if not found or order.score(as_used, self._now) < order.score(found[0].policy_data, self._now):
                found[:] = [newcomer]
                wanted -= newcomer.nbytes
            else:
                found.clear()
        missing = self._shelf.name(wanted, order, self._now, found)
        if missing > 0 and self._direction.pending:  # all but the request under way is named
            self._use(self._direction.end())
            found.clear()
            self._shelf.name(nbytes, order, self._now, found)
        return found

    def released(self, entries: Sequence[Entry]) -> None:
        for entry in entries:
            if entry.newer is None and entry.policy_data is not None and not self._direction.waits(entry):
                self._shelf.put_back(entry)

    def _measure(self, nbytes: int) -> None:
        """Follow the mean size of objects, and take another sample if that no longer fits the pool."""
        self._inserted += 1
        count = min(self._inserted, 16 * SETTLING_OBJECTS)
        self._mean_bytes += (nbytes - self._mean_bytes) / count
        if self._inserted == SETTLING_OBJECTS:
            self._take_sample()
        elif self._inserted > SETTLING_OBJECTS and not self._inserted % SETTLING_OBJECTS:
            _, mean_bytes = self._sampled_for
            if not mean_bytes / DRIFT < self._mean_bytes < mean_bytes * DRIFT:
                self._take_sample()

    def _resized(self) -> None:
        capacity_bytes, _ = self._sampled_for
        grown = self.capacity_bytes > 2 * capacity_bytes
        if self._inserted >= SETTLING_OBJECTS and (grown or (self._sized and self.capacity_bytes != capacity_bytes)):
            self._take_sample()
        self._ghosts.trim(REMEMBERED_CAPACITIES * self.capacity_bytes)

    def _take_sample(self) -> None:
        self._sampled_for = (self.capacity_bytes, self._mean_bytes)
        self.sample = Sample(self.capacity_bytes, self._mean_bytes, self._expected, self._watched)

    def _judge(self) -> None:
        verdict = self.sample.judge(self.order)
        if verdict is not None:
            before, after = (self.sample.orders[at].name for at in (verdict.than, verdict.best))
            self.order = verdict.best
            self.changes += 1
            self.note(
                f"objects are evicted by {after} instead of {before}: in a sample of 1 in {1 << self.sample.bits} keys "
                f"it had {verdict.lead_hits:.0f} hits more in the last {verdict.uses:,} uses "
                f"({verdict.deviations:.1f} standard deviations)"
            )

    def status(self) -> dict[str, Any]:
        return {"order": self.sample.orders[self.order].name, "changes": self.changes, **self.sample.describe()}


def _makers(names: Sequence[str]) -> dict[str, Callable[[], EvictionPolicy]]:
    """What makes a new policy of each name. Raises `PluginError` for one that is not installed."""
    # Imported here: the loader imports every installed plugin's front module, this one's too.
    from lmcache_core.plugins.loader import load_plugins

    registry = load_plugins()
    makers: dict[str, Callable[[], EvictionPolicy]]
    makers = {name: partial(registry.build, Kind.EVICTION_POLICY, name, None) for name in names}
    for make in makers.values():
        make()  # its import, and its faults, now: not while the server runs
    return makers
