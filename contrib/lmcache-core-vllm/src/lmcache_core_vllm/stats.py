"""The connector's figures as vLLM logs them, and shows them to Prometheus."""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from lmcache_core_vllm.counters import FIGURES, TIMES

PREFIX = "vllm:lmcache_core_"
BUCKETS_S = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)


class ConnectorStats(KVConnectorStats):  # type: ignore[misc]  # vLLM is not there where types are checked
    """Sums of `counters.FIGURES` and lists of `counters.TIMES`, over an interval, of all ranks and the scheduler."""

    def reset(self) -> None:
        """Start at zero."""
        self.data: dict[str, Any] = {}

    def aggregate(self, other: KVConnectorStats) -> ConnectorStats:
        """Add the figures of another rank or interval to these."""
        for name, value in other.data.items():
            self.data[name] = self.data.get(name, type(value)()) + value  # numbers, or lists
        return self

    def reduce(self) -> dict[str, int | float]:
        """What vLLM's log shows for an interval: each figure that has changed, the rate of the loads, and the longest
        of 99 % of the times."""
        shown = {name: round(self.data[name], 3) for name in FIGURES if name in self.data}
        if self.data.get("load_seconds"):
            shown["load_MB_per_s"] = round(self.data.get("load_bytes", 0) / self.data["load_seconds"] / 1e6, 1)
        for name, _ in TIMES.values():
            if times := sorted(self.data.get(name, ())):
                shown[f"{name.removesuffix('_latency_seconds')}_p99_ms"] = round(1e3 * times[len(times) * 99 // 100], 3)
        return shown

    def is_empty(self) -> bool:
        """Whether no figure has changed."""
        return not self.data


class ConnectorMetrics(KVConnectorPromMetrics):  # type: ignore[misc]  # as above
    """A Prometheus counter for each figure: `vllm:lmcache_core_load_bytes_total`, …, and a histogram of each time."""

    def __init__(self, vllm_config: Any, metric_types: Any, labelnames: list[str], labelvalues: Any) -> None:
        super().__init__(vllm_config, metric_types, labelnames, labelvalues)
        self._counters: dict[str, dict[int, Any]] = {}
        for name, meaning in FIGURES.items():
            metric = self._counter_cls(name=PREFIX + name, documentation=meaning, labelnames=labelnames)
            self._counters[name] = {engine: metric.labels(*values) for engine, values in labelvalues.items()}

        self._histograms: dict[str, dict[int, Any]] = {}
        for name, meaning in TIMES.values():
            metric = self._histogram_cls(
                name=PREFIX + name, documentation=meaning, labelnames=labelnames, buckets=BUCKETS_S
            )
            self._histograms[name] = {engine: metric.labels(*values) for engine, values in labelvalues.items()}

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Count what has come since the last time."""
        for name, value in transfer_stats_data.items():
            of_engine = self._counters.get(name, {}).get(engine_idx)
            histogram = self._histograms.get(name, {}).get(engine_idx)
            if of_engine is not None:
                of_engine.inc(value)
            elif histogram is not None:
                for each in value:
                    histogram.observe(each)
