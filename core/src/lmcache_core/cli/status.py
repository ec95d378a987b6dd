"""`lmcache-core status`: the state of a running server."""

from __future__ import annotations

import argparse
import json
import sys
import textwrap
import time
from collections.abc import Iterator, Mapping
from typing import Any

from lmcache_core.cli import connecting
from lmcache_core.observe.readable import duration, hits_of_keys, plain, size
from lmcache_core.observe.troubles import with_troubles

_CLEAR_SCREEN = "\x1b[H\x1b[2J"
_COLUMNS = 80
_NAME_COLUMNS = 10


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options."""
    connecting.add_options(parser)
    shape = parser.add_mutually_exclusive_group()
    shape.add_argument("--all", action="store_true", help="print every figure, one on each line")
    shape.add_argument("--json", action="store_true", help="print every figure as one JSON object")
    parser.add_argument(
        "--watch", nargs="?", type=float, const=2.0, metavar="SECONDS", help="repeat every SECONDS (default: 2)"
    )


def run(arguments: argparse.Namespace) -> int:
    """Ask and print; returns 0. Raises DisconnectedError if no server answers."""
    with connecting.connect(arguments, "status") as client:
        while True:
            status = with_troubles(client.status())
            if arguments.watch is not None and sys.stdout.isatty():
                print(_CLEAR_SCREEN, end="")
            _print(arguments, status)
            if arguments.watch is None:
                return 0
            sys.stdout.flush()
            time.sleep(arguments.watch)


def _print(arguments: argparse.Namespace, status: Mapping[str, Any]) -> None:
    if arguments.json:
        print(json.dumps(status, indent=None if arguments.watch is not None else 2))
    elif arguments.all:
        for name, value in _lines(status):
            print(f"{name}  {plain(value)}")
    else:
        for name, text in summary(status):
            print(wrapped(name, plain(text)))


def wrapped(name: str, text: str) -> str:
    """One line, or several if the text is long; a path or an address stays whole."""
    first, rest = f"{name:{_NAME_COLUMNS - 1}} ", " " * _NAME_COLUMNS
    return textwrap.fill(
        text, _COLUMNS, initial_indent=first, subsequent_indent=rest, break_long_words=False, break_on_hyphens=False
    )


def _lines(value: Any, name: str = "") -> Iterator[tuple[str, str]]:
    """A nested answer, flattened to dotted names."""
    items = (
        value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list | tuple) else None
    )
    if items is None or not value:
        yield name, f"{value:,}" if isinstance(value, int) and "bytes" in name else str(value)
        return
    for key, each in items:
        yield from _lines(each, f"{name}.{key}" if name else str(key))


# --- in ten lines -------------------------------------------------------------------------------------------


def summary(status: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """What an operator looks for first, as (what, text). Problems come last, one on each line."""
    server, l1, leases = status["server"], status["l1"], status["l1"]["leases_by_kind"]
    state = "draining" if server["draining"] else "serving"
    yield "server", f"{server['name']}, {state} for {duration(server['uptime_s'])}, pid {server['pid']}"
    yield "at", ", ".join([server["address"], *server["also_at"]])
    used, most = l1["used_bytes"], l1["pool_bytes"]
    share = f"{size(used)} of {size(most)}, {used / most:.0%}"
    if status["pool"]["populated_bytes"] < most:
        share += f", {status['pool']['populated_bytes'] / most:.0%} populated"
    yield "pool", f"{share}; {l1['objects_by_state']['ready']:,} objects"
    lookups, retrieves = status["traffic"]["lookups"], status["traffic"]["retrieves"]
    yield "lookups", f"{hits_of_keys(lookups)}; {lookups['hits_by_index']:,} of them without a call"
    yield "retrieves", f"{hits_of_keys(retrieves)}; {size(retrieves['bytes'])} read"
    stored, evicted = status["counters"].get("stored_objects", 0), l1["counters"]["evictions"]
    yield "stores", f"{stored:,} objects stored, {evicted:,} evicted by {l1['eviction_policy']}"
    yield (
        "clients",
        f"{status['sessions_connected']:,} connected, {status['deaths']:,} died; leases: {leases['write']:,} write, "
        f"{leases['read']:,} read, {leases['promise']:,} promised",
    )
    for tier in (status["tiers"] or {}).get("tiers", []):
        most = tier["capacity_bytes"]
        room = "" if most is None else f" of {size(most)}, {tier['bytes_used'] / most:.0%}" if most else " of nothing"
        draining = "; draining" if tier["draining"] else ""
        yield "tier", f"{tier['name']}: {size(tier['bytes_used'])}{room}; {tier['objects']:,} objects{draining}"
    for trouble in status["troubles"] or ["none"]:
        yield "trouble", trouble
