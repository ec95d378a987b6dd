"""Hit rates on public traces, where a copy of them lies beside the checkout (shared/traces)."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

from lmcache_core import Kind
from lmcache_core.plugins.loader import load_plugins
from lmcache_lab.simulation import replay
from lmcache_lab.workloads import Trace, read_trace

TRACES = Path(__file__).resolve().parents[3].parent / "shared" / "traces"
EXACT = 0.00005  # four digits
CLOSE = 0.005  # half a point: these policies leave room for interpretation
TOLERANCE = {"fifo": EXACT, "lfu": EXACT, "arc": CLOSE, "s3fifo": CLOSE, "lruk": CLOSE}
CAPACITIES = (1000, 3000, 10000, 30000, 50000, 100000)
REFERENCE = {
    ("conversation", "fifo"): (0.0434, 0.0627, 0.1815, 0.2944, 0.3335, 0.3563),
    ("conversation", "lfu"): (0.0481, 0.0747, 0.1318, 0.2759, 0.3438, 0.3631),
    ("conversation", "s3fifo"): (0.0556, 0.0874, 0.1952, 0.3039, 0.3490, 0.3624),
    ("conversation", "arc"): (0.0529, 0.0869, 0.2246, 0.3107, 0.3433, 0.3631),
    ("conversation", "lruk"): (0.081, 0.134, 0.215, 0.279),
    ("synthetic", "fifo"): (0.0787, 0.1838, 0.3989, 0.5941, 0.6396),
    ("synthetic", "lfu"): (0.0401, 0.1289, 0.3578, 0.6260, 0.6396),
    ("synthetic", "s3fifo"): (0.0830, 0.1819, 0.4134, 0.6116, 0.6396),
    ("synthetic", "arc"): (0.0909, 0.1965, 0.4315, 0.6260, 0.6396),
    ("synthetic", "lruk"): (0.088, 0.201, 0.440, 0.626),
}
QUICK = {("synthetic", 3000), ("synthetic", 10000), ("conversation", 10000)}
CASES = [
    pytest.param(trace, policy, capacity, expected, marks=[] if (trace, capacity) in QUICK else [pytest.mark.slow])
    for (trace, policy), row in REFERENCE.items()
    for capacity, expected in zip(CAPACITIES, row, strict=False)
]


@cache
def trace_of(name: str) -> Trace:
    path = TRACES / f"{name}_trace.jsonl"
    if not path.exists():
        pytest.skip(f"no {path.name} beside the checkout")
    return read_trace(path)


@pytest.mark.parametrize(("trace", "policy", "capacity", "expected"), CASES)
def test_the_policy_reaches_the_reference_hit_rate(trace: str, policy: str, capacity: int, expected: float) -> None:
    built = load_plugins().build(Kind.EVICTION_POLICY, policy)
    result = replay(trace_of(trace), policy, built, capacity)
    assert result.hit_rate == pytest.approx(expected, abs=TOLERANCE[policy] + 1e-9)


# The best of lru, lruk, arc, s3fifo and fifo, and what `adaptive` may be behind it.
BEST = {
    "agents": {147: 0.221, 293: 0.447, 586: 0.703, 1221: 0.910, 2442: 0.953},
    "conversation": {1000: 0.081, 3000: 0.134, 10000: 0.2246, 30000: 0.3257, 50000: 0.3546},
    "synthetic": {1000: 0.0909, 3000: 0.201, 10000: 0.440, 30000: 0.626},
}


@pytest.mark.parametrize(
    ("trace", "capacity"),
    [
        pytest.param(trace, capacity, marks=[] if (trace, capacity) in QUICK else [pytest.mark.slow])
        for trace, row in BEST.items()
        for capacity in row
    ],
)
def test_adaptive_is_at_most_half_a_point_behind_the_best_at_every_size(trace: str, capacity: int) -> None:
    built = load_plugins().build(Kind.EVICTION_POLICY, "adaptive")
    assert replay(trace_of(trace), "adaptive", built, capacity).hit_rate >= BEST[trace][capacity] - CLOSE
