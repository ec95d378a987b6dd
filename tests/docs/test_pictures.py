"""The README's pictures show what the figures beside them say, and those say that everything held."""

from __future__ import annotations

import importlib.util
import json
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
_SPEC = importlib.util.spec_from_file_location("pictures", ROOT / "tools/pictures.py")
assert _SPEC is not None
assert _SPEC.loader is not None
tool: Any = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(tool)
BENCHMARKS = (ROOT / "docs/benchmarks.md").read_text()
SHOWN = re.findall(r"!\[[^\]]*\]\((?:docs/)?pictures/([^)]+)\)", (ROOT / "README.md").read_text() + BENCHMARKS)


def test_the_readme_and_the_benchmarks_show_every_picture() -> None:
    assert sorted(SHOWN) == sorted(tool.drawn())


def test_the_gains_in_the_picture_are_those_that_the_page_explains() -> None:
    front, _, explained = BENCHMARKS.partition("## How to read")
    for row in json.loads((tool.HOME / "gains.json").read_text()):
        for figure in (f"{row['with']:g} {row['unit']}", f"{row['without']:g} {row['unit']}"):
            assert figure in front
            assert figure in explained


@pytest.mark.parametrize("name", SHOWN)
def test_a_picture_shows_what_its_figures_say(name: str) -> None:
    drawn = tool.drawn()[name]
    assert (tool.HOME / name).read_text() == drawn, "python tools/pictures.py draws it again"
    root = ElementTree.fromstring(drawn)
    assert not [each for each in root.iter() if "href" in "".join(each.attrib)], "nothing is fetched"


@pytest.mark.parametrize("name", SHOWN)
def test_the_text_of_a_picture_can_be_read(name: str) -> None:
    """In a window of 1,280 px the site's text, and so a picture, is at most 688 px wide."""
    drawn = tool.drawn()[name]
    size = re.search(r'viewBox="0 0 (\d+)|<svg [^>]*width="(\d+)"', drawn)
    assert size is not None
    smallest = min(int(each) for each in re.findall(r"font(?:-size)?[:=] ?\"?(\d+)", drawn))
    assert smallest * min(1, 688 / int(size[1] or size[2])) >= 12


def test_the_demo_in_the_picture_held() -> None:
    found = json.loads((tool.HOME / "demo.json").read_text())
    assert found["ok"]
    assert found["model"] == "smollm2"
    text = "".join(ElementTree.fromstring((tool.HOME / "demo.svg").read_text()).itertext())
    for row in found["rows"][:4]:  # of the fifth nothing was answered
        assert row["run"] in text
        assert f"{row['tokens_reused']} of {row['tokens_prompt']}" in text


def test_the_badges_count_what_ran() -> None:
    figures = {
        "date": "2026-01-01",
        "tests": {"passed": 1234, "failed": 2, "skipped": 0},
        "coverage": {"percent": 71},
        "kit": [{"subject": "fs", "held": 70, "broken": 1}],
    }
    drawn = tool.badges(figures)
    assert "1,234 passed, 2 failed" in drawn["tests.svg"]
    assert "71 %" in drawn["coverage.svg"]
    assert "70 claims hold, 1 broken" in drawn["kit.svg"]
    assert all(tool.RED in picture for picture in drawn.values())


def test_the_figures_of_the_badges_are_those_of_the_runs(tmp_path: Path) -> None:
    (tmp_path / "r.xml").write_text(
        '<testsuites><testsuite tests="9" skipped="2" failures="1" errors="0"/></testsuites>'
    )
    (tmp_path / "c.json").write_text('{"totals": {"percent_covered": 93.9}}')
    claims = [{"verdict": verdict} for verdict in ("held", "held", "not judged", "FAILED")]
    (tmp_path / "lmcache-fs.json").write_text(json.dumps({"claims": claims}))
    figures = tool.badge_figures(tmp_path / "r.xml", tmp_path / "c.json", [tmp_path / "lmcache-fs.json"])
    assert figures["tests"] == {"passed": 6, "failed": 1, "skipped": 2}
    assert figures["coverage"] == {"percent": 93}
    assert figures["kit"] == [{"subject": "fs", "held": 2, "broken": 1}]
