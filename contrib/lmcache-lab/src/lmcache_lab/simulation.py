"""Replay a request trace through an eviction policy, with the policy objects that the server uses."""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from heapq import heappop, heappush
from typing import Any, NamedTuple

from lmcache_core.errors import UsageError
from lmcache_core.limits import KEY_BYTES
from lmcache_core.policies.contracts import Entry, EvictionPolicy
from lmcache_lab.workloads import Trace

PROGRESS_REQUESTS = 256  # requests between two progress reports: often enough to watch, rare enough not to cost time


class Order(StrEnum):
    """The order in which the blocks of a request are walked."""

    FORWARD = "forward"
    SUFFIX_FIRST = "suffix-first"  # last to first, as the server applies recency


class SimulationResult(NamedTuple):
    """The result of one policy on one trace. `hits` counts leading blocks that were resident, request by request."""

    trace: str
    policy: str
    capacity: int
    hits: int
    references: int

    @property
    def hit_rate(self) -> float:
        return self.hits / self.references if self.references else 0.0


class SimulatedEntry:
    """A resident block of size 1, as a policy sees it."""

    __slots__ = ("holds", "key", "namespace", "nbytes", "newer", "older", "policy_data")

    def __init__(self, key: bytes, nbytes: int = 1, namespace: int = 0) -> None:
        self.key = key
        self.namespace = namespace
        self.nbytes = nbytes
        self.holds = 0
        self.older: Any = None
        self.newer: Any = None
        self.policy_data: Any = None


def check_capacity(blocks: int) -> None:
    """Raises `UsageError` if nothing fits."""
    if blocks < 1:
        raise UsageError(f"capacity must be 1 block or more, got {blocks}")


def replay(
    trace: Trace,
    name: str,
    policy: EvictionPolicy,
    capacity: int,
    order: Order = Order.FORWARD,
    progress: Callable[[int], None] | None = None,
) -> SimulationResult:
    """Run every request of the trace, in order, against a store of `capacity` blocks that starts empty.

    A request's hits are its leading blocks that are resident when it arrives. Then its blocks are walked in `order`: a
    resident one is accessed, an absent one inserted, after an eviction if the store is full. If a policy names no
    victim, the block is not inserted. `progress` is called with the number of requests done.
    """
    check_capacity(capacity)
    policy.resize(capacity)
    resident: dict[int, Entry] = {}
    hits = references = 0
    for number, blocks in enumerate(trace.requests, 1):
        for block in blocks:
            if block not in resident:
                break
            hits += 1
        references += len(blocks)
        _walk(blocks if order is Order.FORWARD else blocks[::-1], resident, policy, capacity)
        if progress is not None and (number % PROGRESS_REQUESTS == 0 or number == len(trace.requests)):
            progress(number)
    return SimulationResult(trace.name, name, capacity, hits, references)


def _walk(blocks: list[int], resident: dict[int, Entry], policy: EvictionPolicy, capacity: int) -> None:
    for block in blocks:
        entry = resident.get(block)
        if entry is not None:
            policy.access((entry,))
            continue
        if len(resident) >= capacity:
            victims = policy.victims(1)
            policy.remove(victims)
            for victim in victims:
                del resident[int.from_bytes(victim.key, "big")]
            if not victims:
                continue
        entry = resident[block] = SimulatedEntry(block.to_bytes(KEY_BYTES, "big"))
        policy.insert((entry,))


def optimum(trace: Trace, capacity: int) -> SimulationResult:
    """What nobody can beat block by block: whatever is used again last goes first, or does not come in at all. Of the
    blocks of one request the last goes first. Source: Belady, "A study of replacement algorithms for a
    virtual-storage computer", IBM Systems Journal 1966, with bypass."""
    check_capacity(capacity)
    never = len(trace.requests)
    following: list[list[int]] = []  # for each block of each request, the next request that has it
    seen: dict[int, int] = {}
    for number in range(never - 1, -1, -1):
        blocks = trace.requests[number]
        following.append([seen.get(block, never) for block in blocks])
        seen.update(dict.fromkeys(blocks, number))
    resident: dict[int, int] = {}
    last: list[
        tuple[int, int, int]
    ] = []  # (-next use, -place in its request, block): those that go first, and old news
    hits = references = 0
    for blocks, nexts in zip(trace.requests, reversed(following), strict=True):
        for block in blocks:
            if block not in resident:
                break
            hits += 1
        references += len(blocks)
        for place, (block, coming) in enumerate(zip(blocks, nexts, strict=True)):
            if block not in resident and len(resident) >= capacity:
                while resident.get(last[0][2]) != -last[0][0]:
                    heappop(last)
                if (-coming, -place) <= last[0][:2]:
                    continue
                del resident[heappop(last)[2]]
            resident[block] = coming
            heappush(last, (-coming, -place, block))
    return SimulationResult(trace.name, "optimum", capacity, hits, references)
