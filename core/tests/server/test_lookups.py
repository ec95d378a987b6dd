"""What a server keeps of lookups that have ended: enough to be asked about, in bounded memory."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from lmcache_core.client.client import Client
from lmcache_core.server import lookups
from lmcache_core.server.server import Server
from lmcache_core.tokens.namespace import Namespace

lmcache_fs = pytest.importorskip("lmcache_fs.adapter")


def keys(count: int, first: int) -> list[bytes]:
    return [number.to_bytes(32, "big") for number in range(first, first + count)]


@pytest.fixture
def with_tier(start: Callable[..., Server], tmp_path: Any) -> Server:
    return start(l2={"disk": {"type": "fs", "path": str(tmp_path / "disk")}})


def remembered(server: Server) -> list[lookups.Wait]:
    return list(server.lookups._waits.values())


@pytest.fixture
def with_silent_tier(with_tier: Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """Its tier answers nothing until the test ends."""
    adapter = lmcache_fs.FsAdapter
    over, exists = threading.Event(), adapter.exists

    def silent(self: Any, keys: Any, deadline: float) -> Any:
        over.wait(60)
        return exists(self, keys, deadline)

    monkeypatch.setattr(adapter, "exists", silent)
    yield with_tier
    over.set()


def test_the_first_lookup_after_a_while_of_silence_waits_as_long_as_it_was_told(
    with_silent_tier: Server, namespace: Namespace
) -> None:
    with with_silent_tier.connect() as client:
        client.register_layout(namespace)
        for number in range(4):
            time.sleep(0.15)  # nothing happens: the server's loop waits
            began_s = time.monotonic()
            client.lookup(keys(1, number), namespace=namespace, wait_s=0.2)
            assert time.monotonic() - began_s >= 0.2


def test_lookups_that_have_ended_are_remembered_by_their_keys_not_by_their_number(
    with_tier: Server, namespace: Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lookups, "JOB_KEYS_REMEMBERED", 1000)
    with with_tier.connect() as client:
        for number in range(12):
            assert client.lookup(keys(200, 1000 * number), namespace=namespace, wait_s=30).hits == 0
    assert 0 < sum(len(wait.keys) for wait in remembered(with_tier)) <= 1000


def test_a_lookup_that_is_forgotten_is_gone_without_the_collector(
    with_tier: Server, namespace: Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    def look(client: Client, number: int) -> None:
        client.lookup(keys(10, 1000 * number), namespace=namespace, wait_s=30)

    with with_tier.connect() as client:
        look(client, 0)
        first = weakref.ref(remembered(with_tier)[0])
        monkeypatch.setattr(lookups, "JOB_KEYS_REMEMBERED", 5)
        gc.disable()
        try:
            look(client, 1)
            look(client, 2)
            assert first() is None
        finally:
            gc.enable()
