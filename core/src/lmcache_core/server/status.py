"""The answer of `status`: plain values, no secrets, cheap to make."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import asdict
from itertools import islice
from typing import TYPE_CHECKING, Any

from lmcache_core import __version__
from lmcache_core.guard import guarded
from lmcache_core.kernel.answers import HolderUsage, KernelUsage
from lmcache_core.limits import ERROR_EXCERPT_CHARS_MAX, FRAME_BYTES_MAX
from lmcache_core.protocol.codec import encode, plain

if TYPE_CHECKING:
    from lmcache_core.server.server import Server

SESSIONS_SHOWN_MAX = 100
ROWS_SHOWN_MAX = 100  # of size classes and of culprits: the reply is one frame
STATUS_BYTES_MAX = FRAME_BYTES_MAX - 64  # leaves room for the reply's tag and id
# What is shortened if the whole is larger than that, longest first; tables of the second line only when those of the
# first are empty. The most important rows come first in each.
SHORTENED = (
    ("sessions", "companions", "l1.holders", "l1.held_by_session", "l1.quarantine_by_session",
     "l1.quarantine_by_holder", "l1.classes", "l1.tenants", "namespaces", "namespaces_refused"),
    ("tiers.tiers", "helpers", "events.subscribers", "counters", "traffic.namespaces"),
)  # fmt: skip


def describe(server: Server) -> dict[str, Any]:
    """The server's status, in one frame. `not_shown`: how many rows of which table were left out to fit, and under
    `texts` how many texts were cut."""
    status = _described(server)
    if len(encode(status)) > STATUS_BYTES_MAX:
        _shorten(status)
    return status


def _described(server: Server) -> dict[str, Any]:
    parts = server.parts
    kept = parts.kernel.usage()
    usage = asdict(kept)
    usage["eviction_policy"] = parts.settings.l1.eviction.type
    usage["policy"] = guarded(_no_figures, plain, parts.kernel.residents.policy.status)
    usage["tenants"] = sorted(usage["tenants"], key=lambda row: -row["used_bytes"])
    tables = ("tenants", "classes", "holders", "held_by_session", "quarantine_by_session", "quarantine_by_holder")
    left_out = {f"l1.{name}": len(usage[name]) - ROWS_SHOWN_MAX for name in tables}
    usage["classes"] = sorted(usage["classes"], key=lambda row: -row["slots"] * row["slot_bytes"])[:ROWS_SHOWN_MAX]
    usage["holders"] = _holders(server, kept)
    usage["held_by_session"] = dict(_most(kept.held_by_session))
    usage["tenants"] = usage["tenants"][:ROWS_SHOWN_MAX]
    for name in ("quarantine_by_session", "quarantine_by_holder"):
        usage[name] = dict(sorted(usage[name].items(), key=lambda item: -item[1])[:ROWS_SHOWN_MAX])
    segment = parts.segment
    sessions = list(parts.sessions)
    counts = traffic(server)
    busiest = [int(name, 16) for name in counts["namespaces"] if name != "other"]
    left_out["sessions"] = len(sessions) - SESSIONS_SHOWN_MAX
    return {
        "server": {
            "name": parts.settings.name,
            "version": __version__,
            "pid": os.getpid(),
            "uptime_s": round(time.time() - server.started_at_s, 3),
            "address": server.address,
            "also_at": [carrier.address for carrier in parts.carriers],
            "draining": server.draining,
            "names_lost": server.names.trouble,
        },
        "pool": {
            "backing": str(segment.info.backing),
            "path": None if segment.path is None else str(segment.path),
            "rebooted": segment.rebooted,
            "nbytes": segment.info.nbytes,
            "boot_id": f"{segment.info.boot_id:016x}",
            "name_lost": server.name_lost,
            "adopted": None if parts.adopting is None else parts.adopting.describe(),
            "why_cold": parts.segment.why_cold,
            "repaired_words": 0 if segment.master is None else segment.master.repaired,
            # What the kernel knows about: until then a store is answered WARMING.
            "populated_bytes": usage["populated_bytes"],
            "population_error": parts.populator.error,
            "huge_page_fraction": round(parts.populator.huge_page_fraction, 4),
        },
        "l1": _plain(usage),
        "index": None if parts.l1.index is None else parts.l1.index.status(),
        "traffic": counts,
        "namespaces": parts.namespaces.describe(busiest),
        "namespaces_refused": dict(parts.namespaces.refused),
        "sessions": [session.describe() for session in sessions[:SESSIONS_SHOWN_MAX]],
        "sessions_connected": sum(session.peer is not None for session in sessions),
        "deaths": parts.sessions.deaths,
        "sessions_dropped": parts.sessions.dropped,
        "stores_preparing": parts.stores.under_way,
        "stores_prepared": parts.stores.waited,
        "lookups_waiting": parts.lookups.under_way,
        "lookups_throttled": parts.lookups.throttled,
        "stores_waiting": len(parts.tier_waits),
        "stores_waited": parts.tier_waits.waited,
        "stored_waits": len(parts.stored_waits),
        "stores_waited_in_vain": parts.tier_waits.waited_in_vain,
        "stores_refused_full": parts.tier_waits.refused_full,
        "tiers": None if server.tiering is None else server.tiering.status(),
        "state_directory": parts.state_thread.status(),
        "companions": parts.companions.status(),
        "helpers": parts.helpers.status(),
        "operations": parts.operations.status(),
        **parts.observer.status(),
        "longest_turn": {
            "objects": server.longest_turn_objects,
            "ms": round(1e3 * parts.loop.longest_turn_s, 3),
        },
        "chunk_tokens": parts.settings.chunk_tokens,
        "counters": _counters(server),
        "not_shown": {name: rows for name, rows in left_out.items() if rows > 0},
    }


def _no_figures(error: BaseException) -> dict[str, Any]:
    return {"error": f"{type(error).__name__}: {error}"}


def _counters(server: Server) -> dict[str, int]:
    parts = server.parts
    counters = {**parts.l1.counters, **server.dispatch.counters, "loop_faults": parts.loop.faults}
    if parts.unread.dropped:
        counters["dropped_peers"] = parts.unread.dropped
    dropped = sum(carrier.garbage for carrier in parts.carriers)
    if dropped:
        counters["garbage"] = counters.get("garbage", 0) + dropped
    return counters


def _shorten(status: dict[str, Any]) -> None:
    """Make it fit: cut foreign texts (mostly errors), then leave rows out. Takes a few milliseconds at most, if there
    is that much to say."""
    cut = _Cut()
    for name in list(status):
        status[name] = cut(status[name])
    not_shown = status["not_shown"]
    if cut.texts:
        not_shown["texts"] = cut.texts
    left = len(encode(status)) - STATUS_BYTES_MAX
    for names in SHORTENED:
        left += sum(16 + len(name) for name in names)  # what `not_shown` may grow by
        tables = {name: table for name in names if (table := _table(status, name))}
        sizes = {name: len(encode(table)) for name, table in tables.items()}
        while left > 0 and sizes:
            name = max(sizes, key=sizes.__getitem__)
            rows = len(tables[name])
            tables[name] = _first(tables[name], rows // 2)
            not_shown[name] = not_shown.get(name, 0) + rows - rows // 2
            left += len(encode(tables[name])) - sizes.pop(name)
            if tables[name]:
                sizes[name] = len(encode(tables[name]))
        for name, table in tables.items():
            above, _, last = name.rpartition(".")
            (status[above] if above else status)[last] = table


class _Cut:
    """Plain values with longer texts cut; `texts` counts them."""

    def __init__(self) -> None:
        self.texts = 0

    def __call__(self, value: Any) -> Any:
        if isinstance(value, str) and len(value) > ERROR_EXCERPT_CHARS_MAX:
            self.texts += 1
            return value[: ERROR_EXCERPT_CHARS_MAX - 1] + "…"
        if isinstance(value, dict):
            return {key: self(each) for key, each in value.items()}
        if isinstance(value, list | tuple):
            return [self(each) for each in value]
        return value


def _table(status: Mapping[str, Any], path: str) -> Any:
    """The table at a dotted path; None if this server has none."""
    value: Any = status
    for name in path.split("."):
        value = (value or {}).get(name)
    return value


def _first(table: Any, rows: int) -> Any:
    return dict(islice(table.items(), rows)) if isinstance(table, dict) else table[:rows]


def traffic(server: Server) -> dict[str, Any]:
    """What was requested and found since the start: by workers in the index, and by calls."""
    return server.parts.observer.figures.status(server.parts.l1.tallies)


def _most(usage: Mapping[Any, HolderUsage]) -> list[tuple[Any, dict[str, int]]]:
    """Those who keep most from others, first."""
    rows = [(name, asdict(each)) for name, each in usage.items()]
    return sorted(rows, key=lambda row: -sum(row[1].values()))[:ROWS_SHOWN_MAX]


def _holders(server: Server, usage: KernelUsage) -> dict[str, dict[str, int]]:
    """What each uid, or over ZMQ each key, uses of everything shared, in one table."""
    parts = server.parts
    holders = dict(_most(usage.holders))
    for name, holder in holders.items():
        holder.update(connections=0, **parts.shares.describe(name), **parts.kernel.memory.describe(name))
    for session in parts.sessions:
        if session.origin in holders:
            holders[session.origin]["connections"] += session.peer is not None
    return holders


def _plain(value: Any) -> Any:
    """With string keys throughout, as every reader of MessagePack and JSON accepts them."""
    if isinstance(value, dict):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return value
