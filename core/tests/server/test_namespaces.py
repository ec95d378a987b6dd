"""Namespaces and their layouts: any number of them, one after another, and none forgotten while something uses it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from lmcache_core.client.client import Client
from lmcache_core.client.results import Status
from lmcache_core.limits import LAYOUTS_MAX, SHARED_FRACTION_PER_HOLDER_MAX
from lmcache_core.plugins.loader import load_plugins
from lmcache_core.pool.layout import Layout
from lmcache_core.server.server import Server
from lmcache_core.settings.compose import make_settings
from lmcache_core.tokens.namespace import Namespace

KEY = b"k" * 32


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    settings = make_settings(
        name=f"n{os.urandom(4).hex()}", runtime_dir=str(tmp_path / "run"), state_dir=str(tmp_path / "state"),
        l1={"size_bytes": 16 << 20}, drain_s=0.1,
    )  # fmt: skip
    with Server(settings, load_plugins()) as server:
        assert server.populator.wait(60)
        yield server


def of_its_own(nbytes: int) -> Namespace:
    """A namespace whose layout no other one has."""
    return Namespace("model", Layout("uint8", (nbytes,)))


def store(client: Client, nbytes: int) -> Status:
    (status,) = client.store([KEY], [bytes([nbytes % 251]) * nbytes], namespace=of_its_own(nbytes)).statuses
    return status


def read(client: Client, nbytes: int) -> bytes | None:
    into = bytearray(nbytes)
    return bytes(into) if client.retrieve([KEY], [into], namespace=of_its_own(nbytes)).hits else None


def meet(client: Client, first: int, count: int) -> None:
    """So many layouts, each with an object that is cleared again."""
    for nbytes in range(first, first + count):
        assert store(client, nbytes) is Status.STORED, f"layout {nbytes - first + 1} of this series"
        client.clear(of_its_own(nbytes))


@pytest.mark.parametrize("use_index", [True, False])
def test_a_session_may_meet_any_number_of_layouts_and_what_is_used_of_each_stays(
    server: Server, use_index: bool
) -> None:
    with server.connect("kept") as keeper, server.connect("many", use_index=use_index) as client:
        assert store(keeper, 1) is Status.STORED  # an object, and a namespace of another session
        assert store(client, 2) is Status.STORED  # an object, whose namespace is forgotten by age
        lease = client.prepare_store([KEY], namespace=of_its_own(3))  # a lease, whose namespace is forgotten, too
        lease.view(0)[:] = b"abc"
        promise = client.lookup([KEY], namespace=of_its_own(2), hold=True).promise
        meet(client, 10, 2 * LAYOUTS_MAX)
        assert server.l1.counters["layouts_forgotten"] > LAYOUTS_MAX
        assert lease.commit() == [Status.STORED]
        assert read(client, 3) == b"abc"
        assert read(client, 2) == bytes([2]) * 2
        assert read(keeper, 1) == bytes([1])
        assert client.free_lookup_locks(promise) == 1
        assert read(client, 10) is None
        assert store(client, 10) is Status.STORED
        assert read(keeper, 10) == bytes([10]) * 10


def test_layouts_that_all_have_objects_are_the_limit_until_some_are_cleared(server: Server) -> None:
    with server.connect() as client:
        for nbytes in range(1, int(SHARED_FRACTION_PER_HOLDER_MAX * (LAYOUTS_MAX - 1)) + 1):
            assert store(client, nbytes) is Status.STORED
        assert store(client, LAYOUTS_MAX) is Status.QUOTA
        assert read(client, 7) == bytes([7]) * 7
        client.clear(of_its_own(8))
        assert store(client, LAYOUTS_MAX) is Status.STORED
        assert read(client, 7) == bytes([7]) * 7
        assert read(client, 8) is None


def test_a_layout_s_id_goes_to_another_and_nobody_reads_one_as_the_other(server: Server) -> None:
    """Not even a client that learnt the ids before: it comes back with a new session, and what it knows of the pool."""
    with server.connect("reader") as reader, server.connect("many") as client:
        for nbytes in range(10, 20):
            store(client, nbytes)
            assert read(reader, nbytes) is not None
            client.clear(of_its_own(nbytes))
        known = {nbytes: reader.links.current().layout_of(of_its_own(nbytes)) for nbytes in range(10, 20)}
        reader.links.current().channel.close("lost")
        reader.noop()
        meet(client, 100, LAYOUTS_MAX)
        rows = server.segment.layouts
        assert all(rows[layout_id].nbytes >= 100 for layout_id in known.values() if layout_id in rows)
        assert any(layout_id in rows for layout_id in known.values())
        for nbytes in range(10, 20):
            assert reader.links.current().layout_of(of_its_own(nbytes)) == known[nbytes]
            assert store(client, nbytes) is Status.STORED
            assert read(reader, nbytes) == bytes([nbytes]) * nbytes
