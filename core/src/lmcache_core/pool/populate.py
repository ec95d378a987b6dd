"""The pool's memory, allocated and populated in the background, one step at a time.

Order within a step: ask for room, allocate, then collapse into huge pages or populate. On a full mount `fallocate`
answers ENOSPC, but populating would be a SIGBUS. In a full control group only the OOM killer answers, so that is asked
first. Collapsing right after the allocation costs no more than populating, and leaves nothing to populate; a worker
then maps a GiB in 3 ms, against 0.4 s with small pages. The file system allocates, one call at a time; clearing pages,
which is most of the work, is shared by several threads.
"""

from __future__ import annotations

import ctypes
import errno
import os
import sys
import threading
from collections.abc import Callable
from functools import partial

from lmcache_core.errors import NotEnoughMemoryError, PoolError
from lmcache_core.limits import HUGE_PAGE_BYTES, POPULATE_STEP_BYTES, POPULATE_THREADS_MAX
from lmcache_core.pool.atfork import PrivateDescriptor
from lmcache_core.pool.backing import SHM_DIR, Backing
from lmcache_core.pool.cores import usable_cores
from lmcache_core.pool.mapping import MADV_COLLAPSE, MADV_POPULATE_WRITE, Mapping, advise
from lmcache_core.pool.room import Room, check_room, room
from lmcache_core.pool.segment import Segment
from lmcache_core.threads import started

# Bytes cleared by one call. Meanwhile the process's memory map is locked, and a thread that gets memory from the system
# (even the loop's) waits: 10 ms for 32 MiB of small pages.
_CALL_BYTES = 2 * HUGE_PAGE_BYTES


def populate(mapping: Mapping, offset: int, nbytes: int) -> None:
    """Map pages for writing, all at once and without the GIL, so that no later access faults.

    For bytes that are already allocated and in use, this changes only the page table: a worker may call it for memory
    that the server has handed out.
    """
    held = mapping.array  # the address is only valid while this is held
    error = advise(mapping.address + offset, nbytes, MADV_POPULATE_WRITE)
    if error in (errno.EFAULT, errno.ENOMEM):
        raise NotEnoughMemoryError(
            f"{nbytes:,} bytes of the pool at {offset:,} got no memory: the mount or the machine is full"
        )
    if error == errno.EINVAL:  # kernels before 5.14
        _touch(mapping.address + offset, nbytes)
    elif error:
        raise PoolError(f"populating {nbytes:,} bytes of the pool at {offset:,} failed: {os.strerror(error)}")
    del held


def _touch(address: int, nbytes: int) -> None:
    """Map pages by reading one byte of each. Allocated pages are mapped, and keep their content."""
    for page in range(address, address + nbytes, os.sysconf("SC_PAGE_SIZE")):
        ctypes.string_at(page, 1)


