"""The segment's first page, and the offsets of everything after it.

    offset 0   header          one page: magic, version, boot id, sizes, offsets, name, checksum
               layouts         LAYOUTS_MAX rows of 128 bytes
               workers         WORKERS_MAX rows of 64 bytes; the first byte of a row is its life lock
               tallies         a line of 128 bytes for each worker row, which that worker alone writes: what it counts
                               without a call (`pool/tally.py`)
               slabs           one u64 for each SLAB_BYTES_MIN of data
               slots           one u64 for each PAGE_BYTES of data
               index           marks: one u16 for each entry, in whole pages; then the entries, INDEX_ENTRY_BYTES
                               each, a power of two of them: at least 5 for every 4 INDEX_OBJECT_BYTES of the
                               data, unless the setting says otherwise
    data_offset  data          2 MiB-aligned

All numbers are little-endian. Offsets count from the start of the segment, and 0 is never an object's. The
sizes follow only from `data_bytes`, `index_entries` and the backing, so a reader computes the plan again and compares:
a header with a valid checksum but wrong offsets is refused before any of them is used.

The writer writes the magic last. A segment without magic is still being made, or its maker died: nobody attaches to it.

The serving word (u64 at SERVING_OFFSET, in the first page but outside the checksum) is the lease epoch of the server
that answers for the index now, 0 if there is none: readers of the index check it. Other words are there too, each in a
cache line of its own: see the offsets below.
"""

from __future__ import annotations

import math
import os
import struct
import time
import zlib
from dataclasses import dataclass, fields
from typing import Any

from lmcache_core import limits
from lmcache_core.errors import PoolMismatchError, UsageError
from lmcache_core.pool.backing import Backing, check_name

MAGIC = b"LMCPOOL\0"
LAYOUT_VERSION = 4  # 3 did not say what its layouts were
HEADER_BYTES = limits.PAGE_BYTES
LAYOUT_ROW_BYTES = 128
WORKER_ROW_BYTES = 64
TALLY_BYTES = 128  # two cache lines, as processors fetch them, so that workers do not slow each other down
KEPT_OFFSET = 1088  # u64, not 0 if the last server kept the pool on purpose; the low 24 bits: its epoch
CLEARS_OFFSET = 1216  # u64, `Epochs.digest` when the L1 was last cleared: what it has now is of those epochs
PUBLISHED_OFFSET = 1280  # u64, counts up after each publication in the index; workers wait for it, by futex
PROOF_OFFSET = 1152  # u64, a random number of each server: knowing it proves a mapping of the pool
BOOT_OFFSET = 1344  # u64, names the boot of the machine in which the pool was last served (`pool/on_disk.py`)
FLUSHED_OFFSET = 1408  # u64, not 0 if all of a pool on a disk is there, as its last server left it
CLEARED_OFFSET = 1472  # u64, Unix second of the last clear of a pool on a disk
SERVING_OFFSET = 1024  # in its own cache line: every reader checks it, one server writes it
EPOCH_MASK = (1 << 24) - 1
INDEX_MARK_BYTES = 2
_INDEX_ENTRIES_MIN = 4096
_BACKING_CODES = {Backing.SHM: 1, Backing.MEMFD: 2, Backing.HUGETLB: 3, Backing.FILE: 4}
_BACKINGS = {code: backing for backing, code in _BACKING_CODES.items()}

_FORM = struct.Struct("<8s 21Q 64s")
_CHECKSUM = struct.Struct("<Q")


@dataclass(frozen=True)
class PoolInfo:
    """What a worker compares before it uses an offset. Plain fields, because it travels in `hello`."""

    name: str
    backing: Backing
    nbytes: int  # the whole segment
    data_offset: int
    boot_id: int  # u64, new at each creation
    layout_version: int

    @property
    def data_bytes(self) -> int:
        """Bytes for slabs."""
        return self.nbytes - self.data_offset

    def __str__(self) -> str:
        return (
            f"pool {self.name!r} ({self.backing}, {self.nbytes:,} bytes, data at {self.data_offset:,}, "
            f"boot id {self.boot_id:016x}, layout version {self.layout_version})"
        )


