"""A package imports exactly what it depends on, and the page gives the reasons."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs/internals/dependencies.md"
PACKAGES = {
    path.parent.name: path.parent for path in [ROOT / "core/pyproject.toml", *ROOT.glob("*/lmcache-*/pyproject.toml")]
}
# Where the module is not called as the distribution is.
MODULES = {
    "pyzmq": "zmq",
    "opentelemetry-api": "opentelemetry",
    "opentelemetry-sdk": "opentelemetry",
    "opentelemetry-exporter-otlp-proto-http": "opentelemetry",
}
OURS = re.compile(r"lmcache[-_]")
FOR_ANOTHER = {"core": {"transformers"}}  # of the extra `demo`: what lmcache-transformers needs for the command
# In files that a peer's own interpreter runs, from an environment that a bench makes.
ELSEWHERE = {"lmcache-bench": {"lmcache", "llvmlite"}}


def requirements(path: Path) -> set[str]:
    project = tomllib.loads((path / "pyproject.toml").read_text())["project"]
    extras = project.get("optional-dependencies", {}).values()
    lines = [*project.get("dependencies", []), *(line for extra in extras for line in extra)]
    return {re.split(r"[<>=!~\[; ]", line, maxsplit=1)[0].lower() for line in lines}


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


def strings(tree: ast.AST) -> set[str]:
    return {each.value for each in ast.walk(tree) if isinstance(each, ast.Constant) and isinstance(each.value, str)}


def tools() -> set[str]:
    """What the sessions of noxfile.py install by name, and the packages for their own tests."""
    tree = ast.parse((ROOT / "noxfile.py").read_text())
    lists = [
        each for each in ast.walk(tree) if isinstance(each, ast.Assign) and "TOOLS" in ast.unparse(each.targets[0])
    ]
    found = {word for each in lists for word in strings(each.value)}  # without a version, some of them
    found |= {word for word in strings(tree) if re.fullmatch(r"[a-z][\w.-]*(\[\w+\])?[<>=]=[\w.,<>=]+", word)}
    for path in PACKAGES.values():
        project = tomllib.loads((path / "pyproject.toml").read_text())
        found |= set(project.get("dependency-groups", {}).get("test", []))
    return {re.split(r"[<>=!~\[; ]", each, maxsplit=1)[0] for each in found}


def test_the_page_has_every_dependency_and_no_other() -> None:
    wanted = {each for path in PACKAGES.values() for each in requirements(path) if not OURS.match(each)}
    assert rows(0).keys() == wanted


def test_the_page_says_of_every_dependency_its_licence_who_asks_why_and_what_else_there_is() -> None:
    assert not [name for name, cells in rows(0).items() if len(cells) != 4 or not all(cells)]


def test_the_page_has_every_tool_and_no_other() -> None:
    assert rows(1).keys() == tools()


def test_who_asks_is_who_the_page_says() -> None:
    for name, cells in rows(0).items():
        for package, path in PACKAGES.items():
            if name in requirements(path):
                here = package if package != "core" else "lmcache-core"
                told = here in cells[1] or (here == "lmcache-core" and "extra" in cells[1])
                told |= here.startswith("lmcache-") and "plugins" in cells[1]
                assert told, f"{here} asks for {name}, and the page does not say so"
