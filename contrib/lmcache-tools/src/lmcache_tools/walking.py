"""Shared by commands that walk a tier: the tier, a progress bar, the cursor, and how to interrupt them."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from threading import Event
from types import FrameType
from typing import TYPE_CHECKING, Any, Self

from lmcache_core.cli.compose import add_file_options, composed
from lmcache_core.cli.table import rich_or_none
from lmcache_core.errors import SettingsError, UsageError

if TYPE_CHECKING:
    from lmcache_core.settings.model import Settings
    from lmcache_tools.walk import Walker

EXIT_INTERRUPTED = 130


def add_shared_options(parser: argparse.ArgumentParser) -> None:
    """Settings are read as `serve` reads them, so the tiers are the server's."""
    parser.epilog = "Any setting can be given as a flag, as for serve: --l2.NAME.path DIR (lmcache-core serve --help)."
    add_file_options(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object at the end")
    parser.add_argument("-h", "--help", action="help", help="show this and exit")


def add_cursor_option(parser: argparse.ArgumentParser) -> None:
    """For commands whose progress cannot be derived from their medium."""
    parser.add_argument(
        "--cursor",
        type=Path,
        metavar="FILE",
        help="keep the position in FILE and continue from there; removed at the end",
    )


def settings_of(arguments: argparse.Namespace) -> Settings:
    """The server's settings."""
    return composed(arguments).settings


def open_walker(
    arguments: argparse.Namespace, settings: Settings, tier: str, stack: ExitStack, *, may_make: bool = False
) -> Walker:
    """A walker over the configured tier. `stack` closes its adapter. Raises SettingsError for a path where nothing is:
    to open it would make it, and report an empty tier. `may_make`: that is wanted."""
    from lmcache_core.plugins.components import Kind
    from lmcache_core.serde.chain import CodecChain
    from lmcache_core.tiers.tier.parallel import adapter_context
    from lmcache_tools.walk import Walker

    if tier not in settings.l2:
        there = ", ".join(settings.l2) or "none"
        raise SettingsError(f"the settings have no tier {tier!r} (they have: {there}): name their file with --config")
    registry, chosen = arguments.registry, settings.l2[tier]
    for name, value in chosen.settings:
        if isinstance(value, Path) and not may_make and not value.exists():
            raise SettingsError(f"l2.{tier}.{name}: there is no {value}", cure="give the path that the server has")
    context = adapter_context(tier, chosen.connections)
    adapter = stack.enter_context(registry.build(Kind.L2_ADAPTER, chosen.type, chosen.settings, context))
    chain = CodecChain([registry.build(Kind.SERDE, each.type, each.settings) for each in chosen.serde])
    return Walker(adapter, chain, chosen.deadline_s)


class Cursor:
    """The position of a walk, in a file that also names its tier; without a file the walk starts at the beginning each
    time."""

    def __init__(self, path: Path | None, tier: str) -> None:
        self._path = path
        self._tier = tier
        self.at: str | None = None
        if path is not None and path.exists():
            try:
                kept = json.loads(path.read_text())
                tier_then, self.at = kept["tier"], kept["cursor"]
            except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
                raise UsageError(f"{path} is not a cursor file: delete it to start at the beginning") from error
            if tier_then != tier:
                raise UsageError(f"{path} has the cursor of tier {tier_then!r}: name another file")

    def move(self, at: str | None) -> None:
        """A page is done; None: all pages are."""
        self.at = at
        if self._path is None:
            return
        if at is None:
            self._path.unlink(missing_ok=True)
            return
        beside = self._path.with_name(self._path.name + ".new")
        beside.write_text(json.dumps({"tier": self._tier, "cursor": at}))
        beside.replace(self._path)


class Progress:
    """A bar on a terminal, otherwise a line from time to time; both on standard error."""

    def __init__(self, what: str, total: int | None, unit: str = "objects") -> None:
        self._what, self._total, self._unit = what, total, unit
        self._stack = ExitStack()
        self._bar: Any = None
        self._task: Any = None
        self._reported = 0
        self.done = 0

    def __enter__(self) -> Self:
        rich = rich_or_none(sys.stderr)
        if rich is not None:
            import rich.progress

            self._bar = self._stack.enter_context(
                rich.progress.Progress(console=rich.console.Console(stderr=True), transient=True)
            )
            self._task = self._bar.add_task(self._what, total=self._total)
        return self

    def __exit__(self, *ignored: object) -> None:
        self._stack.close()

    def advance(self, count: int) -> None:
        """Count `count` more as done."""
        self.done += count
        if self._bar is not None:
            self._bar.update(self._task, completed=self.done)
        elif self.done >= max(100, 2 * self._reported):
            self._reported = self.done
            of = f" of {self._total:,}" if self._total else ""
            print(f"{self._what}: {self.done:,}{of} {self._unit}", file=sys.stderr, flush=True)


@contextmanager
def ending_between_objects() -> Iterator[Event]:
    """SIGINT and SIGTERM end a command after the current object; a second one ends it at once."""
    interrupted = Event()

    def note(number: int, frame: FrameType | None) -> None:
        if interrupted.is_set():
            raise KeyboardInterrupt
        interrupted.set()

    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield interrupted
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def report(counts: dict[str, int], arguments: argparse.Namespace, *, interrupted: bool) -> None:
    """Print the figures at the end."""
    if arguments.json:
        print(json.dumps({**counts, "interrupted": interrupted}))
    else:
        print(", ".join(f"{name.replace('_', ' ')} {value:,}" for name, value in counts.items()))
        if interrupted:
            print(f"interrupted: run the command again to continue{os.linesep}", end="", file=sys.stderr)
