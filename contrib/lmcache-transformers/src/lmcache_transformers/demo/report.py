"""What the demo found: a table and a list of claims for people, one JSON object for machines."""

from __future__ import annotations

import json
import sys
import textwrap
import time
from dataclasses import asdict, dataclass
from typing import Any

from lmcache_core.cli.table import print_table

STEPS = 11  # that a complete demo announces
MODELS = {
    "smollm2": "SmolLM2-135M-Instruct",
    "random": "a Llama with random weights",
    "none": "attention in numpy",
}
WIDTH = 78  # of the answers: any terminal has as much


@dataclass(frozen=True)
class Row:
    """One step. Times are seconds to the first token: `cold_s` without a cache, `warm_s` with it; None where
    nothing was answered."""

    step: int
    run: str
    source: str  # the origin of the prefix: computed, pool, disk, or nowhere
    tokens_prompt: int
    tokens_reused: int
    cold_s: float | None
    warm_s: float | None
    moved: str  # stored, retrieved, or discarded with its writer
    bytes_moved: int
    move_s: float | None  # all of store, or all of load: keys, lookup, waiting for the disk, copies; a part of warm_s
    equal: bool | None  # greedy output equals the uncached run's, token by token
    question: str = ""
    answer: str = ""  # in words, from a trained model; else token by token

    @property
    def gb_per_s(self) -> float | None:
        return self.bytes_moved / self.move_s / 1e9 if self.move_s else None


@dataclass(frozen=True)
class Check:
    """One thing that had to hold."""

    claim: str
    held: bool
    seen: str = ""


class Report:
    """Collects rows and checks, and shows the progress on standard error. `model`: smollm2, random, or none."""

    def __init__(self, *, as_json: bool, model: str = "random") -> None:
        self._as_json = as_json
        self._model = model
        self._began_s = time.monotonic()
        self._steps = 0
        self.rows: list[Row] = []
        self.checks: list[Check] = []
        self.facts: dict[str, float] = {}  # seconds, by what they were needed for; names end in _s
        self.error = ""
        self._finished = False

    @property
    def ok(self) -> bool:
        """Whether every step was done, every answer was equal and every check held."""
        return (
            self._finished
            and not self.error
            and bool(self.rows)
            and all(row.equal is not False for row in self.rows)
            and all(check.held for check in self.checks)
        )

    def step(self, label: str) -> None:
        """Announce the next of the demo's `STEPS`."""
        self._steps += 1
        if not self._as_json:
            sys.stderr.write(f"demo [{self._steps:2} of {STEPS}, {time.monotonic() - self._began_s:3.0f} s] {label}\n")
            sys.stderr.flush()

    def row(self, row: Row) -> None:
        self.rows.append(row)

    def check(self, claim: str, held: bool, seen: str = "") -> None:
        self.checks.append(Check(claim, held, seen))

    def finish(self) -> None:
        """All steps were done."""
        self._finished = True

    def fail(self, message: str) -> None:
        self.error = message

    def as_object(self) -> dict[str, Any]:
        rows = [asdict(row) | {"gb_per_s": row.gb_per_s} for row in self.rows]
        found: dict[str, Any] = {"demo": "prefix reuse", "model": self._model, "ok": self.ok, "rows": rows}
        found["checks"] = [asdict(check) for check in self.checks]
        found["facts"] = self.facts
        if self.error:
            found["error"] = self.error
        return found

    def print(self) -> None:
        """The JSON object, or the table, the claims and the verdict, on standard output."""
        if self._as_json:
            sys.stdout.write(json.dumps(self.as_object()) + "\n")
            return
        answered = [row for row in self.rows if row.cold_s is not None]
        print_table(
            ("run", "prefix from", "tokens reused", "cold", "warm", "equal"),
            [_cells(row) for row in answered],
            title=f"Seconds to the first token, {MODELS[self._model]} (cold: nothing reused)",
            right=(2, 3, 4),
        )
        if self._model == "smollm2":
            for row in answered:
                sys.stdout.write(_table_line(row))
        for check in self.checks:
            seen = f" ({check.seen})" if check.seen else ""
            sys.stdout.write(f"{'held  ' if check.held else 'BROKEN'}  {check.claim}{seen}\n")
        for name, seconds in self.facts.items():
            sys.stdout.write(f"{name.removesuffix('_s').replace('_', ' ')}: {seconds:.3f} s\n")
        if self.error:
            sys.stdout.write(f"error: {self.error}\n")
        sys.stdout.write(f"ok: {'yes' if self.ok else 'no'}\n")


def _cells(row: Row) -> tuple[str, ...]:
    return (
        row.run,
        row.source,
        f"{row.tokens_reused} of {row.tokens_prompt}",
        _figure(row.cold_s),
        _figure(row.warm_s),
        {True: "yes", False: "NO", None: ""}[row.equal],
    )


def _table_line(row: Row) -> str:
    """The question and the answer, within any terminal's width."""
    head = f"{row.question} ({row.run}, prefix from: {row.source})"
    return f"{head}\n{textwrap.fill(row.answer, WIDTH, initial_indent='    ', subsequent_indent='    ')}\n"


def _figure(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"
