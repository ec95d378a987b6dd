"""What was hit and what was missed, as `status` says it: exactly what happened, seen from another process."""

from __future__ import annotations

import struct

import pytest

from lmcache_core.native import native
from lmcache_core.pool.segment import Segment
from lmcache_core.pool.tally import Tally
from lmcache_core.server.server import Server
from lmcache_testing.embedded import Json
from lmcache_testing.waiting import WAIT_S, until

from ..conftest import Node

NBYTES = 65536
needs_index = pytest.mark.skipif(native is None, reason="the index is read by the C extension alone")

WORK = """
keys = [key(number) for number in range(64)]
into = [bytearray(65536) for _ in keys]
assert client.lookup(keys, namespace=ns).hits == 0
assert client.store(keys, [bytes(65536)] * 64, namespace=ns).stored == 64
for _ in range(5):
    assert client.lookup(keys, namespace=ns).hits == 64
for _ in range(8):
    assert client.retrieve(keys, into, namespace=ns).hits == 64
"""


def figures(server: Server) -> tuple[Json, Json, int]:
    with server.client(maps_pool=False) as client:
        traffic = client.status()["traffic"]
    return traffic["lookups"], traffic["retrieves"], traffic["implausible_counts"]


@pytest.mark.parametrize("by_index", [pytest.param(True, marks=needs_index), False])
def test_misses_hits_and_retrieves_are_counted_each_once(node: Node, by_index: bool) -> None:
    server = node.serve()
    connect = "" if by_index else "client = Client.connect(sys.argv[1], runtime_dir=sys.argv[2], use_index=False)\n"
    worker = node.worker(connect + WORK + "say('done')\nwait()")
    worker.expect("done")
    lookups, retrieves, _ = figures(server)
    assert (lookups["calls"], lookups["keys"], lookups["hits"]) == (6, 64 + 5 * 64, 5 * 64)
    assert lookups["misses"] == {"never_stored": 1, "behind_a_miss": 63}
    assert lookups["hit_rate"] == pytest.approx(320 / 384, abs=1e-6)
    assert (retrieves["calls"], retrieves["keys"], retrieves["hits"]) == (8, 512, 512)
    assert retrieves["bytes"] == 512 * NBYTES
    assert (retrieves["misses"], retrieves["hit_rate"]) == ({}, 1.0)
    assert lookups["hits_by_index"] == (320 if by_index else 0)
    assert retrieves["hits_by_index"] == (512 if by_index else 0)


@needs_index
@pytest.mark.parametrize("end", ["goodbye", "kill"])
def test_what_a_worker_counted_outlives_it(node: Node, end: str) -> None:
    server = node.serve()
    for turn in (1, 2):
        worker = node.worker(WORK.replace("0\n", "0 or True\n") + "say('done')\nwait()\nclient.close()\nsay('closed')")
        worker.expect("done")
        if end == "kill":
            worker.kill()
        else:
            worker.go()
            worker.expect("closed")
        with server.client(maps_pool=False) as client:
            until(lambda client=client: client.status()["sessions_connected"] == 1)
            lookups = client.status()["traffic"]["lookups"]
        assert lookups["hits_by_index"] == 5 * 64 * turn
        assert lookups["hits"] == 5 * 64 * turn + 64 * (turn - 1)  # the second one's first lookup is a call, and hits


@needs_index
def test_a_prefix_that_the_index_has_in_part_is_counted_once(node: Node) -> None:
    server = node.serve()
    client = node.client()
    keys = [node.key(number) for number in range(10)]
    client.store(keys[:4], [node.payload(1)] * 4, namespace=node.namespace)
    assert client.lookup(keys, namespace=node.namespace).hits == 4
    assert client.lookup(keys, namespace=node.namespace, prefix=False).hits == 4
    handle = client.lookup_nowait(keys, namespace=node.namespace)
    assert handle.wait(WAIT_S).hits == 4
    assert client.lookup_nowait(keys[:4], namespace=node.namespace).wait(WAIT_S).hits == 4
    into = [bytearray(NBYTES) for _ in keys]
    assert client.retrieve(keys, into, namespace=node.namespace).hits == 4
    lookups, retrieves, _ = figures(server)
    assert (lookups["keys"], lookups["hits"]) == (34, 16)
    assert lookups["misses"]["behind_a_miss"] == 10
    assert lookups["misses"]["never_stored"] == 1 + 6 + 1
    assert (retrieves["keys"], retrieves["hits"]) == (10, 4)


