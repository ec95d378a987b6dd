"""`lmcache-core bench transfer`: pages copied by the engine itself, and by the copier beside the server.

A process of its own stands for the engine: a region per layer, page ids in random order. It stores and retrieves
batches both ways, in turns, and counts the CPU time of all its threads. The floor is a bare `process_vm_readv` (for
stores) and `process_vm_writev` (for retrieves) of the same pages from another process, on one thread, with its lists of
addresses made before the clock runs. Ours also pays for keys, checks, leases, messages, and for checksums of stores.

The second part asks what others notice: a bystander of the server counts its round trips, in turns with nothing, with
an engine that copies, and with one for which the copier does.
"""

from __future__ import annotations

import ctypes
import os
import time
from argparse import ArgumentParser, Namespace
from array import array
from collections.abc import Callable, Sequence
from statistics import median, quantiles
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from lmcache_bench.rounds import Rounds
from lmcache_bench.workers import WorkerProcess, ending_cleanly, orders
from lmcache_core.errors import PluginError, PoolError
from lmcache_core.plugins.suggest import install_command
from lmcache_core.pool.layout import Layout
from lmcache_core.tokens.namespace import Namespace as Names
from lmcache_testing.processes import ServerProcess

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    from lmcache_core import Client
    from lmcache_core.cli.bench.harness import Bench

KIB, MIB = 1 << 10, 1 << 20
SIZES = {"4 KiB": 4 * KIB, "16 KiB": 16 * KIB, "64 KiB": 64 * KIB, "256 KiB": 256 * KIB, "1 MiB": MIB}
TARGET_FROM = 64 * KIB  # bytes of a page from which the target of speed counts
RATIO_TARGET, CPU_TARGET, PING_TARGET = 0.9, 0.05, 2.0
LAYERS = 16
BATCH_BYTES = 64 * MIB  # more than the caches hold
SPARE = 2  # pages for each page of a batch, so that ids are spread out
ROWS_MAX = 1024  # of one system call
PING_ROUNDS, PING_ROUNDS_QUICK = 10, 2
PING_S = 2.0
PING_PAUSE_S = 0.001  # like scattered requests: a tight loop would measure its own queue
Way = Literal["engine", "server"]
WAYS: tuple[Way, ...] = ("engine", "server")


def add_options(parser: ArgumentParser) -> None:
    """The options of this bench."""
    parser.add_argument("--threads", type=int, default=2, metavar="N", help="copier.threads (default: %(default)s)")
    parser.add_argument("--no-bystanders", action="store_true", help="only the copies")
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES), help="only pages of these sizes")


def run(options: Namespace, bench: Bench) -> None:
    """Each size both ways, then the bystanders. Raises `PluginError` without lmcache-copier."""
    from lmcache_core.plugins.components import Kind
    from lmcache_core.plugins.loader import load_plugins

    if not any(each.name == "copier" for each in load_plugins().components(Kind.HELPER)):
        raise PluginError("this bench needs lmcache-copier", cure=install_command("lmcache-copier"))
    rounds, count = Rounds(quick=bench.quick), 4 if bench.quick else 21
    bench.steps(len(options.sizes) + (not options.no_bystanders))
    with ending_cleanly(), _Node(3 * BATCH_BYTES, options.threads) as node, node.client() as client:
        for size in options.sizes:
            bench.step(f"pages of {size}")
            with WorkerProcess(_engine, node.name, str(node.runtime_dir), SIZES[size]) as engine:
                took: dict[str, list[Took]] = {}
                bare = _Bare(engine.pid, engine.ask("where"), SIZES[size])
                for counts in rounds.of(count):
                    for name, each in _round(engine, bare).items():
                        if counts:
                            took.setdefault(name, []).append(each)
            _record(bench, size, took)
        if not options.no_bystanders:
            bench.step("bystanders")
            _bystanders(bench, node, client)


class _Node(ServerProcess):
    """A server with a copier."""

    def __init__(self, size_bytes: int, threads: int) -> None:
        super().__init__(size_bytes)
        self._threads = threads

    def _command(self) -> list[str]:
        return [*super()._command(), "--copier.threads", str(self._threads)]


class Took(NamedTuple):
    """One batch: wall time, and CPU time of the engine's process."""

    wall_s: float
    cpu_s: float


# --- the engine -------------------------------------------------------------------------------------------------


