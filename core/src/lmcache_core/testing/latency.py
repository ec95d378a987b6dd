"""Makes any adapter as slow as a medium that one does not have at hand. For drills, too: `wrap` in a tier's table."""

from lmcache_core.tiers.drills.latency import LatencyAdapter

__all__ = ["LatencyAdapter"]
