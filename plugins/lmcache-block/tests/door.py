"""A second way to the medium: reads and writes the file itself, past the adapter."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from lmcache_block.medium.format import (
    BLOCK_BYTES,
    EDGE_BYTES,
    NO_RECORD,
    RECORD_BYTES,
    Geometry,
    Record,
    Superblock,
    unpack_extent,
    unpack_record,
    unpack_superblock,
)
from lmcache_testing import Backdoor


class Slot(NamedTuple):
    """Where an object is."""

    record: Record
    record_at: int
    offset: int
    nbytes: int


class BlockDoor(Backdoor):
    """The bytes of an object's slot. What is longer than its slot is not on the medium: only a copy of it is kept
    here."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._written: dict[bytes, bytes] = {}

    def read(self, key: bytes) -> bytes | None:
        slot = self.slot(key)
        if slot is None:
            return None
        found = self._at(slot.offset, slot.nbytes)
        written = self._written.get(key)
        if written is not None and found == _in_slot(written, slot):
            return written
        return found[: slot.record.nbytes]

    def write(self, key: bytes, content: bytes) -> None:
        slot = self.slot(key)
        assert slot is not None
        self._written[key] = content
        self.put(slot.offset, _in_slot(content, slot))

    def remove(self, key: bytes) -> None:
        slot = self.slot(key)
        assert slot is not None
        self.put(slot.record_at, NO_RECORD)

    # --- any bytes --------------------------------------------------------------------------------------------
    def put(self, at: int, content: bytes) -> None:
        with self.path.open("r+b") as file:
            file.seek(at)
            file.write(content)

    def slot(self, key: bytes) -> Slot | None:
        """The newest object under a key."""
        found = [slot for slot in self.slots() if slot.record.key == key]
        return max(found, key=lambda slot: slot.record.sequence, default=None)

    def slots(self) -> list[Slot]:
        """All objects, in the order of their places."""
        found: list[Slot] = []
        block = self.superblock()
        for number in range(block.extents if block is not None else 0):
            assert block is not None
            offset = EDGE_BYTES + number * block.extent_bytes
            header = unpack_extent(self._at(offset, BLOCK_BYTES), block)
            if header is None:
                continue
            geometry = Geometry.of(block.extent_bytes, header.slot_blocks)
            records = self._at(offset + BLOCK_BYTES, geometry.record_blocks * BLOCK_BYTES)
            start = offset + BLOCK_BYTES + len(records)
            nbytes = header.slot_blocks * BLOCK_BYTES
            for slot in range(geometry.slots):
                at = slot * RECORD_BYTES
                record = unpack_record(records[at : at + RECORD_BYTES], block.seed)
                if record is not None and record.epoch == header.epoch:
                    found.append(Slot(record, offset + BLOCK_BYTES + at, start + slot * nbytes, nbytes))
        return found

    def superblock(self) -> Superblock | None:
        return unpack_superblock(self._at(0, 512)) if self.path.exists() else None

    def _at(self, at: int, nbytes: int) -> bytes:
        with self.path.open("rb") as file:
            file.seek(at)
            return file.read(nbytes)


def _in_slot(content: bytes, slot: Slot) -> bytes:
    """Behind an object are zeros: of a shorter or longer one are none."""
    return content[: slot.record.nbytes].ljust(slot.nbytes, b"\xff")
