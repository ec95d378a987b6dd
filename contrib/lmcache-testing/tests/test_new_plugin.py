"""`plugins new`: what it refuses, and that each file is whole. `tests/docs/test_tutorial.py` installs and runs it."""

from __future__ import annotations

import ast
import contextlib
import errno
import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path
from typing import Any

import pytest

from lmcache_core.cli.main import main
from lmcache_testing.new_plugin import TEMPLATES

NOBODY = 65534


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
    project = tomllib.loads((package / "pyproject.toml").read_text())["project"]
    assert project["dependencies"] == ["lmcache-core>=0.1,<0.2"]
    assert project["optional-dependencies"] == {"testing": ["lmcache-testing>=0.1,<0.2"]}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["acme"], "plugins new NAME --kind l2_adapter|eviction|serde|store|prefetch|subscriber|operation"),
        (["--kind", "serde"], "no name or kind given"),
        (["Acme", "--kind", "serde"], "'Acme' is not a valid component name"),
        (["Acme", "--kind", "serde"], "single _ between words: 'acme', for example"),
        (["a--b", "--kind", "serde"], "'a--b' is not a valid component name"),
        (["a--b", "--kind", "serde"], "'a_b', for example"),
        (["a" * 41, "--kind", "serde"], "is not a valid component name: use up to 40"),
        (["a" * 200, "--kind", "serde"], f"'{'a' * 40}'… is not a valid component name"),
        (["", "--kind", "serde"], "'' is not a valid component name"),
        (["1a", "--kind", "serde"], "'1a' is not a valid component name"),
        (["\u00e9t\u00e9", "--kind", "serde"], "'\u00e9t\u00e9' is not a valid component name"),
        (["../acme", "--kind", "serde"], "'../acme' is not a valid component name"),
        (["-x", "--kind", "serde"], "unrecognized arguments: -x"),
        (["--kind", "serde", "--", "-x"], "'-x' is not a valid component name"),
        (["tests", "--kind", "serde"], "pytest would take classes named after 'tests' for tests"),
        (["blocking", "--kind", "l2_adapter"], "'blocking' would name a class BlockingAdapter, which lmcache-core"),
        (["eviction", "--kind", "eviction"], "'eviction' would name a class EvictionPolicy"),
        (["store", "--kind", "store"], "'store' would name a class StorePolicy"),
        (["prefetch", "--kind", "prefetch"], "'prefetch' would name a class PrefetchPolicy"),
        (["event", "--kind", "subscriber"], "'event' would name a class EventSubscriber"),
        (["server", "--kind", "operation"], "'server' would name a class ServerOperation"),
        (["lru", "--kind", "eviction"], "eviction_policy 'lru' exists in builtin (lmcache-core"),
        (["core", "--kind", "serde"], "a package lmcache_core is already installed"),
    ],
)
def test_an_invalid_new_package_is_refused_with_a_message(
    words: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert new("--directory", str(tmp_path), *words) == 2
    assert said in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "words", [["--kind", "serde", "acme"], ["lmcache-acme", "--kind", "serde"], ["lmcache_acme", "--kind", "serde"]]
)
def test_the_name_may_stand_behind_options_and_be_the_packages(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert new("--directory", str(tmp_path), *words) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["lmcache-acme"]


def test_a_folder_that_may_not_be_written_to_is_said_to_another_user() -> None:
    """As somebody who is not root, whom no mode of a folder keeps out, and in a folder that everybody comes to."""
    if os.geteuid() != 0:
        pytest.skip("only root can be somebody else")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)
        roots, nobodys = folder / "roots", folder / "nobodys"
        roots.mkdir(mode=0o755)
        nobodys.mkdir()
        os.chown(nobodys, NOBODY, NOBODY)
        status, said = as_nobody(folder / "said", "acme", "--kind", "serde", "--directory", str(roots))
        assert status == 2
        assert f"{roots}/lmcache-acme cannot be written: Permission denied: choose a writable folder" in said
        assert list(roots.iterdir()) == []
        status, said = as_nobody(folder / "said", "acme", "--kind", "serde", "--directory", str(nobodys))
        assert status == 0, said
        assert (nobodys / "lmcache-acme/pyproject.toml").stat().st_uid == NOBODY


def as_nobody(out: Path, *words: str) -> tuple[int, str]:
    """`plugins new` in a child that may do little: its status, and what it printed."""
    pid = os.fork()
    if pid == 0:
        status = 99
        try:
            with out.open("w") as said, contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
                os.setgroups([])
                os.setgid(NOBODY)
                os.setuid(NOBODY)
                status = new(*words)
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), out.read_text()


def test_packages_with_odd_names_are_green_at_once(tmp_path: Path) -> None:
    """A keyword and a module of the standard library."""
    odd = {"class": "prefetch", "json": "store"}
    site = tmp_path / "site"
    site.mkdir()
    for name, kind in odd.items():
        assert new(name, "--kind", kind, "--directory", str(tmp_path)) == 0
        installed(tmp_path / f"lmcache-{name}", site)
    tests = [str(tmp_path / f"lmcache-{name}/tests") for name in odd]
    run = [sys.executable, "-W", "error", "-m", "pytest", "-q", "--import-mode=importlib", "-p", "no:cacheprovider"]
    where = os.pathsep.join([str(site), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [*run, f"--rootdir={tmp_path}", *tests],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": where},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout


def installed(package: Path, site: Path) -> None:
    """As pip leaves it: its modules on the path, and a `.dist-info` beside them."""
    project = tomllib.loads((package / "pyproject.toml").read_text())["project"]
    shutil.copytree(package / "src", site, dirs_exist_ok=True)
    about = site / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
    about.mkdir()
    needs = "".join(f"Requires-Dist: {each}\n" for each in project["dependencies"])
    (about / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n{needs}"
    )
    entries = project["entry-points"]["lmcache_core"]
    (about / "entry_points.txt").write_text(
        "[lmcache_core]\n" + "".join(f"{name} = {module}\n" for name, module in entries.items())
    )


def test_what_is_there_is_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "lmcache-acme").mkdir()
    (tmp_path / "lmcache-acme/mine").write_text("mine")
    assert new("acme", "--kind", "serde", "--directory", str(tmp_path)) == 2
    assert "already exists" in capsys.readouterr().err
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
    assert "already exists" in capsys.readouterr().err
    assert (tmp_path / "lmcache-acme").is_symlink()
