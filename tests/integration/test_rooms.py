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
    {
        "limits",
        "errors",
        "clock",
        "cpu_share",
        "descriptors",
        "files",
        "guard",
        "threads",
        "paths",
        "tensors",
        "textfiles",
        "trust",
        "transitions",
        "zmq_door",
    },
    {"native", "state_thread"},
    {"buffers"},
    {"kernel"},
    {"pool"},
    {"devices"},
    {"tokens"},
    {"protocol", "policies", "serde"},
    {"tiers"},
    {"plugins"},
    {"settings"},
    {"observe"},
    {"client"},
    {"server"},
    {"cli"},
    {"__main__"},
]
# The same within `tiers`: the doors, then what one object is, one tier, and what runs between the pool and all tiers.
TIERS_ORDER = [
    {"contract", "l1"},
    {"budget", "streams", "answers"},
    {"retry", "blocking"},
    {"object"},
    {"observer"},
    {"tier"},
    {"flow"},
    {"tiering"},
    {"drills"},
]
# And within `client`: its values, what links to a server, what is found and why not, what moves bytes, its public face.
CLIENT_ORDER = [
    {"engine_blocks", "promises", "tracing"},
    {"results"},
    {"link"},
    {"find", "why"},
    {"move"},
    {"client"},
    {"asynchronous"},
]
# And within `server`: what plugins implement, the process, its peers, the L1, what works on it, and all of it together.
SERVER_ORDER = [
    {"companion", "helper", "operation"},
    {"process"},
    {"peers"},
    {"pool"},
    {"tiers", "waiting", "extensions"},
    {"server_parts"},
    {"build", "dispatch", "status"},
    {"server"},
]
INSIDE = {
    room: {each: level for level, rooms in enumerate(order) for each in rooms}
    for room, order in (("client", CLIENT_ORDER), ("server", SERVER_ORDER), ("tiers", TIERS_ORDER))
}
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


@pytest.mark.parametrize(("room", "levels"), INSIDE.items(), ids=INSIDE)
def test_within_a_room_each_part_imports_only_what_stands_below_it(room: str, levels: dict[str, int]) -> None:
    for path in (SOURCE / room).rglob("*.py"):
        part = path.relative_to(SOURCE / room).with_suffix("").parts[0]
        if part == "__init__":
            continue
        for module in imports(path):
            first, _, rest = module.partition(".")
            target = rest.split(".")[0]
            below = first != room or target == part or levels[target] < levels[part]
            assert below, f"{path.relative_to(SOURCE)} imports {module}"


@pytest.mark.parametrize("room", ["", *INSIDE])
def test_the_page_of_rooms_names_them_all_in_this_order(room: str) -> None:
    page, levels = (Path(__file__).parents[2] / "docs/internals/rooms.md").read_text(), INSIDE.get(room, LEVEL)
    section = page.partition(f"\nWithin `{room}/`")[2] if room else page
    table = re.findall(r"^\| (`[^|]*`) \|", re.split(r"\nWithin |\n## ", section)[0], re.MULTILINE)
    rows = [[re.sub(r"(\.py|/)$", "", name) for name in re.findall(r"`([^`]*)`", row)] for row in table]
    assert sorted(name for row in rows for name in row) == sorted(levels)
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


def test_core_imports_no_other_package_of_ours() -> None:
    foreign = {
        f"{path.relative_to(SOURCE)}: {name}"
        for path in SOURCE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in ([each.name for each in node.names] if isinstance(node, ast.Import) else [node.module or ""])
        if name.startswith("lmcache_") and name.partition(".")[0] != "lmcache_core"
    }
    assert foreign == set()


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
