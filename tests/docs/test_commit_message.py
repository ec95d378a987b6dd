"""The form of commit messages, in repositories of their own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TOOL = ROOT / "tools/commit_message.py"
GOOD = "kernel: free leases of dead sessions in steps\n\nA worker with many slots stalled everybody else.\n"


def judged(tmp_path: Path, message: str) -> tuple[int, str]:
    path = tmp_path / "COMMIT_EDITMSG"
    path.write_text(message)
    run = subprocess.run([sys.executable, TOOL, path], capture_output=True, text=True)
    return run.returncode, run.stderr


@pytest.mark.parametrize(
    "message",
    [
        GOOD,
        "Merge branch 'of-somebody'\n",
        GOOD + "# Please enter the commit message\n",
        "ci, docs: pin nox\n\nIt broke.\n",
    ],
)
def test_a_message_in_the_form_passes(tmp_path: Path, message: str) -> None:
    assert judged(tmp_path, message) == (0, "")


@pytest.mark.parametrize(
    ("message", "why"),
    [
        ("Free the leases\n\nBecause.\n", "area: what changed"),
        ("kernel: free the leases.\n\nBecause.\n", "area: what changed"),
        ("kernel: say why a lease was refused\n\nBecause.\n", "another verb"),
        ("kernel: " + "x" * 70 + "\n\nBecause.\n", "78 characters"),
        ("kernel: free the leases\n", "say why"),
        ("kernel: free the leases\nBecause.\n", "say why"),
        ("kernel: free the leases\n\n# a comment of git\n", "say why"),
        ("", "area: what changed"),
    ],
)
def test_a_message_out_of_form_is_refused_with_what_to_do(tmp_path: Path, message: str, why: str) -> None:
    status, text = judged(tmp_path, message)
    assert status == 1
    assert why in text


def git(folder: Path, *argv: str) -> None:
    who = {"GIT_AUTHOR_NAME": "a", "GIT_AUTHOR_EMAIL": "a@b", "GIT_COMMITTER_NAME": "a", "GIT_COMMITTER_EMAIL": "a@b"}
    nobody = {"GIT_CONFIG_GLOBAL": "/dev/null", "GIT_CONFIG_SYSTEM": "/dev/null"}
    subprocess.run(["git", *argv], cwd=folder, check=True, capture_output=True, env=os.environ | who | nobody)


@pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")
def test_commits_are_checked_from_the_one_on_that_added_the_check(tmp_path: Path) -> None:
    tool = tmp_path / TOOL.name
    git(tmp_path, "init", "-q")
    git(tmp_path, "commit", "-q", "--allow-empty", "-m", "Whatever it was")
    shutil.copy(TOOL, tool)
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-q", "-m", "Also free")
    git(tmp_path, "commit", "-q", "--allow-empty", "-m", GOOD)
    assert subprocess.run([sys.executable, tool]).returncode == 0
    git(tmp_path, "commit", "-q", "--allow-empty", "-m", "Out of form")
    run = subprocess.run([sys.executable, tool], capture_output=True, text=True)
    assert run.returncode == 1
    assert "'Out of form'" in run.stderr
    assert "Whatever" not in run.stderr


def test_a_folder_without_history_has_nothing_to_check(tmp_path: Path) -> None:
    tool = tmp_path / TOOL.name
    shutil.copy(TOOL, tool)
    run = subprocess.run(
        [sys.executable, tool], capture_output=True, text=True, env={**os.environ, "GIT_CEILING_DIRECTORIES": "/"}
    )
    assert run.returncode == 0
    assert "no history" in run.stderr
