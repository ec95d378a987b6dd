"""Which slots are free: extents go from one pool to the size classes that need them, and back. Memory only, no I/O;
whoever calls has the store's lock."""

from __future__ import annotations

import heapq
import threading
from bisect import bisect_left

from lmcache_block.medium.buffers import aligned
from lmcache_block.medium.format import BLOCK_BYTES, EDGE_BYTES, RECORD_BYTES, Geometry, Superblock

_SLOT_BITS = 20


def extent_of(place: int) -> int:
    """The number of a slot's extent."""
    return place >> _SLOT_BITS


def slot_of(place: int) -> int:
    """The number of a slot in its extent."""
    return place & ((1 << _SLOT_BITS) - 1)


class Extent:
    """One that belongs to a class.

    Attributes:
        records: What its records are on the medium, from page-aligned memory.
        writing: Held while records are changed and written, so that a block is never written with former content.
        closed: It is being emptied: nothing new goes in.
    """

    __slots__ = ("closed", "epoch", "freed", "fresh", "number", "offset", "records", "slot_blocks", "slots", "writing")

    def __init__(self, number: int, slot_blocks: int, epoch: int, block: Superblock) -> None:
        geometry = Geometry.of(block.extent_bytes, slot_blocks)
        self.number = number
        self.slot_blocks = slot_blocks
        self.slots = geometry.slots
        self.epoch = epoch
        self.offset = EDGE_BYTES + number * block.extent_bytes
        self.records = aligned(geometry.record_blocks * BLOCK_BYTES)
        self.writing = threading.Lock()
        self.closed = False
        self.fresh = 0  # slots from here on were never used
        self.freed: list[int] = []

    @property
    def slot_bytes(self) -> int:
        return self.slot_blocks * BLOCK_BYTES

    @property
    def free_slots(self) -> int:
        return len(self.freed) + self.slots - self.fresh

    @property
    def used_slots(self) -> int:
        return self.slots - self.free_slots

    def slot_offset(self, slot: int) -> int:
        """Where a slot starts on the medium."""
        return self.offset + BLOCK_BYTES + self.records.nbytes + slot * self.slot_bytes

    def record(self, slot: int) -> memoryview:
        return self.records[slot * RECORD_BYTES : (slot + 1) * RECORD_BYTES]

    def place(self, slot: int) -> int:
        """The number of a slot on the medium."""
        return self.number << _SLOT_BITS | slot

    def occupy(self, free: list[int]) -> None:
        """All slots are used but these, in ascending order. Once, before any is taken."""
        self.fresh = self.slots
        while free and free[-1] == self.fresh - 1:
            self.fresh = free.pop()
        self.freed = free[::-1]

    def take(self) -> int:
        """A free slot; there is one."""
        if self.freed:
            return self.freed.pop()
        self.fresh += 1
        return self.fresh - 1


class Space:
    """All extents of a medium."""

    def __init__(self, block: Superblock) -> None:
        self._block = block
        self.extents: dict[int, Extent] = {}
        self.pool: list[int] = []  # a heap of the numbers of free extents
        self._classes: dict[int, dict[int, Extent]] = {}
        self._open: dict[int, list[int]] = {}  # heaps of numbers, of extents that may have a free slot

    def class_for(self, nbytes: int) -> int:
        """Blocks of the smallest slot for an object; there is one."""
        blocks = max(1, -(-nbytes // BLOCK_BYTES))
        classes = self._block.classes
        return classes[bisect_left(classes, blocks)]

    def add(self, extent: Extent) -> None:
        """An extent goes to its class."""
        self.extents[extent.number] = extent
        self._classes.setdefault(extent.slot_blocks, {})[extent.number] = extent
        self._offer(extent)

    def take(self, slot_blocks: int) -> int | None:
        """A free slot of the class, in the extent with the lowest number: the others become empty in time."""
        heap = self._open.get(slot_blocks, [])
        while heap:
            extent = self.extents.get(heap[0])
            if extent is not None and extent.slot_blocks == slot_blocks and extent.free_slots and not extent.closed:
                place = extent.place(extent.take())
                if not extent.free_slots:  # or each slot that is freed and taken again would leave a number behind
                    heapq.heappop(heap)
                return place
            heapq.heappop(heap)
        return None

    def take_larger(self, slot_blocks: int) -> int | None:
        """A free slot of the next larger class that has one."""
        for larger in sorted(each for each in self._open if each > slot_blocks):
            place = self.take(larger)
            if place is not None:
                return place
        return None

    def free(self, place: int) -> Extent | None:
        """A slot may be used again. Its extent, if that is empty now and its class has another one with room: it has
        left its class, and is the caller's."""
        extent = self.extents[extent_of(place)]
        had_room = extent.free_slots > 0
        extent.freed.append(slot_of(place))
        if extent.used_slots == 0:
            siblings = self._classes[extent.slot_blocks].values()
            if extent.closed or any(each is not extent and each.free_slots for each in siblings):
                return self.remove(extent)
        if not had_room:
            self._offer(extent)
        return None

    def take_free(self) -> int | None:
        """The number of a free extent: from the pool, or one that is empty and leaves its class."""
        if self.pool:
            return heapq.heappop(self.pool)
        for extent in self.extents.values():
            if extent.used_slots == 0 and not extent.closed:
                return self.remove(extent).number
        return None

    def put_free(self, number: int) -> None:
        """An extent that has left its class goes into the pool."""
        heapq.heappush(self.pool, number)

    def to_empty(self) -> Extent | None:
        """The extent that is emptied with the fewest bytes moved: three quarters full at most, and the others of its
        class take its objects. It is closed until `reopen`."""
        best: Extent | None = None
        for extents in self._classes.values():
            room = sum(each.free_slots for each in extents.values() if not each.closed)
            for each in extents.values():
                used = each.used_slots
                fits = not each.closed and used <= room - each.free_slots and 4 * used <= 3 * each.slots
                if fits and (best is None or used * each.slot_blocks < best.used_slots * best.slot_blocks):
                    best = each
        if best is not None:
            best.closed = True
        return best

    def reopen(self, extent: Extent) -> None:
        """It was not emptied after all, or has left its class."""
        extent.closed = False
        if self.extents.get(extent.number) is extent:
            self._offer(extent)

    def bytes_free(self) -> int:
        """What fits, if it were of the sizes that are there already."""
        slots = sum(each.free_slots * each.slot_bytes for each in self.extents.values())
        return slots + len(self.pool) * self._block.extent_bytes

    def _offer(self, extent: Extent) -> None:
        if extent.free_slots:
            heapq.heappush(self._open.setdefault(extent.slot_blocks, []), extent.number)

    def remove(self, extent: Extent) -> Extent:
        """It leaves its class."""
        del self.extents[extent.number]
        del self._classes[extent.slot_blocks][extent.number]
        return extent
