"""What a server keeps of lookups that have ended: enough to be asked about, in bounded memory."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest

from lmcache_core.client.client import Client
from lmcache_core.server import lookups
from lmcache_core.server.server import Server
from lmcache_core.tokens.namespace import Namespace

pytest.importorskip("lmcache_fs")


def keys(count: int, first: int) -> list[bytes]:
    return [number.to_bytes(32, "big") for number in range(first, first + count)]


@pytest.fixture
def with_tier(start: Callable[..., Server], tmp_path: Any) -> Server:
    return start(l2={"disk": {"type": "fs", "path": str(tmp_path / "disk")}})


def remembered(server: Server) -> list[lookups.Wait]:
    return list(server.lookups._waits.values())


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
