"""Which medium is at the directory: a disk that is not mounted, another one in its place, one without inodes."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lmcache_core.errors import TierError
from lmcache_core.tiers.contract import AdapterContext, Result
from lmcache_fs.adapter import FsAdapter
from lmcache_fs.settings import FsSettings
from lmcache_fs.transport.place import Place

from .conftest import Disk

PAYLOAD = bytes(range(256)) * 16


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[Callable[..., None]]:
    """Mounts a small file system of its own at a directory."""
    if os.geteuid() != 0 or shutil.which("mount") is None:
        pytest.skip("mounting takes root")
    mounted: list[Path] = []

    def make(at: Path, options: str = "size=16m") -> None:
        at.mkdir(exist_ok=True)
        done = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(at)], capture_output=True)
        if done.returncode:
            pytest.skip(f"cannot mount: {done.stderr!r}")
        mounted.append(at)

    yield make
    for at in mounted:
        subprocess.run(["umount", "-l", str(at)], capture_output=True)


def unmount(at: Path) -> None:
    subprocess.run(["umount", "-l", str(at)], check=True)


def test_little_space_is_worth_a_look_and_no_failure(mount: Callable[..., None], tmp_path: Path) -> None:
    at = tmp_path / "disk"
    mount(at, "size=64m")
    (at / "others").write_bytes(bytes(61 << 20))
    with FsAdapter(FsSettings(path=at / "tier"), AdapterContext(tier="ssd")) as adapter:
        (space,) = [each for each in adapter.check(time.monotonic() + 60) if each.message.endswith("GiB are free")]
    assert space.ok
    assert space.cure == "free some space, or move l2.ssd.path"


@pytest.mark.parametrize("below", ["", "cache"])
def test_nothing_is_written_to_the_disk_below_one_that_is_not_mounted(
    disk: Callable[..., Disk], mount: Callable[..., None], tmp_path: Path, below: str
) -> None:
    at = tmp_path / "disk"
    mount(at)
    tier = disk(at / below)
    assert tier.store(b"k", PAYLOAD).result is Result.DONE
    unmount(at)
    for call in (lambda: tier.store(b"j", PAYLOAD), lambda: tier.exists(b"k"), lambda: tier.load(b"k", len(PAYLOAD)),
                 lambda: tier.adapter.delete([b"k"], tier.deadline), lambda: tier.adapter.scan(None, tier.deadline),
                 tier.adapter.try_to_lead):  # fmt: skip
        with pytest.raises(TierError, match="mount that again, or restart"):
            call()
    assert list(at.iterdir()) == []


def test_a_server_that_starts_before_its_disk_is_mounted_waits_for_it(
    disk: Callable[..., Disk], mount: Callable[..., None], tmp_path: Path
) -> None:
    at = tmp_path / "disk"
    at.mkdir()
    tier = disk(at / "cache", mount_point=at)
    for call in (lambda: tier.store(b"j", PAYLOAD), tier.adapter.try_to_lead, lambda: tier.adapter.scan(None, 1e9)):
        with pytest.raises(TierError, match="nothing is mounted at"):
            call()
    assert list(at.iterdir()) == []
    mount(at)
    assert tier.store(b"j", PAYLOAD).result is Result.DONE


def test_the_same_disk_is_used_again_once_it_is_mounted(disk: Callable[..., Disk], tmp_path: Path) -> None:
    tier = disk(tmp_path / "tier")
    tier.store(b"k", PAYLOAD)
    (tmp_path / "tier").rename(tmp_path / "away")
    (tmp_path / "tier").mkdir()
    (tmp_path / "tier/medium").write_text("0" * 32)  # another one
    with pytest.raises(TierError, match="another medium"):
        tier.store(b"j", PAYLOAD)
    shutil.rmtree(tmp_path / "tier")
    (tmp_path / "away").rename(tmp_path / "tier")
    assert tier.exists(b"k", b"j") == [True, False]
    assert tier.store(b"j", PAYLOAD).result is Result.DONE


def test_another_disk_in_its_place_is_noticed_before_the_next_store(
    disk: Callable[..., Disk], mount: Callable[..., None], tmp_path: Path
) -> None:
    at, other = tmp_path / "disk", tmp_path / "other"
    for each in (at, other):
        mount(each)
        disk(each).store(b"k", PAYLOAD)
    tier = disk(at)
    tier.store(b"k", PAYLOAD)
    unmount(at)
    subprocess.run(["mount", "--bind", str(other), str(at)], check=True)
    before = sorted(other.rglob("*"))
    try:
        with pytest.raises(TierError, match="another medium"):
            tier.store(b"j", PAYLOAD)
        assert sorted(other.rglob("*")) == before
    finally:
        unmount(at)


def test_servers_on_one_directory_agree_on_its_id(disk: Callable[..., Disk]) -> None:
    one, two = disk(), disk()
    one.store(b"k", PAYLOAD)
    two.store(b"j", PAYLOAD)
    assert one.exists(b"k", b"j") == two.exists(b"k", b"j") == [True, True]


def test_a_full_disk_takes_no_marker_and_keeps_no_half_of_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(handle: int, content: bytes) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    place = Place(str(tmp_path), None, "disk", lambda: None)
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        place.mark()
    assert list(tmp_path.iterdir()) == []
    place.mark()
    assert [path.name for path in tmp_path.iterdir()] == ["medium"]


def test_a_directory_that_somebody_emptied_is_counted_anew_and_used(disk: Callable[..., Disk]) -> None:
    tier = disk()
    tier.store(b"k", PAYLOAD)
    shutil.rmtree(tier.path)
    assert tier.exists(b"k") == [False]
    assert tier.adapter._recount.take()
    assert tier.store(b"j", PAYLOAD).result is Result.DONE
    assert (tier.path / "medium").exists()


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("first", [0, 1])
def test_a_directory_that_somebody_emptied_stays_that_of_all_its_servers(
    disk: Callable[..., Disk], whole: bool, first: int
) -> None:
    tiers = [disk(), disk()]
    for number, tier in enumerate(tiers):
        tier.store(b"before %d" % number, PAYLOAD)
        tier.adapter._recount.take()
    root = tiers[0].path
    before = (root / "medium").read_text()
    if whole:
        shutil.rmtree(root)
    else:
        for path in list(root.iterdir()):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    for number, tier in enumerate(tiers[first:] + tiers[:first]):
        assert tier.store(b"after %d" % number, PAYLOAD).result is Result.DONE
        assert tier.exists(b"before 0", b"before 1") == [False, False]
        assert tier.adapter._recount.take(), "each server counts anew what is there"
    assert (root / "medium").read_text() == before
    assert [tier.exists(b"after 0", b"after 1") for tier in tiers] == [[True, True]] * 2


def test_another_file_system_does_not_get_the_id_of_a_directory_that_was_emptied(
    disk: Callable[..., Disk], mount: Callable[..., None], tmp_path: Path
) -> None:
    at = tmp_path / "disk"
    tier = disk(at)
    tier.store(b"k", PAYLOAD)
    before = (at / "medium").read_text()
    for path in list(at.iterdir()):
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    assert tier.exists(b"k") == [False]
    mount(at)
    assert tier.store(b"k", PAYLOAD).result is Result.DONE
    assert (at / "medium").read_text() != before


def test_bytes_and_quotas_are_told_apart_with_the_place_where_they_ran_out(
    disk: Callable[..., Disk], mount: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mount(tmp_path / "disk", "size=1m")
    tier = disk(tmp_path / "disk/cache")
    outcome = tier.store(b"k", bytes(2 << 20))
    assert outcome.result is Result.FULL
    assert f"No space left on device ({tmp_path / 'disk/cache'}): free some space on the medium" in outcome.error
    assert tier.store(b"k", PAYLOAD).result is Result.DONE

    def quota(*arguments: object) -> int:
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    with monkeypatch.context() as patch:
        for name in ("write", "writev", "pwrite", "pwritev"):
            patch.setattr(os, name, quota)
        outcome = tier.store(b"j", PAYLOAD)
    assert outcome.result is Result.FULL
    assert "a quota of bytes or of files" in outcome.error
    assert "raise the quota" in outcome.error


def test_folders_without_objects_return_their_inodes(
    disk: Callable[..., Disk], mount: Callable[..., None], tmp_path: Path
) -> None:
    mount(tmp_path / "disk", "size=16m,nr_inodes=200")
    tier = disk(tmp_path / "disk")
    stored = []
    for number in range(400):
        outcome = tier.store(b"%d" % number, b"x")
        if outcome.result is Result.FULL:
            break
        stored.append(b"%d" % number)
    assert outcome.result is Result.FULL
    assert "inodes" in outcome.error
    tier.adapter.delete(stored[:20], tier.deadline)
    again = [tier.store(b"again %d" % number, b"x").result for number in range(15)]
    assert again == [Result.DONE] * 15, "a file needs a folder, too"


def test_one_file_that_cannot_be_looked_at_is_one_file(
    disk: Callable[..., Disk], monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = disk()
    keys = [b"%d" % number for number in range(4)]
    for key in keys:
        tier.store(key, PAYLOAD)
    bad = str(next(path for path in tier.files() if path.name == keys[1].hex()))
    stat, open_ = os.stat, os.open

    def failing(call: Callable[..., object]) -> Callable[..., object]:
        def called(path: Path, *rest: object, **more: object) -> object:
            if path == bad:
                raise OSError(117, "Structure needs cleaning", bad)
            return call(path, *rest, **more)

        return called

    monkeypatch.setattr(os, "stat", failing(stat))
    monkeypatch.setattr(os, "open", failing(open_))
    assert tier.exists(*keys) == [True] * 4
    assert [tier.load(key, len(PAYLOAD))[0].result for key in keys] == [
        Result.DONE, Result.DAMAGED, Result.DONE, Result.DONE,
    ]  # fmt: skip


def test_a_stranger_who_locks_every_file_holds_up_no_store(disk: Callable[..., Disk], tmp_path: Path) -> None:
    assert disk(tmp_path).store(b"k", PAYLOAD).result is Result.DONE
    with contextlib.ExitStack() as stack:
        for path in tmp_path.rglob("*"):
            file = os.open(path, os.O_RDONLY)
            stack.callback(os.close, file)
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        assert disk(tmp_path).store(b"l", PAYLOAD).result is Result.DONE


@pytest.mark.parametrize("error", [errno.EACCES, errno.EIO, errno.ESTALE])
def test_a_marker_that_cannot_be_read_is_replaced_by_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: int
) -> None:
    """It may be another user's, or lie on a bad sector."""
    Place(str(tmp_path), None, "first", lambda: None).mark()
    marker, before = tmp_path / "medium", (tmp_path / "medium").read_bytes()
    real = os.open

    def refused(path: object, *args: object, **given: object) -> object:
        if str(path) == str(marker):
            raise OSError(error, os.strerror(error))
        return real(path, *args, **given)

    with monkeypatch.context() as patched:
        patched.setattr(os, "open", refused)
        second = Place(str(tmp_path), None, "second", lambda: None)
        with pytest.raises(TierError, match="medium cannot be read") as raised:
            second.mark()
        assert raised.value.retryable == (error != errno.EACCES)
    assert marker.read_bytes() == before
    assert [each.name for each in tmp_path.iterdir()] == ["medium"]
