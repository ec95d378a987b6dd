"""What several tests of a node need."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def unwell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Servers that are started now find a package installed whose components misbehave."""
    site = tmp_path / "site"
    info = site / "unwell_plugin-1.0.dist-info"
    info.mkdir(parents=True)
    (site / "unwell_plugin.py").symlink_to(Path(__file__).with_name("unwell_plugin.py"))
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: unwell-plugin\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[lmcache_core]\nunwell = unwell_plugin\n")
    monkeypatch.setenv("PYTHONPATH", str(site))
