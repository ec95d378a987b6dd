"""`lmcache-core bench l2 --tier redis`: the adapter against a bare socket and against plain redis-py calls.

One connection, one thread, the same server, the same bytes in the same memory, all in one run and taking turns. The
bare socket only sends the prepared stream and receives whole replies, two requested at a time: it is the floor. Plain
calls are what a first-time user writes: `set(name, bytes(view))`, and `view[:] = get(name)`. Without `--set url=…` (or
other settings of the server's address) it starts a `redis-server` for the run.
"""

from __future__ import annotations

import mmap
import os
import shutil
import socket
import subprocess
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from redis import Redis
from redis.exceptions import RedisError

from lmcache_core.errors import TierError, UsageError
from lmcache_core.limits import PAGE_BYTES
from lmcache_core.tiers.contract import AdapterContext, LoadItem, Result, StoreItem
from lmcache_redis.adapter import RedisAdapter
from lmcache_redis.settings import RedisSettings

if TYPE_CHECKING:
    from lmcache_core.cli.bench.harness import Bench

SIZES = {"64 KiB": 64 << 10, "1 MiB": 1 << 20, "8 MiB": 8 << 20, "32 MiB": 32 << 20}
AIMED = "1 MiB"  # the size that the targets apply to
FLOOR_TARGET = 0.8
PLAIN_TARGET = 2.0
CPU_TARGET = 0.5
BATCH_BYTES = 16 << 20
BATCH_MAX = 64
ROUNDS = 31
ROUNDS_QUICK = 9
DEADLINE_S = 120.0
START_S = 20.0
_WHERE = frozenset({"url", "host", "port", "unix_socket"})


def run(options: Namespace, bench: Bench) -> None:
    """Record every size."""
    given: dict[str, Any] = {}
    for pair in options.set:
        name, equals, value = pair.partition("=")
        if not equals:
            raise UsageError(f"--set {pair!r} has no value: write NAME=VALUE")
        given[name] = value
    with _somewhere(given) as where:
        settings = RedisSettings(**{**where, **given})
        if settings.mode != "standalone" or settings.encrypted:
            raise UsageError("this bench compares with a bare socket: name one server, without TLS")
        bench.steps(len(SIZES))
        for name, nbytes in SIZES.items():
            bench.step(f"objects of {name}")
            with RedisAdapter(settings, AdapterContext(tier="bench")) as adapter:
                sides = _Sides(adapter, settings, nbytes)
                try:
                    _record(bench, name, sides, _measure(sides, bench.quick))
                finally:
                    sides.close()


@contextmanager
def _somewhere(given: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The server's address: from the settings, or a server that ends with the bench."""
    if _WHERE & given.keys():
        yield {}
        return
    with redis_server() as port:
        yield {"host": "127.0.0.1", "port": port}


@contextmanager
def redis_server() -> Iterator[int]:
    """A `redis-server` on this machine that keeps nothing on a disk and ends with the bench: its port. Raises
    `UsageError` if there is none to start."""
    binary = shutil.which("redis-server")
    if binary is None:
        raise UsageError("redis-server is not installed: install it, or name a server with --set url=redis://HOST:PORT")
    with tempfile.TemporaryDirectory(prefix="lmcache-bench-") as folder:
        with socket.socket() as sock:
            sock.bind(("127.0.0.1", 0))
            port: int = sock.getsockname()[1]
        argv = [binary, "--bind", "127.0.0.1", "--port", str(port), "--save", "", "--dir", folder]
        with (Path(folder) / "log").open("wb") as log:
            server = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=log)
        try:
            deadline = time.monotonic() + START_S
            while not _answers(port):
                if server.poll() is not None or time.monotonic() > deadline:
                    raise UsageError("the redis-server that was started for this bench does not answer")
                time.sleep(0.02)
            yield port
        finally:
            server.terminate()
            server.wait()


def _answers(port: int) -> bool:
    try:
        with Redis(host="127.0.0.1", port=port) as client:
            return bool(client.ping())
    except RedisError:
        return False


