"""The metrics: one table, each read from the answer of `status`.

Names follow Prometheus' conventions: base units, `_total` for counters. Labels are few: tiers and policies as
configured, reasons and states as in the code, the 50 namespaces with most traffic and `other`. No label contains a key,
a token or a salt. docs/operating/metrics.md has this table; a test compares them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

PREFIX = "lmcache_core_"
Figures = Mapping[str, Any]


class Sample(NamedTuple):
    """One value of a metric, with its label's values in the metric's order."""

    labels: tuple[str, ...]
    value: float


class Buckets(NamedTuple):
    """A histogram: the count in each bucket by itself, the last one above all bounds; and the sum of all seconds."""

    labels: tuple[str, ...]
    bounds_s: tuple[float, ...]
    counts: tuple[int, ...]
    seconds: float


@dataclass(frozen=True)
class Metric:
    """`read` returns its samples from a status; none for what the server does not have (tiers, subscribers)."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    help: str
    labels: tuple[str, ...]
    read: Callable[[Figures], Iterable[Sample | Buckets]]

    @property
    def full_name(self) -> str:
        """The exposed name."""
        return PREFIX + self.name


def _at(figures: Figures, path: str) -> Any:
    found: Any = figures
    for part in path.split("."):
        if found is None:
            return None
        found = found.get(part)
    return found


def _value(path: str, *, scale: float = 1) -> Callable[[Figures], Iterator[Sample]]:
    def read(figures: Figures) -> Iterator[Sample]:
        found = _at(figures, path)
        if found is not None:
            yield Sample((), float(found) * scale)

    return read


def _by_key(path: str, *, prefix: str = "") -> Callable[[Figures], Iterator[Sample]]:
    """A value for each key that begins with `prefix`, in the table at `path`."""

    def read(figures: Figures) -> Iterator[Sample]:
        for key, value in sorted((_at(figures, path) or {}).items()):
            if key.startswith(prefix):
                yield Sample((key.removeprefix(prefix),), float(value))

    return read


def _rows(path: str, *fields: str) -> Callable[[Figures], Iterator[Sample]]:
    """The `fields` of each row of the table at `path`: one label, or with several fields a second one."""

    def read(figures: Figures) -> Iterator[Sample]:
        for key, row in sorted((_at(figures, path) or {}).items()):
            for field in fields:
                labels = (key,) if len(fields) == 1 else (key, field.removesuffix("_bytes"))
                yield Sample(labels, float(row[field]))

    return read


def _tiers(figures: Figures) -> list[Any]:
    return list((figures["tiers"] or {}).get("tiers", []))


def _tier(field: str) -> Callable[[Figures], Iterator[Sample]]:
    def read(figures: Figures) -> Iterator[Sample]:
        for tier in _tiers(figures):
            if tier[field] is not None:
                yield Sample((tier["name"],), float(tier[field]))

    return read


def _breakers(field: str) -> Callable[[Figures], Iterator[Sample]]:
    def read(figures: Figures) -> Iterator[Sample]:
        for tier in _tiers(figures):
            for what in ("reads", "writes"):
                found = tier[what][field]
                yield Sample((tier["name"], what), float(found != "closed" if field == "breaker" else found))

    return read


def _lanes(field: str) -> Callable[[Figures], Iterator[Sample]]:
    def read(figures: Figures) -> Iterator[Sample]:
        for tier in _tiers(figures):
            for lane, row in tier["lanes"].items():
                yield Sample((tier["name"], lane.removeprefix(f"{tier['name']}-")), float(row[field]))

    return read


def _tier_counts(figures: Figures) -> Iterator[Sample]:
    for tier in _tiers(figures):
        for what, count in sorted(tier["counts"].items()):
            if not what.endswith("_bytes"):
                yield Sample((tier["name"], what), float(count))


def _tier_stored_bytes(figures: Figures) -> Iterator[Sample]:
    for tier in _tiers(figures):
        yield Sample((tier["name"],), float(tier["counts"].get("stored_bytes", 0)))


def _tier_evictions(figures: Figures) -> Iterator[Sample]:
    for tier in _tiers(figures):
        yield Sample((tier["name"],), float(tier["deletes"]["evicted"]))


