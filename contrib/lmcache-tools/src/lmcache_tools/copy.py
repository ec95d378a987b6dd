"""`lmcache-core copy`: copy the objects of one tier to another, and check each on the way."""

from __future__ import annotations

import argparse
import sys
from contextlib import ExitStack
from itertools import islice
from typing import TYPE_CHECKING

from lmcache_core.errors import TierError, UsageError
from lmcache_tools.walking import (
    EXIT_INTERRUPTED,
    Cursor,
    Progress,
    add_cursor_option,
    add_shared_options,
    ending_between_objects,
    open_walker,
    report,
    settings_of,
)

if TYPE_CHECKING:
    from lmcache_tools.walk import WalkedObject

EXIT_LEFT = 1
_ASKED_AT_ONCE = 64


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options other than settings."""
    parser.add_argument("--from", required=True, metavar="TIER", dest="source", help="the tier to read")
    parser.add_argument("--to", required=True, metavar="TIER", dest="target", help="the tier to store to")
    add_cursor_option(parser)
    add_shared_options(parser)


def run(arguments: argparse.Namespace) -> int:
    """Returns 0, or 1 if some objects could not be copied. Objects that the target already has are skipped, so a second
    run continues where the first ended. If the codec chains of the tiers differ, objects are decoded and encoded
    again."""
    from lmcache_core.tiers.contract import Result

    if arguments.source == arguments.target:
        raise UsageError(f"--from and --to both name {arguments.source!r}")
    counts = {"objects": 0, "copied": 0, "bytes": 0, "there_already": 0, "damaged": 0, "unreadable": 0, "foreign": 0,
              "gone": 0}  # fmt: skip
    cursor = Cursor(arguments.cursor, arguments.source)
    with ExitStack() as stack:
        settings = settings_of(arguments)
        source = open_walker(arguments, settings, arguments.source, stack)
        target = open_walker(arguments, settings, arguments.target, stack, may_make=True)
        interrupted = stack.enter_context(ending_between_objects())
        label = f"copy {arguments.source} to {arguments.target}"
        progress = stack.enter_context(Progress(label, source.adapter.usage().objects))
        for page in source.pages(cursor.at):
            walk = iter(page.entries)
            while not interrupted.is_set() and (some := list(islice(walk, _ASKED_AT_ONCE))):
                there = target.exists([entry.key for entry in some])
                for entry, known in zip(some, there, strict=True):
                    if interrupted.is_set():
                        break
                    counts["objects"] += 1
                    progress.advance(1)
                    if known:
                        counts["there_already"] += 1
                        continue
                    found = source.read(entry)
                    if found.problem:
                        counts[_kind(found)] += 1
                        if found.damaged or found.unreadable:
                            print(f"{entry.key.hex()}: {found.problem}", file=sys.stderr)
                        continue
                    outcome = target.store(found, source)
                    if outcome.result is not Result.DONE:
                        why = outcome.error or f"a store answered {outcome.result}"
                        raise TierError(f"tier {arguments.target!r}: {why}; run the command again to continue")
                    counts["copied"] += 1
                    counts["bytes"] += outcome.nbytes
            if interrupted.is_set():
                break
            cursor.move(page.cursor)
    report(counts, arguments, interrupted=interrupted.is_set())
    if interrupted.is_set():
        return EXIT_INTERRUPTED
    return EXIT_LEFT if counts["damaged"] or counts["unreadable"] or counts["foreign"] else 0


def _kind(found: WalkedObject) -> str:
    if found.problem == "gone":
        return "gone"
    return "damaged" if found.damaged else "unreadable" if found.unreadable else "foreign"
