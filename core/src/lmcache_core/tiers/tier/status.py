"""What a tier says of itself."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from lmcache_core.kernel.tenants import TenantUsage

if TYPE_CHECKING:
    from lmcache_core.tiers.tier.tier import Tier

TENANTS_SHOWN_MAX = 50  # of one tier: `status` is one frame, and `quota` tells all


def tier_status(tier: Tier) -> dict[str, Any]:
    """Plain values, cheap to make."""
    counts = tier.accounting
    return {
        "name": tier.name,
        "draining": tier.draining,
        "wrap": tier.wrap,
        "reads": {"breaker": str(tier.reads.state), "opened": tier.reads.opened},
        "writes": {"breaker": str(tier.writes.state), "opened": tier.writes.opened},
        "last_error": tier.last_error,
        "last_error_age_s": tier.last_error_age_s,
        "bytes_used": counts.bytes_used,
        "bytes_reserved": counts.bytes_reserved,
        "bytes_leaving": counts.bytes_leaving,
        "objects": counts.objects,
        "capacity_bytes": counts.capacity_bytes,
        "tenants": [] if counts.tenancy is None else _tenants(counts.tenancy.usage()),
        "scan": str(tier.rebuild.state),
        "leads": counts.leads,
        "deletes": {
            "done": tier.reclaim.deleted,
            "evicted": tier.reclaim.evicted,
            "failed": tier.reclaim.failed,  # tries: an object that the medium does not let go of counts each time
            "waiting": tier.reclaim.waiting,
            "by_others": tier.rebuild.forgotten,
            "last_error": tier.reclaim.last_error,
            "in_doubt": len(tier.doubts),
        },
        "lanes": {
            lane.name: {"queued": lane.queued, "running": lane.running, "hung": lane.hung} for lane in tier.lanes
        },
        "counts": dict(tier.counts),
        "store_cpu": {
            "used_s": tier.store_cpu.used_s,
            "share": None if math.isinf(tier.store_cpu.share) else tier.store_cpu.share,
            "rests": tier.store_cpu.rests,
        },
        "latencies": {what: latency.status() for what, latency in tier.latencies.items()},
    }


def _tenants(usage: list[TenantUsage]) -> list[dict[str, Any]]:
    """Those that use most."""
    return [asdict(each) for each in sorted(usage, key=lambda each: -each.used_bytes)[:TENANTS_SHOWN_MAX]]
