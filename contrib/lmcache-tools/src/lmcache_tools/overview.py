"""What an operator watches: the figures of `top`, from the current `status` and the previous one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lmcache_core.observe.troubles import troubles_of

Figures = Mapping[str, Any]


def overview(status: Figures, before: Figures | None = None) -> dict[str, Any]:
    """Plain values. Sizes in bytes; `hit_rate` since the server's start; `now` covers the time since `before`: rates
    per second, and the hit rate, None without lookups. `now` is None without a `before` of the same server, or if no
    time has passed."""
    server, l1, lookups = status["server"], status["l1"], status["traffic"]["lookups"]
    return {
        "name": server["name"],
        "state": "draining" if server["draining"] else "serving",
        "pid": server["pid"],
        "uptime_s": server["uptime_s"],
        "hit_rate": lookups["hit_rate"],
        "hits": lookups["hits"],
        "keys": lookups["keys"],
        "totals": _totals(status),
        "now": None if before is None else _since(status, before),
        "misses": dict(sorted(lookups["misses"].items(), key=lambda item: -item[1])),
        "stores": [_pool(status), *(_tier(status, tier) for tier in _tiers(status))],
        "tenants": _tenants(status),
        "holders": l1["holders"],
        "clients": {"connected": status["sessions_connected"] - 1, "died": status["deaths"]},
        "troubles": list(troubles_of(status)),
    }


def _totals(status: Figures) -> dict[str, float]:
    traffic, counters = status["traffic"], status["counters"]
    return {
        "lookups": traffic["lookups"]["calls"],
        "retrieves": traffic["retrieves"]["calls"],
        "read_bytes": traffic["retrieves"]["bytes"],
        "stored_bytes": counters.get("stored_bytes", 0),
        "evictions": status["l1"]["counters"]["evictions"],
    }


def _since(status: Figures, before: Figures) -> dict[str, float | None] | None:
    elapsed_s = status["server"]["uptime_s"] - before["server"]["uptime_s"]
    if elapsed_s <= 0 or status["pool"]["boot_id"] != before["pool"]["boot_id"]:
        return None
    now, then = _totals(status), _totals(before)
    lookups, former = status["traffic"]["lookups"], before["traffic"]["lookups"]
    keys, hits = lookups["keys"] - former["keys"], lookups["hits"] - former["hits"]
    found: dict[str, float | None] = {name: (now[name] - then[name]) / elapsed_s for name in now}
    return found | {"hit_rate": hits / keys if keys else None}


def _tiers(status: Figures) -> list[Figures]:
    return list((status["tiers"] or {}).get("tiers", []))


def _pool(status: Figures) -> dict[str, Any]:
    l1, stored = status["l1"], status["counters"].get("stored_objects", 0)
    return {
        "name": "l1",
        "used_bytes": l1["used_bytes"],
        "capacity_bytes": l1["pool_bytes"],
        "objects": l1["objects_by_state"]["ready"],
        "loaded": None,
        "stored": stored,
        "evicted": l1["counters"]["evictions"],
        "waiting": None,
        "load_s": None,
        "store_s": None,
        "state": "draining" if status["server"]["draining"] else "in use",
    }


def _tier(status: Figures, tier: Figures) -> dict[str, Any]:
    stopped = [what for what in ("reads", "writes") if tier[what]["breaker"] != "closed"]
    state = "draining" if tier["draining"] else "in use"
    return {
        "name": tier["name"],
        "used_bytes": tier["bytes_used"],
        "capacity_bytes": tier["capacity_bytes"],
        "objects": tier["objects"],
        "loaded": tier["counts"].get("loaded", 0),
        "stored": tier["counts"].get("store_done", 0),
        "evicted": tier["deletes"]["evicted"],
        "waiting": status["tiers"]["stores"]["dirty"].get(tier["name"], 0),
        "load_s": _mean(tier["latencies"]["load"]),
        "store_s": _mean(tier["latencies"]["store"]),
        "state": f"{' and '.join(stopped)} stopped" if stopped else state,
    }


def _mean(latency: Figures) -> float | None:
    calls = sum(latency["counts"])
    return latency["seconds"] / calls if calls else None


def _tenants(status: Figures) -> list[dict[str, Any]]:
    """One row for each store of each tenant; the one without a name covers all namespaces without a tenant."""
    stores = [("l1", status["l1"]["tenants"]), *((tier["name"], tier["tenants"]) for tier in _tiers(status))]
    fields = ("used_bytes", "reserved_bytes", "limit_bytes")
    rows = [
        {"tenant": row["name"], "store": store, **{field: row[field] for field in fields}}
        for store, tenants in stores
        for row in tenants
    ]
    return sorted(rows, key=lambda row: str(row["tenant"]))
