"""Foreign files in the directory, and what must be on the medium when a store has been answered."""

from __future__ import annotations

import errno
import os
import shutil
import socket
import stat
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lmcache_core.errors import TierError
from lmcache_core.tiers.contract import Result
from lmcache_fs.client import make_folder
from lmcache_fs.transport.temporary import TemporaryFolder, sweep
from lmcache_testing.waiting import WAIT_S

from .conftest import Disk

KEY = b"k" * 44


def test_temporary_folders_without_a_lock_are_swept(disk: Callable[..., Disk], tmp_path: Path) -> None:
    """A sweeper that died had removed the lock first; an adapter that died had made none yet."""
    path = tmp_path / "tier"
    living = disk(path)
    living.store(KEY, b"content")
    for name in ("1234-aabb", ".77-ccdd"):
        folder = path / "tmp" / name
        folder.mkdir()
        (folder / "7").write_bytes(bytes(1000))
    other = disk(path)
    other.store(KEY, b"content")
    folders = {each.name for each in (path / "tmp").iterdir() if each.is_dir()}
    assert folders == {Path(each.adapter.temporary.path).name for each in (living, other)}


def test_a_folder_that_is_being_made_is_not_swept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sweep comes between the folder and its lock."""
    parent = tmp_path / "tmp"
    parent.mkdir()
    opened = os.open
    order: list[threading.Thread] = []

    def late(path: Any, *arguments: Any, **more: Any) -> int:
        if str(path).endswith("/lock") and not order:
            # Another server's; it waits until the folder has its lock.
            order.append(threading.Thread(target=sweep, args=(parent,), daemon=True))
            order[0].start()
        return opened(path, *arguments, **more)

    monkeypatch.setattr(os, "open", late)
    folder = TemporaryFolder(parent)
    folder.open()
    order[0].join(60)
    assert not order[0].is_alive()
    assert Path(folder.path).is_dir()
    folder.close()


def test_fsync_reaches_the_directory_of_a_new_shard(
    disk: Callable[..., Disk], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[str] = []
    fsync = os.fsync

    def watched(handle: int) -> None:
        synced.append(str(Path(f"/proc/self/fd/{handle}").readlink()))
        fsync(handle)

    monkeypatch.setattr(os, "fsync", watched)
    path = tmp_path / "a" / "tier"
    here = disk(path, fsync=True)
    assert here.store(KEY, b"content").result is Result.DONE
    (file,) = here.files()
    for folder in (file.parent, path / "objects", path, path.parent, tmp_path):
        assert str(folder) in synced, folder
    synced.clear()
    assert here.store(KEY, b"content").result is Result.DONE
    assert str(file.parent) in synced
    assert str(path / "objects") not in synced, "a shard that is there costs no more than its own sync"


def test_what_lies_in_the_wrong_place_is_not_counted(disk: Callable[..., Disk]) -> None:
    here = disk()
    here.store(KEY, b"content")
    (file,) = here.files()
    wrong = here.path / "objects" / ("000" if file.parent.name != "000" else "001")
    wrong.mkdir()
    shutil.copy(file, wrong / file.name)
    (file.parent / file.name.upper()).write_bytes(bytes(100))
    folder = here.path / "objects" / "fff"
    folder.mkdir(exist_ok=True)
    (folder / "00ff").mkdir()
    (folder / "link").symlink_to(file)
    page = here.adapter.scan(None, here.deadline)
    assert [(entry.key, entry.nbytes) for entry in page.entries] == [(KEY, 7)]
    assert page.cursor is None


def test_the_directory_and_all_in_it_is_its_owners_alone(disk: Callable[..., Disk], tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        here = disk(tmp_path / "tier")
        here.store(KEY, b"content")
        (file,) = here.files()
        file.write_bytes(b"short")
        here.load(KEY, 100)
        here.adapter.set_aside([KEY], here.deadline)
    finally:
        os.umask(before)
    folders = [here.path, *(each for each in here.path.rglob("*") if each.is_dir())]
    assert {"tmp", "objects", "damaged"} <= {each.name for each in folders}
    for folder in folders:
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700, folder


def test_what_cannot_be_removed_is_not_said_to_be_gone(
    disk: Callable[..., Disk], monkeypatch: pytest.MonkeyPatch
) -> None:
    here = disk(damaged_files_max=0)
    here.store(KEY, b"content")
    monkeypatch.setattr(os, "unlink", _refused)
    for call in (here.adapter.delete, here.adapter.set_aside):
        (outcome,) = call([KEY], here.deadline)
        assert outcome.result is Result.FAILED
        assert here.exists(KEY) == [True]
    monkeypatch.undo()
    assert here.adapter.set_aside([KEY], here.deadline)[0].result is Result.DONE
    assert here.exists(KEY) == [False]


def test_a_temporary_file_that_could_not_be_removed_goes_with_the_next_one(
    disk: Callable[..., Disk], monkeypatch: pytest.MonkeyPatch
) -> None:
    here = disk()
    here.store(KEY, b"content")
    folder = Path(here.adapter.temporary.path)
    with monkeypatch.context() as patched:
        patched.setattr(os, "rename", _refused)
        patched.setattr(os, "unlink", _refused)
        assert here.store(KEY, b"other").result is Result.FAILED
        assert len(list(folder.iterdir())) == 2  # the lock, and what could not be removed
    with monkeypatch.context() as patched:
        patched.setattr(os, "rename", _refused)
        assert here.store(KEY, b"other").result is Result.FAILED
    assert [each.name for each in folder.iterdir()] == ["lock"]


def _refused(*arguments: object, **more: object) -> None:
    raise OSError(errno.EIO, "the medium refuses")


def test_a_directory_that_can_never_be_made_is_refused_by_its_name() -> None:
    with pytest.raises(FileNotFoundError, match="/proc/"):
        make_folder("/proc/tier/objects", sync=False)


def _socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as sock:
        here = os.open(path.parent, os.O_PATH)
        try:
            sock.bind(f"/proc/self/fd/{here}/{path.name}")  # its own path may be too long for an address
        finally:
            os.close(here)


def _device(path: Path) -> None:
    try:
        os.mknod(path, stat.S_IFCHR | 0o600, os.makedev(1, 5))  # /dev/zero
    except PermissionError:
        pytest.skip("only root makes devices")


THINGS: dict[str, Callable[[Path], object]] = {
    "fifo": os.mkfifo,
    "directory": Path.mkdir,
    "full directory": lambda path: (path / "a" / "b").mkdir(parents=True),
    "socket": _socket,
    "device": _device,
    "loop": lambda path: path.symlink_to(path.name),
    "link to nothing": lambda path: path.symlink_to("nowhere"),
    "link to a file": lambda path: path.symlink_to("/etc/hostname"),
}


@pytest.mark.parametrize("mode", ["buffered", "direct"])
@pytest.mark.parametrize("thing", THINGS)
def test_a_thing_in_place_of_a_file_is_one_bad_object_and_stays(disk: Any, thing: str, mode: str) -> None:
    one = disk(io_mode=mode)
    other = b"o" * 44
    one.store(KEY, b"content")
    one.store(other, b"well")
    (path,) = [each for each in one.files() if each.name == KEY.hex()]
    path.unlink()
    THINGS[thing](path)
    before = path.lstat()
    started = time.monotonic()
    outcome, _ = one.load(KEY, 7)
    assert outcome.result is Result.DAMAGED
    assert "where a file is expected" in outcome.error
    assert one.exists(KEY, other) == [False, True]
    assert one.adapter.delete([KEY], one.deadline)[0].result is Result.DONE
    assert one.adapter.set_aside([KEY], one.deadline)[0].result is Result.DONE
    assert [entry.key for entry in one.adapter.scan(None, one.deadline).entries] == [other]
    assert (path.lstat().st_ino, path.lstat().st_mode) == (before.st_ino, before.st_mode), "it is not ours"
    assert one.load(other, 4)[0].result is Result.DONE
    stored = one.store(KEY, b"content").result
    assert stored is (Result.FAILED if "directory" in thing else Result.DONE)
    assert time.monotonic() - started < WAIT_S, "nothing waits for its other end"


def test_a_file_in_place_of_a_shard_costs_only_what_was_in_it(disk: Any) -> None:
    one = disk()
    other = b"o" * 44
    one.store(KEY, b"content")
    one.store(other, b"well")
    (path,) = [each for each in one.files() if each.name == KEY.hex()]
    path.unlink()
    path.parent.rmdir()
    path.parent.write_bytes(b"not ours")
    assert one.exists(KEY, other) == [False, True]
    assert one.exists(KEY) == [False]
    assert one.load(KEY, 7)[0].result is Result.MISS
    assert one.load(other, 4)[0].result is Result.DONE
    assert one.adapter.delete([KEY], one.deadline)[0].result is Result.DONE
    assert one.adapter.set_aside([KEY], one.deadline)[0].result is Result.DONE
    assert [entry.key for entry in one.adapter.scan(None, one.deadline).entries] == [other]
    refused = one.store(KEY, b"content")
    assert (refused.result, str(path) in refused.error) == (Result.FAILED, True)
    assert path.parent.read_bytes() == b"not ours"


def test_a_file_in_place_of_all_shards_is_a_tier_in_trouble(disk: Any) -> None:
    one = disk()
    one.store(KEY, b"content")
    shutil.rmtree(one.path / "objects")
    (one.path / "objects").write_bytes(b"not ours")
    with pytest.raises(TierError, match="Not a directory"):
        one.exists(KEY)
    assert one.load(KEY, 7)[0].result is Result.FAILED


@pytest.mark.parametrize("name", ["medium", "leader"])
@pytest.mark.parametrize("thing", THINGS)
def test_a_thing_in_place_of_a_file_of_the_tier_itself_holds_nobody_up(disk: Any, thing: str, name: str) -> None:
    one = disk()
    one.store(KEY, b"content")
    one.adapter.try_to_lead()
    path = one.path / name
    path.unlink()
    THINGS[thing](path)
    started = time.monotonic()
    if name == "medium":
        with pytest.raises(TierError, match="medium cannot be read: it is"):
            one.load(KEY, 7)
    else:
        assert one.adapter.try_to_lead(), "where no lock can be had, nobody else has it"
        assert one.load(KEY, 7)[0].result is Result.DONE
    assert time.monotonic() - started < WAIT_S