class Holes:
    """Where a file has no memory, or was never written to. Ask from front to end: the operating system walks a stretch
    of data page by page, so its answer is kept and not asked for again for each part."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._data_start = self._data_end = 0

    def missing_bytes(self, offset: int, nbytes: int) -> int:
        """Bytes of the range that are in holes."""
        end, missing_bytes = offset + nbytes, 0
        while offset < end:
            if offset >= self._data_end:
                self._find_data(offset)
            missing_bytes += max(0, min(end, self._data_start) - offset)
            offset = min(end, self._data_end)
        return missing_bytes

    def _find_data(self, offset: int) -> None:
        try:
            self._data_start = os.lseek(self._fd, offset, os.SEEK_DATA)
            self._data_end = os.lseek(self._fd, self._data_start, os.SEEK_HOLE)
        except OSError as error:
            if error.errno != errno.ENXIO:
                raise
            self._data_start = self._data_end = sys.maxsize  # only a hole up to the file's end


def _at_once(work: Callable[[int, int], None], offset: int, nbytes: int, threads: int) -> None:
    """Call `work(offset, nbytes)` for parts of a range, each of whole huge pages, on this many threads. Once all have
    ended, raises the error of one of them."""
    part_bytes = -(-nbytes // threads // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
    errors: list[Exception] = []

    def run(at: int) -> None:
        try:
            work(at, min(part_bytes, offset + nbytes - at))
        except Exception as error:  # noqa: BLE001 - raised again, by the thread that waits for this one
            errors.append(error)

    starts = range(offset, offset + nbytes, part_bytes)
    others = {at: started(partial(run, at), "lmcache-populate") for at in starts[1:]}
    for at in starts:
        if others.get(at) is None:  # the first, and those for which there is no thread
            run(at)
    for other in filter(None, others.values()):
        other.join()
    if errors:
        raise errors[0]


class Populator:
    """A thread that allocates and populates a new segment's data, from start to end.

    After each step it calls `on_progress(populated_bytes)`: so many bytes of the data area, counted from `data_offset`,
    may be handed out. `on_error(exception)` is called at most once, and ends the work; what was populated before stays
    usable. Neither may raise. The segment may be closed at any time.
    """

    def __init__(
        self,
        segment: Segment,
        *,
        on_progress: Callable[[int], None],
        on_error: Callable[[Exception], None],
        ask_room: Callable[[], Room] | None = None,
        step_bytes: int = POPULATE_STEP_BYTES,
        threads: int = 0,
        populated_bytes: int = 0,
    ) -> None:
        """`threads` clear pages at once; 0: as many as there are processors, within limits. `populated_bytes`: done by
        a former one."""
        self._header = segment.header
        self._adopted = segment.adopted
        self._mapping = segment.mapping
        # A descriptor of its own: the segment's may be closed, and its number reused, during a step.
        self._fd = PrivateDescriptor(segment.worker_fd())
        mount = segment.path.parent if segment.path else SHM_DIR
        self._ask_room = ask_room or partial(room, segment.info.backing, mount=mount)
        self._holes = Holes(self._fd.fileno())
        self._on_progress = on_progress
        self._on_error = on_error
        self._step_bytes = step_bytes
        self._threads = threads or min(POPULATE_THREADS_MAX, usable_cores())
        self._stop = threading.Event()
        self._begun = threading.Event()
        self._thread = threading.Thread(target=self._run, name="lmcache-populate", daemon=True)
        self.populated_bytes = populated_bytes

    def start(self) -> None:
        """Begin. Call it once."""
        self._thread.start()

    def stop(self, timeout_s: float | None = None) -> bool:
        """End after the current step, and wait for that. True if it has ended."""
        self._stop.set()
        if self._thread.ident is None:
            self._fd.close()
            return True
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait for the end of the work. True if it has ended, for whatever reason."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def wait_begun(self, timeout_s: float) -> bool:
        """Wait for the first step, or the end of the work. True if either has happened."""
        return self._begun.wait(timeout_s)

    @property
    def done(self) -> bool:
        """True once every byte is populated."""
        return self.populated_bytes == self._header.data_bytes

    def _run(self) -> None:
        try:
            while not self.done and not self._stop.is_set():
                self._step()
                self._on_progress(self.populated_bytes)
                self._begun.set()
        except Exception as error:  # noqa: BLE001 - for `on_error`
            self._on_error(error)
        finally:
            self._begun.set()
            self._fd.close()

    def _step(self) -> None:
        header = self._header
        if header.backing is Backing.FILE:  # it has its blocks already, and its pages come when they are used
            self.populated_bytes = header.data_bytes
            return
        offset = header.data_offset + self.populated_bytes
        nbytes = min(self._step_bytes, header.data_bytes - self.populated_bytes)
        so_far = f"{self.populated_bytes >> 20:,} of {header.data_bytes >> 20:,} MiB are populated"
        what = f"the next step of pool {header.name!r} ({so_far})"
        # Most of an adopted pool exists: it needs no room, and its content is in use and is not moved.
        missing_bytes = self._holes.missing_bytes(offset, nbytes) if self._adopted else nbytes
        if missing_bytes and header.backing is not Backing.HUGETLB:  # its mapping has reserved every page already
            check_room(missing_bytes, self._ask_room(), what=what)
        try:
            os.posix_fallocate(self._fd.fileno(), offset, nbytes)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.ENOMEM):
                raise PoolError(f"{what} cannot be allocated: {error.strerror}") from error
            check_room(nbytes, self._ask_room(), what=what)  # who took it, if that can still be found out
            raise NotEnoughMemoryError(
                f"{what} found {os.strerror(error.errno).lower()}: make the pool smaller, or free memory"
            ) from error
        collapses = missing_bytes > 0 and header.backing is not Backing.HUGETLB
        _at_once(partial(self._clear, collapses), offset, nbytes, self._threads)
        self.populated_bytes += nbytes

    def _clear(self, collapses: bool, offset: int, nbytes: int) -> None:
        for at in range(offset, offset + nbytes, _CALL_BYTES):
            part_bytes = min(_CALL_BYTES, offset + nbytes - at)
            if collapses:
                # Refused by older kernels, and where no huge page is free: small pages serve as well, only slower.
                advise(self._mapping.address + at, part_bytes, MADV_COLLAPSE)
            populate(self._mapping, at, part_bytes)