def _tier_latencies(figures: Figures) -> Iterator[Buckets]:
    for tier in _tiers(figures):
        for what, row in tier["latencies"].items():
            yield _buckets((tier["name"], what), row)


def _buckets(labels: tuple[str, ...], row: Figures) -> Buckets:
    return Buckets(labels, tuple(row["bounds_s"]), tuple(row["counts"]), float(row["seconds"]))


def _hits(figures: Figures) -> Iterator[Sample]:
    lookups = figures["traffic"]["lookups"]
    by_index, loaded = lookups["hits_by_index"], lookups["loaded"]
    yield Sample(("index",), by_index)
    yield Sample(("l1",), lookups["hits"] - by_index - loaded)
    yield Sample(("tier",), loaded)


def _hit_tokens(figures: Figures) -> Iterator[Sample]:
    for labels, value in _hits(figures):
        yield Sample(labels, value * figures["chunk_tokens"])


def _split(table: str, field: str) -> Callable[[Figures], Iterator[Sample]]:
    """By the index, and by calls."""

    def read(figures: Figures) -> Iterator[Sample]:
        row = figures["traffic"][table]
        yield Sample(("index",), row[f"{field}_by_index"])
        yield Sample(("call",), row[field] - row[f"{field}_by_index"])

    return read


def _info(figures: Figures) -> Iterator[Sample]:
    server = figures["server"]
    yield Sample((server["name"], server["version"], figures["l1"]["eviction_policy"]), 1)


def _evictions(figures: Figures) -> Iterator[Sample]:
    yield Sample((figures["l1"]["eviction_policy"],), figures["l1"]["counters"]["evictions"])


def _aside(figures: Figures) -> Iterator[Sample]:
    for name, row in ((figures["events"] or {}).get("subscribers", {})).items():
        yield Sample((name,), float(bool(row["aside"])))


def _missed(figures: Figures) -> Iterator[Sample]:
    for name, row in ((figures["events"] or {}).get("subscribers", {})).items():
        yield Sample((name,), float(row["missed"]))


def _one_of(path: str) -> Callable[[Figures], Iterator[Sample]]:
    """A counter that appears in a table only once it has counted."""
    table, _, name = path.rpartition(".")

    def read(figures: Figures) -> Iterator[Sample]:
        yield Sample((), float((_at(figures, table) or {}).get(name, 0)))

    return read


def _companions(figures: Figures) -> Iterator[tuple[str, Figures]]:
    for name, row in sorted((figures["companions"] or {}).items()):
        if isinstance(row, Mapping):  # third parties fill this in
            yield name, row


def _numbers(name: str, row: Figures) -> Iterator[Sample]:
    for what, value in row.items():
        if isinstance(what, str) and isinstance(value, int | float):
            yield Sample((name, what), float(value))


def _companion_counts(figures: Figures) -> Iterator[Sample]:
    for name, row in _companions(figures):
        counts = row.get("counts")
        if isinstance(counts, Mapping):
            yield from _numbers(name, counts)


def _companion_figures(figures: Figures) -> Iterator[Sample]:
    for name, row in _companions(figures):
        yield from _numbers(name, row)


def _companion_abandoned(figures: Figures) -> Iterator[Sample]:
    for name, row in _companions(figures):
        yield Sample((name,), float("abandoned" in row))


def _waited(figures: Figures) -> Iterator[Buckets]:
    yield _buckets((), figures["traffic"]["lookups"]["waited"])


def _tenant(field: str) -> Callable[[Figures], Iterator[Sample]]:
    """For each tenant in each store; the one without a name covers all namespaces without a tenant."""

    def read(figures: Figures) -> Iterator[Sample]:
        stores = [("l1", figures["l1"]["tenants"]), *((tier["name"], tier["tenants"]) for tier in _tiers(figures))]
        for store, rows in stores:
            for row in rows:
                if row[field] is not None:
                    yield Sample((row["name"] or "others", store), float(row[field]))

    return read


