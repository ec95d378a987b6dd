"""Pages: any regions, strides, groups that share memory, skips, tails and orders, against plain numpy indexing; and
what ends a job, or a client, in the middle of one.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import mmap
import os
import signal
import sys
import threading
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lmcache_core import PageEntry, PageGroup, Region
from lmcache_core.client.client import Client
from lmcache_core.client.move import pages as pages_room
from lmcache_core.client.move import pages_plain
from lmcache_core.client.move.page_jobs import Frame, PagesJob, PagesResult, RetrieveJob
from lmcache_core.client.move.page_states import FrameEvent
from lmcache_core.client.move.pages import Pages
from lmcache_core.client.results import Status
from lmcache_core.errors import CacheError, LimitError, UsageError
from lmcache_core.kernel.answers import Reason
from lmcache_core.limits import PAGE_JOBS_MAX
from lmcache_core.native import native
from lmcache_core.pool.layout import Layout
from lmcache_core.server.server import Server
from lmcache_core.tokens.namespace import Namespace
from lmcache_testing.embedded import embedded_server, server_settings
from lmcache_testing.processes import ServerProcess
from lmcache_testing.waiting import WAIT_S, until

MIB = 1 << 20
needs_native = pytest.mark.skipif(native is None, reason="the C extension is not in use")


def fresh_keys(count: int) -> list[bytes]:
    return [os.urandom(32) for _ in range(count)]


def space_of(nbytes: int, model: str = "model") -> Namespace:
    return Namespace(model, Layout("uint8", (nbytes,)))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with embedded_server(tmp_path_factory.mktemp("pages"), l1={"size_bytes": 96 << 20}, drain_s=0.1) as server:
        yield server


@pytest.fixture
def watcher(server: Server) -> Iterator[Client]:
    with server.connect("watcher") as client:
        yield client


def leases(watcher: Client) -> dict[str, int]:
    return dict(watcher.status()["l1"]["leases_by_kind"])


NO_LEASES = {"promise": 0, "read": 0, "write": 0}


def connect(server: Server, **options: Any) -> Client:
    settings = server.parts.settings
    return Client.connect(settings.name, runtime_dir=settings.runtime_dir, **options)


class Ways:
    """Clients that get at objects in different ways: by the index, by calls, and both without the extension."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.clients = {
            "index": connect(server, copy_threads=3),
            "calls": connect(server, use_index=False, copy_threads=1),
            "plain": connect(server, use_index=False),
        }

    @property
    def names(self) -> list[str]:
        return ["plain"] if native is None else list(self.clients)

    def pages(self, way: str, groups: Sequence[PageGroup]) -> Pages:
        with pytest.MonkeyPatch.context() as patch:
            if way == "plain":
                patch.setattr(pages_room, "native", None)
            return self.clients[way].register_pages(groups)


@pytest.fixture(scope="module")
def ways(server: Server) -> Iterator[Ways]:
    ways = Ways(server)
    yield ways
    for client in ways.clients.values():
        client.close()


# --- against plain indexing -------------------------------------------------------------------------------------


@dataclass
class Plan:
    """Regions of one group in the one storage, in numbers."""

    regions: list[tuple[int, int, int]]  # offset, page_bytes, page_stride
    pages: int
    per_object: int
    null_page: int | None

    @property
    def nbytes(self) -> int:
        return self.per_object * sum(page_bytes for _, page_bytes, _ in self.regions)

    def group(self, storage: Any, number: int) -> PageGroup:
        regions = [Region(storage, offset, nbytes, stride, self.pages) for offset, nbytes, stride in self.regions]
        return PageGroup(space_of(self.nbytes, f"group {number}"), regions, self.per_object, self.null_page)

    def page(self, storage: np.ndarray[Any, Any], region: int, page: int) -> np.ndarray[Any, Any]:
        """A view of one page, by numpy alone."""
        offset, nbytes, stride = self.regions[region]
        return np.lib.stride_tricks.as_strided(storage[offset:], (self.pages, nbytes), (stride, 1))[page]

    def touched(self, ids: Sequence[int], skip: int, valid: int) -> list[bool]:
        return [skip <= at < valid and page != self.null_page for at, page in enumerate(ids)]


STORAGE_BYTES = 1 << 16


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    pages, per_object = draw(st.integers(1, 9)), draw(st.integers(1, 3))
    sizes = draw(st.lists(st.sampled_from((1, 3, 16, 64, 100, 240, 241, 500, 1024)), min_size=1, max_size=4))
    gap = draw(st.sampled_from((0, 0, 1, 24, 64)))
    at = draw(st.sampled_from((0, 0, 1, 7, 64, 1000)))
    regions = []
    if draw(st.booleans()):  # all regions of a page beside each other
        stride = sum(sizes) + gap
        for nbytes in sizes:
            regions.append((at, nbytes, stride))
            at += nbytes
    else:  # one region behind the other
        for nbytes in sizes:
            regions.append((at, nbytes, nbytes + gap))
            at += pages * (nbytes + gap)
    null_page = draw(st.sampled_from((None, 0, -1)))
    return Plan(regions, pages, per_object, null_page)


@dataclass
class Ask:
    """One entry of a call."""

    group: int
    keys: int
    ids: list[int]
    skip: int
    valid: int


@st.composite
def asks(draw: st.DrawFn, group: int, plan: Plan, keys: int, *, writes: bool) -> Ask:
    count = keys * plan.per_object
    some = st.integers(0, plan.pages - 1)
    if draw(st.booleans()) and count <= plan.pages:  # a run
        first = draw(st.integers(0, plan.pages - count))
        ids = list(range(first, first + count))
    elif writes and count <= plan.pages:
        ids = draw(st.permutations(range(plan.pages)))[:count]
    else:
        ids = draw(st.lists(some, min_size=count, max_size=count))
    if plan.null_page is not None:
        ids = [plan.null_page if draw(st.integers(0, 5)) == 0 else each for each in ids]
    valid = count if draw(st.booleans()) else draw(st.integers(0, count))
    skip = draw(st.integers(0, plan.per_object)) if writes and keys and draw(st.booleans()) else 0
    return Ask(group, keys, ids, skip, valid)


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[Plan], list[Ask], list[Ask]]:
    chosen = draw(st.lists(plans(), min_size=1, max_size=3))
    stores, reads = [], []
    for number, plan in enumerate(chosen):
        keys = draw(st.integers(0, 3))
        stores.append(draw(asks(number, plan, keys, writes=False)))
        reads.append(draw(asks(number, plan, keys, writes=True)))
    return chosen, stores, reads


