"""Route objects to tiers by their size."""

from __future__ import annotations

from collections.abc import Sequence

from lmcache_core.policies import StoreCandidate, StorePlan, StorePolicy, TierView
from lmcache_policies.settings import SizeAwareSettings


class SizeAwareStore(StorePolicy):
    """Each tier gets the objects of its sizes; a tier that the settings do not name gets all. L1 keeps them.

    A request to an object store costs about the same for 4 KiB as for 1 MiB, and a few large objects fill a small fast
    tier: so send large objects to the former and small ones to the latter. An object that fits no tier stays in the L1
    only.

    Source: routing by size as between the small- and large-item engines of CacheLib (Berg et al., OSDI 2020).
    """

    def __init__(self, settings: SizeAwareSettings) -> None:
        self._ranges = dict(settings.tiers)

    def plan(self, batch: Sequence[StoreCandidate], tiers: Sequence[TierView]) -> StorePlan:
        targets: dict[str, Sequence[int]] = {}
        for tier in tiers:
            sizes = self._ranges.get(tier.name)
            positions = [
                position
                for position, candidate in enumerate(batch)
                if sizes is None
                or (
                    candidate.nbytes >= sizes.min_bytes
                    and (sizes.max_bytes is None or candidate.nbytes <= sizes.max_bytes)
                )
            ]
            if positions:
                targets[tier.name] = positions
        return StorePlan(targets)
