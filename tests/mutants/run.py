"""Mutants: small faults, put into a copy of the source one at a time. The tests of their module must notice each; for
our adapters that is the conformance kit, and nothing else.

    python tests/mutants/run.py [--only MODULE] [--lines FIRST-LAST] [--sample N] [--seed N] [--jobs N] [--list]

A mutant negates a condition, drops a statement, moves a comparison by one, swaps `and` and `or`, or adds one to a
number. Each runs against the quick tests of its module alone, with a time limit. What no test notices is printed, with
the line as it is and as it was made. Exit status 0; 1 where the tests fail without any mutant.
"""

from __future__ import annotations

import argparse
import ast
import copy
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
LIMIT_TIMES, LIMIT_S_MIN = 6.0, 30.0  # of what the tests take without a mutant: more is a loop, and noticed
# module → the quick tests that are about it, those that notice most first
TARGETS: dict[str, Sequence[str]] = {
    "tiers/order.py": ["tiers/test_order.py"],
    "tiers/loads.py": ["tiers/test_tiering.py", "tiers/test_faults.py", "tiers/test_disorder.py"],
    "tiers/reclaim.py": ["tiers/test_capacity.py", "tiers/test_faults.py", "tiers/test_media.py"],
    "kernel/residents.py": ["kernel/test_leases.py", "kernel/test_eviction.py", "kernel/test_faults.py",
                            "kernel/test_clearing.py"],
    "kernel/leases.py": ["kernel/test_leases.py"],
    "client/occupancy.py": ["client/test_life.py", "client/test_fence.py", "client/test_loose_ends.py"],
    "client/leases.py": ["client/test_optimistic.py", "client/test_life.py", "client/test_fence.py",
                         "client/test_promises.py", "client/test_hits.py", "client/test_loose_ends.py"],
    "server/sessions.py": ["server/test_sessions.py", "server/test_session_states.py", "server/test_carriers.py",
                           "server/test_shares.py"],
    "server/shares.py": ["server/test_shares.py"],
}  # fmt: skip
# adapter → its package, and the class that puts it under the kit
ADAPTERS = {
    "fs/adapter.py": ("lmcache-fs", "tests/conformance/test_adapters.py::TestFs"),
    "redis/adapter.py": ("lmcache-redis", "plugins/lmcache-redis/tests/test_contract.py::TestDirect"),
    "s3/adapter.py": ("lmcache-s3", "plugins/lmcache-s3/tests/test_contract.py::TestDirect"),
}
_MOVED = {ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
          ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In}  # fmt: skip


def source_of(module: str) -> tuple[Path, str]:
    """The folder of sources that a module is in, and its path there."""
    if module in ADAPTERS:
        package = ADAPTERS[module][0]
        return ROOT / "plugins" / package / "src", f"{package.replace('-', '_')}/{module.partition('/')[2]}"
    return ROOT / "core" / "src", f"lmcache_core/{module}"


def tests_of(module: str) -> list[str]:
    """What pytest is to run."""
    if module in ADAPTERS:
        return [str(ROOT / ADAPTERS[module][1])]
    return [str(ROOT / "core" / "tests" / test) for test in TARGETS[module]]


class Mutant(NamedTuple):
    module: str
    line: int
    before: str
    after: str
    source: str

    def __str__(self) -> str:
        return f"{self.module}:{self.line}: `{self.before}` → `{self.after}`"


def mutants_of(module: str) -> list[Mutant]:
    """Every mutant of a module, in the order of its lines."""
    source, place = source_of(module)
    text = (source / place).read_text()
    tree = ast.parse(text)
    found = []
    for path, node in _walk(tree, ()):
        for changed in _changes(node):
            other = copy.deepcopy(tree)
            _put(other, path, changed)
            ast.fix_missing_locations(other)
            shown = [_shown(each) for each in (node, changed)]
            found.append(Mutant(module, node.lineno, shown[0], shown[1], ast.unparse(other)))  # type: ignore[attr-defined]
    return sorted(found, key=lambda mutant: mutant.line)


Path_ = tuple[tuple[str, int], ...]  # field and index (-1: it is no list), from the module down


def _walk(node: ast.AST, path: Path_) -> Iterator[tuple[Path_, ast.AST]]:
    """What runs: no annotations, docstrings, imports or names of slots."""
    if isinstance(node, ast.Import | ast.ImportFrom | ast.AnnAssign):
        return
    yield path, node
    for field, value in ast.iter_fields(node):
        is_call = field == "args" and isinstance(value, list)
        if field in ("annotation", "returns", "decorator_list", "args", "bases") and not is_call:
            continue
        for at, child in enumerate(value if isinstance(value, list) else [value]):
            if isinstance(child, ast.AST):
                yield from _walk(child, (*path, (field, at if isinstance(value, list) else -1)))


