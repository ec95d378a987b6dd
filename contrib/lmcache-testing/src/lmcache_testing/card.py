"""The score card of a run of the kit: each claim, and whether it holds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from lmcache_core.files import replace_file
from lmcache_testing.contract import NOT_CLAIMED, NOT_JUDGED, Contract, claim_of

HELD, FAILED, KNOWN = "held", "FAILED", "known to fail"
JUDGED_NOT, CLAIMED_NOT = "not judged", "not claimed"
_ORDER = (
    FAILED,
    KNOWN,
    HELD,
    JUDGED_NOT,
    CLAIMED_NOT,
)  # of several variants of a claim the first in this list is reported
_COLOURS = {FAILED: "red", KNOWN: "yellow", HELD: "brightgreen"}


class Line(NamedTuple):
    """`subject`: the test class. `why`: what was seen, or what would make a judgement possible, or nothing."""

    subject: str
    claim: str
    verdict: str
    why: str = ""


class Card:
    """The results of a run so far."""

    def __init__(self, speed: str) -> None:
        self.speed = speed
        self._lines: dict[tuple[str, str], Line] = {}

    def add(self, line: Line) -> None:
        """Add a result. For a claim with several variants the worst counts."""
        place = line.subject, line.claim
        known = self._lines.get(place)
        if known is None or _ORDER.index(line.verdict) < _ORDER.index(known.verdict):
            self._lines[place] = line

    @property
    def lines(self) -> list[Line]:
        return list(self._lines.values())

    def counts(self, subject: str) -> dict[str, int]:
        """How many claims of a subject have each verdict."""
        mine = [line.verdict for line in self._lines.values() if line.subject == subject]
        return {verdict: mine.count(verdict) for verdict in _ORDER if verdict in mine}

    @property
    def subjects(self) -> list[str]:
        return list(dict.fromkeys(subject for subject, _ in self._lines))

    def badge(self) -> dict[str, Any]:
        """For shields.io/endpoint."""
        total = {verdict: sum(self.counts(each).get(verdict, 0) for each in self.subjects) for verdict in _ORDER}
        counts = [f"{count} {verdict}" for verdict, count in total.items() if count and verdict != CLAIMED_NOT]
        worst = next((verdict for verdict in (FAILED, KNOWN) if total[verdict]), HELD)
        return {
            "schemaVersion": 1,
            "label": f"lmcache-core kit ({self.speed})",
            "message": ", ".join(counts) or "no tests were run",
            "color": _COLOURS[worst] if counts else "lightgrey",
        }

    def write(self, path: Path) -> None:
        """Write the badge and all claims."""
        replace_file(path, (json.dumps(self.as_json(), indent=2) + "\n").encode())

    def as_json(self) -> dict[str, Any]:
        """The badge and all claims."""
        return {**self.badge(), "speed": self.speed, "claims": [line._asdict() for line in self.lines]}

    def table(self, *, every: bool = False) -> list[str]:
        """Lines to print: for each subject its counts, and the claims that do not simply hold, or all."""
        shown = set(_ORDER if every else (FAILED, KNOWN, JUDGED_NOT))
        lines = []
        for subject in self.subjects:
            counts = ", ".join(f"{count} {verdict}" for verdict, count in self.counts(subject).items())
            lines.append(f"{subject}: {counts}")
            for line in sorted(self.lines, key=lambda line: _ORDER.index(line.verdict)):
                if line.subject == subject and line.verdict in shown:
                    lines.append(f"  {line.verdict:<13} {line.claim}{': ' + line.why if line.why else ''}")
        return lines


class CardWriter:
    """A pytest plugin: records each contract test, prints the card at the end, and writes it to a file."""

    def __init__(self, path: str | Path, speed: str) -> None:
        self.card = Card(speed)
        self._path = Path(path)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: Any, call: Any) -> Any:
        report = yield
        line = line_of(item, report)
        if line is not None:
            self.card.add(line)
        return report

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        if not self.card.lines:
            return
        terminalreporter.section(f"score card, speed {self.card.speed}")
        for line in self.card.table():
            terminalreporter.write_line(line)
        self.card.write(self._path)
        terminalreporter.write_line(f"written to {self._path}")


def subject_of(cls: type[Contract]) -> str:
    """What a test class tests."""
    return f"{cls.component} ({cls.__name__})" if cls.component else cls.__name__


def line_of(item: Any, report: Any) -> Line | None:
    """What a pytest report says about a claim; None: nothing, or it is not from a contract test."""
    cls = getattr(item, "cls", None)
    if cls is None or not issubclass(cls, Contract) or (report.when != "call" and report.outcome == "passed"):
        return None
    subject, claim = subject_of(cls), claim_of(item.name)
    if report.outcome == "passed":
        return Line(subject, claim, HELD)
    if report.outcome == "skipped" and hasattr(report, "wasxfail"):
        return Line(subject, claim, KNOWN, report.wasxfail.removeprefix("reason: "))
    if report.outcome == "skipped":
        why = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        why = why.removeprefix("Skipped: ")
        if why.startswith(NOT_CLAIMED):
            return Line(subject, claim, CLAIMED_NOT, why.removeprefix(NOT_CLAIMED))
        return Line(subject, claim, JUDGED_NOT, why.removeprefix(NOT_JUDGED))
    crash = getattr(report.longrepr, "reprcrash", None)
    lines = (crash.message if crash is not None else str(report.longrepr)).strip().splitlines()
    text = (lines or ["?"])[0].removeprefix("AssertionError: ").removeprefix(f"{claim}: ")
    return Line(subject, claim, FAILED, text if report.when == "call" else f"{report.when} of its fixtures: {text}")
