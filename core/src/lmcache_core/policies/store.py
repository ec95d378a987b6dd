"""The built-in store policies."""

from __future__ import annotations

from collections.abc import Sequence

from lmcache_core.policies.contracts import StoreCandidate, StorePlan, StorePolicy, TierView


class DefaultStore(StorePolicy):
    """Everything to every tier; everything stays in the L1."""

    def __init__(self, settings: object = None) -> None:
        del settings  # there is nothing to set

    def plan(self, batch: Sequence[StoreCandidate], tiers: Sequence[TierView]) -> StorePlan:
        everything = range(len(batch))
        return StorePlan({tier.name: everything for tier in tiers})


class SkipL1Store(StorePolicy):
    """Everything to every tier, and out of the L1 once all have it: the L1 is only a buffer.

    Without a tier nothing is dropped: an object that is nowhere else is not thrown away.
    """

    def __init__(self, settings: object = None) -> None:
        del settings  # there is nothing to set

    def plan(self, batch: Sequence[StoreCandidate], tiers: Sequence[TierView]) -> StorePlan:
        everything = range(len(batch))
        return StorePlan({tier.name: everything for tier in tiers}, everything if tiers else ())
