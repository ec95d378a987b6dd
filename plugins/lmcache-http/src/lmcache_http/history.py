"""The past hour of a server's figures, for the charts of the page at `/ui`. It ends with this process.

Counters are kept, and not their rates: to thin out the past is then to drop samples, and the means of the longer
intervals are still exact.
"""

from __future__ import annotations

import threading
from array import array
from bisect import bisect_right
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from math import isnan, nan
from typing import Any

KEPT_S = 3600.0
COARSE_S = 10.0  # between samples, unless somebody asks for figures more often
FINE_S = 120.0  # then all samples of this time are kept
FINE_MAX = int(FINE_S) + 1  # figures are fetched once a second, and after changes
COARSE_MAX = int(KEPT_S / COARSE_S)
GAP_S = 3 * COARSE_S  # without a sample: the server did not answer, and nothing is drawn
TIERS_MAX = 16  # the first ones in order
NAMESPACES_MAX = 8  # the busiest: as many lines as the charts have colours
LINES_MAX = 2 + 2 * TIERS_MAX  # of a chart, the latest: tiers and namespaces come and go within the hour
DIGITS = 4  # more than a chart shows
CHARTS = (
    {"id": "fill", "title": "Fill", "unit": "share", "top": 1},
    {"id": "hits", "title": "Hit rate of lookups", "unit": "share", "top": 1},
    {"id": "latency", "title": "Latency, mean", "unit": "seconds", "top": None},
    {"id": "bytes", "title": "Bytes a second", "unit": "bytes", "top": None},
    {"id": "evictions", "title": "Evictions a second", "unit": "count", "top": None},
    {"id": "namespaces", "title": "Keys a second in lookups by calls, by namespace", "unit": "count", "top": None},
)
Name = tuple[str, str]  # of a line: its chart, and its own


@dataclass(frozen=True, slots=True)
class _Sample:
    """`values`: for each name a counter, and the counter by whose growth that of the first is divided; NaN: a level."""

    at_s: float
    uptime_s: float
    names: tuple[Name, ...]
    values: array[float]


class History:
    """Thread-safe, and bounded: `COARSE_MAX + FINE_MAX` samples of lines for `TIERS_MAX` tiers and `NAMESPACES_MAX`
    namespaces, below 10 MB whatever the server has: 8.8 MB if all names change from sample to sample."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._coarse: deque[_Sample] = deque(maxlen=COARSE_MAX)
        self._fine: deque[_Sample] = deque(maxlen=FINE_MAX)

    def add(self, status: Mapping[str, Any], at_s: float) -> None:
        """An answer of `status`. One that another thread has overtaken is left out."""
        lines = dict(_lines(status))
        with self._lock:
            fine, coarse = self._fine, self._coarse
            if fine and at_s <= fine[-1].at_s:
                return
            former = {name: name for name in fine[-1].names} if fine else {}  # equal names are kept once
            names = tuple(former.get(name, name) for name in lines)
            values = array("d", (value for pair in lines.values() for value in pair))
            while fine and (fine[0].at_s < at_s - FINE_S or len(fine) == FINE_MAX):
                oldest = fine.popleft()
                if not coarse or oldest.at_s >= coarse[-1].at_s + COARSE_S:
                    coarse.append(oldest)
            while coarse and coarse[0].at_s < at_s - KEPT_S:
                coarse.popleft()
            fine.append(_Sample(round(at_s, 3), status["server"]["uptime_s"], names, values))

    def since(self, after_s: float) -> dict[str, Any]:
        """`times`, and for each chart the values of its lines at these times, null where there is none."""
        with self._lock:
            samples = [*self._coarse, *self._fine]
        rows: list[tuple[float, Mapping[Name, float]]] = []
        for at in range(bisect_right(samples, after_s, key=lambda sample: sample.at_s), len(samples)):
            now, before = samples[at], samples[at - 1] if at else None
            if before is not None and now.at_s - before.at_s > GAP_S:
                rows.append(((now.at_s + before.at_s) / 2, {}))
            rows.append((now.at_s, dict(_points(now, before))))
        names = dict.fromkeys(name for _, row in reversed(rows) for name in row)
        charts: list[dict[str, Any]] = [{**chart, "series": {}} for chart in CHARTS]
        by_id = {chart["id"]: chart["series"] for chart in charts}
        for chart, line in names:
            if len(by_id[chart]) < LINES_MAX:
                by_id[chart][line] = [row.get((chart, line)) for _, row in rows]
        return {"times": [at_s for at_s, _ in rows], "charts": charts}


def _points(now: _Sample, before: _Sample | None) -> Iterator[tuple[Name, float]]:
    there = {}
    if before is not None and before.uptime_s <= now.uptime_s:  # else another server counts from 0
        there = dict(zip(before.names, zip(before.values[::2], before.values[1::2], strict=True), strict=True))
    for name, value, by in zip(now.names, now.values[::2], now.values[1::2], strict=True):
        if not isnan(by):
            former, former_by = there.get(name, (nan, nan))
            if not (by > former_by and value >= former):  # nothing has happened, or it is new
                continue
            value = (value - former) / (by - former_by)
        yield name, float(f"{value:.{DIGITS}g}")


def _lines(status: Mapping[str, Any]) -> Iterator[tuple[Name, tuple[float, float]]]:
    l1, counters, uptime_s = status["l1"], status["counters"], status["server"]["uptime_s"]
    lookups, retrieves = status["traffic"]["lookups"], status["traffic"]["retrieves"]
    keys, waited = lookups["keys"], lookups["waited"]
    yield ("fill", "l1"), (l1["used_bytes"] / l1["pool_bytes"], nan)
    yield ("hits", "in all"), (lookups["hits"], keys)
    yield ("hits", "l1"), (lookups["hits"] - lookups["loaded"], keys)
    yield ("latency", "lookup in the index"), (lookups["seconds_by_index"], lookups["calls_by_index"])
    yield ("latency", "lookup with tiers"), (waited["seconds"], sum(waited["counts"]))
    yield ("bytes", "read"), (retrieves["bytes"], uptime_s)
    yield ("bytes", "stored"), (counters.get("stored_bytes", 0), uptime_s)
    yield ("evictions", "l1"), (l1["counters"]["evictions"], uptime_s)
    for tier in (status["tiers"] or {}).get("tiers", [])[:TIERS_MAX]:
        name, counts = tier["name"], tier["counts"]
        if tier["capacity_bytes"]:
            yield ("fill", name), (tier["bytes_used"] / tier["capacity_bytes"], nan)
        yield ("hits", name), (lookups["loaded_from"].get(name, 0), keys)
        for what in ("load", "store"):
            took = tier["latencies"][what]
            yield ("latency", f"{name} {what}"), (took["seconds"], sum(took["counts"]))
        yield ("bytes", f"from {name}"), (counts.get("loaded_bytes", 0), uptime_s)
        yield ("bytes", f"to {name}"), (counts.get("stored_bytes", 0), uptime_s)
        yield ("evictions", name), (tier["deletes"]["evicted"], uptime_s)
    for id_, row in islice(status["traffic"]["namespaces"].items(), NAMESPACES_MAX):
        label = status["namespaces"].get(id_, {}).get("label", "")
        yield ("namespaces", f"{label} ({id_[:4]})" if label else id_), (row["lookup_keys"], uptime_s)
