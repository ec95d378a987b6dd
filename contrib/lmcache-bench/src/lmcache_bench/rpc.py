"""`lmcache-core bench rpc`: the cost of a call on each carrier, and of the two-phase calls without any copy.

A round trip is compared with that of a bare echo over the same kind of socket: Python at both ends, blocking, in its
own process (in embedded mode, on its own thread). The two take turns, so that other work on the machine affects both.

Objects are one page, committed without checksums: none of their bytes are touched, so their size does not matter.
`bench copy` shows the cost of a checksum at commit.
"""

from __future__ import annotations

import os
import time
from argparse import ArgumentParser, Namespace
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from statistics import median, quantiles
from typing import TYPE_CHECKING, Any, NamedTuple

from lmcache_bench.rounds import Rounds
from lmcache_bench.routes import CARRIERS, EmbeddedRoute, Route, open_routes, server_cpu_s
from lmcache_bench.workers import WorkerProcess, ending_cleanly, orders
from lmcache_core import Status
from lmcache_core.errors import PoolError
from lmcache_core.limits import CALL_TIMEOUT_S, KEY_BYTES, PAGE_BYTES
from lmcache_core.native import native
from lmcache_core.pool.layout import Layout
from lmcache_core.protocol.codec import encode
from lmcache_core.protocol.messages import Noop
from lmcache_core.tokens.namespace import Namespace as Names

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    from lmcache_core import Client
    from lmcache_core.cli.bench.harness import Bench

GROUPS = ("noop", "calls", "free", "full", "cpu", "hits", "beside")
CLIENTS = (1, 2, 4)
IN_FLIGHT = 8
BATCHES = (1, 16, 128, 512, 4096)
POOL_BYTES = 128 << 20
OBJECT = Layout("uint8", (PAGE_BYTES,))
NAMESPACE = Names("bench", OBJECT)
LARGE_BATCH = 4096
CPU_BATCH, CPU_STORES = 512, 32
MILLION = 1_000_000

NOOP_RATIO_MAX = 2.0
STORE_FREE_MS_MAX, STORE_FULL_MS_MAX, RETRIEVE_MS_MAX = 2.5, 4.0, 1.5  # for 512 keys, both calls
TARGET_BATCH = 512
CPU_US_MAX = 5.0  # per key, both calls of a store
HITS_CPU_MS_MAX = 100.0  # of the server's CPU for a million hits: with calls it takes a second
BESIDE_P99_MS_MAX = 5.0


class Effort(NamedTuple):
    """How long to measure."""

    rounds: int
    calls: int  # per round of round trips
    seconds: float  # per round of calls a second
    hits: int
    beside_s: float


