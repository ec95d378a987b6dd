"""`lmcache-core bench transfer`, reduced to one size: its records, each beside a bare copy or the engine's own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

TIMEOUT_S = 300  # a safety net


def test_both_ways_stand_beside_a_bare_copy_and_the_engine_itself(tmp_path: Path) -> None:
    pytest.importorskip("lmcache_copier")
    command = [sys.executable, "-m", "lmcache_core.cli.main", "bench", "transfer", "--quick", "--json"]
    command += ["--sizes", "64 KiB", "--no-bystanders"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    records = {each["name"]: each for each in json.loads(done.stdout)["results"]}
    calls = [f"{what}, pages of 64 KiB" for what in ("store", "retrieve")]
    assert set(records) == {
        f"{call}, {figure}" for call in calls for figure in ("by the engine", "by the server", "CPU of the engine")
    }
    assert all(record["value"] > 0 and record["floor"] > 0 for record in records.values())
    assert {name: each["target"] for name, each in records.items() if each["target"] is not None} == {
        f"{call}, {figure}": target
        for call in calls
        for figure, target in (("by the server", 0.9), ("CPU of the engine", 0.05))
    }
