"""A pool full of small objects: each has its entry in the index, is a hit without a call, and outlives its server.

`LMCACHE_CORE_SMALL_OBJECTS=300000` runs it as large as it was once seen to fail: 12 KiB each, in 4 GiB.
"""

from __future__ import annotations

import os
import signal
import time

import pytest

from lmcache_core.client.client import Client
from lmcache_core.native import native
from lmcache_core.pool.layout import Layout
from lmcache_core.tokens.namespace import Namespace
from lmcache_testing.waiting import until

from ..conftest import Node, ServerProcess

pytestmark = pytest.mark.skipif(native is None, reason="there is no index without the C extension")

OBJECTS = int(os.environ.get("LMCACHE_CORE_SMALL_OBJECTS", "3000"))
POOL_BYTES = (4 << 30) * OBJECTS // 300_000
SPACE = Namespace("small", Layout("uint8", (12 << 10,)))
PAGE_KEYS = 512


def payload(number: int) -> bytes:
    return number.to_bytes(8, "big") * (SPACE.layout.nbytes // 8)


def pages() -> list[range]:
    return [range(first, min(OBJECTS, first + PAGE_KEYS)) for first in range(0, OBJECTS, PAGE_KEYS)]


def hits_without_a_call(node: Node, client: Client, server: ServerProcess) -> int:
    """How many objects are read whole while the server can answer nobody."""
    client.lookup([node.key("nobody")], namespace=SPACE)  # it is connected, and knows the layout's id
    server.signal(signal.SIGSTOP)
    try:
        hits = 0
        into = [bytearray(SPACE.layout.nbytes) for _ in range(PAGE_KEYS)]
        for page in pages():
            found = client.retrieve([node.key(number) for number in page], into[: len(page)], namespace=SPACE)
            hits += found.hits
            assert all(into[at] == payload(number) for at, number in enumerate(page[: found.hits]))
        return hits
    finally:
        server.signal(signal.SIGCONT)


def test_a_pool_of_small_objects_has_an_entry_for_each_and_is_adopted_whole(node: Node) -> None:
    options = ("--l1.watermark", "0.95")
    server = node.serve(*options, size=str(POOL_BYTES))
    client = node.client()
    began_s = time.monotonic()
    for page in pages():
        keys, sources = [node.key(number) for number in page], [payload(number) for number in page]
        assert client.store(keys, sources, namespace=SPACE).stored == len(page)
    stored_s = time.monotonic() - began_s
    index = client.status()["index"]
    assert (index["ready"], index["unindexed"]) == (OBJECTS, 0)
    assert index["entries_wanted"] == index["entries"]
    assert hits_without_a_call(node, client, server) == OBJECTS

    server.kill()
    server = node.serve(*options, size=str(POOL_BYTES))
    fresh = node.client()
    until(lambda: fresh.status()["pool"]["adopted"]["made_s"] is not None, "the adoption")
    report = fresh.status()
    adopted = report["pool"]["adopted"]
    assert adopted["objects"] == OBJECTS
    assert not any(adopted["dropped"].values())
    assert (report["index"]["ready"], report["index"]["unindexed"]) == (OBJECTS, 0)
    assert hits_without_a_call(node, fresh, server) == OBJECTS
    print(f"{OBJECTS:,} objects in {POOL_BYTES:,} bytes: stored in {stored_s:.1f} s; {index}; {adopted}")
