"""The whole demo, on a model small enough for a test."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("lmcache_fs")


@pytest.mark.slow
def test_the_demo_holds_and_leaves_nothing_behind(tmp_path: Path) -> None:
    small = ["--tokens", "1000", "--layers", "2", "--kv-heads", "1", "--answer-tokens", "8"]
    done = subprocess.run(
        [sys.executable, "-m", "lmcache_core.cli.main", "demo", "--json", *small],
        env=os.environ | {"TMPDIR": str(tmp_path)},
        stdout=subprocess.PIPE,
        text=True,
        timeout=600,
    )
    found = json.loads(done.stdout)
    assert done.returncode == 0, found
    assert found["ok"] is True
    assert [row["step"] for row in found["rows"]] == [1, 2, 3, 4, 5]
    assert [row["tokens_reused"] for row in found["rows"]] == [0, 768, 1024, 1024, 0]
    assert [row["source"] for row in found["rows"]] == ["computed", "pool", "disk", "disk", "nowhere"]
    assert [row["equal"] for row in found["rows"]] == [True, True, True, True, None]
    assert all(row["bytes_moved"] > 0 for row in found["rows"])
    assert all(check["held"] for check in found["checks"])
    assert list(tmp_path.iterdir()) == []
