"""The connector's figures as vLLM logs them, and shows them to Prometheus."""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from lmcache_core_vllm.counters import FIGURES

PREFIX = "vllm:lmcache_core_"


class ConnectorStats(KVConnectorStats):  # type: ignore[misc]  # vLLM is not there where types are checked
    """Sums of `counters.FIGURES`, over an interval and over all ranks and the scheduler."""

    def reset(self) -> None:
        """Start at zero."""
        self.data: dict[str, float] = {}

    def aggregate(self, other: KVConnectorStats) -> ConnectorStats:
        """Add the figures of another rank or interval to these."""
        for name, value in other.data.items():
            self.data[name] = self.data.get(name, 0) + value
        return self

    def reduce(self) -> dict[str, int | float]:
        """What vLLM's log shows for an interval: each figure that has changed, and the rate of the loads."""
        shown = {name: round(self.data[name], 3) for name in FIGURES if name in self.data}
        if self.data.get("load_seconds"):
            shown["load_MB_per_s"] = round(self.data.get("load_bytes", 0) / self.data["load_seconds"] / 1e6, 1)
        return shown

    def is_empty(self) -> bool:
        """Whether no figure has changed."""
        return not self.data


class ConnectorMetrics(KVConnectorPromMetrics):  # type: ignore[misc]  # as above
    """A Prometheus counter for each figure: `vllm:lmcache_core_load_bytes_total`, …"""

    def __init__(self, vllm_config: Any, metric_types: Any, labelnames: list[str], labelvalues: Any) -> None:
        super().__init__(vllm_config, metric_types, labelnames, labelvalues)
        self._counters: dict[str, dict[int, Any]] = {}
        for name, meaning in FIGURES.items():
            metric = self._counter_cls(name=PREFIX + name, documentation=meaning, labelnames=labelnames)
            self._counters[name] = {engine: metric.labels(*values) for engine, values in labelvalues.items()}

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Count what has come since the last time."""
        for name, value in transfer_stats_data.items():
            of_engine = self._counters.get(name, {}).get(engine_idx)
            if of_engine is not None:
                of_engine.inc(value)
