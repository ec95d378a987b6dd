"""`lmcache-core l0`: look into a table from outside. Imports nothing heavy."""

from __future__ import annotations

import argparse
from typing import Any

SUMMARY = "the L0 table against a dict, LMDB, Redis on a Unix socket and Manager().dict()"


def add_commands(subparsers: argparse._SubParsersAction[Any]) -> None:
    """Add `l0 stats PATH` and `l0 top PATH`."""
    summary = "look into a shared L0 table"
    commands = subparsers.add_parser("l0", help=summary, description=summary).add_subparsers(
        dest="l0_command", required=True, metavar="COMMAND"
    )
    stats = commands.add_parser("stats", help="load, probe lengths, bytes, writers")
    stats.add_argument("path", help="the table's file")
    stats.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    stats.set_defaults(run=_stats)
    top = commands.add_parser("top", help="the keys that are read most, counted by sampling")
    top.add_argument("path", help="the table's file")
    top.add_argument("--count", type=_positive, default=20, metavar="N", help="keys to show (default: 20)")
    top.add_argument("--json", action="store_true", help="print one JSON array instead of a table")
    top.set_defaults(run=_top)


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} must be 1 or more")
    return number


def _stats(options: argparse.Namespace) -> int:
    from lmcache_l0.cli.look import stats

    return stats(options.path, as_json=options.json)


def _top(options: argparse.Namespace) -> int:
    from lmcache_l0.cli.look import top

    return top(options.path, options.count, as_json=options.json)
