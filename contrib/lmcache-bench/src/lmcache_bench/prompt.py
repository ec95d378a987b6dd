"""`lmcache-core bench prompt`: the KV of a long prompt, stored and retrieved by several workers at once.

The common benchmark case: 131,072 tokens of 70 KB each, in chunks of 256 tokens, scaled down to the available memory
(the record says to how many tokens). With n workers each holds 1/n of every token, like the ranks of one engine, so the
bytes are the same for any n; every worker is a separate process.

The floor is the usual way to move such tensors between processes without a pool: pickle over ZMQ. A server process
keeps what it unpickled, and pickles it again on request. Both sides move the same bytes from and to the same buffers,
and take turns.
"""

from __future__ import annotations

import ctypes
import hashlib
import mmap
import os
import pickle
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

from lmcache_bench.rounds import Rounds
from lmcache_bench.workers import WorkerProcess, ending_cleanly, orders
from lmcache_core import Client
from lmcache_core.client import tensor_of
from lmcache_core.errors import NotEnoughMemoryError, PoolError
from lmcache_core.limits import CHUNK_TOKENS, SLAB_BYTES
from lmcache_core.pool.layout import Layout
from lmcache_core.tokens.namespace import Namespace as Names
from lmcache_testing.processes import ServerProcess, temporary_directory

if TYPE_CHECKING:
    from multiprocessing.connection import Connection
    from pathlib import Path

    from lmcache_core.cli.bench.harness import Bench

TOKENS = 131_072
TOKEN_BYTES = 70_000  # of all layers, two bytes per item: divisible by four workers
WORKERS = (1, 2, 4)
MEMORY_FRACTION = 0.2  # of the available memory: for the pool, and as much again for the floor's server
RING_BYTES = 256 << 20  # buffers of all workers together: larger than the caches, smaller than a prompt
QUICK_TOKENS = 2_048
MINIMUM_TOKENS = 4 * CHUNK_TOKENS
ITEM_BYTES = 2  # bfloat16, as engines keep it


