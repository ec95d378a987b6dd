"""The rooms of lmcache_core: dependencies point one way, and importing the package is light."""

from __future__ import annotations

import ast
import itertools
import re
import subprocess
import sys
from pathlib import Path

import pytest

import lmcache_core

SOURCE = Path(lmcache_core.__file__).parent
# Each room may import itself and those in the lines above it. docs/internals/rooms.md says what is in them.
ORDER = [
    {"limits", "errors", "clock", "cpu_share", "descriptors", "files", "trust", "transitions"},
    {"native"},
    {"kernel"},
    {"pool"},
    {"tokens"},
    {"protocol", "policies", "serde"},
    {"tiers"},
    {"plugins"},
    {"settings"},
    {"observe"},
    {"client"},
    {"server"},
    {"testing"},
    {"cli"},
]
# The same within `tiers`: the doors, then what one object is, one tier, and what runs between the pool and all tiers.
TIERS_ORDER = [
    {"contract", "l1", "moved"},
    {"budget", "streams", "retry", "format", "transfer", "parallel"},  # the last three are former names
    {"object"},
    {"observer"},
    {"tier"},
    {"flow"},
    {"tiering"},
    {"drills"},
]
TIERS_LEVEL = {room: level for level, rooms in enumerate(TIERS_ORDER) for room in rooms}
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
            assert target == room or LEVEL[target] < LEVEL[room], f"{path.relative_to(SOURCE)} imports {module}"


def test_within_tiers_each_room_imports_only_what_stands_below_it() -> None:
    tiers = SOURCE / "tiers"
    for path in tiers.rglob("*.py"):
        room = path.relative_to(tiers).with_suffix("").parts[0]
        if room == "__init__":
            continue
        for module in imports(path):
            first, _, rest = module.partition(".")
            target = rest.split(".")[0]
            below = first != "tiers" or target == room or TIERS_LEVEL[target] < TIERS_LEVEL[room]
            assert below, f"tiers/{path.relative_to(tiers)} imports {module}"


@pytest.mark.parametrize(
    ("section", "levels", "unnamed"),
    [(0, LEVEL, set()), (1, TIERS_LEVEL, {"moved", "format", "transfer", "parallel"})],
    ids=["all", "tiers"],
)
def test_the_page_of_rooms_names_them_all_in_this_order(
    section: int, levels: dict[str, int], unnamed: set[str]
) -> None:
    page = (Path(__file__).parents[2] / "docs/internals/rooms.md").read_text().partition("\n## ")[0]
    table = re.findall(r"^\| (`[^|]*`) \|", page.split("\nWithin `tiers/`")[section], re.MULTILINE)
    rows = [[re.sub(r"(\.py|/)$", "", name) for name in re.findall(r"`([^`]*)`", row)] for row in table]
    assert sorted(name for row in rows for name in row) == sorted(set(levels) - unnamed)
    found = [[levels[name] for name in row] for row in rows]
    assert [max(row) for row in found] == sorted(max(row) for row in found)
    assert all(max(above) <= min(below) for above, below in itertools.pairwise(found))


def test_no_two_modules_import_each_other() -> None:
    modules = {".".join(path.relative_to(SOURCE).with_suffix("").parts): path for path in SOURCE.rglob("*.py")}
    modules = {name.removesuffix(".__init__"): path for name, path in modules.items()}
    left = {name: imports(path) & set(modules) for name, path in modules.items()}
    while ready := [name for name, needs in left.items() if not needs & set(left)]:
        for name in ready:
            del left[name]
    assert not left, "each of these waits for another of them"


def test_no_class_name_stands_for_two_things() -> None:
    named: dict[str, list[str]] = {}
    for path in sorted(SOURCE.rglob("*.py")):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef):
                named.setdefault(node.name, []).append(str(path.relative_to(SOURCE)))
    assert not {name: paths for name, paths in named.items() if len(paths) > 1}


def test_importing_the_package_loads_nothing_heavy() -> None:
    code = (
        "import sys, lmcache_core\n"
        "heavy = {'torch', 'pydantic', 'zmq', 'numpy', 'msgspec', 'xxhash', 'rich'}\n"
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
