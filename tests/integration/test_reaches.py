"""Tests go through doors: none looks at a private member of the product, but for those that say here why.

What counts: an attribute with an underscore of anything but `self`, `cls` and `super()`; the same in a script that a
test has a child process run, or named in a string for `setattr`; and a private name that is imported. What a file
itself defines is its own (doubles have private members, too), and so is what other libraries and modules in C are
called.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ["tests", "core/tests", "plugins/*/tests", "contrib/*/tests", "contrib/examples/*/tests"]
PRIVATE = re.compile(r"_[a-z]")
IN_SCRIPTS = re.compile(r"(?<![\w.])(?!(?:self|cls|os|sys)\b)[\w.()]*[\w)]\.(_[a-z]\w*)")
# Of Python itself, and the names of our modules in C.
NOBODYS = {"_asdict", "_exit", "_fd", "_fields", "_getframe", "_native", "_replace", "_resource_tracker", "_table"}
BY_NAME = {"delattr", "getattr", "hasattr", "setattr"}

BETWEEN = "has something happen between two lines of it: an answer, another thread, an interrupt"
MUTANT = "takes a promise out of the code, to show that the simulation misses it"
BY_HAND = "turns the loop of a server by hand"
# File → how many, and why. A file that needs fewer is to say so.
LEFT = {
    "contrib/examples/lmcache-etcd/tests/test_in_a_server.py": (1, BETWEEN),
    "contrib/lmcache-hosts/tests/hosts/test_mlperf.py": (
        1,
        "moves an entry down as a full tier does",
    ),
    "core/tests/client/test_odd_buffers.py": (3, "makes tensors of kinds that torch makes for itself"),
    "core/tests/tiers/test_verdicts.py": (1, BETWEEN),
    "plugins/lmcache-kv-events/tests/test_kv_events.py": (3, "counts what is kept, in memory"),
    "plugins/lmcache-block/tests/test_adapter.py": (1, "counts what is kept, in memory"),
    "plugins/lmcache-fs/tests/test_place.py": (3, BETWEEN),
    "contrib/lmcache-l0/tests/test_tiered.py": (3, BETWEEN),
    "core/tests/client/test_channel.py": (5, BETWEEN),
    "core/tests/client/test_loose_ends.py": (6, BETWEEN),
    "core/tests/client/test_optimistic.py": (2, BETWEEN),
    "core/tests/client/test_pages.py": (9, BETWEEN),
    "core/tests/protocol/desk.py": (3, BY_HAND),
    "core/tests/protocol/test_memory_ledger.py": (2, BY_HAND),
    "core/tests/protocol/test_zmtp.py": (1, "counts what is kept, in memory"),
    "core/tests/test_zmq_door.py": (1, "leaves few descriptors to all doors together"),
    "core/tests/protocol/test_undo.py": (4, BY_HAND + ", and counts all the books of one anew"),
    "core/tests/kernel/test_adoption.py": (1, BETWEEN),
    "core/tests/server/test_names.py": (1, BETWEEN),
    "core/tests/server/test_verifying.py": (4, BETWEEN),
    "core/tests/test_state_thread.py": (2, BETWEEN),
    "core/tests/tiers/test_write_back.py": (2, BETWEEN),
    "core/tests/tiers/test_load_states.py": (2, BETWEEN),
    "tests/simulation/run.py": (1, BY_HAND),
    "tests/simulation/sim_faults.py": (7, MUTANT),
    "tests/simulation/sim_isolation.py": (1, "looks at a thousand shards at each step: the public way copies them"),
    "tests/simulation/sim_nodes.py": (10, BY_HAND + ", and ends it as a kill would, in this process"),
    "tests/simulation/sim_tier.py": (8, BY_HAND + ", and looks at its lanes after each"),
    "tests/simulation/sim_tier_faults.py": (2, MUTANT),
}


def own_names(tree: ast.AST) -> set[str]:
    """What the file defines: functions, variables, and what its classes call their attributes."""
    own: set[str] = set()
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                own.add(name)
            case ast.Name(id=name, ctx=ast.Store()):
                own.add(name)
            case ast.Attribute(value=ast.Name(id="self" | "cls"), attr=name, ctx=ast.Store()):
                own.add(name)
    return own


def reaches(source: str) -> Iterator[tuple[int, str]]:
    """Line and name of each private member of something else."""
    tree = ast.parse(source)
    found = [(line, name) for line, name in _members(tree) if PRIVATE.match(name) and name not in NOBODYS]
    own = own_names(tree) if found else set()
    yield from ((line, name) for line, name in found if name not in own)


def _members(tree: ast.AST) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        match node:
            case (
                ast.Attribute(value=ast.Name(id="self" | "cls"))
                | ast.Attribute(value=ast.Call(func=ast.Name(id="super")))
            ):
                pass
            case ast.Attribute(attr=name):
                yield node.lineno, name
            case ast.Call(
                func=ast.Name(id=how) | ast.Attribute(attr=how), args=[_, ast.Constant(value=str(name)), *_]
            ) if how in BY_NAME:
                yield node.lineno, name
            case ast.ImportFrom(names=names):
                yield from ((node.lineno, each.name) for each in names)
            case ast.Constant(value=str(text)) if "._" in text:
                yield from ((node.lineno, name) for name in IN_SCRIPTS.findall(text))


def test_no_test_reaches_into_what_it_tests_but_those_that_say_why() -> None:
    found: dict[str, list[str]] = {}
    for folder in FOLDERS:
        for path in (each for root in ROOT.glob(folder) for each in root.rglob("*.py")):
            where = str(path.relative_to(ROOT))
            if reached := [f"{where}:{line} {name}" for line, name in reaches(path.read_text())]:
                found[where] = reached
    found.pop(str(Path(__file__).relative_to(ROOT)))  # examples
    beyond = [
        each for where, reached in found.items() if len(reached) > LEFT.get(where, (0, ""))[0] for each in reached
    ]
    assert not beyond, "test through the door (status, the medium, another process), or give the member a public face"
    assert {where: len(reached) for where, reached in found.items()} == {at: count for at, (count, _) in LEFT.items()}


@pytest.mark.parametrize(
    "source",
    [
        "client._link",
        "server.parts[0]._loop.run()",
        "make()._hidden = 1",
        "patch.setattr(Server, '_close', None)",
        "getattr(server, '_close')",
        "from lmcache_core.client.link.reconnecting import _all_links",
        "run('client.links._link.close()')",
    ],
)
def test_a_reach_is_found_however_it_is_written(source: str) -> None:
    assert len(list(reaches(source))) == 1


@pytest.mark.parametrize(
    "source",
    [
        "self._own",
        "super()._own()",
        "class Double:\n    def _own(self): ...\ndouble._own()",
        "row._replace(a=1)",
        "from lmcache_core import _native",
        "'a sentence. _and_more_'",
    ],
)
def test_what_is_a_files_own_is_no_reach(source: str) -> None:
    assert not list(reaches(source))
