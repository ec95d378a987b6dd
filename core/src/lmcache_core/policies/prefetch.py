"""The built-in prefetch policies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from lmcache_core.policies.contracts import PrefetchPlan, PrefetchPolicy, TierView


def first_with(count: int, found: Mapping[str, Sequence[bool]], tiers: Sequence[TierView]) -> list[str | None]:
    """For each of `count` keys the first tier in configured order that has it."""
    sources: list[str | None] = [None] * count
    for tier in reversed(tiers):
        for position, there in enumerate(found.get(tier.name, ())):
            if there:
                sources[position] = tier.name
    return sources


class DefaultPrefetch(PrefetchPolicy):
    """From the first tier that has it; out of the L1 again with its reader."""

    def __init__(self, settings: object = None) -> None:
        del settings  # there is nothing to set

    def plan(
        self, keys: Sequence[bytes], found: Mapping[str, Sequence[bool]], tiers: Sequence[TierView]
    ) -> PrefetchPlan:
        return PrefetchPlan(first_with(len(keys), found, tiers))


class RetainPrefetch(PrefetchPolicy):
    """From the first tier that has it; it stays in the L1 until it is evicted."""

    def __init__(self, settings: object = None) -> None:
        del settings  # there is nothing to set

    def plan(
        self, keys: Sequence[bytes], found: Mapping[str, Sequence[bool]], tiers: Sequence[TierView]
    ) -> PrefetchPlan:
        return PrefetchPlan(first_with(len(keys), found, tiers), retain=True)
