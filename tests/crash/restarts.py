"""A zygote: forks servers and workers that have everything imported, for tests that kill them by the hundred.

Run as a script; it takes a line for each wish and answers with one. `server NAME RUN` and `worker NAME RUN SEED` fork a
child and answer its pid; `kill PID` sends SIGKILL, waits for the end and answers `gone`. The zygote itself holds no
thread, no pool and no lock, so what it forks is as fresh as what is executed.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import sys
import threading
from pathlib import Path

from lmcache_core.client.client import Client
from lmcache_core.errors import CacheError
from lmcache_core.plugins.loader import load_plugins
from lmcache_core.pool.layout import Layout
from lmcache_core.settings.compose import make_settings
from lmcache_core.tokens.namespace import Namespace

KEYS = 160  # of each layout; more bytes than the pool has, so that there are evictions all the time
LAYOUTS = (Layout("uint8", (16384,)), Layout("uint8", (40960,)))
NAMESPACES = tuple(Namespace(f"model-{layout.nbytes}", layout) for layout in LAYOUTS)
POOL_BYTES = 4 << 20


def key(number: int) -> bytes:
    return number.to_bytes(32, "big")


def payload(number: int, count: int, nbytes: int) -> bytes:
    """Says of every 16 bytes whose they are, and of which store."""
    return (number.to_bytes(8, "big") + count.to_bytes(8, "big")) * (nbytes // 16)


def count_in(data: bytes, number: int) -> int:
    """The count of the store that wrote these bytes. AssertionError where they are of another key, or of two stores."""
    assert data[:8] == number.to_bytes(8, "big"), f"key {number} came with the bytes of key {data[:8].hex()}"
    assert data == data[:16] * (len(data) // 16), f"key {number} is torn"
    return int.from_bytes(data[8:16], "big")


def serve(name: str, run: Path) -> None:
    from lmcache_core.server.server import Server

    settings = make_settings(
        load_plugins(), name=name, runtime_dir=str(run), state_dir=str(run / "state"), l1={"size_bytes": POOL_BYTES}
    )
    Server(settings, load_plugins()).run()


def work(name: str, run: Path, seed: int) -> None:
    """Store, read in place and by copy, and look what is read, on two threads, until killed."""
    client = Client.connect(name, runtime_dir=run, client_name=f"worker {seed}")

    def rounds(chance: random.Random) -> None:
        count = 0
        while True:
            count += 1
            namespace = chance.choice(NAMESPACES)
            nbytes = namespace.layout.nbytes
            numbers = chance.sample(range(KEYS), chance.randint(1, 12))
            keys = [key(number) for number in numbers]
            if chance.random() < 0.5:
                sources = [payload(number, seed << 32 | count, nbytes) for number in numbers]
                client.store(keys, sources, namespace=namespace)
                continue
            into = [bytearray(nbytes) for _ in keys]
            found = client.retrieve(keys, into, namespace=namespace, prefix=False)
            for number, data, status in zip(numbers, into, found.statuses, strict=True):
                if status == "hit":
                    count_in(bytes(data), number)

    def guarded(chance: random.Random) -> None:
        try:
            rounds(chance)
        except BaseException as error:  # noqa: BLE001 - the zygote's parent is to see any
            (run / f"failed-{os.getpid()}").write_text(repr(error))
            os._exit(3)

    threads = [threading.Thread(target=guarded, args=(random.Random(f"{seed}.{at}"),)) for at in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def main() -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    with contextlib.suppress(CacheError):  # what is imported late is imported now
        Client.connect("nobody", runtime_dir="/nonexistent").status()

    for line in sys.stdin:
        wish, *arguments = line.split()
        if wish == "kill":
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(arguments[0]), signal.SIGKILL)
            os.waitpid(int(arguments[0]), 0)
            print("gone", flush=True)
            continue
        child = os.fork()
        if child == 0:
            os.close(0)
            os.dup2(2, 1)
            if wish == "server":
                serve(arguments[0], Path(arguments[1]))
            else:
                work(arguments[0], Path(arguments[1]), int(arguments[2]))
            os._exit(0)
        print(child, flush=True)


if __name__ == "__main__":
    main()
