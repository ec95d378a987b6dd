"""`lmcache-core bench alloc`: slots allocated and freed, from a thousand to a million residents.

First the allocator alone, then the whole kernel around it: leases, index, policy and marks are part of a slot's cost.
No pool memory is touched, so a million residents need no pool of that size.

All times are CPU time of the thread: the kernel never waits, and delays by other processes on a shared machine (4 ms at
a time) are not its stalls. In a 95 % full area slots are freed oldest first, as eviction does. The rows named
"scattered" free random slots of the whole area instead: each of them is a cache miss, so they have no target.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import random
import time
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from lmcache_core.kernel.allocator import Allocator, SizeClass, slab_bytes_for
from lmcache_core.kernel.answers import Reason
from lmcache_core.kernel.config import KernelConfig
from lmcache_core.kernel.kernel import Kernel
from lmcache_core.kernel.objects import Incarnation
from lmcache_core.kernel.states import State
from lmcache_core.policies.lru import LruEviction

if TYPE_CHECKING:
    from lmcache_core.cli.bench.harness import Bench

SUMMARY = "allocate and free, up to a million residents"

BATCH_KEYS = 512
UNIFORM = (64 << 10,)
MIXED = (64 << 10, 96 << 10, 160 << 10, 1 << 20)
RESIDENTS = (1_000, 10_000, 100_000, 1_000_000)
FULL = 0.95  # share of the slots in use in the "95 % full" rows
TARGET_US = 1.0  # per object, allocate and free together, in batches
TARGET_HEAP_BYTES = 400
FLAT = 2.0  # the largest ÷ the best: working sets outgrow the caches on the way, and machines are shared
SESSION, NAMESPACE = 1, 1


@dataclass
class Timing:
    """Seconds of each batch, and how many objects it moved."""

    seconds: list[float] = field(default_factory=list)
    objects: int = 0

    def mean_us(self) -> float:
        return sum(self.seconds) / self.objects * 1e6

    def quantile_us(self, share: float) -> float:
        """Of whole batches, per object."""
        ordered = sorted(self.seconds)
        per_batch = ordered[min(len(ordered) - 1, int(share * len(ordered)))]
        return per_batch / (self.objects / len(ordered)) * 1e6

    def worst_ms(self) -> float:
        return max(self.seconds) * 1e3


def add_options(parser: argparse.ArgumentParser) -> None:
    """The bench's own options."""
    parser.add_argument("--residents-max", type=int, default=RESIDENTS[-1], help="the most objects resident at once")
    parser.add_argument("--seed", type=int, default=1, help="of the order in which slots are given back")


def run(options: argparse.Namespace, bench: Bench) -> None:
    """Record every row."""
    residents = [count for count in RESIDENTS if count <= options.residents_max] or [options.residents_max]
    rounds = 100 if bench.quick else 1_000
    bench.steps(2 * 3 * len(residents) + len(residents) + 1)
    means: dict[tuple[str, str], list[float]] = {}
    for name, sizes in (("uniform", UNIFORM), ("mixed", MIXED)):
        for fill in ("empty", "95 % full", "95 % full, scattered"):
            for count in residents:
                bench.step(f"{name}, {fill}, {count:,} slots")
                chance = random.Random(options.seed) if "scattered" in fill else None
                timing = _slots(count, sizes, 0.0 if fill == "empty" else FULL, rounds, chance)
                row = f"allocate + free {name}, {fill}, {count:,}"
                target = None if "scattered" in fill else TARGET_US
                bench.record(row, timing.mean_us(), "us/object", target=target)
                bench.record(f"{row}: median", timing.quantile_us(0.5), "us/object")
                bench.record(f"{row}: p99.9", timing.quantile_us(0.999), "us/object")
                bench.record(f"{row}: worst stall", timing.worst_ms(), "ms")
                means.setdefault((name, fill), []).append(timing.mean_us())
    for (name, fill), of_counts in means.items():
        growth = of_counts[-1] / min(of_counts)
        target = None if "scattered" in fill else FLAT
        bench.record(f"growth {name}, {fill}, to {residents[-1]:,}", growth, "ratio", target=target)
    for count in residents:
        bench.step(f"whole kernel, {count:,} residents")
        _whole_kernel(bench, count, rounds)
    bench.step("heap of a resident")
    heap_count = min(residents[-1], 200_000 if bench.quick else 1_000_000)
    bench.record(f"heap a resident, {heap_count:,}", _heap_bytes(heap_count), "bytes", target=TARGET_HEAP_BYTES)


@contextmanager
def _without_collector() -> Iterator[None]:
    """As in the server: no full collection scans the residents."""
    gc.collect()
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


# --- the allocator alone ------------------------------------------------------------------------------------


