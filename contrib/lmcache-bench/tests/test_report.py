"""`bench all`: rounds of real benches become figures with their spread, and a page that stands by itself."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from lmcache_bench.all import figures_of
from lmcache_bench.report import picture, write_report


def result(name: str, value: float, floor: float | None = None, **more: Any) -> dict[str, Any]:
    return {
        "name": name, "value": value, "unit": "us", "floor": floor, "ratio": value / floor if floor else None,
        "target": None, "met": None, "doubt": "", **more,
    }  # fmt: skip


def test_a_figure_is_the_median_of_its_rounds_and_says_how_far_they_lay_apart() -> None:
    rounds = [[result("a", 10, 5), result("b", 7)], [result("a", 30, 10)], [result("a", 11, 5), result("b", 9)]]
    first, second = figures_of("rpc", rounds)
    assert (first.value, first.floor, first.ratio, first.spread, first.rounds) == (11, 5, 2.2, (2.0, 3.0), 3)
    assert (second.value, second.floor, second.ratio, second.spread, second.rounds) == (8, None, None, (7, 9), 2)


def test_a_target_is_met_where_most_rounds_met_it() -> None:
    rounds = [[result("a", 1, 1, target=1.1, met=met)] for met in (True, False, True)]
    (figure,) = figures_of("copy", rounds)
    assert figure.met is True


def test_the_page_asks_nobody_for_anything_and_shows_what_would_not_run(tmp_path: Path) -> None:
    rounds = [[result("a <b> & c", 10, 5, target=1.5, met=False), result("no floor", 3)]]
    write_report(tmp_path, figures_of("rpc", rounds), {"l2": "no <disk>"}, {"cpu": "a & b", "cores": 2}, quick=True)
    page = (tmp_path / "index.html").read_text()
    assert not re.search(r"(src|href)=", page), "nothing is fetched"
    assert "a &lt;b&gt; &amp; c" in page
    assert "no &lt;disk&gt;" in page
    assert "<tr class=missed>" in page
    told = (tmp_path / "report.md").read_text()
    assert "![rpc: ours beside its floor or peer](rpc.svg)" in told
    assert "- l2: no <disk>" in told
    assert len(json.loads((tmp_path / "figures.json").read_text())["figures"]) == 2


def test_a_picture_has_a_dot_where_the_ratio_is() -> None:
    figures = figures_of("rpc", [[result("even", 5, 5), result("twice", 10, 5), result("half", 5, 10)]])
    tree = ElementTree.fromstring(picture("rpc", figures))
    space = {"s": "http://www.w3.org/2000/svg"}
    even, twice, half = (float(dot.attrib["cx"]) for dot in tree.findall("s:circle", space))
    floor = float(tree.findall("s:line", space)[0].attrib["x1"])
    assert even == floor
    assert twice - floor == pytest.approx(floor - half, abs=0.2), "a scale of logarithms"
    assert twice > floor


def test_benches_run_in_processes_of_their_own_and_one_that_cannot_is_named(tmp_path: Path) -> None:
    command = [
        sys.executable, "-m", "lmcache_core.cli.main", "bench", "all", "--quick", "--rounds", "1", "--json",
        "--report", str(tmp_path / "out"), "--benches", "hooks", "nothing_like_this",
    ]  # fmt: skip
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=True)
    names = [each["name"] for each in json.loads(done.stdout)["results"]]
    assert names
    assert all(name.startswith("hooks: ") for name in names)
    assert "nothing_like_this" in (tmp_path / "out/report.md").read_text()
    assert (tmp_path / "out/index.html").exists()