class Share(NamedTuple):
    """One worker's share."""

    shard: int
    shards: int
    chunks: int

    @property
    def layout(self) -> Layout:
        """Of one worker's part of a chunk."""
        if find_spec("torch"):
            return Layout("bfloat16", (CHUNK_TOKENS, TOKEN_BYTES // ITEM_BYTES // self.shards))
        return Layout("uint8", (CHUNK_TOKENS * TOKEN_BYTES // self.shards,))

    def keys(self, turn: int) -> list[bytes]:
        """One per chunk; different in every turn."""
        return [
            hashlib.sha256(f"{turn} {self.shard}/{self.shards} {chunk}".encode()).digest()
            for chunk in range(self.chunks)
        ]


def add_options(parser: ArgumentParser) -> None:
    """The options of this bench."""
    parser.add_argument(
        "--tokens", type=int, help=f"length of the prompt (default: up to {TOKENS:,}, as memory allows)"
    )
    parser.add_argument(
        "--workers", type=int, nargs="+", choices=WORKERS, default=WORKERS, help="how many at once (default: all)"
    )


def run(options: Namespace, bench: Bench) -> None:
    """`store` and `retrieve` for each number of workers, in GB/s of all workers together."""
    tokens = _tokens(options.tokens, quick=bench.quick)
    chunks = tokens // CHUNK_TOKENS
    rounds, most = Rounds(quick=bench.quick), 3 if bench.quick else 5
    bench.steps(len(options.workers))
    what = f"{tokens:,} of {TOKENS:,} tokens x 70 KB"
    pool_bytes = _pool_bytes(chunks)
    with ending_cleanly(), ServerProcess(pool_bytes) as server, _pickler() as floor, ExitStack() as stack:
        arguments = server.name, server.runtime_dir, floor
        workers = [stack.enter_context(WorkerProcess(_worker, *arguments)) for _ in range(max(options.workers))]
        for count in options.workers:
            workers_text = f"{count} worker{'s' if count > 1 else ''}"
            bench.step(f"{what}, {workers_text}")
            times = _measure(server, workers[:count], chunks, rounds.of(most))
            for group in ("store", "retrieve"):
                ours, bare = (tokens * TOKEN_BYTES / median(times[side, group]) / 1e9 for side in ("ours", "pickle"))
                bench.record(f"{group} {what}, {workers_text}", ours, "GB/s", floor=bare, lower_is_better=False)


def _tokens(tokens: int | None, *, quick: bool) -> int:
    """How many tokens fit, in whole chunks. Raises `NotEnoughMemoryError` if hardly any do."""
    from lmcache_core.pool.backing import Backing
    from lmcache_core.pool.room import room

    free_bytes = room(Backing.SHM).available_bytes
    fitting = int(free_bytes * MEMORY_FRACTION) // TOKEN_BYTES
    wanted = tokens or min(fitting, QUICK_TOKENS if quick else TOKENS)
    if fitting < MINIMUM_TOKENS or wanted > 2 * fitting:
        raise NotEnoughMemoryError(
            f"{free_bytes >> 20:,} MiB are free and a prompt of {max(wanted, MINIMUM_TOKENS):,} tokens needs "
            f"{int(max(wanted, MINIMUM_TOKENS) * TOKEN_BYTES / MEMORY_FRACTION) >> 20:,} MiB here: give --tokens, or "
            "free memory"
        )
    return max(wanted // CHUNK_TOKENS, 1) * CHUNK_TOKENS


def _pool_bytes(chunks: int) -> int:
    """Room for a whole prompt, whatever the shards: slabs hold whole slots only."""
    total = 0
    for shards in WORKERS:
        slot = -(-Share(0, shards, 0).layout.nbytes // 4096) * 4096
        slabs = -(-chunks * shards // max(1, SLAB_BYTES // slot))
        total = max(total, slabs * SLAB_BYTES)
    return total


def _measure(
    server: ServerProcess, workers: Sequence[WorkerProcess], chunks: int, rounds: Iterable[bool]
) -> dict[tuple[str, str], list[float]]:
    """Seconds of each round, by side and group: of the slowest worker."""
    times: dict[tuple[str, str], list[float]] = {
        (side, group): [] for side in ("ours", "pickle") for group in ("store", "retrieve")
    }
    with server.client(maps_pool=False) as client:
        for shard, worker in enumerate(workers):
            worker.send(("", "share", Share(shard, len(workers), chunks)))
        for worker in workers:
            worker.receive()
        for turn, counts in enumerate(rounds):
            for side, group in times:
                took_s = _at_once(workers, side, group, turn)
                if counts:
                    times[side, group].append(took_s)
            client.clear()
            _at_once(workers, "pickle", "forget", turn)
    return times


def _at_once(workers: Sequence[WorkerProcess], side: str, order: str, turn: int) -> float:
    for worker in workers:
        worker.send((side, order, turn))
    seconds: list[float] = [worker.receive() for worker in workers]
    return max(seconds)


def _worker(connection: Connection, name: str, runtime_dir: Path, floor: Path) -> None:
    """A worker process: moves its share on request, and reports the seconds."""
    sides: dict[str, _Ours | _Pickled] = {}
    share = Share(0, 1, 0)
    with Client.connect(name, runtime_dir=runtime_dir) as client:
        pickled = _Pickled(floor)
        for side, order, what in orders(connection):
            if order == "share":
                share = what
                pickled.buffers = _buffers(share)
                sides = {"ours": _Ours(client, share, pickled.buffers), "pickle": pickled}
                connection.send("ready")
                continue
            keys = share.keys(what)
            began = time.perf_counter()
            getattr(sides[side], order)(keys)
            connection.send(time.perf_counter() - began)


def _buffers(share: Share) -> list[Any]:
    """One per chunk, from a ring: tensors if torch is installed, else memoryviews. Every page is populated."""
    nbytes = share.layout.nbytes
    ring = min(share.chunks, max(2, RING_BYTES // share.shards // nbytes))
    memory = mmap.mmap(-1, ring * nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    ctypes.memset((ctypes.c_char * len(memory)).from_buffer(memory), 1 + share.shard, len(memory))
    views = [memoryview(memory)[at : at + nbytes] for at in range(0, len(memory), nbytes)]
    parts = [tensor_of(view, share.layout) for view in views] if find_spec("torch") else views
    return [parts[chunk % ring] for chunk in range(share.chunks)]


class _Ours:
    def __init__(self, client: Client, share: Share, buffers: Sequence[Any]) -> None:
        self._client = client
        self._buffers = buffers
        self._namespace = Names("bench prompt", share.layout, kv_shard=(share.shard, share.shards))
        client.register_layout(self._namespace)

    def store(self, keys: Sequence[bytes]) -> None:
        """All chunks in one call."""
        stored = self._client.store(keys, self._buffers, namespace=self._namespace)
        if stored.stored != len(keys):
            raise PoolError(f"{stored.stored} of {len(keys)} chunks were stored: {set(stored.statuses)}")

    def retrieve(self, keys: Sequence[bytes]) -> None:
        """All chunks in one call."""
        found = self._client.retrieve(keys, self._buffers, namespace=self._namespace)
        if found.hits != len(keys):
            raise PoolError(f"{found.hits} of {len(keys)} chunks were hits: {set(found.statuses)}")


class _Pickled:
    """The floor's client: one message per chunk; each side pickles what it sends."""

    def __init__(self, floor: Path) -> None:
        import zmq

        self._socket: Any = zmq.Context.instance().socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.connect(f"ipc://{floor}")
        self.buffers: Sequence[Any] = ()

    def store(self, keys: Sequence[bytes]) -> None:
        """Send every chunk, then wait for every answer."""
        for key, buffer in zip(keys, self.buffers, strict=True):
            value = bytes(buffer) if isinstance(buffer, memoryview) else buffer
            self._socket.send(pickle.dumps(("store", key, value), 5), copy=False)
            self._socket.recv()

    def retrieve(self, keys: Sequence[bytes]) -> None:
        """Receive every chunk into its buffer."""
        for key, buffer in zip(keys, self.buffers, strict=True):
            self._socket.send(pickle.dumps(("retrieve", key, None), 5))
            found = pickle.loads(self._socket.recv(copy=False).buffer)
            if isinstance(buffer, memoryview):
                buffer[:] = found
            else:
                buffer.copy_(found)

    def forget(self, keys: Sequence[bytes]) -> None:
        """Free the memory for the next turn."""
        for key in keys:
            self._socket.send(pickle.dumps(("forget", key, None), 5))
            self._socket.recv()


@contextmanager
def _pickler() -> Iterator[Path]:
    """The floor's server, on a socket in a private directory: it unpickles only what this bench sends."""
    from pathlib import Path

    with temporary_directory() as directory:
        path = Path(directory, "pickle")
        with WorkerProcess(_serve_pickled, path):
            yield path


def _serve_pickled(connection: Connection, path: Path) -> None:
    """A process: keeps objects until its parent disconnects."""
    import zmq

    router: Any = zmq.Context.instance().socket(zmq.ROUTER)
    router.setsockopt(zmq.LINGER, 0)
    router.bind(f"ipc://{path}")
    poller = zmq.Poller()
    poller.register(router, zmq.POLLIN)
    poller.register(connection.fileno(), zmq.POLLIN)
    kept: dict[bytes, Any] = {}
    connection.send("ready")
    while True:
        ready = dict(poller.poll())
        if connection.fileno() in ready:
            os._exit(0)  # nothing is left to do, and a normal exit would wait for sockets
        sender, message = router.recv_multipart(copy=False)
        order, key, value = pickle.loads(message.buffer)
        answer: Any = None
        if order == "store":
            kept[key] = value
        elif order == "retrieve":
            answer = kept[key]
        else:
            kept.pop(key, None)
        router.send_multipart([sender, pickle.dumps(answer, 5)], copy=False)
