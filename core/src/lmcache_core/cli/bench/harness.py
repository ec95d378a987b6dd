"""Shared by every bench: results with their floors and targets, progress, the table and the JSON object."""

from __future__ import annotations

import json
import os
import platform
import sys
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

from lmcache_core.cli.table import print_table, rich_or_none


@dataclass(frozen=True)
class BenchResult:
    """One figure. `ratio` is value ÷ floor, both in `unit`; None if there is no floor."""

    name: str
    value: float
    unit: str
    floor: float | None
    ratio: float | None
    target: float | None
    met: bool | None  # None: no target
    doubt: str = ""  # why this run cannot judge the target, which then counts as not met


class Bench:
    """Collects the results of one run and prints them at its end.

    >>> with Bench("demo", as_json=True) as bench:
    ...     bench.record("copy", 9.0, "GB/s", floor=10.0, target=0.8, lower_is_better=False)
    """

    def __init__(self, name: str, *, quick: bool = False, as_json: bool = False) -> None:
        self.name = name
        self.quick = quick
        self.as_json = as_json
        self.results: list[BenchResult] = []
        self._steps_total: int | None = None
        self._steps_done = 0
        self._stack = ExitStack()
        self._progress: Any = None
        self._task: Any = None

    def record(
        self,
        name: str,
        value: float,
        unit: str,
        *,
        floor: float | None = None,
        target: float | None = None,
        lower_is_better: bool = True,
        target_on: Literal["ratio", "value"] | None = None,
        doubt: str = "",
    ) -> BenchResult:
        """Add one figure.

        `floor` is what the bare machine does, in the same unit, measured in the same run. The target is compared with
        the ratio if a floor is given, and with the value otherwise; `target_on` sets this explicitly. A target is met
        at `<= target` if lower is better (times), at `>= target` otherwise (rates). `doubt` says why this run cannot
        tell ("too noisy"): it is shown instead of yes or no, and the target counts as not met.
        """
        ratio = value / floor if floor else None
        compared = ratio if (target_on or ("ratio" if floor else "value")) == "ratio" else value
        met = None
        if target is not None:
            if compared is None:
                raise ValueError(f"the target of {name!r} is on the ratio, and there is no floor")
            met = not doubt and (compared <= target if lower_is_better else compared >= target)
        result = BenchResult(name, value, unit, floor, ratio, target, met, doubt)
        self.results.append(result)
        return result

    @property
    def met(self) -> bool:
        """Whether every target was met."""
        return all(result.met is not False for result in self.results)

    def steps(self, total: int) -> None:
        """Announce how many times `step` will be called."""
        self._steps_total = total
        if self._progress is not None:
            self._progress.update(self._task, total=total)

    def step(self, label: str) -> None:
        """Say what is measured next; earlier steps are done. Prints a line, so call it between timings."""
        self._steps_done += 1
        if self._progress is not None:
            self._progress.update(self._task, completed=self._steps_done - 1, description=label)
        elif not self.as_json:
            of = f"/{self._steps_total}" if self._steps_total else ""
            print(f"bench {self.name} [{self._steps_done}{of}] {label}", file=sys.stderr, flush=True)

    def __enter__(self) -> Self:
        rich = None if self.as_json else rich_or_none(sys.stderr)
        if rich is not None:
            from rich.progress import Progress

            console = rich.console.Console(stderr=True)
            self._progress = self._stack.enter_context(Progress(console=console, transient=True))
            self._task = self._progress.add_task(f"bench {self.name}", total=self._steps_total)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()
        self._progress = None
        if kind is None:
            self.print()

    def print(self) -> None:
        """The table, or the JSON object, on standard output."""
        if self.as_json:
            print(json.dumps(self.as_object()))
            return
        rows = [
            (
                result.name,
                number(result.value),
                result.unit,
                number(result.floor),
                number(result.ratio),
                number(result.target),
                result.doubt or {True: "yes", False: "no", None: ""}[result.met],
            )
            for result in self.results
        ]
        here = machine()
        print_table(
            ("name", "value", "unit", "floor", "ratio", "target", "met"),
            rows,
            title=f"bench {self.name}: {here['cpu']}, {here['cores']} cores, Linux {here['kernel']}",
            right=(1, 3, 4, 5),
        )

    def as_object(self) -> dict[str, Any]:
        """`{"bench": …, "machine": {…}, "results": [{…}, …]}`."""
        return {"bench": self.name, "machine": machine(), "results": [asdict(result) for result in self.results]}


def number(value: float | None) -> str:
    """The value with three to four significant digits; empty for None."""
    if value is None:
        return ""
    if value == 0 or 0.01 <= abs(value) < 1000:
        return f"{value:.3g}" if abs(value) < 100 else f"{value:.0f}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.2e}"


def machine() -> dict[str, Any]:
    """The machine that the figures were measured on. `memory` is in bytes."""
    from lmcache_core import __version__

    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "memory": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "lmcache_core": __version__,
    }


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    for line in lines:
        field, _, value = line.partition(":")
        if field.strip() in ("model name", "Model"):
            return value.strip()
    return platform.machine()
