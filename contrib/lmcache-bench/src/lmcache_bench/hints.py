"""`lmcache-core bench hints`: what hints bring to agents' sessions.

Real sessions are replayed in real time to two servers, each with a disk tier and a pool too small for all of them. A
request looks up its blocks, loads what only the disk has, reads all of it, and stores what is new. When its session
then waits for a tool, one of the servers is told so (`kv.wait`). A *return* is a request of a session that waited. It
*finds its blocks* if all of them that were ever stored, from the first on, are in memory when it comes. The other
requests show what that costs everybody else.
"""

from __future__ import annotations

import hashlib
import json
import threading
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

from lmcache_core import Client, Layout, UsageError
from lmcache_core import Namespace as KvNamespace
from lmcache_core.cli.bench.harness import Bench
from lmcache_testing.processes import ServerProcess

OBJECT_BYTES = 64 << 10
NAMESPACE = KvNamespace("bench-hints", Layout("uint8", (OBJECT_BYTES,)))
POOL_SHARE = 0.25  # of all blocks of the trace
SPEED, SPEED_QUICK = 10.0, 60.0
QUICK_S = 1200.0  # of the trace
WORKERS = 4  # requests at once, to each server
LOAD_WAIT_S = 30.0
FOUND_MIN = 0.95
_CONTENT = bytes(OBJECT_BYTES)


class _Request(NamedTuple):
    at_s: float
    session: int
    blocks: list[int]
    waits: bool  # for a tool, afterwards
    returns: bool


class _Server(ServerProcess):
    """With a disk tier."""

    def _command(self) -> list[str]:
        return [*super()._command(), "--l2.disk.type", "fs", "--l2.disk.path", str(self.directory / "disk")]


class _Side:
    """One of the two servers, and what was found there."""

    def __init__(self, client: Client, hints: bool) -> None:
        self._client = client
        self._hints = hints
        self._lock = threading.Lock()
        self._stored: set[int] = set()
        self.returns = self.found = 0
        self.blocks = {True: [0, 0], False: [0, 0]}  # returns or not → hits in memory, blocks stored before

    def serve(self, request: _Request) -> None:
        """All that an engine does for a request."""
        keys = [_key(block) for block in request.blocks]
        if self._hints:
            self._hint("kv.release", request, {})
        in_memory = self._client.lookup(keys, namespace=NAMESPACE, ask=False).hits
        with self._lock:
            before = next((at for at, block in enumerate(request.blocks) if block not in self._stored), len(keys))
            self._stored.update(request.blocks)
            self.returns += request.returns
            self.found += request.returns and in_memory >= before
            counts = self.blocks[request.returns]
            counts[0] += min(in_memory, before)
            counts[1] += before
        found = self._client.lookup(keys, namespace=NAMESPACE, wait_s=LOAD_WAIT_S, hold=True)
        into = [bytearray(OBJECT_BYTES) for _ in range(found.hits)]
        self._client.retrieve(keys[: found.hits], into, namespace=NAMESPACE, promise=found.promise)
        rest = keys[found.hits :]
        self._client.store(rest, [_CONTENT] * len(rest), namespace=NAMESPACE)
        if self._hints and request.waits:
            payload = {"namespace": f"{NAMESPACE.id:016x}", "keys": [key.hex() for key in keys]}
            self._hint("kv.wait", request, {**payload, "session_class": "agent"})

    def _hint(self, name: str, request: _Request, payload: dict[str, Any]) -> None:
        action = {
            "action_id": "a",
            "action_type": name,
            "action_version": "1.0",
            "payload": {**payload, "session": str(request.session)},
        }
        message_id = f"{name} {request.session} {request.at_s}"
        envelope = {"protocol_version": "0.1", "message_id": message_id, "actions": [action]}
        self._client.call_operation("hints", envelope, dict[str, Any])


def add_options(parser: ArgumentParser) -> None:
    """The trace, and how fast it runs."""
    parser.add_argument("--trace", type=Path, metavar="FILE", help="JSON lines with timestamp, session, stop, hash_ids")
    parser.add_argument("--speed", type=float, default=0.0, help=f"times real time (default: {SPEED:g})")
    parser.add_argument("--pool-share", type=float, default=POOL_SHARE, help="pool, as a share of all blocks")
    parser.add_argument("--seconds", type=float, default=0.0, help="seconds of the trace (default: all)")


def run(options: Namespace, bench: Bench) -> None:
    """Replay the trace to both servers."""
    if options.trace is None:
        raise UsageError("bench hints replays real sessions: give their file with --trace")
    seconds = options.seconds or (QUICK_S if bench.quick else float("inf"))
    speed = options.speed or (SPEED_QUICK if bench.quick else SPEED)
    requests = list(_requests(options.trace, seconds))
    blocks = len({block for request in requests for block in request.blocks})
    pool_bytes = max(16 << 20, int(blocks * OBJECT_BYTES * options.pool_share))
    bench.steps(1)
    bench.step(f"{len(requests):,} requests, {requests[-1].at_s / speed:.0f} s")
    with ExitStack() as stack:
        sides = []
        pools = []
        for hints in (False, True):
            server = stack.enter_context(_Server(pool_bytes))
            client = stack.enter_context(server.client())
            client.register_layout(NAMESPACE)
            sides.append(_Side(client, hints))
            pools.append(stack.enter_context(ThreadPoolExecutor(WORKERS)))
        late_s = _replay(requests, speed, sides, pools)
        status = sides[1]._client.status()["operations"]["hints"]
    without, hinted = sides
    bench.record("returns", hinted.returns, "")
    bench.record("returns that find their blocks, without hints", without.found / without.returns, "")
    bench.record(
        "returns that find their blocks", hinted.found / hinted.returns, "", target=FOUND_MIN, lower_is_better=False
    )
    for name, side in (("without hints", without), ("with hints", hinted)):
        hits, stored = side.blocks[False]
        bench.record(f"hits of all others in memory, {name}", hits / max(1, stored), "")
    bench.record("blocks loaded by hints", status["counts"]["loaded_objects"], "")
    bench.record("longest delay of a request by the replay itself", late_s, "s")


def _replay(
    requests: Sequence[_Request], speed: float, sides: Sequence[_Side], pools: Sequence[ThreadPoolExecutor]
) -> float:
    """Returns by how much the replay was late at most."""
    began_s, late_s = time.monotonic(), 0.0
    running = []
    for request in requests:
        wait_s = began_s + request.at_s / speed - time.monotonic()
        late_s = max(late_s, -wait_s)
        if wait_s > 0:
            time.sleep(wait_s)
        running += [pool.submit(side.serve, request) for side, pool in zip(sides, pools, strict=True)]
        running = [each for each in running if not each.done() or each.result()]
    for each in running:
        each.result()
    return late_s


def _requests(path: Path, seconds: float) -> Iterator[_Request]:
    waiting: dict[int, bool] = {}
    for line in path.read_text().splitlines():
        row = json.loads(line)
        at_s = row["timestamp"] / 1000
        if at_s > seconds:
            return
        session, waits = row["session"], row["stop"] == "tool_use"
        yield _Request(at_s, session, row["hash_ids"], waits, waiting.get(session, False))
        waiting[session] = waits


def _key(block: int) -> bytes:
    return hashlib.sha256(block.to_bytes(8, "little")).digest()
