"""`lmcache-core bench observe`: what monitoring a server costs other clients. Two servers take turns: one has no
monitoring, the other has everything on: metrics scraped each second, events into a file of JSON lines, KV events, a
recording, and spans of every request, sent to a collector in a separate process that discards them. The floor of each
figure is the first server's, in the same run.
"""

from __future__ import annotations

import os
import threading
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from statistics import quantiles
from typing import TYPE_CHECKING, Any, NamedTuple

from lmcache_bench.rounds import Rounds
from lmcache_bench.workers import WorkerProcess, ending_cleanly, orders
from lmcache_core import Status
from lmcache_core.errors import PoolError, UsageError
from lmcache_core.limits import KEY_BYTES, PAGE_BYTES
from lmcache_core.plugins.suggest import install_command
from lmcache_core.pool.layout import Layout
from lmcache_core.tokens.namespace import Namespace as Names
from lmcache_testing.processes import ServerProcess

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    from lmcache_core import Client
    from lmcache_core.cli.bench.harness import Bench

NAMESPACE = Names("bench", Layout("uint8", (PAGE_BYTES,)))
POOL_BYTES = 128 << 20
STORE_KEYS = 512
STORE_P99_RATIO_MAX = 1.15
SCRAPE_S = 1.0


class Effort(NamedTuple):
    """How long to measure."""

    rounds: int
    noops: int  # per round
    stores: int
    more_stores: int  # without a pause: longer than events wait for one
    long_turns: int  # in which those are taken


FULL = Effort(rounds=20, noops=2000, stores=60, more_stores=1000, long_turns=4)
QUICK = Effort(rounds=4, noops=500, stores=20, more_stores=100, long_turns=1)


class ObservedServer(ServerProcess):
    """With everything on."""

    def __init__(self, size_bytes: int, collector_url: str) -> None:
        super().__init__(size_bytes)
        self._collector_url = collector_url

    def _command(self) -> list[str]:
        return [
            *super()._command(),
            *("--subscribers.jsonl.path", str(self.directory / "events.jsonl")),
            *("--subscribers.kv_events.endpoint", f"ipc://{self.directory / 'kv'}"),
            *("--subscribers.kv_events.replay_endpoint", f"ipc://{self.directory / 'kv-replay'}"),
            *("--operations.record.dir", str(self.directory / "record")),
            *("--otel.endpoint", self._collector_url),
        ]


def add_options(parser: ArgumentParser) -> None:
    """This bench has none of its own."""


def run(options: Namespace, bench: Bench) -> None:
    """Round trips and stores at both servers, in turns."""
    if find_spec("lmcache_http") is None:
        raise UsageError("bench observe needs lmcache-http to render the metrics", cure=install_command("lmcache-http"))
    effort = QUICK if bench.quick else FULL
    bench.steps(effort.rounds + 1)
    times: dict[tuple[str, str], list[float]] = {}
    with ending_cleanly(), ExitStack() as stack:
        collector = stack.enter_context(WorkerProcess(_collect))
        plain = stack.enter_context(ServerProcess(POOL_BYTES))
        observed = stack.enter_context(ObservedServer(POOL_BYTES, collector.ready))
        clients = {
            "off": stack.enter_context(plain.client(use_index=False)),
            "on": stack.enter_context(observed.client(use_index=False)),
        }
        stack.enter_context(WorkerProcess(_scrape, observed.name, observed.runtime_dir))
        measures: dict[str, Callable[[Client], list[float]]] = {
            "noop": lambda client: _times_us(client.noop, effort.noops),
            "store": lambda client: _times_us(lambda: _store(client), effort.stores),
        }
        for number, counts in enumerate(Rounds(quick=bench.quick).of(effort.rounds)):
            bench.step("in turns")
            for what, measure in measures.items():
                for which in ("off", "on") if number % 2 else ("on", "off"):
                    found = measure(clients[which])
                    if counts:
                        times.setdefault((what, which), []).extend(found)
        for _ in range(effort.long_turns):
            for which, client in clients.items():
                times.setdefault(("stores", which), []).extend(_times_us(partial(_store, client), effort.more_stores))
        status = clients["on"].status()
    recording = status["operations"]["record"]
    if not status["tracing"]["exported"] or not recording["operations"] or not status["events"]["emitted"]:
        raise PoolError(f"the server has sent no events or spans, so nothing was measured: {status['tracing']}")
    for what, name, target in (
        ("noop", "noop p99, all on", None),
        ("store", f"store of {STORE_KEYS} keys p99, all on", STORE_P99_RATIO_MAX),
        ("stores", f"the same, {effort.more_stores} without a pause", None),
    ):
        bench.record(name, _p99(times[what, "on"]), "us", floor=_p99(times[what, "off"]), target=target)
    dropped_of = {"events": status["events"]["dropped"], "spans": status["tracing"]["dropped"]}
    for what, dropped in (dropped_of | {"operations": recording["dropped"]}).items():
        bench.record(f"{what} dropped", dropped, "n")


def _p99(times_us: list[float]) -> float:
    return quantiles(times_us, n=100)[98]


def _times_us(call: Callable[[], object], count: int) -> list[float]:
    found = []
    for _ in range(count):
        began = time.perf_counter_ns()
        call()
        found.append((time.perf_counter_ns() - began) / 1e3)
    return found


def _store(client: Client) -> None:
    blob = os.urandom(STORE_KEYS * KEY_BYTES)
    keys = [blob[at : at + KEY_BYTES] for at in range(0, len(blob), KEY_BYTES)]
    lease = client.prepare_store(keys, namespace=NAMESPACE)
    lease.commit(checksums=False)
    if lease.statuses.count(Status.STORED) != STORE_KEYS:
        raise PoolError(f"{lease.statuses.count(Status.STORED)} of {STORE_KEYS} keys were stored: measured nothing")


class _Taking(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        del format, args


def _collect(connection: Connection) -> None:
    """A worker process: a collector that accepts everything. Sends its address."""
    with ThreadingHTTPServer(("127.0.0.1", 0), _Taking) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        connection.send(f"http://127.0.0.1:{server.server_port}")
        for _ in orders(connection):
            pass
        server.shutdown()


def _scrape(connection: Connection, name: str, runtime_dir: Any) -> None:
    """A worker process: renders the metrics once a second, as a scraper's helper does."""
    from lmcache_core import Client
    from lmcache_http.metrics import text_of

    with Client.connect(name, runtime_dir=runtime_dir, maps_pool=False) as client:
        text_of(client.status())
        connection.send("ready")
        while not connection.poll(SCRAPE_S):
            text_of(client.status())
