"""`lmcache-core verify`: read every object of a tier and check it."""

from __future__ import annotations

import argparse
import sys
from contextlib import ExitStack
from threading import Event
from typing import TYPE_CHECKING

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
    from lmcache_tools.walk import WalkedObject, Walker

EXIT_DAMAGED = 1


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options other than settings."""
    parser.add_argument("--tier", required=True, metavar="TIER", help="the tier, as the settings name it")
    parser.add_argument(
        "--delete", action="store_true", help="delete objects that are damaged at a second look, too, and ours"
    )
    add_cursor_option(parser)
    add_shared_options(parser)


class _Damaged:
    """Objects that looked damaged, until a second look. `whole`: two that did not, the largest and the last: they show
    that the way is well."""

    def __init__(self, walker: Walker) -> None:
        from lmcache_core.tiers.tier.deletes import Deletes

        self._walker = walker
        self._deletes = Deletes(walker.adapter, Event())
        self.waiting: list[WalkedObject] = []
        self.whole: list[tuple[bytes, int]] = []
        self.seen = self.taken_away = 0

    def saw_whole(self, key: bytes, nbytes: int) -> None:
        """This one was read well."""
        largest = max([*self.whole, (key, nbytes)], key=lambda each: each[1])
        self.whole = [largest, (key, nbytes)]

    def look_again(self, whole: int) -> None:
        """Delete those that look the same again, if more objects than not were whole."""
        from lmcache_core.tiers.contract import Result
        from lmcache_core.tiers.tier.deletes import Suspicion

        if not self.whole or self.seen > whole:
            return
        for found in self.waiting:
            assert found.evidence is not None
            doubt = Suspicion(found.entry.key, found.entry.nbytes, found.evidence, ours=False)
            (look,) = self._deletes.look_again([doubt], self.whole, self._walker.deadline, may_delete=True)
            gone = look.gone or (look.deleted is not None and look.deleted.result is Result.DONE)
            self.taken_away += gone
            if not gone:
                why = "it is whole at a second look" if look.sound else look.error
                print(f"{found.entry.key.hex()}: left where it is: {why}", file=sys.stderr)
        self.waiting.clear()


def run(arguments: argparse.Namespace) -> int:
    """Returns 0, or 1 if damaged or unreadable objects are left on the tier. Works with or without a running server."""
    counts = dict.fromkeys(("objects", "bytes", "whole", "damaged", "taken_away", "unreadable", "foreign", "gone"), 0)
    cursor = Cursor(arguments.cursor, arguments.tier)
    with ExitStack() as stack:
        walker = open_walker(arguments, settings_of(arguments), arguments.tier, stack)
        damaged = _Damaged(walker)
        interrupted = stack.enter_context(ending_between_objects())
        progress = stack.enter_context(Progress(f"verify {arguments.tier}", walker.adapter.usage().objects))
        for page in walker.pages(cursor.at):
            for entry in page.entries:
                if interrupted.is_set():
                    break
                _count(walker.read(entry), counts, damaged)
                progress.advance(1)
            if interrupted.is_set():
                break
            if arguments.delete:
                damaged.look_again(counts["whole"])
            if not (arguments.delete and damaged.waiting and page.cursor):  # an interrupted walk finds them once more
                cursor.move(page.cursor)
        if damaged.waiting and arguments.delete and not interrupted.is_set():
            print(
                f"{damaged.seen:,} objects look damaged and {counts['whole']:,} are whole: the way to the tier may be "
                "broken, so nothing was deleted",
                file=sys.stderr,
            )
    counts["taken_away"] = damaged.taken_away
    report(counts, arguments, interrupted=interrupted.is_set())
    if interrupted.is_set():
        return EXIT_INTERRUPTED
    return EXIT_DAMAGED if counts["damaged"] > counts["taken_away"] or counts["unreadable"] else 0


def _count(found: WalkedObject, counts: dict[str, int], damaged: _Damaged) -> None:
    entry = found.entry
    counts["objects"] += 1
    counts["bytes"] += entry.nbytes
    if not found.problem:
        counts["whole"] += 1
        damaged.saw_whole(entry.key, entry.nbytes)
    elif found.damaged or found.unreadable:
        counts["damaged" if found.damaged else "unreadable"] += 1
        print(f"{entry.key.hex()}: {found.problem}", file=sys.stderr)
        if found.damaged:
            damaged.seen += 1
            damaged.waiting.append(found._replace(buffers=()))
    else:
        counts["gone" if found.problem == "gone" else "foreign"] += 1
