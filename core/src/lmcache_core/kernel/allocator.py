"""Slots for objects: exact size classes in slabs, and whole slabs from class to class.

The pool's slab area is a row of equal *units*. A *slab* is a run of units that belongs to one size class and is divided
into equal slots. An object larger than a unit gets a slab of its own. Taking or freeing a slot costs O(1) and touches
no memory of the pool. An empty slab stays with its class until another class needs its units.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Sequence

from lmcache_core.errors import InvariantError, UsageError
from lmcache_core.kernel.objects import Incarnation
from lmcache_core.limits import OBJECT_BYTES_MAX, PAGE_BYTES, SLAB_BYTES, SLAB_BYTES_MIN

UNITS_WANTED = 64  # a small pool has at least this many, so that several classes fit
SLAB_UNITS_MAX = 8  # slots that fit a unit badly get slabs of up to this many units …
WASTE_MAX = 1 / 8  # … until no more than this share of the slab is lost at its end

FREE, TAKEN = 1, 2  # a unit in no slab, and one in a slab; 0: not populated yet


def slab_bytes_for(pool_bytes: int) -> int:
    """The unit for a pool: 64 MiB; in a small pool, the power of two that gives at least 64 units."""
    unit = SLAB_BYTES
    while unit > SLAB_BYTES_MIN and pool_bytes < unit * UNITS_WANTED:
        unit //= 2
    return unit


def slot_bytes_for(nbytes: int) -> int:
    """The size class of an object: its size in whole pages."""
    return -(-nbytes // PAGE_BYTES) * PAGE_BYTES


class SizeClass:
    """All slabs of one slot size. `open` holds those with a free slot; the last is filled first."""

    __slots__ = ("open", "slabs", "slot_bytes", "slots", "slots_used", "units_best", "units_least")

    def __init__(self, slot_bytes: int, unit_bytes: int) -> None:
        self.slot_bytes = slot_bytes
        self.units_least = -(-slot_bytes // unit_bytes)
        self.units_best = self._best(unit_bytes)
        self.open: dict[Slab, None] = {}
        self.slabs = 0
        self.slots = 0
        self.slots_used = 0

    @property
    def slots_free(self) -> int:
        return self.slots - self.slots_used

    def _best(self, unit_bytes: int) -> int:
        for units in range(self.units_least, max(self.units_least, SLAB_UNITS_MAX) + 1):
            if units * unit_bytes % self.slot_bytes <= units * unit_bytes * WASTE_MAX:
                return units
        return self.units_least


class Slab:
    """A run of units divided into slots of one size."""

    __slots__ = (
        "end", "first_unit", "free", "fresh", "home", "nbytes", "residents", "size_class", "slot_bytes", "slots",
        "start", "units", "unmade", "used",
    )  # fmt: skip

    def __init__(self, size_class: SizeClass, first_unit: int, units: int, start: int, nbytes: int) -> None:
        self.size_class = size_class
        self.home = size_class  # its class before it was emptied, and perhaps afterwards
        self.slot_bytes = size_class.slot_bytes
        self.first_unit = first_unit
        self.units = units
        self.start = start
        self.nbytes = nbytes
        self.slots = nbytes // self.slot_bytes
        self.end = start + self.slots * self.slot_bytes
        self.used = 0
        self.unmade = 0  # how many of these are adopted objects without an incarnation so far
        self.fresh = start  # slots from here to `end` were never taken and are in no list
        self.free: list[int] = []  # freed offsets; the last one is reused first, because its page is the warmest
        # Slot → its incarnation, to empty a slab without searching. A freed slot keeps its last one, in state FREE,
        # until it is taken again: clearing it would cost a division for each freed slot.
        self.residents: list[Incarnation | None] = [None] * self.slots

    def take(self, slots: int) -> list[int]:
        """Offsets of up to `slots` free slots; at least one if there is any."""
        free = self.free
        if free:
            offsets = free[-slots:]
            del free[-slots:]
        else:
            end = min(self.fresh + slots * self.slot_bytes, self.end)
            offsets = list(range(self.fresh, end, self.slot_bytes))
            self.fresh = end
        return offsets


class Emptying:
    """Units that move from their slabs to another size class: see `Allocator.begin_emptying`."""

    __slots__ = ("loose", "slabs", "slots")

    def __init__(self, slots: int, slabs: list[Slab], loose: list[int]) -> None:
        self.slots = slots  # how many it will give the class that waits
        self.slabs = slabs
        self.loose = loose  # units of the run that are in no slab


class Allocator:
    """Divides the slab area: `pool_bytes` from `data_offset` on. `populate` says how much of it exists."""

    def __init__(self, pool_bytes: int, data_offset: int, unit_bytes: int) -> None:
        if unit_bytes < SLAB_BYTES_MIN or unit_bytes % PAGE_BYTES:
            raise UsageError(f"slab_bytes {unit_bytes:,} must be whole pages and at least {SLAB_BYTES_MIN:,}")
        if pool_bytes < unit_bytes:
            raise UsageError(f"a pool of {pool_bytes:,} bytes is smaller than one slab of {unit_bytes:,}: enlarge it")
        self.pool_bytes = pool_bytes // PAGE_BYTES * PAGE_BYTES
        self.data_offset = data_offset
        self.unit_bytes = unit_bytes
        self.populated_bytes = 0
        self.stalled = False  # no more memory comes for now
        self.used_bytes = 0
        self.classes: dict[int, SizeClass] = {}
        self.emptying = SizeClass(PAGE_BYTES, unit_bytes)  # stands in for the class of slabs that are being emptied
        self.slot_bytes_least = unit_bytes  # the smallest of all classes with slabs: no object in the pool is smaller
        units = -(-self.pool_bytes // unit_bytes)  # the last one may be shorter
        self._units = bytearray(units)  # searched with `find`, at the speed of memchr
        self.owners: list[Slab | None] = [None] * units
        self._populated_units = 0
        self._empty: dict[Slab, None] = {}
        self.assigned: list[tuple[int, int, int]] = []  # (offset, bytes, slot bytes or 0) since they were last taken

    # --- memory ---------------------------------------------------------------------------------------------

    def populate(self, nbytes_total: int) -> None:
        """The first `nbytes_total` bytes of the area may be used."""
        self.populated_bytes = max(self.populated_bytes, min(nbytes_total, self.pool_bytes))
        self.stalled = False
        whole = self.populated_bytes == self.pool_bytes
        units = len(self._units) if whole else self.populated_bytes // self.unit_bytes
        for unit in range(self._populated_units, units):
            if self.owners[unit] is None:  # otherwise it was adopted
                self._units[unit] = FREE
        self._populated_units = max(units, self._populated_units)

    @property
    def warming(self) -> bool:
        """Whether more memory is being populated: it is waited for, and nothing is evicted meanwhile."""
        return self.populated_bytes < self.pool_bytes and not self.stalled

    @property
    def units_free(self) -> int:
        return self._units.count(FREE)

    @property
    def empty_bytes(self) -> int:
        """Bytes that any class may take: units in no slab, and slabs without an object."""
        loose = sum(self._run_bytes(unit, 1) for unit, state in enumerate(self._units) if state == FREE)
        return loose + sum(slab.nbytes for slab in self._empty)

    # --- slots ----------------------------------------------------------------------------------------------

    def size_class(self, nbytes: int) -> SizeClass:
        """The class for objects of `nbytes`, created on first use."""
        slot_bytes = slot_bytes_for(nbytes)
        found = self.classes.get(slot_bytes)
        if found is None:
            found = self.classes[slot_bytes] = SizeClass(slot_bytes, self.unit_bytes)
        return found

    def fits(self, size_class: SizeClass) -> bool:
        """Whether an empty pool could hold one object of this class."""
        return size_class.slot_bytes <= min(self.pool_bytes, slot_bytes_for(OBJECT_BYTES_MAX))

    def place(self, size_class: SizeClass, objects: Sequence[Incarnation]) -> int:
        """Give slots to the objects, first to last. Returns how many got one before class and area were full."""
        coming, left = iter(objects), len(objects)
        slot_bytes, open_slabs, empty = size_class.slot_bytes, size_class.open, self._empty
        while left:
            if open_slabs:
                slab = next(reversed(open_slabs))
            else:
                grown = self.grow(size_class)
                if grown is None:
                    break
                slab = grown
            if 0 < len(slab.free) <= left:
                offsets, slab.free = slab.free, []
            else:
                offsets = slab.take(left)
            if not slab.used:
                del empty[slab]
            slab.used += len(offsets)
            if slab.used == slab.slots:
                del open_slabs[slab]
            left -= len(offsets)
            start, residents = slab.start, slab.residents
            # `offsets` first: zip must not draw an object that there is no slot for.
            for offset, item in zip(offsets, coming, strict=False):
                item.offset = offset
                item.slab = slab
                residents[(offset - start) // slot_bytes] = item
        placed = len(objects) - left
        size_class.slots_used += placed
        self.used_bytes += placed * slot_bytes
        return placed

    def free(self, objects: Iterable[Incarnation]) -> None:
        """Take back the slots of objects that are now in state FREE."""
        nbytes = 0
        for item in objects:
            slab = item.slab
            used = slab.used
            slab.used = used - 1
            slab.free.append(item.offset)
            size_class = slab.size_class
            size_class.slots_used -= 1
            nbytes += slab.slot_bytes
            if used == slab.slots:
                size_class.open[slab] = None
            if used == 1 and size_class is not self.emptying:
                self._empty[slab] = None
                slab.free = []  # the whole slab is free: its slots are handed out in order again
                slab.fresh = slab.start
        self.used_bytes -= nbytes

    # --- adoption -------------------------------------------------------------------------------------------

    def adopt(
        self, start: int, nbytes: int, slot_bytes: int, used: int, unmade: int, fresh: int, free: list[int]
    ) -> None:
        """Take over a slab of a former server: `used` slots, of which `unmade` hold objects that are made later. Slots
        from `fresh` on are free, and so are those in `free`. The caller has checked that they are slots of whole units
        that no other slab has, and gives the list away."""
        size_class = self.size_class(slot_bytes)
        first_unit, units = (start - self.data_offset) // self.unit_bytes, -(-nbytes // self.unit_bytes)
        slab = Slab(size_class, first_unit, units, start, nbytes)
        slab.used, slab.unmade, slab.fresh, slab.free = used, unmade, fresh, free
        taken = [unit for unit in range(first_unit, first_unit + units) if self.owners[unit] is not None]
        if taken:
            raise InvariantError(f"unit {taken[0]} would be in two slabs")
        for unit in range(first_unit, first_unit + units):
            self._units[unit] = TAKEN
            self.owners[unit] = slab
        if used < slab.slots:
            size_class.open[slab] = None
        self._gained(size_class, slab)
        size_class.slots_used += used
        self.used_bytes += used * slot_bytes

    def walk(self) -> Iterator[Incarnation | None]:
        """Yield for each slot, in order, what stands or stood there. Slots may be taken and freed meanwhile; what stays
        in one from beginning to end is met."""
        unit = 0
        while unit < len(self.owners):
            slab = self.owners[unit]
            unit += 1
            if slab is None:
                yield None
            elif slab.first_unit == unit - 1:
                for slot in range(slab.slots):
                    if slot >= len(slab.residents):
                        break  # it was dissolved
                    yield slab.residents[slot]

    def slabs_from(self, unit: int) -> Iterator[Slab | None]:
        """The slab of each unit, once around the pool from this unit on; None if it is in none."""
        for at in range(unit, unit + len(self.owners)):
            yield self.owners[at % len(self.owners)]

    def slab_at(self, offset: int) -> Slab:
        """The slab that a slot stands in."""
        slab = self.owners[(offset - self.data_offset) // self.unit_bytes]
        if slab is None:
            raise InvariantError(f"no slab at {offset:#x}")
        return slab

    # --- slabs ----------------------------------------------------------------------------------------------

    def run_around(self, size_class: SizeClass, around: Slab, avoid: Container[Slab]) -> range | None:
        """Units around `around` that would make one more slab of `size_class`, without slabs in `avoid` or slabs that
        are already being emptied. None if there are none. Looks at no slot."""
        units = size_class.units_least
        first = max(0, around.first_unit - units + 1)
        last = min(around.first_unit + around.units, len(self._units) - units + 1)
        for start in range(first, last):
            if self._run_bytes(start, units) < size_class.slot_bytes:
                continue
            run = range(start, start + units)
            if all(self._may_be_emptied(unit, avoid) for unit in run):
                return run
        return None

    def _may_be_emptied(self, unit: int, avoid: Container[Slab]) -> bool:
        owner = self.owners[unit]
        if owner is None:
            return self._units[unit] == FREE
        return owner.size_class is not self.emptying and owner not in avoid

    def begin_emptying(self, size_class: SizeClass, run: range) -> Emptying:
        """Stop all use of these units for new objects, until `give_emptied` or `keep` ends that. `run` is what
        `run_around` answered for the class, with no call in between."""
        slabs = list(dict.fromkeys(owner for unit in run if (owner := self.owners[unit]) is not None))
        for slab in slabs:
            home = slab.home = slab.size_class  # it still counts the slab, but none of its slots
            home.slots -= slab.slots
            home.slots_used -= slab.used
            home.open.pop(slab, None)
            self._empty.pop(slab, None)
            slab.size_class = self.emptying
            self.emptying.slots_used += slab.used
        loose = [unit for unit in run if self.owners[unit] is None]
        for unit in loose:
            self._units[unit] = TAKEN
        # A slab goes as a whole, even if it reaches beyond the run: all of its units make slots.
        start = min([run.start, *(slab.first_unit for slab in slabs)])
        end = max([run.stop, *(slab.first_unit + slab.units for slab in slabs)])
        units = size_class.units_least
        firsts = range(start, end - units + 1, units)
        slots = sum(self._run_bytes(first, units) // size_class.slot_bytes for first in firsts)
        return Emptying(slots, slabs, loose)

    def keep(self, emptying: Emptying) -> None:
        """The units are not needed, or could not be emptied: their slabs return to normal use."""
        for slab in emptying.slabs:
            home = slab.size_class = slab.home
            self.emptying.slots_used -= slab.used
            self.emptying.open.pop(slab, None)
            home.slots += slab.slots
            home.slots_used += slab.used
            if slab.used < slab.slots:
                home.open[slab] = None
            if not slab.used:
                self._empty[slab] = None
                slab.free = []
                slab.fresh = slab.start
        for unit in emptying.loose:
            self._units[unit] = FREE

    def give_emptied(self, emptying: Emptying) -> None:
        """These units are empty now, and the next slab may have them. The caller takes it at once."""
        self.keep(emptying)
        self.dissolve(emptying.slabs)

    def dissolve(self, slabs: Sequence[Slab]) -> None:
        """Return empty slabs to all classes."""
        for slab in slabs:
            if slab.used:
                raise InvariantError(f"{slab.used} slots of the slab at {slab.start:#x} are used, and it would go back")
        for slab in slabs:
            del self._empty[slab]
            size_class = slab.size_class
            del size_class.open[slab]
            size_class.slabs -= 1
            size_class.slots -= slab.slots
            for unit in range(slab.first_unit, slab.first_unit + slab.units):
                self._units[unit] = FREE
                self.owners[unit] = None
            slab.residents = []
            self.assigned.append((slab.start, slab.nbytes, 0))
        if slabs:
            in_use = [each.slot_bytes for each in self.classes.values() if each.slabs]
            self.slot_bytes_least = min(in_use, default=self.unit_bytes)

    def grow(self, size_class: SizeClass) -> Slab | None:
        """Give the class one more slab, from units in no slab or in another class's empty one."""
        run = self._find_run(size_class)
        if run is None:
            self.dissolve([slab for slab in self._empty if slab.size_class is not size_class])
            run = self._find_run(size_class)
        if run is None:
            return None
        first, units = run
        start = self.data_offset + first * self.unit_bytes
        slab = Slab(size_class, first, units, start, self._run_bytes(first, units))
        for unit in range(first, first + units):
            self._units[unit] = TAKEN
            self.owners[unit] = slab
        self._empty[slab] = None
        size_class.open[slab] = None
        self._gained(size_class, slab)
        self.assigned.append((slab.start, slab.nbytes, slab.slot_bytes))
        return slab

    def _gained(self, size_class: SizeClass, slab: Slab) -> None:
        size_class.slabs += 1
        size_class.slots += slab.slots
        self.slot_bytes_least = min(self.slot_bytes_least, size_class.slot_bytes)

    def _find_run(self, size_class: SizeClass) -> tuple[int, int] | None:
        for units in dict.fromkeys((size_class.units_best, size_class.units_least)):
            first = self._units.find(bytes([FREE]) * units)
            if first >= 0 and self._run_bytes(first, units) >= size_class.slot_bytes:
                return first, units
        return None

    def _run_bytes(self, first: int, units: int) -> int:
        return min((first + units) * self.unit_bytes, self.pool_bytes) - first * self.unit_bytes
