"""The rooms of lmcache_core: dependencies point one way, and importing the package is light."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import lmcache_core

SOURCE = Path(lmcache_core.__file__).parent
# Each room may import itself and those in the lines above it.
ORDER = [
    {"limits", "errors", "clock", "trust"},
    {"native"},
    {"kernel"},
    {"pool", "tokens"},
    {"protocol", "policies", "serde"},
    {"tiers"},
    {"plugins"},
    {"settings"},
    {"server", "client"},
    {"testing", "cli"},
]
LEVEL = {room: level for level, rooms in enumerate(ORDER) for room in rooms}
# The plugins' names are needed to write a plugin, before anything is built.
LIGHT = {"plugins.components", "plugins.hookspecs"}


def imports(path: Path) -> set[str]:
    """Modules of ours that a file imports when it runs (not only for type checkers)."""
    tree = ast.parse(path.read_text())
    skipped = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
        for inner in ast.walk(node)
    }
    found: set[str] = set()
    for node in ast.walk(tree):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("lmcache_core."):
            found.add(node.module.removeprefix("lmcache_core."))
        elif isinstance(node, ast.Import):
            found |= {each.name.removeprefix("lmcache_core.") for each in node.names if "lmcache_core." in each.name}
    return found


@pytest.mark.parametrize("room", [room for room in LEVEL if (SOURCE / room).is_dir()])
def test_a_room_imports_only_what_stands_below_it(room: str) -> None:
    for path in (SOURCE / room).rglob("*.py"):
        for module in imports(path) - LIGHT:
            target = module.split(".")[0]
            below = LEVEL[target] < LEVEL[room] or target == room
            same_level = LEVEL[target] == LEVEL[room]
            assert below or same_level, f"{path.relative_to(SOURCE)} imports {module}"


def test_importing_the_package_loads_nothing_heavy() -> None:
    code = (
        "import sys, lmcache_core\n"
        "heavy = {'torch', 'pydantic', 'pydantic_settings', 'zmq', 'numpy', 'msgspec', 'xxhash', 'rich'}\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_kernel_has_no_clock_no_thread_and_no_input() -> None:
    forbidden = {"time", "threading", "socket", "os", "logging", "random", "secrets", "asyncio", "select", "mmap"}
    for path in (SOURCE / "kernel").rglob("*.py"):
        tree = ast.parse(path.read_text())
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                assert not {each.name.split(".")[0] for each in node.names} & forbidden, path
            elif isinstance(node, ast.ImportFrom):
                assert (node.module or "").split(".")[0] not in forbidden, path
