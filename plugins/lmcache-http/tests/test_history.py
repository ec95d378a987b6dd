"""The past hour for the charts: exact means, gaps, and bounds whatever the server has."""

from __future__ import annotations

import json
import tracemalloc
from typing import Any

import pytest

from lmcache_http.history import (
    COARSE_MAX,
    COARSE_S,
    FINE_MAX,
    FINE_S,
    KEPT_S,
    LINES_MAX,
    NAMESPACES_MAX,
    TIERS_MAX,
    History,
)

TOOK = {"seconds": 0.0, "counts": [0, 0]}


def status(
    at_s: float, *, tiers: int = 0, namespaces: int = 0, generation: int = 0, **lookups: float
) -> dict[str, Any]:
    """As of a server that started at 0 and stores 1000 bytes a second."""
    ids = [f"{generation * 1000 + number:016x}" for number in range(namespaces)]
    asked = {"keys": 0, "hits": 0, "loaded": 0, "loaded_from": {}, "seconds_by_index": 0.0, "calls_by_index": 0}
    return {
        "server": {"uptime_s": at_s},
        "l1": {"used_bytes": 4096, "pool_bytes": 8192, "counters": {"evictions": 0}},
        "counters": {"stored_bytes": int(1000 * at_s)},
        "traffic": {
            "lookups": {**asked, "waited": TOOK, **lookups},
            "retrieves": {"bytes": 0},
            "namespaces": {id_: {"lookup_keys": int(at_s)} for id_ in ids},
        },
        "namespaces": {id_: {"label": f"{'label' * 15}-{id_[-4:]}"} for id_ in ids},
        "tiers": {"tiers": [tier(f"{'tier' * 15}{number}", at_s) for number in range(tiers)]},
    }


def tier(name: str, at_s: float) -> dict[str, Any]:
    latencies = {what: {"seconds": at_s, "counts": [int(at_s), 0]} for what in ("load", "store")}
    counts = {"loaded_bytes": int(at_s), "stored_bytes": int(at_s)}
    return {"name": name, "capacity_bytes": 10, "bytes_used": 5, "counts": counts, "latencies": latencies,
            "deletes": {"evicted": int(at_s)}}  # fmt: skip


def series(told: dict[str, Any], chart: str) -> dict[str, list[float | None]]:
    (found,) = (each["series"] for each in told["charts"] if each["id"] == chart)
    return dict(found)


def test_the_past_is_thinned_out_and_its_means_stay_exact() -> None:
    """A server that is asked each second for two hours, and has a hit for every second key."""
    history, end = History(), int(2 * KEPT_S)
    for at_s in range(1, end + 1):
        history.add(status(at_s, keys=2 * at_s, hits=at_s), at_s)
    told = history.since(0)
    assert (told["times"][0], told["times"][-1]) == (pytest.approx(end - KEPT_S, abs=2 * COARSE_S), end)
    steps = [later - earlier for earlier, later in zip(told["times"], told["times"][1:], strict=False)]
    assert steps == sorted(steps, reverse=True)
    assert (steps[0], steps[-1], steps.count(1)) == (COARSE_S, 1, FINE_S)
    assert set(series(told, "hits")["in all"][1:]) == {0.5}
    assert set(series(told, "bytes")["stored"][1:]) == {1000.0}
    assert set(series(told, "fill")["l1"]) == {0.5}


def test_a_page_that_asks_for_what_is_later_has_all_points_and_each_once() -> None:
    history, times = History(), []
    for at_s in range(1, 400):
        history.add(status(at_s, keys=at_s, hits=at_s), at_s)
        if at_s % 7 == 0:
            told = history.since(times[-1] if times else 0)
            times += told["times"]
            assert series(told, "hits")["in all"][-1] == 1.0
    assert times == [*range(1, 399 + 1)][: len(times)]
    assert history.since(1e12)["times"] == []


def test_what_nobody_asked_for_and_what_a_server_did_not_answer_is_missing() -> None:
    history = History()
    history.add(status(10, keys=5, hits=5), 1010)
    history.add(status(20, keys=5, hits=5), 1020)  # no lookup in between
    history.add(status(620, keys=9, hits=7), 1620)
    history.add(status(3, keys=4, hits=4), 1630)  # started again
    told = history.since(0)
    assert told["times"] == [1010, 1020, 1320, 1620, 1630]
    assert series(told, "hits")["in all"] == [None, None, None, 0.5, None]
    assert series(told, "fill")["l1"] == [0.5, 0.5, None, 0.5, 0.5]


def test_it_is_bounded_whatever_the_server_has() -> None:
    """Forty tiers with long names, and namespaces that are others at each look."""
    history = History()
    tracemalloc.start()
    for at_s in (*range(10, 4000, 10), *range(4000, 4130)):
        history.add(status(at_s, tiers=40, namespaces=50, generation=at_s // 5), at_s)
    kept, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert kept < 2_500_000
    told = history.since(0)
    assert len(told["times"]) <= COARSE_MAX + FINE_MAX
    assert len(series(told, "evictions")) == 1 + TIERS_MAX
    assert len(series(told, "namespaces")) == LINES_MAX
    assert len(json.dumps(told)) < 500_000
    steady = History()
    for at_s in range(1, 20):
        steady.add(status(at_s, namespaces=50), at_s)
    assert len(series(steady.since(0), "namespaces")) == NAMESPACES_MAX
