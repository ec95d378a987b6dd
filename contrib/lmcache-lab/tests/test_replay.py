"""What is counted as a hit, and that the replay counts it: against a second replay that shares no code with it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import pytest

from lmcache_core.errors import UsageError
from lmcache_core.kernel.contracts import Entry, EvictionPolicy
from lmcache_core.policies.lru import LruEviction
from lmcache_core.policies.noop import NoopEviction
from lmcache_lab.simulation import Order, replay
from lmcache_lab.workloads import SyntheticSettings, Trace, synthetic_trace


def lru_hits(requests: Sequence[Sequence[int]], capacity: int, order: Order) -> int:
    """LRU as the standard library has it."""
    store: OrderedDict[int, None] = OrderedDict()
    hits = 0
    for request in requests:
        hits += next((n for n, block in enumerate(request) if block not in store), len(request))
        for block in request if order is Order.FORWARD else reversed(request):
            if block in store:
                store.move_to_end(block)
                continue
            if len(store) == capacity:
                store.popitem(last=False)
            store[block] = None
    return hits


@pytest.mark.parametrize("order", Order)
@pytest.mark.parametrize("capacity", [1, 7, 60, 400, 100_000])
def test_lru_hits_are_those_of_an_ordered_dictionary(capacity: int, order: Order) -> None:
    trace = synthetic_trace(SyntheticSettings(sessions=40, seed=capacity))
    result = replay(trace, "lru", LruEviction(), capacity, order)
    assert result.hits == lru_hits(trace.requests, capacity, order)
    assert result.references == trace.references
    assert result.hit_rate == result.hits / trace.references


def test_only_leading_blocks_are_hits() -> None:
    trace = Trace("t", [[1, 2, 3], [9, 2, 3], [1, 2, 8, 3]])
    assert replay(trace, "lru", LruEviction(), 100).hits == 0 + 0 + 2


def test_walking_the_suffix_first_keeps_the_prefix() -> None:
    trace = Trace("t", [[1, 2, 3, 4], [5], [1, 2, 3, 4]])
    assert replay(trace, "lru", LruEviction(), 4, Order.FORWARD).hits == 0
    assert replay(trace, "lru", LruEviction(), 4, Order.SUFFIX_FIRST).hits == 3


def test_without_victims_what_came_first_stays() -> None:
    trace = Trace("t", [[1, 2], [3, 4], [1, 2], [3]])
    assert replay(trace, "noop", NoopEviction(), 2).hits == 2


def test_a_policy_is_told_the_capacity_before_anything_else() -> None:
    calls: list[str] = []

    class Recorder(LruEviction):
        def resize(self, capacity_bytes: int) -> None:
            calls.append(f"resize {capacity_bytes}")

        def insert(self, entries: Sequence[Entry]) -> None:
            calls.append("insert")
            super().insert(entries)

    policy: EvictionPolicy = Recorder()
    replay(Trace("t", [[1, 2]]), "r", policy, 5)
    assert calls == ["resize 5", "insert", "insert"]


def test_progress_ends_at_the_last_request() -> None:
    seen: list[int] = []
    replay(Trace("t", [[1]] * 600), "lru", LruEviction(), 5, progress=seen.append)
    assert seen == sorted(seen)
    assert seen[-1] == 600


def test_a_store_without_room_is_refused() -> None:
    with pytest.raises(UsageError, match="capacity must be 1 block or more, got 0"):
        replay(Trace("t", [[1]]), "lru", LruEviction(), 0)


def test_an_empty_trace_has_no_hit_rate_to_divide_by() -> None:
    assert replay(Trace("t", [[]]), "lru", LruEviction(), 1).hit_rate == 0.0
