"""Whether the server is ready for traffic, from its own figures; if not, why."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any


def why_not_ready(status: Mapping[str, Any], require_tiers: str) -> list[str]:
    """Empty: it is ready."""
    return list(_reasons(status, require_tiers))


def _reasons(status: Mapping[str, Any], require_tiers: str) -> Iterator[str]:
    pool, l1 = status["pool"], status["l1"]
    if status["server"]["draining"]:
        yield "the server is draining"
    if pool["population_error"]:
        yield f"the pool's memory could not be populated: {pool['population_error']}"
    elif pool["populated_bytes"] < l1["pool_bytes"]:
        yield f"{pool['populated_bytes']:,} of {l1['pool_bytes']:,} bytes of the pool are populated"
    tiers = (status["tiers"] or {}).get("tiers", [])
    # A breaker that is half open waits for a probe, which may hang: the tier is not back yet.
    away = [tier["name"] for tier in tiers if {tier[what]["breaker"] for what in ("reads", "writes")} != {"closed"}]
    if (require_tiers == "all" and away) or (require_tiers == "any" and tiers and len(away) == len(tiers)):
        yield f"tiers are down (their breakers are not closed): {', '.join(away)}"
