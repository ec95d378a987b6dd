"""Population: everything is real before it is handed out, and a full host is an error message."""

from __future__ import annotations

import ctypes
import errno
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lmcache_core.errors import NotEnoughMemoryError
from lmcache_core.pool.backing import Backing
from lmcache_core.pool.hugepages import from_smaps, huge_page_fraction
from lmcache_core.pool.mapping import MADV_COLLAPSE, Mapping, advise
from lmcache_core.pool.populate import Populator, populate
from lmcache_core.pool.room import LimitedBy, Room
from lmcache_core.pool.segment import Segment

MIB = 1 << 20
Make = Callable[..., Segment]


class Told:
    """What a populator called back with."""

    def __init__(self) -> None:
        self.progress: list[int] = []
        self.errors: list[Exception] = []
        self.threads: set[int] = set()

    def on_progress(self, nbytes: int) -> None:
        self.progress.append(nbytes)
        self.threads.add(threading.get_ident())

    def start(self, segment: Segment, **more: Any) -> Populator:
        more.setdefault("on_progress", self.on_progress)
        populator = Populator(segment, on_error=self.errors.append, **more)
        populator.start()
        return populator


@pytest.mark.parametrize("backing", [Backing.SHM, Backing.MEMFD])
def test_all_memory_is_real_at_the_end_and_progress_says_how_far(make: Make, backing: Backing) -> None:
    segment = make(11 * MIB, backing=backing)
    told = Told()
    populator = told.start(segment, step_bytes=4 * MIB)
    assert populator.wait(60)
    assert told.errors == []
    assert told.progress == [4 * MIB, 8 * MIB, 11 * MIB]
    assert populator.done
    assert os.fstat(segment.fileno()).st_blocks * 512 >= segment.info.data_bytes
    assert told.threads
    assert threading.get_ident() not in told.threads


def test_the_beginning_can_be_waited_for_before_the_end(make: Make) -> None:
    segment = make(8 * MIB)
    go_on = threading.Event()
    populator = Populator(
        segment, on_progress=lambda nbytes: go_on.wait(60) and None, on_error=lambda error: None, step_bytes=4 * MIB
    )
    populator.start()
    assert not populator.wait_begun(0.01)  # it has told nobody yet
    go_on.set()
    assert populator.wait_begun(60)
    assert populator.wait(60)


@pytest.mark.parametrize("threads", [1, 2, 3, 8])
@pytest.mark.parametrize("backing", [Backing.SHM, Backing.MEMFD])
def test_several_threads_leave_no_page_out_and_the_fraction_is_still_the_kernels(
    make: Make, backing: Backing, threads: int
) -> None:
    segment = make(25 * MIB, backing=backing)  # the last step is not a whole number of parts
    told = Told()
    populator = told.start(segment, step_bytes=10 * MIB, threads=threads)
    assert populator.wait(60)
    assert told.errors == []
    assert told.progress == [10 * MIB, 20 * MIB, 25 * MIB]
    assert os.fstat(segment.fileno()).st_blocks * 512 >= segment.info.data_bytes
    header, mapped_kib, huge_kib, inside = segment.header, 0, 0, False
    start = segment.mapping.address
    assert resident_pages(start + header.data_offset, header.data_bytes) == header.data_bytes // 4096
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if not line.partition(" ")[0].endswith(":"):
            inside = int(line.partition("-")[0], 16) == start
        elif inside and line.startswith("Rss:"):
            mapped_kib += int(line.split()[1])
        elif inside and line.startswith("ShmemPmdMapped:"):
            huge_kib += int(line.split()[1])
    assert mapped_kib * 1024 >= header.data_bytes, "every page is mapped, not only allocated"
    assert huge_page_fraction(segment) == pytest.approx(min(huge_kib * 1024 / segment.info.data_bytes, 1))


