"""One list says what third parties may import, and no page, template or example tells them to import anything else."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import re
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LIST = ROOT / "docs/plugins/compatibility.md"
PACKAGES = ("lmcache_core", "lmcache_testing")
PUBLIC = re.findall(rf"^\| `((?:{'|'.join(PACKAGES)})[\w.]*)` \|", LIST.read_text(), re.MULTILINE)
# What is for the people of this repository, and what was written down at its time.
OURS = ("docs/internals", "docs/decisions", "docs/benchmarks.md", "docs/benchmarks-by-part.md")


def sources() -> Iterator[tuple[str, str]]:
    """Where, and Python that a reader may copy from there."""
    pages = [*(ROOT / "docs").rglob("*.md"), *ROOT.glob("*/*/README.md"), ROOT / "README.md", ROOT / "core/README.md"]
    for page in pages:
        where = str(page.relative_to(ROOT))
        if not where.startswith(OURS):
            for block in re.findall(r"^```python\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE):
                yield where, block
    for path in (ROOT / "contrib/lmcache-testing/src/lmcache_testing/templates").rglob("*.py.tmpl"):
        yield str(path.relative_to(ROOT)), re.sub(r"@\w+@", "name", path.read_text())
    for path in (ROOT / "contrib/examples").rglob("*.py"):
        yield str(path.relative_to(ROOT)), path.read_text()


def imported(code: str) -> Iterator[tuple[str, str]]:
    try:
        tree = ast.parse(code)
    except SyntaxError:  # a bare signature
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in PACKAGES:
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


def test_our_packages_take_the_client_by_its_public_names() -> None:
    paths = [path for folder in ("plugins", "contrib") for path in ROOT.glob(f"{folder}/*/src/**/*.py")]
    assert len(paths) > 100
    modules = {f"{path.relative_to(ROOT)}: {module}" for path in paths for module, _ in imported(path.read_text())}
    assert sorted(each for each in modules if "lmcache_core.client." in each) == []


def test_the_list_has_no_name_twice() -> None:
    assert len(PUBLIC) == len(set(PUBLIC)) > 15


def test_every_public_name_stands_in_the_reference_of_the_site() -> None:
    spec = importlib.util.spec_from_file_location("site_tool", ROOT / "tools/site.py")
    assert spec is not None
    assert spec.loader is not None
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    shown = {name for _, modules in tool.API.values() for module in modules for name in tool.public_names(module)}
    public = {f"{module}.{name}" for module in PUBLIC for name in import_module(module).__all__}
    assert [name for name in sorted(public) if name.rpartition(".")[2] not in shown] == []


@pytest.mark.parametrize("module", PUBLIC)
def test_every_public_class_function_and_method_says_what_it_does(module: str) -> None:
    loaded = import_module(module)
    silent = []
    for name in loaded.__all__:
        each = getattr(loaded, name)
        if not str(getattr(each, "__module__", "")).startswith(PACKAGES):
            continue
        if (inspect.isclass(each) or inspect.isfunction(each)) and not inspect.getdoc(each):
            silent.append(name)
        if inspect.isclass(each) and module != "lmcache_testing":  # the kit's methods are claims, said by their names
            silent += [f"{name}.{method}" for method in methods(each) if not inspect.getdoc(getattr(each, method))]
    assert silent == []


def methods(each: type) -> Iterator[str]:
    """The public ones that a class defines by itself. A field that holds a function is none."""
    for name, its in vars(each).items():
        is_field = name in getattr(each, "__dataclass_fields__", {})
        if not name.startswith("_") and not is_field and inspect.isfunction(getattr(its, "__func__", its)):
            yield name


def test_what_a_caller_gets_back_stands_beside_the_client_and_is_listed() -> None:
    import lmcache_core
    from lmcache_core import errors

    beside = {"Status", "Reason", "StoreResult", "RetrieveResult", "LookupResult", "LookupHandle"}
    raised = {
        name
        for name, kind in vars(errors).items()
        if isinstance(kind, type) and issubclass(kind, lmcache_core.CacheError)
    }
    assert beside | raised <= set(lmcache_core.__all__) <= set(dir(lmcache_core))
