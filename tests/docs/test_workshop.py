"""What the sessions of noxfile.py are made of: which packages a path needs, and when a wheel is built again."""

from __future__ import annotations

import ast
import shutil
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
with pytest.MonkeyPatch.context() as patch:
    patch.syspath_prepend(ROOT)
    from tools.packages import CORE, PACKAGES, packages_of, with_ours
    from tools.wheels import copy_sources, digest


def test_noxfile_and_what_it_imports_need_nox_alone() -> None:
    """`nox -l` works in an environment that has nothing else."""
    pending, seen = [ROOT / "noxfile.py"], set()
    while pending:
        path = pending.pop()
        seen.add(path.stem)
        for node in ast.walk(ast.parse(path.read_text())):
            names = [each.name for each in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                names = [f"tools.{each.name}" for each in node.names] if node.module == "tools" else [str(node.module)]
            for name in names:
                top, _, module = name.partition(".")
                assert top in {"tools", "nox", *sys.stdlib_module_names}, f"{path.name} imports {name}"
                if top == "tools" and module not in seen:
                    pending.append(ROOT / "tools" / f"{module}.py")
    assert {"environments", "packages", "sessions", "wheels"} <= seen


def test_every_session_says_in_at_most_three_lines_what_it_proves() -> None:
    tree = ast.parse((ROOT / "noxfile.py").read_text())
    functions = [each for each in tree.body if isinstance(each, ast.FunctionDef)]
    claims = {each.name: ast.get_docstring(each) or "" for each in functions}
    for each in ast.walk(tree):
        if isinstance(each, ast.Call) and isinstance(each.func, ast.Name) and each.func.id == "Claim":
            name, says = (ast.literal_eval(argument) for argument in each.args)
            claims[name] = says
    assert len(claims) > 30
    for name, says in claims.items():
        assert 1 <= len(says.splitlines()) <= 3, name


def test_a_path_needs_its_own_package_and_a_path_across_packages_needs_all() -> None:
    assert packages_of([ROOT / "core/tests/kernel"]) == [CORE]
    fs = PACKAGES["lmcache-fs"]
    assert packages_of([f"{fs}/tests/test_adapter.py::test_x", fs / "tests"]) == [fs]
    assert packages_of([ROOT / "tests/integration"]) == [CORE, *PACKAGES.values()]
    assert PACKAGES["lmcache-testing"] in with_ours([], ["lmcache-testing", "pytest>=8"])


@pytest.mark.parametrize("changed", ["src/lmcache_policies/__init__.py", "pyproject.toml"])
def test_a_wheel_is_built_again_for_other_sources_and_not_for_other_tests(tmp_path: Path, changed: str) -> None:
    package = tmp_path / "lmcache-policies"
    shutil.copytree(
        PACKAGES["lmcache-policies"], package, ignore=shutil.ignore_patterns("*.egg-info", "__pycache__", "build")
    )

    def state(name: str, native: str = "") -> str:
        copy_sources(package, tmp_path / name)
        return digest(tmp_path / name, native)

    first = state("first")
    (package / "tests" / "test_more.py").write_text("")
    (package / "build").mkdir()
    (package / "build" / "left").write_text("")
    assert state("with other tests") == first
    assert state("without the extension", "off") != first
    with (package / changed).open("a") as file:
        file.write("\n# changed\n")
    assert state("changed") != first
