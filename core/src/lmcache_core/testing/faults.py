"""Makes any adapter fail or lie on demand. Also for drills, by `wrap` in a tier's table."""

from lmcache_core.tiers.drills.faults import OPERATIONS, Fault, FaultRule, FaultScript, FaultyAdapter

__all__ = ["OPERATIONS", "Fault", "FaultRule", "FaultScript", "FaultyAdapter"]