def _engine(connection: Connection, name: str, runtime_dir: str, page_bytes: int) -> None:
    """An engine's process: it does what it is told, and says what that took."""
    import mmap
    import random

    from lmcache_copier import register_pages
    from lmcache_core import Client, PageGroup, Region
    from lmcache_core.buffers import address_of

    objects = BATCH_BYTES // (LAYERS * page_bytes)
    pages = SPARE * objects
    memory = mmap.mmap(-1, LAYERS * pages * page_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.write(os.urandom(MIB) * (len(memory) // MIB))
    names = Names(f"bench transfer {page_bytes}", Layout("uint8", (LAYERS * page_bytes,)))
    regions = [Region(memory, at * pages * page_bytes, page_bytes, page_bytes, pages) for at in range(LAYERS)]
    ids = array("q", random.Random(1).sample(range(pages), objects))
    with Client.connect(name, runtime_dir=runtime_dir) as client:
        ways = {way: register_pages(client, [PageGroup(names, regions, 1)], way) for way in WAYS}

        def batch(way: Way) -> dict[str, Took]:
            keys = [os.urandom(32) for _ in range(objects)]
            took = {}
            for what in ("store", "retrieve"):
                call = getattr(ways[way], what)
                cpu_s, began = time.process_time(), time.perf_counter()
                result = call([(0, keys, ids)])
                took[what] = Took(time.perf_counter() - began, time.process_time() - cpu_s)
                if max(result.hits, result.stored) != objects:
                    raise PoolError(f"a {what} by the {way} did not do all of its {objects} objects: {result}")
            return took

        for order in orders(connection):
            if order == "where":
                connection.send((address_of(memoryview(memory)), list(ids)))
            elif order[0] == "batch":
                connection.send(batch(order[1]))
                client.clear(names)
            else:  # until the next word
                while not connection.poll():
                    batch(order[1])
                    client.clear(names)
                connection.recv()
                connection.send("stopped")


def _round(engine: WorkerProcess, bare: _Bare) -> dict[str, Took]:
    took = {f"bare {what}": each for what, each in bare.batch().items()}
    for way in WAYS:
        took |= {f"{way} {what}": each for what, each in engine.ask(("batch", way)).items()}
    return took


class _Bare:
    """The same pages by nothing but the system call, from this process."""

    def __init__(self, pid: int, where: tuple[int, list[int]], page_bytes: int) -> None:
        start, ids = where
        pages = SPARE * len(ids)
        starts = [start + (at * pages + page) * page_bytes for page in ids for at in range(LAYERS)]
        self._room = (ctypes.c_char * BATCH_BYTES)()
        ctypes.memset(self._room, 1, BATCH_BYTES)
        here = ctypes.addressof(self._room)
        self._pid = pid
        self._calls = []
        for first in range(0, len(starts), ROWS_MAX):
            some = starts[first : first + ROWS_MAX]
            there = array("Q", [word for each in some for word in (each, page_bytes)])
            ours = array("Q", [here + first * page_bytes, len(some) * page_bytes])
            self._calls.append((ours, there, len(some), len(some) * page_bytes))

    def batch(self) -> dict[str, Took]:
        """Out of the engine, and back into it: its pages stay what they are."""
        libc = ctypes.CDLL(None, use_errno=True)
        return {
            what: Took(self._timed(call), 0.0)
            for what, call in (("store", libc.process_vm_readv), ("retrieve", libc.process_vm_writev))
        }

    def _timed(self, call: Callable[..., int]) -> float:
        call.restype = ctypes.c_ssize_t  # type: ignore[attr-defined]  # a function of ctypes
        began = time.perf_counter()
        for ours, there, count, nbytes in self._calls:
            done = call(
                self._pid, ctypes.c_void_p(ours.buffer_info()[0]), ctypes.c_ulong(1),
                ctypes.c_void_p(there.buffer_info()[0]), ctypes.c_ulong(count), ctypes.c_ulong(0),
            )  # fmt: skip
            if done != nbytes:
                raise PoolError(f"the bare copy copied {done} of {nbytes} bytes: {os.strerror(ctypes.get_errno())}")
        return time.perf_counter() - began


def _record(bench: Bench, size: str, took: dict[str, list[Took]]) -> None:
    target = RATIO_TARGET if SIZES[size] >= TARGET_FROM else None
    for what in ("store", "retrieve"):
        floor = _rate(took[f"bare {what}"])
        for way in WAYS:
            goal = target if way == "server" else None
            bench.record(
                f"{what}, pages of {size}, by the {way}", _rate(took[f"{way} {what}"]), "GB/s",
                floor=floor, target=goal, lower_is_better=False,
            )  # fmt: skip
        ours, theirs = (_cpu(took[f"{way} {what}"]) for way in ("server", "engine"))
        bench.record(f"{what}, pages of {size}, CPU of the engine", ours, "s/GB", floor=theirs, target=CPU_TARGET)


def _rate(times: Sequence[Took]) -> float:
    return BATCH_BYTES / median(each.wall_s for each in times) / 1e9


def _cpu(times: Sequence[Took]) -> float:
    """By the mean: a clock that ticks in steps would give a median of none."""
    return sum(each.cpu_s for each in times) / len(times) / BATCH_BYTES * 1e9


# --- bystanders -------------------------------------------------------------------------------------------------


def _bystanders(bench: Bench, node: _Node, client: Client) -> None:
    pings: dict[str, list[float]] = {"idle": [], "engine": [], "server": []}
    with WorkerProcess(_engine, node.name, str(node.runtime_dir), 64 * KIB) as engine:
        for turn in range(3 * (PING_ROUNDS_QUICK if bench.quick else PING_ROUNDS)):
            way = list(pings)[turn % 3]
            if way != "idle":
                engine.send(("go", way))
            pings[way] += _pinged(client)
            if way != "idle":
                engine.ask("stop")
    for way in WAYS:
        for name, of in (("p50", median), ("p99", _p99)):
            bench.record(
                f"a bystander's noop, {name}, while the {way} copies", of(pings[way]) * 1e3, "ms",
                floor=of(pings["idle"]) * 1e3, target=PING_TARGET if (way, name) == ("server", "p99") else None,
            )  # fmt: skip


def _pinged(client: Any) -> list[float]:
    times, until = [], time.monotonic() + PING_S
    while time.monotonic() < until:
        began = time.perf_counter()
        client.noop()
        times.append(time.perf_counter() - began)
        time.sleep(PING_PAUSE_S)
    return times


def _p99(times: Sequence[float]) -> float:
    return quantiles(times, n=100)[98]
