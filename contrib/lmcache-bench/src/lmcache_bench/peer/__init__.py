"""`lmcache-core bench peer`: store, lookup and retrieve beside LMCache's own server, in turns, from the same token ids.

LMCache (PyPI, the multiprocess server with shared memory, observability off) runs in its own environment, see
`peer.environment`, and is driven through its own client; nothing of it is imported here. A measurement starts with a
prompt's tokens: LMCache's client sends them and its server computes the hashes, our client computes them itself. A
store ends when all objects are committed; a retrieve, after a lookup, when all are copied out. Both sides copy between
contiguous memory and shared memory. Pairs are in ABBA order, and the last figure of each is the bootstrap's interval.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

from lmcache_bench.pairs import interval, ratios
from lmcache_bench.peer.lmcache_driver import tokens_of
from lmcache_bench.workers import ending_cleanly
from lmcache_core.errors import PoolError
from lmcache_core.pool.layout import Layout
from lmcache_core.tokens.keys import chunk_keys
from lmcache_core.tokens.namespace import Namespace as Names
from lmcache_testing.processes import ServerProcess

if TYPE_CHECKING:
    from lmcache_core import Client
    from lmcache_core.cli.bench.harness import Bench

DRIVER = Path(__file__).with_name("lmcache_driver.py")
PEERS = ("lmcache",)
KIB, MIB = 1 << 10, 1 << 20
POOL_BYTES = 512 * MIB
PAIRS, QUICK_PAIRS = 20, 4
WARM_UP = 2


class Case(NamedTuple):
    """Prompts of this many chunks of 256 tokens, each chunk one object."""

    chunks: int
    object_bytes: int

    @property
    def name(self) -> str:
        size = f"{self.object_bytes // MIB} MiB" if self.object_bytes >= MIB else f"{self.object_bytes // KIB} KiB"
        return f"{self.chunks} x {size}"


CASES = (
    *(Case(chunks, 4 * KIB) for chunks in (1, 16, 128, 512)),  # the cost of calls
    *(Case(chunks, 32 * MIB // chunks) for chunks in (512, 32, 8, 2)),  # the cost of bytes: 64 KiB, 1, 4 and 16 MiB
)
QUICK_CASES = (CASES[0], CASES[3], CASES[5])


def add_options(parser: ArgumentParser) -> None:
    """The bench's own options."""
    parser.add_argument("--peer", choices=PEERS, default=PEERS[0], help="beside whom (default: %(default)s)")
    parser.add_argument("--pairs", type=int, help=f"pairs of each (default: {PAIRS}, with --quick {QUICK_PAIRS})")


def run(options: Namespace, bench: Bench) -> None:
    """Every case, ours and LMCache in turns."""
    from lmcache_bench.peer.environment import environment, lmcache_python
    from lmcache_bench.peer.processes import LineProcess, LMCacheServer

    python = lmcache_python(tell)
    cases = QUICK_CASES if bench.quick else CASES
    pairs = options.pairs or (QUICK_PAIRS if bench.quick else PAIRS)
    bench.steps(len(cases))
    with ending_cleanly(), ExitStack() as stack:
        server = stack.enter_context(ServerProcess(POOL_BYTES))
        client = stack.enter_context(server.client())
        theirs = stack.enter_context(LMCacheServer(python, POOL_BYTES))
        url = f"tcp://127.0.0.1:{theirs.port}"
        driver = stack.enter_context(LineProcess(python, DRIVER, url, env=environment()))
        for case in cases:
            bench.step(case.name)
            _Beside(_Ours(client, case), _Theirs(driver, case), bench, case.name).record(pairs)


def tell(what: str) -> None:
    """Report progress."""
    print(what, file=sys.stderr, flush=True)


