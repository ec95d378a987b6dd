"""The built-in prefetch policies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from lmcache_core.limits import PREFETCHES_REMEMBERED
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
    """Loads from the first tier that has the key. What is loaded a second time stays in the L1 until it is evicted, and
    so does what fits without evicting; everything else is dropped after its reader."""

    def __init__(self, settings: object = None) -> None:
        del settings  # it has no settings
        self._young: set[bytes] = set()  # keys that were loaded recently; the older half is forgotten at once
        self._old: set[bytes] = set()

    def plan(
        self, keys: Sequence[bytes], found: Mapping[str, Sequence[bool]], tiers: Sequence[TierView]
    ) -> PrefetchPlan:
        return PrefetchPlan(first_with(len(keys), found, tiers))

    def retains(self, keys: Sequence[bytes], room: int) -> Sequence[bool]:
        return [self._seen(key) or at < room for at, key in enumerate(keys)]

    @property
    def remembered(self) -> int:
        """How many of the keys that were loaded lately it knows."""
        return len(self._young) + len(self._old)

    def _seen(self, key: bytes) -> bool:
        """Whether this key was loaded before; remembers it."""
        known = key in self._young or key in self._old
        self._young.add(key)
        if len(self._young) >= PREFETCHES_REMEMBERED // 2:
            self._old, self._young = self._young, set()
        return known


class RetainPrefetch(PrefetchPolicy):
    """Loads from the first tier that has the key; it stays in the L1 until it is evicted."""

    def __init__(self, settings: object = None) -> None:
        del settings  # it has no settings

    def plan(
        self, keys: Sequence[bytes], found: Mapping[str, Sequence[bool]], tiers: Sequence[TierView]
    ) -> PrefetchPlan:
        return PrefetchPlan(first_with(len(keys), found, tiers), retain=True)