def resident_pages(address: int, nbytes: int) -> int:
    """What mincore(2) says."""
    found = (ctypes.c_ubyte * -(-nbytes // 4096))()
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.mincore(ctypes.c_void_p(address), ctypes.c_size_t(nbytes), found) == 0
    return sum(page & 1 for page in found)


def test_an_error_of_one_thread_ends_the_population(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    segment = make(16 * MIB, backing=Backing.MEMFD)
    parts: list[tuple[int, int]] = []

    def second_fails(mapping: Mapping, offset: int, nbytes: int) -> None:
        parts.append((offset - segment.header.data_offset, nbytes))
        if offset != segment.header.data_offset:
            raise NotEnoughMemoryError("full")
        populate(mapping, offset, nbytes)

    monkeypatch.setattr("lmcache_core.pool.populate.populate", second_fails)
    told = Told()
    populator = told.start(segment, step_bytes=8 * MIB, threads=2)
    assert populator.wait(60)
    assert [str(error) for error in told.errors] == ["full"]
    assert sorted(parts) == [(0, 4 * MIB), (4 * MIB, 4 * MIB)]
    assert populator.populated_bytes == 0


def test_memory_on_reserved_huge_pages_is_populated_and_counted(make: Make, huge_pages: int) -> None:
    segment = make(16 * MIB, backing=Backing.HUGETLB)
    told = Told()
    assert told.start(segment, step_bytes=4 * MIB).wait(60)
    assert told.errors == []
    assert told.progress[-1] == 16 * MIB
    assert huge_page_fraction(segment) == 1.0


def test_the_huge_page_fraction_is_what_the_kernel_counts_in_either_way(make: Make) -> None:
    segment = make(200 * MIB)  # more than is looked at in one step
    assert huge_page_fraction(segment) == 0.0
    header = segment.header
    os.posix_fallocate(segment.fileno(), header.data_offset, header.data_bytes)
    # Not where the first step looks. It may be refused: then it is 0 again.
    advise(segment.mapping.address + header.data_offset + 150 * MIB, 40 * MIB, MADV_COLLAPSE)
    populate(segment.mapping, header.data_offset, header.data_bytes)
    counted = huge_page_fraction(segment)
    assert counted == from_smaps(segment, Path("/proc/self/smaps")) / header.data_bytes
    assert 0.0 <= counted <= 0.2, "all of what was collapsed, or what the machine had huge pages for"


def test_without_a_scan_the_huge_page_fraction_comes_from_the_sum_that_the_kernel_prints(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object) -> int:
        raise OSError(errno.ENOTTY, "no such call")

    monkeypatch.setattr("fcntl.ioctl", refused)
    segment = make(8 * MIB)
    assert huge_page_fraction(segment) == 0.0
    start, end = segment.mapping.address, segment.mapping.address + segment.mapping.nbytes
    smaps = tmp_path / "smaps"
    smaps.write_text(
        f"{start - 4096:x}-{start:x} rw-s 0 00:00 0 /other\nShmemPmdMapped: 4096 kB\n"
        f"{start:x}-{start + 4 * MIB:x} rw-s 0 00:00 0 /dev/shm/x\nRss: 4 kB\nShmemPmdMapped:     2048 kB\n"
        f"{start + 4 * MIB:x}-{end:x} rw-s 0 00:00 0 /dev/shm/x\nShmemPmdMapped:     4096 kB\n"
    )
    assert huge_page_fraction(segment, smaps) == 6 / 8


def test_a_mount_that_fills_up_meanwhile_is_an_error_and_no_sigbus(
    make: Make, small_mount: Callable[[int], Path]
) -> None:
    mount = small_mount(32)
    segment = make(16 * MIB, shm_dir=mount)
    told = Told()

    def fill(nbytes: int) -> None:
        told.on_progress(nbytes)
        filler = os.open(mount / "filler", os.O_RDWR | os.O_CREAT, 0o600)
        free = os.statvfs(mount).f_bavail * 4096
        os.posix_fallocate(filler, 0, free - MIB)
        os.close(filler)

    populator = told.start(segment, step_bytes=4 * MIB, on_progress=fill)
    assert populator.wait(60)
    (error,) = told.errors
    assert isinstance(error, NotEnoughMemoryError)
    assert str(mount) in str(error)
    assert "4 of 16 MiB are populated" in str(error)
    # What was populated stays good.
    assert told.progress == [4 * MIB]
    segment.view(segment.info.data_offset, 4 * MIB)[:] = bytes([7]) * (4 * MIB)


def test_a_mount_without_memory_answers_the_allocation_itself(make: Make, small_mount: Callable[[int], Path]) -> None:
    # The room was there when asked, and gone when taken: what ask_room says stands for that moment.
    mount = small_mount(8)
    plenty = Room(1 << 40, LimitedBy.MACHINE, "the machine")
    segment = make(4 * MIB, shm_dir=mount)
    filler = os.open(mount / "filler", os.O_RDWR | os.O_CREAT, 0o600)
    os.posix_fallocate(filler, 0, os.statvfs(mount).f_bavail * 4096 - MIB)
    os.close(filler)
    told = Told()
    assert told.start(segment, ask_room=lambda: plenty).wait(60)
    (error,) = told.errors
    assert isinstance(error, NotEnoughMemoryError)
    assert "no space left" in str(error)
    assert told.progress == []


def test_free_memory_is_checked_before_each_step_of_population(make: Make) -> None:
    segment = make(12 * MIB)
    answers = [
        Room(1 << 40, LimitedBy.MACHINE, "the machine"),
        Room(MIB, LimitedBy.CONTROL_GROUP, "control group /x"),
    ]
    told = Told()
    assert told.start(segment, step_bytes=4 * MIB, ask_room=lambda: answers.pop(0)).wait(60)
    assert told.progress == [4 * MIB]
    assert "control group /x" in str(told.errors[0])
    assert os.fstat(segment.fileno()).st_blocks * 512 < 8 * MIB, "the second step was not allocated"


def test_stop_ends_after_the_step_that_runs(make: Make) -> None:
    segment = make(8 * MIB)
    first, go_on = threading.Event(), threading.Event()

    def hold(_: int) -> None:
        first.set()
        assert go_on.wait(60)

    populator = Told().start(segment, step_bytes=MIB, on_progress=hold)
    assert first.wait(60)
    assert not populator.stop(timeout_s=0)
    go_on.set()
    assert populator.stop()
    assert populator.populated_bytes == MIB
    assert not populator.done


def test_a_populator_that_never_started_can_be_stopped(make: Make) -> None:
    populator = Populator(make(), on_progress=lambda _: None, on_error=lambda _: None)
    assert populator.stop()


def test_a_segment_may_be_closed_while_it_is_populated(make: Make) -> None:
    segment = make(8 * MIB)
    first, go_on = threading.Event(), threading.Event()
    told = Told()

    def hold(nbytes: int) -> None:
        told.on_progress(nbytes)
        first.set()
        assert go_on.wait(60)

    populator = told.start(segment, step_bytes=MIB, on_progress=hold)
    assert first.wait(60)
    segment.close()
    go_on.set()
    assert populator.wait(60)
    assert told.errors == []
    assert told.progress[-1] == 8 * MIB


def test_a_worker_populates_its_own_mapping_without_changing_a_byte(make: Make) -> None:
    segment = make(4 * MIB)
    assert Told().start(segment).wait(60)
    segment.view(segment.info.data_offset, 4)[:] = b"data"
    with Segment.attach_name(segment.info.name) as worker:
        populate(worker.mapping, worker.info.data_offset, worker.info.data_bytes)
        assert bytes(worker.view(worker.info.data_offset, 4)) == b"data"
        resident_kib = 0
        lines = iter(Path("/proc/self/smaps").read_text().splitlines())
        for line in lines:
            if line.startswith(f"{worker.mapping.address:x}-"):
                resident_kib = next(int(more.split()[1]) for more in lines if more.startswith("Rss:"))
        assert resident_kib >= 4 * 1024


def test_without_another_thread_one_clears_all_parts(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    segment = make(16 * MIB, backing=Backing.MEMFD)
    monkeypatch.setattr("lmcache_core.pool.populate.started", lambda run, name: None)
    told = Told()
    assert told.start(segment, threads=4).wait(60)
    assert told.errors == []
    assert os.fstat(segment.fileno()).st_blocks * 512 >= segment.info.data_bytes