@dataclass(frozen=True)
class Header:
    """The header's fields, in their order on the page. Bytes and offsets are in bytes, rows are counts."""

    layout_version: int
    boot_id: int
    segment_bytes: int
    data_offset: int
    data_bytes: int
    backing: Backing
    layouts_offset: int
    layout_rows: int
    workers_offset: int
    worker_rows: int
    slabs_offset: int
    slab_rows: int
    slots_offset: int
    slot_rows: int
    index_offset: int
    index_bytes: int
    index_entries: int  # a power of two
    tallies_offset: int
    tally_rows: int
    pid: int  # the maker's, only for messages: it has no meaning in another pid namespace
    created_ns: int  # Unix time
    name: str

    @property
    def info(self) -> PoolInfo:
        """What is sent to workers."""
        return PoolInfo(
            self.name, self.backing, self.segment_bytes, self.data_offset, self.boot_id, self.layout_version
        )

    @property
    def index_numbers(self) -> dict[str, int]:
        """The place of the index in the mapping: the keyword arguments of `_native.Index`."""
        return {
            "index_offset": self.index_offset,
            "entries": self.index_entries,
            "data_offset": self.data_offset,
            "segment_bytes": self.segment_bytes,
            "serving_offset": SERVING_OFFSET,
        }


def plan(name: str, data_bytes: int, backing: Backing, *, boot_id: int, index_entries: int | None = None) -> Header:
    """The header of a new segment with room for `data_bytes`, rounded up to the backing's pages.

    `index_entries`: a power of two; None or 0 derives it from `data_bytes`.
    """
    check_name(name)
    if data_bytes < limits.SLAB_BYTES_MIN:
        raise UsageError(
            f"pool {name!r} of {data_bytes:,} bytes is smaller than one slab",
            cure=f"give it at least {limits.SLAB_BYTES_MIN:,}",
        )
    if data_bytes > limits.POOL_BYTES_MAX:
        raise UsageError(f"pool {name!r} of {data_bytes:,} bytes is over the limit of {limits.POOL_BYTES_MAX:,}")
    data_bytes = round_up(data_bytes, backing.page_bytes)
    layouts_offset = HEADER_BYTES
    workers_offset = layouts_offset + limits.LAYOUTS_MAX * LAYOUT_ROW_BYTES
    tallies_offset = workers_offset + limits.WORKERS_MAX * WORKER_ROW_BYTES
    slabs_offset = tallies_offset + limits.WORKERS_MAX * TALLY_BYTES
    slab_rows = -(-data_bytes // limits.SLAB_BYTES_MIN)
    slots_offset = round_up(slabs_offset + slab_rows * 8, limits.PAGE_BYTES)
    slot_rows = data_bytes // limits.PAGE_BYTES
    index_offset = round_up(slots_offset + slot_rows * 8, limits.PAGE_BYTES)
    entries = _index_entries(index_entries, data_bytes)
    index_bytes = round_up(entries * INDEX_MARK_BYTES, limits.PAGE_BYTES) + entries * limits.INDEX_ENTRY_BYTES
    data_offset = round_up(index_offset + index_bytes, limits.HUGE_PAGE_BYTES)
    return Header(
        layout_version=LAYOUT_VERSION,
        boot_id=boot_id,
        segment_bytes=data_offset + data_bytes,
        data_offset=data_offset,
        data_bytes=data_bytes,
        backing=backing,
        layouts_offset=layouts_offset,
        layout_rows=limits.LAYOUTS_MAX,
        workers_offset=workers_offset,
        worker_rows=limits.WORKERS_MAX,
        slabs_offset=slabs_offset,
        slab_rows=slab_rows,
        slots_offset=slots_offset,
        slot_rows=slot_rows,
        index_offset=index_offset,
        index_bytes=index_bytes,
        index_entries=entries,
        tallies_offset=tallies_offset,
        tally_rows=limits.WORKERS_MAX,
        pid=os.getpid(),
        created_ns=time.time_ns(),
        name=name,
    )


def index_entries_for(data_bytes: int, object_bytes: int) -> int:
    """Entries that are enough for a pool full of objects of `object_bytes`: a power of two, within the limits."""
    least = max(_INDEX_ENTRIES_MIN, math.ceil(data_bytes / (limits.INDEX_LOAD_MAX * object_bytes)))
    return min(1 << (least - 1).bit_length(), limits.INDEX_ENTRIES_MAX)


def _index_entries(wanted: int | None, data_bytes: int) -> int:
    if not wanted:
        return index_entries_for(data_bytes, limits.INDEX_OBJECT_BYTES)
    if wanted & (wanted - 1) or not _INDEX_ENTRIES_MIN <= wanted <= limits.INDEX_ENTRIES_MAX:
        raise UsageError(
            f"an index of {wanted:,} entries cannot be made: give a power of two from {_INDEX_ENTRIES_MIN:,} to "
            f"{limits.INDEX_ENTRIES_MAX:,}, or 0 to derive it from the pool's size"
        )
    return wanted


def regions(header: Header) -> tuple[tuple[int, int], tuple[int, int]]:
    """(start, end) of the parts before the index that only the server writes: header, layouts and workers; slabs and
    slots."""
    workers_end = header.workers_offset + header.worker_rows * WORKER_ROW_BYTES
    return (0, workers_end), (header.slabs_offset, header.slots_offset + header.slot_rows * 8)


def round_up(nbytes: int, unit: int) -> int:
    """`nbytes`, or the next multiple of `unit`."""
    return -(-nbytes // unit) * unit


def encode(header: Header) -> bytes:
    """The header's bytes, including magic and checksum."""
    values = [getattr(header, field.name) for field in fields(header)]
    values[5] = _BACKING_CODES[header.backing]
    body = _FORM.pack(MAGIC, *values[:-1], header.name.encode())
    return body + _CHECKSUM.pack(zlib.crc32(body))


def decode(page: bytes) -> Header:
    """The header in a segment's first bytes. For any invalid content it raises only PoolMismatchError."""
    if len(page) < _FORM.size + _CHECKSUM.size:
        raise PoolMismatchError(f"the segment has {len(page)} bytes, and a pool's header is longer")
    body = page[: _FORM.size]
    magic, *numbers, raw_name = _FORM.unpack(body)
    if magic == bytes(len(MAGIC)):
        raise PoolMismatchError("the segment has no header: it is being made, or its maker died; try again later")
    if magic != MAGIC:
        raise PoolMismatchError(f"the segment starts with {magic!r}, but a pool starts with {MAGIC!r}")
    version = numbers[0]
    if version != LAYOUT_VERSION:
        raise PoolMismatchError(
            f"the segment has layout version {version} and this library supports {LAYOUT_VERSION}: "
            "use the same lmcache-core on both sides"
        )
    (checksum,) = _CHECKSUM.unpack_from(page, _FORM.size)
    if checksum != zlib.crc32(body):
        raise PoolMismatchError("the segment's header is damaged: its checksum does not match")
    return _checked(numbers, raw_name)


def _checked(numbers: list[int], raw_name: bytes) -> Header:
    backing = _BACKINGS.get(numbers[5])
    if backing is None:
        raise PoolMismatchError(f"the segment's header names backing {numbers[5]}, unknown to this library")
    try:
        name = check_name(raw_name.rstrip(b"\0").decode("ascii"))
        expected = plan(name, numbers[4], backing, boot_id=numbers[1], index_entries=numbers[16])
    except ValueError as error:  # UsageError and UnicodeDecodeError: bad input, not a bug
        raise PoolMismatchError(f"the segment's header is invalid: {error}") from error
    values: list[Any] = [*numbers[:5], backing, *numbers[6:], name]
    found = Header(*values)
    for field in fields(Header):
        if field.name in ("pid", "created_ns"):
            continue
        want, have = getattr(expected, field.name), getattr(found, field.name)
        if want != have:
            raise PoolMismatchError(f"the segment's header says {field.name} = {have} where {want} belongs")
    return found


def same_plan(found: Header, wanted: Header) -> None:
    """Raise a PoolMismatchError that names both sides, unless a pool planned as `wanted` can continue as `found`."""
    free = ("boot_id", "pid", "created_ns")
    names = [f.name for f in fields(Header) if f.name not in free and getattr(found, f.name) != getattr(wanted, f.name)]
    # One setting moves many offsets: name only what a person has set.
    known = [name for name in ("layout_version", "backing", "data_bytes", "index_entries", "name") if name in names]
    if names:
        differ = ", ".join(
            f"{name} is {_text(getattr(found, name))} there and {_text(getattr(wanted, name))} in the settings"
            for name in known or names
        )
        raise PoolMismatchError(f"it is not the pool that the settings ask for: {differ}")


def _text(value: object) -> str:
    return f"{value:,}" if isinstance(value, int) else str(value)


def compare(found: PoolInfo, expected: PoolInfo) -> None:
    """Raise a PoolMismatchError that names both sides, unless they are equal."""
    if found != expected:
        names = [f.name for f in fields(PoolInfo) if getattr(found, f.name) != getattr(expected, f.name)]
        raise PoolMismatchError(
            f"the segment is {found}, the server's is {expected}: {', '.join(names)} differ; "
            "connect again to get the descriptor of the pool that is served now"
        )
