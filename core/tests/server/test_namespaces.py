"""Namespaces and their layouts: any number of them, one after another, and none forgotten while something uses it."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from lmcache_core.client.client import Client
from lmcache_core.client.results import Status
from lmcache_core.errors import UsageError
from lmcache_core.limits import LAYOUTS_MAX, NAMESPACES_SHOWN_MAX, SHARED_FRACTION_PER_HOLDER_MAX
from lmcache_core.observe.troubles import with_troubles
from lmcache_core.pool.layout import Layout
from lmcache_core.server.server import Server
from lmcache_core.tokens.namespace import Namespace
from lmcache_testing.waiting import until

KEY = b"k" * 32


@pytest.fixture
def server(start: Callable[..., Server]) -> Server:
    return start(drain_s=0.1)


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
        assert server.parts.l1.counters["layouts_forgotten"] > LAYOUTS_MAX
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
        known = {nbytes: reader.links.current().known[of_its_own(nbytes).id].layout_id for nbytes in range(10, 20)}
        reader.links.current().channel.close("lost")
        reader.noop()
        meet(client, 100, LAYOUTS_MAX)
        rows = server.parts.segment.layouts
        assert all(rows[layout_id].nbytes >= 100 for layout_id in known.values() if layout_id in rows)
        assert any(layout_id in rows for layout_id in known.values())
        for nbytes in range(10, 20):
            assert reader.links.current().known[of_its_own(nbytes).id].layout_id == known[nbytes]
            assert store(client, nbytes) is Status.STORED
            assert read(reader, nbytes) == bytes([nbytes]) * nbytes


def known(client: Client) -> list[tuple[str, int]]:
    """Label and sessions of those that `status` shows."""
    return [(row["label"], row["sessions"]) for row in client.status()["namespaces"].values()]


def test_status_shows_labels_as_long_as_sessions_use_them_or_the_pool_has_objects(server: Server) -> None:
    empty, kept = (Namespace("model", Layout("uint8", (64,)), format=each, label=each) for each in ("empty", "kept"))
    with server.connect() as looker:
        with server.connect() as client:
            client.register_layout(empty)
            client.store([KEY], [bytes(64)], namespace=kept)
            assert sorted(known(client)) == [("empty", 1), ("kept", 1)]
            assert looker.status()["namespaces"][f"{kept.id:016x}"]["layout"] == "uint8[64]"
        assert known(looker) == [("kept", 0)]
        looker.clear_by_id(kept.id)
        assert known(looker) == []


def test_the_first_label_stays_and_a_tool_without_one_neither_takes_nor_hides_it(server: Server) -> None:
    layout = Layout("uint8", (64,))
    first, second = (Namespace("model", layout, label=each) for each in ("first", "second"))
    with server.connect() as tool, server.connect() as one, server.connect() as other:
        tool.explain_by_id(first.id, layout, [KEY])
        assert known(tool) == [], "a tool's question makes no namespace known"
        one.register_layout(first)
        other.register_layout(second)
        assert known(tool) == [("first", 2)]


def test_a_tools_question_changes_nothing_that_is_known_of_an_idle_namespace(server: Server) -> None:
    space = Namespace("model", Layout("uint8", (64,)), label="mine")
    with server.connect() as tool:
        with server.connect() as engine:
            engine.store([KEY], [bytes(64)], namespace=space)
        until(lambda: known(tool) == [("mine", 0)])
        tool.explain_by_id(space.id, space.layout, [KEY])
        assert known(tool) == [("mine", 0)], "neither its label nor how many use it"
        assert server.parts.namespaces.labelled("mine") == [space.id]
        with server.connect() as engine:
            engine.register_layout(space)
            assert known(tool) == [("mine", 1)]
        until(lambda: known(tool) == [("mine", 0)])


def test_namespaces_are_found_by_their_label_while_they_are_used_and_no_longer(server: Server) -> None:
    found = server.parts.namespaces.labelled
    spaces = [Namespace(f"model {number}", Layout("uint8", (64,)), label="same") for number in range(3)]
    with server.connect() as looker:
        with server.connect() as one, server.connect() as other:
            for space in spaces:
                one.register_layout(space)
            other.register_layout(spaces[2])
            assert sorted(found("same")) == sorted(space.id for space in spaces)
            one.close()
            until(lambda: looker.status()["l1"]["sessions"] == 2)
            assert found("same") == [spaces[2].id]
        until(lambda: looker.status()["l1"]["sessions"] == 1)
        assert found("same") == []


def test_a_session_with_very_many_namespaces_has_some_of_them_shown(server: Server) -> None:
    layout = Layout("uint8", (64,))
    with server.connect() as client:
        for number in range(300):
            client.register_layout(Namespace("model", layout, format=str(number), label=f"number {number}"))
        assert len(known(client)) == NAMESPACES_SHOWN_MAX
        assert known(client)[0] == ("number 299", 1)


def test_whoever_asks_in_a_namespace_of_its_own_is_told_that_nobody_else_uses_it(server: Server) -> None:
    space = of_its_own(64)
    with server.connect() as client, server.connect() as other:
        (told,) = client.explain([KEY], namespace=space)
        assert not told.namespace_known
        never = "it was never stored through this server"
        assert told.why == f"{never}: nobody else uses this namespace, and the pool has nothing of it"
        other.register_layout(space)
        (told,) = client.explain([KEY], namespace=space)
        assert told.namespace_known
        assert told.why == never


KV = Layout("bfloat16", (2048,))


@pytest.fixture
def halving(start: Callable[..., Server]) -> Server:
    """A server whose tier stores half the bytes of KV, and can store nothing else."""
    pytest.importorskip("lmcache_fp8")
    pytest.importorskip("lmcache_mock")
    return start(drain_s=0.1, l2={"cold": {"type": "mock", "serde": ["fp8"]}})


def test_objects_that_a_tier_could_never_store_are_refused_before_the_first_one(
    halving: Server, caplog: pytest.LogCaptureFixture
) -> None:
    opaque = of_its_own(4096)
    with halving.connect() as client:
        for _ in range(2):
            with pytest.raises(
                UsageError, match=r"tier 'cold' cannot store objects of uint8.*: change l2\.cold\.serde"
            ):
                client.store([KEY], [bytes(4096)], namespace=opaque)
        (trouble,) = with_troubles(client.status())["troubles"]
        assert opaque.public_label in trouble
        assert "register a layout with the dtype of the values" in trouble
        half = memoryview(bytes(4096)).cast("H")
        assert client.store([KEY], [half], namespace=Namespace("model", KV)).statuses == [Status.STORED]
        (stored,) = client.wait_stored([KEY], namespace=Namespace("model", KV), timeout_s=20)
        assert stored.stored
    said = [each for each in caplog.records if each.levelname in ("WARNING", "ERROR")]
    assert [each.levelname for each in said] == ["WARNING"]
    assert not said[0].exc_info


def test_a_tier_that_could_never_store_what_a_session_stores_is_not_added(server: Server) -> None:
    pytest.importorskip("lmcache_fp8")
    pytest.importorskip("lmcache_mock")
    with server.connect() as client:
        assert store(client, 4096) is Status.STORED
        with pytest.raises(UsageError, match="tier 'cold' cannot store objects of uint8"):
            client.tiers_add("cold", {"type": "mock", "serde": ["fp8"]})
        client.tiers_add("cold", {"type": "mock"})
        with pytest.raises(UsageError, match="tier 'cold' cannot store objects of uint8"):
            client.tiers_reconfigure("cold", {"serde": ["fp8"]})
        (stored,) = client.wait_stored([KEY], namespace=of_its_own(4096), timeout_s=20)
        assert stored.stored
