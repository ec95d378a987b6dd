"""The copies of one job, made by process_vm calls instead of by the extension: a page engine, as `Pages` takes it."""

from __future__ import annotations

import ctypes
import errno
import logging
import threading
import time
from abc import ABC, abstractmethod
from array import array
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import xxhash

from lmcache_copier.limits import CHUNK_BYTES, ROWS_MAX
from lmcache_copier.vm import Reach, UnreachableMemoryError
from lmcache_core.buffers import address_of
from lmcache_core.client import page_engine
from lmcache_core.errors import UsageError
from lmcache_core.guard import guarded
from lmcache_core.threads import started

log = logging.getLogger("lmcache_copier")

COPIED, DAMAGED, UNDONE, WRITTEN = 1, 3, 4, 16  # what a job says of an object, see `_native.PageJob`
own_engine: Any = page_engine()


class Row(NamedTuple):
    """A page of an object, or a part of a large one: where it starts in the engine's memory for page id 0, how far
    apart ids are, which of the object's ids it has, and how long it is."""

    base: int
    stride: int
    page: int
    nbytes: int


class GroupPlan:
    """How objects of one group lie in the engine's memory."""

    def __init__(self, words: Sequence[int], per_object: int) -> None:
        """`words`: base, page_bytes and page_stride of each region."""
        self.rows = [
            Row(words[at] + first, words[at + 2], page, min(CHUNK_BYTES, words[at + 1] - first))
            for at in range(0, len(words), 3)
            for page in range(per_object)
            for first in range(0, words[at + 1], CHUNK_BYTES)
        ]
        self.lengths = array("Q", [row.nbytes for row in self.rows])
        self.at = list(accumulate(self.lengths, initial=0))  # of each row in the object
        self.per_object = per_object
        self.object_bytes = self.at[-1]
        self.cuts = self._cuts()

    def _cuts(self) -> list[int]:
        """Where the rows are cut, so that each part is one system call."""
        cuts = [0]
        for row in range(len(self.rows)):
            if row > cuts[-1] and (row - cuts[-1] >= ROWS_MAX or self.at[row + 1] - self.at[cuts[-1]] > CHUNK_BYTES):
                cuts.append(row)
        return [*cuts, len(self.rows)]

    @property
    def together(self) -> int:
        """How many whole objects one system call copies."""
        return max(1, min(ROWS_MAX // len(self.rows), CHUNK_BYTES // self.object_bytes))


class PlannedTables:
    """The tables of a registration: those of the extension, which check page ids, and the plans of the groups."""

    def __init__(self, words: tuple[tuple[Any, ...], ...]) -> None:
        """`words`: as `RegionTables.words` has them. Raises `UsageError` for memory that can be nobody's."""
        try:
            self.tables = own_engine.PageTables(words)
        except ValueError as error:
            raise UsageError(str(error)) from error
        self.plans = [GroupPlan(row[0], row[2]) for row in words]


def rows_of(words: tuple[tuple[Any, ...], ...]) -> int:
    """How many rows the plans of these groups have: what they take is known before they are made."""
    return sum(row[2] * -(-nbytes // CHUNK_BYTES) for row in words for nbytes in row[0][1::3])


class PlannedBatch:
    """The pages of one call, checked, and their groups."""

    def __init__(self, tables: PlannedTables, entries: tuple[tuple[Any, ...], ...], writes: bool) -> None:
        self._batch = own_engine.PageBatch(tables.tables, entries, writes)
        self.ids: Callable[[int], bytes] = self._batch.ids
        self.plans = [tables.plans[entry[0]] for entry in entries]


class CopyThreads:
    """Threads that help jobs to copy, whichever has something to do."""

    def __init__(self, count: int) -> None:
        self._work: deque[Callable[[], None]] = deque()
        self._there = threading.Semaphore(0)
        self.count = count
        for number in range(count):
            started(self._run, f"copy-{number}")

    def lend(self, work: Callable[[], None], count: int) -> None:
        """Have at most so many of them do this. They may come late: then there must be nothing left to do."""
        for _ in range(min(count, self.count)):
            self._work.append(work)
            self._there.release()

    def _run(self) -> None:
        while True:
            self._there.acquire()
            guarded(_log_fault, self._work.popleft())


class Copies(ABC):
    """The engine of one job: what `Pages` calls to copy. `cancel` ends all its copies, also those yet to begin."""

    fault: Any  # why something was not copied, in words; empty: nothing was in the way

    def __init__(self) -> None:
        self.cancelled = False
        self._made: list[tuple[Any, Sequence[tuple[Any, ...]]]] = []

    @abstractmethod
    def PageJob(self, batch: Any, parts: Sequence[tuple[Any, ...]], *more: Any) -> Any:
        """As the extension's, and kept for `cancel`. Once the job was cancelled, it copies nothing."""

    def cancel(self) -> None:
        """When this returns, nothing touches the engine's pages any more, and nothing will."""
        self.cancelled = True
        for job, _ in list(self._made):
            job.stop()

    def begun(self) -> Iterator[tuple[int, int, bool]]:
        """Objects that were written to, in the pool or in pages: entry, position, and whether they are whole. After
        `cancel` no other ones will be."""
        for job, parts in list(self._made):
            for number, part in enumerate(parts):
                for position, status in zip(part[1], job.statuses(number), strict=True):
                    if status & WRITTEN:
                        yield part[0], position, status == COPIED | WRITTEN


class JobCopies(Copies):
    """By process_vm calls."""

    def __init__(self, tables: PlannedTables, reach: Reach, helpers: CopyThreads, until: float | None) -> None:
        super().__init__()
        self._tables = tables
        self.reach = reach
        self.helpers = helpers
        self.until = until  # monotonic: past that nothing more is copied
        self.fault = ""

    def PageTables(self, words: object) -> PlannedTables:
        """Those of the registration."""
        del words
        return self._tables

    PageBatch = PlannedBatch

    def PageJob(self, batch: PlannedBatch, parts: Sequence[tuple[Any, ...]], *more: Any) -> ReachJob:
        """Copies of some objects."""
        gather, _, keep = more  # whoever waits does not see regions
        job = ReachJob(self, batch, parts, gather, keep)
        self._made.append((job, parts))
        return job


def _log_fault(error: BaseException) -> None:
    log.error("a copy has failed, and its job with it", exc_info=error)


class _Item(NamedTuple):
    """Objects of one part that are copied together."""

    part: int
    first: int
    end: int


class ReachJob:
    """Objects on their way, as `_native.PageJob`. The thread that starts it copies, and others that are lent to it."""

    fault = 0  # of a device

    def __init__(
        self, job: JobCopies, batch: PlannedBatch, parts: Sequence[tuple[Any, ...]], gather: bool, keep: object
    ) -> None:
        self._job, self._batch, self._parts, self._gather, self._keep = job, batch, parts, gather, keep
        self._statuses = [bytearray([UNDONE]) * len(part[1]) for part in parts]
        self._sums = [array("Q", bytes(8 * len(part[1]))) for part in parts]
        self._ids = [memoryview(batch.ids(part[0])).cast("q") for part in parts]
        self._items = deque(
            _Item(number, first, min(first + step, len(part[1])))
            for number, part in enumerate(parts)
            for step in [batch.plans[part[0]].together]
            for first in range(0, len(part[1]), step)
        )
        self._left = threading.Condition()  # guards the next two
        self._inside = 0
        self._closed = not self._items
        self._copying = False  # within `start`

    # --- what jobs ask ------------------------------------------------------------------------------------------

    @property
    def running(self) -> bool:
        """Whether a thread may be inside a slot or a page."""
        return self._inside > 0 or (self._copying and not self._closed)

    @property
    def nbytes(self) -> int:
        """Bytes to copy."""
        return sum(len(part[1]) * self._batch.plans[part[0]].object_bytes for part in self._parts)

    def start(self, threads: int, waits: bool) -> None:
        """Copy everything, or what is copied before somebody stops it."""
        del threads, waits
        self._copying = True
        try:
            self._job.helpers.lend(self._work, min(len(self._items), self.nbytes // CHUNK_BYTES) - 1)
            self._work()
            with self._left:
                while self._inside:
                    self._left.wait()
            if self._gather:
                self._check_engine()
        finally:
            self._copying = False

    def _check_engine(self) -> None:
        """What was read counts only if the engine lives on."""
        try:
            self._job.reach.check()
        except UnreachableMemoryError as error:
            self._note_fault(error)
            self._statuses = [bytearray([UNDONE | WRITTEN]) * len(row) for row in self._statuses]

    def _note_fault(self, error: UnreachableMemoryError) -> None:
        """Memory that is not there is missing for the objects that lie in it; anything else, for all."""
        self._job.fault = self._job.fault or (error.strerror or str(error))
        if error.errno != errno.EFAULT:
            self._closed = True

    def wait(self, seconds: float, region: int = -1) -> bool:
        """Whether everything is copied."""
        del seconds, region
        return all(row.find(UNDONE) < 0 and row.find(UNDONE | WRITTEN) < 0 for row in self._statuses)

    def ask_to_stop(self, dropped: object = None, /) -> None:
        """Begin nothing more."""
        del dropped
        self._closed = True

    def stop(self) -> None:
        """Begin nothing more, and return when no thread copies."""
        with self._left:
            self._closed = True
            while self._inside:
                self._left.wait()

    def statuses(self, part: int) -> bytes:
        """The status of each object of a part, one byte each."""
        return bytes(self._statuses[part])

    def incarnations(self, part: int) -> bytes:
        """Unknown here: the leases have them."""
        return bytes(8 * len(self._parts[part][1]))

    def checksums(self, part: int) -> bytes:
        """The checksums of the objects of a part, as u64."""
        return self._sums[part].tobytes()

    # --- copies -------------------------------------------------------------------------------------------------

    def _work(self) -> None:
        while self._enter():
            try:
                try:
                    item = self._items.popleft()
                except IndexError:
                    return
                self._copy(item)
            except UnreachableMemoryError as error:
                self._note_fault(error)
            finally:
                with self._left:
                    self._inside -= 1
                    self._left.notify_all()

    def _enter(self) -> bool:
        with self._left:
            if self._ends():
                return False
            self._inside += 1
            return True

    def _ends(self) -> bool:
        job = self._job
        return self._closed or job.cancelled or (job.until is not None and time.monotonic() >= job.until)

    def _copy(self, item: _Item) -> None:
        entry, positions, slots, wanted = self._parts[item.part]
        plan, statuses = self._batch.plans[entry], self._statuses[item.part]
        ids = self._ids[item.part]
        objects: list[tuple[int, Sequence[int]]] = []
        for at in range(item.first, item.end):
            if (
                not self._gather
                and wanted is not None
                and wanted[at]
                and _sum(slots[at], plan.object_bytes) != wanted[at]
            ):
                statuses[at] = DAMAGED  # and nothing was written
                continue
            first = positions[at] * plan.per_object
            objects.append((at, ids[first : first + plan.per_object].tolist()))
        if not objects:
            return
        whole = all(min(pages) >= 0 for _, pages in objects)
        for at, _ in objects:
            statuses[at] = UNDONE | WRITTEN
        if len(objects) == 1 or not whole or not self._copy_together(plan, item.part, objects):
            for at, pages in objects:
                try:
                    if not self._copy_one(plan, slots[at], pages, self._sums[item.part], at, whole):
                        return
                    statuses[at] = COPIED | WRITTEN
                except UnreachableMemoryError as error:
                    self._note_fault(error)

    def _copy_together(self, plan: GroupPlan, part: int, objects: Sequence[tuple[int, Sequence[int]]]) -> bool:
        """Small objects, all pages of which are there, in one system call. False: the memory of one is missing."""
        slots = self._parts[part][2]
        starts = [row.base + pages[row.page] * row.stride for _, pages in objects for row in plan.rows]
        ours = array("Q", [word for at, _ in objects for word in (slots[at], plan.object_bytes)])
        try:
            self._transfer(ours, _pairs(starts, plan.lengths * len(objects)), len(objects) * plan.object_bytes)
        except UnreachableMemoryError as error:
            self._note_fault(error)
            return False
        for at, _ in objects:
            if self._gather:
                self._sums[part][at] = _sum(slots[at], plan.object_bytes)
            self._statuses[part][at] = COPIED | WRITTEN
        return True

    def _copy_one(
        self, plan: GroupPlan, slot: int, pages: Sequence[int], sums: array[int], at: int, whole: bool
    ) -> bool:
        """One object, in parts. False: it was stopped before one of them."""
        summed = xxhash.xxh3_64()
        for first, end in pairwise(plan.cuts):
            if self._ends():
                return False
            rows, begin, nbytes = plan.rows[first:end], plan.at[first], plan.at[end] - plan.at[first]
            if whole or all(pages[row.page] >= 0 for row in rows):
                starts = [row.base + pages[row.page] * row.stride for row in rows]
                self._transfer(array("Q", [slot + begin, nbytes]), _pairs(starts, plan.lengths[first:end]), nbytes)
            else:
                self._copy_with_gaps(plan, slot, pages, range(first, end))
            if self._gather:
                summed.update(_view(slot + begin, nbytes))
        if self._gather:
            sums[at] = summed.intdigest()
        return True

    def _copy_with_gaps(self, plan: GroupPlan, slot: int, pages: Sequence[int], rows: range) -> None:
        """Of pages that are not touched a slot has zeros."""
        there = [row for row in rows if pages[plan.rows[row].page] >= 0]
        if self._gather and len(there) < len(rows):
            ctypes.memset(slot + plan.at[rows[0]], 0, plan.at[rows[-1] + 1] - plan.at[rows[0]])
        if there:
            starts = [plan.rows[row].base + pages[plan.rows[row].page] * plan.rows[row].stride for row in there]
            lengths = array("Q", [plan.lengths[row] for row in there])
            ours = _pairs([slot + plan.at[row] for row in there], lengths)
            self._transfer(ours, _pairs(starts, lengths), sum(lengths))

    def _transfer(self, ours: array[int], theirs: array[int], nbytes: int) -> None:
        (self._job.reach.read if self._gather else self._job.reach.write)(ours, theirs, nbytes)


def _pairs(starts: Sequence[int], lengths: array[int]) -> array[int]:
    words = array("Q", bytes(16 * len(starts)))
    words[0::2], words[1::2] = array("Q", starts), lengths
    return words


def _view(address: int, nbytes: int) -> memoryview:
    return memoryview((ctypes.c_char * nbytes).from_address(address)).cast("B")


def _sum(address: int, nbytes: int) -> int:
    return xxhash.xxh3_64_intdigest(_view(address, nbytes))


def measured_s(engine: Any, tables: Any, group: int, count: int, ids: bytes, object_bytes: int) -> float:
    """How long an engine of pages takes to gather so many objects, with their checksums, into memory of ours. Raises
    `UsageError` for pages that are not there."""
    room = bytearray(object_bytes)
    with memoryview(room) as view:
        slot = address_of(view)
        try:
            batch = engine.PageBatch(tables, ((group, count, ids, 0, len(ids) // 8),), False)
        except (ValueError, OverflowError, TypeError) as error:
            raise UsageError(str(error)) from error
        began = time.perf_counter()
        for at in range(count):
            job = engine.PageJob(batch, ((0, array("Q", [at]), array("Q", [slot]), None),), True, False, room)
            job.start(1, True)
        return time.perf_counter() - began
