"""Eviction, store and prefetch policies: the contracts, and the built-in ones."""

from lmcache_core.kernel.tenants import Quota, TenantedPolicy
from lmcache_core.policies.contracts import (
    Entry,
    EvictionPolicy,
    PrefetchPlan,
    PrefetchPolicy,
    StoreCandidate,
    StorePlan,
    StorePolicy,
    TierView,
)

__all__ = [
    "Entry",
    "EvictionPolicy",
    "PrefetchPlan",
    "PrefetchPolicy",
    "Quota",
    "StoreCandidate",
    "StorePlan",
    "StorePolicy",
    "TenantedPolicy",
    "TierView",
]
