"""The objects on one medium, and the order in which anything changes.

A store writes payloads, makes them durable, then writes the records that name them: a record on the medium is never
ahead of its payload. An object that is replaced keeps its record until that of its successor is durable; a slot whose
record was removed is used again once that is durable. In between both slots are taken. So, whatever is lost, torn or
reordered between two syncs, a record that is read back names the bytes that were stored under its key; of two records
of one key the higher sequence counts. What a power cut can take back is what was done since the last sync: the last
batch of each lane.
"""

from __future__ import annotations

import errno
import secrets
import threading
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice, repeat
from typing import NamedTuple

import xxhash

from lmcache_block.medium.buffers import BOUNCE_BYTES, Buffers, aligned, holding, timeout
from lmcache_block.medium.file import Medium
from lmcache_block.medium.format import (
    BLOCK_BYTES,
    EDGE_BYTES,
    LIVE,
    NO_CONTENT,
    NO_RECORD,
    RECORDS_PER_BLOCK,
    ExtentHeader,
    Geometry,
    Record,
    Superblock,
    edges_of,
    pack_extent,
    pack_record,
    peek_record,
    records_in,
    unpack_extent,
    unpack_record,
)
from lmcache_block.medium.space import Extent, Space, extent_of, slot_of

SHARDS = 4096  # small dictionaries grow without a pause, and are a page of a scan
_SHARD_MASK = SHARDS - 1
_SYNCS_MAX = 4  # of a delete that waits for former records: two do, unless the medium fails
_MOVED_AT_ONCE = 32
BAD_AGAIN_S = 600.0  # until a slot that could not be written is tried again
_RUN_BYTES_MIN, _RUN_BYTES_MAX = 128 << 10, 1 << 20  # of objects that one call moves together


class Written(NamedTuple):
    """A payload in its slot."""

    place: int
    nbytes: int
    edges: int


class Pinned(NamedTuple):
    """An object whose slot is not used again while it is read."""

    place: int
    record: Record


class Entry(NamedTuple):
    key: bytes
    nbytes: int
    stored_at_s: float


class Counts(NamedTuple):
    objects: int
    bytes_used: int
    bytes_free: int
    damaged_slots: int
    damaged_extents: int


