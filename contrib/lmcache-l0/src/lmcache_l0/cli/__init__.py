"""`lmcache-core l0`: create a table, inspect it and change it from outside. Imports nothing heavy."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from importlib import import_module
from typing import Any

SUMMARY = "the L0 table against a dict, LMDB, Redis on a Unix socket and Manager().dict()"
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "ki": 1 << 10, "mi": 1 << 20, "gi": 1 << 30}


def add_commands(subparsers: argparse._SubParsersAction[Any]) -> None:
    """Add `l0 stats|top|keys|get|set|delete|rehash|create|plan`."""
    summary = "create, inspect and change a shared L0 table"
    commands = subparsers.add_parser("l0", help=summary, description=summary).add_subparsers(
        dest="l0_command", required=True, metavar="COMMAND"
    )

    def command(name: str, text: str, module: str, *, path: bool = True, json: bool = False) -> argparse.ArgumentParser:
        parser: argparse.ArgumentParser = commands.add_parser(name, help=text, description=text)
        if path:
            parser.add_argument("path", help="the table's file, or server:NAME for that of a server")
        if json:
            parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
        parser.set_defaults(run=_late(module, name))
        return parser

    command("stats", "load, probe lengths, bytes, writers", "look", json=True)
    top = command("top", "the keys that are read most, counted by sampling", "look", json=True)
    top.add_argument("--count", type=_positive, default=20, metavar="N", help="keys to show (default: 20)")
    keys = command("keys", "the keys, in no order", "look", json=True)
    keys.add_argument("--prefix", default="", metavar="TEXT", help="only keys that begin with this")
    keys.add_argument("--count", type=_positive, metavar="N", help="the most keys to print")
    get = command("get", "write the value of a key to standard output; exit code 1 if it is not there", "look")
    get.add_argument("key")

    switch = command(
        "set",
        "`set PATH enabled` and `set PATH disabled` switch the table on and off, for every process; "
        "`set PATH KEY VALUE` stores a value, without VALUE what standard input has",
        "change",
    )
    switch.add_argument("name", metavar="enabled|disabled|KEY")
    switch.add_argument("value", nargs="?", metavar="VALUE")
    switch.add_argument("--key", action="store_true", help="the name is a key's, even if it is `enabled` or `disabled`")
    delete = command("delete", "delete keys; exit code 1 if none was there", "change")
    delete.add_argument("keys", nargs="+", metavar="KEY")

    command("rehash", "move keys into nearer slots that became free; readers and writers go on meanwhile", "change")
    create = command("create", "create a table", "change")
    _add_sizes(create)
    create.add_argument("--size-gb", type=float, metavar="GIB", help="size of the file in GiB (default: 1)")
    create.add_argument("--hash-slots", type=_count, metavar="N", help="slots: the keys planned, divided by 0.7")
    create.add_argument("--max-value-size", type=_count, metavar="BYTES", help="the largest value (default: 4096)")
    create.add_argument("--sparse", action="store_true", help="allocate memory when it is first touched, not now")
    create.add_argument("--disabled", action="store_true", help="switched off until somebody switches it on")

    plan = command("plan", "how large a table must be, and how long its probes are", "plan", path=False, json=True)
    plan.add_argument("--keys", type=_count, required=True, metavar="N", help="keys it is to hold: 200000, 10M")
    plan.add_argument("--value", type=_count, required=True, metavar="BYTES", help="the largest value: 512, 4Ki, 1Mi")
    plan.add_argument("--load", type=float, default=0.7, help="share of the slots that those keys fill (default: 0.7)")
    _add_sizes(plan)


def _add_sizes(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--max-key-size", type=_count, metavar="BYTES", help="the longest key (default: 256)")
    parser.add_argument("--versions", type=_count, metavar="N", help="N + 1 buffers for every key, shared with none")
    parser.add_argument("--spares", type=_count, metavar="N", help="spare buffers of 64 slots that share (default: 2)")


def _late(module: str, name: str) -> Callable[[argparse.Namespace], int]:
    def run(options: argparse.Namespace) -> int:
        done: int = getattr(import_module(f"lmcache_l0.cli.{module}"), f"{name}_command")(options)
        return done

    return run


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} must be 1 or more")
    return number


def _count(text: str) -> int:
    """Parse a number with a unit: 10M is 10,000,000 and 1Mi is 1,048,576."""
    digits = text.rstrip("KMGkmgIi")
    try:
        number = float(digits) * _UNITS[text[len(digits) :].lower()]
    except (ValueError, KeyError):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number such as 4096, 10M or 4Ki") from None
    if number < 1 or number != int(number):
        raise argparse.ArgumentTypeError(f"{text} must be a whole number of 1 or more")
    return int(number)