class _Ours:
    """An engine's worker with our client."""

    def __init__(self, client: Client, case: Case) -> None:
        self._client = client
        self._case = case
        self._names = Names(f"bench peer {case.name}", Layout("uint8", (case.object_bytes,)))
        self._memory = mmap.mmap(-1, 2 * case.chunks * case.object_bytes)
        ctypes.memset((ctypes.c_char * len(self._memory)).from_buffer(self._memory), 0xA5, len(self._memory))
        views = [memoryview(self._memory)[at : at + case.object_bytes] for at in self._starts()]
        self._sources, self._targets = views[: case.chunks], views[case.chunks :]

    def _starts(self) -> range:
        return range(0, len(self._memory), self._case.object_bytes)

    def store(self, seed: int) -> float:
        """Seconds to store a new prompt."""
        tokens = tokens_of(seed, self._case.chunks)
        began_s = time.perf_counter()
        stored = self._client.store(chunk_keys(tokens, self._names), self._sources, namespace=self._names)
        took_s = time.perf_counter() - began_s
        self._expect(stored.stored, "took")
        return took_s

    def lookup(self, seed: int) -> float:
        """Seconds until the lookup has found all of it."""
        tokens = tokens_of(seed, self._case.chunks)
        began_s = time.perf_counter()
        found = self._client.lookup(chunk_keys(tokens, self._names), namespace=self._names)
        took_s = time.perf_counter() - began_s
        self._expect(found.hits, "found")
        return took_s

    def retrieve(self, seed: int) -> float:
        """Seconds to copy all of it out, after the lookup."""
        keys = chunk_keys(tokens_of(seed, self._case.chunks), self._names)
        self._expect(self._client.lookup(keys, namespace=self._names).hits, "found")
        began_s = time.perf_counter()
        got = self._client.retrieve(keys, self._targets, namespace=self._names)
        took_s = time.perf_counter() - began_s
        self._expect(got.hits, "gave")
        return took_s

    def clear(self) -> None:
        """Clear everything stored."""
        self._client.clear(self._names)

    def _expect(self, count: int, what: str) -> None:
        if count != self._case.chunks:
            raise PoolError(f"our server {what} {count} of {self._case.chunks} objects")


class _Theirs:
    """The same with LMCache's client, in its own process."""

    def __init__(self, driver: Any, case: Case) -> None:
        self._driver = driver
        driver.ask("begin", chunks=case.chunks, object_bytes=case.object_bytes)

    def store(self, seed: int) -> float:
        """Seconds, as measured there."""
        return float(self._driver.ask("store", seed=seed))

    def lookup(self, seed: int) -> float:
        """Seconds, as measured there."""
        return float(self._driver.ask("lookup", seed=seed))

    def retrieve(self, seed: int) -> float:
        """Seconds, as measured there."""
        return float(self._driver.ask("retrieve", seed=seed))

    def check(self, seed: int) -> None:
        """Check that it returns what was stored."""
        self._driver.ask("check", seed=seed)

    def clear(self) -> None:
        """Clear everything stored."""
        self._driver.ask("clear")


class _Beside:
    """Both sides in one case."""

    def __init__(self, ours: _Ours, theirs: _Theirs, bench: Bench, name: str) -> None:
        self._ours = ours
        self._theirs = theirs
        self._bench = bench
        self._name = name
        self._seed = 0

    def record(self, pairs: int) -> None:
        """Store, lookup and retrieve."""
        self._record("store", self._store, pairs)
        for side in (self._ours, self._theirs):
            side.store(0)
        self._theirs.check(0)
        self._record("lookup", lambda ours: (self._ours if ours else self._theirs).lookup(0), pairs)
        self._record("retrieve", lambda ours: (self._ours if ours else self._theirs).retrieve(0), pairs)
        for side in (self._ours, self._theirs):
            side.clear()

    def _store(self, ours: bool) -> float:
        side = self._ours if ours else self._theirs
        self._seed += 1
        took_s = side.store(self._seed)
        side.clear()  # room for the next one, in slots that both have used before
        return took_s

    def _record(self, what: str, measure: Callable[[bool], float], pairs: int) -> None:
        took: dict[bool, list[float]] = {True: [], False: []}

        def kept(ours: bool) -> float:
            took[ours].append(measure(ours))
            return took[ours][-1]

        for _ in range(WARM_UP):
            measure(True)
            measure(False)
        found = interval(ratios(kept, pairs))
        ours_ms, theirs_ms = (median(took[side]) * 1e3 for side in (True, False))
        name = f"{what} {self._name}"
        self._bench.record(f"{name}, beside LMCache", ours_ms, "ms", floor=theirs_ms)
        self._bench.record(f"{name}: ours ÷ LMCache of {pairs} pairs, 95 % from", found.low, "x")
        self._bench.record(f"{name}: to", found.high, "x")
