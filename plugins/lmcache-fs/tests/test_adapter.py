"""What the disk tier promises, looked at on the medium itself."""

from __future__ import annotations

import errno
import mmap
import os
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from lmcache_core.errors import TierError
from lmcache_core.tiers.contract import AdapterContext, LoadItem, Result, StoreItem
from lmcache_fs import client
from lmcache_fs.adapter import FsAdapter
from lmcache_fs.settings import FsSettings
from lmcache_fs.transport.mode import WriteMode

from .conftest import Disk

HEADER, PAYLOAD = os.urandom(4096), os.urandom(70_001)
SIZES = (4096, 70_001)


def _aligned(content: bytes) -> memoryview:
    whole = memoryview(mmap.mmap(-1, -(-len(content) // 4096) * 4096))[: len(content)]
    whole[:] = content
    return whole


@pytest.mark.parametrize("io_mode", ["buffered", "direct", "auto"])
@pytest.mark.parametrize("fsync", [False, True])
@pytest.mark.parametrize("payload_bytes", [0, 1, 4096, 70_001, 1 << 20])
def test_bytes_come_back_in_every_mode(
    disk: Callable[..., Disk], io_mode: str, fsync: bool, payload_bytes: int
) -> None:
    tier = disk(io_mode=io_mode, fsync=fsync)
    payload = os.urandom(payload_bytes)
    stored = _aligned(HEADER + payload)
    outcome = tier.adapter.store([StoreItem(b"k", [stored[:4096], stored[4096:]])], tier.deadline)[0]
    assert (outcome.result, outcome.nbytes) == (Result.DONE, 4096 + payload_bytes), outcome.error
    back = _aligned(bytes(4096 + payload_bytes))
    loaded = tier.adapter.load([LoadItem(b"k", [back[:4096], back[4096:]])], tier.deadline)[0]
    assert (loaded.result, loaded.nbytes) == (Result.DONE, 4096 + payload_bytes), loaded.error
    assert back == stored


def test_a_shorter_object_ends_inside_the_last_buffer(disk: Callable[..., Disk]) -> None:
    tier = disk()
    tier.store(b"k", HEADER, b"abc")
    outcome, (head, tail) = tier.load(b"k", 4096, 100)
    assert (outcome.result, outcome.nbytes) == (Result.DONE, 4099)
    assert (bytes(head), bytes(tail[:3])) == (HEADER, b"abc")


def test_a_store_replaces_and_a_delete_may_be_repeated(disk: Callable[..., Disk]) -> None:
    tier = disk()
    tier.store(b"k", b"old")
    tier.store(b"k", b"new!")
    outcome, (back,) = tier.load(b"k", 10)
    assert (outcome.nbytes, bytes(back[:4])) == (4, b"new!")
    assert len(tier.files()) == 1
    for _ in range(2):
        assert tier.adapter.delete([b"k"], tier.deadline)[0].result is Result.DONE
    assert tier.exists(b"k") == [False]
    assert tier.load(b"k", 10)[0].result is Result.MISS


def test_every_key_has_a_file_of_its_own(disk: Callable[..., Disk]) -> None:
    tier = disk()
    keys = [b"\x00", b"\x00\x00", b"/", b"..", b"a" * 64, b"A" * 64, bytes(range(64)), b"\xff"]
    for key in keys:
        assert tier.store(key, key).result is Result.DONE
    assert len(tier.files()) == len(keys)
    for key in keys:
        outcome, (back,) = tier.load(key, len(key))
        assert (outcome.result, bytes(back)) == (Result.DONE, key)


# --- damage -----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("cut_to", [0, 5, 16, 4096, 74_000])
def test_a_truncated_file_is_damaged_and_set_aside(disk: Callable[..., Disk], cut_to: int) -> None:
    tier = disk()
    tier.store(b"k", HEADER, PAYLOAD)
    (file,) = tier.files()
    os.truncate(file, cut_to)
    outcome, _ = tier.load(b"k", *SIZES)
    assert outcome.result is Result.DAMAGED
    assert str(file) in outcome.error
    assert tier.files() == [file], "a read moves nothing"
    tier.adapter.set_aside([b"k"], tier.deadline, [outcome.version])
    assert tier.exists(b"k") == [False]
    assert [path.stat().st_size for path in tier.files("damaged")] == [cut_to]


@pytest.mark.parametrize("io_mode", ["buffered", "direct"])
def test_a_longer_file_is_damaged(disk: Callable[..., Disk], io_mode: str) -> None:
    tier = disk(io_mode=io_mode)
    tier.store(b"k", HEADER, PAYLOAD)
    (file,) = tier.files()
    with file.open("ab") as end:
        end.write(b"x" * 100)
    assert tier.load(b"k", *SIZES)[0].result is Result.DAMAGED
    file.unlink()
    tier.store(b"j", HEADER, PAYLOAD)
    with tier.files()[0].open("ab") as end:
        end.write(b"x" * 100)
    assert tier.load(b"j", SIZES[0], SIZES[1] + 1000)[0].result is Result.DAMAGED


def test_damaged_files_are_kept_up_to_a_bound_and_then_deleted(disk: Callable[..., Disk]) -> None:
    tier = disk(damaged_files_max=2)
    for i in range(4):
        tier.store(b"k%d" % i, PAYLOAD)
    for file in tier.files():
        os.truncate(file, 10)
    for i in range(4):
        assert tier.load(b"k%d" % i, len(PAYLOAD))[0].result is Result.DAMAGED
        tier.adapter.set_aside([b"k%d" % i], tier.deadline)
    assert (len(tier.files()), len(tier.files("damaged"))) == (0, 2)


def test_what_the_core_finds_damaged_is_set_aside_too(disk: Callable[..., Disk]) -> None:
    tier = disk()
    tier.store(b"k", PAYLOAD)
    for _ in range(2):
        assert tier.adapter.set_aside([b"k"], tier.deadline)[0].result is Result.DONE
    assert (len(tier.files()), len(tier.files("damaged"))) == (0, 1)


def test_a_file_that_was_replaced_since_it_looked_damaged_is_not_set_aside(disk: Callable[..., Disk]) -> None:
    tier = disk()
    tier.store(b"k", PAYLOAD)
    os.truncate(tier.files()[0], 10)
    outcome, _ = tier.load(b"k", len(PAYLOAD))
    disk().store(b"k", PAYLOAD)  # by another server
    assert tier.adapter.set_aside([b"k"], tier.deadline, [outcome.version])[0].result is Result.DONE
    assert tier.load(b"k", len(PAYLOAD))[0].result is Result.DONE


# --- a medium in trouble ------------------------------------------------------------------------------------
@pytest.fixture
def small_medium(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "small"
    path.mkdir()
    if os.geteuid() != 0 or shutil.which("mount") is None:
        pytest.skip("mounting a small tmpfs needs root")
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", path], capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(f"a tmpfs cannot be mounted here: {mounted.stderr.strip()}")
    yield path
    subprocess.run(["umount", "-l", path], check=True)  # lazily: an adapter may still have it open


def test_a_full_disk_is_an_ordinary_answer_and_leaves_no_temporary_behind(
    disk: Callable[..., Disk], small_medium: Path
) -> None:
    tier = disk(small_medium)
    answers = [tier.store(b"k%d" % i, os.urandom(200_000)).result for i in range(8)]
    assert answers[:4] == [Result.DONE] * 4
    assert answers[-1] is Result.FULL
    assert {path.name for path in tier.files("tmp")} == {"lock"}
    assert len(tier.files()) == answers.count(Result.DONE)
    tier.adapter.delete([b"k0", b"k1"], tier.deadline)
    assert tier.store(b"again", os.urandom(200_000)).result is Result.DONE
    tier.adapter.close()


def test_a_read_only_medium_serves_loads_and_refuses_stores(disk: Callable[..., Disk], small_medium: Path) -> None:
    writer = disk(small_medium)
    writer.store(b"k", PAYLOAD)
    writer.adapter.close()
    tier = disk(small_medium)
    subprocess.run(["mount", "-o", "remount,ro", small_medium], check=True)
    try:
        refused = tier.store(b"j", PAYLOAD)
        assert (refused.result, refused.retryable) == (Result.FAILED, False)
        assert "mount it writable" in refused.error
        outcome, (back,) = tier.load(b"k", len(PAYLOAD))
        assert (outcome.result, bytes(back)) == (Result.DONE, PAYLOAD)
    finally:
        subprocess.run(["mount", "-o", "remount,rw", small_medium], check=True)
        tier.adapter.close()


def test_a_path_below_a_file_is_refused_and_breaks_nothing(disk: Callable[..., Disk], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    tier = disk(tmp_path / "file" / "tier")
    outcome = tier.store(b"k", PAYLOAD)
    assert (outcome.result, outcome.retryable) == (Result.FAILED, False)
    assert "'disk'" in outcome.error
    assert tier.load(b"k", 10)[0].result is Result.FAILED
    with pytest.raises(TierError, match="'disk'"):
        tier.exists(b"k")


@pytest.mark.parametrize("what", [".", "objects", "tmp"])
def test_a_directory_deleted_under_us_is_made_again_at_the_next_store(disk: Callable[..., Disk], what: str) -> None:
    tier = disk()
    tier.store(b"k", PAYLOAD)
    shutil.rmtree(tier.path / what)
    assert tier.load(b"k", len(PAYLOAD))[0].result is (Result.DONE if what == "tmp" else Result.MISS)
    assert tier.store(b"j", PAYLOAD).result is Result.DONE
    outcome, (back,) = tier.load(b"j", len(PAYLOAD))
    assert (outcome.result, bytes(back)) == (Result.DONE, PAYLOAD)


def test_buffers_that_start_anywhere_go_direct_too(disk: Callable[..., Disk]) -> None:
    tier = disk(io_mode="direct")
    content = os.urandom((3 << 20) + 4097)
    unaligned = memoryview(bytearray(b"x" + content))[1:]
    assert tier.adapter.store([StoreItem(b"k", [unaligned[:4096], unaligned[4096:]])], tier.deadline)[0].nbytes
    back = memoryview(bytearray(len(content) + 1))[1:]
    loaded = tier.adapter.load([LoadItem(b"k", [back[:4096], back[4096:]])], tier.deadline)[0]
    assert (loaded.result, bytes(back)) == (Result.DONE, content), loaded.error


def test_a_medium_without_direct_io_is_reported_and_auto_uses_buffered_io(
    disk: Callable[..., Disk], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = client.write_object

    def refuses(path: str, buffers: Any, *, direct: bool, sync: bool) -> None:
        if direct:
            raise OSError(errno.EINVAL, "Invalid argument")
        real(path, buffers, direct=direct, sync=sync)

    monkeypatch.setattr("lmcache_fs.adapter.write_object", refuses)
    monkeypatch.setattr(WriteMode, "direct", lambda self: True)
    refused = disk(io_mode="direct").store(b"k", PAYLOAD)
    assert (refused.result, refused.retryable) == (Result.FAILED, False)
    assert 'io_mode = "auto"' in refused.error
    assert disk(io_mode="auto").store(b"k", PAYLOAD).result is Result.DONE


def test_auto_writes_direct_only_while_memory_is_short() -> None:
    assert not WriteMode(lambda: 0.5).direct()
    short = WriteMode(lambda: 0.01)
    assert short.direct()
    short.refused()
    assert not short.direct()


def test_what_is_past_its_deadline_is_not_begun(disk: Callable[..., Disk]) -> None:
    tier = disk()
    outcome = tier.adapter.store([StoreItem(b"k", [memoryview(b"x")])], 0.0)[0]
    assert (outcome.result, outcome.retryable) == (Result.FAILED, True)
    assert not (tier.path / "objects").exists()


# --- scan and restarts --------------------------------------------------------------------------------------
def _scan(tier: Any) -> list[Any]:
    entries, cursor, pages = [], None, 0
    while pages == 0 or cursor is not None:
        page = tier.adapter.scan(cursor, tier.deadline)
        entries += page.entries
        cursor, pages = page.cursor, pages + 1
    return entries


def test_a_scan_finds_each_object_once_with_its_size_in_pages(
    disk: Callable[..., Disk], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lmcache_fs.adapter._SCAN_PAGE_ENTRIES", 7)
    tier = disk()
    sizes = {b"key %d" % i: 10 + i for i in range(50)}
    for key, size in sizes.items():
        tier.store(key, bytes(size))
    (tier.path / "objects" / "notes.txt").write_text("not ours")
    (tier.files()[0].parent / "README").write_text("not ours")
    fresh = disk()
    found = _scan(fresh)
    assert {entry.key: entry.nbytes for entry in found} == sizes
    assert len(found) == 50
    assert len(tier.adapter.scan(None, tier.deadline).entries) < 50


def test_a_scan_of_nothing_is_empty(disk: Callable[..., Disk]) -> None:
    assert _scan(disk()) == []


def test_a_load_makes_an_object_the_most_recent_for_the_next_scan(disk: Callable[..., Disk]) -> None:
    tier = disk()
    for i in range(3):
        tier.store(b"k%d" % i, PAYLOAD)
    for number, file in enumerate(tier.files()):
        os.utime(file, (1000 + number, 1000 + number))
    tier.load(b"k1", len(PAYLOAD))
    order = sorted(_scan(disk()), key=lambda entry: entry.used_at_s)
    assert order[-1].key == b"k1"
    assert all(entry.used_at_s < 2000 for entry in order[:-1])


def test_objects_outlive_the_adapter(disk: Callable[..., Disk]) -> None:
    tier = disk()
    tier.store(b"k", PAYLOAD)
    tier.adapter.close()
    outcome, (back,) = disk().load(b"k", len(PAYLOAD))
    assert (outcome.result, bytes(back)) == (Result.DONE, PAYLOAD)


def test_a_closed_adapter_says_so_and_leaves_no_temporary_folder(disk: Callable[..., Disk]) -> None:
    tier = disk()
    tier.store(b"k", PAYLOAD)
    tier.adapter.close()
    tier.adapter.close()
    assert list((tier.path / "tmp").iterdir()) == []
    with pytest.raises(TierError, match="closed"):
        tier.exists(b"k")


def test_building_an_adapter_touches_nothing(tmp_path: Path) -> None:
    FsAdapter(FsSettings(path=tmp_path / "none"), AdapterContext(tier="disk")).close()
    assert not (tmp_path / "none").exists()


def test_threads_storing_one_key_leave_one_whole_object(disk: Callable[..., Disk]) -> None:
    tier = disk()
    contents = [bytes([i]) * 50_000 for i in range(4)]
    threads = [
        threading.Thread(target=lambda c=content: [tier.store(b"k", c) for _ in range(20)]) for content in contents
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    outcome, (back,) = tier.load(b"k", 50_000)
    assert outcome.result is Result.DONE
    assert bytes(back) in contents
    assert {path.name for path in tier.files("tmp")} == {"lock"}