def _slots(count: int, sizes: Sequence[int], fill: float, rounds: int, scattered: random.Random | None) -> Timing:
    """Batches allocated and freed in an area of `count` slots, of which `fill` are always in use."""
    per_size = max(1, count // len(sizes))
    unit_bytes = slab_bytes_for(sum(sizes) * per_size)
    area = sum(-(-size * per_size // unit_bytes) + 1 for size in sizes) * unit_bytes
    allocator = Allocator(area, 0, unit_bytes)
    allocator.populate(area)
    classes = [allocator.size_class(size) for size in sizes]
    batch = max(1, min(BATCH_KEYS, int(per_size * (1 - FULL))))
    timing = Timing()
    with _without_collector():
        standing = {size_class: _blanks(int(per_size * fill)) for size_class in classes}
        for size_class, objects in standing.items():
            _must_place(allocator, size_class, objects)
        for turn in range(rounds):
            size_class = classes[turn % len(classes)]
            resident, coming = standing[size_class], _blanks(batch)
            places = _leaving(resident, turn // len(classes), batch, scattered)
            going = [resident[at] for at in places] or coming
            start = time.thread_time()
            _must_place(allocator, size_class, coming)
            allocator.free(going)
            timing.seconds.append(time.thread_time() - start)
            timing.objects += batch
            for at, item in zip(places, coming, strict=False):
                resident[at] = item
    return timing


def _leaving(resident: list[Incarnation], turn: int, batch: int, scattered: random.Random | None) -> list[int]:
    """Which residents to free: the oldest (each turn's batch takes the place of the previous one), or random ones."""
    if not resident:
        return []
    if scattered is not None:
        return scattered.sample(range(len(resident)), batch)
    first = turn * batch % len(resident)
    return [at % len(resident) for at in range(first, first + batch)]


def _must_place(allocator: Allocator, size_class: SizeClass, objects: Sequence[Incarnation]) -> None:
    if allocator.place(size_class, objects) < len(objects):
        raise AssertionError(f"no room for {len(objects)} slots of {size_class.slot_bytes:,} bytes")


def _blanks(count: int) -> list[Incarnation]:
    made = []
    for _ in range(count):
        item = Incarnation()
        item.state = State.WRITING
        item.holds = 0
        made.append(item)
    return made


# --- the whole kernel ---------------------------------------------------------------------------------------


def _kernel(count: int) -> Kernel:
    unit_bytes = slab_bytes_for(count * UNIFORM[0])
    area = -(-count * UNIFORM[0] // unit_bytes) * unit_bytes
    kernel = Kernel(KernelConfig(pool_bytes=area), LruEviction(), epoch=1)
    kernel.add_memory(area)
    kernel.register_layout(1, UNIFORM[0])
    kernel.open_session(SESSION, uid=0)
    kernel.attach_session(SESSION, row=0)
    return kernel


def _page(first: int, count: int) -> list[bytes]:
    return [hashlib.sha256(number.to_bytes(8, "little")).digest() for number in range(first, first + count)]


def _store(kernel: Kernel, keys: Sequence[bytes]) -> None:
    lease_id = kernel.prepare_store(SESSION, NAMESPACE, 1, keys, 0.0).lease_id
    kernel.commit_store(SESSION, lease_id, 0.0)
    kernel.take_effects()


def _fill(kernel: Kernel, count: int) -> None:
    for first in range(0, count, BATCH_KEYS):
        _store(kernel, _page(first, min(BATCH_KEYS, count - first)))


def _whole_kernel(bench: Bench, count: int, rounds: int) -> None:
    """The cost per key with `count` residents: a store that must first evict, and a read."""
    kernel = _kernel(count)
    batch = min(BATCH_KEYS, count // 2)
    with _without_collector():
        filling = Timing()
        for first in range(0, count, batch):
            keys = _page(first, min(batch, count - first))
            _timed(filling, kernel, keys, _store)
        evicting, reading, dropping = Timing(), Timing(), Timing()
        following = count
        for turn in range(rounds):
            keys = _page(following + turn * batch, batch)
            _timed(evicting, kernel, keys, _store)
            _timed(reading, kernel, keys, _read)
        for turn in range(min(rounds, count // batch)):
            keys = _page(following + (rounds - 1 - turn) * batch, batch)
            _timed(dropping, kernel, keys, _drop)
    for name, timing, target_us in (
        ("store into free space", filling, 1.9),
        ("store, evicting", evicting, 3.0),
        ("retrieve + finish", reading, 1.5),
        ("drop", dropping, None),
    ):
        row = f"kernel {name}, {count:,} residents"
        bench.record(row, timing.mean_us(), "us/key", target=target_us)
        bench.record(f"{row}: worst stall", timing.worst_ms(), "ms")


def _timed(
    timing: Timing, kernel: Kernel, keys: Sequence[bytes], call: Callable[[Kernel, Sequence[bytes]], None]
) -> None:
    start = time.thread_time()
    call(kernel, keys)
    timing.seconds.append(time.thread_time() - start)
    timing.objects += len(keys)


def _read(kernel: Kernel, keys: Sequence[bytes]) -> None:
    lease_id = kernel.prepare_retrieve(SESSION, NAMESPACE, keys, 0.0).lease_id
    kernel.finish_read(SESSION, lease_id, 0.0)
    kernel.take_effects()


def _drop(kernel: Kernel, keys: Sequence[bytes]) -> None:
    kernel.drop(NAMESPACE, keys, 0.0, Reason.DROPPED)
    kernel.take_effects()


def _heap_bytes(count: int) -> float:
    """Heap per resident, including key, index, list links and slot bookkeeping."""
    kernel = _kernel(count)
    with _without_collector():
        tracemalloc.start()
        try:
            before = tracemalloc.get_traced_memory()[0]
            _fill(kernel, count)
            return (tracemalloc.get_traced_memory()[0] - before) / count
        finally:
            tracemalloc.stop()
