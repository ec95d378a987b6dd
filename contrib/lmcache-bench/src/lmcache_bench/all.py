"""Runs all benches several times and writes the results as one page to share. Each bench runs in a separate process.
Each round runs all of them before any runs again, so that a few minutes of other work show up as spread, not as one
slow bench.
"""

from __future__ import annotations

import json
import subprocess
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from lmcache_bench.peer import PEERS, tell
from lmcache_bench.peer.environment import lmcache_python
from lmcache_core.cli.bench.harness import BenchResult
from lmcache_core.errors import UsageError

if TYPE_CHECKING:
    from lmcache_core.cli.bench.harness import Bench

# An engine needs vLLM or transformers, and more time than all the others together; a peer has to be installed first.
# `peer-tier` and `transfer` need packages that `lmcache-bench` does not, and the first a redis-server.
NOT_BY_DEFAULT = ("all", "backing", "engine", "gpu", "hints", "peer", "peer-tier", "transfer")
TIMEOUT_S = 1800.0  # for one bench


@dataclass(frozen=True)
class Figure:
    """One figure of a bench, over all rounds. `spread`: the lowest and highest of what is compared, the ratio if there
    is a floor, else the value."""

    bench: str
    name: str
    unit: str
    value: float
    floor: float | None
    ratio: float | None
    target: float | None
    met: bool | None
    doubt: str
    spread: tuple[float, float]
    rounds: int


def add_options(parser: ArgumentParser) -> None:
    """The bench's own options."""
    parser.add_argument("--report", type=Path, metavar="DIR", required=True, help="where the page and the figures go")
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="how often each runs (default: %(default)s)")
    parser.add_argument(
        "--benches",
        nargs="+",
        metavar="NAME",
        help="these, also of other packages (default: all of this one but engine and peer)",
    )
    parser.add_argument(
        "--peer",
        choices=PEERS,
        help="run bench peer, too: store, lookup and retrieve beside it, in an environment of its own",
    )


def run(options: Namespace, bench: Bench) -> None:
    """Run them, write DIR/index.html, report.md, a picture for each bench, and figures.json. Raises `UsageError`."""
    if options.rounds < 1:
        raise UsageError(f"--rounds {options.rounds}: each bench has to run once at least")
    if options.benches and "all" in options.benches:
        raise UsageError("--benches all: that is this bench itself; leave --benches out")
    from lmcache_bench.plugin import BENCHES
    from lmcache_bench.report import write_report

    names = options.benches or [name for name in BENCHES if name not in NOT_BY_DEFAULT]
    if options.peer:
        lmcache_python(tell)  # fail before the others have run for hours
        names = [*names, *({"peer"} - {*names})]
    options.report.mkdir(parents=True, exist_ok=True)
    found: dict[str, list[list[dict[str, Any]]]] = {name: [] for name in names}
    failed: dict[str, str] = {}
    machine: dict[str, Any] = {}
    bench.steps(options.rounds * len(names))
    for number in range(1, options.rounds + 1):
        for name in names:
            bench.step(f"{name}, round {number} of {options.rounds}")
            if name not in failed:
                outcome = _run_one(name, quick=bench.quick)
                if isinstance(outcome, str):
                    failed[name] = outcome
                else:
                    machine = outcome["machine"]
                    found[name].append(outcome["results"])
    figures = [figure for name in names if name not in failed for figure in figures_of(name, found[name])]
    bench.results += [
        BenchResult(
            f"{each.bench}: {each.name}",
            each.value,
            each.unit,
            each.floor,
            each.ratio,
            each.target,
            each.met,
            each.doubt,
        )
        for each in figures
    ]
    write_report(options.report, figures, failed, machine, quick=bench.quick)


def _run_one(name: str, *, quick: bool) -> dict[str, Any] | str:
    """Its results, or why there are none."""
    command = [sys.executable, "-m", "lmcache_core.cli.main", "bench", name, "--json", *(["--quick"] if quick else [])]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        return f"not done within {TIMEOUT_S / 60:.0f} minutes"
    if done.returncode:
        return (done.stderr.strip().splitlines() or [f"ended with status {done.returncode}"])[-1]
    return dict(json.loads(done.stdout))


def figures_of(bench: str, rounds: Sequence[Sequence[dict[str, Any]]]) -> list[Figure]:
    """The median of each figure over all rounds that have it, in the order of the first round; and whether that median
    meets the target."""
    by_name: dict[str, list[dict[str, Any]]] = {}
    for results in rounds:
        for result in results:
            by_name.setdefault(result["name"], []).append(result)
    figures = []
    for name, same in by_name.items():
        first = same[0]
        floors = [each["floor"] for each in same if each["floor"]]
        ratios = [each["ratio"] for each in same if each["ratio"] is not None]
        compared = ratios or [each["value"] for each in same]
        judged = [each["met"] for each in same if each["met"] is not None]
        figures.append(
            Figure(
                bench,
                name,
                first["unit"],
                median(each["value"] for each in same),
                median(floors) if floors else None,
                median(ratios) if ratios else None,
                first["target"],
                None if not judged else judged.count(True) * 2 > len(judged),
                next((each["doubt"] for each in same if each.get("doubt")), ""),
                (min(compared), max(compared)),
                len(same),
            )
        )
    return figures
