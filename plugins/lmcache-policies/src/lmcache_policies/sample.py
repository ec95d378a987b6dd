"""Shadow caches over a sample of the keys: which order would have had the most hits.

Keys are sampled by a hash, so every use of a sampled key is seen. A shadow cache has the same part of the capacity, and
no bytes. Source: Waldspurger, Saemundsson, Ahmad and Park, "Cache modeling and optimization using miniature
simulations", USENIX ATC 2017.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from functools import partial
from math import sqrt
from types import MappingProxyType
from typing import Any

from lmcache_core.guard import guarded
from lmcache_core.policies import EvictionPolicy
from lmcache_policies.chain import Chain, unlink
from lmcache_policies.expected_reuse import PERIOD_USES_MIN, ExpectedReuse
from lmcache_policies.orders import ArcOrder, LrukOrder, LruOrder, MruOrder, Order, ReuseOrder, Shelf
from lmcache_policies.pasts import SampledPast
from lmcache_policies.watched import Watched

logger = logging.getLogger(__name__)

SAMPLED_OBJECTS = 1024  # residents of each shadow cache, about
SIZES = (0.5, 2.0, 4.0)  # of the capacity, of further shadow caches
REMEMBERED_CAPACITIES = 4  # bytes of objects whose past is remembered
SAMPLED_KEYS_MAX = 12 * SAMPLED_OBJECTS
UNIT_USES = 32  # sampled uses that are judged as one: those of a request hit or miss together
MEMORY_CAPACITIES = 16  # a verdict rests on about so many uses, in capacities
EVIDENCE_CAPACITIES = 4  # in the first uses all shadow caches are filling
SURE = 2.0  # standard deviations by which an order must lead before it is followed
LEAD_HITS_MIN = 4.0


class _Seat:
    """A sampled object in one shadow cache."""

    __slots__ = ("nbytes", "newer", "older", "policy_data")

    holds = 0

    def __init__(self, past: SampledPast) -> None:
        self.policy_data = past
        self.nbytes = past.nbytes
        self.older: Any = None
        self.newer: Any = None


class Verdict:
    """`best` leads `than` by so many hits, in so many sampled uses."""

    __slots__ = ("best", "deviations", "lead_hits", "than", "uses")

    def __init__(self, best: int, than: int, lead_hits: float, deviations: float, uses: int) -> None:
        self.best = best
        self.than = than
        self.lead_hits = lead_hits
        self.deviations = deviations
        self.uses = uses


class Sample:
    """The sampled keys, and a shadow cache for each order."""

    def __init__(
        self,
        capacity_bytes: int,
        object_bytes: float,
        expected: ExpectedReuse,
        watched: Mapping[str, Callable[[], EvictionPolicy]] = MappingProxyType({}),
    ) -> None:
        """`object_bytes`: the mean size of objects. About `SAMPLED_OBJECTS` of a full store are in the sample.
        `watched`: what makes new policies, by name, which are shown beside the orders."""
        objects = max(1.0, capacity_bytes / max(1.0, object_bytes))  # in the sample, once it has been divided
        expected.period_uses = max(PERIOD_USES_MIN, int(objects) // 4)
        self.bits = 0
        while objects > 1.5 * SAMPLED_OBJECTS:
            self.bits += 1
            objects /= 2
        self.mask = (1 << self.bits) - 1
        self.capacity_bytes = max(1, capacity_bytes >> self.bits)
        self.expected = expected
        arc = ArcOrder()
        arc.capacity_bytes = self.capacity_bytes
        self.shadows: tuple[Order, ...] = (LruOrder(), LrukOrder(), arc, MruOrder(), ReuseOrder(self.expected))
        # The store's own orders; only one of them is not the same as its shadow's.
        self.orders: tuple[Order, ...] = tuple(ArcOrder(arc) if each is arc else each for each in self.shadows)
        count = len(self.shadows)
        # Below these stand caches of other sizes, all of them `lru`: what more memory would give.
        self._ordered = (*self.shadows, *(LruOrder() for _ in SIZES))
        self._capacities = [self.capacity_bytes] * count + [max(1, int(size * self.capacity_bytes)) for size in SIZES]
        self.hits = [0] * len(self._ordered)
        self.uses = 0
        self._shelves = [Shelf(order.lanes) for order in self._ordered]
        self._pasts: dict[int, SampledPast] = {}
        self._by_use = Chain()
        self._remembered_bytes = 0
        self._unit = [0] * len(self._ordered)
        self._unit_uses = 0
        self._leads = [[0.0] * count for _ in range(count)]
        self._squares = [[0.0] * count for _ in range(count)]
        self._watched: dict[str, Watched] = {}
        for name, make in watched.items():
            guarded(partial(self._blame, name), self._watch, name, make)
        self._uses_min = EVIDENCE_CAPACITIES * objects
        self._fading = 1.0 - 1.0 / max(8.0, MEMORY_CAPACITIES * objects / UNIT_USES)

    def __len__(self) -> int:
        """Keys that are remembered."""
        return len(self._pasts)

    def use(self, number: int, nbytes: int, now: int) -> None:
        """An object in the sample is used."""
        past = self._pasts.get(number)
        if past is None:
            past = self._pasts[number] = SampledPast(number, nbytes, len(self._ordered))
            self._remembered_bytes += nbytes
        else:
            unlink(past)
        self._by_use.append(past)
        left = past.grade
        past.use(now)
        self.uses += 1
        unit, seats = self._unit, past.seats
        for at, shelf in enumerate(self._shelves):
            seat = seats[at]
            if seat is not None:
                unit[at] += 1
                shelf.use(seat, left)
            else:
                self._seat(at, shelf, past, now)
        self._unit_uses += 1
        for name, shadow in list(self._watched.items()):
            guarded(partial(self._blame, name), shadow.use, number, nbytes)
        while len(self._pasts) > SAMPLED_KEYS_MAX or (
            self._remembered_bytes > (REMEMBERED_CAPACITIES + 1) * self.capacity_bytes
        ):
            if self._by_use.newer is past:
                break
            self._forget(self._by_use.newer)

    def _watch(self, name: str, make: Callable[[], EvictionPolicy]) -> None:
        self._watched[name] = Watched(make(), self.capacity_bytes)

    def _blame(self, name: str, error: BaseException) -> None:
        self._watched.pop(name, None)
        logger.error("the policy %r is watched no longer: its shadow cache failed", name, exc_info=error)

    def _seat(self, at: int, shelf: Shelf, past: SampledPast, now: int) -> None:
        order = self._ordered[at]
        order.came(past, past.nbytes)
        missing = shelf.nbytes + past.nbytes - self._capacities[at]
        if missing > 0:
            going: list[Any] = []
            shelf.name(missing, order, now, going)
            for seat in going:
                self._evict(at, shelf, seat)
        seat = past.seats[at] = _Seat(past)
        shelf.add(seat)

    def _evict(self, at: int, shelf: Shelf, seat: _Seat) -> None:
        past = seat.policy_data
        shelf.drop(seat)
        past.seats[at] = None
        self._ordered[at].left(past, past.nbytes)

    def _forget(self, past: SampledPast) -> None:
        unlink(past)
        del self._pasts[past.number]
        self._remembered_bytes -= past.nbytes
        for at, seat in enumerate(past.seats):
            if seat is not None:
                self._evict(at, self._shelves[at], seat)

    def judge(self, current: int) -> Verdict | None:
        """The order that leads the current one for sure, if there is one. Cheap, until another unit is full."""
        if self._unit_uses < UNIT_USES:
            return None
        unit, fading = self._unit, self._fading
        self.hits = [sum(pair) for pair in zip(self.hits, unit, strict=True)]
        for at, hits in enumerate(unit[: len(self.shadows)]):
            leads, squares = self._leads[at], self._squares[at]
            for other, others in enumerate(unit[: len(self.shadows)]):
                more = hits - others
                leads[other] = leads[other] * fading + more
                squares[other] = squares[other] * fading + more * more
        self._unit = [0] * len(unit)
        self._unit_uses = 0
        found: Verdict | None = None
        if self.uses < self._uses_min:
            return None
        for at, leads in enumerate(self._leads):
            lead, deviation = leads[current], sqrt(self._squares[at][current])
            needed = SURE + self.shadows[at].doubt - self.shadows[current].doubt
            if lead > LEAD_HITS_MIN and lead > needed * deviation and (found is None or lead > found.lead_hits):
                over = round(min(self.uses, UNIT_USES / (1.0 - fading)))
                found = Verdict(at, current, lead, lead / deviation, over)
        return found

    def describe(self) -> dict[str, Any]:
        """Uses seen, and for each order, and for `lru` in caches of other sizes, the share of them that were hits."""
        judged = max(1, self.uses - self._unit_uses)
        shares = [round(hits / judged, 4) for hits in self.hits]
        count = len(self.shadows)
        return {
            "sampled_uses": self.uses,
            "sampled_one_in": 1 << self.bits,
            "hit_share": dict(zip((order.name for order in self.shadows), shares, strict=False))
            | {name: round(each.hits / max(1, each.uses), 4) for name, each in self._watched.items()},
            "lru_hit_share_by_size": dict(zip((f"{size:g}" for size in SIZES), shares[count:], strict=True)),
        }