def entries(plans: Sequence[Plan], asked: Sequence[Ask], keys: Sequence[list[bytes]]) -> list[PageEntry]:
    return [PageEntry(ask.group, keys[ask.group], np.array(ask.ids, np.int64), ask.skip, ask.valid) for ask in asked]


def objects_of(plan: Plan, ask: Ask, storage: np.ndarray[Any, Any]) -> list[bytes]:
    touched = plan.touched(ask.ids, ask.skip, ask.valid)
    found = []
    for key in range(ask.keys):
        parts = []
        for region, (_, nbytes, _) in enumerate(plan.regions):
            for at in range(key * plan.per_object, (key + 1) * plan.per_object):
                parts.append(plan.page(storage, region, ask.ids[at]).tobytes() if touched[at] else bytes(nbytes))
        found.append(b"".join(parts))
    return found


def scattered(
    plans: Sequence[Plan], reads: Sequence[Ask], objects: Sequence[Sequence[bytes]], before: np.ndarray[Any, Any]
) -> np.ndarray[Any, Any] | None:
    """The storage after a retrieve; None where two of its pages overlap."""
    storage, written = before.copy(), np.zeros(len(before), np.int64)
    for ask in reads:
        plan = plans[ask.group]
        touched = plan.touched(ask.ids, ask.skip, ask.valid)
        for key in range(ask.keys):
            at_byte = 0
            for region, (_, nbytes, _) in enumerate(plan.regions):
                for at in range(key * plan.per_object, (key + 1) * plan.per_object):
                    if touched[at]:
                        part = objects[ask.group][key][at_byte : at_byte + nbytes]
                        plan.page(storage, region, ask.ids[at])[:] = np.frombuffer(part, np.uint8)
                        offset, _, stride = plan.regions[region]
                        first = offset + ask.ids[at] * stride
                        written[first : first + nbytes] += 1
                    at_byte += nbytes
    return None if written.max(initial=0) > 1 else storage


@settings(deadline=None, max_examples=250, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    case=cases(),
    store_way=st.sampled_from(("index", "calls", "plain")),
    read_way=st.sampled_from(("index", "calls", "plain")),
    order=st.sampled_from(("region", "object")),
    verify=st.sampled_from(("never", "first", "always")),
    seed=st.integers(0, 2**32 - 1),
    started=st.booleans(),
)
def test_what_is_stored_and_retrieved_is_what_plain_indexing_gives(
    ways: Ways,
    case: tuple[list[Plan], list[Ask], list[Ask]],
    store_way: str,
    read_way: str,
    order: str,
    verify: str,
    seed: int,
    started: bool,
) -> None:
    chosen, stores, reads = case
    store_way, read_way = (way if way in ways.names else "plain" for way in (store_way, read_way))
    chance = np.random.default_rng(seed)
    storage = chance.integers(0, 256, STORAGE_BYTES, np.uint8)
    groups = [plan.group(storage, number) for number, plan in enumerate(chosen)]
    keys = [fresh_keys(ask.keys) for ask in stores]
    wanted = [objects_of(plan, ask, storage) for plan, ask in zip(chosen, stores, strict=True)]
    before = storage.copy()
    stored = ways.pages(store_way, groups).store(entries(chosen, stores, keys))
    assert all(status is Status.STORED for each in stored.statuses for status in each)
    assert (storage == before).all()
    for plan, own, objects in zip(groups, keys, wanted, strict=True):  # the second door
        into = [bytearray(plan.object_bytes) for _ in own]
        read = ways.clients["calls"].retrieve(own, into, namespace=plan.namespace, verify="always")
        assert read.hits == len(own)
        assert into == objects

    storage[:] = before = chance.integers(0, 256, STORAGE_BYTES, np.uint8)
    after, pages = scattered(chosen, reads, wanted, before), ways.pages(read_way, groups)
    if after is None:
        with pytest.raises(UsageError, match=r"twice|overlap"):
            pages.retrieve(entries(chosen, reads, keys), order=order, verify=verify)
        assert (storage == before).all()
        return
    if started:
        job = pages.retrieve_start(entries(chosen, reads, keys), order=order, verify=verify)
        assert job.wait(WAIT_S)
        assert job.result is not None
        result: PagesResult = job.result
    else:
        result = pages.retrieve(entries(chosen, reads, keys), order=order, verify=verify)
    assert result.hits == sum(ask.keys for ask in reads), result
    assert not any(result.untrusted)
    assert (storage == after).all()


