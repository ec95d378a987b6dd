"""`bench lookup`, reduced: what it records with the C extension and without."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lmcache_bench.lookup import TARGET_OF_DICT, TARGET_OF_LOOP, TARGET_US
from lmcache_core.native import native


def results(mode: str, tmp_path: Path) -> dict[str, dict[str, Any]]:
    command = ["-m", "lmcache_core.cli.main", "bench", "lookup", "--quick", "--json", "--entries", "65536"]
    env = os.environ | {"LMCACHE_CORE_NATIVE": mode}
    done = subprocess.run(
        [sys.executable, *command], env=env, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return {each["name"]: each for each in json.loads(done.stdout)["results"]}


@pytest.mark.skipif(native is None, reason="the C extension is not there")
def test_a_call_stands_beside_a_dict_and_the_loop_in_c_with_its_targets(tmp_path: Path) -> None:
    records = results("require", tmp_path)
    assert records["512 hits, one call"]["target"] == TARGET_US
    assert records["512 hits, one call"]["unit"] == "us"
    assert records["512 hits, one call: against a dict"]["target"] == TARGET_OF_DICT
    large = records["512 hits of 65,536 entries, one call"]
    assert (large["target"], large["floor"] > 0) == (TARGET_OF_LOOP, True)
    assert records["client.lookup of 512 keys by the index"]["floor"] > 0


def test_without_the_extension_there_are_a_dict_and_the_call_alone(tmp_path: Path) -> None:
    records = results("off", tmp_path)
    assert {each["target"] for each in records.values()} == {None}
    assert len(records) == 2
    assert records["client.lookup of 512 keys by a call"]["value"] > 0
