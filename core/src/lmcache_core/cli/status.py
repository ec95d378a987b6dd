"""`lmcache-core status`: the state of a running server."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Mapping
from typing import Any

from lmcache_core.cli import connecting
from lmcache_core.cli.table import width_of, wrapped
from lmcache_core.errors import printable
from lmcache_core.observe.readable import duration, found_in, hits_of_keys, size
from lmcache_core.observe.troubles import with_troubles

_CLEAR_SCREEN = "\x1b[H\x1b[2J"
_NAME_COLUMNS = 10
_NAMESPACES_SHOWN = 5


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
            print(f"{name}  {printable(value)}")
    else:
        for name, text in summary(status):
            print(*lines_of(name, text, width_of(sys.stdout)), sep="\n")


def lines_of(name: str, text: str, width: int | None) -> list[str]:
    """One line, or several if the text is longer than that; a path or an address stays whole."""
    return wrapped(printable(text), width, first=f"{name:{_NAME_COLUMNS - 1}} ", rest=" " * _NAME_COLUMNS)


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
    adopted = (status["pool"]["adopted"] or {}).get("objects", 0)
    came = f", {adopted:,} adopted from the server before" if adopted else ""
    yield "pool", f"{share}; {l1['objects_by_state']['ready']:,} objects{came}"
    lookups, retrieves = status["traffic"]["lookups"], status["traffic"]["retrieves"]
    yield "lookups", f"{hits_of_keys(lookups)}; {lookups['hits_by_index']:,} of them without a call"
    if lookups["prompts"]:
        found = f"{lookups['hit_tokens']:,} of {lookups['tokens']:,} tokens found"
        share = f"{lookups['hit_tokens'] / lookups['tokens']:.1%}"
        yield "prompts", f"{lookups['prompts']:,} looked up by engines; {found}, {share}"
    yield "retrieves", f"{hits_of_keys(retrieves)}; {size(retrieves['bytes'])} read"
    stored, evicted = status["counters"].get("stored_objects", 0), l1["counters"]["evictions"]
    order = l1.get("policy", {}).get("order")  # what a policy of several orders follows now
    by = l1["eviction_policy"] if order is None else f"{l1['eviction_policy']}, now as {order}"
    given_up = status["traffic"].get("dropped_stores", 0)  # a server of another version has none
    lost = f"; {given_up:,} given up by clients, as the server was slow or away" if given_up else ""
    full = status.get("stores_refused_full", 0)
    refused = f"; {full:,} refused: no room" if full else ""
    yield "stores", f"{stored:,} objects stored, {evicted:,} evicted by {by}{refused}{lost}"
    others = status["sessions_connected"] - 1  # but for the one that asks
    yield (
        "clients",
        f"{others:,} connected, {status['deaths']:,} died; leases: {leases['write']:,} write, "
        f"{leases['read']:,} read, {leases['promise']:,} promised",
    )
    yield from _namespaces(status["namespaces"], status["traffic"]["namespaces"])
    for tier in (status["tiers"] or {}).get("tiers", []):
        most = tier["capacity_bytes"]
        room = "" if most is None else f" of {size(most)}, {tier['bytes_used'] / most:.0%}" if most else " of nothing"
        draining = "; draining" if tier["draining"] else "" if tier["stores"] else "; never stores"
        marks = "".join(f"; lossy: {name}" for name in tier.get("lossy", ()))  # a server of another version has none
        marks += "".join(f"; wrapped: {name}" for name in tier.get("wrap", ()))
        yield "tier", f"{tier['name']}: {size(tier['bytes_used'])}{room}; {tier['objects']:,} objects{marks}{draining}"
    for trouble in status["troubles"] or ["none"]:
        yield "trouble", trouble


def _namespaces(namespaces: Mapping[str, Any], traffic: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """The first ones by their labels; each id is in `--all`, and the layout too."""
    for name, row in list(namespaces.items())[:_NAMESPACES_SHOWN]:
        figures = traffic.get(name)
        found = "" if figures is None else f", {found_in(figures)} found"
        sessions = "1 session" if row["sessions"] == 1 else f"{row['sessions']:,} sessions"
        yield "namespace", f"{row['label'] or name}: {sessions}{found}"
    if len(namespaces) > _NAMESPACES_SHOWN:
        yield "namespace", f"and {len(namespaces) - _NAMESPACES_SHOWN} more: see --all"
