"""What was asked for, found and missed: counted where it is answered, and nothing twice."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from lmcache_core.kernel.answers import Grant, Reason
from lmcache_core.limits import TRAFFIC_NAMESPACES_MAX, TRAFFIC_NAMESPACES_SHOWN_MAX
from lmcache_core.tiers.latency import Latency

BEHIND = "behind_a_miss"  # the keys behind the one that ends a prefix: nobody asked why they miss
OTHER = 0  # stands for namespaces beyond the limit: no namespace has this id


@dataclass(slots=True)
class NamespaceTraffic:
    """Of one namespace, what came as calls."""

    lookup_keys: int = 0
    lookup_hits: int = 0
    retrieve_keys: int = 0
    retrieve_hits: int = 0
    retrieve_bytes: int = 0


class Traffic:
    """What came as calls: hits by the index are counted by the workers that have them. Lives on the loop's thread."""

    def __init__(self) -> None:
        self.lookups = 0  # calls; one of more than a frame's keys is several
        self.lookup_keys = 0
        self.lookup_hits = 0  # in the L1 when it was answered …
        self.lookup_loaded = 0  # … of these, brought by tiers for it
        self.waited = Latency()  # of lookups that tiers were asked for, from the question to its end
        self.misses: Counter[str] = Counter()  # by reason
        self.retrieves = 0
        self.retrieve_keys = 0
        self.retrieve_hits = 0
        self.retrieve_bytes = 0
        self.retrieve_misses: Counter[str] = Counter()
        self.namespaces: dict[int, NamespaceTraffic] = {}

    def looked_up(
        self, namespace: int, keys: int, hits: int, loaded: int, reasons: dict[str, int], duration_s: float | None
    ) -> None:
        """A lookup is over. `reasons` sums to what missed; `duration_s` None: it was answered at once."""
        self.lookups += 1
        self.lookup_keys += keys
        self.lookup_hits += hits
        self.lookup_loaded += loaded
        if duration_s is not None:
            self.waited.add(duration_s)
        if reasons:
            self.misses.update(reasons)
        of_namespace = self._of(namespace)
        of_namespace.lookup_keys += keys
        of_namespace.lookup_hits += hits

    def retrieved(
        self, namespace: int, statuses: bytearray, reasons: bytearray, object_bytes: int, *, begins: bool
    ) -> None:
        """A page of a retrieve was granted. What is over its session's share is asked for again, and counted then."""
        hits, again = statuses.count(Grant.GRANTED), statuses.count(Grant.QUOTA)
        keys = len(statuses) - again
        self.retrieves += begins
        self.retrieve_keys += keys
        self.retrieve_hits += hits
        self.retrieve_bytes += hits * object_bytes
        if hits < keys:
            self.retrieve_misses.update(missed(statuses, reasons))
        of_namespace = self._of(namespace)
        of_namespace.retrieve_keys += keys
        of_namespace.retrieve_hits += hits
        of_namespace.retrieve_bytes += hits * object_bytes

    def _of(self, namespace: int) -> NamespaceTraffic:
        found = self.namespaces.get(namespace)
        if found is None:
            if len(self.namespaces) >= TRAFFIC_NAMESPACES_MAX:
                namespace = OTHER
            found = self.namespaces.setdefault(namespace, NamespaceTraffic())
        return found

    def status(self) -> dict[str, Any]:
        """Plain figures, of calls alone."""
        return {
            "lookups": {
                "calls": self.lookups,
                "keys": self.lookup_keys,
                "hits": self.lookup_hits,
                "loaded": self.lookup_loaded,
                "waited": self.waited.status(),
                "misses": dict(self.misses),
            },
            "retrieves": {
                "calls": self.retrieves,
                "keys": self.retrieve_keys,
                "hits": self.retrieve_hits,
                "bytes": self.retrieve_bytes,
                "misses": dict(self.retrieve_misses),
            },
            "namespaces": self._namespaces(),
        }

    def _namespaces(self) -> dict[str, dict[str, int]]:
        """Those with most traffic, by id, and the rest together."""
        rows = sorted(self.namespaces.items(), key=lambda row: -(row[1].lookup_keys + row[1].retrieve_keys))
        shown = [(f"{each:016x}", row) for each, row in rows if each != OTHER][:TRAFFIC_NAMESPACES_SHOWN_MAX]
        names = {name for name, _ in shown}
        rest = [asdict(row) for each, row in rows if f"{each:016x}" not in names]
        found = {name: asdict(row) for name, row in shown}
        if rest:
            found["other"] = {field: sum(row[field] for row in rest) for field in rest[0]}
        return found


_NAMES = {int(reason): BEHIND if reason is Reason.NONE else reason.name.lower() for reason in Reason}


def missed(statuses: Sequence[int], reasons: Sequence[int]) -> dict[str, int]:
    """How many keys missed, by the name of the reason. `reasons` may be empty where none did."""
    pairs = Counter(zip(statuses, reasons, strict=False))
    found: Counter[str] = Counter()
    for (status, reason), count in pairs.items():
        if status not in (Grant.GRANTED, Grant.QUOTA):
            found["loading" if status == Grant.LOADING else _NAMES[reason]] += count
    return dict(found)