@needs_index
def test_lookups_of_several_groups_are_counted(node: Node) -> None:
    server = node.serve()
    client = node.client()
    keys = [node.key(number) for number in range(10)]
    client.store(keys[:4], [node.payload(1)] * 4, namespace=node.namespace)
    group = (node.namespace, keys[:4])
    assert client.lookup_many([group, group], unit_tokens=16).tokens == 64
    assert client.lookup_many([(node.namespace, keys)], unit_tokens=16, ask=False).tokens == 64  # no lookup: a look
    assert client.lookup_many([(node.namespace, keys)], unit_tokens=16).tokens == 64
    lookups, _, _ = figures(server)
    assert (lookups["keys"], lookups["hits"]) == (18, 12)


@needs_index
def test_reads_in_place_and_by_pages_are_counted(node: Node) -> None:
    server = node.serve()
    client = node.client()
    keys = [node.key(number) for number in range(4)]
    client.store(keys, [node.payload(1)] * 4, namespace=node.namespace)
    client.lookup(keys, namespace=node.namespace)
    with client.prepare_retrieve(keys, namespace=node.namespace, optimistic=True):
        pass
    _, retrieves, _ = figures(server)
    assert (retrieves["calls"], retrieves["keys"], retrieves["hits"]) == (1, 4, 4)
    assert retrieves["bytes"] == 4 * NBYTES


@needs_index
@pytest.mark.parametrize("scribble", [(1 << 64) - 1, 0, 1 << 60], ids=["ones", "zeros", "a jump"])
def test_a_scribbled_line_moves_no_total(node: Node, scribble: int) -> None:
    server = node.serve()
    client = node.client()
    keys = [node.key(number) for number in range(4)]
    client.store(keys, [node.payload(1)] * 4, namespace=node.namespace)
    assert client.lookup(keys, namespace=node.namespace).hits == 4
    assert client.lookup(keys, namespace=node.namespace).hits == 4
    before, _, doubted = figures(server)
    assert doubted == 0
    segment = Segment.attach_name(node.name)
    row = next(row for row in range(1024) if segment.tables.tally(row)[Tally.LOOKUP_HITS])
    line = segment.tables.tally(row)
    line[:] = memoryview(struct.pack("16Q", *[scribble] * 16)).cast("Q")
    after, _, doubted = figures(server)
    assert doubted == 1
    assert after["hits_by_index"] == before["hits_by_index"] == 8
    assert client.lookup(keys, namespace=node.namespace).hits == 4
    assert figures(server)[0]["hits_by_index"] in (8, 12)  # past 2**64 it goes back, and is doubted again
    segment.close()


@needs_index
def test_hits_while_the_server_is_gone_are_not_the_next_ones(node: Node) -> None:
    """A worker lives through a server: what it counted before is not counted twice, and what comes after is."""
    server = node.serve()
    worker = node.worker(
        WORK
        + """
say('done')
wait()
while client.lookup(keys + [key('other')], namespace=ns).statuses[-1].name == 'UNREACHABLE': time.sleep(0.01)
for _ in range(3):
    assert client.lookup(keys, namespace=ns).hits == 64
say('again')
wait()
"""
    )
    worker.expect("done")
    server.kill()
    successor = node.serve()
    worker.go()
    worker.expect("again")
    lookups, _, doubted = figures(successor)
    assert doubted == 0
    assert lookups["hits_by_index"] % 64 == 0
    assert 3 * 64 <= lookups["hits_by_index"] < 3 * 64 + 5 * 64
