"""`lmcache-core bench pages`: an engine's pages stored and retrieved, against bare strided copies of the same pages.

The memory is laid out as in an engine: a region per layer, pages at a stride, ids in random order. The floor copies the
same pages between the same memory and the same slots of the pool, with known addresses, on one thread: page by page
(`memmove`, numpy), or a region at a time (numpy's and torch's own indexing); the best counts. Ours also pays for keys,
checks, leases and calls, and a store computes its checksums. `alone` is only the extension's copy of all these pages,
in one call into C. `CPU` is the CPU time of this process's threads, with the best bare copy by CPU time as the floor:
wall time also counts the wait for a time slice. Batches are larger than the caches, memory is written before anything
is timed, and the two sides take turns.
"""

from __future__ import annotations

import ctypes
import time
from argparse import ArgumentParser, Namespace
from array import array
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from importlib.util import find_spec
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

from lmcache_bench.copy import fresh_keys, threads_given
from lmcache_bench.rounds import Rounds
from lmcache_bench.workers import ending_cleanly
from lmcache_core import PageEntry, PageGroup, Region, Status
from lmcache_core.buffers import address_of
from lmcache_core.client import CopyThreads, threads_to_copy
from lmcache_core.errors import PoolError, UsageError
from lmcache_core.limits import COPY_THREADS_AUTO_MAX
from lmcache_core.native import native
from lmcache_core.pool.cores import usable_cores
from lmcache_core.pool.layout import Layout
from lmcache_core.tokens.namespace import Namespace as Names
from lmcache_testing.processes import ServerProcess

if TYPE_CHECKING:
    from lmcache_core import Client
    from lmcache_core.cli.bench.harness import Bench

KIB, MIB = 1 << 10, 1 << 20
SIZES = {"64 KiB": 64 * KIB, "1 MiB": MIB, "4 MiB": 4 * MIB, "16 MiB": 16 * MIB}
RATIO_MIN = {"64 KiB": 0.6, "1 MiB": 0.9, "4 MiB": 0.9, "16 MiB": 0.9}
LAYERS = 16
BATCH_BYTES = 64 * MIB  # twice the last-level cache of the machines that this was written on
SPARE = 2  # pages for each page of a batch: two batches alternate, and ids are spread out
REST_S = 0.005  # before each copy: torch's threads spin for some ms after one, and a time slice may be used up


def add_options(parser: ArgumentParser) -> None:
    """The options of this bench."""
    parser.add_argument("--copy-threads", type=threads_given, default="auto", help="of the client: auto, or a number")
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES), help="only objects of these sizes")


def run(options: Namespace, bench: Bench) -> None:
    """Each size, each variant."""
    if find_spec("numpy") is None:
        raise UsageError("bench pages needs numpy: pip install numpy")
    rounds, count = Rounds(quick=bench.quick), 4 if bench.quick else 21
    bench.steps(len(options.sizes))
    with ending_cleanly(), ServerProcess(3 * BATCH_BYTES) as server:
        with server.client(copy_threads=options.copy_threads) as client:
            for size in options.sizes:
                bench.step(f"objects of {size}")
                _Engine(client, size, _most(options.copy_threads)).record(bench, rounds.of(count))


def _most(threads: CopyThreads) -> int:
    return min(COPY_THREADS_AUTO_MAX, usable_cores()) if threads == "auto" else threads_to_copy(threads)


class Took(NamedTuple):
    """One batch: wall time, and CPU time of this process's threads."""

    wall_s: float
    cpu_s: float


Prepare = Callable[[Any, Any], dict[str, Callable[[], object]]]
"""From slots and page ids to the functions to time: "store" and "retrieve"."""


