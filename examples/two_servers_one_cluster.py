"""Two servers on one machine share one Redis Cluster: what the first stores, the second loads.

    pip install lmcache-core lmcache-redis
    python examples/two_servers_one_cluster.py                          # starts a cluster of six redis-servers
    python examples/two_servers_one_cluster.py --nodes redis-1:6379     # uses yours

Two servers on one machine stand for two nodes: they share no memory, only the cluster.
"""

from __future__ import annotations

import argparse
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


def start(stack: ExitStack, argv: list[str], log: Path) -> subprocess.Popen[bytes]:
    with log.open("wb") as out:
        process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=out, stderr=out)
    stack.callback(process.wait)
    stack.callback(process.terminate)
    return process


def start_cluster(stack: ExitStack, folder: Path) -> str:
    """Three primaries and three replicas on free ports; gives back their addresses."""
    with ExitStack() as held:
        socks = [held.enter_context(socket.socket()) for _ in range(12)]
        for sock in socks:
            sock.bind(("127.0.0.1", 0))
        ports = [sock.getsockname()[1] for sock in socks]
    for port, bus in zip(ports[:6], ports[6:], strict=True):
        place = folder / str(port)
        place.mkdir()
        options = (
            f"--bind 127.0.0.1 --port {port} --cluster-enabled yes --cluster-port {bus} --dir {place} --appendonly no"
        )
        start(stack, ["redis-server", *options.split(), "--save", ""], place / "log")
    nodes = [f"127.0.0.1:{port}" for port in ports[:6]]

    def ping(node: str, *words: str) -> str:
        host, _, port = node.partition(":")
        asked = subprocess.run(["redis-cli", "-h", host, "-p", port, *words], capture_output=True, text=True)
        return asked.stdout

    wait(lambda: all("PONG" in ping(node, "PING") for node in nodes), "the cluster's processes")
    join = ["redis-cli", "--cluster", "create", *nodes, "--cluster-replicas", "1", "--cluster-yes"]
    subprocess.run(join, check=True, stdout=subprocess.DEVNULL)
    wait(lambda: all("cluster_state:ok" in ping(node, "CLUSTER", "INFO") for node in nodes), "the cluster")
    return ",".join(nodes[:2])


def serve(stack: ExitStack, folder: Path, name: str, nodes: str) -> Client:
    """A server of its own pool, and a client of it."""
    options = {
        "name": name,
        "runtime_dir": folder / name,
        "state_dir": folder / f"{name}-state",
        "l1.size_bytes": "64MiB",
    }
    options |= {"l2.shared.type": "redis", "l2.shared.mode": "cluster", "l2.shared.nodes": nodes}
    words = [word for option, value in options.items() for word in (f"--{option}", str(value))]
    start(stack, [sys.executable, "-m", "lmcache_core.cli.main", "serve", *words], folder / f"{name}.log")
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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", help="HOST:PORT of nodes of a cluster of yours, separated by commas")
    given = parser.parse_args()
    run = os.urandom(8)
    keys = [hashlib.sha256(run + b"%d" % number).digest() for number in range(OBJECTS)]
    contents = [os.urandom(NAMESPACE.layout.nbytes) for _ in keys]
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="lmcache-two-")))
        nodes = given.nodes or start_cluster(stack, folder)
        first = serve(stack, folder, f"one-{run.hex()}", nodes)
        second = serve(stack, folder, f"two-{run.hex()}", nodes)

        stored = first.store(keys, contents, namespace=NAMESPACE)
        print(f"the first server stored {stored.stored} objects of 1 MiB")
        wait(lambda: not first.status()["tiers"]["stores"]["in_flight_bytes"], "the stores")

        began = time.perf_counter()
        found = second.lookup(keys, namespace=NAMESPACE, hold=True, wait_s=30.0)
        into = [bytearray(NAMESPACE.layout.nbytes) for _ in keys]
        loaded = second.retrieve(keys, into, namespace=NAMESPACE, promise=found.promise)
        took = time.perf_counter() - began
        print(f"the second server, which never saw them, loaded {loaded.hits} in {took * 1000:.0f} ms")
        if [bytes(each) for each in into] != contents:
            raise SystemExit("the bytes that came back are not those that were stored")
        print("every byte is the same")


if __name__ == "__main__":
    main()