@pytest.mark.parametrize("order", ["region", "object"])
@pytest.mark.parametrize("verify", ["never", "always"])
@pytest.mark.parametrize("page_bytes", [256 << 10, 16 << 10, (3 << 20) + 17])
def test_large_batches_by_several_threads_are_what_plain_indexing_gives(
    ways: Ways, order: str, verify: str, page_bytes: int
) -> None:
    count = max(2, (24 << 20) // (2 * page_bytes))
    storage = np.random.default_rng(1).integers(0, 256, (count, 2, page_bytes + 64), np.uint8)
    stride = 2 * (page_bytes + 64)
    regions = [Region(storage, layer * (page_bytes + 64), page_bytes, stride, count) for layer in range(2)]
    group = PageGroup(space_of(2 * page_bytes), regions, 1)
    keys, ids = fresh_keys(count), np.random.default_rng(2).permutation(count).astype(np.int64)
    for way in ways.names:
        pages = ways.pages(way, [group])
        before = storage.copy()
        assert pages.store([(0, keys, ids)]).stored == count
        storage[:] = 7
        assert pages.retrieve([(0, keys, ids)], order=order, verify=verify).hits == count
        assert (storage[:, :, :page_bytes] == before[:, :, :page_bytes]).all()
        assert (storage[:, :, page_bytes:] == 7).all()
        storage[:] = before
        ways.clients["calls"].clear(group.namespace)


def test_regions_are_ready_one_after_another_and_all_of_them_in_the_end(ways: Ways) -> None:
    layers, count, page_bytes = 8, 8, 256 << 10
    storage = np.random.default_rng(1).integers(0, 256, (layers, count, page_bytes), np.uint8)
    regions = [Region(storage[layer], 0, page_bytes, page_bytes, count) for layer in range(layers)]
    keys, ids = fresh_keys(count), np.arange(count)
    for way in ways.names:
        pages = ways.pages(way, [PageGroup(space_of(layers * page_bytes), regions, 1)])
        before = storage.copy()
        pages.store([(0, keys, ids)])
        storage[:] = 0
        job = pages.retrieve_start([(0, keys, ids)])
        for layer in range(layers):
            assert job.wait_region(layer, WAIT_S)
            assert job.done_region(layer)
            assert (storage[layer] == before[layer]).all()
        assert job.wait(WAIT_S)
        assert job.result is not None
        assert job.result.hits == count
        with pytest.raises(IndexError, match="no region 8"):
            job.done_region(layers)


def test_buffers_of_every_kind_are_regions(ways: Ways) -> None:
    torch = pytest.importorskip("torch")
    data = bytes(range(256)) * 16
    strided = torch.frombuffer(bytearray(data), dtype=torch.uint8).reshape(4, 1024)[:, :512]
    assert not strided.is_contiguous()
    mapped = mmap.mmap(-1, 4096)
    mapped[:] = data

    class OnlyDlpack:
        def __init__(self, array: Any) -> None:
            self.array = array

        def __dlpack__(self, **options: object) -> Any:
            return self.array.__dlpack__(**options)

        def __dlpack_device__(self) -> Any:
            return self.array.__dlpack_device__()

    buffers = [
        bytearray(data), memoryview(bytearray(data)), np.frombuffer(bytearray(data), np.float32), mapped,
        (ctypes.c_char * 4096).from_buffer(bytearray(data)), array("q", data), strided,
        torch.frombuffer(bytearray(data), dtype=torch.bfloat16), OnlyDlpack(np.frombuffer(bytearray(data), np.uint8)),
    ]  # fmt: skip
    for way in ways.names:
        for buffer in buffers:
            keys = fresh_keys(4)
            group = PageGroup(space_of(512), [Region(buffer, 0, 512, 1024, 4)], 1)
            ids: Any
            for ids in ([3, 2, 1, 0], array("q", [3, 2, 1, 0]), torch.tensor([3, 2, 1, 0]), range(3, -1, -1)):
                result = ways.pages(way, [group]).store([(0, keys, ids)])
                assert result.stored == 4, result
            into = [bytearray(512) for _ in keys]
            assert ways.clients["calls"].retrieve(keys, into, namespace=group.namespace).hits == 4
            assert [bytes(each) for each in into] == [data[at : at + 512] for at in (3072, 2048, 1024, 0)]


def test_strided_memory_needs_no_registration(ways: Ways) -> None:
    heads, tokens, dim = 3, 8, 40
    cache = np.random.default_rng(3).integers(0, 256, (2, heads, tokens, dim), np.uint8)
    chunk = 4  # tokens

    def regions(buffer: Any) -> list[Region]:
        page = chunk * dim
        return [Region(buffer, head * tokens * dim, page, page, tokens // chunk) for head in range(2 * heads)]

    space, keys = space_of(2 * heads * chunk * dim), fresh_keys(2)
    for way in ways.names:
        client = ways.clients[way]
        assert client.store_strided(keys, regions(cache), [0, 1], namespace=space).stored == 2
        grown = np.zeros_like(cache)
        assert client.retrieve_strided(keys, regions(grown), [0, 1], namespace=space).hits == 2
        assert (grown == cache).all()


# --- what is refused --------------------------------------------------------------------------------------------


GOOD = {"offset": 0, "page_bytes": 512, "page_stride": 1024, "pages": 4}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"page_stride": 511}, "page_stride is 511 and page_bytes 512"),
        (
            {"pages": 5},
            "5 pages of 512 bytes at a stride of 1,024 from offset 0 on end at 4,608, and the buffer has 4,096",
        ),
        ({"offset": 513}, "offset 513 on end at 4,097"),
        ({"offset": -1}, "offset is -1"),
        ({"page_bytes": 0}, "page_bytes is 0"),
        ({"page_bytes": 2**62, "page_stride": 2**62}, "the buffer has 4,096 bytes"),
        ({"pages": 1.5}, "pages is 1.5"),
        ({"buffer": object()}, "the buffer is a object: pass a torch tensor"),
        ({"buffer": np.zeros((8, 1024), np.uint8)[:, ::2]}, "not contiguous"),
        ({"device": "gpu"}, "device is 'gpu': give one of 'cpu', 'pinned', 'cuda'"),
        ({"device": "cuda"}, 'device is "cuda", and the buffer is a bytearray'),
        ({"device": "pinned"}, 'device is "pinned", but'),
    ],
)
def test_an_impossible_region_is_refused_with_a_message(ways: Ways, change: dict[str, Any], words: str) -> None:
    given = {"buffer": bytearray(4096), **GOOD, **change}
    with pytest.raises(UsageError) as raised:
        ways.pages("plain", [PageGroup(space_of(512), [Region(**given)], 1)])
    assert words in str(raised.value)


