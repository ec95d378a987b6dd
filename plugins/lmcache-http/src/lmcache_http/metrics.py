"""The metrics: one table, each read from the answer of `status`, and the text that `prometheus-client` makes of them.

That takes milliseconds of Python, so this process or a command does it, never the server.

Names follow Prometheus' conventions: base units, `_total` for counters. Labels are few: tiers and policies as
configured, reasons and states as in the code, the 50 namespaces with most traffic and `other`. No label contains a key,
a token or a salt. docs/operating/metrics.md has this table; a test compares them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Literal, NamedTuple, cast

from prometheus_client import generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.core import Metric as Family
from prometheus_client.registry import Collector

from lmcache_http.processes import process_families

PREFIX = "lmcache_core_"
Figures = Mapping[str, Any]
_FAMILIES: dict[str, Any] = {
    "counter": CounterMetricFamily,
    "gauge": GaugeMetricFamily,
    "histogram": HistogramMetricFamily,
}


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

    def family(self, figures: Figures) -> Family:
        """Its samples, as the library takes them."""
        family = _FAMILIES[self.kind](self.full_name, self.help, labels=self.labels)
        for sample in self.read(figures):
            if isinstance(sample, Buckets):
                bounds = [*(repr(bound) for bound in sample.bounds_s), "+Inf"]
                counts = list(zip(bounds, accumulate(sample.counts), strict=True))
                family.add_metric(sample.labels, counts, sample.seconds)
            else:
                family.add_metric(sample.labels, sample.value)
        return cast(Family, family)


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
    lookups = figures["traffic"]["lookups"]
    by_index, loaded = lookups["hit_tokens_by_index"], lookups["loaded_tokens"]
    yield Sample(("index",), by_index)
    yield Sample(("l1",), lookups["hit_tokens"] - by_index - loaded)
    yield Sample(("tier",), loaded)


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


def _namespace_info(figures: Figures) -> Iterator[Sample]:
    for name, row in figures["namespaces"].items():
        yield Sample((name, row["label"], row["layout"]), 1)


def _evictions(figures: Figures) -> Iterator[Sample]:
    yield Sample((figures["l1"]["eviction_policy"],), figures["l1"]["counters"]["evictions"])


def _shadows(figures: Figures) -> Iterator[Sample]:
    found = figures["l1"].get("policy", {})  # an older server has none
    for order, share in found.get("hit_share", {}).items():
        yield Sample((order, "1"), share)
    for size, share in found.get("lru_hit_share_by_size", {}).items():
        yield Sample(("lru", size), share)


def _disabled(figures: Figures) -> Iterator[Sample]:
    for name, row in ((figures["events"] or {}).get("subscribers", {})).items():
        yield Sample((name,), float(bool(row["disabled"])))


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


def _companion_disabled(figures: Figures) -> Iterator[Sample]:
    for name, row in _companions(figures):
        yield Sample((name,), float("disabled" in row))


def _adapter_figures(figures: Figures) -> Iterator[Sample]:
    """Of each tier's medium, and of each part of it."""
    for tier in _tiers(figures):
        parts = tier["adapter"].get("parts")
        for part, row in [("", tier["adapter"]), *(parts.items() if isinstance(parts, Mapping) else ())]:
            for labels, value in _numbers(tier["name"], row if isinstance(row, Mapping) else {}):
                yield Sample((labels[0], str(part), labels[1]), value)


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
    Metric(
        "prompts_total",
        "counter",
        "prompts that engines looked up, whoever answered",
        (),
        _value("traffic.lookups.prompts"),
    ),
    Metric(
        "lookup_tokens_total",
        "counter",
        "tokens looked up by engines, and by clients that declare their chunk_tokens",
        (),
        _value("traffic.lookups.tokens"),
    ),
    Metric(
        "lookup_hit_tokens_total",
        "counter",
        "tokens of these that were found",
        ("source",),
        _hit_tokens,
    ),
    Metric(
        "lookup_misses_total", "counter", "keys not found, by reason", ("reason",), _by_key("traffic.lookups.misses")
    ),
    Metric("lookups_total", "counter", "lookups, by who answered", ("by",), _split("lookups", "calls")),
    Metric(
        "index_lookup_seconds_total",
        "counter",
        "seconds that workers spent in the index, by samples; 0 for engines whose lookup and read are one call",
        (),
        _value("traffic.lookups.seconds_by_index"),
    ),
    Metric("lookup_wait_seconds", "histogram", "duration of lookups that asked tiers", (), _waited),
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
        "seconds that workers spent copying objects found in the index, by samples; not of pages",
        (),
        _value("traffic.retrieves.seconds_by_index"),
    ),
    Metric(
        "namespace_lookup_keys_total",
        "counter",
        "keys looked up, for the busiest namespaces",
        ("namespace",),
        _rows(NAMESPACES, "lookup_keys"),
    ),
    Metric(
        "namespace_lookup_hits_total",
        "counter",
        "keys found, for the busiest namespaces",
        ("namespace",),
        _rows(NAMESPACES, "lookup_hits"),
    ),
    Metric(
        "namespace_prompt_tokens_total",
        "counter",
        "tokens of prompts that engines looked up, for the busiest namespaces",
        ("namespace",),
        _rows(NAMESPACES, "prompt_tokens"),
    ),
    Metric(
        "namespace_prompt_hit_tokens_total",
        "counter",
        "tokens of these that were found, for the busiest namespaces",
        ("namespace",),
        _rows(NAMESPACES, "prompt_hit_tokens"),
    ),
    Metric(
        "namespace_retrieved_bytes_total",
        "counter",
        "bytes read, for the busiest namespaces",
        ("namespace",),
        _rows(NAMESPACES, "retrieve_bytes"),
    ),
    Metric(
        "namespace_info",
        "gauge",
        "1; what the ids of namespaces stand for: the labels that clients gave them",
        ("namespace", "label", "layout"),
        _namespace_info,
    ),
    Metric(
        "dropped_stores_total",
        "counter",
        "objects that engines gave up storing, since the server was slow",
        (),
        _value("traffic.dropped_stores"),
    ),
    Metric(
        "implausible_counts_total",
        "counter",
        "counts of a worker that were implausible, and were ignored",
        (),
        _value("traffic.implausible_counts"),
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
        "shadow_hit_ratio",
        "gauge",
        "hits that another order, or another size of the pool (times its own), would have had, of sampled uses",
        ("order", "size"),
        _shadows,
    ),
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
        "unindexed_objects",
        "gauge",
        "ready objects without an entry in the index, for it is full",
        (),
        _value("index.unindexed"),
    ),
    Metric(
        "repaired_words_total",
        "counter",
        "words of the pool's tables that another process overwrote, and that were repaired",
        (),
        _value("pool.repaired_words"),
    ),
    # who uses it
    Metric("sessions", "gauge", "connected clients", (), _value("sessions_connected")),
    Metric("session_deaths_total", "counter", "clients that died", (), _value("deaths")),
    Metric(
        "sessions_dropped_total",
        "counter",
        "clients that were disconnected: no hello, or no room",
        (),
        _value("sessions_dropped"),
    ),
    Metric("leases", "gauge", "open leases", ("kind",), _by_key("l1.leases_by_kind")),
    Metric("lease_expiries_total", "counter", "leases that expired", (), _value("l1.counters.expiries")),
    Metric(
        "stale_leases_total",
        "counter",
        "calls with a lease that has expired or ended",
        (),
        _value("l1.counters.stale_leases"),
    ),
    Metric(
        "holder_bytes",
        "gauge",
        "bytes that a user's leases, promises and pins keep from eviction",
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
        "stores_refused_full_total",
        "counter",
        "objects that were not stored, since the pool had no room for them",
        (),
        _value("stores_refused_full"),
    ),
    Metric(
        "stores_waited_in_vain_total",
        "counter",
        "stores that timed out waiting for room",
        (),
        _value("stores_waited_in_vain"),
    ),
    Metric(
        "errors_total", "counter", "requests answered with an error", ("code",), _by_key("counters", prefix="error_")
    ),
    Metric("garbage_frames_total", "counter", "malformed frames received", (), _one_of("counters.garbage")),
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
    Metric("tier_draining", "gauge", "1: the tier drains: nothing more is stored there", ("tier",), _tier("draining")),
    Metric(
        "tier_breaker_open",
        "gauge",
        "1: the circuit breaker is open, and the tier is not called",
        ("tier", "what"),
        _breakers("breaker"),
    ),
    Metric(
        "tier_breaker_opened_total",
        "counter",
        "times that the circuit breaker opened",
        ("tier", "what"),
        _breakers("opened"),
    ),
    Metric("tier_lane_queued", "gauge", "calls that wait for a thread", ("tier", "lane"), _lanes("queued")),
    Metric("tier_lane_running", "gauge", "calls in flight", ("tier", "lane"), _lanes("running")),
    Metric("tier_lane_hung", "gauge", "calls in flight past their deadline", ("tier", "lane"), _lanes("hung")),
    Metric("tier_results_total", "counter", "objects and calls, by result", ("tier", "result"), _tier_counts),
    Metric("tier_stored_bytes_total", "counter", "bytes stored there", ("tier",), _tier_stored_bytes),
    Metric("tier_evictions_total", "counter", "objects evicted there", ("tier",), _tier_evictions),
    Metric(
        "tier_call_seconds",
        "histogram",
        "duration of calls, with their wait in the queue",
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
        "counters of a companion, an extension in the server (l0: promoted, demoted, ...)",
        ("companion", "what"),
        _companion_counts,
    ),
    Metric(
        "companion_figures",
        "gauge",
        "gauges of a companion, an extension in the server (l0: enabled, keys, ...)",
        ("companion", "what"),
        _companion_figures,
    ),
    Metric(
        "tier_adapter_figures",
        "gauge",
        "figures of a tier's medium by its adapter, and of its parts (other nodes, for example)",
        ("tier", "part", "what"),
        _adapter_figures,
    ),
    Metric(
        "companion_disabled",
        "gauge",
        "1: the companion failed, and is disabled",
        ("companion",),
        _companion_disabled,
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
    Metric(
        "loop_faults_total",
        "counter",
        "errors on the loop that the server survived",
        (),
        _value("counters.loop_faults"),
    ),
    Metric(
        "internal_errors_total",
        "counter",
        "requests that failed by an internal error",
        (),
        _one_of("counters.internal_errors"),
    ),
    Metric(
        "apply_faults_total",
        "counter",
        "decisions of the kernel that could not be applied as one batch",
        (),
        _one_of("counters.apply_faults"),
    ),
    Metric(
        "draining", "gauge", "1: the server is shutting down, and refuses new stores", (), _value("server.draining")
    ),
    Metric("events_total", "counter", "events emitted to subscribers", (), _value("events.emitted")),
    Metric("events_dropped_total", "counter", "events dropped, since the bus was full", (), _value("events.dropped")),
    Metric("events_queued", "gauge", "events that wait for subscribers", (), _value("events.queue")),
    Metric("spans_exported_total", "counter", "spans that a collector took", (), _value("tracing.exported")),
    Metric("spans_failed_total", "counter", "spans that did not reach the collector", (), _value("tracing.failed")),
    Metric("spans_dropped_total", "counter", "spans dropped, since too many waited", (), _value("tracing.dropped")),
    Metric(
        "subscriber_disabled", "gauge", "1: the event subscriber failed, and is disabled", ("subscriber",), _disabled
    ),
    Metric(
        "subscriber_missed_total",
        "counter",
        "events dropped because the subscriber was disabled",
        ("subscriber",),
        _missed,
    ),
)


class _Reading(Collector):
    """One status of a server."""

    def __init__(self, figures: Figures) -> None:
        self._figures = figures

    def collect(self) -> Iterator[Family]:
        for metric in METRICS:
            yield metric.family(self._figures)
        yield from process_families(self._figures)


def text_of(figures: Figures) -> str:
    """Prometheus' text format, from the answer of `status`."""
    return generate_latest(_Reading(figures)).decode()


def table() -> str:
    """The table for the docs."""
    lines = ["| metric | type | labels | what it says |", "|---|---|---|---|"]
    for metric in METRICS:
        labels = ", ".join(f"`{label}`" for label in metric.labels)
        lines.append(f"| `{metric.full_name}` | {metric.kind} | {labels} | {metric.help} |")
    return "\n".join(lines)
