"""What the copier copies is what the engine would have copied: bytes, statuses, results."""

from __future__ import annotations

import itertools
import mmap
import os
import random
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lmcache_copier import ServerPages, register_pages
from lmcache_copier.pages import SharedFile
from lmcache_core import Layout, Namespace, PageEntry, PageGroup, Region, Status
from lmcache_core.errors import UsageError
from lmcache_core.limits import BATCH_KEYS_MAX

from .copier_nodes import PAGES, Node, group_of

_numbers = itertools.count(1)  # of keys: no two tests share one


def fresh_keys(count: int) -> list[bytes]:
    return [next(_numbers).to_bytes(32, "little") for _ in range(count)]


def memory(nbytes: int) -> bytearray:
    return bytearray(os.urandom(nbytes))


@pytest.mark.parametrize("page_bytes", [24, 4096, 65536, 600_000])
def test_a_store_and_a_retrieve_give_back_the_pages(shared_node: Node, page_bytes: int) -> None:
    source, target = memory(page_bytes * 2 * 8), bytearray(page_bytes * 2 * 8)
    out = register_pages(shared_node.client, [group_of(source, page_bytes, pages=8)], "server")
    into = register_pages(shared_node.client, [group_of(target, page_bytes, pages=8)], "server")
    ids, names = array("q", [5, 4, 1, 2]), fresh_keys(2)
    assert isinstance(out, ServerPages)
    assert list(out.store([(0, names, ids)]).statuses[0]) == [Status.STORED] * 2
    assert list(out.store([(0, names, ids)]).statuses[0]) == [Status.EXISTS] * 2
    read = into.retrieve([(0, names, ids)])
    assert list(read.statuses[0]) == [Status.HIT] * 2
    assert read.untrusted == [[]]
    for page in range(16):
        span = slice(page * page_bytes, (page + 1) * page_bytes)
        assert target[span] == (source[span] if page % 8 in ids else bytes(page_bytes))


