"""The soak itself works: a few seconds of it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("lmcache_mock")
pytest.importorskip("lmcache_fs")


def test_a_few_seconds_of_the_soak_read_right_bytes_and_leave_nothing() -> None:
    command = [sys.executable, str(Path(__file__).parent / "run.py"), "--seconds", "6", "--seed", "5"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=280)
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)
    assert figures["read"] > 0
    assert figures["looked_for_damage"] > 0
    assert figures["workers_killed"] + figures.get("server_restarts", 0) > 0
