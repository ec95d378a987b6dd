"""The example runs as its reader runs it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

EXAMPLE = Path(__file__).parents[3] / "examples" / "blend_documents.py"


def test_the_example_finds_all_of_both_documents_in_a_new_order(tmp_path: Path) -> None:
    ran = subprocess.run([sys.executable, str(EXAMPLE)], cwd=tmp_path, capture_output=True, text=True, timeout=110)
    assert ran.returncode == 0, ran.stderr[-2000:]
    assert "in a new order 1600 of 1721 tokens found" in ran.stdout
    assert "planned order (1, 0)" in ran.stdout
