"""The benches are found by the command line, and the one of hooks runs as a user runs it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

from lmcache_bench.plugin import BENCHES
from lmcache_core.cli.main import ELSEWHERE


def run(tmp_path: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "lmcache_core.cli.main", "bench", *words]
    return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=True)


@pytest.mark.parametrize("name", BENCHES)
def test_every_bench_has_a_module_with_options_and_a_summary(name: str) -> None:
    module = import_module(f"lmcache_bench.{name.replace('-', '_')}")
    assert callable(module.add_options)
    assert callable(module.run)
    assert BENCHES[name]


def test_the_command_line_lists_them_and_asks_the_chosen_one_for_its_options(tmp_path: Path) -> None:
    listed = run(tmp_path, "--help").stdout
    assert all(name in listed for name in BENCHES)
    assert "--seconds" in run(tmp_path, "hooks", "--help").stdout


def test_core_knows_which_benches_come_with_this_package() -> None:
    assert {name for name, package in ELSEWHERE.items() if package == "lmcache-bench"} == {
        f"bench {each}" for each in BENCHES
    }


def test_the_hook_bench_ends_quickly_and_sets_hooks_beside_a_direct_method(tmp_path: Path) -> None:
    report = json.loads(run(tmp_path, "hooks", "--quick", "--json", "--seconds", "0.02").stdout)
    direct, *hooks = report["results"]
    assert direct["name"] == "direct method"
    assert len(hooks) == 6
    assert all(result["floor"] == direct["value"] and result["ratio"] > 1 for result in hooks)


def test_a_tier_that_lacks_a_setting_is_one_line_that_says_which(tmp_path: Path) -> None:
    """`acme` is installed as pip would: its adapter needs a bucket."""
    (tmp_path / "acme.py").write_text(
        "from lmcache_core import ComponentSpec, Kind, hookimpl\n"
        "from pydantic import BaseModel, ConfigDict\n"
        "class Settings(BaseModel):\n"
        "    model_config = ConfigDict(frozen=True, extra='forbid')\n"
        "    bucket: str\n"
        "@hookimpl\n"
        "def lmcache_components():\n"
        "    return [ComponentSpec(Kind.L2_ADAPTER, 'acme', 'acme:absent', 'acme:Settings')]\n"
        "absent = None\n"
    )
    info = tmp_path / "lmcache_acme-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: lmcache-acme\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[lmcache_core]\nacme = acme\n")
    command = [sys.executable, "-m", "lmcache_core.cli.main", "bench", "l2", "--quick", "--tier"]
    for words, said in (
        (["acme"], "bucket is missing: say --set bucket=VALUE"),
        (["acme", "--set", "bucket=b", "--set", "colour=red"], "colour: Extra inputs are not permitted"),
    ):
        done = subprocess.run(
            [*command, *words],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(tmp_path)},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 2
        assert said in done.stderr
        assert len(done.stderr.splitlines()) == 1
