"""The control file: fault rules, one a line; `#` begins a comment. Replaced atomically, so that no half of it is
read."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Sequence
from pathlib import Path

from lmcache_core.errors import UsageError
from lmcache_core.textfiles import read_text_file
from lmcache_mock.drills.faults import FaultRule, FaultScript

log = logging.getLogger(__name__)


def read_rules(path: Path) -> list[FaultRule]:
    """The rules in a file; none if it does not exist. Raises UsageError that names file and line."""
    try:
        lines = read_text_file(path).splitlines()
    except FileNotFoundError:
        return []
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} cannot be read as a control file: {error}") from error
    rules = []
    for number, line in enumerate(lines, 1):
        rule = line.partition("#")[0].strip()
        if rule:
            try:
                rules.append(FaultRule.parse(rule))
            except UsageError as error:
                raise UsageError(f"{path}:{number}: {error}") from error
    return rules


def write_rules(path: Path, rules: Sequence[FaultRule]) -> None:
    """Replace the file. Raises UsageError if it cannot be written."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_text("".join(f"{rule}\n" for rule in rules), encoding="utf-8")
        temporary.replace(path)
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error}; give a path in a writable folder") from error


class Control:
    """Loads the file's rules into a script whenever the file changes. An invalid file changes nothing."""

    def __init__(self, path: Path | None, script: FaultScript, otherwise: Sequence[str]) -> None:
        self._path = path
        self._script = script
        self._otherwise = tuple(otherwise)
        self._lock = threading.Lock()
        self._seen: tuple[int, int, int] | None = None

    def look(self) -> None:
        """One `stat`, and more only if the file has changed."""
        if self._path is None:
            return
        try:
            about = self._path.stat()
            now: tuple[int, int, int] | None = (about.st_ino, about.st_mtime_ns, about.st_size)
        except OSError:
            now = None
        with self._lock:
            if now == self._seen:
                return
            self._seen = now
            try:
                self._script.set(*(read_rules(self._path) if now is not None else self._otherwise))
            except UsageError as error:
                log.warning("mock tier: %s; the rules in force stay", error)
