"""`bench hash`, reduced: what it records with the C extension and without."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lmcache_bench.hash import TARGET_FASTER, TARGET_RATIO, TARGET_RATIO_LIST
from lmcache_core.native import native


def results(mode: str, tmp_path: Path) -> dict[str, dict[str, Any]]:
    command = ["-m", "lmcache_core.cli.main", "bench", "hash", "--quick", "--json", "--tokens", "2048"]
    env = os.environ | {"LMCACHE_CORE_NATIVE": mode}
    done = subprocess.run(
        [sys.executable, *command], env=env, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return {each["name"]: each for each in json.loads(done.stdout)["results"]}


@pytest.mark.skipif(native is None, reason="the C extension is not there")
def test_every_holder_stands_beside_the_bare_loop_with_its_target(tmp_path: Path) -> None:
    records = results("require", tmp_path)
    large = "2,048 tokens in chunks of 256"
    assert records[f"{large}: list"]["target"] == TARGET_RATIO_LIST
    for name in ("array of uint32", "array of int64", "numpy int32"):
        if f"{large}: {name}" in records or not name.startswith("numpy"):
            assert records[f"{large}: {name}"]["target"] == TARGET_RATIO
            assert records[f"{large}: {name}"]["ratio"] > 0.5  # nothing is quicker than its own loop
    small = "2,048 tokens in chunks of 16"
    assert records[f"{small}: list, times as fast as hashlib"]["target"] == TARGET_FASTER
    assert records[f"{small}: hashlib from Python"]["floor"] > 0


def test_without_the_extension_there_are_times_and_no_targets(tmp_path: Path) -> None:
    records = results("off", tmp_path)
    assert {each["target"] for each in records.values()} == {None}
    assert records["2,048 tokens in chunks of 16: list"]["value"] > 0