def test_impossible_groups_are_refused_with_a_message(ways: Ways) -> None:
    memory = bytearray(4096)
    region = Region(memory, **GOOD)  # type: ignore[arg-type]
    for regions, nbytes, per_object, words in (
        ([region], 513, 1, "an object has 512 bytes (1 pages of each region), but its namespace's layout"),
        ([region], 512, 0, "pages_per_object is 0"),
        ([], 512, 1, "has no regions"),
        ([region, Region(memory, 500, 512, 1024, 3)], 1024, 1, "region 1 has 3 pages and region 0 has 4"),
        ([region, Region(memory, 500, 512, 1024, 4)], 1024, 1, "regions 0 and 1 overlap"),
        ([region, Region(memory, 512, 100, 1030, 4)], 612, 1, ""),  # not for any page that there is
        ([region, Region(memory, 512, 500, 1010, 4)], 1012, 1, "regions 0 and 1 overlap"),
        ([region, Region(memory, 512, 512, 1024, 4)], 1024, 1, ""),
    ):
        with contextlib.nullcontext() if not words else pytest.raises(UsageError) as raised:
            ways.pages("plain", [PageGroup(space_of(nbytes), regions, per_object)])
        assert not words or words in str(raised.value)
    with pytest.raises(UsageError, match="no groups"):
        ways.pages("plain", [])


@pytest.mark.parametrize("entry", [(0,), (0, [], [], 0, None, "", 1), 5, None])
def test_an_invalid_entry_is_refused_with_a_message(ways: Ways, entry: Any) -> None:
    pages = ways.pages("plain", [PageGroup(space_of(512), [Region(bytearray(4096), **GOOD)], 1)])  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="entry 0 is "):
        pages.store_start([entry])


def test_entries_that_cannot_be_are_refused_before_anything_is_touched(ways: Ways) -> None:
    memory = bytearray(b"\xee" * 4096)
    keys = fresh_keys(2)
    for way in ways.names:
        pages = ways.pages(way, [PageGroup(space_of(1024), [Region(memory, **GOOD)], 2, 0)])  # type: ignore[arg-type]
        good = PageEntry(0, keys, [1, 2, 3, 0])
        for change, words in (
            ({"page_ids": [1, 2, 3, 4]}, "page_ids[3] is 4, and the group has pages 0 to 3"),
            ({"page_ids": [1, -1, 3, 2]}, "page_ids[1] is -1"),
            ({"page_ids": [1, 2, 3, 1]}, "page 1 is to be written twice"),
            ({"page_ids": [1, 2, 3]}, "page_ids has 3 ids: give 4"),
            ({"page_ids": [1, 2, 3, 2**64]}, "page_ids must be whole numbers"),
            ({"page_ids": np.array([1, 2, 3, 0], np.int32)}, "give int64"),
            ({"page_ids": np.arange(8)[::2]}, "give int64, without gaps"),
            ({"valid_pages": 5}, "valid_pages 5 do not fit 2 keys of 2 pages each"),
            ({"skip_pages": 3}, "skip_pages 3"),
            ({"skip_pages": -1}, "skip_pages -1"),
            ({"group": 1}, "no group 1; 1 are registered"),
            ({"keys": b"x" * 64}, "keys is one bytes object"),
        ):
            with pytest.raises(UsageError) as raised:
                pages.retrieve([good, good._replace(**change)] if "group" in change else [good._replace(**change)])
            assert words in str(raised.value)
        with pytest.raises(UsageError, match="a store reads all valid pages"):
            pages.store([good._replace(skip_pages=1)])
        with pytest.raises(UsageError, match="promises are given by entry"):
            pages.retrieve([good], promises=[17])  # type: ignore[list-item]
        with pytest.raises(UsageError, match="order"):
            pages.retrieve([good], order="layer")  # type: ignore[arg-type]
        with pytest.raises(UsageError):
            pages.store([(0, [b"short", keys[0]], [1, 2, 3, 0])])
        frozen = ways.pages(way, [PageGroup(space_of(512), [Region(bytes(memory), **GOOD)], 1)])  # type: ignore[arg-type]
        with pytest.raises(UsageError, match="is read-only: retrieve needs writable memory"):
            frozen.retrieve([(0, keys, [0, 1])])
        assert frozen.store([(0, keys, [0, 1])]).stored == 2
        ways.clients["calls"].clear(space_of(512))
        assert memory == b"\xee" * 4096


# --- what is not to be trusted ----------------------------------------------------------------------------------


class Small:
    """Eight objects of four pages in two regions, stored, and a second storage to read into."""

    count, per_object, page_bytes = 8, 2, 4096

    def __init__(self, pages_of: Callable[[list[PageGroup]], Pages], model: str = "small") -> None:
        self.nbytes = 2 * self.per_object * self.page_bytes
        self.storage = np.random.default_rng(5).integers(1, 256, (2, 16, self.page_bytes), np.uint8)
        self.space = space_of(self.nbytes, model + os.urandom(4).hex())
        regions = [Region(self.storage[at], 0, self.page_bytes, self.page_bytes, 16) for at in range(2)]
        self.pages = pages_of([PageGroup(self.space, regions, self.per_object)])
        self.keys, self.ids = fresh_keys(self.count), np.arange(16)[::-1].copy()
        self.before = self.storage.copy()

    def store(self) -> None:
        assert self.pages.store([(0, self.keys, self.ids)]).stored == self.count
        self.storage[:] = 0

    @property
    def entry(self) -> PageEntry:
        return PageEntry(0, self.keys, self.ids)

    def ids_of(self, *positions: int) -> list[int]:
        return [int(each) for at in positions for each in self.ids[2 * at : 2 * at + 2]]

    def check(self, result: PagesResult) -> None:
        """Hits are right, and what is neither hit nor reported is as it was."""
        reported = set(result.untrusted[0])
        for at, status in enumerate(result.statuses[0]):
            for page in self.ids_of(at):
                if status is Status.HIT:
                    assert page not in reported
                    assert (self.storage[:, page] == self.before[:, page]).all()
                elif page not in reported:
                    assert not self.storage[:, page].any()


