"""Two laws about hooks themselves: each has a test that names it, and each stands in the docs as it is."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path

import pytest

from lmcache_core.plugins import hookspecs
from lmcache_core.plugins.examine import hook_names

HERE = Path(__file__).parent
DOCS = HERE.parents[2] / "docs" / "plugins" / "hooks.md"


def signature(hook: str) -> str:
    """As written in the source: `def lmcache_check(settings: Settings) -> Sequence[Finding]:`"""
    tree = ast.parse(inspect.getsource(getattr(hookspecs, hook)).replace("@hookspec\n", "", 1))
    function = tree.body[0]
    assert isinstance(function, ast.FunctionDef)
    assert function.returns is not None
    return f"def {function.name}({ast.unparse(function.args)}) -> {ast.unparse(function.returns)}"


@pytest.mark.parametrize("hook", hook_names())
def test_every_hook_has_a_test_that_names_it(hook: str) -> None:
    tests = [path for path in HERE.glob("test_*.py") if path != Path(__file__)]
    assert any(f"def {hook}(" in path.read_text() for path in tests)


@pytest.mark.parametrize("hook", hook_names())
def test_every_hook_signature_stands_in_the_docs(hook: str) -> None:
    if not DOCS.exists():
        pytest.skip("the docs are not part of this copy")
    assert signature(hook) in DOCS.read_text()


@pytest.mark.parametrize("hook", hook_names())
def test_every_hook_says_since_when_it_is_there(hook: str) -> None:
    assert "Since 0." in inspect.getdoc(getattr(hookspecs, hook))  # type: ignore[operator]
