"""Going on with the segment of a dead owner: the same plan and the same boot, or cold with a reason."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lmcache_core.errors import LimitError
from lmcache_core.pool.backing import Access, segment_path
from lmcache_core.pool.header import HEADER_BYTES
from lmcache_core.pool.lifelock import LifeLock
from lmcache_core.pool.ownership import OnStale
from lmcache_core.pool.populate import Holes
from lmcache_core.pool.processes import process_of
from lmcache_core.pool.segment import Segment

from .conftest import Child

MIB = 1 << 20


def left(name: str, runtime_dir: Path, **options: object) -> Segment:
    """A segment whose owner has ended and kept it. It is closed; its file stands."""
    segment = Segment.create(name, 4 * MIB, runtime_dir=runtime_dir, **options)  # type: ignore[arg-type]
    segment.view(segment.info.data_offset, 5)[:] = b"hello"
    segment.serve(0xABC)
    segment.serve(0)
    segment.close(keep=True)
    return segment


@pytest.fixture
def gone(pool_name: str) -> Iterator[None]:
    """Removes what a test leaves behind."""
    yield
    segment_path(pool_name).unlink(missing_ok=True)


def adopt(name: str, runtime_dir: Path, data_bytes: int = 4 * MIB, **options: object) -> Segment:
    return Segment.create(name, data_bytes, runtime_dir=runtime_dir, on_stale=OnStale.ADOPT, **options)  # type: ignore[arg-type]


def test_the_same_plan_goes_on_with_the_same_boot_and_bytes(pool_name: str, runtime_dir: Path, gone: object) -> None:
    before = left(pool_name, runtime_dir)
    with adopt(pool_name, runtime_dir) as segment:
        assert segment.adopted
        assert segment.info == before.info
        assert bytes(segment.view(segment.info.data_offset, 5)) == b"hello"
        assert segment.former_epoch == 0xABC
        assert segment.header.pid == os.getpid()
    assert segment_path(pool_name).exists(), "who adopts and fails before it serves leaves the pool as it was"
    with adopt(pool_name, runtime_dir) as segment:
        assert segment.adopted
        segment.close(keep=False)
    assert not segment_path(pool_name).exists()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"data_bytes": 8 * MIB}, "data_bytes is 4,194,304 there and 8,388,608 in the settings"),
        ({"index_entries": 8192}, "index_entries is 4,096 there and 8,192 in the settings"),
        ({"access": Access.GROUP, "gids": [os.getgid()]}, f"open to its owner.* group {os.getgid()}"),
    ],
)
def test_another_plan_begins_cold_and_names_both_sides(
    pool_name: str, runtime_dir: Path, gone: object, options: dict[str, object], words: str
) -> None:
    before = left(pool_name, runtime_dir)
    with adopt(pool_name, runtime_dir, **options) as segment:
        assert not segment.adopted
        assert segment.recreated
        assert segment.info.boot_id != before.info.boot_id
        assert re.search(words, segment.why_cold), segment.why_cold
        assert bytes(segment.view(segment.info.data_offset, 5)) == bytes(5)


@pytest.mark.parametrize("damage", ["version", "checksum", "magic", "short", "empty page"])
def test_a_damaged_header_begins_cold(pool_name: str, runtime_dir: Path, gone: object, damage: str) -> None:
    left(pool_name, runtime_dir)
    path = segment_path(pool_name)
    with path.open("r+b") as file:
        page = bytearray(file.read(HEADER_BYTES))
        if damage == "version":
            page[8] = 2  # of the library before the tallies: no place of it is where ours would look
        elif damage == "checksum":
            page[40] ^= 1
        elif damage == "magic":
            page[0] ^= 1
        elif damage == "empty page":
            page[:] = bytes(HEADER_BYTES)
        file.seek(0)
        file.write(page)
        if damage == "short":
            file.truncate(2 * MIB)
    with adopt(pool_name, runtime_dir) as segment:
        assert segment.recreated
        if damage == "version":
            assert "version 2 and this library supports 4" in segment.why_cold


def test_rows_of_the_dead_are_released_and_those_of_the_living_are_not(
    pool_name: str, runtime_dir: Path, gone: object
) -> None:
    segment = Segment.create(pool_name, 4 * MIB, runtime_dir=runtime_dir)
    dead, _ = segment.claim_row()
    living, _ = segment.claim_row()
    with Segment.attach_fd(segment.worker_fd(), segment.info) as worker:
        lock = LifeLock.acquire(worker, living)
        segment.close(keep=True)
        with adopt(pool_name, runtime_dir) as adopted:
            assert [row for row, lives in enumerate(adopted.living_rows()) if lives] == [living]
            assert not adopted.tables.row_claimed(dead)
            assert adopted.tables.row_claimed(living)
            assert adopted.claim_row()[0] != living
            lock.close()
            assert not any(adopted.living_rows())
            adopted.close(keep=False)


def test_holes_are_counted_and_data_is_not(tmp_path: Path) -> None:
    fd = os.memfd_create("holes", os.MFD_CLOEXEC)
    try:
        os.ftruncate(fd, 8 * MIB)
        assert Holes(fd).missing_bytes(0, 8 * MIB) == 8 * MIB
        os.pwrite(fd, b"x" * MIB, 2 * MIB)
        assert Holes(fd).missing_bytes(0, 8 * MIB) == 7 * MIB
        assert Holes(fd).missing_bytes(2 * MIB, MIB) == 0
        assert Holes(fd).missing_bytes(MIB, 2 * MIB) == MIB
        assert Holes(fd).missing_bytes(3 * MIB, MIB) == MIB
    finally:
        os.close(fd)


def test_a_stretch_of_data_is_walked_once_however_many_steps_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    fd = os.memfd_create("holes", os.MFD_CLOEXEC)
    asked: list[int] = []
    seek = os.lseek

    def counting(fd: int, offset: int, how: int) -> int:
        asked.append(how)
        return seek(fd, offset, how)

    try:
        os.ftruncate(fd, 64 * MIB)
        for first, last in ((4, 30), (33, 50), (63, 64)):
            for at in range(first, last):
                os.pwrite(fd, b"x" * MIB, at * MIB)
        monkeypatch.setattr(os, "lseek", counting)
        steps = Holes(fd)
        missing = [steps.missing_bytes(at * MIB, 2 * MIB) // MIB for at in range(0, 64, 2)]
        assert missing == [Holes(fd).missing_bytes(at * MIB, 2 * MIB) // MIB for at in range(0, 64, 2)]
        assert sum(missing) == 64 - 26 - 17 - 1
        asked.clear()
        steps = Holes(fd)
        for at in range(0, 64, 2):
            steps.missing_bytes(at * MIB, 2 * MIB)
        assert len(asked) <= 8, "two for each stretch, and one for what follows the last"
    finally:
        os.close(fd)


LOCKER = """
    import fcntl, os, struct, sys
    fd = os.open(sys.argv[1], os.O_RDWR)
    fcntl.fcntl(fd, fcntl.F_OFD_SETLK, struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0))
    print(os.getpid(), flush=True)
    input()
"""


def test_a_stranger_that_locks_all_rows_blocks_only_rows_whose_worker_cannot_be_proven_dead(
    pool_name: str, runtime_dir: Path, gone: object, spawn: Callable[..., Child]
) -> None:
    segment = Segment.create(pool_name, 4 * MIB, runtime_dir=runtime_dir)
    worker = spawn("print('here', flush=True); input()")
    assert worker.read() == "here"
    dead, _ = segment.claim_row(0, process_of(worker.pid))
    alive, _ = segment.claim_row(0, process_of(os.getpid()))
    unknown, _ = segment.claim_row(0)
    worker.kill()
    stranger = spawn(LOCKER, segment_path(pool_name))
    stranger.read()
    with pytest.raises(LimitError):
        segment.claim_row()
    segment.close(keep=True)
    with adopt(pool_name, runtime_dir) as adopted:
        rows = adopted.living_rows()
        assert [row for row, lives in enumerate(rows) if lives] == [alive, unknown]
        assert not adopted.tables.row_claimed(dead)
        row, _ = adopted.claim_row(0, locked=False)
        assert row not in (alive, unknown)
        stranger.kill()
        assert adopted.row_left(unknown)
        adopted.close(keep=False)