@needs_native
@pytest.mark.parametrize("way", ["index", "calls"])
def test_a_damaged_object_is_a_miss_its_pages_are_reported_and_the_object_is_dropped(ways: Ways, way: str) -> None:
    small = Small(lambda groups: ways.pages(way, groups))
    small.store()
    link = ways.clients["index"].links.current()
    ways.clients["index"].register_layout(small.space)
    assert link.index is not None
    entry = link.index.entry(small.space.id, small.keys[3])
    assert entry is not None
    link.mapped().view(entry["offset"], 1)[0] ^= 1
    result = small.pages.retrieve([small.entry], verify="always")
    assert result.statuses[0][3] is Status.MISS
    assert result.reasons[0][3] is Reason.DAMAGED
    assert result.hits == 7
    assert sorted(result.untrusted[0]) == sorted(small.ids_of(3))
    small.check(result)
    index = link.index
    until(lambda: index.entry(small.space.id, small.keys[3]) is None)  # nobody waits for what is reported
    again = small.pages.retrieve([small.entry], verify="always")
    assert again.statuses[0][3] is Status.MISS
    assert not again.untrusted[0]


def test_what_is_not_there_is_not_written_to(ways: Ways) -> None:
    for way in ways.names:
        small = Small(lambda groups, way=way: ways.pages(way, groups))  # type: ignore[misc]
        small.store()
        small.keys[2:4] = fresh_keys(2)
        result = small.pages.retrieve([small.entry])
        assert [status is Status.HIT for status in result.statuses[0]] == [True] * 2 + [False] * 2 + [True] * 4
        assert not result.untrusted[0]
        small.check(result)


# --- promises ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("missing", [False, True])
def test_promises_are_redeemed_or_given_back(ways: Ways, watcher: Client, missing: bool) -> None:
    for way in ways.names:
        small = Small(lambda groups, way=way: ways.pages(way, groups))  # type: ignore[misc]
        small.store()
        if missing:
            small.keys[5] = fresh_keys(1)[0]
        found = ways.clients[way].lookup(small.keys, namespace=small.space, hold=True, prefix=False)
        assert found.promise
        result = small.pages.retrieve([small.entry], promises=[found.promise])
        assert result.hits == 8 - missing
        small.check(result)
        until(lambda: leases(watcher) == NO_LEASES, "the promise to go")


@pytest.mark.parametrize("made_to", ["this session", "another"])
def test_a_slice_of_a_promise_is_redeemed_and_the_rest_stays_promised(
    ways: Ways, watcher: Client, made_to: str
) -> None:
    for way in ways.names:
        small = Small(lambda groups, way=way: ways.pages(way, groups))  # type: ignore[misc]
        small.store()
        scheduler = ways.clients[way] if made_to == "this session" else watcher
        found = scheduler.lookup(small.keys, namespace=small.space, hold=True, prefix=False)
        assert found.promise
        group, keys, page_ids, *_ = small.entry
        ids, half = list(page_ids), len(keys) // 2
        per_key = len(ids) // len(keys)
        for first, end, kept in ((0, half, 1), (half, len(keys), 0)):
            entry = (group, keys[first:end], ids[first * per_key : end * per_key])
            assert small.pages.retrieve([entry], promises=[found.promise.slice(first, end)]).hits == end - first
            until(lambda kept=kept: leases(watcher) == NO_LEASES | {"promise": kept}, "the slice to be redeemed")  # type: ignore[misc]
        assert scheduler.free_lookup_locks(found.promise) == 0, "all of it was redeemed"