class _Sides:
    """Three ways to move one batch: the adapter, a bare socket, and plain calls."""

    def __init__(self, adapter: RedisAdapter, settings: RedisSettings, nbytes: int) -> None:
        self._adapter = adapter
        self.object_bytes = nbytes + PAGE_BYTES  # as lmcache-core stores it: one page of header
        self.count = max(1, min(BATCH_MAX, BATCH_BYTES // nbytes))
        self._source, self._target = (_memory(self.count * self.object_bytes) for _ in range(2))
        self._source[:] = os.urandom(self._source.nbytes)
        self._keys = [os.urandom(32) for _ in range(self.count)]
        self._names = [settings.key_prefix.encode() + key.hex().encode() for key in self._keys]
        cuts = [slice(at, at + self.object_bytes) for at in range(0, self._source.nbytes, self.object_bytes)]
        self._from, self._into = [self._source[cut] for cut in cuts], [self._target[cut] for cut in cuts]
        parts = [(view[:PAGE_BYTES], view[PAGE_BYTES:]) for view in (*self._from, *self._into)]
        self._stores = [StoreItem(*pair) for pair in zip(self._keys, parts, strict=False)]
        self._loads = [LoadItem(*pair) for pair in zip(self._keys, parts[self.count :], strict=True)]
        user, password = settings.credentials
        host, port = settings.server
        where: dict[str, Any] = {"host": host, "port": port}
        if settings.socket_path is not None:
            where = {"unix_socket_path": settings.socket_path}
        self._plain = Redis(username=user, password=password, db=settings.database, **where)
        # A connection of redis-py again, only for its login: the bare loop uses nothing but its socket.
        pool: Any = self._plain.connection_pool
        self._login = pool.make_connection()
        self._login.connect()
        self._sock: socket.socket = self._login._sock
        self._gets = [b"*2\r\n$3\r\nGET\r\n$%d\r\n%b\r\n" % (len(name), name) for name in self._names]
        self._head = b"$%d\r\n" % self.object_bytes
        self._small = bytearray(64)

    # --- ours -----------------------------------------------------------------------------------------------
    def store(self) -> None:
        for outcome in self._adapter.store(self._stores, time.monotonic() + DEADLINE_S):
            if outcome.result is not Result.DONE:
                raise TierError(f"the tier did not store an object: {outcome.error or outcome.result}")

    def load(self) -> None:
        for outcome in self._adapter.load(self._loads, time.monotonic() + DEADLINE_S):
            if outcome.result is not Result.DONE:
                raise TierError(f"the tier did not load an object: {outcome.error or outcome.result}")

    # --- the floor ------------------------------------------------------------------------------------------
    def bare_store(self) -> None:
        for name, view in zip(self._names, self._from, strict=True):
            self._sock.sendall(b"*3\r\n$3\r\nSET\r\n$%d\r\n%b\r\n$%d\r\n" % (len(name), name, self.object_bytes))
            self._sock.sendall(view)
            self._sock.sendall(b"\r\n")
        self._receive(memoryview(bytearray(5 * self.count)))  # +OK for each

    def bare_load(self) -> None:
        self._sock.sendall(b"".join(self._gets[:2]))
        for position, view in enumerate(self._into):
            self._receive(memoryview(self._small)[: len(self._head)])
            self._receive(view)
            self._receive(memoryview(self._small)[:2])
            if position + 2 < self.count:
                self._sock.sendall(self._gets[position + 2])

    def _receive(self, view: memoryview) -> None:
        while view:
            view = view[self._sock.recv_into(view) :]

    # --- plain calls ----------------------------------------------------------------------------------------
    def plain_store(self) -> None:
        for name, view in zip(self._names, self._from, strict=True):
            self._plain.set(name, bytes(view))

    def plain_load(self) -> None:
        for name, view in zip(self._names, self._into, strict=True):
            content: Any = self._plain.get(name)
            view[:] = content

    # --- around ---------------------------------------------------------------------------------------------
    def check(self) -> None:
        if self._target != self._source:
            raise TierError("the bytes that came back are not those that were stored: do not use this tier")
        self._target[:PAGE_BYTES] = bytes(PAGE_BYTES)

    def close(self) -> None:
        self._adapter.delete(self._keys, time.monotonic() + DEADLINE_S)
        self._login.disconnect()
        self._plain.close()


Times = dict[str, list[tuple[float, float]]]  # call → seconds of wall and of processor, for each batch


def _measure(sides: _Sides, quick: bool) -> Times:
    calls: dict[str, Callable[[], None]] = {
        f"{way}{what}": getattr(sides, f"{way}{what}") for what in ("store", "load") for way in ("", "bare_", "plain_")
    }
    times: Times = {name: [] for name in calls}
    for call in calls.values():
        call()  # the first call opens connections, and allocates the server's memory
    names = list(calls)
    for turn in range(ROUNDS_QUICK if quick else ROUNDS):
        for name in names[turn % 3 : 3] + names[: turn % 3] + names[3 + turn % 3 :] + names[3 : 3 + turn % 3]:
            began, cpu = time.perf_counter(), time.thread_time()
            calls[name]()
            times[name].append((time.perf_counter() - began, time.thread_time() - cpu))
            if name.endswith("load"):
                sides.check()
    return times


def _record(bench: Bench, size: str, sides: _Sides, times: Times) -> None:
    gigabytes = sides.count * sides.object_bytes / 1e9

    def rate(name: str) -> float:
        return gigabytes / median(wall for wall, _ in times[name])

    def cpu(name: str) -> float:
        return median(seconds for _, seconds in times[name]) / gigabytes

    def aimed(target: float) -> float | None:
        return target if size == AIMED else None

    for what in ("store", "load"):
        ours, bare, plain = rate(what), rate(f"bare_{what}"), rate(f"plain_{what}")
        more: dict[str, Any] = {"lower_is_better": False}
        bench.record(f"{what} {size}", ours, "GB/s", floor=bare, target=aimed(FLOOR_TARGET), **more)
        bench.record(f"{what} {size} beside plain calls", ours, "GB/s", floor=plain, target=aimed(PLAIN_TARGET), **more)
        bench.record(f"{what} {size} CPU", cpu(what), "s/GB", floor=cpu(f"plain_{what}"), target=aimed(CPU_TARGET))
        bench.record(f"{what} {size} CPU of a bare socket", cpu(f"bare_{what}"), "s/GB")


def _memory(nbytes: int) -> memoryview:
    """Like a slot: page-aligned, and populated."""
    region = memoryview(mmap.mmap(-1, nbytes))
    region[:] = bytes(nbytes)
    return region
