"""What was requested, found and missed: counted where it is answered, and nothing twice."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from lmcache_core.kernel.answers import Grant, Reason
from lmcache_core.limits import TRAFFIC_NAMESPACES_MAX, TRAFFIC_NAMESPACES_SHOWN_MAX, TRAFFIC_TIERS_MAX
from lmcache_core.tiers.tier.latency import Latency

BEHIND = "behind_a_miss"  # the keys after the end of a prefix: they were not looked up
OTHER = 0  # stands for namespaces beyond the limit: no namespace has this id

_LOADING, _QUOTA, _ABSENT = bytes([Grant.LOADING]), bytes([Grant.QUOTA]), bytes([Grant.MISS])
_NONE = bytes([Reason.NONE])
_SHOWN = ("lookup_keys", "lookup_hits", "retrieve_bytes")  # of each namespace: a status is one frame
_NAMES = {int(reason): reason.name.lower() for reason in Reason}


@dataclass(slots=True)
class NamespaceTraffic:
    """Calls in one namespace. A call with more keys than fit into a frame counts several times."""

    lookups: int = 0
    lookup_keys: int = 0
    lookup_hits: int = 0  # in the L1 when it was answered …
    lookup_loaded: int = 0  # … of these, brought by tiers for it
    retrieves: int = 0
    retrieve_keys: int = 0
    retrieve_hits: int = 0
    retrieve_bytes: int = 0


class Traffic:
    """Counts of calls; workers count their own hits by the index. Lives on the loop's thread, and costs a call that
    hits about 0.3 µs."""

    def __init__(self) -> None:
        self.namespaces: dict[int, NamespaceTraffic] = {}
        self.misses: Counter[str] = Counter()  # of lookups, by reason
        self.retrieve_misses: Counter[str] = Counter()
        self.loaded_from: Counter[str] = Counter()  # of what tiers brought for lookups, by tier
        self.waited = Latency()  # of lookups that tiers were asked for, from begin to end

    def looked_up(self, namespace: int, keys: int, hits: int, reasons: dict[str, int] | None = None) -> None:
        """A lookup was answered from the L1. `reasons` sums to the number of misses."""
        row = self.namespaces.get(namespace) or self._new(namespace)
        row.lookups += 1
        row.lookup_keys += keys
        row.lookup_hits += hits
        if reasons:
            self.misses.update(reasons)

    def loaded(
        self,
        namespace: int,
        keys: int,
        hits: int,
        loaded: int,
        reasons: dict[str, int],
        duration_s: float,
        came_from: Iterable[str] = (),
    ) -> None:
        """A lookup that tiers were asked for has ended. `hits`: including what they `loaded`; `came_from`: the tier of
        each of these, except for what the L1 had by then."""
        self.looked_up(namespace, keys, hits, reasons)
        (self.namespaces.get(namespace) or self.namespaces[OTHER]).lookup_loaded += loaded
        for tier, number in Counter(came_from).items():
            known = tier in self.loaded_from or len(self.loaded_from) < TRAFFIC_TIERS_MAX
            self.loaded_from[tier if known else "other"] += number
        self.waited.add(duration_s)

    def retrieved(
        self, namespace: int, statuses: bytearray, reasons: bytearray, object_bytes: int, *, begins: bool
    ) -> None:
        """A page of a retrieve was granted. Keys over its session's share are requested again, and counted then."""
        keys = hits = len(statuses)
        if reasons:  # something was not granted
            keys -= statuses.count(_QUOTA)
            why = missed(statuses, reasons)
            hits = keys - sum(why.values())
            self.retrieve_misses.update(why)
        row = self.namespaces.get(namespace) or self._new(namespace)
        row.retrieves += begins
        row.retrieve_keys += keys
        row.retrieve_hits += hits
        row.retrieve_bytes += hits * object_bytes

    def _new(self, namespace: int) -> NamespaceTraffic:
        if len(self.namespaces) >= TRAFFIC_NAMESPACES_MAX:
            namespace = OTHER
        return self.namespaces.setdefault(namespace, NamespaceTraffic())

    def status(self) -> dict[str, Any]:
        """Plain figures, only of calls."""
        rows = [asdict(row) for row in self.namespaces.values()]
        totals = {field: sum(row[field] for row in rows) for field in NamespaceTraffic.__slots__}
        return {
            "lookups": {
                "calls": totals["lookups"],
                "keys": totals["lookup_keys"],
                "hits": totals["lookup_hits"],
                "loaded": totals["lookup_loaded"],
                "loaded_from": dict(self.loaded_from),
                "waited": self.waited.status(),
                "misses": dict(self.misses),
            },
            "retrieves": {
                "calls": totals["retrieves"],
                "keys": totals["retrieve_keys"],
                "hits": totals["retrieve_hits"],
                "bytes": totals["retrieve_bytes"],
                "misses": dict(self.retrieve_misses),
            },
            "namespaces": self._busiest(totals),
        }

    def _busiest(self, totals: dict[str, int]) -> dict[str, dict[str, int]]:
        """The namespaces with most traffic, by id, and the rest together."""
        named = [(each, row) for each, row in self.namespaces.items() if each != OTHER]
        named.sort(key=lambda item: -(item[1].lookup_keys + item[1].retrieve_keys))
        found = {
            f"{each:016x}": {field: getattr(row, field) for field in _SHOWN}
            for each, row in named[:TRAFFIC_NAMESPACES_SHOWN_MAX]
        }
        if len(found) < len(self.namespaces):
            found["other"] = {field: totals[field] - sum(row[field] for row in found.values()) for field in _SHOWN}
        return found


def missed(statuses: bytes | bytearray, reasons: bytes | bytearray) -> dict[str, int]:
    """How many keys missed, by the name of the reason. A few passes in C, however many keys there are: it runs on the
    loop."""
    loading = statuses.count(_LOADING)
    absent = len(statuses) - len(statuses.translate(None, _ABSENT)) if reasons else 0
    found = named(reasons)
    behind = absent - sum(found.values())
    if loading:
        found["loading"] = loading
    if behind:
        found[BEHIND] = behind
    return found


def named(reasons: bytes | bytearray) -> dict[str, int]:
    """The count of each reason except none, by its name."""
    found: dict[str, int] = {}
    rest = reasons.translate(None, _NONE)
    while rest:
        reason = bytes(rest[:1])
        left = rest.translate(None, reason)
        found[_NAMES[reason[0]]] = len(rest) - len(left)
        rest = left
    return found