@needs_native
def test_a_promise_keeps_what_a_cancelled_job_has_not_read(
    server: Server, watcher: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    with connect(server, use_index=True) as client:
        small = Small(client.register_pages)
        small.store()
        found = client.lookup(small.keys, namespace=small.space, hold=True, prefix=False)
        begin = PagesJob._begin

        def give_up_first(job: PagesJob, *arguments: Any) -> object:
            job._given_up = True
            return begin(job, *arguments)

        with monkeypatch.context() as patch:
            patch.setattr(PagesJob, "_begin", give_up_first)
            job = small.pages.retrieve_start([small.entry], promises=[found.promise])
            job.cancel()
        assert job.result is not None
        assert set(job.result.statuses[0]) == {Status.ABORTED}
        client.noop()  # the server has heard of all that was said before
        assert leases(watcher) == NO_LEASES | {"promise": 1}
        assert small.pages.retrieve([small.entry], promises=[found.promise]).hits == 8
        until(lambda: leases(watcher) == NO_LEASES, "the promise to be redeemed")


# --- what a session may hold at once ---------------------------------------------------------------------------


@pytest.fixture
def sparing(start: Callable[..., Server]) -> Server:
    """A session reads 4 MiB of it at once."""
    return start(l1={"size_bytes": 16 << 20}, holding={"read_fraction_per_session_max": 0.25}, drain_s=0.1)


@needs_native
@pytest.mark.parametrize("by_region", [False, True])
def test_more_than_a_session_may_hold_is_read_into_pages_a_part_at_a_time(sparing: Server, by_region: bool) -> None:
    layers, count, page_bytes = 4, 12, 256 << 10
    storage = np.random.default_rng(1).integers(0, 256, (layers, count + 1, page_bytes), np.uint8)
    before = storage.copy()
    regions = [Region(storage[layer], 0, page_bytes, page_bytes, count + 1) for layer in range(layers)]
    keys = fresh_keys(count + 1)
    with connect(sparing, use_index=False) as client:
        pages = client.register_pages([PageGroup(space_of(layers * page_bytes), regions, 1)])
        assert pages.store([(0, keys[:count], np.arange(count))]).stored == count
        storage[:, :count] = 0
        job = pages.retrieve_start([(0, keys, np.arange(count + 1))])
        if by_region:
            assert job.wait_region(0, WAIT_S)
            assert (storage[0] == before[0]).all(), "no page of a region that is done is still to come"
        assert job.wait(WAIT_S)
        assert job.result is not None
        assert list(job.result.statuses[0]) == [Status.HIT] * count + [Status.MISS]
        assert (storage == before).all()
        assert leases(client) == NO_LEASES


@pytest.mark.parametrize("way", ["pages", "copies"])
def test_of_a_promise_of_more_than_a_session_may_hold_each_part_is_kept_until_it_is_read(
    sparing: Server, way: str
) -> None:
    storage = np.full((6, MIB), 7, np.uint8)
    keys, space = fresh_keys(6), space_of(MIB)
    with connect(sparing, use_index=False) as client, connect(sparing) as scheduler:
        pages = client.register_pages([PageGroup(space, [Region(storage, 0, MIB, MIB, 6)], 1)])
        assert pages.store([(0, keys, np.arange(6))]).stored == 6
        found = scheduler.lookup(keys[:4], namespace=space, hold=True)
        with client.prepare_retrieve(keys[3:], namespace=space):  # so that there is room for one object at a time
            if way == "pages":
                hits = pages.retrieve([(0, keys[:4], np.arange(4))], promises=[found.promise]).hits
            else:
                into = [bytearray(MIB) for _ in range(4)]
                hits = client.retrieve(keys[:4], into, namespace=space, promise=found.promise).hits
        assert hits == 4
        assert leases(client) == NO_LEASES, "the promise was redeemed to its end"


def test_what_others_of_the_session_hold_is_not_waited_for(sparing: Server) -> None:
    storage = np.full((6, MIB), 7, np.uint8)
    keys = fresh_keys(6)
    with connect(sparing, use_index=False) as client:
        space = space_of(MIB)
        pages = client.register_pages([PageGroup(space, [Region(storage, 0, MIB, MIB, 6)], 1)])
        assert pages.store([(0, keys, np.arange(6))]).stored == 6
        with client.prepare_retrieve(keys[:4], namespace=space) as held:
            assert len(held.granted) == 4
            assert list(pages.retrieve([(0, keys[4:], np.arange(2))]).statuses[0]) == [Status.QUOTA] * 2
        assert pages.retrieve([(0, keys[4:], np.arange(2))]).hits == 2


# --- what ends a job --------------------------------------------------------------------------------------------


class Large:
    """48 MiB in 96 objects, stored: a retrieve of them by one thread takes several milliseconds."""

    count, page_bytes = 96, 512 << 10

    def __init__(self, client: Client) -> None:
        self.storage = np.full((self.count, self.page_bytes), 1, np.uint8)
        self.space = space_of(self.page_bytes, "large" + os.urandom(4).hex())
        region = Region(self.storage, 0, self.page_bytes, self.page_bytes, self.count)
        self.pages = client.register_pages([PageGroup(self.space, [region], 1)])
        self.keys = fresh_keys(self.count)
        self.entry = PageEntry(0, self.keys, np.arange(self.count))
        assert self.pages.store([self.entry]).stored == self.count
        self.storage[:] = 0

    def check(self, result: PagesResult) -> None:
        reported = set(result.untrusted[0])
        for at, status in enumerate(result.statuses[0]):
            if status is Status.HIT:
                assert at not in reported
                assert (self.storage[at] == 1).all()
            elif at not in reported:
                assert not self.storage[at].any()


def until_begun(client: Client, job: RetrieveJob) -> None:
    until(lambda: client.links.occupancy.working or job.done(), "the copies to begin")


def nobody_writes(large: Large, other: Callable[[], object]) -> None:
    """What is written here stays, while something else takes its time."""
    large.storage[:] = 9
    other()
    assert (large.storage == 9).all()


@needs_native
@pytest.mark.parametrize("use_index", [True, False])
def test_when_cancel_returns_no_thread_writes_any_more(server: Server, watcher: Client, use_index: bool) -> None:
    with connect(server, use_index=use_index, copy_threads=2) as client:
        large = Large(client)
        for _ in range(5):
            job = large.pages.retrieve_start([large.entry])
            until_begun(client, job)
            job.cancel()
            assert job.result is not None
            large.check(job.result)
            statuses = set(job.result.statuses[0])
            assert statuses <= {Status.HIT, Status.ABORTED}
            nobody_writes(large, lambda: client.ping(bytes(1000)))
            large.storage[:] = 0
        until(lambda: leases(watcher) == NO_LEASES, "the leases to go")
        assert large.pages.retrieve([large.entry]).hits == large.count
        client.clear(large.space)


@needs_native
@pytest.mark.parametrize("end", ["close", "end_session"])
@pytest.mark.parametrize("use_index", [True, False])
def test_when_the_client_is_ended_no_thread_writes_any_more(
    server: Server, watcher: Client, use_index: bool, end: str
) -> None:
    client = connect(server, use_index=use_index, copy_threads=2)
    large = Large(client)
    job = large.pages.retrieve_start([large.entry])
    until_begun(client, job)
    getattr(client, end)()
    nobody_writes(large, lambda: watcher.ping(bytes(1000)))
    assert job.wait(WAIT_S)
    assert job.result is not None
    assert set(job.result.statuses[0]) <= {Status.HIT, Status.ABORTED, Status.EXPIRED, Status.UNREACHABLE}
    until(lambda: leases(watcher) == NO_LEASES, "the leases to go")
    if end == "close":
        with pytest.raises(UsageError, match="closed"):
            large.pages.retrieve_start([large.entry])
    else:
        large.storage[:] = 0
        assert large.pages.retrieve([large.entry]).hits == large.count
    client.close()
    watcher.clear(large.space)


@needs_native
@pytest.mark.parametrize("use_index", [True, False])
def test_a_job_that_is_dropped_leaves_no_lease_and_keeps_no_memory(
    server: Server, watcher: Client, use_index: bool
) -> None:
    with server.connect("drops", use_index=use_index) as client:
        large = Large(client)
        for _ in range(3):
            job = large.pages.retrieve_start([large.entry])
            until_begun(client, job)
            del job

        def let_go() -> bool:
            client.noop()  # whoever calls next tidies up
            return leases(watcher) == NO_LEASES

        until(let_go, "the leases to go")
        gc.collect()
        assert not client.links.occupancy.working
        assert large.pages.retrieve([large.entry]).hits == large.count
        client.clear(large.space)


@needs_native
@pytest.mark.parametrize("use_index", [True, False])
def test_a_job_whose_finalizer_is_interrupted_copies_no_further(
    server: Server, monkeypatch: pytest.MonkeyPatch, use_index: bool
) -> None:
    def interrupted(job: PagesJob) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(PagesJob, "__del__", interrupted)
    monkeypatch.setattr(sys, "unraisablehook", lambda unraisable: None)
    with server.connect("drops", use_index=use_index) as client:
        large = Large(client)
        for _ in range(100):
            job = large.pages.retrieve_start([large.entry])
            until_begun(client, job)
            works = client.links.occupancy.working
            del job
            until(lambda works=works: not any(work.running for work in works), "its threads to leave")  # type: ignore[misc]
            if not all(work.wait(0.0) for work in works):
                break  # not all of it was copied
        else:
            raise AssertionError("it was always copied to the end")
        client.clear(large.space)


@needs_native
def test_a_forked_child_waits_for_none_of_the_parents_threads(server: Server) -> None:
    with server.connect("forks") as client:
        large = Large(client)
        job = large.pages.retrieve_start([large.entry])
        works = client.links.occupancy.working
        pid = os.fork()
        if pid == 0:
            status = 1
            with contextlib.suppress(BaseException):
                running = any(work.running for work in works)
                job.cancel()
                del job
                gc.collect()
                status = int(running)
            os._exit(status)
        assert job.wait(WAIT_S)
        assert job.result is not None
        assert job.result.hits == large.count
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        client.clear(large.space)


@needs_native
def test_jobs_under_way_are_limited(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lmcache_core.client.link.occupancy.PAGE_JOBS_MAX", 0)
    assert PAGE_JOBS_MAX >= 16
    with server.connect("many") as client:
        small = Small(client.register_pages)
        with pytest.raises(LimitError, match="wait for some"):
            small.pages.store([small.entry])


@needs_native
def test_many_threads_may_look_at_one_job(server: Server) -> None:
    with server.connect("looks", use_index=False) as client:
        large = Large(client)
        job = large.pages.retrieve_start([large.entry])
        seen: list[Any] = []
        threads = [threading.Thread(target=lambda: seen.append(job.wait(WAIT_S) and job.result)) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert [each.hits for each in seen] == [large.count] * 4
        client.clear(large.space)


# --- a server that hangs, or dies -------------------------------------------------------------------------------


@pytest.fixture
def process() -> Iterator[ServerProcess]:
    with ServerProcess(32 << 20) as server:
        yield server


def test_no_job_waits_for_a_server_that_hangs_longer_than_it_was_told_to(process: ServerProcess) -> None:
    with process.client() as client, process.client() as watcher:
        small, other = Small(client.register_pages), Small(client.register_pages)
        small.store()
        assert client.lookup(small.keys, namespace=small.space).hits == small.count
        watcher.noop()
        os.kill(process.pid, signal.SIGSTOP)
        try:
            job = other.pages.retrieve_start([other.entry], deadline_s=0.01)
            assert job.wait(WAIT_S)
            assert job.result is not None
            assert set(job.result.statuses[0]) == {Status.MISS}
            assert set(job.result.reasons[0]) == {Reason.LATE}
            stored = other.pages.store_start([other.entry], deadline_s=0.01)
            assert stored.wait(WAIT_S)
            assert stored.result is not None
            assert set(stored.result.statuses[0]) == {Status.UNREACHABLE}
            if native is not None:
                result = small.pages.retrieve([small.entry])
                assert result.hits == small.count
                small.check(result)
        finally:
            os.kill(process.pid, signal.SIGCONT)
        client.noop()
        until(lambda: (client.noop(), leases(watcher) == NO_LEASES)[1], "what was granted late to go back")


def test_a_job_whose_server_is_killed_trusts_what_the_index_shows_and_nothing_else() -> None:
    with contextlib.suppress(CacheError), ServerProcess(32 << 20) as server:
        with server.client() as client:
            small = Small(client.register_pages)
            small.store()
            assert client.lookup(small.keys, namespace=small.space).hits == small.count
            job = small.pages.retrieve_start([small.entry])
            os.kill(server.pid, signal.SIGKILL)
            assert job.wait(WAIT_S)
            assert job.result is not None
            small.check(job.result)
            small.storage[:] = 0
            result = small.pages.retrieve([small.entry])
            assert result.hits == (small.count if native is not None else 0)
            small.check(result)
            stored = small.pages.store([small.entry])
            assert set(stored.statuses[0]) == {Status.UNREACHABLE}


def test_a_store_reads_its_pages_before_store_start_returns(ways: Ways) -> None:
    for way in ways.names:
        small = Small(lambda groups, way=way: ways.pages(way, groups))  # type: ignore[misc]
        job = small.pages.store_start([small.entry])
        small.storage[:] = 0
        assert job.wait(WAIT_S)
        assert job.result is not None
        assert job.result.stored == small.count
        result = small.pages.retrieve([small.entry])
        assert result.hits == small.count
        small.check(result)


def test_a_commit_that_nobody_waits_for_is_stored_all_the_same(server: Server, watcher: Client) -> None:
    with server.connect("forgets") as client:
        small = Small(client.register_pages)
        small.pages.store_start([small.entry])
        client.noop()
        until(lambda: watcher.lookup(small.keys, namespace=small.space).hits == small.count, "the commit")
        assert leases(watcher) == NO_LEASES


# --- interrupts, and servers that come back ---------------------------------------------------------------------


class Interrupt(BaseException):
    """What Ctrl-C raises, wherever the thread is."""


@needs_native
@pytest.mark.parametrize("use_index", [True, False])
def test_an_interrupt_anywhere_leaves_no_thread_at_work_and_no_lease(
    server: Server, watcher: Client, use_index: bool
) -> None:
    with connect(server, use_index=use_index) as client:
        large = Large(client)
        raised, own = 0, threading.get_ident()
        raise_here = ctypes.pythonapi.PyThreadState_SetAsyncExc

        def interrupt(after_s: float, over: threading.Event) -> None:
            if not over.wait(after_s):
                raise_here(ctypes.c_ulong(own), ctypes.py_object(Interrupt))

        for attempt in range(40):
            over = threading.Event()
            thread = threading.Thread(target=interrupt, args=(attempt * 0.0004, over))
            try:
                thread.start()
                if attempt % 2:
                    large.pages.retrieve([large.entry])
                else:
                    large.pages.store([large.entry._replace(keys=fresh_keys(8), page_ids=list(range(8)))])
                over.set()
                thread.join()
                for _ in range(100):  # one that is on its way comes here
                    time.sleep(0)
            except Interrupt:
                raised += 1
                assert not client.links.occupancy.working
                nobody_writes(large, lambda: watcher.ping(bytes(1000)))
            finally:
                over.set()
                thread.join()
            large.storage[:] = 0
        assert raised

        def let_go() -> bool:
            client.noop()
            return leases(watcher) == NO_LEASES

        gc.collect()
        until(let_go, "the leases to go")
        assert large.pages.retrieve([large.entry]).hits == large.count
        client.clear(large.space)


def test_a_job_that_was_interrupted_as_its_copies_began_reads_each_object_all_the_same(
    ways: Ways, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = Small(lambda groups: ways.pages("plain", groups))
    small.store()
    start, interrupts = pages_plain.PageJob.start, [Interrupt()]

    def interrupted(work: pages_plain.PageJob, threads: int, waits: bool) -> None:
        if interrupts:
            raise interrupts.pop()
        start(work, threads, waits)

    monkeypatch.setattr(pages_plain.PageJob, "start", interrupted)
    job = small.pages.retrieve_start([small.entry])
    with pytest.raises(Interrupt):
        job.wait()
    assert job.wait(60.0)
    assert job.result is not None
    assert job.result.hits == small.count
    small.check(job.result)


@pytest.mark.parametrize("late", [False, True], ids=["before", "behind"])
@pytest.mark.parametrize(
    ("step", "bound"),
    [(FrameEvent.ASK, True), (FrameEvent.ASK, False), (FrameEvent.REPEAT, True)],
    ids=["ASK", "ASK behind a registration", "REPEAT"],
)
def test_a_question_that_was_interrupted_at_a_step_is_sent_once_and_answered(
    server: Server, watcher: Client, monkeypatch: pytest.MonkeyPatch, step: FrameEvent, bound: bool, late: bool
) -> None:
    with connect(server, use_index=False) as client:
        small = Small(client.register_pages)
        small.store()
        if not bound:
            client.links.current().remove_binding(small.space)
        elif step is FrameEvent.REPEAT:  # as of one that has named very many others
            server.parts.sessions._by_id[max(server.parts.sessions._by_id)].namespaces.clear()
        with monkeypatch.context() as patch:
            patch.setattr(client.links, "step", lambda: None)
            job = small.pages.retrieve_start([small.entry])
        move, interrupts = Frame.move, [Interrupt()]

        def interrupted(frame: Frame, event: FrameEvent) -> None:
            comes = event is step and interrupts
            if comes and not late:
                raise interrupts.pop()
            move(frame, event)
            if comes:
                raise interrupts.pop()

        monkeypatch.setattr(Frame, "move", interrupted)
        with pytest.raises(Interrupt):
            job.wait(10.0)
        assert job.wait(10.0)
        assert job.result is not None
        assert job.result.hits == small.count
        small.check(job.result)
        client.noop()
        assert leases(watcher) == NO_LEASES


def test_pages_are_stored_again_at_the_next_server(tmp_path: Path) -> None:
    composed = server_settings(tmp_path, l1={"size_bytes": 8 << 20}, drain_s=0.1)
    with Client.connect(composed.name, runtime_dir=composed.runtime_dir) as client:
        small = Small(client.register_pages)
        assert set(small.pages.store([small.entry]).statuses[0]) == {Status.UNREACHABLE}
        for _ in range(2):
            with Server(composed).start(wait=True):
                small.storage[:] = small.before
                until(lambda: small.pages.store([small.entry]).stored == small.count, "the server")
                small.storage[:] = 0
                result = small.pages.retrieve([small.entry])
                assert result.hits == small.count
                small.check(result)


def test_who_waits_for_a_job_past_its_deadline_hears_of_it_from_the_call_that_ends_it(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends, over, looked = threading.Event(), threading.Event(), threading.Event()
    finish, wait_a_while = RetrieveJob._finish, RetrieveJob._wait_a_while

    def ending(self: RetrieveJob) -> None:
        ends.set()
        assert over.wait(WAIT_S)
        finish(self)

    def waited(self: RetrieveJob, timeout_s: float, region: int) -> None:
        wait_a_while(self, timeout_s, region)
        looked.set()

    monkeypatch.setattr(RetrieveJob, "_finish", ending)
    monkeypatch.setattr(RetrieveJob, "_wait_a_while", waited)
    with server.connect("late", use_index=False) as client:
        small = Small(client.register_pages)
        job = small.pages.retrieve_start([small.entry], deadline_s=0.0)
        found: list[bool] = []
        ender = threading.Thread(target=job.done)
        waiter = threading.Thread(target=lambda: found.append(job.wait(WAIT_S)))
        ender.start()
        assert ends.wait(WAIT_S)
        waiter.start()
        until(lambda: looked.is_set() or not waiter.is_alive(), "a look at the job")
        over.set()
        ender.join(WAIT_S)
        waiter.join(WAIT_S)
        assert found == [True]
        assert job.result is not None
