"""The whole demo, on models small enough for a test."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("lmcache_fs")
SMALL = ["--tokens", "1000", "--layers", "2", "--kv-heads", "1", "--answer-tokens", "8"]


def demo(*argv: str, folder: Path, **changes: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "lmcache_core.cli.main", "demo", *argv],
        env=os.environ | {"TMPDIR": str(folder)} | changes,
        capture_output=True,
        text=True,
        timeout=600,
    )


@pytest.mark.slow
@pytest.mark.parametrize("model", ["random", "none"])
def test_the_demo_holds_and_leaves_nothing_behind(model: str, tmp_path: Path) -> None:
    for name in {"random": ("torch", "transformers"), "none": ("numpy",)}[model]:
        pytest.importorskip(name)
    done = demo("--json", "--model", model, *SMALL, folder=tmp_path)
    found = json.loads(done.stdout)
    assert done.returncode == 0, found
    assert found["model"] == model
    assert found["ok"] is True
    assert [row["step"] for row in found["rows"]] == [1, 2, 3, 4, 5]
    assert [row["tokens_reused"] for row in found["rows"]] == [0, 768, 1024, 1024, 0]
    assert [row["source"] for row in found["rows"]] == ["computed", "pool", "disk", "disk", "nowhere"]
    assert [row["equal"] for row in found["rows"]] == [True, True, True, True, None]
    assert all(row["bytes_moved"] > 0 for row in found["rows"])
    assert all(check["held"] for check in found["checks"])
    assert list(tmp_path.iterdir()) == []


def test_without_a_model_no_torch_is_imported_and_progress_is_shown(tmp_path: Path) -> None:
    pytest.importorskip("numpy")
    guard = tmp_path / "guard"
    for name in ("torch", "transformers"):  # whoever imports them here, in any of the demo's processes, fails
        (guard / name).mkdir(parents=True)
        (guard / name / "__init__.py").write_text("raise AssertionError(f'{__name__} was imported')\n")
    folder = tmp_path / "tmp"
    folder.mkdir()
    done = demo("--model", "none", *SMALL, folder=folder, PYTHONPATH=str(guard))
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith("ok: yes\n")
    steps = [line for line in done.stderr.splitlines() if line.startswith("demo [")]
    assert [line[6:14] for line in steps] == [f"{number:2} of {len(steps)}" for number in range(1, len(steps) + 1)]