FULL = Effort(rounds=15, calls=400, seconds=0.5, hits=MILLION, beside_s=5.0)
QUICK = Effort(rounds=4, calls=100, seconds=0.1, hits=MILLION // 4, beside_s=1.0)


def add_options(parser: ArgumentParser) -> None:
    """The options of this bench."""
    parser.add_argument("--only", nargs="+", choices=GROUPS, default=GROUPS, help="only these groups of records")
    parser.add_argument("--carriers", nargs="+", choices=CARRIERS, default=CARRIERS, help="only these carriers")


def run(options: Namespace, bench: Bench) -> None:
    """All records, carrier by carrier; those that need a full pool come last."""
    groups: dict[str, Callable[[_Run, Route], None]] = {
        "noop": _noop,
        "calls": _calls,
        "free": _free,
        "full": _full,
        "cpu": _cpu,
        "hits": _hits,
        "beside": _beside,
    }
    chosen = [group for group in GROUPS if group in options.only]
    carriers = [carrier for carrier in CARRIERS if carrier in options.carriers]
    bench.steps(len(chosen) * len(carriers))
    with ending_cleanly(), ExitStack() as stack:
        routes = stack.enter_context(open_routes(carriers, POOL_BYTES))
        others = max(CLIENTS) if "calls" in chosen else 1 if "beside" in chosen else 0
        workers = [
            stack.enter_context(WorkerProcess(_worker)) for _ in range(others if carriers != ["embedded"] else 0)
        ]
        now = _Run(bench, QUICK if bench.quick else FULL, Rounds(quick=bench.quick), workers)
        for group in chosen:
            for route in routes:
                bench.step(f"{group}, {route.carrier}")
                groups[group](now, route)


class _Run(NamedTuple):
    """What every measurement needs."""

    bench: Bench
    effort: Effort
    rounds: Rounds
    workers: Sequence[WorkerProcess]


def _worker(connection: Connection) -> None:
    """A worker process: runs the requested functions."""
    for what, *arguments in orders(connection):
        connection.send(_call_for(*arguments) if what == "call" else _store_for(connection, *arguments))


# --- round trips -----------------------------------------------------------------------------------------------


def _noop(run: _Run, route: Route) -> None:
    frame = encode(Noop(1))
    with route.client() as client, closing(route.echo()) as echo:
        ours_us, bare_us = _alternating(
            [
                lambda: _times_us(client.noop, run.effort.calls),
                lambda: _times_us(lambda: echo.call(frame), run.effort.calls),
            ],
            run.rounds.of(run.effort.rounds),
        )
    run.bench.record(f"noop {route.carrier}", median(ours_us), "us", floor=median(bare_us), target=NOOP_RATIO_MAX)


def _alternating(measures: Sequence[Callable[[], list[float]]], rounds: Iterable[bool]) -> list[list[float]]:
    """The samples of each, taken in turns."""
    samples: list[list[float]] = [[] for _ in measures]
    for counts in rounds:
        for measure, found in zip(measures, samples, strict=True):
            taken = measure()
            if counts:
                found += taken
    return samples


def _times_us(call: Callable[[], object], count: int) -> list[float]:
    clock, times = time.perf_counter_ns, []
    for _ in range(count):
        began = clock()
        call()
        times.append((clock() - began) / 1e3)
    return times


# --- calls a second --------------------------------------------------------------------------------------------


def _calls(run: _Run, route: Route) -> None:
    for clients in CLIENTS:
        ours, bare = _alternating(
            [lambda: _rate(run, route, clients, False), lambda: _rate(run, route, clients, True)],  # noqa: B023
            run.rounds.of(max(1, run.effort.rounds // 2)),
        )
        name = f"calls {route.carrier}, {clients} client{'s' if clients > 1 else ''}"
        run.bench.record(name, median(ours), "calls/s", floor=median(bare), lower_is_better=False)


def _rate(run: _Run, route: Route, clients: int, bare: bool) -> list[float]:
    """Calls per second of all clients together: of our server, or of the bare echo."""
    seconds = run.effort.seconds
    if isinstance(route, EmbeddedRoute):
        with ThreadPoolExecutor(clients) as pool:
            return [sum(pool.map(lambda _: _call_for(route, bare, seconds), range(clients)))]
    for worker in run.workers[:clients]:
        worker.send(("call", route, bare, seconds))
    return [sum(worker.receive() for worker in run.workers[:clients])]


def _call_for(route: Route, bare: bool, seconds: float) -> float:
    """Calls per second of one client with `IN_FLIGHT` outstanding."""
    if bare:
        frame = encode(Noop(1))
        with closing(route.echo()) as echo:
            echo.call(frame)
            return _pipelined(lambda: echo.send(frame), lambda _: echo.receive(), seconds)
    with route.client() as client:
        client.noop()
        channel = client.links.current().channel  # a client's own calls wait for each reply
        return _pipelined(lambda: channel.start(Noop(0)), lambda call: channel.wait(call, CALL_TIMEOUT_S), seconds)


def _pipelined(start: Callable[[], Any], finish: Callable[[Any], object], seconds: float) -> float:
    under_way = deque(start() for _ in range(IN_FLIGHT))
    done, clock = 0, time.perf_counter
    began = clock()
    while (now := clock()) < began + seconds:
        finish(under_way.popleft())
        under_way.append(start())
        done += 1
    for call in under_way:
        finish(call)
    return done / (now - began)


# --- the two phases --------------------------------------------------------------------------------------------


def _free(run: _Run, route: Route) -> None:
    with route.client() as client:
        client.clear(NAMESPACE)
        for count in BATCHES:
            stores: list[float] = []
            reads: list[float] = []
            for counts in run.rounds.of(_rounds(run, count)):
                keys = _fresh_keys(count)
                times = _store_ms(client, keys), _retrieve_ms(client, keys)
                client.clear(NAMESPACE)
                if counts:
                    stores.append(times[0])
                    reads.append(times[1])
            _record_ms(run, f"store {_keys(count)}, free, {route.carrier}", stores, count, STORE_FREE_MS_MAX)
            _record_ms(run, f"retrieve {_keys(count)}, {route.carrier}", reads, count, RETRIEVE_MS_MAX)


def _full(run: _Run, route: Route) -> None:
    with route.client() as client:
        _fill(client)
        for count in BATCHES:
            times = []
            for counts in run.rounds.of(_rounds(run, count)):
                took_ms = _store_ms(client, _fresh_keys(count))
                if counts:
                    times.append(took_ms)
            _record_ms(run, f"store {_keys(count)}, full, {route.carrier}", times, count, STORE_FULL_MS_MAX)


def _record_ms(run: _Run, name: str, times_ms: Sequence[float], count: int, target: float) -> None:
    run.bench.record(name, median(times_ms), "ms", target=target if count == TARGET_BATCH else None)


def _cpu(run: _Run, route: Route) -> None:
    """The server process's CPU time per key. In embedded mode that includes the client: they share the process."""
    if isinstance(route, EmbeddedRoute):
        return
    with route.client() as client:
        for state in ("free", "full"):
            costs_us = []
            for counts in run.rounds.of(max(3, run.effort.rounds // 3)):
                client.clear(NAMESPACE) if state == "free" else _fill(client)
                batches = [_fresh_keys(CPU_BATCH) for _ in range(CPU_STORES)]
                before_s = server_cpu_s(client)
                for keys in batches:
                    _store_ms(client, keys)
                if counts:
                    costs_us.append((server_cpu_s(client) - before_s) * 1e6 / (CPU_BATCH * CPU_STORES))
            name = f"server cpu a key stored, {state}, {route.carrier}"
            run.bench.record(name, median(costs_us), "us", target=CPU_US_MAX)


def _hits(run: _Run, route: Route) -> None:
    """The server process's CPU time for objects that workers read, found through the index and by calls. Its idle CPU
    time over the same period is subtracted from both."""
    if isinstance(route, EmbeddedRoute):
        return
    keys = _fresh_keys(CPU_BATCH)
    into = [bytearray(PAGE_BYTES) for _ in keys]
    for use_index, hits in ((True, run.effort.hits), (False, run.effort.hits // 8)):
        with route.client(use_index=use_index) as client:
            client.clear(NAMESPACE)
            client.store(keys, into, namespace=NAMESPACE)
            before_s, began_s = server_cpu_s(client), time.monotonic()
            for _ in range(hits // CPU_BATCH):
                if client.retrieve(keys, into, namespace=NAMESPACE).hits < CPU_BATCH:
                    raise PoolError("not every retrieve was a hit: measured nothing")
            busy_s, took_s = server_cpu_s(client) - before_s, time.monotonic() - began_s
            before_s = server_cpu_s(client)
            time.sleep(took_s)
            idle_s = server_cpu_s(client) - before_s
        way = "the index" if use_index else "calls"
        run.bench.record(
            f"server cpu for a million hits by {way}, {route.carrier}",
            max(0.0, busy_s - idle_s) * 1e3 * MILLION / hits,
            "ms",
            target=HITS_CPU_MS_MAX if use_index and native is not None else None,
        )


def _beside(run: _Run, route: Route) -> None:
    """The noop of one client while another one stores large batches without a pause."""
    if isinstance(route, EmbeddedRoute):
        return
    storer = run.workers[0]
    storer.ask(("store", route, run.effort.beside_s + 0.5))  # its answer means that it has begun
    times_us: list[float] = []
    with route.client() as client:
        until_s = time.monotonic() + run.effort.beside_s
        while time.monotonic() < until_s:
            times_us += _times_us(client.noop, 20)
    if not storer.receive():
        raise PoolError("the other client stored nothing in that time: the machine is too busy to measure this")
    p99_ms = quantiles(times_us, n=100)[98] / 1e3
    name = f"noop p99 beside {LARGE_BATCH}-key stores, {route.carrier}"
    run.bench.record(name, p99_ms, "ms", target=BESIDE_P99_MS_MAX)


def _store_for(connection: Connection, route: Route, seconds: float) -> int:
    """Store large batches into a full pool. Sends a message when it begins; returns how many it stored."""
    with route.client() as client:
        _fill(client)
        # More keys than the pool holds: by a batch's next turn it has been evicted.
        batches = [_fresh_keys(LARGE_BATCH) for _ in range(2 * POOL_BYTES // PAGE_BYTES // LARGE_BATCH)]
        connection.send("begun")
        until_s, stores = time.monotonic() + seconds, 0
        while time.monotonic() < until_s:
            _store_ms(client, batches[stores % len(batches)])
            stores += 1
    return stores


def _store_ms(client: Client, keys: Sequence[bytes]) -> float:
    began = time.perf_counter()
    lease = client.prepare_store(keys, namespace=NAMESPACE)
    lease.commit(checksums=False)
    took_ms = (time.perf_counter() - began) * 1e3
    _expect(lease.statuses, Status.STORED, "stored")
    return took_ms


def _retrieve_ms(client: Client, keys: Sequence[bytes]) -> float:
    began = time.perf_counter()
    lease = client.prepare_retrieve(keys, namespace=NAMESPACE)
    lease.finish()
    took_ms = (time.perf_counter() - began) * 1e3
    _expect(lease.statuses, Status.HIT, "read")
    return took_ms


def _expect(statuses: Sequence[Status], wanted: Status, what: str) -> None:
    if statuses.count(wanted) != len(statuses):
        other = next(status for status in statuses if status is not wanted)
        raise PoolError(
            f"{statuses.count(wanted)} of {len(statuses)} keys were {what}, one is {other}: measured nothing"
        )


def _fill(client: Client) -> None:
    """Store until every further key costs an eviction."""
    for _ in range(POOL_BYTES // PAGE_BYTES // LARGE_BATCH + 1):
        _store_ms(client, _fresh_keys(LARGE_BATCH))


def _fresh_keys(count: int) -> list[bytes]:
    blob = os.urandom(count * KEY_BYTES)
    return [blob[at : at + KEY_BYTES] for at in range(0, len(blob), KEY_BYTES)]


def _rounds(run: _Run, count: int) -> int:
    return run.effort.rounds if count >= LARGE_BATCH else 4 * run.effort.rounds


def _keys(count: int) -> str:
    return f"{count} key{'s' if count > 1 else ''}"
