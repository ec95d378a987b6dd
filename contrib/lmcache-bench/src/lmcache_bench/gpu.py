"""`lmcache-core bench gpu`: pages of a GPU stored and retrieved, against bare copies between it and pinned memory.

The floor is `torch.Tensor.copy_(…, non_blocking=True)` of the same bytes in one piece, between the device and a pinned
tensor, which torch gives to `cudaMemcpyAsync`. Ours moves them page by page, through the index and the leases, and a
store sums what it has copied. The two sides take turns; all figures are medians.

`hidden` is the share of a copy's time that does not prolong what the engine computes beside it: (compute + copy - both)
÷ copy. `blocked` is how long `store_start` keeps its caller while the engine's stream is busy, which is what vLLM's
`wait_for_save` costs. With `--device cpu` the same runs over host memory: a rehearsal, whose figures say nothing of a
GPU.
"""

from __future__ import annotations

import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import TYPE_CHECKING, Any

from lmcache_bench.copy import fresh_keys
from lmcache_bench.rounds import Rounds
from lmcache_bench.workers import ending_cleanly
from lmcache_core import PageGroup, Region
from lmcache_core.errors import UsageError
from lmcache_core.native import why_not as why_no_extension
from lmcache_core.pool.layout import Layout
from lmcache_core.tokens.namespace import Namespace as Names
from lmcache_testing.processes import ServerProcess

if TYPE_CHECKING:
    from lmcache_core import Client
    from lmcache_core.cli.bench.harness import Bench
    from lmcache_core.client import Pages

KIB, MIB = 1 << 10, 1 << 20
PAGES = {"64 KiB": 64 * KIB, "256 KiB": 256 * KIB, "1 MiB": MIB}
LAYERS = 16
BATCH_BYTES, BATCH_BYTES_QUICK = 512 * MIB, 64 * MIB
RATIO_MIN = 0.9
BLOCKED_MS_MAX = 1.0
COMPUTE_ROUNDS = 8  # multiplications, so that they take about as long as a copy


def add_options(parser: ArgumentParser) -> None:
    """The options of this bench."""
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: a rehearsal in host memory")
    parser.add_argument("--pages", nargs="+", choices=PAGES, default=list(PAGES), help="only pages of these sizes")


def why_not(device: str) -> str:
    """Why the bench cannot run here; empty: it can."""
    try:
        import torch
    except ImportError:
        return "torch is not installed"
    if why_no_extension:
        return f"the C extension is not in use: {why_no_extension}"
    if device == "cuda" and not torch.cuda.is_available():
        return "torch sees no GPU on this machine"
    return ""


def run(options: Namespace, bench: Bench) -> None:
    """Each size of pages."""
    if reason := why_not(options.device):
        raise UsageError(f"bench gpu measures copies of a GPU's memory: {reason}")
    nbytes = BATCH_BYTES_QUICK if bench.quick else BATCH_BYTES
    rounds, count = Rounds(quick=bench.quick), 3 if bench.quick else 11
    bench.steps(len(options.pages))
    with ending_cleanly(), ServerProcess(3 * nbytes) as server, server.client(copy_threads=4) as client:
        if options.device == "cuda":
            client.pin_memory()
        for size in options.pages:
            bench.step(f"pages of {size}")
            _Engine(client, options.device, size, nbytes).record(bench, rounds, count)


class _Engine:
    """Memory of an engine on a device: a region for each layer."""

    def __init__(self, client: Client, device: str, size: str, nbytes: int) -> None:
        import torch

        self._torch: Any = torch
        self._size, self._nbytes, self._cuda = size, nbytes, device == "cuda"
        page = PAGES[size]
        self._objects = nbytes // (page * LAYERS)
        self._names = Names(f"bench gpu {size}", Layout("uint8", (page * LAYERS,)))
        self._memory = torch.randint(0, 256, (nbytes,), dtype=torch.uint8, device=device)
        self._pinned = torch.empty(nbytes, dtype=torch.uint8, pin_memory=self._cuda)
        share = self._objects * page
        layers = [Region(self._memory, at * share, page, page, self._objects, device) for at in range(LAYERS)]
        self._pages: Pages = client.register_pages([PageGroup(self._names, layers, 1)])
        self._client = client
        side = 4096 if self._cuda else 256
        self._matrix = torch.randn(side, side, device=device)

    def record(self, bench: Bench, rounds: Rounds, count: int) -> None:
        """All figures of this size."""
        ids = list(range(self._objects))
        rows: list[tuple[float, ...]] = []
        for counts in rounds.of(count):
            keys = fresh_keys(self._objects)
            store_s = self._timed(partial(self._pages.store, [(0, keys, ids)]))
            out_s = self._timed(lambda: self._pinned.copy_(self._memory, non_blocking=True))
            retrieve_s = self._timed(partial(self._pages.retrieve, [(0, keys, ids)]))
            in_s = self._timed(lambda: self._memory.copy_(self._pinned, non_blocking=True))
            compute_s = self._timed(self._compute)
            both_s, blocked_s = self._beside(fresh_keys(self._objects), ids)
            self._client.clear(self._names)
            if counts:
                rows.append((store_s, out_s, retrieve_s, in_s, compute_s, both_s, blocked_s))
        stores, outs, retrieves, ins, computes, boths, blocked = (list(each) for each in zip(*rows, strict=True))
        size, gb = self._size, self._nbytes / 1e9
        for name, ours, bare in (("store", stores, outs), ("retrieve", retrieves, ins)):
            floor = gb / median(bare)
            bench.record(f"{name}, pages of {size}", gb / median(ours), "GB/s", floor=floor, target=RATIO_MIN,
                         lower_is_better=False)  # fmt: skip
        hidden = [(2 * c + s - b) / s for c, s, b in zip(computes, stores, boths, strict=True)]
        bench.record(f"store hidden under compute, pages of {size}", median(hidden), "share")
        bench.record(f"store_start blocked, pages of {size}", median(blocked) * 1e3, "ms", target=BLOCKED_MS_MAX)

    def _timed(self, call: Callable[[], object]) -> float:
        """Seconds until the device has done it."""
        self._synchronize()
        began_s = time.perf_counter()
        call()
        self._synchronize()
        return time.perf_counter() - began_s

    def _beside(self, keys: list[bytes], ids: list[int]) -> tuple[float, float]:
        """Two forwards, and a store of what the first has made: seconds of all, and of the call."""
        self._synchronize()
        began_s = time.perf_counter()
        self._compute()  # the forward that has made these pages
        called_s = time.perf_counter()
        job = self._pages.store_start([(0, keys, ids)])
        blocked_s = time.perf_counter() - called_s
        self._compute()  # the next one
        job.wait()
        self._synchronize()
        return time.perf_counter() - began_s, blocked_s

    def _compute(self) -> None:
        matrix = self._matrix
        for _ in range(COMPUTE_ROUNDS):
            matrix = matrix @ self._matrix

    def _synchronize(self) -> None:
        if self._cuda:
            self._torch.cuda.synchronize()