NAMESPACES = "traffic.namespaces"
METRICS: tuple[Metric, ...] = (
    Metric("info", "gauge", "1; says which server this is", ("server", "version", "eviction_policy"), _info),
    Metric("uptime_seconds", "gauge", "seconds since the server's start", (), _value("server.uptime_s")),
    # what was asked for
    Metric("lookup_keys_total", "counter", "keys looked up", (), _value("traffic.lookups.keys")),
    Metric(
        "lookup_hits_total", "counter", "keys found: by workers in the index, in the L1, in tiers", ("source",), _hits
    ),
    Metric("lookup_hit_tokens_total", "counter", "tokens whose KV was found", ("source",), _hit_tokens),
    Metric(
        "lookup_misses_total", "counter", "keys not found, by reason", ("reason",), _by_key("traffic.lookups.misses")
    ),
    Metric("lookups_total", "counter", "lookups, by who answered", ("by",), _split("lookups", "calls")),
    Metric(
        "index_lookup_seconds_total",
        "counter",
        "seconds that workers spent in the index",
        (),
        _value("traffic.lookups.seconds_by_index"),
    ),
    Metric("lookup_wait_seconds", "histogram", "how long lookups took that tiers were asked for", (), _waited),
    Metric("retrieve_keys_total", "counter", "objects that were to be read", (), _value("traffic.retrieves.keys")),
    Metric("retrieve_hits_total", "counter", "objects read, by who found them", ("by",), _split("retrieves", "hits")),
    Metric(
        "retrieve_misses_total",
        "counter",
        "objects not there to be read, by reason",
        ("reason",),
        _by_key("traffic.retrieves.misses"),
    ),
    Metric("retrieved_bytes_total", "counter", "bytes read out of the L1", ("by",), _split("retrieves", "bytes")),
    Metric("retrieves_total", "counter", "retrieves, by who answered", ("by",), _split("retrieves", "calls")),
    Metric(
        "index_read_seconds_total",
        "counter",
        "seconds that workers spent copying what they found by themselves",
        (),
        _value("traffic.retrieves.seconds_by_index"),
    ),
    Metric(
        "namespace_lookup_keys_total",
        "counter",
        "keys looked up by calls, for the busiest namespaces",
        ("namespace",),
        _rows(NAMESPACES, "lookup_keys"),
    ),
    Metric(
        "namespace_lookup_hits_total",
        "counter",
        "keys found by calls, for the busiest namespaces",
        ("namespace",),
        _rows(NAMESPACES, "lookup_hits"),
    ),
    Metric(
        "namespace_retrieved_bytes_total",
        "counter",
        "bytes read by calls, for the busiest namespaces",
        ("namespace",),
        _rows(NAMESPACES, "retrieve_bytes"),
    ),
    Metric(
        "doubted_tallies_total",
        "counter",
        "times that what a worker counted made no sense, and was left out",
        (),
        _value("traffic.doubted_tallies"),
    ),
    Metric("stored_objects_total", "counter", "objects that workers stored", (), _one_of("counters.stored_objects")),
    Metric("stored_bytes_total", "counter", "bytes that workers stored", (), _one_of("counters.stored_bytes")),
    # the pool
    Metric("pool_bytes", "gauge", "bytes of the pool for objects", (), _value("l1.pool_bytes")),
    Metric("pool_populated_bytes", "gauge", "of these, with memory behind them", (), _value("l1.populated_bytes")),
    Metric("pool_used_bytes", "gauge", "of these, in slots that are not free", (), _value("l1.used_bytes")),
    Metric("slot_bytes", "gauge", "bytes of slots, by their state", ("state",), _by_key("l1.bytes_by_state")),
    Metric("objects", "gauge", "objects in the pool, by their state", ("state",), _by_key("l1.objects_by_state")),
    Metric(
        "fragmentation_ratio",
        "gauge",
        "part of the free memory that one size alone can use",
        (),
        _value("l1.fragmentation"),
    ),
    Metric("pinned_bytes", "gauge", "bytes pinned by requests", (), _value("l1.pinned_bytes")),
    Metric("evictions_total", "counter", "objects evicted from the L1", ("policy",), _evictions),
    Metric(
        "removals_total",
        "counter",
        "objects that left the L1 for another reason",
        ("reason",),
        _by_key("counters", prefix="removed_"),
    ),
    Metric(
        "policy_faults_total",
        "counter",
        "times that the eviction policy raised",
        (),
        _value("l1.counters.policy_faults"),
    ),
    Metric("index_entries", "gauge", "entries of the index", (), _value("index.entries")),
    Metric("index_ready_entries", "gauge", "of these, in use", (), _value("index.ready")),
    Metric(
        "unindexed_objects", "gauge", "ready objects for which the index has no room", (), _value("index.unindexed")
    ),
    Metric(
        "repaired_words_total",
        "counter",
        "words of the tables that somebody else wrote to",
        (),
        _value("pool.repaired_words"),
    ),
    # who uses it
    Metric("sessions", "gauge", "clients that are connected", (), _value("sessions_connected")),
    Metric("session_deaths_total", "counter", "clients that died", (), _value("deaths")),
    Metric(
        "sessions_dropped_total",
        "counter",
        "clients that were dropped: no hello, or no room",
        (),
        _value("sessions_dropped"),
    ),
    Metric("leases", "gauge", "leases that are open", ("kind",), _by_key("l1.leases_by_kind")),
    Metric(
        "lease_expiries_total", "counter", "leases that were not answered in time", (), _value("l1.counters.expiries")
    ),
    Metric("stale_leases_total", "counter", "calls with a lease that is over", (), _value("l1.counters.stale_leases")),
    Metric(
        "holder_bytes",
        "gauge",
        "bytes that a user keeps from eviction",
        ("holder", "what"),
        _rows("l1.holders", "promised_bytes", "read_bytes", "pinned_bytes", "quarantined_bytes"),
    ),
    Metric("lookups_waiting", "gauge", "lookups that tiers are working on", (), _value("lookups_waiting")),
    Metric(
        "lookups_throttled_total",
        "counter",
        "lookups for which no tier was asked: too many wait",
        (),
        _value("lookups_throttled"),
    ),
    Metric("stores_waiting", "gauge", "stores that wait for room", (), _value("stores_waiting")),
    Metric(
        "stores_waited_in_vain_total",
        "counter",
        "stores that waited for room and got none",
        (),
        _value("stores_waited_in_vain"),
    ),
    Metric(
        "errors_total", "counter", "requests answered with an error", ("code",), _by_key("counters", prefix="error_")
    ),
    Metric("garbage_frames_total", "counter", "frames that were no requests", (), _one_of("counters.garbage")),
    Metric(
        "refused_peers_total",
        "counter",
        "connections of users that may not connect",
        (),
        _one_of("counters.refused_peers"),
    ),
    Metric(
        "reported_damaged_total",
        "counter",
        "objects that readers found damaged",
        (),
        _one_of("counters.reported_damaged"),
    ),
    # tiers
    Metric("tier_used_bytes", "gauge", "bytes on the tier's medium", ("tier",), _tier("bytes_used")),
    Metric("tier_capacity_bytes", "gauge", "bytes that the tier may use", ("tier",), _tier("capacity_bytes")),
    Metric("tier_objects", "gauge", "objects on the tier", ("tier",), _tier("objects")),
    Metric(
        "tier_lookup_hits_total",
        "counter",
        "keys of lookups that came from there",
        ("tier",),
        _by_key("traffic.lookups.loaded_from"),
    ),
    Metric("tier_draining", "gauge", "1: nothing more is stored there", ("tier",), _tier("draining")),
    Metric("tier_breaker_open", "gauge", "1: the tier is left alone for now", ("tier", "what"), _breakers("breaker")),
    Metric(
        "tier_breaker_opened_total",
        "counter",
        "times that the tier was left alone",
        ("tier", "what"),
        _breakers("opened"),
    ),
    Metric("tier_lane_queued", "gauge", "calls that wait for a thread", ("tier", "lane"), _lanes("queued")),
    Metric("tier_lane_running", "gauge", "calls that are out", ("tier", "lane"), _lanes("running")),
    Metric("tier_lane_hung", "gauge", "calls that are out past their deadline", ("tier", "lane"), _lanes("hung")),
    Metric("tier_results_total", "counter", "what became of objects and calls there", ("tier", "result"), _tier_counts),
    Metric("tier_stored_bytes_total", "counter", "bytes stored there", ("tier",), _tier_stored_bytes),
    Metric("tier_evictions_total", "counter", "objects evicted there", ("tier",), _tier_evictions),
    Metric(
        "tier_call_seconds",
        "histogram",
        "how long calls took, their wait included",
        ("tier", "operation"),
        _tier_latencies,
    ),
    Metric(
        "tier_dirty_objects",
        "gauge",
        "objects that the tier does not have yet",
        ("tier",),
        _by_key("tiers.stores.dirty"),
    ),
    Metric(
        "tier_store_in_flight_bytes", "gauge", "bytes on their way to tiers", (), _value("tiers.stores.in_flight_bytes")
    ),
    Metric(
        "lost_objects_total",
        "counter",
        "objects that left the L1 before any tier had them",
        (),
        _value("tiers.stores.reached_no_tier.objects"),
    ),
    Metric(
        "lost_bytes_total",
        "counter",
        "bytes that left the L1 before any tier had them",
        (),
        _value("tiers.stores.reached_no_tier.bytes"),
    ),
    Metric(
        "prefetches_in_flight", "gauge", "lookups that tiers are asked for now", (), _value("tiers.lookups.in_flight")
    ),
    # what lives beside the L1
    Metric(
        "companion_counts_total",
        "counter",
        "what a companion has counted (l0: promoted, demoted, ...)",
        ("companion", "what"),
        _companion_counts,
    ),
    Metric(
        "companion_figures",
        "gauge",
        "how it stands with a companion (l0: enabled, keys, ...)",
        ("companion", "what"),
        _companion_figures,
    ),
    Metric(
        "companion_abandoned",
        "gauge",
        "1: it has failed and does nothing any more",
        ("companion",),
        _companion_abandoned,
    ),
    # tenants with a quota
    Metric(
        "tenant_used_bytes",
        "gauge",
        "bytes that a tenant has, writes included",
        ("tenant", "store"),
        _tenant("used_bytes"),
    ),
    Metric(
        "tenant_reserved_bytes",
        "gauge",
        "bytes that no other tenant can take",
        ("tenant", "store"),
        _tenant("reserved_bytes"),
    ),
    Metric(
        "tenant_limit_bytes", "gauge", "bytes that a tenant never exceeds", ("tenant", "store"), _tenant("limit_bytes")
    ),
    # the server itself
    Metric(
        "loop_longest_turn_seconds",
        "gauge",
        "the longest turn of the loop so far",
        (),
        _value("longest_turn.ms", scale=1e-3),
    ),
    Metric("loop_faults_total", "counter", "faults on the loop that it survived", (), _value("counters.loop_faults")),
    Metric(
        "internal_errors_total",
        "counter",
        "requests that met a fault of the server",
        (),
        _one_of("counters.internal_errors"),
    ),
    Metric(
        "apply_faults_total",
        "counter",
        "decisions that were not carried out at once",
        (),
        _one_of("counters.apply_faults"),
    ),
    Metric("draining", "gauge", "1: the server takes nothing new", (), _value("server.draining")),
    Metric("events_total", "counter", "events left for subscribers", (), _value("events.emitted")),
    Metric("events_dropped_total", "counter", "events dropped, since the bus was full", (), _value("events.dropped")),
    Metric("events_queued", "gauge", "events that wait for subscribers", (), _value("events.queue")),
    Metric("spans_exported_total", "counter", "spans that a collector took", (), _value("tracing.exported")),
    Metric("spans_failed_total", "counter", "spans that did not reach the collector", (), _value("tracing.failed")),
    Metric("spans_dropped_total", "counter", "spans dropped, since too many waited", (), _value("tracing.dropped")),
    Metric("subscriber_aside", "gauge", "1: the subscriber was put aside", ("subscriber",), _aside),
    Metric("subscriber_missed_total", "counter", "events not told to a subscriber put aside", ("subscriber",), _missed),
)


def table() -> str:
    """The table for the docs."""
    lines = ["| metric | type | labels | what it says |", "|---|---|---|---|"]
    for metric in METRICS:
        labels = ", ".join(f"`{label}`" for label in metric.labels)
        lines.append(f"| `{metric.full_name}` | {metric.kind} | {labels} | {metric.help} |")
    return "\n".join(lines)
