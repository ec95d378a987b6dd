"""Our policies and our optimum beside another simulator's, on the same references: `nox -s oracle` installs it."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

from lmcache_core import Kind
from lmcache_core.plugins.loader import load_plugins
from lmcache_lab.simulation import optimum, replay
from lmcache_lab.workloads import Trace, parse_synthetic, read_trace, synthetic_trace

theirs = pytest.importorskip("libcachesim", reason="libcachesim is not installed: nox -s oracle")

TRACES = Path(__file__).resolve().parents[3].parent / "shared" / "traces"
SAME = 0.0
CLOSE = 0.0025  # a quarter of a point: the papers leave room for interpretation
POLICIES = {
    "lru": (theirs.LRU, SAME),
    "fifo": (theirs.FIFO, SAME),
    "lfu": (theirs.LFU, SAME),
    "arc": (theirs.ARC, CLOSE),
    "s3fifo": (theirs.S3FIFO, CLOSE),
}


@cache
def references(name: str) -> list[int]:
    """The blocks of all requests, one after the other."""
    path = TRACES / f"{name}_trace.jsonl"
    made = "sessions=400,skew=1.0,seed=0"
    trace = read_trace(path) if path.exists() else synthetic_trace(parse_synthetic(made))
    return [block for blocks in trace.requests for block in blocks]


def their_hits(cache: object, blocks: list[int], *, next_uses: list[int] | None = None) -> int:
    hits = 0
    for at, block in enumerate(blocks):
        request = theirs.Request()
        request.obj_id, request.obj_size, request.clock_time = block + 1, 1, at
        if next_uses is not None:
            request.next_access_vtime = next_uses[at]
        hits += bool(cache.get(request))  # type: ignore[attr-defined]
    return hits


@pytest.mark.parametrize("capacity", [147, 586, 2442])
@pytest.mark.parametrize("policy", POLICIES)
def test_the_policy_hits_what_another_implementation_of_it_hits(policy: str, capacity: int) -> None:
    blocks = references("agents")
    single = Trace("single", [[block] for block in blocks])  # so that no hit depends on another block
    ours = replay(single, policy, load_plugins().build(Kind.EVICTION_POLICY, policy), capacity)
    cache, tolerance = POLICIES[policy]
    hits = their_hits(cache(cache_size=capacity), blocks)
    assert ours.hits > 0
    assert abs(ours.hits - hits) <= tolerance * len(blocks)


@pytest.mark.parametrize("capacity", [147, 586, 2442])
def test_nobody_hits_more_than_the_optimum(capacity: int) -> None:
    """Theirs stores every block, ours may leave one out: ours is at least as good, and not better by much."""
    blocks = references("agents")
    next_uses, seen = [], {}
    for at in range(len(blocks) - 1, -1, -1):
        next_uses.append(seen.get(blocks[at], 1 << 62))
        seen[blocks[at]] = at
    best = optimum(Trace("single", [[block] for block in blocks]), capacity).hits
    hits = their_hits(theirs.Belady(cache_size=capacity), blocks, next_uses=next_uses[::-1])
    assert hits <= best <= hits + 0.02 * len(blocks)
