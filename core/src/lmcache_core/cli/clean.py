"""`lmcache-core clean`: remove what dead servers left behind. Meant for service managers and container entrypoints."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from lmcache_core.cli.table import print_table
from lmcache_core.errors import UsageError
from lmcache_core.observe.readable import size

if TYPE_CHECKING:
    from lmcache_core.pool.clean import Cleaned


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options."""
    parser.add_argument(
        "names",
        nargs="*",
        metavar="NAME",
        help="only pools with these names (default: all, also what a next server would take over after a crash)",
    )
    parser.add_argument("--name", action="append", default=[], dest="names_too", metavar="NAME", help="as NAME")
    parser.add_argument("--runtime-dir", metavar="DIR", help="where the servers keep their sockets")
    parser.add_argument(
        "-y", "--yes", action="store_true", help="do not ask; needed without a terminal if nothing is named"
    )
    parser.add_argument(
        "--file", type=Path, action="append", default=[], metavar="FILE",
        help="a pool on a disk (l1.path); may be given several times. Without NAME, nothing else is removed",
    )  # fmt: skip
    parser.add_argument("--dry-run", action="store_true", help="print what would be removed, and remove nothing")
    parser.add_argument("--json", action="store_true", help="print a JSON list: path, state, nbytes, reason")


def run(arguments: argparse.Namespace) -> int:
    """Returns 0, or 1 if something of a dead server could not be removed."""
    from lmcache_core.pool.clean import CleanState, clean
    from lmcache_core.protocol.address import given_root, runtime_root

    root = given_root(arguments.runtime_dir) or runtime_root()
    names = [*arguments.names, *arguments.names_too]
    asks = not (arguments.dry_run or arguments.yes)
    if asks and not (names or arguments.file) and not sys.stdin.isatty():
        raise UsageError("this would remove what every dead server left, and nobody can be asked: give NAMEs, or --yes")
    if asks and not arguments.json and sys.stdin.isatty():
        found = clean(root, names, dry_run=True, files=arguments.file)
        if any(each.state is CleanState.WOULD_REMOVE for each in found):
            _print(found)
            if not _agreed():
                return 0
    found = clean(root, names, dry_run=arguments.dry_run, files=arguments.file)
    if arguments.json:
        records = [
            {"path": str(each.path), "state": each.state, "nbytes": each.nbytes, "reason": each.reason}
            for each in found
        ]
        print(json.dumps(records, indent=2))
    elif found:
        _print(found)
    else:
        print("nothing to clean")
    return 1 if any(each.state is CleanState.REFUSED for each in found) else 0


def _print(found: Sequence[Cleaned]) -> None:
    rows = [(str(each.path), str(each.state), size(each.nbytes), each.reason) for each in found]
    print_table(("file", "state", "bytes", "reason"), rows, right=(2,))


def _agreed() -> bool:
    try:
        return input("Remove these, and what they cached? [y/N] ").strip().lower() in ("y", "yes")
    except EOFError:
        return False
