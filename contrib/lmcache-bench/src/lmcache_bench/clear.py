"""`lmcache-core bench clear`: what a clear of everything costs its caller, and what other clients notice. Objects are
one page, and their bytes are not touched: only their number counts. The pool takes 4 GiB of memory, 400 MiB with
--quick.
"""

from __future__ import annotations

import time
from argparse import ArgumentParser, Namespace
from statistics import quantiles
from typing import TYPE_CHECKING

from lmcache_bench.workers import WorkerProcess, ending_cleanly, orders
from lmcache_core import Client
from lmcache_core.errors import PoolError
from lmcache_core.limits import KEY_BYTES, PAGE_BYTES, SLAB_BYTES
from lmcache_core.pool.layout import Layout
from lmcache_core.tokens.namespace import Namespace as Names
from lmcache_testing.processes import ServerProcess

if TYPE_CHECKING:
    from multiprocessing.connection import Connection
    from pathlib import Path

    from lmcache_core.cli.bench.harness import Bench

OBJECTS, OBJECTS_QUICK = 1_000_000, 100_000
BATCH = 4096
NAMESPACE = Names("bench", Layout("uint8", (PAGE_BYTES,)))
ALONE_S = 2.0
P99_MS_MAX, LONGEST_MS_MAX = 5.0, 20.0


def add_options(parser: ArgumentParser) -> None:
    """No options of its own."""


def run(options: Namespace, bench: Bench) -> None:
    """Round trips alone, then beside the clear."""
    objects = OBJECTS_QUICK if bench.quick else OBJECTS
    bench.steps(3)
    with ending_cleanly(), ServerProcess(_pool_bytes(objects)) as server, server.client() as client:
        bench.step(f"{objects:,} objects stored")
        _fill(client, objects)
        bench.step("round trips alone")
        alone_ms: list[float] = []
        until_s = time.monotonic() + ALONE_S
        while time.monotonic() < until_s:
            alone_ms.append(_noop_ms(client))
        bench.step("round trips beside the clear")
        with WorkerProcess(_clearer, server.name, server.runtime_dir) as other:
            other.send("clear")
            beside_ms: list[float] = []
            while client.status()["l1"]["objects_by_state"]["ready"]:
                beside_ms += [_noop_ms(client) for _ in range(50)]
            took_s, cleared = other.receive()
        if cleared != objects:
            raise PoolError(f"{cleared:,} objects were cleared, not {objects:,}: measured nothing")
    beside = f"beside a clear of {objects:,} objects"
    bench.record("clear, from call to answer", took_s, "s")
    bench.record("clear, for each object", took_s * 1e6 / objects, "us")
    p99, longest = f"noop p99 {beside}", f"longest noop {beside}"
    bench.record(p99, _p99(beside_ms), "ms", floor=_p99(alone_ms), target=P99_MS_MAX, target_on="value")
    bench.record(longest, max(beside_ms), "ms", floor=max(alone_ms), target=LONGEST_MS_MAX, target_on="value")


def _pool_bytes(objects: int) -> int:
    """Room for all objects, in whole slabs."""
    return objects * PAGE_BYTES + SLAB_BYTES * 4


def _fill(client: Client, objects: int) -> None:
    for first in range(0, objects, BATCH):
        keys = [number.to_bytes(KEY_BYTES, "big") for number in range(first, min(objects, first + BATCH))]
        client.prepare_store(keys, namespace=NAMESPACE).commit()


def _noop_ms(client: Client) -> float:
    began = time.perf_counter()
    client.noop()
    return (time.perf_counter() - began) * 1e3


def _p99(times_ms: list[float]) -> float:
    return quantiles(times_ms, n=100)[98]


def _clearer(connection: Connection, name: str, runtime_dir: Path) -> None:
    with Client.connect(name, runtime_dir=runtime_dir, maps_pool=False) as client:
        client.noop()
        for _ in orders(connection):
            began = time.perf_counter()
            cleared = client.clear(NAMESPACE)
            connection.send((time.perf_counter() - began, cleared.objects))
