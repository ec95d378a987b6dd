"""Headers: what is written is read, and whatever else is found is refused and never crashes an attach."""

from __future__ import annotations

import itertools
import os
import struct
import zlib
from dataclasses import fields, replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from lmcache_core.errors import PoolMismatchError, UsageError
from lmcache_core.limits import INDEX_ENTRY_BYTES, PAGE_BYTES, POOL_BYTES_MAX, SLAB_BYTES_MIN
from lmcache_core.pool import header as headers
from lmcache_core.pool.backing import Backing
from lmcache_core.pool.header import Header, PoolInfo
from lmcache_core.pool.segment import Segment

MIB = 1 << 20
u64 = st.integers(0, 2**64 - 1)
plans = st.builds(
    lambda name, data_bytes, backing, boot_id, entries: headers.plan(
        name, data_bytes, backing, boot_id=boot_id, index_entries=entries
    ),
    st.from_regex(r"[a-z0-9][a-z0-9_-]{0,63}", fullmatch=True),
    st.integers(SLAB_BYTES_MIN, POOL_BYTES_MAX),
    st.sampled_from(Backing),
    u64,
    st.sampled_from([None, 0, 4096, 1 << 15, 1 << 21, 1 << 28]),
)
_NUMBERS = len(fields(Header)) - 1
_BODY = struct.Struct(f"<8s{_NUMBERS}Q64s")


def forged(header: Header, position: int, value: int) -> bytes:
    """A header with one number changed, and a checksum that fits."""
    magic, *rest = _BODY.unpack(headers.encode(header)[: _BODY.size])
    rest[position] = value
    body = _BODY.pack(magic, *rest)
    return body + struct.pack("<Q", zlib.crc32(body))


@settings(deadline=None)
@given(plans)
def test_what_is_encoded_is_decoded(header: Header) -> None:
    page = headers.encode(header)
    assert len(page) <= headers.HEADER_BYTES
    assert headers.decode(page) == header
    assert headers.decode(page + bytes(100)) == header


@settings(deadline=None)
@given(plans)
def test_the_regions_stand_in_order_and_do_not_overlap(header: Header) -> None:
    regions = [
        (0, headers.HEADER_BYTES),
        (header.layouts_offset, header.layout_rows * headers.LAYOUT_ROW_BYTES),
        (header.workers_offset, header.worker_rows * headers.WORKER_ROW_BYTES),
        (header.tallies_offset, header.tally_rows * headers.TALLY_BYTES),
        (header.slabs_offset, header.slab_rows * 8),
        (header.slots_offset, header.slot_rows * 8),
        (header.index_offset, header.index_bytes),
        (header.data_offset, header.data_bytes),
    ]
    for (start, nbytes), (following, _) in itertools.pairwise(regions):
        assert start + nbytes <= following
    marks_bytes = headers.round_up(2 * header.index_entries, PAGE_BYTES)
    assert header.index_bytes == marks_bytes + INDEX_ENTRY_BYTES * header.index_entries
    assert header.index_entries & (header.index_entries - 1) == 0
    assert headers.HEADER_BYTES > headers.SERVING_OFFSET >= len(headers.encode(header))
    assert header.data_offset + header.data_bytes == header.segment_bytes
    assert header.slot_rows * PAGE_BYTES == header.data_bytes
    assert header.slab_rows * SLAB_BYTES_MIN >= header.data_bytes
    assert header.segment_bytes % header.backing.page_bytes == 0


@settings(deadline=None)
@given(plans, st.integers(0, _NUMBERS - 1), u64)
def test_a_forged_number_never_gets_past_the_checks(header: Header, position: int, value: int) -> None:
    name = fields(Header)[position].name
    page = forged(header, position, value)
    if page == headers.encode(header) or name in ("boot_id", "pid", "created_ns"):
        headers.decode(page)  # these are free: a boot id is compared, the others are for people
        return
    try:
        found = headers.decode(page)
    except PoolMismatchError:
        return
    # Another backing with the same page size makes another, consistent header: attach compares it.
    assert name == "backing"
    assert found.info != header.info


@settings(deadline=None)
@given(plans, st.integers(0, 8 * (_BODY.size + 8) - 1))
def test_a_flipped_bit_is_noticed(header: Header, bit: int) -> None:
    page = bytearray(headers.encode(header))
    page[bit // 8] ^= 1 << bit % 8
    with pytest.raises(PoolMismatchError):
        headers.decode(bytes(page))


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=5000), st.booleans())
@example(b"", False)
@example(headers.MAGIC, True)
def test_garbage_never_crashes_an_attach(garbage: bytes, with_magic: bool) -> None:
    fd = os.memfd_create("garbage", os.MFD_CLOEXEC)
    if with_magic:
        garbage = headers.MAGIC + struct.pack("<Q", headers.LAYOUT_VERSION) + garbage
    os.write(fd, garbage)
    with pytest.raises(PoolMismatchError):
        Segment.attach_fd(fd, PoolInfo("p", Backing.MEMFD, 4 * MIB, 2 * MIB, 1, 1))


@pytest.mark.parametrize("entries", [1, 4095, 5000, 1 << 29, -4096])
def test_an_index_that_cannot_be_made_is_refused(entries: int) -> None:
    with pytest.raises(UsageError, match="power of two"):
        headers.plan("p", 4 * MIB, Backing.SHM, boot_id=1, index_entries=entries)


def test_the_index_has_room_for_objects_of_8_kib_unless_told_otherwise() -> None:
    assert headers.plan("p", 4 * MIB, Backing.SHM, boot_id=1).index_entries == 4096
    assert headers.plan("p", 64 << 30, Backing.SHM, boot_id=1).index_entries == 16 << 20
    for data_bytes in (1 << 30, 3 << 29, 7 << 28, 13 << 27):
        plan = headers.plan("p", data_bytes, Backing.SHM, boot_id=1)
        assert data_bytes // 8192 <= 0.8 * plan.index_entries  # beyond that, windows of 64 entries fill up
        assert plan.index_bytes < 0.042 * data_bytes
    assert headers.plan("p", 4 * MIB, Backing.SHM, boot_id=1, index_entries=1 << 16).index_entries == 1 << 16


def test_a_segment_that_is_being_made_says_so() -> None:
    with pytest.raises(PoolMismatchError, match="being made"):
        headers.decode(bytes(headers.HEADER_BYTES))


def test_another_layout_version_is_named_on_both_sides() -> None:
    header = headers.plan("p", 4 * MIB, Backing.SHM, boot_id=1)
    with pytest.raises(PoolMismatchError, match=f"version 99 .*supports {headers.LAYOUT_VERSION}"):
        headers.decode(headers.encode(replace(header, layout_version=99)))


@settings(deadline=None)
@given(plans)
def test_a_header_larger_than_its_file_is_refused_before_it_is_mapped(header: Header) -> None:
    fd = os.memfd_create("short", os.MFD_CLOEXEC)
    os.write(fd, headers.encode(header))
    with pytest.raises(PoolMismatchError, match="truncated"):
        Segment.attach_fd(fd, header.info)
