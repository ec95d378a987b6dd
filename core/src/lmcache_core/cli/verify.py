"""`lmcache-core verify`: read every object of a tier and check it."""

from __future__ import annotations

import argparse
import sys
from contextlib import ExitStack

from lmcache_core.cli.walking import (
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

EXIT_DAMAGED = 1


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options other than settings."""
    parser.add_argument("--tier", required=True, metavar="NAME", help="the tier, as the settings name it")
    parser.add_argument("--delete", action="store_true", help="delete damaged objects")
    add_cursor_option(parser)
    add_shared_options(parser)


def run(arguments: argparse.Namespace) -> int:
    """Returns 0, or 1 if damaged objects are left on the tier. Works with or without a running server."""
    from lmcache_core.tiers.contract import Result

    counts = {"objects": 0, "bytes": 0, "whole": 0, "damaged": 0, "taken_away": 0, "foreign": 0, "gone": 0}
    cursor = Cursor(arguments.cursor, arguments.tier)
    with ExitStack() as stack:
        walker = open_walker(arguments, settings_of(arguments), arguments.tier, stack)
        interrupted = stack.enter_context(ending_between_objects())
        progress = stack.enter_context(Progress(f"verify {arguments.tier}", walker.adapter.usage().objects))
        for page in walker.pages(cursor.at):
            for entry in page.entries:
                if interrupted.is_set():
                    break
                found = walker.read(entry)
                counts["objects"] += 1
                counts["bytes"] += entry.nbytes
                if not found.problem:
                    counts["whole"] += 1
                elif found.damaged:
                    counts["damaged"] += 1
                    print(f"{entry.key.hex()}: {found.problem}", file=sys.stderr)
                    if arguments.delete:
                        (outcome,) = walker.adapter.set_aside([entry.key], walker.deadline)
                        counts["taken_away"] += outcome.result is Result.DONE
                else:
                    counts["gone" if found.problem == "gone" else "foreign"] += 1
                progress.advance(1)
            if interrupted.is_set():
                break
            cursor.move(page.cursor)
    report(counts, arguments, interrupted=interrupted.is_set())
    if interrupted.is_set():
        return EXIT_INTERRUPTED
    return EXIT_DAMAGED if counts["damaged"] > counts["taken_away"] else 0
