"""Every state machine is a table that the code consults, that is whole, and that the docs show as it draws itself."""

from __future__ import annotations

import ast
import importlib
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import lmcache_core
from lmcache_core.transitions import Transitions

SOURCE = Path(lmcache_core.__file__).parent
INTERNALS = Path(__file__).parents[2] / "docs/internals"
MODULES = sorted(path.relative_to(SOURCE) for path in SOURCE.rglob("*states.py"))
STANDS_APART = {"OFF"}  # where a machine may begin and stay
# What is claimed gets its first state by the batch; `Kernel.begin_store` has looked the step up in the table. A recount
# finds out in which state a step that failed half way has left an object.
KERNEL_BATCHES = {"kernel/writing.py", "kernel/residents.py", "kernel/adoption.py", "kernel/recount.py"}


def tables(module: Path) -> dict[str, Transitions[Any, Any]]:
    loaded: ModuleType = importlib.import_module("lmcache_core." + ".".join(module.with_suffix("").parts))
    return {name: each for name, each in vars(loaded).items() if isinstance(each, Transitions)}


TABLES = {name: table for module in MODULES for name, table in tables(module).items()}


def test_a_module_of_states_has_a_table() -> None:
    assert len(MODULES) >= 9
    assert [module for module in MODULES if not tables(module)] == []


@pytest.mark.parametrize("name", TABLES)
def test_a_table_uses_every_state_and_every_event(name: str) -> None:
    table = TABLES[name]
    state, event = next(iter(table))
    states = {each for (before, _), after in table.items() for each in (before, after)}
    assert {each.name for each in type(state)} - {each.name for each in states} <= STANDS_APART
    assert {each for _, each in table} == set(type(event))


@pytest.mark.parametrize("name", TABLES)
def test_a_table_is_drawn_in_the_docs_as_it_is(name: str) -> None:
    drawn = re.findall(
        r"^```mermaid\n(.*?)^```", "".join(page.read_text() for page in INTERNALS.glob("*.md")), re.M | re.S
    )
    assert TABLES[name].diagram() in drawn


@pytest.mark.parametrize("name", TABLES)
def test_a_step_that_is_not_in_a_table_is_named(name: str) -> None:
    table = TABLES[name]
    state, event = next(iter(table))
    missing = [(before, each) for before in type(state) for each in type(event) if (before, each) not in table]
    for before, each in missing:
        with pytest.raises(KeyError, match=f"{before.name} has no step {each.name}"):
            table[before, each]


def test_no_line_but_those_of_move_changes_a_state() -> None:
    found: list[str] = []
    for path in SOURCE.rglob("*.py"):
        if path.relative_to(SOURCE).as_posix() in KERNEL_BATCHES:
            continue
        for function in ast.walk(ast.parse(path.read_text())):
            if isinstance(function, ast.FunctionDef) and function.name not in ("move", "__init__"):
                found += [f"{path.relative_to(SOURCE)}:{line}" for line in _state_set(function)]
    assert found == []


def _state_set(function: ast.FunctionDef) -> list[int]:
    """Lines that give something another `.state`."""
    lines = []
    for node in ast.walk(function):
        targets = (
            node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AugAssign) else []
        )
        for target in targets:
            parts = target.elts if isinstance(target, ast.Tuple) else [target]
            lines += [node.lineno for part in parts if isinstance(part, ast.Attribute) and part.attr == "state"]
    return lines
