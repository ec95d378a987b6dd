"""`lmcache-core status`: a running server's account of itself."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Mapping
from typing import Any

from lmcache_core.cli import connecting
from lmcache_core.cli.table import print_table

_CLEAR_SCREEN = "\x1b[H\x1b[2J"


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options."""
    connecting.add_options(parser)
    shape = parser.add_mutually_exclusive_group()
    shape.add_argument("--all", action="store_true", help="every figure, a line each")
    shape.add_argument("--json", action="store_true", help="every figure, as one JSON object")
    parser.add_argument(
        "--watch", nargs="?", type=float, const=2.0, metavar="SECONDS", help="again and again (default: every 2 s)"
    )


def run(arguments: argparse.Namespace) -> int:
    """Ask and print; 0. Raises DisconnectedError where nobody answers."""
    with connecting.connect(arguments, "status") as client:
        while True:
            status = client.status()
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
        print_table(("what", "value"), list(_lines(status)))
    else:
        for name, text in summary(status):
            print(f"{name:10}{text}")


def _lines(value: Any, name: str = "") -> Iterator[tuple[str, str]]:
    """A nested answer as dotted names."""
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
    """What an operator looks for first, as (what, text); what is wrong comes last, a line each."""
    server, l1, leases = status["server"], status["l1"], status["l1"]["leases_by_kind"]
    state = "draining" if server["draining"] else "serving"
    yield "server", f"{server['name']}, {state} for {_duration(server['uptime_s'])}, pid {server['pid']}"
    yield "at", ", ".join([server["address"], *server["also_at"]])
    used, most = l1["used_bytes"], l1["pool_bytes"]
    share = f"{_size(used)} of {_size(most)}, {used / most:.0%}"
    if status["pool"]["populated_bytes"] < most:
        share += f", {status['pool']['populated_bytes'] / most:.0%} populated"
    yield "pool", f"{share}; {l1['objects_by_state']['ready']:,} objects"
    counted, evicted = status["counters"], l1["counters"]["evictions"]
    lookups, retrieves = status["traffic"]["lookups"], status["traffic"]["retrieves"]
    yield "lookups", f"{_rate(lookups)}; {lookups['calls']:,} calls, {lookups['hits_by_index']:,} hits by the index"
    yield "retrieves", f"{_rate(retrieves)}; {retrieves['calls']:,} calls, {_size(retrieves['bytes'])}"
    yield (
        "since then",
        f"{counted.get('committed', 0):,} stored, {evicted:,} evicted ({l1['eviction_policy']})",
    )
    yield (
        "clients",
        f"{status['sessions_connected']:,} connected, {status['deaths']:,} died; leases: {leases['write']:,} to write, "
        f"{leases['read']:,} to read, {leases['promise']:,} promises",
    )
    tiers = (status["tiers"] or {}).get("tiers", [])
    for tier in tiers:
        room = "" if tier["capacity_bytes"] is None else f" of {_size(tier['capacity_bytes'])}"
        yield f"tier {tier['name']}", f"{_size(tier['bytes_used'])}{room}; {tier['objects']:,} objects"
    troubles = list(_troubles(status))
    for trouble in troubles:
        yield "trouble", trouble
    if not troubles:
        yield "trouble", "none"


def _troubles(status: Mapping[str, Any]) -> Iterator[str]:
    """What somebody should look into."""
    pool, l1, index, counters = status["pool"], status["l1"], status["index"] or {}, status["counters"]
    if pool["population_error"]:
        yield f"the pool's memory did not come: {pool['population_error']}"
    if pool["name_lost"]:
        yield "somebody deleted the pool's name: new clients cannot attach by it"
    if pool["repaired_words"]:
        yield f"{pool['repaired_words']:,} words of the pool's tables were written by somebody else, and repaired"
    if index.get("unindexed"):
        yield (
            f"{index['unindexed']:,} objects have no entry in the index, and cost a call for each hit: set "
            f"l1.index_entries = {index['entries_wanted']}"
        )
    if l1["bytes_by_state"]["quarantined"]:
        yield f"{_size(l1['bytes_by_state']['quarantined'])} wait for workers that did not answer in time"
    if l1["policy_error"]:
        yield f"the eviction policy failed: {l1['policy_error']}"
    if status["traffic"]["doubted_tallies"]:
        yield (
            f"{status['traffic']['doubted_tallies']:,} times a worker's own counts made no sense and were left out: "
            "look for one that writes outside of its slots"
        )
    for name, helper in status["helpers"].items():
        if helper["pid"] is None:
            yield f"helper {name} is not running: {helper['last_end']}"
    for name, told in ((status["events"] or {}).get("subscribers", {})).items():
        if told["aside"]:
            yield f"event subscriber {name}: {told['aside']}"
    if counters.get("loop_faults") or counters.get("internal_errors"):
        yield "the server met a fault of its own; its log has the trace"
    for name, companion in status["companions"].items():
        if isinstance(companion, Mapping) and companion.get("error"):
            yield f"companion {name}: {companion['error']}"
    for tier in (status["tiers"] or {}).get("tiers", []):
        closed = [what for what in ("reads", "writes") if tier[what]["breaker"] != "closed"]
        if closed or tier["last_error"]:
            stopped = f"{' and '.join(closed)} stopped for now; " if closed else ""
            yield f"tier {tier['name']}: {stopped}{tier['last_error'] or 'no error is known'}"
    lost = (status["tiers"] or {}).get("stores", {}).get("reached_no_tier", {})
    if lost.get("objects"):
        yield f"{lost['objects']:,} objects left the pool before any tier had them ({_size(lost['bytes'])})"
    if status["stores_waited_in_vain"]:
        yield f"{status['stores_waited_in_vain']:,} stores waited for room and got none"


def _rate(figures: Mapping[str, Any]) -> str:
    """Hits of keys, since the server's start."""
    if figures["hit_rate"] is None:
        return "none yet"
    return f"{figures['hits']:,} of {figures['keys']:,} keys hit, {figures['hit_rate']:.1%}"


def _size(nbytes: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if nbytes < 1024:
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.1f} TiB"


def _duration(seconds: float) -> str:
    for unit, length in (("d", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"
