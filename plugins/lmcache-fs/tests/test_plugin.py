"""The package as a plugin: settings, entry point, check."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from importlib.metadata import entry_points
from pathlib import Path

import pytest
from pydantic import ValidationError

from lmcache_core.errors import TierError
from lmcache_core.plugins.components import Finding
from lmcache_core.tiers.contract import AdapterContext
from lmcache_fs.adapter import FsAdapter
from lmcache_fs.check import mount_expected
from lmcache_fs.settings import FsSettings


def test_the_entry_point_names_the_plugin_and_loads_nothing_heavy() -> None:
    (entry,) = entry_points(group="lmcache_core", name="fs")
    assert entry.value == "lmcache_fs"
    heavy = "('pydantic', 'torch', 'zmq', 'lmcache_fs.adapter')"
    probe = f"import sys, lmcache_fs; print([m for m in {heavy} if m in sys.modules])"
    out = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True).stdout
    assert out.strip() == "[]"


def test_settings_refuse_what_they_do_not_know(tmp_path: Path) -> None:
    with pytest.raises(ValidationError, match="fsink"):
        FsSettings(path=tmp_path, fsink=True)  # type: ignore[call-arg]
    with pytest.raises(ValidationError, match="absolute"):
        FsSettings(path=Path("cache"))
    with pytest.raises(ValidationError, match="frozen"):
        FsSettings(path=tmp_path).fsync = True


def checked(settings: FsSettings) -> list[Finding]:
    with FsAdapter(settings, AdapterContext(tier="ssd")) as adapter:
        return list(adapter.check(time.monotonic() + 60))


def test_check_says_what_is_well_and_what_to_do(tmp_path: Path) -> None:
    good = checked(FsSettings(path=tmp_path / "tier"))
    assert [finding.ok for finding in good][:1] == [True]
    assert any("GiB are free" in finding.message for finding in good)
    (tmp_path / "file").write_text("")
    with pytest.raises(TierError) as raised:
        checked(FsSettings(path=tmp_path / "file"))
    assert raised.value.cure == f"make {tmp_path / 'file'} a directory that user {os.getuid()} may read and write"


def everything_below(folder: Path) -> set[Path]:
    return set(folder.rglob("*"))


def but_the_room(findings: list[Finding]) -> list[Finding]:
    """Without what depends on how full the disk of this machine is."""
    return [finding for finding in findings if not finding.message.endswith("GiB are free")]


def test_check_leaves_nothing_behind(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    before = everything_below(tmp_path)
    for path in (tmp_path / "there", tmp_path / "missing", tmp_path / "a" / "typo" / "cache"):
        findings = checked(FsSettings(path=path))
        assert all(finding.ok for finding in but_the_room(findings))
        assert everything_below(tmp_path) == before


def test_check_has_a_look_where_the_path_may_be_misspelt(tmp_path: Path) -> None:
    good = checked(FsSettings(path=tmp_path / "cache"))
    assert [finding.cure for finding in but_the_room(good)] == [""]
    odd = checked(FsSettings(path=tmp_path / "typo" / "cache"))
    (look,) = [finding for finding in but_the_room(odd) if finding.cure]
    assert look.ok
    assert look.message == f"{tmp_path}/typo does not exist: a server makes it, below {tmp_path}"
    assert look.cure == "correct l2.ssd.path if it is misspelt"


def test_check_has_a_look_where_a_disk_is_to_be_mounted(tmp_path: Path) -> None:
    (look,) = checked(FsSettings(path=tmp_path / "cache", mount_point=tmp_path))
    assert (look.ok, look.message) == (True, f"nothing is mounted at {tmp_path}: the tier waits for it")
    assert "l2.ssd.mount_point" in look.cure
    (tmp_path / "fstab").write_text(f"# disks\nUUID=1 / ext4\nUUID=2 {tmp_path}/nvme xfs\nUUID=3 none swap\n")
    for path, expected in (
        (tmp_path / "nvme" / "cache", f"{tmp_path}/nvme"),
        (tmp_path / "other", ""),
        (Path("/mnt/fast/cache"), "/mnt/fast"),
        (Path("/srv/cache"), ""),
    ):
        assert mount_expected(path, Path("/"), tmp_path / "fstab") == expected
    assert mount_expected(tmp_path / "nvme", Path("/proc"), tmp_path / "fstab") == "", "a file system of its own"
