"""`lmcache-core bench blend`, reduced: its records, and those that say that nothing was measured."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from lmcache_bench.blend import MOVE_TARGET, PLAN_TARGET, _Chained


def test_the_parts_that_need_no_large_pool_stand_beside_their_floors(tmp_path: Path) -> None:
    pytest.importorskip("lmcache_blend._native", reason="built without C")
    command = [sys.executable, "-m", "lmcache_core.cli.main", "bench", "blend", "--quick", "--json", "--parts"]
    done = subprocess.run(
        [*command, "move", "cut", "plan"], cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    records = {each["name"]: each for each in json.loads(done.stdout)["results"]}
    moved = [each for name, each in records.items() if name.startswith("a chunk out, ")]
    assert len(moved) == 6
    assert all(each["target"] == MOVE_TARGET and each["floor"] > 0 for each in moved)
    planned = records["prompt reused, planned (floor: the best of all orders)"]
    assert planned["ratio"] >= PLAN_TARGET
    assert planned["value"] > records["prompt reused, documents as they come"]["value"]


def test_the_chained_scheme_stores_a_content_again_behind_other_text() -> None:
    chained = _Chained(3)
    a, b, c = ((name, 10) for name in (b"a", b"b", b"c"))
    assert chained.query([a, b]) == 0
    assert chained.query([b, a]) == 20
    assert chained.stored == 4
    assert chained.query([c]) == 0
    assert chained.query([a, b]) == 20  # the last copies of both: that of `b`, and that behind it
    assert chained.stored == 7
