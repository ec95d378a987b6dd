"""A worker scribbles over a live pool: the server serves the others, ends in order, and leaves nothing."""

from __future__ import annotations

import mmap
import random
import signal
import threading
import time
from pathlib import Path

import pytest

from lmcache_core.errors import CacheError
from lmcache_core.native import native
from lmcache_core.pool.making import read_header

from ..conftest import Node

REGIONS = ("header", "layouts", "workers", "slabs", "slots", "index", "data")
SECONDS = 3.0  # of scribbling in each region


def region(node: Node, name: str) -> tuple[int, int]:
    with node.shm.open("rb") as file:
        header = read_header(file.fileno())
    marks = [0, header.layouts_offset, header.workers_offset, header.slabs_offset, header.slots_offset]
    marks += [header.index_offset, header.data_offset, header.segment_bytes]
    at = REGIONS.index(name)
    return marks[at], marks[at + 1]


class Worker(threading.Thread):
    """Stores and reads with `verify="always"`, and remembers each hit that had wrong bytes."""

    def __init__(self, node: Node, number: int, stop: threading.Event) -> None:
        super().__init__()
        self.node, self.number, self.stop = node, number, stop
        self.hits = self.wrong = self.calls = 0
        self.failure: BaseException | None = None

    def run(self) -> None:
        try:
            with self.node.client(verify="always") as client:
                while not self.stop.is_set():
                    self._turn(client)
        except BaseException as error:  # noqa: BLE001 - the test raises it
            self.failure = error

    def _turn(self, client: object) -> None:
        key = self.node.key(f"{self.number}.{self.calls % 40}")
        payload = self.node.payload(self.number * 40 + self.calls % 40)
        into = bytearray(len(payload))
        self.calls += 1
        try:
            client.store([key], [payload], namespace=self.node.namespace)  # type: ignore[attr-defined]
            found = client.retrieve([key], [into], namespace=self.node.namespace)  # type: ignore[attr-defined]
        except CacheError:
            return  # refused, and told so: what was scribbled on may cost this worker its session
        if found.hits:
            self.hits += 1
            self.wrong += into != payload


@pytest.mark.skipif(native is None, reason="readers check by the C extension")
@pytest.mark.parametrize("name", REGIONS)
def test_scribbles_harm_nobody_who_checks_and_keep_no_server_from_its_end(node: Node, name: str) -> None:
    server = node.serve()
    stop = threading.Event()
    workers = [Worker(node, number, stop) for number in range(2)]
    for worker in workers:
        worker.start()
    start, end = region(node, name)
    rng = random.Random(name)
    until_s = time.monotonic() + SECONDS
    with node.shm.open("r+b") as file, mmap.mmap(file.fileno(), 0) as pool:
        while time.monotonic() < until_s:
            for _ in range(50):
                at = rng.randrange(start, end)
                size = rng.choice((1, 8, 64, 4096))
                data = rng.choice((b"\0", b"\xff", b"\1")) * size if rng.random() < 0.5 else rng.randbytes(size)
                pool[at : min(at + size, end)] = data[: min(size, end - at)]
            time.sleep(0.002)
    stop.set()
    for worker in workers:
        worker.join(60)
        assert not worker.is_alive()
        assert worker.failure is None
        assert worker.wrong == 0
    if name != "header":  # while its header is wrong nobody can attach …
        assert sum(worker.hits for worker in workers) > 0
    with server.client(maps_pool=False) as client:  # … but the server answers
        assert client.status()["counters"]["loop_faults"] == 0
    deadline_s = time.monotonic() + 60
    while True:  # once nobody scribbles, newcomers are served like everybody
        try:
            with server.client(verify="always") as late:
                if late.store([node.key("late")], [node.payload(9)], namespace=node.namespace).stored:
                    break
        except CacheError:
            pass
        assert time.monotonic() < deadline_s
        time.sleep(0.05)
    server.signal(signal.SIGTERM)
    assert server.popen.wait(60) == 0
    assert not node.shm.exists()
    assert not (Path(node.run) / node.name).exists()
