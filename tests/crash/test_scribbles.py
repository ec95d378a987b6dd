"""Stray writes: into the pool of a dead server, and under readers that verify."""

from __future__ import annotations

import mmap
import random

import pytest

from lmcache_core.client.results import Status
from lmcache_core.kernel.answers import Reason
from lmcache_core.limits import PAGE_BYTES
from lmcache_core.native import native
from lmcache_core.pool.header import decode
from lmcache_testing.embedded import Json
from lmcache_testing.waiting import until

from ..conftest import Node, ServerProcess

pytestmark = pytest.mark.skipif(native is None, reason="adoption needs the C extension")
OBJECTS = 100


def fill(node: Node, server: ServerProcess) -> None:
    with server.client() as client:
        keys = [node.key(number) for number in range(OBJECTS)]
        sources = [node.payload(number) for number in range(OBJECTS)]
        assert client.store(keys, sources, namespace=node.namespace).stored == OBJECTS


def scribble(node: Node, count: int, start: int = PAGE_BYTES) -> None:
    """So many random bytes, anywhere behind `start`."""
    rng = random.Random(7)
    with node.shm.open("r+b") as file, mmap.mmap(file.fileno(), 0) as pool:
        for _ in range(count):
            pool[rng.randrange(start, len(pool))] = rng.randrange(256)


def read(node: Node, server: ServerProcess, verify: str, use_index: bool) -> tuple[int, int]:
    """(hits, wrong ones)."""
    hits = wrong = 0
    with server.client(verify=verify, use_index=use_index) as client:
        for number in range(OBJECTS):
            into = bytearray(node.namespace.layout.nbytes)
            if client.retrieve([node.key(number)], [into], namespace=node.namespace).hits:
                hits += 1
                wrong += into != node.payload(number)
    return hits, wrong


@pytest.mark.parametrize("use_index", [True, False])
@pytest.mark.parametrize("verify", ["never", "first", "always"])
def test_what_was_scribbled_into_a_dead_server_s_pool_is_no_hit(node: Node, verify: str, use_index: bool) -> None:
    server = node.serve()
    fill(node, server)
    server.kill()
    scribble(node, 20_000)
    server = node.serve()
    _, wrong = read(node, server, verify, use_index)
    assert wrong == 0


@pytest.mark.parametrize("use_index", [True, False])
def test_what_nobody_scribbled_on_is_adopted_and_checked_once(node: Node, use_index: bool) -> None:
    server = node.serve()
    fill(node, server)
    server.kill()
    scribble(node, 100)  # some objects of the hundred are hit
    server = node.serve()
    hits, wrong = read(node, server, "never", use_index)
    assert 0 < hits < OBJECTS
    assert wrong == 0


def test_objects_written_in_place_have_a_checksum_unless_told_not_to(node: Node) -> None:
    server = node.serve()
    keys = [node.key("with"), node.key("without")]
    with server.client() as client:
        with client.prepare_store(keys, namespace=node.namespace) as lease:
            for position in range(2):
                lease.view(position)[:] = node.payload(position)
            lease.commit([0])
            lease.commit([1], checksums=False)
        for use_index in (True, False):
            with server.client(verify="always", use_index=use_index) as reader:
                into = [bytearray(node.namespace.layout.nbytes) for _ in keys]
                found = reader.retrieve(keys, into, namespace=node.namespace, prefix=False)
                assert list(found.statuses) == [Status.HIT, Status.MISS]
                assert found.reasons[1] is Reason.UNVERIFIABLE
                assert reader.retrieve(keys, into, namespace=node.namespace, verify="first").hits == 2
    server.kill()
    server = node.serve()  # without a checksum nobody can tell what it is
    with server.client() as client:
        assert client.lookup(keys, namespace=node.namespace).hits == 1
        assert client.status()["pool"]["adopted"]["dropped"]["unverifiable"] == 1


def test_slots_read_in_place_are_checked_after_an_adoption(node: Node) -> None:
    server = node.serve()
    fill(node, server)
    server.kill()
    scribble(node, 100)
    server = node.serve()
    granted = 0
    with server.client() as client:
        for number in range(OBJECTS):
            with client.prepare_retrieve([node.key(number)], namespace=node.namespace) as lease:
                for position in lease.granted:
                    granted += 1
                    assert lease.view(position) == node.payload(number)
    assert 0 < granted < OBJECTS


# --- what the server checks by itself -----------------------------------------------------------------------------


def intact(node: Node) -> set[int]:
    """The objects whose bytes stand whole in the data of the pool, by a look into the file."""
    with node.shm.open("rb") as file:
        data = file.read()
    start, nbytes = decode(data[:PAGE_BYTES]).data_offset, node.namespace.layout.nbytes
    by_bytes = {node.payload(number): number for number in range(OBJECTS)}
    slots = (data[at : at + nbytes] for at in range(start, len(data) - nbytes + 1, nbytes))
    return {by_bytes[slot] for slot in slots if slot in by_bytes}


def data_offset(node: Node) -> int:
    with node.shm.open("rb") as file:
        return decode(file.read(PAGE_BYTES)).data_offset


def checked(server: ServerProcess) -> Json:
    """What `status` says of the check in the background, once it is through."""

    def done() -> Json | None:
        report = client.status()["pool"]["adopted"]["checked"]
        return report if report["verified_s"] is not None else None

    with server.client(maps_pool=False) as client:
        return dict(until(done, "the check in the background"))


def test_the_background_drops_what_is_damaged_before_anybody_reads_it(node: Node) -> None:
    server = node.serve()
    fill(node, server)
    server.kill()
    scribble(node, 40, data_offset(node))
    sound = intact(node)
    assert 0 < len(sound) < OBJECTS
    server = node.serve("--l1.adopt.verify", "background")
    report = checked(server)
    assert (report["verified"], report["damaged"]) == (len(sound), OBJECTS - len(sound))
    assert report["verified_bytes"] == len(sound) * node.namespace.layout.nbytes
    with server.client() as client:
        keys = [node.key(number) for number in range(OBJECTS)]
        found = [client.lookup([key], namespace=node.namespace, hold=True).hits for key in keys]
        assert {number for number, hits in enumerate(found) if hits} == sound  # nobody has read a byte of them
        gone = next(number for number in range(OBJECTS) if number not in sound)
        assert client.explain([keys[gone]], namespace=node.namespace)[0].reason == Reason.DAMAGED.name.lower()
    hits, wrong = read(node, server, "never", use_index=True)
    assert (hits, wrong) == (len(sound), 0)


def test_an_orderly_pool_is_checked_once_and_by_nobody_after_that(node: Node) -> None:
    server = node.serve()
    fill(node, server)
    server.kill()
    server = node.serve("--l1.adopt.verify", "background")
    assert checked(server)["verified"] == OBJECTS
    scribble(node, 300, data_offset(node))  # who checked again would see it
    hits, wrong = read(node, server, "never", use_index=True)
    assert hits == OBJECTS
    assert wrong > 0
    assert read(node, server, "never", use_index=False)[0] == OBJECTS
