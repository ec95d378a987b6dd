"""`lmcache-core clean`: remove what dead servers left behind. Meant for service managers and container entrypoints."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from lmcache_core.cli.table import print_table


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options."""
    parser.add_argument("names", nargs="*", metavar="NAME", help="only pools with these names (default: all)")
    parser.add_argument("--runtime-dir", type=Path, metavar="DIR", help="where the servers keep their sockets")
    parser.add_argument("--dry-run", action="store_true", help="print what would be removed, and remove nothing")
    parser.add_argument("--json", action="store_true", help="print a JSON list: path, state, nbytes, reason")


def run(arguments: argparse.Namespace) -> int:
    """Returns 0, or 1 if something of a dead server could not be removed."""
    from lmcache_core.pool.clean import CleanState, clean
    from lmcache_core.protocol.address import runtime_root
    from lmcache_core.settings.sizes import size_text

    found = clean(arguments.runtime_dir or runtime_root(), arguments.names, dry_run=arguments.dry_run)
    if arguments.json:
        records = [
            {"path": str(each.path), "state": each.state, "nbytes": each.nbytes, "reason": each.reason}
            for each in found
        ]
        print(json.dumps(records, indent=2))
    elif found:
        rows = [(str(each.path), str(each.state), size_text(each.nbytes), each.reason) for each in found]
        print_table(("file", "state", "bytes", "reason"), rows, right=(2,))
    else:
        print("nothing to clean")
    return 1 if any(each.state is CleanState.REFUSED for each in found) else 0
