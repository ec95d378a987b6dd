"""Foreign files in the directory, and what must be on the medium when a store has been answered."""

from __future__ import annotations

import errno
import os
import shutil
import stat
import threading
from pathlib import Path
from typing import Any

import pytest

from lmcache_core.tiers.contract import Result
from lmcache_fs.client import make_folder
from lmcache_fs.transport.temporary import TemporaryFolder, sweep

KEY = b"k" * 44


def test_temporary_folders_without_a_lock_are_swept(disk: Any, tmp_path: Path) -> None:
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


def test_fsync_reaches_the_directory_of_a_new_shard(disk: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_what_lies_in_the_wrong_place_is_not_counted(disk: Any) -> None:
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


def test_the_directory_and_all_in_it_is_its_owners_alone(disk: Any, tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        here = disk(tmp_path / "tier")
        here.store(KEY, b"content")
        (file,) = here.files()
        file.write_bytes(b"short")
        here.load(KEY, 100)
    finally:
        os.umask(before)
    folders = [here.path, *(each for each in here.path.rglob("*") if each.is_dir())]
    assert {"tmp", "objects", "damaged"} <= {each.name for each in folders}
    for folder in folders:
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700, folder


def test_what_cannot_be_removed_is_not_said_to_be_gone(disk: Any, monkeypatch: pytest.MonkeyPatch) -> None:
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
    disk: Any, monkeypatch: pytest.MonkeyPatch
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


def _refused(*arguments: Any, **more: Any) -> None:
    raise OSError(errno.EIO, "the medium refuses")


def test_a_directory_that_can_never_be_made_is_refused_by_its_name() -> None:
    with pytest.raises(FileNotFoundError, match="/proc/"):
        make_folder("/proc/tier/objects", sync=False)
