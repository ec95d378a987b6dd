"""Two nodes without a common store: what the first one has in its memory, the second loads from there.

    pip install lmcache-core lmcache-peer
    python examples/two_nodes_by_peer.py

Two servers on one machine stand for two nodes: each has a pool of its own, and they talk over TCP.
"""

from __future__ import annotations

import hashlib
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from lmcache_core.client.client import Client
from lmcache_core.pool.layout import Layout
from lmcache_core.tokens.namespace import Namespace

NAMESPACE = Namespace("example-model", Layout("uint8", (1 << 20,)))
OBJECTS = 16
WAIT_S = 60.0


def wait(condition: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        if time.monotonic() > deadline:
            raise SystemExit(f"waited in vain for {what}")
        time.sleep(0.05)


def serve(stack: ExitStack, folder: Path, name: str, **options: object) -> Client:
    """A node: a server with its own pool, and a client of it."""
    options |= {"name": name, "runtime_dir": folder / name, "state_dir": folder / f"{name}-state"}
    settings = {"l1.size_bytes": "64MiB"} | {key.replace("__", "."): value for key, value in options.items()}
    words = [word for setting, value in settings.items() for word in (f"--{setting}", str(value))]
    with (folder / f"{name}.log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "lmcache_core.cli.main", "serve", *words], stdin=subprocess.DEVNULL, stdout=log,
            stderr=log,
        )  # fmt: skip
    stack.callback(process.wait)
    stack.callback(process.terminate)
    client = stack.enter_context(Client.connect(name, runtime_dir=folder / name))

    def ready() -> bool:
        try:
            status = client.status()
        except Exception:  # noqa: BLE001 - not there yet: `wait` says so in the end
            return False
        return bool(status["pool"]["populated_bytes"] >= status["l1"]["pool_bytes"])

    wait(ready, f"server {name}")
    return client


def main() -> None:
    run = os.urandom(8)
    keys = [hashlib.sha256(run + b"%d" % number).digest() for number in range(OBJECTS)]
    contents = [os.urandom(NAMESPACE.layout.nbytes) for _ in keys]
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="lmcache-two-")))
        # The first node serves its memory; the second knows where it is. With more nodes, each does both.
        first = serve(stack, folder, f"one-{run.hex()}", peer__port=port)
        second = serve(stack, folder, f"two-{run.hex()}", l2__peers__type="peer", l2__peers__nodes=f"127.0.0.1:{port}")

        stored = first.store(keys, contents, namespace=NAMESPACE)
        print(f"the first node stored {stored.stored} objects of 1 MiB in its memory")
        # A node learns within a second what its neighbours have.
        wait(lambda: second.explain(keys[-1:], namespace=NAMESPACE)[0].hit, "the second node to know of it")
        print(second.explain(keys[-1:], namespace=NAMESPACE)[0].why)

        began = time.perf_counter()
        found = second.lookup(keys, namespace=NAMESPACE, hold=True, wait_s=30.0)
        into = [bytearray(NAMESPACE.layout.nbytes) for _ in keys]
        loaded = second.retrieve(keys, into, namespace=NAMESPACE, promise=found.promise)
        took = time.perf_counter() - began
        print(f"the second node, which never saw them, loaded {loaded.hits} in {took * 1000:.0f} ms")
        if [bytes(each) for each in into] != contents:
            raise SystemExit("the bytes that came back are not those that were stored")
        print("every byte is the same")


if __name__ == "__main__":
    main()