class _Engine:
    """The memory of an engine with objects of one size."""

    def __init__(self, client: Client, size: str, threads: int) -> None:
        import numpy as np

        self.client = client
        self.size = size
        self._threads = threads
        self.page_bytes = SIZES[size] // LAYERS
        self.objects = BATCH_BYTES // SIZES[size]
        pages = SPARE * self.objects
        stride = self.page_bytes + 4 * KIB  # as when a state is smaller than its block
        self.memory = np.full((LAYERS, pages, stride), 0xA5, np.uint8)
        self.namespace = Names(f"bench pages {size}", Layout("uint8", (SIZES[size],)))
        regions = [Region(self.memory[layer], 0, self.page_bytes, stride, pages) for layer in range(LAYERS)]
        self.pages = client.register_pages([PageGroup(self.namespace, regions, 1)])
        order = np.random.default_rng(1).permutation(pages).astype(np.int64)
        self._ids = [order[: self.objects].copy(), order[self.objects :].copy()]
        self._copies: dict[str, Prepare] = {
            "memmove": self._memmoves,
            "numpy": self._numpy,
            "numpy, a region at a time": self._numpy_regions,
        }
        if find_spec("torch") is not None:
            self._copies["torch, a region at a time"] = self._torch_regions
        self._alone: dict[str, Prepare] = {} if native is None else {"one thread": partial(self._native, 1)}
        if native is not None and threads > 1:
            self._alone["as many threads"] = partial(self._native, threads)

    def record(self, bench: Bench, rounds: Iterable[bool]) -> None:
        """`store SIZE`, `retrieve SIZE`, and the bare copy of each (alone), in GB/s; and their CPU time in s/GB."""
        times: dict[str, dict[str, list[Took]]] = {"store": {}, "retrieve": {}}
        for number, counts in enumerate(rounds):
            for name, prepare in {**self._copies, **self._alone}.items():
                self._note(times, name, counts, self._bare(prepare, number))
            self._note(times, "ours", counts, self._ours(number))
            self.client.clear(self.namespace)
        for group, ways in times.items():
            floor, name = max(_rate(ways[name]) for name in self._copies), f"{group} {self.size}"
            target = RATIO_MIN[self.size]
            bench.record(name, _rate(ways["ours"]), "GB/s", floor=floor, target=target, lower_is_better=False)
            for way in self._alone:
                bench.record(f"{name}, alone, {way}", _rate(ways[way]), "GB/s", floor=floor, lower_is_better=False)
            least = min(_cpu(ways[way]) for way in self._copies)
            bench.record(f"{name}, CPU", _cpu(ways["ours"]), "s/GB", floor=least, target=round(1 / target, 2))

    @staticmethod
    def _note(times: dict[str, dict[str, list[Took]]], name: str, counts: bool, took: dict[str, Took]) -> None:
        for group, each in took.items():
            if counts:
                times[group].setdefault(name, []).append(each)

    def _ours(self, number: int) -> dict[str, Took]:
        keys = fresh_keys(self.objects)
        stored, retrieved = (PageEntry(0, keys, self._ids[(number + at) % 2]) for at in range(2))
        return {
            "store": _timed(lambda: _expect(self.pages.store([stored]).statuses[0], Status.STORED)),
            "retrieve": _timed(lambda: _expect(self.pages.retrieve([retrieved]).statuses[0], Status.HIT)),
        }

    def _bare(self, prepare: Prepare, number: int) -> dict[str, Took]:
        """The same copies into slots of the pool, and out of them."""
        with self.client.prepare_store(fresh_keys(self.objects), namespace=self.namespace) as lease:
            _expect(lease.statuses, Status.GRANTED)
            slots = [lease.view(position) for position in range(self.objects)]
            took = {
                "store": _timed(prepare(slots, self._ids[number % 2])["store"]),
                "retrieve": _timed(prepare(slots, self._ids[(number + 1) % 2])["retrieve"]),
            }
            del slots
        return took

    def _pairs(self, slots: Sequence[memoryview], ids: Any) -> tuple[array[int], array[int]]:
        """The address of each part of a slot, and of its page."""
        inside, outside = array("Q"), array("Q")
        for slot, page in zip(map(address_of, slots), ids, strict=True):
            for layer in range(LAYERS):
                inside.append(slot + layer * self.page_bytes)
                outside.append(self.memory[layer, page].ctypes.data)
        return inside, outside

    def _memmoves(self, slots: Sequence[memoryview], ids: Any) -> dict[str, Callable[[], object]]:
        inside, outside = self._pairs(slots, ids)
        memmove, nbytes = ctypes.memmove, self.page_bytes

        def copy(targets: array[int], sources: array[int]) -> None:
            for target, source in zip(targets, sources, strict=True):
                memmove(target, source, nbytes)

        return {"store": partial(copy, inside, outside), "retrieve": partial(copy, outside, inside)}

    def _native(self, threads: int, slots: Sequence[memoryview], ids: Any) -> dict[str, Callable[[], object]]:
        inside, outside = self._pairs(slots, ids)
        return {
            "store": partial(native.copy_many, inside, outside, self.page_bytes, threads),
            "retrieve": partial(native.copy_many, outside, inside, self.page_bytes, threads),
        }

    def _numpy(self, slots: Sequence[memoryview], ids: Any) -> dict[str, Callable[[], object]]:
        import numpy as np

        pairs = []
        for slot, page in zip(slots, ids, strict=True):
            parts = np.frombuffer(slot, np.uint8).reshape(LAYERS, self.page_bytes)
            pairs += [(parts[layer], self.memory[layer, page, : self.page_bytes]) for layer in range(LAYERS)]
        copyto = np.copyto

        def store() -> None:
            for inside, outside in pairs:
                copyto(inside, outside)

        def retrieve() -> None:
            for inside, outside in pairs:
                copyto(outside, inside)

        return {"store": store, "retrieve": retrieve}

    def _numpy_regions(self, slots: Sequence[memoryview], ids: Any) -> dict[str, Callable[[], object]]:
        """If slots are at a fixed stride, mostly consecutive: one indexed copy per region."""
        import numpy as np

        grid = self._grid(slots)
        if grid is None:
            return self._numpy(slots, ids)
        inside = np.frombuffer(grid, np.uint8).reshape(self.objects, LAYERS, self.page_bytes)
        memory, nbytes = self.memory, self.page_bytes

        def store() -> None:
            for layer in range(LAYERS):
                inside[:, layer] = memory[layer, ids, :nbytes]

        def retrieve() -> None:
            for layer in range(LAYERS):
                memory[layer, ids, :nbytes] = inside[:, layer]

        return {"store": store, "retrieve": retrieve}

    def _torch_regions(self, slots: Sequence[memoryview], ids: Any) -> dict[str, Callable[[], object]]:
        import torch

        grid = self._grid(slots)
        if grid is None:
            return self._numpy(slots, ids)
        inside = torch.frombuffer(grid, dtype=torch.uint8).reshape(self.objects, LAYERS, self.page_bytes)
        memory, at = torch.from_numpy(self.memory), torch.from_numpy(ids)

        def store() -> None:
            for layer in range(LAYERS):
                inside[:, layer] = memory[layer, :, : self.page_bytes][at]

        def retrieve() -> None:
            for layer in range(LAYERS):
                memory[layer, :, : self.page_bytes][at] = inside[:, layer]

        return {"store": store, "retrieve": retrieve}

    def _grid(self, slots: Sequence[memoryview]) -> Any:
        """All slots as one buffer, if they are consecutive."""
        first, nbytes = address_of(slots[0]), SIZES[self.size]
        if any(address_of(slot) != first + at * nbytes for at, slot in enumerate(slots)):
            return None
        return (ctypes.c_ubyte * (self.objects * nbytes)).from_address(first)


def _timed(call: Callable[[], object]) -> Took:
    time.sleep(REST_S)
    cpu_s, began = time.process_time(), time.perf_counter()
    call()
    return Took(time.perf_counter() - began, time.process_time() - cpu_s)


def _rate(times: Sequence[Took]) -> float:
    """GB/s of a batch."""
    return BATCH_BYTES / median(took.wall_s for took in times) / 1e9


def _cpu(times: Sequence[Took]) -> float:
    """Seconds per GB."""
    return median(took.cpu_s for took in times) / BATCH_BYTES * 1e9


def _expect(statuses: Sequence[Status], wanted: Status) -> None:
    others = [status for status in statuses if status is not wanted]
    if others:
        raise PoolError(f"{len(others)} of {len(statuses)} keys were not {wanted}: {others[0]}")
