"""Figures of one side of the connector since they were last taken."""

from __future__ import annotations

# Name and meaning of each figure, as in vLLM's log, its Prometheus page and our guide.
FIGURES = {
    "lookup_requests": "Requests that were looked up",
    "lookup_hit_tokens": "Tokens that lookups found beyond what the engine had",
    "lookup_missed_tokens": "Tokens of whole blocks that lookups did not find",
    "lookup_held": "Requests of which the server kept what it found until it was loaded",
    "lookup_timeouts": "Requests for which the server did not answer in time",
    "lookup_unreachable": "Requests for which no server could be reached",
    "lookup_seconds": "Seconds from the first time that the engine asked for a request to the answer",
    "lookup_vetoed": "Requests that were not looked up again after a load had failed",
    "params_refused_requests": "Requests that were computed without the cache, because of their kv_transfer_params",
    "load_blocks": "Blocks that were read into the engine",
    "load_bytes": "Bytes that were read into the engine",
    "load_seconds": "Seconds from the beginning of loads to their end",
    "load_failed_blocks": "Blocks that were promised and could not be read, and so were computed",
    "load_failed_requests": "Loads that failed in part or as a whole",
    "prefill_loads": "Loads of prompts that another engine was computing",
    "prefill_late_blocks": "Blocks that the other engine did not store in time, and so were computed",
    "prefill_seconds": "Seconds from the beginning of such loads to their end",
    "load_cancelled_requests": "Loads that were given up because their request had ended",
    "save_blocks": "Blocks that were stored",
    "save_bytes": "Bytes that were stored",
    "save_existing_blocks": "Blocks that were there already",
    "save_refused_blocks": "Blocks for which the server had no room or no time",
    "save_dropped_blocks": "Blocks that were not stored, because the server was slow or away",
    "save_paced_blocks": "Blocks that were not offered, because saves had used up their share of the processor",
    "save_tainted_blocks": "Blocks that were not offered, because a load had failed in their step",
    "save_chunks": "Documents that were stored as chunks",
    "save_existing_chunks": "Documents whose chunk was there already",
    "save_dropped_chunks": "Documents that were asked to be stored as chunks, and were not",
    "report_dropped_blocks": "Blocks of which the server was not told, for routers, because it was slow",
    "hints_sent": "Requests whose KV hints were passed on to the server",
    "hints_dropped": "Requests whose KV hints were not: the server was slow, or executes none",
}
# Of these, each single one is kept, too, under another name: for histograms.
TIMES = {
    "lookup_seconds": ("lookup_latency_seconds", "How long a request waited for the answer to its lookup"),
    "load_seconds": ("load_latency_seconds", "How long a load took"),
}
TIMES_KEPT_MAX = 1000  # between two times that they are taken: steps. Sums are exact beyond that


class Counters:
    """A number for each figure that has moved, and a list of times for each of `TIMES`."""

    def __init__(self) -> None:
        self._counts: dict[str, float] = {}
        self._times: dict[str, list[float]] = {}

    def add(self, figure: str, count: float = 1) -> None:
        """Count. Raises `KeyError` for a figure that is not in `FIGURES`."""
        if figure not in FIGURES:
            raise KeyError(figure)
        if count:
            self._counts[figure] = self._counts.get(figure, 0) + count

    def time(self, figure: str, seconds: float) -> None:
        """Count one time of `TIMES`."""
        self.add(figure, seconds)
        kept = self._times.setdefault(TIMES[figure][0], [])
        if len(kept) < TIMES_KEPT_MAX:
            kept.append(seconds)

    def take(self) -> dict[str, float | list[float]]:
        """What was counted since the last time; empty if nothing was."""
        taken: dict[str, float | list[float]] = {**self._counts, **self._times}
        self._counts, self._times = {}, {}
        return taken
