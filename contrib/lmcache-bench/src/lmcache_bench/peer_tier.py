"""`lmcache-core bench peer-tier`: objects loaded from the pool of another node, against a bare socket and Redis.

Two real servers stand for two nodes; their bytes go over TCP on the loopback. The first part loads batches of objects
through the tier's adapter, as a server's lane does, checksums included: the bare socket sends as many bytes from one
process to another, and Redis serves the same objects through its own tier. All three take turns batch by batch, and
medians are compared. CPU seconds are of both ends: the process that loads, and the processes that serve.

The second part asks what others notice. A third process has the second server load objects from the first one without a
pause, and a bystander of each server counts its round trips, in turns with times at which nothing is loaded.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import signal
import socket
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from statistics import median, quantiles
from threading import Event
from typing import TYPE_CHECKING, NamedTuple

from lmcache_bench.workers import WorkerProcess, ending_cleanly, orders
from lmcache_core.errors import PluginError, TierError
from lmcache_core.plugins.suggest import install_command
from lmcache_core.pool.layout import Layout
from lmcache_core.tokens.namespace import Namespace as Names
from lmcache_testing.processes import ServerProcess, cpu_s

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    from lmcache_core import Client
    from lmcache_core.cli.bench.harness import Bench
    from lmcache_core.tiers.contract import L2Adapter
    from lmcache_core.tiers.object.transfer import Carrier, Transfer

MIB, GIB = 1 << 20, 1 << 30
SIZES = {"64 KiB": 64 << 10, "1 MiB": MIB, "8 MiB": 8 * MIB}
BATCH_BYTES = 32 * MIB  # larger than the processor's caches
BATCH_MAX = 64  # a lane's largest batch
POOL_BYTES = 256 * MIB
READER_POOL_BYTES = 48 * MIB  # smaller than what is pulled: each round loads again
ROUNDS, ROUNDS_QUICK = 31, 7
PING_ROUNDS, PING_ROUNDS_QUICK = 10, 2
PING_S = 2.0  # of each round with pulls, and of each without
PING_PAUSE_S = 0.001  # like scattered requests: a tight loop would measure its own queue
SOCKET_TARGET = 0.8
PING_TARGET = 2.0
DEADLINE_S = 60.0
PULLED = Names("bench peer-tier pulled", Layout("uint8", (MIB,)))
PULLED_OBJECTS, PULLED_AT_ONCE = 96, 16


def add_options(parser: ArgumentParser) -> None:
    """The bench's own options."""
    parser.add_argument(
        "--patience", type=float, default=5.0, metavar="S", help="patience_s of the tier (default: %(default)s)"
    )


def run(options: Namespace, bench: Bench) -> None:
    """Record every size, and the bystanders. Raises `PluginError` without lmcache-peer."""
    _check_installed()
    from lmcache_redis.bench import redis_server

    bench.steps(len(SIZES) + 1)
    with ending_cleanly(), ExitStack() as stack:
        owner = stack.enter_context(_Node(POOL_BYTES, "--peer.port", str(port := _free_port()), "--peer.node", "owner"))
        client = stack.enter_context(owner.client())
        redis_port = stack.enter_context(redis_server())
        for name, nbytes in SIZES.items():
            bench.step(f"objects of {name}")
            with _Sides(nbytes, client, port, redis_port, options.patience) as sides:
                _record(bench, name, sides, _measure(sides, owner, bench.quick))
        bench.step("bystanders")
        _bystanders(bench, client, owner, port)


def _check_installed() -> None:
    from lmcache_core.plugins.components import Kind
    from lmcache_core.plugins.loader import load_plugins

    registry = load_plugins()
    for each in ("peer", "redis"):
        if not registry.offers(Kind.L2_ADAPTER, each):
            raise PluginError(f"this bench needs lmcache-{each}", cure=install_command(f"lmcache-{each}"))


class _Node(ServerProcess):
    """A server with settings of its own."""

    def __init__(self, size_bytes: int, *flags: str) -> None:
        super().__init__(size_bytes)
        self._flags = flags

    def _command(self) -> list[str]:
        return [*super()._command(), *self._flags]

    def serving_cpu_s(self) -> float:
        """CPU seconds of the server and of its helper so far."""
        if not self._helper:
            with self.client(maps_pool=False) as client:
                self._helper = int(client.status()["helpers"]["peer"]["pid"])
        return self.cpu_s() + cpu_s(self._helper)

    _helper = 0


# --- loads ----------------------------------------------------------------------------------------------------


