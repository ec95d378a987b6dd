"""Mutants: small faults, put into a copy of the source one at a time. The tests of their module must notice each; for
our adapters that is the conformance kit, and nothing else.

    python tests/mutants/run.py [--only MODULE] [--lines FIRST-LAST] [--sample N] [--seed N] [--jobs N] [--list] [--new]

A mutant negates a condition, drops a statement, moves a comparison by one, swaps `and` and `or`, or adds one to a
number. Each runs against those quick tests of its module that run the changed statement, the shortest first, until one
fails, with a time limit. What no test notices is printed, as it is and as it was made, with the reason that
`survivors.toml` gives. Exit status 0; 1 where the tests fail without any mutant.
"""

from __future__ import annotations

import argparse
import ast
import copy
import multiprocessing
import os
import random
import shutil
import sys
import tempfile
import time
import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parent))
import reach

SURVIVORS = Path(__file__).with_name("survivors.toml")
ROOT = Path(__file__).resolve().parents[2]
LIMIT_TIMES, LIMIT_S_MIN = 6.0, 30.0  # of what the tests take without a mutant: more is a loop, and noticed
# module → the quick tests that are about it, those that notice most first
TARGETS: dict[str, Sequence[str]] = {
    "tiers/tier/order.py": ["tiers/test_order.py"],
    "tiers/flow/loads.py": ["tiers/test_tiering.py", "tiers/test_faults.py", "tiers/test_disorder.py"],
    "tiers/tier/reclaim.py": ["tiers/test_capacity.py", "tiers/test_faults.py", "tiers/test_media.py"],
    "kernel/residents.py": ["kernel/test_leases.py", "kernel/test_eviction.py", "kernel/test_faults.py",
                            "kernel/test_clearing.py"],
    "kernel/leases.py": ["kernel/test_leases.py"],
    "client/link/occupancy.py": ["client/test_life.py", "client/test_fence.py", "client/test_loose_ends.py"],
    "client/move/leases.py": ["client/test_optimistic.py", "client/test_life.py", "client/test_fence.py",
                         "client/test_promises.py", "client/test_hits.py", "client/test_loose_ends.py"],
    "server/peers/session_table.py": ["server/test_sessions.py", "server/test_session_states.py",
                                      "server/test_carriers.py", "server/test_shares.py"],
    "server/peers/shares.py": ["server/test_shares.py"],
}  # fmt: skip
# adapter → its package, and the classes that put it under the kit
_FS = "tests/conformance/test_adapters.py"
_REDIS, _S3 = "plugins/lmcache-redis/tests/test_contract.py", "plugins/lmcache-s3/tests/test_contract.py"
ADAPTERS: dict[str, tuple[str, Sequence[str]]] = {
    "fs/adapter.py": ("lmcache-fs", [f"{_FS}::TestFs", f"{_FS}::TestFsDirect"]),
    "redis/adapter.py": (
        "lmcache-redis",
        [f"{_REDIS}::{each}" for each in ("TestDirect", "TestPlain", "TestUnixSocket")],
    ),
    "s3/adapter.py": ("lmcache-s3", [f"{_S3}::TestDirect", f"{_S3}::TestPlain"]),
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
        return [str(ROOT / test) for test in ADAPTERS[module][1]]
    return [str(ROOT / "core" / "tests" / test) for test in TARGETS[module]]


class Mutant(NamedTuple):
    """`name` holds as long as the code of its function does: `function: before → after`. `statement`: the line of what
    is changed; None: it runs at the import."""

    module: str
    line: int
    name: str
    statement: int | None
    source: str

    def __str__(self) -> str:
        return f"{self.module}:{self.line}: {self.name}"


def mutants_of(module: str) -> list[Mutant]:
    """Every mutant of a module, in the order of its lines."""
    source, place = source_of(module)
    text = (source / place).read_text()
    tree = ast.parse(text)
    found = []
    names: Counter[str] = Counter()
    for path, node in _walk(tree, ()):
        for changed in _changes(node):
            other = copy.deepcopy(tree)
            _put(other, path, changed)
            ast.fix_missing_locations(other)
            function, statement = _place(tree, path)
            name = f"{function}: {_shown(node)} → {_shown(changed)}"
            names[name] += 1
            name += f" ({names[name]})" if names[name] > 1 else ""
            found.append(Mutant(module, node.lineno, name, statement, ast.unparse(other)))  # type: ignore[attr-defined]
    return sorted(found, key=lambda mutant: mutant.line)


def _place(tree: ast.AST, path: Path_) -> tuple[str, int | None]:
    """The function that something stands in ("": none), and the line of the statement there."""
    function, statement, node = "", None, tree
    for field, at in path:
        value = getattr(node, field)
        node = value if at < 0 else value[at]
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            function, statement = node.name, None
        elif isinstance(node, ast.stmt) and function:
            statement = node.lineno
    return function, statement


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


# What every run imports, once for all of them: it takes longer than most tests.
PRELOADED = ["hypothesis", "hypothesis.stateful", "msgspec", "pluggy", "pydantic", "pytest", "xxhash", "zmq"]
PRELOADED_FOR_ADAPTERS = ["lmcache_testing", "lmcache_testing.adapter", "lmcache_core.tiers.tier.parallel"]


def _run_tests(path: list[str], more: dict[str, str], arguments: list[str]) -> None:
    """In a process of its own, and a session of its own."""
    os.setsid()
    os.chdir(ROOT)
    nowhere = os.open(os.devnull, os.O_RDWR)
    for number in range(3):
        os.dup2(nowhere, number)
    inherited = os.pathsep.join([*path, *filter(None, [os.environ.get("PYTHONPATH")])])
    os.environ.update({**more, "PYTHONPATH": inherited, "PYTHONDONTWRITEBYTECODE": "1"})
    sys.dont_write_bytecode = True
    sys.path[:0] = path
    import pytest

    os._exit(int(pytest.main(arguments)))


class Bench:
    """Copies of the sources, in which one mutant after the other is put."""

    def __init__(self, folder: Path, modules: Sequence[str]) -> None:
        self._folder = folder
        ignored = shutil.ignore_patterns("__pycache__", "*.egg-info", "*.c", "*.h")
        for source in {source_of(module)[0] for module in modules}:
            shutil.copytree(source, self._copy(source), ignore=ignored)

    def _copy(self, source: Path) -> Path:
        return self._folder / source.parent.name

    def reach(self, module: str) -> dict[str, reach.Reach]:
        """What each test of a module runs of it. Empty: they fail without any mutant."""
        report = self._folder / "reach.json"
        source, path = source_of(module)
        said = reach.saying((source / path).read_text())
        sound = self._with(module, said, tests_of(module), {reach.VARIABLE: str(report)}, "-p", "reach")
        return reach.read(report) if sound else {}

    def passes(
        self, module: str, tests: Sequence[str], limit_s: float | None = None, more: Mapping[str, str] | None = None,
        *options: str
    ) -> bool:  # fmt: skip
        """Whether these tests find nothing wrong."""
        path = [str(self._copy(source_of(module)[0])), str(Path(__file__).parent)]
        preloaded = "ignore::pytest.PytestAssertRewriteWarning"  # what is imported already is not rewritten
        arguments = ["-q", "-p", "no:cacheprovider", "-W", preloaded, "-m", "not slow", *options, *tests]
        context = multiprocessing.get_context("forkserver")
        process = context.Process(target=_run_tests, args=(path, dict(more or {}), arguments))
        process.start()
        process.join(limit_s)
        if process.exitcode is None and process.pid is not None:
            os.killpg(process.pid, 9)  # it and what it started: nothing else is in its session
            process.join()
        return process.exitcode == 0

    def survives(self, mutant: Mutant, reached: Mapping[str, reach.Reach]) -> bool:
        """Whether no test that runs the changed statement fails."""
        chosen = [test for test, each in reached.items() if each.may_notice(mutant.statement)]
        chosen.sort(key=lambda test: reached[test].seconds)
        if not chosen:
            return True
        limit_s = max(LIMIT_S_MIN, LIMIT_TIMES * sum(reached[test].seconds for test in chosen))
        return self._with(mutant.module, mutant.source, chosen, {}, "-x", limit_s=limit_s)

    def _with(
        self, module: str, text: str, tests: Sequence[str], more: Mapping[str, str], *options: str,
        limit_s: float | None = None
    ) -> bool:  # fmt: skip
        source, path = source_of(module)
        place = self._copy(source) / path
        sound = place.read_text()
        place.write_text(text)
        try:
            return self.passes(module, tests, limit_s, more, *options)
        finally:
            place.write_text(sound)


def explained(module: str) -> dict[str, tuple[str, str]]:
    """Name of a mutant that is known to survive → its group, and the reason."""
    groups = tomllib.loads(SURVIVORS.read_text()).get(module, {})
    return {name: (group, why) for group, names in groups.items() for name, why in names.items()}


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
    parser.add_argument("--new", action="store_true", help="only what survivors.toml does not name")
    options = parser.parse_args()
    first, last = map(int, options.lines.split("-")) if options.lines else (0, sys.maxsize)
    modules = options.only or list(TARGETS)
    core = any(module in TARGETS for module in modules)
    multiprocessing.set_forkserver_preload([*PRELOADED, *([] if core else PRELOADED_FOR_ADAPTERS)])
    with tempfile.TemporaryDirectory() as folder:
        benches: SimpleQueue[Bench] = SimpleQueue()
        for number in range(options.jobs):
            benches.put(Bench(Path(folder) / str(number), modules))
        for module in modules:
            known = explained(module)
            chosen = [mutant for mutant in mutants_of(module) if first <= mutant.line <= last]
            if options.new:
                chosen = [mutant for mutant in chosen if mutant.name not in known]
            if options.sample is not None and options.sample < len(chosen):
                chosen = random.Random(options.seed).sample(chosen, options.sample)
            if options.list:
                print("\n".join(map(str, chosen)))
            elif not _run(module, chosen, known, benches, options.jobs):
                return 1
    return 0


def _run(
    module: str, chosen: Sequence[Mutant], known: Mapping[str, tuple[str, str]], benches: SimpleQueue[Bench], jobs: int
) -> bool:
    bench = benches.get()
    reached = bench.reach(module)
    benches.put(bench)
    if not reached:
        print(f"{module}: its tests fail without any mutant", file=sys.stderr)
        return False

    def survives(mutant: Mutant) -> str:
        """The group of a survivor; "": it was noticed."""
        bench, began_s = benches.get(), time.monotonic()
        try:
            survived = bench.survives(mutant, reached)
        finally:
            benches.put(bench)
        group, why = known.get(mutant.name, ("nobody has said why", "")) if survived else ("", "")
        took_s = time.monotonic() - began_s
        print(f"{f'survives, {group}' if survived else 'noticed'} ({took_s:.0f} s): {mutant}  {why}", flush=True)
        return group

    with ThreadPoolExecutor(jobs) as pool:
        groups = Counter(pool.map(survives, chosen))
    noticed, survivors = groups.pop("", 0), sum(groups.values())
    told = ", ".join(f"{count} {group}" for group, count in groups.items()) or "none"
    print(f"{module}: {len(chosen)} mutants, {noticed} noticed, {survivors} survive ({told})", flush=True)
    return True


if __name__ == "__main__":
    sys.exit(main())
