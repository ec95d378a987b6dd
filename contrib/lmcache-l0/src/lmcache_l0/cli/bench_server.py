"""`lmcache-core bench l0 --server`: requests a second and p99 of one feature server over five stores, in one run.

FastAPI under uvicorn with two workers; every request reads the features of 100 items. All servers run together and are
asked in turns, so that a slow second of the machine affects all of them. Beside the two wall-clock figures there is the
server's processor time for a request, which a busy machine disturbs less (Linux).
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from threading import Thread
from typing import TYPE_CHECKING

from lmcache_l0.cli.peers import MissingPeerError, redis_get
from lmcache_l0.cli.serving import ITEMS_A_REQUEST, STORES, names, prepare, rows

if TYPE_CHECKING:
    from lmcache_core.cli.bench.harness import Bench

CONNECTIONS = 4
START_S = 60.0


def measure(bench: Bench, folder: Path) -> None:
    """One pair of figures a store."""
    missing = [module for module in ("fastapi", "uvicorn", "lmdb", "redis") if find_spec(module) is None]
    if missing:
        print(f"bench l0: left out the feature server: there is no {', '.join(missing)}", file=sys.stderr)
        return
    turns, seconds = (2, 0.5) if bench.quick else (7, 2.0)
    rates: dict[str, list[float]] = {store: [] for store in STORES}
    slowest: dict[str, list[float]] = {store: [] for store in STORES}
    processor_us: dict[str, list[float]] = {store: [] for store in STORES}
    with contextlib.ExitStack() as stack:
        stack.callback(prepare(folder))
        try:
            stack.enter_context(redis_get(folder, {n: row.tobytes() for n, row in zip(names(), rows(), strict=True)}))
        except MissingPeerError as absent:
            print(f"bench l0: left out Redis: there is no {absent}", file=sys.stderr)
            del rates["redis"]
        servers = {store: stack.enter_context(_server(store, folder)) for store in rates}
        for turn in range(turns + 1):
            for store, (address, pid) in servers.items():
                before_s = _processor_s(pid)
                rate, p99_ms, requests = _load(address, 0.2 if turn == 0 else seconds)
                if turn:  # the first one warms up
                    rates[store].append(rate)
                    slowest[store].append(p99_ms)
                    processor_us[store].append((_processor_s(pid) - before_s) / requests * 1e6)
    bare, least_us = max(rates["dict"]), min(processor_us["dict"])
    for store, each in rates.items():
        name = f"feature server, {ITEMS_A_REQUEST} features a request, {store}"
        bench.record(name, max(each), "requests/s", floor=bare, lower_is_better=False)
        bench.record(f"{name}: p99", median(slowest[store]), "ms", floor=median(slowest["dict"]))
        if least_us:
            bench.record(f"{name}: processor time", min(processor_us[store]), "us", floor=least_us)


@contextlib.contextmanager
def _server(store: str, folder: Path) -> Iterator[tuple[str, int]]:
    address = str(folder / f"http-{store}.sock")
    environ = {**os.environ, "L0_BENCH_STORE": store, "L0_BENCH_FOLDER": str(folder)}
    server = subprocess.Popen([sys.executable, "-m", "lmcache_l0.cli.serving", address], env=environ)
    try:
        until = time.monotonic() + START_S
        while True:
            with contextlib.suppress(OSError), _connected(address) as connection:
                _ask(connection, 0)
                break
            if server.poll() is not None or time.monotonic() > until:
                raise RuntimeError(f"the feature server over {store} did not start")
            time.sleep(0.05)
        yield address, server.pid
    finally:
        server.terminate()
        server.wait()


@contextlib.contextmanager
def _connected(address: str) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(START_S)
        connection.connect(address)
        yield connection


def _ask(connection: socket.socket, seed: int) -> None:
    connection.sendall(b"GET /score/%d HTTP/1.1\r\nHost: l0\r\n\r\n" % seed)
    reply = b""
    while b"}" not in reply:
        part = connection.recv(4096)
        if not part:
            raise ConnectionError("the feature server closed the connection")
        reply += part
    if not reply.startswith(b"HTTP/1.1 200"):
        raise RuntimeError(f"the feature server answered {reply[:200]!r}")


def _processor_s(pid: int) -> float:
    """Processor time of a process and its living children so far; 0 if the system does not say."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return 0.0
    own = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return own + sum(_processor_s(int(child)) for child in children)


def _load(address: str, seconds: float) -> tuple[float, float, int]:
    """Requests a second, their p99 in milliseconds, and their number, over a few connections that ask as fast as they
    are answered."""
    took_ns: list[list[int]] = [[] for _ in range(CONNECTIONS)]
    until = time.perf_counter_ns() + int(seconds * 1e9)

    def ask(number: int) -> None:
        with _connected(address) as connection:
            seed = number
            while (begun := time.perf_counter_ns()) < until:
                _ask(connection, seed)
                took_ns[number].append(time.perf_counter_ns() - begun)
                seed += CONNECTIONS

    threads = [Thread(target=ask, args=(number,)) for number in range(CONNECTIONS)]
    begun = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    every = sorted(ns for each in took_ns for ns in each)
    return len(every) / (time.perf_counter() - begun), every[int(len(every) * 0.99)] / 1e6, len(every)
