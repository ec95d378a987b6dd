"""The package as a plugin: settings, entry point, check."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest
from pydantic import ValidationError

from lmcache_fs.check import check_tier
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


def test_check_says_what_is_well_and_what_to_do(tmp_path: Path) -> None:
    good = check_tier("ssd", FsSettings(path=tmp_path / "tier"))
    assert [finding.ok for finding in good][:1] == [True]
    assert any("GiB are free" in finding.message for finding in good)
    (tmp_path / "file").write_text("")
    (bad,) = check_tier("ssd", FsSettings(path=tmp_path / "file"))
    assert not bad.ok
    assert bad.cure
    assert not list((tmp_path / "tier" / "objects").rglob("*/*")), "the probe is deleted again"
