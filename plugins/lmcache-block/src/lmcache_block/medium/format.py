"""What is on a medium. Little-endian, in blocks of 4 KiB.

    0                    1 MiB: the superblock in the first 512 bytes, zeros
    1 MiB                extents, all of one size
    size - 1 MiB         1 MiB: the superblock's copy in the first 512 bytes, zeros

An extent belongs to one size class, or is free:

    first block          its header: which class, and the epoch of this use of the extent
    next blocks          records of 128 bytes, one for each slot: which object is in it
    then                 slots, all of the class's size
    last block           the header's copy

Everything that must change at once is within 512 bytes, the least that a medium writes whole. Checksums are xxh3_64,
seeded with the medium's id: what was stored as an object never looks like a record.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import xxhash

BLOCK_BYTES = 4096
SECTOR_BYTES = 512
EDGE_BYTES = 1 << 20  # what is ours at both ends of a medium
EXTENT_BYTES_MIN = 256 << 10
EXTENT_BYTES_MAX = 1025 << 20
RECORD_BYTES = 128
RECORDS_PER_BLOCK = BLOCK_BYTES // RECORD_BYTES
KEY_BYTES_MAX = 64

MAGIC = b"LMCBLK\r\n"
VERSION = 1
_EXTENT_MAGIC = b"LMCEXT\r\n"
_CLASSES_MAX = 110
_SUPERBLOCK = struct.Struct(f"<8sHHI16sQQQd{_CLASSES_MAX}I")  # and a checksum in the last 8 bytes of the sector
_EXTENT = struct.Struct("<8s16sIIIIQ")  # and a checksum
_RECORD = struct.Struct(f"<QQQQQdBB6x{KEY_BYTES_MAX}s8x")
_SUM = struct.Struct("<Q")
_SUM_BYTES = _SUM.size
_SEALED = struct.Struct(f"<Q{RECORD_BYTES - 8}s")
_FIELDS = struct.Struct(f"<8xQQQ16xBB6x{KEY_BYTES_MAX}s8x")
LIVE = 1
NO_CONTENT = bytes(RECORD_BYTES - 8)  # behind the checksum of a slot without an object
NO_RECORD = bytes(RECORD_BYTES)  # of a slot without an object

_EXTENTS_WANTED = 64
_EXTENT_MIB_LOG_MAX = 8  # 256 MiB


class Superblock(NamedTuple):
    medium_id: bytes  # 16
    nbytes: int  # of the medium when it was formatted
    extent_bytes: int
    extents: int
    made_at_s: float
    classes: tuple[int, ...]  # slots of each class, in blocks, ascending

    @property
    def seed(self) -> int:
        """Of all checksums on this medium."""
        return int.from_bytes(self.medium_id[:8], "little")

    @property
    def copy_at(self) -> int:
        return self.nbytes // BLOCK_BYTES * BLOCK_BYTES - EDGE_BYTES

    @property
    def object_bytes_max(self) -> int:
        return self.classes[-1] * BLOCK_BYTES


class ExtentHeader(NamedTuple):
    number: int
    slot_blocks: int
    slots: int
    epoch: int  # another for each use of the extent


class Record(NamedTuple):
    """The object in a slot."""

    epoch: int
    sequence: int  # the higher one counts, of two records of one key
    nbytes: int
    edges: int  # checksum of the object's first and last block
    stored_at_s: float
    key: bytes


class Geometry(NamedTuple):
    """Of an extent of one class."""

    slots: int
    record_blocks: int

    @classmethod
    def of(cls, extent_bytes: int, slot_blocks: int) -> Geometry:
        room = extent_bytes // BLOCK_BYTES - 2  # beside the header and its copy
        slots = room * RECORDS_PER_BLOCK // (slot_blocks * RECORDS_PER_BLOCK + 1)
        return cls(slots, -(-slots // RECORDS_PER_BLOCK))


def default_extent_bytes(nbytes: int) -> int:
    """A power of two and 1 MiB, so that objects of a power of two, with their headers, fill an extent. About 64 or
    more on a medium."""
    log = _EXTENT_MIB_LOG_MAX
    while log and nbytes // ((1 << 20 << log) + (1 << 20)) < _EXTENTS_WANTED:
        log -= 1
    return (1 << 20 << log) + (1 << 20)


def size_classes(extent_bytes: int) -> tuple[int, ...]:
    """Slots in blocks: one block for the object's own header, and a payload of 8 steps between powers of two (4 from
    16 MiB on). The last class is the largest object that an extent takes."""
    room = extent_bytes // BLOCK_BYTES - 3
    payload, classes = 0, []
    while payload + 1 < room:
        classes.append(payload + 1)
        power = 1 << max(0, payload.bit_length() - 1)
        payload += max(1, power // (8 if payload < 4096 else 4))
    return (*classes[: _CLASSES_MAX - 1], room)


def new_superblock(nbytes: int, extent_bytes: int, medium_id: bytes, made_at_s: float) -> Superblock:
    """Raises `ValueError` if not even one extent fits."""
    extents = (nbytes // BLOCK_BYTES * BLOCK_BYTES - 2 * EDGE_BYTES) // extent_bytes
    if extents < 1:
        raise ValueError(f"{nbytes:,} bytes are too few for one extent of {extent_bytes:,} bytes")
    return Superblock(medium_id, nbytes, extent_bytes, extents, made_at_s, size_classes(extent_bytes))


def checksum(content: bytes | memoryview, seed: int) -> int:
    return int(xxhash.xxh3_64_intdigest(content, seed))


# --- superblock ---------------------------------------------------------------------------------------------
def pack_superblock(block: Superblock) -> bytes:
    """One sector."""
    classes = (*block.classes, *([0] * (_CLASSES_MAX - len(block.classes))))
    body = _SUPERBLOCK.pack(
        MAGIC, VERSION, 0, len(block.classes), block.medium_id, block.nbytes, block.extent_bytes, block.extents,
        block.made_at_s, *classes,
    )  # fmt: skip
    body += bytes(SECTOR_BYTES - _SUM_BYTES - len(body))
    return body + _SUM.pack(checksum(body, 0))


class OtherVersionError(ValueError):
    """A superblock of ours that another version has written."""


def unpack_superblock(sector: bytes | memoryview) -> Superblock | None:
    """None: it is none, or damaged. Raises `OtherVersionError`."""
    body, total = sector[: SECTOR_BYTES - _SUM_BYTES], _SUM.unpack(sector[SECTOR_BYTES - _SUM_BYTES : SECTOR_BYTES])[0]
    if bytes(body[: len(MAGIC)]) != MAGIC or checksum(body, 0) != total:
        return None
    _, version, _, count, medium_id, nbytes, extent_bytes, extents, made_at_s, *classes = _SUPERBLOCK.unpack_from(body)
    if version != VERSION:
        raise OtherVersionError(f"format {version}, and this is a server for format {VERSION}")
    return Superblock(medium_id, nbytes, extent_bytes, extents, made_at_s, tuple(classes[:count]))


# --- extents --------------------------------------------------------------------------------------------------
def pack_extent(header: ExtentHeader, block: Superblock) -> bytes:
    """One block."""
    body = _EXTENT.pack(
        _EXTENT_MAGIC, block.medium_id, header.number, header.slot_blocks, header.slots, 0, header.epoch
    )
    sealed = body + _SUM.pack(checksum(body, block.seed))
    return sealed + bytes(BLOCK_BYTES - len(sealed))


def unpack_extent(content: bytes | memoryview, block: Superblock) -> ExtentHeader | None:
    """None: it is none, or damaged."""
    body = content[: _EXTENT.size]
    magic, medium_id, number, slot_blocks, slots, _, epoch = _EXTENT.unpack(body)
    (total,) = _SUM.unpack_from(content, _EXTENT.size)
    if magic != _EXTENT_MAGIC or medium_id != block.medium_id or checksum(body, block.seed) != total:
        return None
    return ExtentHeader(number, slot_blocks, slots, epoch)


# --- records ----------------------------------------------------------------------------------------------------
def pack_record(record: Record, seed: int) -> bytes:
    packed = _RECORD.pack(
        0, record.epoch, record.sequence, record.nbytes, record.edges, record.stored_at_s, len(record.key), LIVE,
        record.key,
    )  # fmt: skip
    return _SUM.pack(checksum(packed[_SUM_BYTES:], seed)) + packed[_SUM_BYTES:]


def unpack_record(packed: bytes | memoryview, seed: int) -> Record | None:
    """None: the slot has no object, or its record is damaged."""
    total = _SUM.unpack_from(packed)[0]
    record = peek_record(packed)
    return record if record is not None and checksum(packed[_SUM_BYTES:], seed) == total else None


def peek_record(packed: bytes | memoryview) -> Record | None:
    """As `unpack_record`, of a record that is known to be whole."""
    _, epoch, sequence, nbytes, edges, stored_at_s, key_bytes, state, key = _RECORD.unpack(packed)
    return Record(epoch, sequence, nbytes, edges, stored_at_s, key[:key_bytes]) if state == LIVE else None


def records_in(area: memoryview) -> Iterator[tuple[tuple[int, bytes], tuple[int, int, int, int, int, bytes]]]:
    """Of each slot: (checksum, what it covers), (epoch, sequence, length, length of the key, state, key). Nothing is
    checked: a million are read when a medium is opened, and `is_sound` for each would cost more than all the rest."""
    return zip(_SEALED.iter_unpack(area), _FIELDS.iter_unpack(area), strict=True)


# --- payloads ---------------------------------------------------------------------------------------------------
def edges_of(parts: Sequence[memoryview], nbytes: int, seed: int) -> int:
    """Checksum of the first and the last block of an object: finds a slot whose payload is another's, or unfinished.
    What is between them is the business of the server's own checksum, which covers everything."""
    digest = xxhash.xxh3_64(seed=seed)
    left, at = min(BLOCK_BYTES, nbytes), 0
    for part in parts:
        if left <= 0:
            break
        digest.update(part[:left])
        left -= part.nbytes
    tail_from = max(BLOCK_BYTES, nbytes - BLOCK_BYTES)
    for part in parts:
        first, last = max(0, tail_from - at), min(part.nbytes, nbytes - at)
        if first < last:
            digest.update(part[first:last])
        at += part.nbytes
    return int(digest.intdigest())
