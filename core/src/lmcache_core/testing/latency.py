"""Makes any adapter as slow as a medium that is not at hand. Also for drills, by `wrap` in a tier's table."""

from lmcache_core.tiers.drills.latency import LatencyAdapter

__all__ = ["LatencyAdapter"]
