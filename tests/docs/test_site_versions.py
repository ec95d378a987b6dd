"""The site's list of versions."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

TOOL = Path(__file__).parents[2] / "tools/site.py"


def test_the_newest_release_is_the_latest_version_and_other_folders_are_none(tmp_path: Path) -> None:
    found = importlib.util.spec_from_file_location("site_tool", TOOL)
    assert found is not None
    assert found.loader is not None
    tool = importlib.util.module_from_spec(found)
    found.loader.exec_module(tool)
    site, into = tmp_path / "site", tmp_path / "versions"
    site.mkdir()
    (site / "index.html").write_text("pages")
    (into / ".git").mkdir(parents=True)
    (into / "assets").mkdir()
    for version in ("0.9.0", "0.10.0", "0.10.0rc1", "0.2.0"):
        tool.publish(site, into, version)
    told = json.loads((into / "versions.json").read_text())
    assert [each["version"] for each in told] == ["0.10.0", "0.10.0rc1", "0.9.0", "0.2.0"]
    assert [each["aliases"] for each in told] == [["latest"], [], [], []]
    assert "0.10.0/" in (into / "index.html").read_text()
