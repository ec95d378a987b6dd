"""What proved wrong is dropped as the incarnation that it is: from the pool, from tiers, and never its successor."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lmcache_core import PageGroup, Region
from lmcache_core.client.client import Client
from lmcache_core.client.results import Status
from lmcache_core.errors import UsageError
from lmcache_core.kernel.answers import Reason
from lmcache_core.native import native
from lmcache_testing.waiting import until

from ..conftest import Node


@pytest.fixture(params=["index", "calls"])
def client(request: pytest.FixtureRequest, node: Node) -> Client:
    if request.param == "index" and native is None:
        pytest.skip("the index is read by the C extension alone")
    node.serve()
    client: Client = node.client(use_index=request.param == "index")
    return client


def read(client: Client, node: Node, name: object) -> tuple[Any, bytes]:
    into = bytearray(node.namespace.layout.nbytes)
    return client.retrieve([node.key(name)], [into], namespace=node.namespace), bytes(into)


def store(client: Client, node: Node, name: object, number: int) -> None:
    result = client.store([node.key(name)], [node.payload(number)], namespace=node.namespace)
    assert result.statuses == [Status.STORED]


def drop(client: Client, node: Node, name: object, found: Any, **options: Any) -> int:
    return client.drop([node.key(name)], namespace=node.namespace, incarnations=found.incarnations, **options)


def test_what_was_read_is_dropped(client: Client, node: Node) -> None:
    store(client, node, "a", 1)
    found, _ = read(client, node, "a")

    assert drop(client, node, "a", found) == 1
    assert drop(client, node, "a", found) == 0
    assert read(client, node, "a")[0].reasons == [Reason.DROPPED]


def test_what_another_process_has_stored_meanwhile_stays(client: Client, node: Node) -> None:
    store(client, node, "a", 1)
    found, _ = read(client, node, "a")
    worker = node.worker(
        "client.drop([key('a')], namespace=ns, incarnations=client.lookup([key('a')], namespace=ns, identify=True)"
        ".incarnations)\n"
        "say(client.store([key('a')], [bytes([2 % 251 + 1]) * 65536], namespace=ns).stored)\nwait()"
    )
    worker.expect("1")

    assert drop(client, node, "a", found) == 0
    assert client.report_damaged([node.key("a")], namespace=node.namespace, incarnations=found.incarnations) == 0
    after, bytes_after = read(client, node, "a")
    assert after.hits == 1
    assert bytes_after == node.payload(2)


def test_a_lookup_names_what_a_retrieve_reads(client: Client, node: Node) -> None:
    for name in "ab":
        store(client, node, name, 1)
    keys = [node.key(name) for name in ("a", "gone", "b")]
    found = client.lookup(keys, namespace=node.namespace, prefix=False, identify=True)
    handle = client.lookup_nowait(keys, namespace=node.namespace, prefix=False, identify=True).wait(60.0)
    into = [bytearray(node.namespace.layout.nbytes) for _ in keys]
    got = client.retrieve(keys, into, namespace=node.namespace, prefix=False)

    assert handle is not None
    assert list(found.incarnations) == list(handle.incarnations) == list(got.incarnations)
    assert [bool(number) for number in got.incarnations] == [True, False, True]
    assert list(client.lookup(keys, namespace=node.namespace, identify=True).incarnations) == [
        got.incarnations[0],
        0,
        0,
    ]
    assert client.lookup(keys, namespace=node.namespace).incarnations == ()
    with client.prepare_retrieve(keys, namespace=node.namespace, prefix=False) as lease:
        assert list(lease.incarnations) == list(got.incarnations)


def test_a_damaged_object_is_reported_by_who_found_it(client: Client, node: Node) -> None:
    store(client, node, "a", 1)
    found, _ = read(client, node, "a")

    assert client.report_damaged([node.key("a")], namespace=node.namespace, incarnations=found.incarnations) == 1
    assert read(client, node, "a")[0].reasons == [Reason.DAMAGED]
    assert client.status()["counters"]["reported_damaged"] == 1


def test_what_pages_were_filled_from_is_dropped(client: Client, node: Node) -> None:
    store(client, node, "a", 1)
    memory = bytearray(2 * 65536)
    pages = client.register_pages([PageGroup(node.namespace, [Region(memory, 0, 65536, 65536, 2)], 1)])
    result = pages.retrieve([(0, [node.key("a"), node.key("b")], [0, 1])])

    assert [bool(number) for number in result.incarnations[0]] == [True, False]
    assert client.drop([node.key("a")], namespace=node.namespace, incarnations=result.incarnations[0][:1]) == 1
    assert client.lookup([node.key("a")], namespace=node.namespace).hits == 0


def test_incarnations_are_given_one_for_each_key(client: Client, node: Node) -> None:
    with pytest.raises(UsageError, match="one for each key"):
        client.drop([node.key("a")], namespace=node.namespace, incarnations=[])
    assert client.drop([node.key("a")], namespace=node.namespace, incarnations=[0]) == 0
    assert client.drop([node.key("a")], namespace=node.namespace, incarnations=[77]) == 0


@pytest.mark.skipif(native is None, reason="only with the C extension does a pool outlive its server")
def test_an_incarnation_outlives_the_server(node: Node) -> None:
    first = node.serve()
    client = node.client()
    for name in "ab":
        store(client, node, name, 1)
    seen = {name: read(client, node, name)[0] for name in "ab"}
    first.kill()
    node.serve()

    assert drop(client, node, "a", seen["a"]) == 1
    assert drop(client, node, "b", read(client, node, "b")[0]) == 1
    store(client, node, "a", 2)
    assert drop(client, node, "a", seen["a"]) == 0


# --- tiers ----------------------------------------------------------------------------------------------------


def on_disk(client: Client) -> int:
    return int(client.status()["tiers"]["tiers"][0]["objects"])


@pytest.fixture
def tiered(node: Node, tmp_path: Path) -> Client:
    pytest.importorskip("lmcache_fs")
    node.serve("--l2.disk.type", "fs", "--l2.disk.path", str(tmp_path / "disk"))
    client: Client = node.client()
    return client


def test_a_drop_reaches_the_tiers(node: Node, tiered: Client) -> None:
    store(tiered, node, "a", 1)
    until(lambda: on_disk(tiered) == 1)
    found, _ = read(tiered, node, "a")

    assert drop(tiered, node, "a", found, tiers=False) == 1
    assert tiered.lookup([node.key("a")], namespace=node.namespace, wait_s=60.0).hits == 1, "the disk has it"
    found, _ = read(tiered, node, "a")
    assert drop(tiered, node, "a", found) == 1
    until(lambda: on_disk(tiered) == 0)
    assert tiered.lookup([node.key("a")], namespace=node.namespace, wait_s=60.0).hits == 0


def test_a_successor_takes_the_place_of_what_was_dropped_on_the_tiers(node: Node, tiered: Client) -> None:
    store(tiered, node, "a", 1)
    until(lambda: on_disk(tiered) == 1)
    found, _ = read(tiered, node, "a")
    drop(tiered, node, "a", found, tiers=False)
    store(tiered, node, "a", 2)  # the disk has that key, and gets nothing

    assert drop(tiered, node, "a", found) == 0
    assert read(tiered, node, "a")[1] == node.payload(2)
    until(lambda: tiered.status()["tiers"]["stores"]["counts"].get("stored") == 2, "the successor")
    drop(tiered, node, "a", read(tiered, node, "a")[0], tiers=False)
    assert tiered.lookup([node.key("a")], namespace=node.namespace, wait_s=60.0).hits == 1
    assert read(tiered, node, "a")[1] == node.payload(2)


@pytest.mark.parametrize("number", [-1, 1 << 64, "x", 1.5, None])
def test_a_number_that_no_incarnation_has_is_refused_in_words(client: Client, node: Node, number: Any) -> None:
    with pytest.raises(UsageError, match="is not an incarnation"):
        client.drop([node.key("a")], namespace=node.namespace, incarnations=[number])


def test_a_list_of_promises_is_refused_in_words(client: Client, node: Node) -> None:
    store(client, node, "a", 1)
    found = client.lookup([node.key("a")], namespace=node.namespace, hold=True)
    with pytest.raises(UsageError, match="one promise per call"):
        client.free_lookup_locks([found.promise])  # type: ignore[list-item]
    assert client.free_lookup_locks(found.promise) == 1
