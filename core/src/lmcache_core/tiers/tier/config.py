"""What is set for a tier, whatever its adapter."""

from __future__ import annotations

import math
from dataclasses import dataclass

from lmcache_core.limits import EVICT_RATIO, L1_WATERMARK, TIER_DEADLINE_S


@dataclass(frozen=True)
class TierConfig:
    """What is the tier's, whatever its adapter. `capacity_bytes` None: unlimited, and nothing is evicted.

    `watermark` and `evict_ratio` are fractions of the capacity: above the first, eviction makes room for the
    second. `deadline_s` bounds one store, delete or scan; loads and lookups bring their own. `rescan_s`: how often
    the medium is counted again (None: only at the start). `eviction_name`: what people call the eviction policy.

    `store_cpu_share`: cores that stores to it may keep busy on average. `store_io`: "idle" lets them wait for a
    disk that others use, "normal" does not.
    """

    capacity_bytes: int | None = None
    watermark: float = L1_WATERMARK
    evict_ratio: float = EVICT_RATIO
    deadline_s: float = TIER_DEADLINE_S
    connections: int = 4
    rescan_s: float | None = None
    store_cpu_share: float = math.inf
    store_io: str = "normal"
    eviction_name: str = ""
