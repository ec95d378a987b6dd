"""The results of a run of the kit, line by line in a file: its parent reads them, however the run has ended."""

from __future__ import annotations

import ctypes
import json
import signal
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from lmcache_testing.card import Line, line_of, subject_of
from lmcache_testing.contract import Contract, claim_of

_PARENT_DIED = 1  # PR_SET_PDEATHSIG


class Begun(NamedTuple):
    """A contract test that has begun."""

    test: str
    subject: str
    claim: str


class Journal:
    """Appended to by one process at a time. `tests`: tests of an earlier process, not to be run again."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def begin(self, begun: Begun) -> None:
        """If the process dies from here on, until `add` or `end`, this test is to blame."""
        self._write({"begun": begun})

    def add(self, line: Line) -> None:
        """Record a result."""
        self._write({"line": line})

    def end(self, test: str) -> None:
        """The test is over."""
        self._write({"ended": test})

    def expect(self, tests: list[Begun]) -> None:
        """Record which tests will run."""
        self._write({"expected": tests})

    def close(self, status: int) -> None:
        """The run has ended by itself, with pytest's exit status."""
        self._write({"over": status})

    def _write(self, entry: dict[str, Any]) -> None:
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(entry) + "\n")

    def read(self) -> Story:
        """The whole file, without an incomplete last line."""
        story = Story([], [], None, [], None)
        if not self._path.exists():
            return story
        for text in self._path.read_text(encoding="utf-8").splitlines():
            try:
                ((kind, content),) = json.loads(text).items()
            except ValueError:
                continue
            if kind == "begun":
                begun = Begun(*content)
                story = story._replace(under_way=begun, tests=[*story.tests, begun.test], over=None)
            elif kind == "line":
                story = story._replace(lines=[*story.lines, Line(*content)])
            elif kind == "ended":
                story = story._replace(under_way=None)
            elif kind == "expected":
                story = story._replace(expected=[Begun(*each) for each in content])
            else:
                story = story._replace(over=content)
        return story


class Story(NamedTuple):
    """`lines`: the results. `tests`: those that have begun. `under_way`: the test that the process is, or died, in.
    `expected`: what the last process was going to run. `over`: pytest's exit status, if it has ended by itself."""

    lines: list[Line]
    tests: list[str]
    under_way: Begun | None
    expected: list[Begun]
    over: int | None


class JournalWriter:
    """A pytest plugin: keeps the journal, skips tests that an earlier process has begun, and ends the run, with all its
    fixtures, when its parent dies."""

    def __init__(self, path: str | Path) -> None:
        self._journal = Journal(Path(path))
        ctypes.CDLL(None).prctl(_PARENT_DIED, int(signal.SIGINT))

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        done = set(self._journal.read().tests)
        items[:] = [item for item in items if item.nodeid not in done]
        self._journal.expect([_begun(item) for item in items if _is_claim(item)])

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: Any) -> Any:
        self._journal.begin(_begun(item))
        content = yield
        self._journal.end(item.nodeid)
        return content

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: Any, call: Any) -> Any:
        report = yield
        line = line_of(item, report)
        if line is not None:
            self._journal.add(line)
        return report

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        self._journal.close(int(exitstatus))


def _is_claim(item: Any) -> bool:
    cls = getattr(item, "cls", None)
    return cls is not None and issubclass(cls, Contract)


def _begun(item: Any) -> Begun:
    if _is_claim(item):
        return Begun(item.nodeid, subject_of(item.cls), claim_of(item.name))
    return Begun(item.nodeid, "", item.name)
