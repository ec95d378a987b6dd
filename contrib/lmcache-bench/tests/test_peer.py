"""The peer bench: its errors if the peer cannot be installed, and the programs that take commands line by line."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from lmcache_bench.peer.lmcache_driver import CHUNK_TOKENS, tokens_of
from lmcache_bench.peer.processes import LineProcess
from lmcache_core.errors import DisconnectedError, PoolError

ECHO = """
import json, sys
print(json.dumps({"said": "ready"}), flush=True)
for line in sys.stdin:
    asked = json.loads(line)
    if asked["do"] == "fail":
        print(json.dumps({"error": "ValueError: no"}), flush=True)
    elif asked["do"] == "end":
        break
    else:
        print(json.dumps({"said": asked}), flush=True)
"""


def bench(tmp_path: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """With an empty cache folder, and no package index."""
    command = [sys.executable, "-m", "lmcache_core.cli.main", "bench", *words]
    nowhere = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": "", "PIP_CONFIG_FILE": os.devnull}
    env = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache"), **nowhere}
    return subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300, check=False)


@pytest.mark.skipif(find_spec("torch") is None, reason="torch is not here, which the peer would share")
def test_a_peer_that_cannot_be_installed_is_told_of_before_anything_is_measured(tmp_path: Path) -> None:
    done = bench(tmp_path, "all", "--report", str(tmp_path / "out"), "--benches", "hooks", "--peer", "lmcache")
    assert done.returncode == 2
    where, why = done.stderr.strip().splitlines()
    assert str(tmp_path / "cache") in where
    assert "lmcache==0.5.6 could not be installed" in why
    assert "No matching distribution found for lmcache" in why
    assert not (tmp_path / "out/report.md").exists()
    assert not [*(tmp_path / "cache").rglob("ready")], "half an environment is none"


def test_a_peer_that_nobody_knows_is_refused(tmp_path: Path) -> None:
    done = bench(tmp_path, "all", "--report", str(tmp_path), "--peer", "nobody")
    assert done.returncode == 2
    assert "lmcache" in done.stderr


def test_nothing_of_the_peer_is_imported_here(tmp_path: Path) -> None:
    ours = "lmcache_bench.all, lmcache_bench.peer, lmcache_bench.engine.beside"
    code = f"import sys, {ours}; sys.exit('lmcache' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True)


def test_both_sides_have_the_same_prompts() -> None:
    assert tokens_of(3, 4) == tokens_of(3, 4) != tokens_of(4, 4)
    assert len(tokens_of(3, 4)) == 4 * CHUNK_TOKENS


def test_a_program_answers_line_by_line_and_its_errors_are_raised(tmp_path: Path) -> None:
    script = tmp_path / "echo.py"
    script.write_text(ECHO)
    with LineProcess(sys.executable, script, env=os.environ) as program:
        assert program.ask("say", number=3) == {"do": "say", "number": 3}
        with pytest.raises(PoolError, match="ValueError: no"):
            program.ask("fail")
        assert program.ask("say")["do"] == "say"
        with pytest.raises(DisconnectedError, match="ended"):
            program.ask("end")


def test_a_program_that_does_not_start_is_told_of(tmp_path: Path) -> None:
    with (
        pytest.raises(DisconnectedError, match=r"gone\.py ended"),
        LineProcess(sys.executable, tmp_path / "gone.py", env=os.environ),
    ):
        pass