class BlockStore:
    """Of one medium that is ours alone. Thread-safe. Methods that reach the medium raise `OSError`, and `TimeoutError`
    if another thread is in the way until the deadline."""

    def __init__(
        self,
        medium: Medium,
        block: Superblock,
        *,
        fsync: bool = True,
        trim: bool = False,
        bounce_buffers: int = 4,
        now: Callable[[], float] = time.time,
    ) -> None:
        self.medium = medium
        self.block = block
        self._seed = block.seed
        self.trim = trim
        self.broken = False  # a sync has failed: nobody knows what is durable until the medium is read again
        self._fsync = fsync
        self._now = now
        self._buffers = Buffers(medium, bounce_buffers)
        self._space = Space(block)
        self._lock = threading.Lock()  # of everything below; no I/O while it is held
        self._changed = threading.Condition(self._lock)
        self._shards: list[dict[bytes, int]] = list(map(dict, repeat((), SHARDS)))
        self._sequence = 0
        self._objects = self._bytes = 0
        self._readers: Counter[int] = Counter()
        self._unread: set[int] = set()  # free once their readers have ended
        self._superseded: list[int] = []  # their records go once those of their successors are durable
        self._removed: list[int] = []  # without a record; free once that is durable
        self._pending: dict[int, bytes] = {}  # the keys of what was in these two places
        self._moving: set[bytes] = set()
        self._bad: list[tuple[float, int]] = []  # slots that could not be written, and when that was
        self._to_trim: list[Extent] = []
        self._damaged_slots = self._damaged_extents = 0
        self._assigning = threading.Lock()
        self._syncing = threading.Lock()
        self._syncs_begun = self._syncs_done = 0

    # --- opening --------------------------------------------------------------------------------------------
    def recover(self) -> None:
        """Read all records. Once, before any other call."""
        header, unread = aligned(BLOCK_BYTES), None
        for number in range(self.block.extents):
            found = self._read_header(number, header)
            if found is None:
                continue
            extent = Extent(number, found.slot_blocks, found.epoch, self.block)
            try:
                self.medium.read(extent.offset + BLOCK_BYTES, [extent.records])
            except OSError as error:
                self._damaged_extents += 1
                unread = error
                continue
            self._space.add(extent)
            self._take_over(extent)
            if not extent.used_slots:
                self._space.remove(extent)
                self._space.put_free(number)
        if unread is not None and self._damaged_extents == self.block.extents:
            raise unread  # it is the medium, and not a part of it

    def _read_header(self, number: int, into: memoryview) -> ExtentHeader | None:
        """None: the extent is free, and in the pool; or damaged, and not touched."""
        offset = EDGE_BYTES + number * self.block.extent_bytes
        unused = True
        for at in (offset, offset + self.block.extent_bytes - BLOCK_BYTES):
            try:
                self.medium.read(at, [into])
            except OSError:
                unused = False
                continue
            found = unpack_extent(into, self.block)
            if found is not None and found == found._replace(number=number, slots=self._slots(found.slot_blocks)):
                return found
            unused = unused and bytes(into) == bytes(BLOCK_BYTES)
        if unused:
            self._space.put_free(number)
        else:
            self._damaged_extents += 1
        return None

    def _slots(self, slot_blocks: int) -> int:
        return Geometry.of(self.block.extent_bytes, slot_blocks).slots

    def _take_over(self, extent: Extent) -> None:
        # Local names, and no call that is not C: this runs a million times before a server is ready.
        digest, crc32, shards, seed = xxhash.xxh3_64_intdigest, zlib.crc32, self._shards, self._seed
        epoch, place, highest, nbytes_in_all = extent.epoch, extent.place(0), self._sequence, 0
        damaged_before = self._damaged_slots
        free: list[int] = []
        twice: list[tuple[bytes, int, int]] = []
        found = islice(records_in(extent.records), extent.slots)
        for (total, content), (of_epoch, sequence, nbytes, key_bytes, state, key) in found:
            if digest(content, seed) != total:
                if total == 0 and content == NO_CONTENT:
                    free.append(slot_of(place))
                else:
                    self._damaged_slots += 1
            elif of_epoch != epoch or state != LIVE:
                free.append(slot_of(place))
            else:
                key = key[:key_bytes]
                shard = shards[crc32(key) & _SHARD_MASK]
                if key in shard:
                    twice.append((key, sequence, place))
                else:
                    shard[key] = place
                    nbytes_in_all += nbytes
                if sequence > highest:
                    highest = sequence
            place += 1
        extent.occupy(free)
        self._objects += extent.used_slots - self._damaged_slots + damaged_before - len(twice)
        self._bytes += nbytes_in_all
        self._sequence = highest
        for key, sequence, at in twice:
            self._keep_newer(key, sequence, at)

    def _keep_newer(self, key: bytes, sequence: int, place: int) -> None:
        """Of two records of one key: the other one's will be removed."""
        shard = self._shards[zlib.crc32(key) & _SHARD_MASK]
        other = shard[key]
        if self._record_at(other).sequence >= sequence:
            self._supersede(place, key)
            return
        self._supersede(other, key)
        shard[key] = place
        self._bytes += self._record_at(place).nbytes - self._record_at(other).nbytes

    # --- space ------------------------------------------------------------------------------------------------
    def reserve(self, nbytes: int, deadline: float) -> int | None:
        """A slot for an object of at most `object_bytes_max`. None: the medium is full."""
        slot_blocks = self._space.class_for(nbytes)
        with self._lock:
            place = self._space.take(slot_blocks)
        if place is None:
            place = self._assign(slot_blocks, deadline)
        for _ in range(2):  # what is replaced is free after two syncs
            if place is None and self._pending:
                self.sync(deadline)
                with self._lock:
                    place = self._space.take(slot_blocks)
                place = self._assign(slot_blocks, deadline) if place is None else place
        if place is None and self._try_bad_ones_again():
            place = self._assign(slot_blocks, deadline)
        if place is None:
            with self._lock:
                place = self._space.take_larger(slot_blocks)
        if place is None and self._empty_one(deadline):
            place = self._assign(slot_blocks, deadline)
        return place

    def give_back(self, place: int, *, bad: bool = False) -> None:
        """A reserved slot that got no record. `bad`: it could not be written; it is tried again later, and only if
        there is no other."""
        with self._lock:
            if bad:
                self._bad.append((time.monotonic(), place))
            else:
                self._free(place)

    def _try_bad_ones_again(self) -> bool:
        """Free the slots that failed a while ago: mostly it was the medium that failed, and not they."""
        with self._lock:
            before = time.monotonic() - BAD_AGAIN_S
            again = [place for failed_at, place in self._bad if failed_at <= before]
            self._bad = [each for each in self._bad if each[0] > before]
            for place in again:
                self._free(place)
        return bool(again)

    def _assign(self, slot_blocks: int, deadline: float) -> int | None:
        """A slot of an extent that was free, or is by now. None: there is none."""
        with holding(self._assigning, deadline):
            with self._lock:
                place = self._space.take(slot_blocks)
                if place is not None:
                    return place
                number = self._space.take_free()
            if number is None:
                return None
            try:
                extent = self._prepare(number, slot_blocks, deadline)
            except BaseException:
                with self._lock:
                    self._space.put_free(number)
                raise
            with self._lock:
                self._space.add(extent)
                return self._space.take(slot_blocks)

    def _prepare(self, number: int, slot_blocks: int, deadline: float) -> Extent:
        """Nothing of its former use is left in the records, and then the header says what it is. Both are durable
        before anything is stored in it."""
        extent = Extent(number, slot_blocks, secrets.randbits(64), self.block)
        header = aligned(BLOCK_BYTES)
        header[:] = pack_extent(ExtentHeader(number, slot_blocks, extent.slots, extent.epoch), self.block)
        self.medium.write(extent.offset + BLOCK_BYTES, [extent.records])
        self.sync(deadline)
        self.medium.write(extent.offset, [header])
        self.medium.write(extent.offset + self.block.extent_bytes - BLOCK_BYTES, [header])
        self.sync(deadline)
        return extent

    def _free(self, place: int) -> None:
        if self._readers[place]:
            self._unread.add(place)
            return
        emptied = self._space.free(place)
        if emptied is not None:
            if self.trim:
                self._to_trim.append(emptied)
            else:
                self._space.put_free(emptied.number)

    # --- objects ----------------------------------------------------------------------------------------------
    def has(self, key: bytes) -> bool:
        """Whether there is an object."""
        return key in self._shards[zlib.crc32(key) & _SHARD_MASK]

    def runs(
        self, places: Sequence[int], objects: Sequence[Sequence[memoryview]], depth: int
    ) -> list[list[tuple[int, Sequence[memoryview]]]]:
        """Places and buffers of objects, those that one call to the medium can move together: neighbours that fill
        their slots, in whole blocks. `depth`: calls that are made at once; none gets less than its share."""
        share = sum(part.nbytes for parts in objects for part in parts) // max(1, depth)
        most = max(_RUN_BYTES_MIN, min(_RUN_BYTES_MAX, share))
        found: list[list[tuple[int, Sequence[memoryview]]]] = []
        room, last = 0, -1
        for place, parts in sorted(zip(places, objects, strict=True), key=_place):
            slot_bytes = self._space.extents[extent_of(place)].slot_bytes
            fills = sum(part.nbytes for part in parts) == slot_bytes
            fills = fills and not any(part.nbytes % BLOCK_BYTES for part in parts)
            if fills and place == last + 1 and slot_bytes <= room:
                found[-1].append((place, parts))
                room -= slot_bytes
            else:
                found.append([(place, parts)])
                room = most - slot_bytes if fills else 0
            last = place
        return found

    def write(self, run: Sequence[tuple[int, Sequence[memoryview]]], deadline: float) -> list[Written]:
        """Write payloads into reserved slots, which are neighbours."""
        at = self._offset(run[0][0])
        parts = [part for _, each in run for part in each if part.nbytes]
        if parts:
            self._buffers.write(at, parts, deadline)
        written = []
        for place, each in run:
            nbytes = sum(part.nbytes for part in each)
            written.append(Written(place, nbytes, edges_of(each, nbytes, self._seed)))
        return written

    def publish(self, batch: Sequence[tuple[bytes, Written]], deadline: float) -> list[OSError | None]:
        """Make the objects what is found under their keys; their slots are ours from now on, also those of objects that
        failed. Raises `OSError` while nothing is published, and the slots are the caller's."""
        self.sync(deadline)
        records: dict[int, bytes] = {}
        with self._lock:
            for key, each in batch:
                self._sequence += 1
                epoch = self._space.extents[extent_of(each.place)].epoch
                record = Record(epoch, self._sequence, each.nbytes, each.edges, self._now(), key)
                records[each.place] = pack_record(record, self._seed)
        failed = self._write_records(records, deadline)
        with self._lock:
            for key, each in batch:
                if each.place in failed:
                    self._supersede(each.place, key)
                else:
                    self._enter(key, each.place)
        return [failed.get(each.place) for _, each in batch]

    def delete(self, keys: Sequence[bytes], deadline: float, versions: Sequence[str] = ()) -> list[OSError | None]:
        """Remove objects, durably; one that is not there is removed. `versions`: of each only that one, if it is not
        empty; another that has come by then stays."""
        places = self._leave(keys, deadline, versions)
        failed = self._write_records(dict.fromkeys(places.values(), NO_RECORD), deadline)
        errors = {key: failed[place] for key, place in places.items() if place in failed}
        with self._lock:
            for key, place in places.items():
                if place in failed:
                    self._enter(key, place)
                else:
                    self._pending[place] = key
                    self._removed.append(place)
        if places:
            self.sync(deadline)
        return [errors.get(key) for key in keys]

    @contextmanager
    def reading(self, keys: Sequence[bytes]) -> Iterator[list[Pinned | None]]:
        """Within it the objects stay where they are. None: there is none."""
        with self._lock:
            places = [self._shards[zlib.crc32(key) & _SHARD_MASK].get(key) for key in keys]
            pinned = [None if place is None else self._pin(place) for place in places]
        try:
            yield pinned
        finally:
            with self._lock:
                for each in pinned:
                    if each is not None:
                        self._unpin(each.place)

    def read(self, run: Sequence[tuple[int, Sequence[memoryview]]], deadline: float) -> bool:
        """Fill the buffers, which hold exactly these objects, from slots that are neighbours. False: behind the last
        one, in its last block, are no zeros."""
        parts = [part for _, each in run for part in each]
        return not parts or self._buffers.read(self._offset(run[0][0]), parts, deadline)

    def is_whole(self, pinned: Pinned, parts: Sequence[memoryview]) -> bool:
        """Whether these bytes are its own, and not another's from its slot."""
        return edges_of(parts, pinned.record.nbytes, self._seed) == pinned.record.edges

    def _offset(self, place: int) -> int:
        return self._space.extents[extent_of(place)].slot_offset(slot_of(place))

    def entries(self, shard: int) -> list[Entry]:
        """The objects of a shard, 0 to `SHARDS` - 1. A key is always in the same one."""
        with self._lock:
            found = [(key, self._record_at(place)) for key, place in self._shards[shard].items()]
        return [Entry(key, record.nbytes, record.stored_at_s) for key, record in found]

    def counts(self) -> Counts:
        """What is there, without I/O."""
        with self._lock:
            return Counts(
                self._objects, self._bytes, self._space.bytes_free(), self._damaged_slots, self._damaged_extents
            )

    # --- what a sync makes true -------------------------------------------------------------------------------
    def sync(self, deadline: float) -> None:
        """What was written before is durable. Removes records that have a durable successor, and frees the slots whose
        records are gone for good. One sync serves all threads that were waiting when it began."""
        needed = self._syncs_begun + 1
        with holding(self._syncing, deadline):
            if self.broken:
                raise OSError(errno.EIO, "an earlier sync has failed")
            if self._syncs_done >= needed:
                return
            self._syncs_begun += 1
            with self._lock:
                removed, self._removed = self._removed, []
                superseded, self._superseded = self._superseded, []
            try:
                if self._fsync:
                    self.medium.sync()
            except BaseException:
                self.broken = True
                raise
            self._remove_records(superseded, deadline)
            with self._lock:
                for place in removed:
                    del self._pending[place]
                    self._free(place)
                to_trim, self._to_trim = self._to_trim, []
            self._syncs_done = self._syncs_begun
        for extent in to_trim:
            self._trim(extent)

    def _remove_records(self, superseded: Sequence[int], deadline: float) -> None:
        failed = self._write_records(dict.fromkeys(superseded, NO_RECORD), deadline)
        with self._lock:
            for place in superseded:
                (self._superseded if place in failed else self._removed).append(place)

    def _trim(self, extent: Extent) -> None:
        """Of an extent in no class: its slots. Its header stays, and its records, which name nothing."""
        try:
            self.medium.discard(extent.slot_offset(0), extent.slots * extent.slot_bytes)
        except OSError:  # the medium cannot, or not now: the extent is as good without
            self.trim = False
        with self._lock:
            self._space.put_free(extent.number)

    def _write_records(self, records: Mapping[int, bytes], deadline: float) -> dict[int, OSError]:
        """Write records to their slots, block by block; those that could not be written are as before, in memory."""
        by_extent: dict[Extent, dict[int, int]] = {}
        for place in records:
            extent = self._space.extents[extent_of(place)]
            by_extent.setdefault(extent, {})[slot_of(place)] = place
        failed: dict[int, OSError] = {}
        for extent, slots in by_extent.items():
            try:
                with holding(extent.writing, deadline):
                    self._write_blocks(extent, {slot: records[place] for slot, place in slots.items()})
            except OSError as error:  # a TimeoutError is one
                failed |= dict.fromkeys(slots.values(), error)
        return failed

    def _write_blocks(self, extent: Extent, records: Mapping[int, bytes]) -> None:
        before = {slot: bytes(extent.record(slot)) for slot in records}
        for slot, record in records.items():
            extent.record(slot)[:] = record
        try:
            for first, end in _runs(sorted({slot // RECORDS_PER_BLOCK for slot in records})):
                at = extent.offset + BLOCK_BYTES * (1 + first)
                self.medium.write(at, [extent.records[first * BLOCK_BYTES : end * BLOCK_BYTES]])
        except BaseException:
            for slot, record in before.items():
                extent.record(slot)[:] = record
            raise

    # --- the index; with the lock -----------------------------------------------------------------------------
    def _enter(self, key: bytes, place: int) -> None:
        """The object is what is found under its key, unless a later one is there already."""
        shard = self._shards[zlib.crc32(key) & _SHARD_MASK]
        record, former = self._record_at(place), shard.get(key)
        if former is not None:
            other = self._record_at(former)
            if other.sequence > record.sequence:
                self._supersede(place, key)
                return
            self._supersede(former, key)
            self._objects -= 1
            self._bytes -= other.nbytes
        shard[key] = place
        self._objects += 1
        self._bytes += record.nbytes

    def _leave(self, keys: Sequence[bytes], deadline: float, versions: Sequence[str]) -> dict[bytes, int]:
        """Take objects out of the index, and wait until no former record of their keys can come back."""
        with self._lock:
            while not self._moving.isdisjoint(keys):
                if not self._changed.wait(timeout(deadline)):
                    raise TimeoutError
            if versions:
                named = zip(keys, versions, strict=True)
                keys = [key for key, version in named if version in ("", self._version(key))]
            places = self._take_out(keys)
            wanted = set(keys)
            former = {place for place, key in self._pending.items() if key in wanted}
        try:
            for _ in range(_SYNCS_MAX):
                if former.isdisjoint(self._pending):
                    return places
                self.sync(deadline)
            raise OSError(errno.EIO, "the records of former objects cannot be removed")
        except BaseException:
            with self._lock:
                for key, place in places.items():
                    self._enter(key, place)
            raise

    def _version(self, key: bytes) -> str:
        """Of the object that is there; empty: none is."""
        place = self._shards[zlib.crc32(key) & _SHARD_MASK].get(key)
        return "" if place is None else str(self._record_at(place).sequence)

    def _take_out(self, keys: Sequence[bytes]) -> dict[bytes, int]:
        places: dict[bytes, int] = {}
        for key in keys:
            place = self._shards[zlib.crc32(key) & _SHARD_MASK].pop(key, None)
            if place is not None:
                places[key] = place
                self._objects -= 1
                self._bytes -= self._record_at(place).nbytes
        return places

    def _supersede(self, place: int, key: bytes) -> None:
        self._pending[place] = key
        self._superseded.append(place)

    def _record_at(self, place: int) -> Record:
        record = peek_record(self._space.extents[extent_of(place)].record(slot_of(place)))
        assert record is not None, "an object in the index has no record"
        return record

    def _pin(self, place: int) -> Pinned:
        record = self._record_at(place)
        self._readers[place] += 1
        return Pinned(place, record)

    def _unpin(self, place: int) -> None:
        self._readers[place] -= 1
        if not self._readers[place]:
            del self._readers[place]
            if place in self._unread:
                self._unread.discard(place)
                self._free(place)

    # --- moving objects together ------------------------------------------------------------------------------
    def _empty_one(self, deadline: float) -> bool:
        """Move the objects of a sparse extent into others of its class, so that another class may have it. False: all
        extents are full enough."""
        with holding(self._assigning, deadline):
            with self._lock:
                extent = self._space.to_empty()
            if extent is None:
                return False
            try:
                slots = list(range(extent.slots))
                for first in range(0, len(slots), _MOVED_AT_ONCE):
                    self._move(extent, slots[first : first + _MOVED_AT_ONCE], deadline)
                for _ in range(2):
                    self.sync(deadline)
            finally:
                with self._lock:
                    self._space.reopen(extent)
            return True

    def _move(self, extent: Extent, slots: Sequence[int], deadline: float) -> None:
        moves: list[tuple[Pinned, int]] = []
        with self._lock:
            for slot in slots:
                record = unpack_record(extent.record(slot), self._seed)
                place = extent.place(slot)
                if record is None or self._shards[zlib.crc32(record.key) & _SHARD_MASK].get(record.key) != place:
                    continue
                target = self._space.take(extent.slot_blocks)
                if target is None:
                    break
                moves.append((self._pin(place), target))
                self._moving.add(record.key)
        entered: set[int] = set()
        try:
            if moves:
                entered = self._copy(moves, deadline)
        finally:
            with self._lock:
                for pinned, target in moves:
                    self._moving.discard(pinned.record.key)
                    self._unpin(pinned.place)
                    if target not in entered:
                        self._free(target)
                self._changed.notify_all()

    def _copy(self, moves: Sequence[tuple[Pinned, int]], deadline: float) -> set[int]:
        """The targets that have a record now. They keep their sequence: the bytes are the same."""
        records: dict[int, bytes] = {}
        with self._buffers.bounce(deadline) as bounce:
            for pinned, target in moves:
                source, into = (self._space.extents[extent_of(each)] for each in (pinned.place, target))
                start, end = source.slot_offset(slot_of(pinned.place)), into.slot_offset(slot_of(target))
                padded = -(-pinned.record.nbytes // BLOCK_BYTES) * BLOCK_BYTES
                for at in range(0, padded, BOUNCE_BYTES):
                    piece = bounce[: min(BOUNCE_BYTES, padded - at)]
                    timeout(deadline)
                    self.medium.read(start + at, [piece])
                    self.medium.write(end + at, [piece])
                records[target] = pack_record(pinned.record._replace(epoch=into.epoch), self._seed)
        self.sync(deadline)
        failed = self._write_records(records, deadline)
        with self._lock:
            for pinned, target in moves:
                key = pinned.record.key
                if target in failed:
                    self._supersede(target, key)
                    continue
                shard = self._shards[zlib.crc32(key) & _SHARD_MASK]
                if shard.get(key) == pinned.place:
                    shard[key] = target
                    self._supersede(pinned.place, key)
                else:
                    self._supersede(target, key)
        return set(records)

    def close(self) -> None:
        """Idempotent. Waits for nothing."""
        self.medium.close()


def _place(pair: tuple[int, object]) -> int:
    return pair[0]


def _runs(numbers: Sequence[int]) -> Iterator[tuple[int, int]]:
    """First and end of each run of successive numbers."""
    start = last = numbers[0]
    for number in numbers[1:]:
        if number != last + 1:
            yield start, last + 1
            start = number
        last = number
    yield start, last + 1
