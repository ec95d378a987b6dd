"""Tables on huge pages: reserved ones, on a hugetlbfs, and those that the system gathers."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from lmcache_l0 import SharedCache, _table, making
from lmcache_l0.errors import TableDamagedError, TableRoomError
from lmcache_l0.making import room_at

PAGE_BYTES = 2 << 20
PAGES = 16


@pytest.fixture
def hugetlbfs(tmp_path) -> Iterator[Path]:
    """A mount of its own, over some pages that are reserved for the test."""
    setting = Path("/proc/sys/vm/nr_hugepages")
    mount = tmp_path / "huge"
    mount.mkdir()
    # The setting is the machine's: other test runs on it (core's, too) wait until this one has put it back.
    with open(Path(tempfile.gettempdir()) / f"lmcache-test-hugepages-{os.getuid()}", "w") as turn:
        fcntl.flock(turn, fcntl.LOCK_EX)
        try:
            before = setting.read_text()
            setting.write_text(str(PAGES))
        except OSError as error:
            pytest.skip(f"huge pages cannot be reserved here: {error}")
        try:
            if int(setting.read_text()) < PAGES or shutil.which("mount") is None:
                pytest.skip("the kernel has not enough memory in one piece, or there is no mount")
            command = ["mount", "-t", "hugetlbfs", "-o", "pagesize=2M", "none", str(mount)]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                pytest.skip(f"a hugetlbfs cannot be mounted here: {done.stderr}")
            try:
                yield mount
            finally:
                subprocess.run(["umount", str(mount)], check=True)
        finally:
            setting.write_text(before)


def mappings_of(path: Path) -> int:
    return Path("/proc/self/maps").read_text().count(str(path))


def test_a_table_on_a_hugetlbfs_is_the_same_table(hugetlbfs):
    path = hugetlbfs / "t.l0"
    assert room_at(path)[0] == PAGES * PAGE_BYTES
    with SharedCache(path, hash_slots=3000, max_value_size=1024) as cache:
        assert path.stat().st_size % PAGE_BYTES == 0
        assert cache.file_bytes <= path.stat().st_size
        assert room_at(path)[0] == PAGES * PAGE_BYTES - path.stat().st_size
        cache.set_many({f"{i}": bytes([i % 256]) * 1000 for i in range(2000)})
        view = cache.view("7")
        with SharedCache(path, huge_pages=True, create=False) as other:
            assert other.collapse() == path.stat().st_size  # nothing else is there
            other.set("8", b"written there")
            assert len(other.writers()) == 2
        assert cache.get("8") == b"written there"
        child = os.fork()
        if child == 0:
            cache.set("child", b"1")
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        assert cache.get("child") == b"1"
        assert cache.stats.writers == 1
        assert bytes(view) == bytes([7]) * 1000
        reader = SharedCache(path, read_only=True)
        assert dict(reader.items()) == dict(cache.items())
        reader.close()
        del view
    assert mappings_of(path) == 0  # pieces of huge pages cannot be unmapped: whole ones were
    with SharedCache(path, hash_slots=3000) as again:
        assert again.get("8") == b"written there"
        again.unlink()
    assert room_at(path)[0] == PAGES * PAGE_BYTES


def test_a_table_for_which_there_are_too_few_huge_pages_is_refused(hugetlbfs):
    with pytest.raises(TableRoomError, match=r"vm\.nr_hugepages"):
        SharedCache(hugetlbfs / "t.l0", size_gb=0.1)
    (hugetlbfs / "none.l0").touch(mode=0o600)
    os.truncate(hugetlbfs / "none.l0", PAGE_BYTES)
    with pytest.raises(TableDamagedError, match="no finished L0 table"):
        SharedCache(hugetlbfs / "none.l0")
    assert [found.name for found in hugetlbfs.iterdir()] == ["none.l0"]


def test_a_table_that_fills_its_pages_is_made_where_a_page_is_more_than_a_step(hugetlbfs, monkeypatch):
    """As with pages of 1 GiB, of which each step of 64 MiB would take one whole."""
    monkeypatch.setattr(making, "_STEP_BYTES", PAGE_BYTES // 4)
    path = hugetlbfs / "t.l0"
    with SharedCache(path, size_gb=(PAGES - 0.5) * PAGE_BYTES / 2**30):
        assert path.stat().st_size == PAGES * PAGE_BYTES
        assert room_at(path)[0] == 0


def test_elsewhere_pages_are_the_machines_own(tmp_path):
    with (tmp_path / "file").open("w") as file:
        assert _table.page_bytes(file.fileno()) == 4096


def test_a_table_that_the_system_gathers_is_the_same_table(make, folder):
    """How much the system gathers is its own affair; what is in the table is not."""
    cache = make(folder / "t", size_gb=0.02, max_value_size=1024)
    cache.set_many({f"{i}": bytes([i % 256]) * 1000 for i in range(5000)})
    view = cache.view("7")
    huge = make(folder / "t", huge_pages=True)
    assert 0 <= huge.collapse() <= cache.file_bytes
    assert bytes(view) == huge.get("7") == bytes([7]) * 1000
    assert dict(huge.items()) == dict(cache.items())
    huge.set("7", b"written there")
    assert cache.get("7") == b"written there"
    small = make(huge_pages=True)  # less than one huge page
    assert small.collapse() == 0