class _Sides:
    """The same objects by the peer tier, by a bare socket, and by the Redis tier."""

    def __init__(self, nbytes: int, client: Client, port: int, redis_port: int, patience_s: float) -> None:
        self._nbytes, self._client = nbytes, client
        self._ports, self._patience_s = (port, redis_port), patience_s
        self.count = max(1, min(BATCH_MAX, BATCH_BYTES // nbytes))
        self._source, self._target = _memory(self.count * nbytes), _memory(self.count * nbytes)
        self._source[:] = os.urandom(self._source.nbytes)
        self._stack = ExitStack()

    def __enter__(self) -> _Sides:
        from lmcache_core.serde.chain import CodecChain
        from lmcache_core.tiers.object.format import object_kind
        from lmcache_core.tiers.object.transfer import Carrier, Transfer

        layout, chain = Layout("uint8", (self._nbytes,)), CodecChain()
        names, kind = Names("bench peer-tier", layout), object_kind(layout, chain)
        keys = [os.urandom(32) for _ in range(self.count)]
        cuts = [slice(at, at + self._nbytes) for at in range(0, self._source.nbytes, self._nbytes)]
        stores, self._loads = (
            [Transfer(key, names.id, 0, kind, memory[cut]) for key, cut in zip(keys, cuts, strict=True)]
            for memory in (self._source, self._target)
        )
        port, redis_port = self._ports
        with self._stack as until_made:
            peer = self._adapter("peer", {"nodes": f"127.0.0.1:{port}", "patience_s": self._patience_s})
            redis = self._adapter("redis", {"host": "127.0.0.1", "port": redis_port})
            self._peer, self._redis = (Carrier(each, chain, Event()) for each in (peer, redis))
            if self._client.store(keys, [each.view for each in stores], namespace=names).stored != self.count:
                raise TierError("the owner did not take all objects")
            if any(outcome.result != "done" for outcome in self._redis.store(stores, _by())):
                raise TierError("Redis did not take all objects")
            self._find(peer, stores)
            bare = until_made.enter_context(WorkerProcess(_send_bytes, bytes(self._source)))
            self.bare_pid = bare.pid
            self._sock = until_made.enter_context(socket.create_connection(("127.0.0.1", bare.ready)))
            self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._stack = until_made.pop_all()
        return self

    def _adapter(self, name: str, settings: dict[str, object]) -> L2Adapter:
        from lmcache_core.plugins.components import Kind
        from lmcache_core.plugins.loader import load_plugins
        from lmcache_core.tiers.contract import L2Adapter
        from lmcache_core.tiers.tier.parallel import adapter_context

        adapter = load_plugins().build(Kind.L2_ADAPTER, name, settings, adapter_context(name, 1))
        assert isinstance(adapter, L2Adapter)
        return self._stack.enter_context(adapter)

    def _find(self, peer: L2Adapter, stores: Sequence[Transfer]) -> None:
        """Wait until the owner's digest has them."""
        names, until = [each.tier_key for each in stores], _by()
        while not all(peer.exists(names[:BATCH_MAX], until)):
            if time.monotonic() > until:
                raise TierError("the node that has the objects does not say so")
            time.sleep(0.05)

    def peer(self) -> None:
        self._load(self._peer)

    def redis(self) -> None:
        self._load(self._redis)

    def _load(self, carrier: Carrier) -> None:
        for loaded in carrier.load(self._loads, _by()):
            if loaded.reason is not None:
                raise TierError(f"an object did not come: {loaded.error or loaded.reason}")

    def bare(self) -> None:
        self._sock.sendall(b"\x01")
        left = self._target
        while left:
            left = left[self._sock.recv_into(left, 0, socket.MSG_WAITALL) or left.nbytes :]

    def check(self) -> None:
        if self._target != self._source:
            raise TierError("the bytes that came are not those that were stored: do not use this tier")
        self._target[:] = bytes(self._target.nbytes)

    @property
    def gib(self) -> float:
        """Of one batch."""
        return self._source.nbytes / GIB

    def __exit__(self, *_: object) -> None:
        self._stack.close()


def _send_bytes(connection: Connection, content: bytes) -> None:
    """The bare socket's far end: all of it for each byte that comes."""
    memory = _memory(len(content))
    memory[:] = content
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        connection.send(listener.getsockname()[1])
        sock, _ = listener.accept()
    with contextlib.suppress(ConnectionError), sock:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while sock.recv(1):
            sock.sendall(memory)


class _Round(NamedTuple):
    wall_s: float
    reader_s: float  # of the processor
    owner_s: float


def _measure(sides: _Sides, owner: _Node, quick: bool) -> dict[str, list[_Round]]:
    ways: dict[str, tuple[Callable[[], None], Callable[[], float]]] = {
        "peer": (sides.peer, owner.serving_cpu_s),
        "bare": (sides.bare, lambda: cpu_s(sides.bare_pid)),
        "redis": (sides.redis, lambda: 0.0),
    }
    rounds: dict[str, list[_Round]] = {name: [] for name in ways}
    names = list(ways)
    for turn in range(-1, ROUNDS_QUICK if quick else ROUNDS):
        for name in names[turn % 3 :] + names[: turn % 3]:
            call, served = ways[name]
            before, reader = served(), time.process_time()
            began = time.perf_counter()
            call()
            took = _Round(time.perf_counter() - began, time.process_time() - reader, served() - before)
            sides.check()
            if turn >= 0:  # the first makes connections
                rounds[name].append(took)
    return rounds


def _record(bench: Bench, size: str, sides: _Sides, rounds: dict[str, list[_Round]]) -> None:
    def rate(name: str) -> float:
        return sides.gib / median(each.wall_s for each in rounds[name])

    ours = rate("peer")
    for floor, name, target in (("bare", f"load {size}", SOCKET_TARGET), ("redis", f"load {size} beside Redis", None)):
        bench.record(name, ours, "GiB/s", floor=rate(floor), target=target, lower_is_better=False)
    for end in ("reader", "owner"):
        cpu = {
            name: sum(getattr(each, f"{end}_s") for each in rounds[name]) / len(rounds[name]) / sides.gib
            for name in ("peer", "bare")
        }
        bench.record(f"CPU of the {end}, {size}", cpu["peer"], "s/GiB", floor=cpu["bare"])


# --- bystanders -----------------------------------------------------------------------------------------------


def _bystanders(bench: Bench, client: Client, owner: _Node, port: int) -> None:
    source = [os.urandom(MIB)] * PULLED_OBJECTS
    keys = [os.urandom(32) for _ in source]
    if client.store(keys, source, namespace=PULLED).stored != len(keys):
        raise TierError("the owner did not take all objects")
    flags = ("--l2.peers.type", "peer", "--l2.peers.nodes", f"127.0.0.1:{port}", "--l2.peers.patience_s", "5")
    pings: dict[tuple[str, bool], list[float]] = {}
    pulled = 0
    with (
        _Node(READER_POOL_BYTES, *flags) as reader,
        owner.client(maps_pool=False) as at_owner,
        reader.client(maps_pool=False) as at_reader,
        WorkerProcess(_pull, reader.name, str(reader.runtime_dir), keys) as puller,
    ):
        puller.ask("first")  # the reader's tier looks around
        rounds = PING_ROUNDS_QUICK if bench.quick else PING_ROUNDS
        for turn in range(2 * rounds):
            busy = bool(turn % 2)
            if busy:
                puller.send("go")
            until = time.monotonic() + PING_S
            while time.monotonic() < until:
                for name, each in (("owner", at_owner), ("reader", at_reader)):
                    began = time.perf_counter()
                    each.noop()
                    pings.setdefault((name, busy), []).append(time.perf_counter() - began)
                    time.sleep(PING_PAUSE_S)
            if busy:
                pulled += puller.ask("stop")
    for name in ("owner", "reader"):
        idle, beside = pings[name, False], pings[name, True]
        bench.record(f"noop p50 at the {name} during pulls", median(beside) * 1e3, "ms", floor=median(idle) * 1e3)
        bench.record(
            f"noop p99 at the {name} during pulls", _p99(beside) * 1e3, "ms", floor=_p99(idle) * 1e3, target=PING_TARGET
        )  # fmt: skip
    bench.record("pulled meanwhile", pulled * MIB / (rounds * PING_S) / GIB, "GiB/s", lower_is_better=False)


def _pull(connection: Connection, name: str, runtime_dir: str, keys: list[bytes]) -> None:
    """Have the server load objects of its neighbour, some at a time, until it is told to stop."""
    from lmcache_core import Client

    at = 0
    with Client.connect(name, runtime_dir=runtime_dir, maps_pool=False) as client:
        for order in orders(connection):
            found = 0
            while order == "first" and not found:
                found = client.lookup(keys[:1], namespace=PULLED, wait_s=DEADLINE_S).hits
            while order == "go" and not connection.poll():
                some = [keys[(at + each) % len(keys)] for each in range(PULLED_AT_ONCE)]
                at += PULLED_AT_ONCE
                found += client.lookup(some, namespace=PULLED, wait_s=DEADLINE_S).hits
            if order != "first":
                connection.recv()
            connection.send(found)


def _p99(times: Sequence[float]) -> float:
    return quantiles(times, n=100)[98]


def _by() -> float:
    return time.monotonic() + DEADLINE_S


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def _memory(nbytes: int) -> memoryview:
    """Memory like a slot's: page-aligned, and populated."""
    region = memoryview(mmap.mmap(-1, nbytes))
    region[:] = bytes(nbytes)
    return region
