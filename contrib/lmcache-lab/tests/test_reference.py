"""LRU on public traces, where a copy of them lies beside the checkout (shared/traces): equal to four digits."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

from lmcache_core.policies.lru import LruEviction
from lmcache_lab.simulation import Order, replay
from lmcache_lab.workloads import Trace, read_trace

TRACES = Path(__file__).resolve().parents[3].parent / "shared" / "traces"
CAPACITIES = (1000, 3000, 10000, 30000, 50000, 100000)
REFERENCE = {
    ("conversation", Order.FORWARD): (0.0445, 0.0650, 0.2112, 0.3257, 0.3546, 0.3637),
    ("conversation", Order.SUFFIX_FIRST): (0.0445, 0.0653, 0.2116, 0.3257, 0.3546, 0.3637),
    ("synthetic", Order.FORWARD): (0.0825, 0.1878, 0.4235, 0.6242, 0.6396),
    ("synthetic", Order.SUFFIX_FIRST): (0.0841, 0.1906, 0.4239, 0.6242, 0.6396),
}
QUICK = {("synthetic", 1000), ("synthetic", 10000), ("conversation", 3000)}
CASES = [
    pytest.param(trace, order, capacity, expected, marks=[] if (trace, capacity) in QUICK else [pytest.mark.slow])
    for (trace, order), row in REFERENCE.items()
    for capacity, expected in zip(CAPACITIES, row, strict=False)
]


@cache
def trace_of(name: str) -> Trace:
    path = TRACES / f"{name}_trace.jsonl"
    if not path.exists():
        pytest.skip(f"no {path.name} beside the checkout")
    return read_trace(path)


@pytest.mark.parametrize(("trace", "order", "capacity", "expected"), CASES)
def test_lru_reaches_the_reference_hit_rate(trace: str, order: Order, capacity: int, expected: float) -> None:
    result = replay(trace_of(trace), "lru", LruEviction(), capacity, order)
    assert round(result.hit_rate, 4) == expected
