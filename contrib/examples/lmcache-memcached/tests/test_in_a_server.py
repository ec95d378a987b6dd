"""The tier in a real server, and what memcached will not take."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from lmcache_memcached.adapter import MemcachedAdapter
from lmcache_memcached.settings import MemcachedSettings

from lmcache_core import Layout, Namespace, Server, make_settings
from lmcache_core.errors import TierError
from lmcache_core.settings.model import Settings
from lmcache_core.tiers.contract import AdapterContext, Result, StoreItem

NAMESPACE = Namespace("a model", Layout("uint8", (65536,)))
KEYS = [number.to_bytes(32, "big") for number in range(4)]

if TYPE_CHECKING:
    from conftest import Memcached


def settings_for(folder: Path, port: int) -> Settings:
    return make_settings(
        name="memcached-test",
        l1={"size_bytes": "16MiB", "backing": "memfd"},
        l2={"mine": {"type": "memcached", "port": port, "eviction": "none"}},
        runtime_dir=str(folder / "run"),
        state_dir=str(folder / "state"),
    )


def test_what_was_stored_comes_back_from_memcached_alone(tmp_path: Path, memcached: Memcached) -> None:
    settings = settings_for(tmp_path, memcached.port)
    contents = [bytes([number]) * 65536 for number in range(4)]
    with Server(settings) as server, server.connect() as client:
        assert server.parts.populator.wait(60)
        assert client.store(KEYS, contents, namespace=NAMESPACE).stored == 4
        assert all(each.stored for each in client.wait_stored(KEYS, namespace=NAMESPACE, timeout_s=60))
        client.clear(NAMESPACE)
        back = [bytearray(65536) for _ in KEYS]
        client.lookup(KEYS, namespace=NAMESPACE, wait_s=60)
        assert client.retrieve(KEYS, back, namespace=NAMESPACE).hits == 4
    assert back == contents


def test_the_check_says_what_to_do_where_nothing_listens() -> None:
    with MemcachedAdapter(MemcachedSettings(port=1), AdapterContext(tier="mine")) as adapter:
        with pytest.raises(TierError) as raised:
            list(adapter.check(time.monotonic() + 60))
    assert "start memcached" in raised.value.cure


def test_the_largest_object_that_is_claimed_is_stored_and_a_mebibyte_is_refused(memcached: Memcached) -> None:
    """By memcached itself: an item holds its key and a header beside the value."""
    largest = MemcachedAdapter.capabilities.object_bytes_max
    assert largest is not None
    settings = MemcachedSettings(port=memcached.port, prefix="p" * 100)
    with MemcachedAdapter(settings, AdapterContext(tier="mine")) as adapter:
        items = [StoreItem(b"k" * 64, [memoryview(bytes(nbytes))]) for nbytes in (largest, 1 << 20)]
        stored, refused = adapter.store(items, time.monotonic() + 60)
    assert stored.result is Result.DONE
    assert (refused.result, refused.retryable) == (Result.FAILED, False)
    answer = memcached.ask(b"set k 0 0 1048576\r\n", bytes(1 << 20), b"\r\n")
    assert answer.startswith(b"SERVER_ERROR object too large")
