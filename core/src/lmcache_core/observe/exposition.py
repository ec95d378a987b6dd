"""The metrics as text, made by `prometheus-client` (extra [metrics]). That takes milliseconds of Python, so a helper
process or a command does it, never the server."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from lmcache_core.errors import UsageError
from lmcache_core.observe.metrics import METRICS, Buckets, Figures, Metric

if TYPE_CHECKING:
    from prometheus_client.core import Metric as Family


def text_of(figures: Figures) -> str:
    """Prometheus' text format, from the answer of `status`. Raises `UsageError` if the library is missing."""
    try:
        from prometheus_client import CollectorRegistry, generate_latest
    except ImportError as error:
        raise UsageError("metrics need prometheus-client: pip install 'lmcache-core[metrics]'") from error
    registry = CollectorRegistry(auto_describe=False)
    collector: Any = _Collector(figures)  # duck-typed: the base class belongs to the library, which is imported late
    registry.register(collector)
    text: str = generate_latest(registry).decode()
    return text


class _Collector:
    """One reading of a server."""

    def __init__(self, figures: Figures) -> None:
        self._figures = figures

    def describe(self) -> Iterable[Any]:
        return ()

    def collect(self) -> Iterator[Family]:
        for metric in METRICS:
            yield _family(metric, self._figures)


def _family(metric: Metric, figures: Figures) -> Family:
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

    families: dict[str, Any] = {
        "counter": CounterMetricFamily,
        "gauge": GaugeMetricFamily,
        "histogram": HistogramMetricFamily,
    }
    family: Any = families[metric.kind](metric.full_name, metric.help, labels=metric.labels)
    for sample in metric.read(figures):
        if isinstance(sample, Buckets):
            bounds = [*(repr(bound) for bound in sample.bounds_s), "+Inf"]
            family.add_metric(sample.labels, list(zip(bounds, accumulate(sample.counts), strict=True)), sample.seconds)
        else:
            family.add_metric(sample.labels, sample.value)
    found: Family = family
    return found
