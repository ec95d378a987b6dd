"""Damaged pool images: whatever stands in tables and index, a reader and an adopting server keep to their bounds."""

from __future__ import annotations

import array
import ctypes
import struct
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple
from uuid import uuid4

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lmcache_core.clock import Clock
from lmcache_core.kernel import Kernel, KernelConfig, Reason, State
from lmcache_core.kernel.allocator import slab_bytes_for
from lmcache_core.limits import INDEX_ENTRY_BYTES, PAGE_BYTES
from lmcache_core.native import native
from lmcache_core.policies.lru import LruEviction
from lmcache_core.pool.backing import Backing
from lmcache_core.pool.layout import Layout
from lmcache_core.pool.segment import Segment
from lmcache_core.server.pool.adopting import read_pool
from lmcache_core.server.pool.l1 import L1

pytestmark = pytest.mark.skipif(native is None, reason="adoption needs the C extension")

MIB = 1 << 20
EPOCH = 77
LAYOUTS = {1: Layout("uint8", (4096,)), 2: Layout("uint8", (20000,)), 3: Layout("uint8", (3 * MIB // 2,))}
SPACES = {1: 0x1111, 2: 0x2222, 3: 0x3333}
KEYS = [number.to_bytes(32, "little") for number in range(60)]


class Image(NamedTuple):
    segment: Segment
    front: bytes  # everything before the data
    places: list[tuple[int, int]]  # (offset, words) of what may be damaged


def kernel_over(segment: Segment, epoch: int) -> Kernel:
    info = segment.info
    config = KernelConfig(info.data_bytes, info.data_offset, slab_bytes_for(info.data_bytes))
    return Kernel(config, LruEviction(), epoch)


def fill(segment: Segment) -> None:
    """Objects of three sizes, ready, being written, quarantined and doomed, by workers 1 and 2."""
    kernel = kernel_over(segment, EPOCH)
    kernel.add_memory(segment.info.data_bytes)
    l1 = L1(kernel, segment, Clock(), lambda effect: None)
    for session, row in ((1, 1), (2, 2)):
        kernel.open_session(session, 0, row)
        kernel.attach_session(session, row)
    for layout_id, layout in LAYOUTS.items():
        l1.add_layout(layout_id, layout)
        count = {1: 40, 2: 20, 3: 2}[layout_id]
        grants = kernel.prepare_store(1, SPACES[layout_id], layout_id, KEYS[:count], 0.0)
        kernel.commit_store(1, grants.lease_id, 0.0, range(count - 1))
    kernel.prepare_store(2, SPACES[1], 1, KEYS[50:55], 0.0, ttl_s=1.0)
    kernel.prepare_retrieve(2, SPACES[2], KEYS[:3], 0.0)
    kernel.drop(SPACES[2], KEYS[:5], 0.0, Reason.DROPPED)
    kernel.expire(5.0)
    kernel.prepare_store(2, SPACES[2], 2, KEYS[55:58], 6.0)
    l1.apply()
    segment.serve(EPOCH)
    assert l1.index is not None
    l1.index.close()


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Image]:
    run = tmp_path_factory.mktemp("run")
    # Not whole slabs of 1 MiB: the last one is shorter.
    segment = Segment.create(f"f{uuid4().hex[:10]}", 8 * MIB + 3 * PAGE_BYTES, Backing.MEMFD, runtime_dir=Path(run))
    with segment:
        fill(segment)
        header = segment.header
        marks = header.index_offset
        entries = marks + header.index_bytes - header.index_entries * INDEX_ENTRY_BYTES
        front = bytes(segment.buffer[: header.data_offset])
        used = [
            entries + at * INDEX_ENTRY_BYTES
            for at in range(header.index_entries)
            if any(front[entries + at * INDEX_ENTRY_BYTES :][:8])
        ]
        places = [
            (header.layouts_offset, 4 * 8),
            (header.slabs_offset, header.slab_rows),
            (header.slots_offset, header.slot_rows),
            *((at, INDEX_ENTRY_BYTES // 8) for at in used),
            *((at, INDEX_ENTRY_BYTES // 8) for at in used[:8]),
            (entries, header.index_entries * INDEX_ENTRY_BYTES // 8),
        ]
        yield Image(segment, front, places)


WORDS = st.one_of(
    st.integers(0, 2**64 - 1),
    st.integers(0, 8),
    st.sampled_from(
        [2**64 - 1, 2**63, 2**32, 4096, 2 | 0xFFFF << 8, 1 | 1 << 8, 4 | 2 << 8, 3, 1 << 32 | 1, 8 << 32 | 5]
    ),
)
WOUNDS = st.lists(
    st.tuples(st.integers(0, 1 << 30), st.integers(0, 1 << 30), st.one_of(WORDS, st.text("cx", max_size=1))),
    max_size=12,
)


def wound(image: Image, wounds: list[tuple[int, int, Any]]) -> None:
    """The image, with some words replaced, xored, or copied from elsewhere."""
    buffer = image.segment.buffer
    buffer[: len(image.front)] = image.front
    for at, (pick, word, value) in enumerate(wounds):
        offset, words = image.places[pick % len(image.places)]
        offset += word % words * 8
        if value == "c":  # another entry's, slot's or row's word, or all of its line
            other, _ = image.places[(pick + at + 1) % len(image.places)]
            nbytes = 128 if word % 2 and offset + 128 <= len(image.front) else 8
            buffer[offset : offset + nbytes] = image.front[other : other + nbytes]
        elif isinstance(value, str):
            (now,) = struct.unpack_from("<Q", buffer, offset)
            struct.pack_into("<Q", buffer, offset, now ^ 1 << word % 64)
        else:
            struct.pack_into("<Q", buffer, offset, value)


def check_found(pool: Any, segment: Segment) -> None:
    """What the scan gives is consistent in itself, whatever it was given."""
    header, unit = segment.header, slab_bytes_for(segment.info.data_bytes)
    slabs = sorted(pool.slabs())
    for (start, nbytes, *_), (following, *_) in pairwise(slabs):
        assert start + nbytes <= following
    used = unmade = 0
    for start, nbytes, slot_bytes, slots_used, objects, fresh, free in slabs:
        assert start >= header.data_offset
        assert start + nbytes <= header.segment_bytes
        assert (start - header.data_offset) % unit == 0
        assert fresh <= start + nbytes
        assert slots_used == (fresh - start) // slot_bytes - len(free)
        assert all((offset - start) % slot_bytes == 0 and start <= offset < fresh for offset in free)
        used += slots_used
        unmade += objects
    waiting = pool.waiting()
    assert used == unmade + len(waiting)
    assert unmade == pool.objects == pool.pending
    assert len({offset for offset, _, _ in waiting}) == len(waiting)


@settings(
    max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(wounds=WOUNDS, living=st.sampled_from([(), (1,), (2,), (1, 2)]))
def test_an_adopting_server_believes_nothing_that_does_not_fit(
    image: Image, wounds: list[tuple[int, int, Any]], living: tuple[int, ...]
) -> None:
    wound(image, wounds)
    segment = image.segment
    rows = bytearray(segment.header.worker_rows)
    for row in living:
        rows[row] = 1
    pool = read_pool(segment, bytes(rows))
    check_found(pool, segment)
    objects, waiting = pool.objects, len(pool.waiting())

    again = read_pool(segment, bytes(rows))  # what was put right stays right
    assert again.objects == objects
    assert len(again.waiting()) == waiting
    assert not any(again.dropped.values()), again.dropped
    del again

    kernel = kernel_over(segment, EPOCH + 1)
    l1 = L1(kernel, segment, Clock(), lambda effect: None, former_layouts=pool.layouts())
    kernel.adoption.begin(pool, living)
    kernel.add_memory(segment.info.data_bytes)
    kernel.open_session(9, 0, 9)
    kernel.attach_session(9, 9)
    found = kernel.lookup(9, SPACES[1], KEYS[:40], 0.0, prefix=False)
    l1.apply()
    while kernel.adoption.step(7):
        l1.apply()
    assert kernel.adoption.lost == 0
    assert kernel.lookup(9, SPACES[1], KEYS[:40], 0.0, prefix=False).statuses == found.statuses
    for row in living:
        kernel.adoption.former_gone(row)
    l1.apply()
    usage = kernel.usage()
    assert usage.objects_by_state["ready"] == objects
    assert usage.used_bytes == usage.bytes_by_state["ready"]

    # It goes on as any pool does, to the last slot.
    layout_id = l1.layout_id(LAYOUTS[2], frozenset)
    l1.add_layout(layout_id, LAYOUTS[2])
    for first in range(0, 1000, 100):
        keys = [(1 << 40 | number).to_bytes(32, "little") for number in range(first, first + 100)]
        grants = kernel.prepare_store(9, SPACES[2], layout_id, keys, 1.0)
        l1.apply()
        kernel.commit_store(9, grants.lease_id, 1.0)
        l1.apply()
    kernel.clear(2.0)
    l1.apply()
    assert kernel.usage().used_bytes == 0
    assert all(
        segment.tables.slot(offset)[0] == State.FREE
        for offset in range(segment.header.data_offset, segment.header.segment_bytes, PAGE_BYTES)
    )
    assert l1.index is not None
    assert l1.index.index.ready == 0
    l1.index.close()


def entry_of(image: Image, key: bytes, space: int) -> int:
    """Where a key's entry begins in the image."""
    for offset, words in image.places[3:-1]:
        if words == 16 and image.front[offset + 8 : offset + 48] == key + struct.pack("<Q", space):
            return offset
    raise AssertionError("no such entry")


@pytest.mark.parametrize(
    ("cause", "word", "value"),
    [
        ("half_changed", 0, lambda was: was & ~3 | 1),
        ("misplaced", 1, lambda was: was ^ 1),  # another key: a probe for it goes elsewhere
        ("misplaced", 6, lambda was: was + 1),
        ("misplaced", 6, lambda was: 4096),
        ("misplaced", 6, lambda was: 2**64 - 4096),
        ("layout", 7, lambda was: 2),
        ("layout", 7, lambda was: 2**63),
        ("layout", 8, lambda was: was + 1),
    ],
)
def test_one_damaged_word_costs_one_object_and_says_why(image: Image, cause: str, word: int, value: Any) -> None:
    wound(image, [])
    segment = image.segment
    living = bytes(segment.header.worker_rows)
    whole = read_pool(segment, living).objects
    wound(image, [])
    at = entry_of(image, KEYS[0], SPACES[1]) + word * 8
    (was,) = struct.unpack_from("<Q", segment.buffer, at)
    struct.pack_into("<Q", segment.buffer, at, value(was))
    pool = read_pool(segment, living)
    assert pool.objects == whole - 1
    assert pool.dropped[cause] == 1
    assert pool.dropped["unindexed"] == 1  # its slot, which nothing points to any more


def test_two_keys_in_one_slot_are_both_dropped(image: Image) -> None:
    wound(image, [])
    segment = image.segment
    living = bytes(segment.header.worker_rows)
    whole = read_pool(segment, living).objects
    wound(image, [])
    first, second = (entry_of(image, KEYS[at], SPACES[1]) for at in (0, 1))
    segment.buffer[second + 48 : second + 56] = segment.buffer[first + 48 : first + 56]
    pool = read_pool(segment, living)
    assert pool.objects == whole - 2
    assert pool.dropped["duplicate"] == 2
    assert pool.touch(SPACES[1], KEYS[:2]) == []


@settings(
    max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(wounds=WOUNDS, tampering=WOUNDS)
def test_what_a_worker_scribbles_during_the_adoption_costs_objects_and_no_slot(
    image: Image, wounds: list[tuple[int, int, Any]], tampering: list[tuple[int, int, Any]]
) -> None:
    wound(image, wounds)
    segment = image.segment
    pool = read_pool(segment, bytes(segment.header.worker_rows))
    objects = pool.objects
    kernel = kernel_over(segment, EPOCH + 1)
    kernel.adoption.begin(pool, ())
    wound(image, tampering)
    kernel.open_session(9, 0, 9)
    for space in SPACES.values():
        kernel.lookup(9, space, KEYS, 0.0, prefix=False)
    while kernel.adoption.step(7):
        pass
    usage = kernel.usage()
    assert usage.objects_by_state["ready"] + kernel.adoption.lost == objects
    assert usage.used_bytes == usage.bytes_by_state["ready"]


@settings(
    max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(wounds=WOUNDS, verify=st.sampled_from([0, 1, 2]))
def test_a_reader_of_a_damaged_index_keeps_to_the_data(
    image: Image, wounds: list[tuple[int, int, Any]], verify: int
) -> None:
    wound(image, wounds)
    segment = image.segment
    assert native is not None
    index = native.Index(segment.buffer, **segment.index_numbers)
    for layout_id, layout in LAYOUTS.items():
        found = index.find(EPOCH, SPACES[layout_id], layout_id, KEYS, False)
        assert found is None or set(found) <= {0, 1}
        if layout_id != 3:
            room = (ctypes.c_char * (layout.nbytes * len(KEYS)))()
            targets = array.array("Q", [ctypes.addressof(room) + at * layout.nbytes for at in range(len(KEYS))])
            index.read(EPOCH, SPACES[layout_id], layout_id, layout.nbytes, KEYS, targets, False, verify, 1)
    index.close()
