"""What `plugins new` writes is green at once, and so is what the tutorials make of it: nothing there was never run."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from lmcache_testing.new_plugin import TEMPLATES

ROOT = Path(__file__).parents[2]
PAGES = ROOT / "docs/plugins"
TUTORIALS = ["tutorial", "policy", "serde"]
FILE = re.compile(r"<!-- file (\S+) -->\n```\w+\n(.*?)```\n", re.DOTALL)
COMMANDS = re.compile(r"^```sh\n(.*?)^```", re.DOTALL | re.MULTILINE)
# As people call things: keywords, modules of others, the longest name that there may be.
ODD_NAMES = {
    "l2_adapter": "class",
    "eviction": "x" * 40,
    "serde": "json",
    "store": "none",
    "prefetch": "lmcache",
    "subscriber": "settings",
    "operation": "asyncio",
}


def command_line(folder: Path, *words: str) -> None:
    command = [sys.executable, "-m", "lmcache_core.cli.main", *words]
    subprocess.run(command, cwd=folder, check=True, capture_output=True)


def do_as_the_page_says(page: str, folder: Path) -> None:
    """Its commands up to the files, the files, and what is removed."""
    text = (PAGES / f"{page}.md").read_text()
    lines = [shlex.split(line) for block in COMMANDS.findall(text) for line in block.splitlines()]
    for words in lines:
        if words[:3] == ["lmcache-core", "plugins", "new"]:
            command_line(folder, *words[1:])
    (package,) = folder.iterdir()
    for path, content in FILE.findall(text):
        assert (package / path).exists(), f"{page}: {path} is no file of the package that it begins with"
        (package / path).write_text(content)
    for words in lines:
        if words[0] == "rm":
            (package / words[1]).unlink()


def installed_and_tested(packages: Sequence[Path], folder: Path) -> subprocess.CompletedProcess[str]:
    """With pip into a folder beside the present environment; then all their tests at once."""
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation", "--target", str(folder)]
    done = subprocess.run([*pip, *map(str, packages)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    tests = [str(package / "tests") for package in packages]
    pytest = ["-m", "pytest", "-q", "--import-mode=importlib", "-p", "no:cacheprovider", f"--rootdir={folder}"]
    return subprocess.run(
        [sys.executable, "-W", "error", *pytest, *tests],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(folder)},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.slow  # pip builds nine wheels
def test_a_package_of_each_kind_and_each_tutorials_is_green_at_once(tmp_path: Path) -> None:
    new = tmp_path / "new"
    new.mkdir()
    for kind, name in ODD_NAMES.items():
        command_line(new, "plugins", "new", name, "--kind", kind)
    for page in TUTORIALS:
        (tmp_path / page).mkdir()
        do_as_the_page_says(page, tmp_path / page)
    packages = [*new.iterdir(), *(each for page in TUTORIALS for each in (tmp_path / page).iterdir())]
    assert set(ODD_NAMES) == set(TEMPLATES)
    assert len(packages) == len(TEMPLATES) + len(TUTORIALS)
    done = installed_and_tested(packages, tmp_path / "site")
    assert done.returncode == 0, done.stdout
    assert " passed" in done.stdout
    where = {**os.environ, "PYTHONPATH": str(tmp_path / "site")}
    listed = subprocess.run(
        [sys.executable, "-m", "lmcache_core.cli.main", "plugins"],
        env={**where, "COLUMNS": "300"},  # no name is broken
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert all(name in listed for name in ODD_NAMES.values()), listed
    assert "refused" not in listed


@pytest.mark.parametrize("page", TUTORIALS)
def test_a_tutorials_code_is_as_neat_as_ours(page: str, tmp_path: Path) -> None:
    do_as_the_page_says(page, tmp_path)
    for path in tmp_path.rglob("*.py"):
        text = path.read_text()
        compile(text, path.name, "exec")
        assert max(map(len, text.splitlines())) <= 120, path
        assert not re.search(r"@\w+@", text), f"{path}: a mark was not filled in"


def test_the_wrappers_on_the_testing_page_run(tmp_path: Path) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```", (PAGES / "testing.md").read_text(), re.DOTALL | re.M)
    (tmp_path / "test_page.py").write_text("\n".join(blocks))
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_page.py"],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stdout
    assert " passed" in done.stdout


@pytest.mark.parametrize("page", [*TUTORIALS, "testing", "publishing", "compatibility"])
def test_names_of_the_kit_and_of_the_contract_on_the_pages_exist(page: str) -> None:
    import lmcache_testing as kit
    from lmcache_core.tiers import blocking, contract

    named = set(re.findall(r"`(\w+Contract|\w+Machine|\w+Adapter)`", (PAGES / f"{page}.md").read_text()))
    assert named <= {*kit.__all__, *contract.__all__, *blocking.__all__}
