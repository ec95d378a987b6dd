"""What was requested, found and missed: counted where it is answered, and nothing twice."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any

from lmcache_core.kernel.answers import Grant, Reason
from lmcache_core.limits import TRAFFIC_NAMESPACES_MAX, TRAFFIC_NAMESPACES_SHOWN_MAX, TRAFFIC_TIERS_MAX
from lmcache_core.pool.tally import Tally
from lmcache_core.server.peers.tallies import OTHER, NamespaceTally, WorkerTallies
from lmcache_core.tiers.tier.latency import Latency

BEHIND = "behind_a_miss"  # the keys after the end of a prefix: they were not looked up
NOT_ASKED = "not_asked"  # keys that the index did not have, when the server could not be asked

_LOADING, _QUOTA, _ABSENT = bytes([Grant.LOADING]), bytes([Grant.QUOTA]), bytes([Grant.MISS])
_NONE = bytes([Reason.NONE])
# Of each namespace, because a status is one frame:
_SHOWN = ("lookup_keys", "lookup_hits", "retrieve_bytes", "prompt_tokens", "prompt_hit_tokens")
_NAMES = {int(reason): reason.name.lower() for reason in Reason}


@dataclass(slots=True)
class NamespaceTraffic:
    """Calls in one namespace, and what workers counted there without a call. A call with more keys than fit into a
    frame counts several times."""

    lookups: int = 0
    lookup_keys: int = 0
    lookup_hits: int = 0  # in the L1 when it was answered …
    lookup_loaded: int = 0  # … of these, brought by tiers for it
    retrieves: int = 0
    retrieve_keys: int = 0
    retrieve_hits: int = 0
    retrieve_bytes: int = 0
    prompt_tokens: int = 0
    prompt_hit_tokens: int = 0

    def with_tally(self, tally: NamespaceTally) -> NamespaceTraffic:
        """The same, and what workers have counted."""
        return replace(
            self,
            lookup_keys=self.lookup_keys + tally.lookup_hits + tally.lookup_misses,
            lookup_hits=self.lookup_hits + tally.lookup_hits,
            retrieve_keys=self.retrieve_keys + tally.read_hits,
            retrieve_hits=self.retrieve_hits + tally.read_hits,
            retrieve_bytes=self.retrieve_bytes + tally.read_bytes,
            prompt_tokens=tally.prompt_tokens,
            prompt_hit_tokens=tally.prompt_hit_tokens,
        )


class Traffic:
    """Counts of calls; workers count their own hits by the index. Lives on the loop's thread, and costs a call that
    hits about 0.3 µs."""

    def __init__(self) -> None:
        self.namespaces: dict[int, NamespaceTraffic] = {}
        self.misses: Counter[str] = Counter()  # of lookups, by reason
        self.retrieve_misses: Counter[str] = Counter()
        self.loaded_from: Counter[str] = Counter()  # of what tiers brought for lookups, by tier
        self.tokens = 0  # in keys of sessions that have declared how many tokens make one …
        self.hit_tokens = 0  # … of these, found …
        self.loaded_tokens = 0  # … of these, brought by tiers for the lookup
        self.waited = Latency()  # of lookups that tiers were asked for, from begin to end

    def looked_up(
        self, namespace: int, keys: int, hits: int, reasons: dict[str, int] | None = None, chunk_tokens: int = 0
    ) -> None:
        """A lookup was answered from the L1. `reasons` sums to the number of misses. `chunk_tokens`: in each key; 0:
        the session has not reported."""
        row = self.namespaces.get(namespace) or self._new(namespace)
        row.lookups += 1
        row.lookup_keys += keys
        row.lookup_hits += hits
        self.tokens += keys * chunk_tokens
        self.hit_tokens += hits * chunk_tokens
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
        chunk_tokens: int = 0,
    ) -> None:
        """A lookup that tiers were asked for has ended. `hits`: including what they `loaded`; `came_from`: the tier of
        each of these, except for what the L1 had by then."""
        self.looked_up(namespace, keys, hits, reasons, chunk_tokens)
        self.loaded_tokens += loaded * chunk_tokens
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

    def status(self, tallies: WorkerTallies | None = None) -> dict[str, Any]:
        """Plain figures: of calls, and of what workers have counted themselves."""
        counted = dict.fromkeys(Tally, 0) if tallies is None else tallies.totals()
        namespaces = self._with_tallies({} if tallies is None else tallies.by_namespace())
        rows = [asdict(row) for row in namespaces.values()]
        totals = {field: sum(row[field] for row in rows) for field in NamespaceTraffic.__slots__}
        found_tokens = 0 if tallies is None else tallies.hit_tokens  # by clients that have declared their chunk_tokens
        index_tokens = found_tokens + counted[Tally.INDEX_HIT_TOKENS]
        tier_tokens = counted[Tally.TIER_HIT_TOKENS]
        misses = dict(self.misses)
        if counted[Tally.LOOKUP_MISSES]:
            misses[NOT_ASKED] = counted[Tally.LOOKUP_MISSES]
        return {
            "lookups": {
                "calls": totals["lookups"] + counted[Tally.LOOKUPS],
                "keys": totals["lookup_keys"],
                "hits": totals["lookup_hits"],
                "hit_rate": _rate(totals["lookup_hits"], totals["lookup_keys"]),
                "loaded": totals["lookup_loaded"],
                "prompts": counted[Tally.PROMPTS],
                "tokens": self.tokens + found_tokens + counted[Tally.PROMPT_TOKENS],
                "hit_tokens": self.hit_tokens + index_tokens + counted[Tally.L1_HIT_TOKENS] + tier_tokens,
                "loaded_tokens": self.loaded_tokens + tier_tokens,
                "loaded_from": dict(self.loaded_from),
                "waited": self.waited.status(),
                "misses": misses,
                "calls_by_index": counted[Tally.LOOKUPS],
                "hits_by_index": counted[Tally.LOOKUP_HITS],
                "hit_tokens_by_index": index_tokens,
                "seconds_by_index": counted[Tally.LOOKUP_NS] / 1e9,
            },
            "retrieves": {
                "calls": totals["retrieves"] + counted[Tally.READS],
                "keys": totals["retrieve_keys"],
                "hits": totals["retrieve_hits"],
                "hit_rate": _rate(totals["retrieve_hits"], totals["retrieve_keys"]),
                "bytes": totals["retrieve_bytes"],
                "misses": dict(self.retrieve_misses),
                "calls_by_index": counted[Tally.READS],
                "hits_by_index": counted[Tally.READ_HITS],
                "bytes_by_index": counted[Tally.READ_BYTES],
                "seconds_by_index": counted[Tally.READ_NS] / 1e9,
            },
            "dropped_stores": counted[Tally.DROPPED_STORES],
            "namespaces": _busiest(namespaces, totals),
            "implausible_counts": 0 if tallies is None else tallies.doubted,
        }

    def _with_tallies(self, by_namespace: dict[int, NamespaceTally]) -> dict[int, NamespaceTraffic]:
        none = NamespaceTraffic()
        merged = {each: self.namespaces.get(each, none).with_tally(tally) for each, tally in by_namespace.items()}
        return {**self.namespaces, **merged}


def _busiest(namespaces: dict[int, NamespaceTraffic], totals: dict[str, int]) -> dict[str, dict[str, int]]:
    """The namespaces with most traffic, by id, and the rest together."""
    named = [(each, row) for each, row in namespaces.items() if each != OTHER]
    named.sort(key=lambda item: -(item[1].lookup_keys + item[1].retrieve_keys))
    found = {
        f"{each:016x}": {field: getattr(row, field) for field in _SHOWN}
        for each, row in named[:TRAFFIC_NAMESPACES_SHOWN_MAX]
    }
    if len(found) < len(namespaces):
        found["other"] = {field: totals[field] - sum(row[field] for row in found.values()) for field in _SHOWN}
    return found


def _rate(hits: int, keys: int) -> float | None:
    return round(hits / keys, 6) if keys else None


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
