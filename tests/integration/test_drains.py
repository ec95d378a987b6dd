"""The end of a server that workers go on storing to: it takes nothing new, and ends when its tiers have everything."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from itertools import count
from pathlib import Path

import pytest

from lmcache_core.client.client import Client
from lmcache_core.client.results import Status
from lmcache_core.pool.layout import Layout
from lmcache_core.server.server import Server
from lmcache_core.tiers.contract import StoreItem
from lmcache_core.tokens.namespace import Namespace
from lmcache_testing.embedded import server_settings
from lmcache_testing.waiting import WAIT_S

DRAIN_S = 600.0
SPACE = Namespace("model", Layout("uint8", (4096,)))
OBJECTS = 20  # of each worker, before the end begins


def key(worker: int, number: int) -> bytes:
    return worker.to_bytes(16, "big") + number.to_bytes(16, "big")


def payload(worker: int, number: int) -> bytes:
    return (worker * 1_000_003 + number).to_bytes(8, "big") * (SPACE.layout.nbytes // 8)


class Worker(threading.Thread):
    """Stores without a pause until the server is gone."""

    def __init__(self, client: Client, worker: int, ending: threading.Event) -> None:
        super().__init__(daemon=True)
        self._client, self._worker, self._ending = client, worker, ending
        self.warm, self.refused = threading.Event(), threading.Event()
        self.statuses: list[Status] = []

    def run(self) -> None:
        for number in count():
            if number == OBJECTS:
                self.warm.set()
                assert self._ending.wait(WAIT_S)
            sources = [payload(self._worker, number)]
            (status,) = self._client.store([key(self._worker, number)], sources, namespace=SPACE).statuses
            self.statuses.append(status)
            if status is Status.DRAINING:
                self.refused.set()
            elif status is not Status.STORED:
                break

    @property
    def stored(self) -> list[int]:
        return [number for number, status in enumerate(self.statuses) if status is Status.STORED]


def server_over(disk: Path, tmp_path: Path) -> Server:
    l2 = {"disk": {"type": "fs", "path": str(disk)}}
    server = Server(server_settings(tmp_path, l1={"size_bytes": 16 << 20}, l2=l2, drain_s=DRAIN_S))
    assert server.parts.populator.wait(WAIT_S)
    return server


def test_a_drain_under_traffic_ends_when_the_tiers_have_everything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lmcache_fs.adapter import FsAdapter

    may_store, store = threading.Event(), FsAdapter.store

    def held_up(self: FsAdapter, items: Sequence[StoreItem], deadline: float) -> object:
        assert may_store.wait(WAIT_S)
        return store(self, items, deadline)

    monkeypatch.setattr(FsAdapter, "store", held_up)
    server, ending = server_over(tmp_path / "disk", tmp_path), threading.Event()
    with server.start(), server.connect() as first, server.connect() as second:
        workers = [Worker(client, at, ending) for at, client in enumerate((first, second))]
        for worker in workers:
            worker.start()
        for worker in workers:
            assert worker.warm.wait(WAIT_S)
        ending.set()
        ends = threading.Thread(target=server.stop, daemon=True)
        ends.start()
        for worker in workers:
            assert worker.refused.wait(WAIT_S), "a store was taken although the server drains"
        assert ends.is_alive(), "it ended before the tier had anything"
        may_store.set()
        ends.join(WAIT_S)
        assert not ends.is_alive(), "traffic kept the drain going"
        for worker in workers:
            worker.join(WAIT_S)
            assert not worker.is_alive()
    assert server.drain_until_s is not None
    assert server.parts.clock.now < server.drain_until_s - DRAIN_S / 2

    for worker in workers:
        assert worker.statuses[-1] is Status.UNREACHABLE, "it stored until the end"
        after = worker.statuses[worker.statuses.index(Status.DRAINING) : -1]
        assert set(after) == {Status.DRAINING}, "what is refused once stays refused"
        assert len(worker.stored) >= OBJECTS
    with server_over(tmp_path / "disk", tmp_path).start() as successor, successor.connect() as client:
        for at, worker in enumerate(workers):
            keys = [key(at, number) for number in worker.stored]
            found = client.lookup(keys, namespace=SPACE, hold=True, wait_s=WAIT_S)
            into = [bytearray(SPACE.layout.nbytes) for _ in keys]
            assert client.retrieve(keys, into, namespace=SPACE, promise=found.promise).hits == len(keys)
            assert into == [payload(at, number) for number in worker.stored]
