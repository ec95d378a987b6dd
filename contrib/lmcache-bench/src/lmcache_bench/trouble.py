"""`lmcache-core bench l2 --tier mock`: what a tier in trouble, or a busy one, costs all other calls.

Servers with and without the tier run side by side and take turns, so that a ratio compares the same second on the same
machine. It is the mock tier, so that "a hundred times too slow" and "hung" are exact.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median, quantiles
from typing import TYPE_CHECKING, Any

from lmcache_bench.workers import WorkerProcess, orders
from lmcache_core.errors import PluginError, TierError
from lmcache_core.plugins.suggest import install_command
from lmcache_core.pool.layout import Layout
from lmcache_core.tokens.namespace import Namespace
from lmcache_testing.processes import ServerProcess

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    from lmcache_core import Client
    from lmcache_core.cli.bench.harness import Bench

OBJECT_BYTES = 64 << 10
NAMESPACE = Namespace("bench", Layout("uint8", (OBJECT_BYTES,)))
POOL_BYTES = 64 << 20
STORE_KEYS = 16
STORE_P99_RATIO = 1.5
LOOKUP_KEYS = 512
LOOKUP_RATIO = 1.1
NOOP_P99_MS = 2.0
TIER_OBJECTS = 100_000
TIER_OBJECTS_QUICK = 20_000
SERVING_S = 1.0
SLOW_BYTES_S = "8MiB"  # the bench stores at least 100 times as fast
HEALTHY_S = 60.0  # a safety net: normally seconds


class TierServer(ServerProcess):
    """A bench server with its own settings."""

    def __init__(self, *, populated: bool = True, **settings: str) -> None:
        super().__init__(POOL_BYTES, ready_populated=populated)
        self._settings = settings

    def _command(self) -> list[str]:
        flags = [
            argument for name, value in self._settings.items() for argument in (f"--{name.replace('__', '.')}", value)
        ]
        return [*super()._command(), *flags]


def run(bench: Bench) -> None:
    """Record every cost of a tier."""
    bench.steps(5)
    with TierServer() as bare:
        bench.step("stores with a tier that is 100 times too slow")
        _stores(bench, bare)
        bench.step("lookups with a hung tier")
        _lookups(bench, bare)
        bench.step("noop beside stores and loads")
        _noop(bench, bare)
    bench.step("stores of twice the pool")
    _sustained(bench)
    bench.step("start with many objects")
    _start(bench)


# --- a slow tier ----------------------------------------------------------------------------------------------


def _stores(bench: Bench, bare: TierServer) -> None:
    count = 2000 if bench.quick else 8000
    with TierServer(l2__slow__type="mock", l2__slow__bandwidth_bytes_s=SLOW_BYTES_S, drain_s="0.1") as slow:
        with bare.client() as one, slow.client() as two:
            times: dict[Client, list[float]] = {one: [], two: []}
            for number in range(count + 100):
                if number == 100:
                    began_s = [_loop_cpu_s(server) for server in (bare, slow)]
                for client in (one, two) if number % 2 else (two, one):
                    keys = [os.urandom(32) for _ in range(STORE_KEYS)]
                    began = time.perf_counter()
                    lease = client.prepare_store(keys, namespace=NAMESPACE)
                    lease.commit()
                    if number >= 100:  # by then the pool is full
                        times[client].append(time.perf_counter() - began)
            ended_s = [_loop_cpu_s(server) for server in (bare, slow)]
            behind = two.status()["tiers"]["stores"]
    if not behind["counts"].get("lost_evicted"):
        raise TierError("the slow tier kept up: this machine is too slow for this bench")
    name = "with a tier 100 times too slow"
    bench.record(
        f"store p99, {STORE_KEYS} keys, {name}", _p99(times[two]) * 1e6, "us",
        floor=_p99(times[one]) * 1e6, target=STORE_P99_RATIO,
    )  # fmt: skip
    bench.record(
        f"store median, {STORE_KEYS} keys, {name}", median(times[two]) * 1e6, "us", floor=median(times[one]) * 1e6
    )
    without, beside = ((end - begin) / count for begin, end in zip(began_s, ended_s, strict=True))
    bench.record(f"CPU of the loop, a store of {STORE_KEYS} keys, {name}", beside * 1e6, "us", floor=without * 1e6)


# --- a hung tier ----------------------------------------------------------------------------------------------


def _lookups(bench: Bench, bare: TierServer) -> None:
    count = 400 if bench.quick else 3000
    with TierServer(l2__hung__type="mock", l2__hung__faults="any hang", drain_s="0.1") as hung:
        with bare.client() as one, hung.client() as two:
            keys = [os.urandom(32) for _ in range(LOOKUP_KEYS)]
            for client in (one, two):
                lease = client.prepare_store(keys, namespace=NAMESPACE)
                lease.commit()
            two.lookup([os.urandom(32)], namespace=NAMESPACE)  # its lanes hang from now on
            times: dict[Client, list[float]] = {one: [], two: []}
            for number in range(count):
                for client in (one, two) if number % 2 else (two, one):
                    began = time.perf_counter()
                    found = client.lookup(keys, namespace=NAMESPACE)
                    times[client].append(time.perf_counter() - began)
                    assert found.hits == LOOKUP_KEYS
    bench.record(
        f"lookup of {LOOKUP_KEYS} hits, hung tier", median(times[two]) * 1e6, "us",
        floor=median(times[one]) * 1e6, target=LOOKUP_RATIO,
    )  # fmt: skip


# --- a busy tier ----------------------------------------------------------------------------------------------


def _work(connection: Connection, name: str, runtime_dir: str) -> None:
    """A worker that stores to the tier and loads from it without pauses."""
    from lmcache_core import Client

    source = [os.urandom(OBJECT_BYTES) for _ in range(64)]
    with Client.connect(name, runtime_dir=runtime_dir) as client:
        for _ in orders(connection):
            moved = 0
            while not connection.poll():
                keys = [os.urandom(32) for _ in source]
                client.store(keys, source, namespace=NAMESPACE)
                # Rarely: a status costs the loop as much as fifty noops, and the tier is to be measured.
                _until(lambda: not _pending(client), pause_s=0.01)
                client.clear(NAMESPACE)
                moved += client.lookup(keys, namespace=NAMESPACE, wait_s=10).hits
            connection.recv()
            connection.send(moved)


def _noop(bench: Bench, bare: TierServer) -> None:
    seconds = 6.0 if bench.quick else 20.0
    with (
        TierServer(l2__mem__type="mock", l2__mem__capacity_bytes="128MiB") as server,
        server.client() as client,
        bare.client() as other,
        WorkerProcess(_work, server.name, str(server.runtime_dir)) as worker,
    ):
        worker.send("go")
        began = time.monotonic()
        times: dict[Client, list[float]] = {client: [], other: []}
        while time.monotonic() < began + seconds:
            for each in times:
                start = time.perf_counter()
                each.noop()
                times[each].append(time.perf_counter() - start)
                time.sleep(0.0005)  # like scattered requests: a tight loop would measure its own queue
        moved = worker.ask("stop")
        took_s = time.monotonic() - began
    # The floor is an idle server's noop at the same moments: the cost of the machine's other work.
    bench.record(
        "noop p99 while a tier stores and loads", _p99(times[client]) * 1e3, "ms", floor=_p99(times[other]) * 1e3,
        target=NOOP_P99_MS, target_on="value",
    )  # fmt: skip
    bench.record("noop median meanwhile", median(times[client]) * 1e3, "ms", floor=median(times[other]) * 1e3)
    bench.record("stored and loaded meanwhile", 2 * moved * OBJECT_BYTES / took_s / 1e9, "GB/s", lower_is_better=False)


# --- twice the pool -------------------------------------------------------------------------------------------


def _sustained(bench: Bench) -> None:
    source = [os.urandom(OBJECT_BYTES) for _ in range(64)]
    turns = 2 * POOL_BYTES // (OBJECT_BYTES * len(source))
    with TierServer(l2__mem__type="mock", dirty="keep") as server, server.client() as client:
        began = time.monotonic()
        for _ in range(turns):
            keys = [os.urandom(32) for _ in source]
            _until(lambda keys=keys: client.store(keys, source, namespace=NAMESPACE).stored == len(keys))  # type: ignore[misc]
        _until(lambda: not _pending(client))
        took_s = time.monotonic() - began
        stores = client.status()["tiers"]["stores"]["counts"]
    lost = sum(count for name, count in stores.items() if name.startswith("lost_"))
    missing = turns * len(source) - stores.get("stored", 0)
    bench.record("objects dropped of twice the pool", float(max(lost, missing)), "objects", target=0.0)
    bench.record("stored to the tier meanwhile", 2 * POOL_BYTES / took_s / 1e9, "GB/s", lower_is_better=False)


# --- many objects ---------------------------------------------------------------------------------------------


def _start(bench: Bench) -> None:
    objects = TIER_OBJECTS_QUICK if bench.quick else TIER_OBJECTS
    with tempfile.TemporaryDirectory(prefix="lmc-", ignore_cleanup_errors=True) as folder:
        path = Path(folder) / "tier"
        _fill(path, objects)
        bare_s, _ = _started(TierServer(populated=False), 0)
        disk = TierServer(populated=False, l2__disk__type="fs", l2__disk__path=str(path))
        serving_s, counted_s = _started(disk, objects)
    name = f"with {objects:,} objects"
    bench.record(
        f"serving after start {name}", serving_s, "s", floor=bare_s, target=SERVING_S, target_on="value"
    )  # fmt: skip
    bench.record(f"accounting complete {name}", counted_s, "s")


def _fill(path: Path, objects: int) -> None:
    from lmcache_core.plugins.components import Kind
    from lmcache_core.plugins.loader import load_plugins
    from lmcache_core.tiers.contract import StoreItem
    from lmcache_core.tiers.object.format import tier_key
    from lmcache_core.tiers.tier.parallel import adapter_context

    registry = load_plugins()
    small = [memoryview(bytes(64))]
    settings = {"path": path, "io_mode": "buffered"}
    with registry.build(Kind.L2_ADAPTER, "fs", settings, adapter_context("disk", 4)) as adapter:
        for _ in range(objects // 100):
            items = [StoreItem(tier_key(os.urandom(32), 1, 0), small) for _ in range(100)]
            for outcome in adapter.store(items, time.monotonic() + HEALTHY_S):
                if outcome.result != "done":
                    raise TierError(f"the disk tier did not store an object: {outcome.error or outcome.result}")


def _started(server: TierServer, objects: int) -> tuple[float, float]:
    """Seconds until the first request is answered, and until everything on the tier is counted."""
    began = time.monotonic()
    with server, server.client(maps_pool=False) as client:
        client.noop()
        serving_s = time.monotonic() - began
        if objects:
            _until(lambda: client.status()["tiers"]["tiers"][0]["scan"] == "done", pause_s=0.01)
            counted = client.status()["tiers"]["tiers"][0]["objects"]
            if counted != objects:
                raise TierError(f"{counted:,} of {objects:,} objects were counted")
        return serving_s, time.monotonic() - began


# --- figures --------------------------------------------------------------------------------------------------


def _pending(client: Client) -> bool:
    stores: dict[str, Any] = client.status()["tiers"]["stores"]
    return bool(stores["arrived"] or stores["in_flight_bytes"] or any(stores["dirty"].values()))


def _loop_cpu_s(server: ServerProcess) -> float:
    """CPU seconds of the server's loop, its main thread, without the lanes."""
    return int(Path(f"/proc/{server.pid}/task/{server.pid}/schedstat").read_text().split()[0]) / 1e9


def _p99(times: list[float]) -> float:
    return quantiles(times, n=100)[98]


def _until(condition: Callable[[], bool], pause_s: float = 0.002) -> None:
    deadline = time.monotonic() + HEALTHY_S
    while not condition():
        if time.monotonic() > deadline:
            raise TierError(f"waited for {HEALTHY_S:g} s in vain: the tier does not keep up at all")
        time.sleep(pause_s)


def check_installed(name: str) -> None:
    """Raise `PluginError` that says what to install, before anything is measured."""
    from lmcache_core.plugins.components import Kind
    from lmcache_core.plugins.loader import load_plugins

    registry = load_plugins()
    for each in (name, "fs"):
        if not registry.offers(Kind.L2_ADAPTER, each):
            raise PluginError(f"this bench needs lmcache-{each}", cure=install_command(f"lmcache-{each}"))
