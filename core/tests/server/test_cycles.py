"""What requests leave behind is in no cycle: a server collects none that have lived for long."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from types import FunctionType

import pytest

from lmcache_core.client.client import Client
from lmcache_core.errors import CacheError
from lmcache_core.server.server import Server
from lmcache_core.tokens.namespace import Namespace
from lmcache_testing.waiting import until

from .conftest import buffers, keys_of, payload

OURS = tuple(f"lmcache_core.{room}" for room in ("server", "kernel", "tiers", "protocol", "pool"))


@pytest.fixture
def collector() -> Iterator[None]:
    """Off, and what it would collect is looked at."""
    gc.collect()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        yield
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()


def found() -> Counter[str]:
    gc.collect()
    kinds = ((each, each if isinstance(each, FunctionType) else type(each)) for each in gc.garbage)
    return Counter(f"{kind.__module__}.{kind.__qualname__}" for _, kind in kinds if kind.__module__.startswith(OURS))


def everything(client: Client, space: Namespace, name: str) -> None:
    """One request of each kind, and some that fail or are given up."""
    keys, many = keys_of(*(f"{name} {at}" for at in range(4))), [payload(space, at) for at in range(4)]
    client.store(keys, many, namespace=space)
    client.wait_stored(keys, namespace=space)
    client.retrieve(keys, buffers(space, 4), namespace=space)
    client.explain(keys_of(f"{name} a", f"{name} b"), namespace=space)
    client.lookup(keys_of(f"{name} c"), namespace=space, wait_s=1.0)
    client.free_lookup_locks(client.lookup(keys, namespace=space, hold=True).promise)
    client.lookup_nowait(keys_of(f"{name} d"), namespace=space).cancel()
    client.pin(keys, namespace=space)
    client.unpin(keys, namespace=space)
    client.prepare_store(keys_of(f"{name} e"), namespace=space).abort()
    with suppress(CacheError):
        client.quota_remove("nobody")
    client.quota_set("somebody", {"l1": {"limit_bytes": 1 << 20}}, [7])
    client.quota_remove("somebody")
    client.clear(namespace=space, tiers=True)
    client.status()


def test_what_a_request_leaves_is_in_no_cycle(
    start: Callable[..., Server], namespace: Namespace, collector: None
) -> None:
    pytest.importorskip("lmcache_mock")
    server = start(l2={"m": {"type": "mock", "latency_s": 0.05}}, zmq={"ipc": True})
    settings = server.parts.settings
    with Client.connect(settings.name, runtime_dir=settings.runtime_dir) as client:
        everything(client, namespace, "first")  # what is made once
        found()
        gc.garbage.clear()
        everything(client, namespace, "second")
        with Client.connect(settings.name, runtime_dir=settings.runtime_dir) as other:
            other.store(keys_of("third"), [payload(namespace, 3)], namespace=namespace)
            lease = other.prepare_store(keys_of("fourth"), namespace=namespace)
            assert lease.granted
        with Client.connect(address=server.parts.carriers[0].address, maps_pool=False) as other:
            other.lookup(keys_of("third"), namespace=namespace)
        until(lambda: client.status()["l1"]["sessions"] == 1)
        assert not found()
