"""A session may meet any number of namespaces: a salt for each request is a normal thing to have."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from lmcache_core.client.client import Client
from lmcache_core.client.link import link as client_link
from lmcache_core.client.results import Status
from lmcache_core.errors import UsageError
from lmcache_core.limits import NAMESPACES_PER_SESSION_MAX
from lmcache_core.native import native
from lmcache_core.pool.layout import Layout
from lmcache_core.server.peers.session import Session
from lmcache_core.server.pool import namespaces as server_namespaces
from lmcache_core.server.server import Server
from lmcache_core.tokens.namespace import Namespace
from lmcache_testing.embedded import server_settings
from lmcache_testing.waiting import until

from ..conftest import Node

SMALL = Layout("uint8", (64,))
MANY = 10_000


def space(number: int, layout: Layout = SMALL) -> Namespace:
    return Namespace("model", layout, tenant_salt=f"request {number}")


def payload(number: int) -> bytes:
    return number.to_bytes(8, "big") * 8


def read(node: Node, client: Client, number: int) -> Status:
    into = bytearray(SMALL.nbytes)
    status = client.retrieve([node.key(number)], [into], namespace=space(number)).statuses[0]
    if status is Status.HIT:
        assert into == payload(number)
    return status


def test_ten_thousand_namespaces_in_one_session_store_and_find_their_objects(node: Node) -> None:
    node.serve(size="64MiB")
    client = node.client()
    for number in range(MANY):
        stored = client.store([node.key(number)], [payload(number)], namespace=space(number))
        assert stored.statuses == [Status.STORED], number
    link = client.links.current()
    assert len(link.bound) == NAMESPACES_PER_SESSION_MAX
    for number in (0, 1, NAMESPACES_PER_SESSION_MAX, MANY // 2, MANY - 1):
        assert read(node, client, number) is Status.HIT
    rpc = node.client(use_index=False)
    for number in range(0, MANY, 7):
        assert read(node, rpc, number) is Status.HIT, number
        assert rpc.lookup([node.key(number)], namespace=space(number), hold=True).hits == 1
    assert client.status()["l1"]["objects_by_state"]["ready"] == MANY


def test_memory_for_namespaces_is_bounded_on_both_sides(
    node: Node, start: Callable[..., Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (client_link, server_namespaces):
        monkeypatch.setattr(module, "NAMESPACES_PER_SESSION_MAX", 16)
    monkeypatch.setattr(client_link, "NAMESPACES_KNOWN_MAX", 64)
    server = start(l1={"size_bytes": 4 << 20}, drain_s=0.1)
    with server.connect() as client:
        for number in range(200):
            client.store([node.key(number)], [payload(number)], namespace=space(number))
        link = client.links.current()
        assert len(link.bound) == 16
        assert len(link.known) == len(link.registered) == 64
        (session,) = server.parts.sessions
        assert len(session.namespaces) == 16
        assert len(server.parts.namespaces.in_use) == 16
        assert len(server.parts.kernel.residents.table.namespaces) == 200, "those that have an object"
        for number in range(200):
            client.clear(space(number))
        until(lambda: not server.parts.kernel.residents.table.namespaces, "the clears")


def test_a_namespace_that_the_server_has_forgotten_is_registered_again_wherever_it_is_used(
    node: Node, start: Callable[..., Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_namespaces, "NAMESPACES_PER_SESSION_MAX", 1)  # the client believes in 1,024
    server = start(l1={"size_bytes": 4 << 20}, drain_s=0.1)
    with server.connect(use_index=False) as client:
        for number in (1, 2):
            assert client.register_layout(space(number))
        key = [node.key(1)]

        def elsewhere() -> None:
            """What drives namespace 1 out."""
            client.lookup([node.key(2)], namespace=space(2))
            (session,) = server.parts.sessions
            assert list(session.namespaces) == [space(2).id]

        elsewhere()
        assert client.store(key, [payload(1)], namespace=space(1)).stored == 1
        elsewhere()
        assert read(node, client, 1) is Status.HIT
        elsewhere()
        assert client.lookup(key, namespace=space(1)).hits == 1
        elsewhere()
        handle = client.lookup_nowait(key, namespace=space(1))
        found = handle.wait(60.0)
        assert found is not None
        assert found.hits == 1
        elsewhere()
        assert client.explain(key, namespace=space(1))[0].hit
        elsewhere()
        assert client.pin(key, namespace=space(1)) == [Status.GRANTED]
        elsewhere()
        assert client.unpin(key, namespace=space(1)) == [Status.GRANTED]
        with client.prepare_retrieve(key, namespace=space(1)) as lease:
            elsewhere()
            assert bytes(lease.view(0)) == payload(1)
        assert lease.statuses == [Status.HIT]
        with client.prepare_store([node.key(9)], namespace=space(1)) as writing:
            elsewhere()
            writing.view(0)[:] = payload(9)
            assert writing.commit() == [Status.STORED]


def test_a_layout_keeps_its_id_across_a_restart_and_a_namespace_with_objects_its_layout(node: Node) -> None:
    server = node.serve()
    client = node.client()
    other = Layout("uint8", (128,))
    filler = Namespace("filler", other)
    client.store([node.key("f")], [bytes(128)], namespace=filler)  # so that the ids are not simply the first
    for number in range(8):
        assert client.store([node.key(number)], [payload(number)], namespace=space(number)).stored == 1
    before = client.links.current().known[space(0).id].layout_id
    server.kill()
    node.serve()
    fresh = node.client()
    assert fresh.register_layout(space(0))
    assert fresh.links.current().known[space(0).id].layout_id == before
    for number in range(8):
        assert read(node, fresh, number) is Status.HIT
    until(lambda: not fresh.status()["pool"]["adopted"]["pending"], "the adoption")
    with pytest.raises(UsageError, match="give that layout, or another namespace"):
        node.client().links.current().bind_id(space(3).id, other)


@pytest.mark.skipif(native is None, reason="adoption needs the C extension")
def test_a_namespace_keeps_its_layout_before_the_first_adopted_object_of_it_is_made(node: Node) -> None:
    server = node.serve(size="4MiB")
    other = Layout("uint8", (128,))
    with server.client() as client:
        assert client.store([node.key(1)], [payload(1)], namespace=space(1)).stored == 1
        assert client.store([node.key(2)], [bytes(128)], namespace=space(2, other)).stored == 1
    server.kill()
    settings = server_settings(node.run.parent, name=node.name, l1={"size_bytes": 4 << 20})
    successor = Server(settings)  # no turn of its loop, and so no step of making, comes by itself
    try:
        assert successor.parts.adopting is not None
        session = Session(id=1, peer=None, uid=0, pid=0, carrier="", origin="")
        for taken, right, wrong in ((space(1), SMALL, other), (space(2, other), other, SMALL)):
            with pytest.raises(UsageError, match="give that layout, or another namespace") as refused:
                successor.parts.namespaces.register(session, taken.id, wrong)
            assert f"{right.fingerprint:x}" in str(refused.value)  # nobody has said yet what it looks like
            assert str(wrong) in str(refused.value)
        assert successor.parts.adopting.describe()["pending"] == 2, "no object was made for it"
        ids = [successor.parts.namespaces.register(session, space(1).id, SMALL)]
        with pytest.raises(UsageError) as refused:
            successor.parts.namespaces.register(session, space(1).id, other)
        assert str(SMALL) in str(refused.value)
        assert str(other) in str(refused.value)
        ids.append(successor.parts.namespaces.register(session, space(2, other).id, other))
        assert sorted(ids) == sorted(successor.parts.l1.former_layouts), "both have the id that they had"
    finally:
        successor.start().stop()