def _changes(node: ast.AST) -> Iterator[ast.AST]:
    if isinstance(node, ast.If | ast.While | ast.IfExp):
        changed = copy.deepcopy(node)
        changed.test = ast.UnaryOp(ast.Not(), changed.test)
        yield changed
    if isinstance(node, ast.Compare) and type(node.ops[0]) in _MOVED:
        changed_ = copy.deepcopy(node)
        changed_.ops[0] = _MOVED[type(node.ops[0])]()  # type: ignore[abstract]
        yield changed_
    if isinstance(node, ast.BoolOp):
        swapped = copy.deepcopy(node)
        swapped.op = ast.Or() if isinstance(node.op, ast.And) else ast.And()
        yield swapped
    call = isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)
    held = isinstance(node, ast.Assign) and not isinstance(node.targets[0], ast.Name)
    if call or held or isinstance(node, ast.AugAssign | ast.Delete | ast.Continue | ast.Raise):
        yield ast.Pass(lineno=node.lineno)  # type: ignore[attr-defined]
    if isinstance(node, ast.Constant) and type(node.value) is int:
        yield ast.Constant(node.value + 1, lineno=node.lineno)


def _put(tree: ast.AST, path: Path_, node: ast.AST) -> None:
    for field, at in path[:-1]:
        value = getattr(tree, field)
        tree = value if at < 0 else value[at]
    field, at = path[-1]
    if at < 0:
        setattr(tree, field, node)
    else:
        getattr(tree, field)[at] = node


def _shown(node: ast.AST) -> str:
    """The first line of it, or the condition."""
    return ast.unparse(ast.fix_missing_locations(node)).partition("\n")[0]


class Bench:
    """Copies of the sources, in which one mutant after the other is put."""

    def __init__(self, folder: Path, modules: Sequence[str]) -> None:
        self._folder = folder
        ignored = shutil.ignore_patterns("__pycache__", "*.egg-info", "*.c", "*.h")
        for source in {source_of(module)[0] for module in modules}:
            shutil.copytree(source, self._copy(source), ignore=ignored)

    def _copy(self, source: Path) -> Path:
        return self._folder / source.parent.name

    def passes(self, module: str, limit_s: float | None = None) -> bool:
        """Whether the tests of a module find nothing wrong."""
        path = [str(self._copy(source_of(module)[0])), *filter(None, [os.environ.get("PYTHONPATH")])]
        env = os.environ | {"PYTHONPATH": os.pathsep.join(path), "PYTHONDONTWRITEBYTECODE": "1"}
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-m", "not slow",
                   *tests_of(module)]  # fmt: skip
        process = subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                                   start_new_session=True)  # fmt: skip
        try:
            return process.wait(limit_s) == 0
        except subprocess.TimeoutExpired:
            return False
        finally:
            if process.poll() is None:
                os.killpg(process.pid, 9)  # it and what it started: nothing else is in its session
                process.wait()

    def survives(self, mutant: Mutant, limit_s: float) -> bool:
        source, path = source_of(mutant.module)
        place = self._copy(source) / path
        sound = place.read_text()
        place.write_text(mutant.source)
        try:
            return self.passes(mutant.module, limit_s)
        finally:
            place.write_text(sound)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument(
        "--only",
        action="append",
        choices=sorted({**TARGETS, **ADAPTERS}),
        metavar="MODULE",
        help="default: all of core; adapters are named: " + ", ".join(ADAPTERS),
    )
    parser.add_argument("--lines", metavar="FIRST-LAST", help="only mutants of these lines")
    parser.add_argument("--sample", type=int, metavar="N", help="so many of each module, by chance")
    parser.add_argument("--seed", type=int, default=0, help="of that chance (default: %(default)s)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="at once (default: %(default)s)")
    parser.add_argument("--list", action="store_true", help="say what they are, and run none")
    options = parser.parse_args()
    first, last = map(int, options.lines.split("-")) if options.lines else (0, sys.maxsize)
    modules = options.only or list(TARGETS)
    with tempfile.TemporaryDirectory() as folder:
        benches: SimpleQueue[Bench] = SimpleQueue()
        for number in range(options.jobs):
            benches.put(Bench(Path(folder) / str(number), modules))
        for module in modules:
            chosen = [mutant for mutant in mutants_of(module) if first <= mutant.line <= last]
            if options.sample is not None and options.sample < len(chosen):
                chosen = random.Random(options.seed).sample(chosen, options.sample)
            if options.list:
                print("\n".join(map(str, chosen)))
            elif not _run(module, chosen, benches, options.jobs):
                return 1
    return 0


def _run(module: str, chosen: Sequence[Mutant], benches: SimpleQueue[Bench], jobs: int) -> bool:
    bench, began_s = benches.get(), time.monotonic()
    sound = bench.passes(module)
    limit_s = max(LIMIT_S_MIN, LIMIT_TIMES * (time.monotonic() - began_s))
    benches.put(bench)
    if not sound:
        print(f"{module}: its tests fail without any mutant", file=sys.stderr)
        return False

    def survives(mutant: Mutant) -> bool:
        bench = benches.get()
        try:
            survived = bench.survives(mutant, limit_s)
        finally:
            benches.put(bench)
        if survived:
            print(f"survives: {mutant}", flush=True)
        return survived

    with ThreadPoolExecutor(jobs) as pool:
        survivors = sum(pool.map(survives, chosen))
    print(f"{module}: {len(chosen)} mutants, {survivors} survive", flush=True)
    return True


if __name__ == "__main__":
    sys.exit(main())
