"""`plugins new`: what it refuses, and that each file is whole. `tests/docs/test_tutorial.py` installs and runs it."""

from __future__ import annotations

import ast
import errno
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from lmcache_core.cli.main import main
from lmcache_core.cli.new_plugin import TEMPLATES


def new(*words: str) -> int:
    return main(["plugins", "new", *words])


@pytest.mark.parametrize("kind", TEMPLATES)
def test_a_package_of_each_kind_is_whole(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert new("my-acme", "--kind", kind, "--directory", str(tmp_path)) == 0
    package = tmp_path / "lmcache-my-acme"
    assert str(package) in capsys.readouterr().out
    files = {str(path.relative_to(package)) for path in package.rglob("*") if path.is_file()}
    assert {"README.md", "CHANGELOG.md", "pyproject.toml", "tests/test_package.py"} <= files
    assert {f"src/lmcache_my_acme/{name}" for name in ("__init__.py", "settings.py", "py.typed")} <= files
    assert not [name for name in files if name.endswith(".tmpl")]
    for path in package.rglob("*"):
        if path.is_file():
            text = path.read_text()
            marks = [
                mark for mark in ("@name@", "@Name@", "@module@", "@api@", "@summary@", "@bounds@") if mark in text
            ]
            assert marks == [], path
            if path.suffix == ".py":
                ast.parse(text)
    assert '"lmcache-core>=0.1,<0.2"' in (package / "pyproject.toml").read_text()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["acme"], "plugins new NAME --kind l2_adapter|eviction|serde|store|prefetch|subscriber|operation"),
        (["--kind", "serde"], "say what to write"),
        (["Acme", "--kind", "serde"], "'Acme' is no name"),
        (["a__b", "--kind", "serde"], "is no name"),
        (["a" * 41, "--kind", "serde"], "is no name"),
        (["lru", "--kind", "eviction"], "eviction_policy 'lru' is builtin (lmcache-core"),
        (["core", "--kind", "serde"], "a package lmcache_core is installed here"),
    ],
)
def test_what_cannot_be_written_is_refused_in_words(
    words: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert new(*words, "--directory", str(tmp_path)) == 2
    assert said in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_what_is_there_is_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "lmcache-acme").mkdir()
    (tmp_path / "lmcache-acme/mine").write_text("mine")
    assert new("acme", "--kind", "serde", "--directory", str(tmp_path)) == 2
    assert "is there already" in capsys.readouterr().err
    assert [path.name for path in (tmp_path / "lmcache-acme").iterdir()] == ["mine"]
    assert new("acme", "--kind", "serde", "--directory", str(tmp_path / "lmcache-acme/mine")) == 2
    assert "cannot be written" in capsys.readouterr().err


def test_what_could_not_be_written_leaves_nothing_behind(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The medium is full in the middle: half a package would be in the way of the next try."""
    written: list[Path] = []
    write = Path.write_text

    def full(path: Path, *arguments: Any, **more: Any) -> int:
        written.append(path)
        if len(written) == 4:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        return write(path, *arguments, **more)

    monkeypatch.setattr(Path, "write_text", full)
    assert new("acme", "--kind", "serde", "--directory", str(tmp_path)) == 2
    assert "lmcache-acme cannot be written: No space left on device" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
    assert new("acme", "--kind", "serde", "--directory", str(tmp_path)) == 0


def test_the_commands_that_it_prints_can_be_pasted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "my plugins; \u00e9t\u00e9 $HOME"
    assert new("acme", "--kind", "serde", "--directory", str(folder)) == 0
    said = capsys.readouterr().out.partition("first: ")[2].partition(" && ")[0]
    shell = subprocess.run(["sh", "-c", f"{said} && pwd"], capture_output=True, text=True, check=True)
    assert shell.stdout.strip() == str(folder / "lmcache-acme")


def test_the_name_of_an_installed_plugin_is_refused_for_every_kind(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two plugins of one name are both refused, whatever their components are."""
    assert new("builtin", "--kind", "serde", "--directory", str(tmp_path)) == 2
    assert "plugin builtin (lmcache-core" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_link_that_leads_nowhere_is_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "lmcache-acme").symlink_to(tmp_path / "elsewhere")
    assert new("acme", "--kind", "serde", "--directory", str(tmp_path)) == 2
    assert "is there already" in capsys.readouterr().err
    assert (tmp_path / "lmcache-acme").is_symlink()
