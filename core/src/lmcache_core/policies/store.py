"""The built-in store policies."""

from __future__ import annotations

from collections.abc import Sequence

from lmcache_core.policies.contracts import StoreCandidate, StorePlan, StorePolicy, TierView


class DefaultStore(StorePolicy):
    """Stores everything to every tier; everything stays in the L1."""

    def __init__(self, settings: object = None) -> None:
        del settings  # it has no settings

    def plan(self, batch: Sequence[StoreCandidate], tiers: Sequence[TierView]) -> StorePlan:
        everything = range(len(batch))
        return StorePlan({tier.name: everything for tier in tiers})


class SkipL1Store(StorePolicy):
    """Stores everything to every tier, and drops it from the L1 once all have it: the L1 is only a buffer.

    Without a tier nothing is dropped, because the L1 has the only copy.
    """

    def __init__(self, settings: object = None) -> None:
        del settings  # it has no settings

    def plan(self, batch: Sequence[StoreCandidate], tiers: Sequence[TierView]) -> StorePlan:
        everything = range(len(batch))
        return StorePlan({tier.name: everything for tier in tiers}, everything if tiers else ())