@dataclass
class Case:
    """Groups over one buffer, and what is stored and retrieved."""

    groups: list[tuple[list[tuple[int, int, int]], int, int | None]]  # (offset, page_bytes, stride), per object, null
    pages: int
    nbytes: int
    entries: list[tuple[int, int, list[int], int, int]]  # group, keys, ids, skip, valid
    shared: bool  # the groups share memory


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Groups that may share memory, with gaps between pages, null pages, and batches that are not full."""
    pages = draw(st.integers(4, 12))
    groups, end = [], 0
    shared = draw(st.booleans())
    for _ in range(draw(st.integers(1, 3))):
        regions = []
        at = 0 if shared else end
        for _ in range(draw(st.integers(1, 3))):
            page_bytes = draw(st.sampled_from([8, 100, 4096, 5000]))
            stride = page_bytes + draw(st.sampled_from([0, 0, 24, 512]))
            regions.append((at, page_bytes, stride))
            at += pages * stride
        end = max(end, at)
        groups.append((regions, draw(st.integers(1, 3)), draw(st.sampled_from([None, 0, 0, 3]))))
    entries = []
    for group, (_, per_object, _null) in enumerate(groups):
        count = draw(st.integers(0, pages // per_object))
        ids = draw(st.permutations(range(pages)))[: count * per_object]
        valid = draw(st.integers(0, len(ids)))
        skip = draw(st.integers(0, per_object if count else 0))
        entries.append((group, count, list(ids), skip, valid))
    return Case(groups, pages, end, entries, shared)


def groups_on(buffer: Any, case: Case, model: str) -> list[PageGroup]:
    return [
        PageGroup(
            Namespace(model, Layout("uint8", (per_object * sum(nbytes for _, nbytes, _ in regions),))),
            [Region(buffer, at, nbytes, stride, case.pages) for at, nbytes, stride in regions],
            per_object,
            null,
        )
        for regions, per_object, null in case.groups
    ]


def seen(result: Any) -> tuple[Any, ...]:
    return (
        [list(row) for row in result.statuses],
        [list(row) for row in result.reasons],
        [sorted(row) for row in result.untrusted],
    )


@given(case=cases(), verify=st.sampled_from(["never", "always"]), seed=st.integers(0, 1 << 32))
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_both_ways_give_the_same_bytes_statuses_and_results(
    shared_node: Node, case: Case, verify: str, seed: int
) -> None:
    client = shared_node.client
    source = bytearray(random.Random(seed).randbytes(case.nbytes))
    model = f"property {next(_numbers)}"
    names = [fresh_keys(count) for _, count, _, _, _ in case.entries]
    stores = [
        PageEntry(group, names[at], array("q", ids), 0, valid)
        for at, (group, _, ids, _, valid) in enumerate(case.entries)
    ]
    reads = [
        PageEntry(group, names[at], array("q", ids), skip, valid)
        for at, (group, _, ids, skip, valid) in enumerate(case.entries)
    ][: 1 if case.shared else None]  # a page is written for one object of a call
    results: list[tuple[Any, ...]] = []
    for way in ("engine", "server"):
        space = f"{model} {way}"
        out = register_pages(client, groups_on(source, case, space), way)
        stored, again = out.store(stores), out.store(stores)
        targets = []
        for reader in ("engine", "server"):
            target = bytearray(b"\xa5") * case.nbytes
            into = register_pages(client, groups_on(target, case, space), reader)
            targets.append((seen(into.retrieve(reads, verify=verify)), bytes(target)))
        assert targets[0] == targets[1]
        results.append((seen(stored), seen(again), targets[0]))
    assert results[0] == results[1]


def test_memory_that_is_given_by_descriptor_takes_the_same_way(shared_node: Node) -> None:
    names, fd = fresh_keys(4), os.memfd_create("engine")
    os.truncate(fd, 4096 + 2 * PAGES * 4096)
    buffer = mmap.mmap(fd, 2 * PAGES * 4096, offset=4096)
    buffer[:] = os.urandom(len(buffer))
    before = bytes(buffer)
    pages = register_pages(shared_node.client, [group_of(buffer, 4096)], "server", [SharedFile(fd, buffer, 4096)])
    ids = array("q", range(8))
    assert pages.store([(0, names, ids)]).stored == 4
    buffer[:] = bytes(len(buffer))
    assert pages.retrieve([(0, names, ids)]).hits == 4
    for region in (0, PAGES):
        span = slice(region * 4096, (region + 8) * 4096)
        assert buffer[span] == before[span]
    with pytest.raises(UsageError, match="lies in none of these files"):
        register_pages(shared_node.client, [group_of(bytearray(1 << 20), 4096)], "server", [SharedFile(fd, buffer)])
    os.close(fd)


def test_hundreds_of_registrations_stay_apart(shared_node: Node) -> None:
    ids = array("q", [1, 2])
    made: list[tuple[bytearray, Sequence[bytes], ServerPages]] = []
    for number in range(300):
        buffer = bytearray([number % 256]) * (2 * 8 * 64)
        pages = register_pages(shared_node.client, [group_of(buffer, 64, pages=8)], "server")
        assert isinstance(pages, ServerPages)
        made.append((buffer, fresh_keys(1), pages))
    for _, names, pages in made:
        assert pages.store([(0, names, ids)]).stored == 1
    target = bytearray(2 * 8 * 64)
    into = register_pages(shared_node.client, [group_of(target, 64, pages=8)], "server")
    for buffer, names, pages in made:
        assert into.retrieve([(0, names, ids)]).hits == 1
        assert target[64:192] == buffer[64:192]
        pages.close()


@given(
    spans=st.lists(
        st.tuples(st.integers(0, 20_000), st.sampled_from([8, 100, 4096, 5000]), st.integers(0, 600)),
        min_size=2,
        max_size=6,
    ),
    seed=st.integers(0, 1 << 32),
)
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_registrations_that_overlap_each_store_and_write_their_own_bytes(
    shared_node: Node, spans: list[tuple[int, int, int]], seed: int
) -> None:
    """Each a registration of its own over one piece of memory, with any start, stride and length of pages."""
    source, target = bytearray(random.Random(seed).randbytes(64_000)), bytearray(64_000)
    ids = array("q", [3, 1, 0, 2])
    made = []
    for number, (first, nbytes, gap) in enumerate(spans):
        layout, places = Layout("uint8", (2 * nbytes,)), (first, nbytes, nbytes + gap, 4)
        space, names = Namespace(f"overlap {number} {first} {nbytes}", layout), fresh_keys(2)
        out, into = (
            register_pages(shared_node.client, [PageGroup(space, [Region(each, *places)], 2)], "server")
            for each in (source, target)
        )
        made.append(
            (
                names,
                out,
                into,
                [slice(first + page * (nbytes + gap), first + page * (nbytes + gap) + nbytes) for page in range(4)],
            )
        )
    for names, out, _, _ in made:
        assert out.store([(0, names, ids)]).stored == 2
    for names, _, into, pieces in made:
        target[:] = b"\xa5" * len(target)
        wanted = bytearray(target)
        for piece in pieces:
            wanted[piece] = source[piece]
        assert into.retrieve([(0, names, ids)]).hits == 2
        assert target == wanted


def test_a_promise_is_redeemed_by_the_copier(shared_node: Node) -> None:
    source, names = memory(2 * PAGES * 4096), fresh_keys(3)
    group = group_of(source, 4096)
    pages = register_pages(shared_node.client, [group], "server")
    ids = array("q", range(6))
    pages.store([(0, names, ids)])
    found = shared_node.client.lookup(names, namespace=group.namespace, hold=True)
    assert found.promise is not None
    assert pages.retrieve([(0, names, ids)], promises=[found.promise]).hits == 3
    assert shared_node.l1["leases_by_kind"]["promise"] == 0


def test_a_call_has_more_keys_than_a_frame_of_the_server(shared_node: Node) -> None:
    count = BATCH_KEYS_MAX + 1
    source, target, names = memory(64 * count), bytearray(64 * count), fresh_keys(count)
    out, into = (
        register_pages(shared_node.client, [group_of(each, 64, regions=1, per_object=1, pages=count)], "server")
        for each in (source, target)
    )
    ids = array("q", range(count))
    assert out.store([(0, names, ids)]).stored == count
    assert into.retrieve([(0, names, ids)]).hits == count
    assert target == source
    found = shared_node.client.lookup(names, namespace=out.groups[0].namespace, hold=True)
    assert found.hits == count
    assert into.retrieve([(0, names, ids)], promises=[found.promise]).hits == count
