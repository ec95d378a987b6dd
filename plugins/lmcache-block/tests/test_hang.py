"""A server whose block tier sits on a medium that answers nothing any more."""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from lmcache_block.adapter import BlockAdapter
from lmcache_block.medium.file import FileMedium
from lmcache_block.settings import BlockSettings
from lmcache_core.client.client import Client
from lmcache_core.client.results import Status
from lmcache_core.errors import TierError
from lmcache_core.pool.layout import Layout
from lmcache_core.server.server import Server
from lmcache_core.tiers.contract import AdapterContext
from lmcache_core.tokens.namespace import Namespace
from lmcache_testing.waiting import until

pytest.importorskip("lmcache_fs")

NAMESPACE = Namespace("model", Layout("uint8", (16384,)))
# As the contract has them, of calls at once: for lookups, loads, stores and deletes, each with two more for hung ones.
LANES_MAX = (2 + 2) + (4 + 2) + (2 + 2) + (2 + 2)
CONNECTIONS = 2


class Hang:
    """Calls to the medium stop in here while it is on."""

    def __init__(self, patch: pytest.MonkeyPatch, calls: tuple[str, ...]) -> None:
        self._free = threading.Event()
        self._free.set()
        self._lock = threading.Lock()
        self.inside = self.most = 0
        for name in calls:
            patch.setattr(FileMedium, name, self._hanging(getattr(FileMedium, name)))

    def begin(self) -> None:
        self._free.clear()

    def end(self) -> None:
        self._free.set()

    def _hanging(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            with self._lock:
                self.inside += 1
                self.most = max(self.most, self.inside)
            self._free.wait()
            with self._lock:
                self.inside -= 1
            return real(*arguments)

        return call


@pytest.fixture
def hang(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hang]:
    made = Hang(monkeypatch, request.param)
    yield made
    made.end()
    until(lambda: not made.inside, "the last call in the medium")


@pytest.fixture
def two_tiers(start: Callable[..., Server], tmp_path: Path) -> Server:
    block = {
        "type": "block", "path": str(tmp_path / "medium"), "size_bytes": 16 << 20, "extent_bytes": 1 << 20,
        "deadline_s": 0.3, "connections": CONNECTIONS,
    }  # fmt: skip
    return start(drain_s=0.2, l2={"nvme": block, "disk": {"type": "fs", "path": str(tmp_path / "disk")}})


def keys_of(batch: int) -> list[bytes]:
    return [hashlib.sha256(b"%d %d" % (batch, number)).digest() for number in range(8)]


def content(key: bytes) -> bytes:
    return key * (NAMESPACE.layout.nbytes // len(key))


def store(client: Client, batch: int) -> None:
    keys = keys_of(batch)
    client.store(keys, [content(key) for key in keys], namespace=NAMESPACE)


def objects(client: Client, tier: str) -> int:
    (found,) = [each["objects"] for each in client.status()["tiers"]["tiers"] if each["name"] == tier]
    return int(found)


def load(client: Client, batch: int) -> int:
    """How many of a batch come back, from whichever tier."""
    keys = keys_of(batch)
    found = client.lookup(keys, namespace=NAMESPACE, hold=True, prefix=False, wait_s=30.0)
    into = [bytearray(NAMESPACE.layout.nbytes) for _ in keys]
    result = client.retrieve(keys, into, namespace=NAMESPACE, prefix=False, promise=found.promise)
    for key, status, each in zip(keys, result.statuses, into, strict=True):
        assert bytes(each) == (content(key) if status is Status.HIT else bytes(len(each)))
    return result.hits


def expect_loaded(client: Client, batch: int) -> None:
    """A load that hangs is a miss once it is late; the next lookup takes the other tier."""
    until(lambda: load(client, batch) == 8, f"batch {batch} comes from the other tier")


ALL = ("read", "write", "sync", "is_at")


@pytest.mark.parametrize("hang", [ALL, ("read",), ("write",), ("sync",), ("is_at",)], indirect=True, ids="-".join)
def test_medium_that_hangs_costs_a_bounded_number_of_threads_and_no_other_tier(two_tiers: Server, hang: Hang) -> None:
    with two_tiers.connect() as client:
        store(client, 0)
        until(lambda: objects(client, "nvme") == objects(client, "disk") == 8, "both have the first batch")
        hang.begin()
        for batch in range(1, 9):
            store(client, batch)
            until(lambda b=batch: objects(client, "disk") == 8 * (b + 1), "the other tier stores on")
            client.clear(NAMESPACE)
            expect_loaded(client, batch)
        assert hang.most <= LANES_MAX * CONNECTIONS
        hang.end()
        until(lambda: not hang.inside, "the calls end")
        client.clear(NAMESPACE)
        expect_loaded(client, 0)


@pytest.mark.parametrize("hang", [ALL], indirect=True, ids="-".join)
def test_server_ends_while_its_medium_hangs_and_the_medium_is_free_once_it_answers(
    two_tiers: Server, hang: Hang, start: Callable[..., Server], tmp_path: Path
) -> None:
    with two_tiers.connect() as client:
        store(client, 0)
        until(lambda: objects(client, "nvme") == 8, "it is in use")
        hang.begin()
        store(client, 1)
        until(lambda: hang.inside, "a call hangs")
    two_tiers.stop()
    assert hang.inside, "it has not waited for the medium"
    hang.end()
    until(lambda: is_free(tmp_path / "medium"), "the former server's adapter is closed")
    with start(l2={"nvme": {"type": "block", "path": str(tmp_path / "medium")}}).connect() as client:
        until(lambda: objects(client, "nvme") >= 8, "the next server has what was stored")
        expect_loaded(client, 0)


def is_free(path: Path) -> bool:
    with BlockAdapter(BlockSettings(path=path), AdapterContext(tier="probe")) as probe:
        try:
            probe.exists([b"k"], time.monotonic() + 60)
        except TierError:
            return False
        return True
