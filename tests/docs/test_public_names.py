"""One list says what third parties may import, and no page, template or example tells them to import anything else."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LIST = ROOT / "docs/plugins/compatibility.md"
PUBLIC = re.findall(r"^\| `(lmcache_core[\w.]*)` \|", LIST.read_text(), re.MULTILINE)
# What is for the people of this repository, and what was written down at its time.
OURS = ("docs/internals", "docs/decisions", "docs/benchmarks.md")


def sources() -> Iterator[tuple[str, str]]:
    """Where, and Python that a reader may copy from there."""
    pages = [*(ROOT / "docs").rglob("*.md"), *ROOT.glob("*/*/README.md"), ROOT / "README.md", ROOT / "core/README.md"]
    for page in pages:
        where = str(page.relative_to(ROOT))
        if not where.startswith(OURS):
            for block in re.findall(r"^```python\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE):
                yield where, block
    for path in (ROOT / "core/src/lmcache_core/cli/templates").rglob("*.py.tmpl"):
        yield str(path.relative_to(ROOT)), re.sub(r"@\w+@", "name", path.read_text())
    for path in (ROOT / "contrib/examples").rglob("*.py"):
        yield str(path.relative_to(ROOT)), path.read_text()


def imported(code: str) -> Iterator[tuple[str, str]]:
    try:
        tree = ast.parse(code)
    except SyntaxError:  # a bare signature
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "lmcache_core":
            for each in node.names:
                yield str(node.module), each.name


@pytest.mark.parametrize("module", PUBLIC)
def test_every_public_module_says_which_names_it_means(module: str) -> None:
    loaded = import_module(module)
    assert loaded.__all__
    assert [name for name in loaded.__all__ if not hasattr(loaded, name)] == []


def test_nobody_is_told_to_import_what_is_not_public() -> None:
    private = set()
    for where, code in sources():
        for module, name in imported(code):
            inside = f"{module}.{name}" in PUBLIC
            if not inside and not (module in PUBLIC and name in import_module(module).__all__):
                private.add(f"{where}: from {module} import {name}")
    assert sorted(private) == []


def test_the_list_has_no_name_twice() -> None:
    assert len(PUBLIC) == len(set(PUBLIC)) > 15
