"""The code in the guide and the README runs."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

PACKAGE = Path(__file__).parent.parent
ROOT = PACKAGE.parent.parent
GUIDE = ROOT / "docs" / "l0" / "table.md"

pytestmark = pytest.mark.skipif(not GUIDE.exists(), reason="the package stands alone, without the repository's docs")


def fenced(page: Path, language: str) -> list[str]:
    blocks = re.findall(r"^```(\w*)\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)
    return [text for named, text in blocks if named == language]


@pytest.mark.parametrize("page", [GUIDE, PACKAGE / "README.md"], ids=["guide", "README"])
def test_the_examples_in_python_run_one_after_the_other(page, folder, server, monkeypatch):
    from lmcache_core import Client

    names: dict[str, Any] = {}
    with server.connect() as client:
        monkeypatch.setattr(Client, "connect", lambda name: client)
        for code in fenced(page, "python"):
            exec(code.replace("/dev/shm/", f"{folder}/"), names)
    assert names["view"].tolist() == list(range(128))
    if page == GUIDE:
        assert names["rows"].sum() == sum(range(128))
        assert names["found"] == b"\1"


def test_the_commands_of_the_guide_run(folder):
    path = str(folder / "t.l0")
    lines = [line for block in fenced(GUIDE, "") for line in block.splitlines() if line.startswith("$ lmcache-core")]
    assert len(lines) > 8
    for line in lines:
        words = shlex.split(line.removeprefix("$ lmcache-core"), comments=True)
        if words[:2] == ["l0", "get"]:
            subprocess.run(
                [sys.executable, "-m", "lmcache_core.cli.main", "l0", "set", path, "KEY", "VALUE"], check=True
            )
        done = subprocess.run(
            [sys.executable, "-m", "lmcache_core.cli.main", *(path if word == "PATH" else word for word in words)],
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, (line, done.stderr)


def test_the_pages_beside_servers_name_examples_that_are_run():
    """`test_servers.py` runs them all."""
    run = (PACKAGE / "tests" / "test_servers.py").read_text()
    for example in (PACKAGE / "examples").iterdir():
        if example.suffix == ".py":
            pages = [page.read_text() for page in GUIDE.parent.glob("*.md")]
            assert any(f"examples/{example.name}" in page for page in pages), example.name
            assert example.stem in run
