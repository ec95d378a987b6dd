"""Which lines of a module each test runs, so that a mutant is run against the tests that reach it and no other.

The module is changed to say each statement that it runs; `pytest -p reach` hears it, test by test, and writes it to the
file that LMCACHE_CORE_REACH names. What runs in another process is not heard.
"""

from __future__ import annotations

import ast
import builtins
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest

VARIABLE = "LMCACHE_CORE_REACH"
_SAY = "lmcache_reached"
_BLOCKS = ("body", "orelse", "finalbody")


class Reach(NamedTuple):
    """What a test does with the module: the first lines of the statements that it runs, and the seconds it takes.
    `lines` is None for one that failed: nobody knows what it would have run."""

    lines: frozenset[int] | None
    seconds: float

    def may_notice(self, line: int | None) -> bool:
        """Whether a change of the statement at `line` (None: of what runs at the import) can make a difference."""
        return line is None or self.lines is None or line in self.lines


def saying(text: str) -> str:
    """The module, with each statement of its functions said before it runs."""
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            _say_in(node)
    ast.fix_missing_locations(tree)
    return ast.unparse(tree)


def _say_in(node: ast.AST) -> None:
    for field in _BLOCKS:
        block = getattr(node, field, None)
        if not isinstance(block, list) or not all(isinstance(each, ast.stmt) for each in block):
            continue
        for each in block:
            if not isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                _say_in(each)
        setattr(node, field, [part for each in block for part in (_say(each.lineno), each)])
    for handler in getattr(node, "handlers", []):
        _say_in(handler)


def _say(line: int) -> ast.stmt:
    return ast.parse(f"__import__('builtins').{_SAY}({line})").body[0]


def read(path: Path) -> dict[str, Reach]:
    """Test → what it reaches, from the file that a run has written."""
    found: Mapping[str, Any] = json.loads(path.read_text())
    return {
        test: Reach(None if lines is None else frozenset(lines), seconds) for test, (lines, seconds) in found.items()
    }


class _Listener:
    def __init__(self) -> None:
        self._lines: set[int] = set()
        self._found: dict[str, tuple[list[int] | None, float]] = {}
        setattr(builtins, _SAY, self._lines.add)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: Any) -> Any:
        self._lines.clear()
        self._found[item.nodeid] = ([], 0.0)
        result = yield
        lines, seconds = self._found[item.nodeid]
        self._found[item.nodeid] = (None if lines is None else sorted(self._lines), seconds)
        return result

    def pytest_runtest_logreport(self, report: Any) -> None:
        lines, seconds = self._found[report.nodeid]
        self._found[report.nodeid] = (None if report.failed else lines, seconds + report.duration)

    def pytest_sessionfinish(self) -> None:
        Path(os.environ[VARIABLE]).write_text(json.dumps(self._found))


def pytest_configure(config: pytest.Config) -> None:
    if VARIABLE in os.environ:
        config.pluginmanager.register(_Listener())
