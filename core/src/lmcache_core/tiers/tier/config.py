"""The settings that every tier has, whatever its adapter."""

from __future__ import annotations

import math
from dataclasses import dataclass

from lmcache_core.limits import EVICT_RATIO, L1_WATERMARK, TIER_DEADLINE_S


@dataclass(frozen=True)
class TierConfig:
    """The settings of a tier, whatever its adapter. `capacity_bytes` None: unlimited, and nothing is evicted.

    `watermark` and `evict_ratio` are fractions of the capacity: above the first, eviction makes room for the second.
    `deadline_s` bounds one store, delete or scan; loads and lookups bring their own. `rescan_s`: how often the medium
    is scanned again (None: only at the start). `eviction_name`: the eviction policy's name for people.

    `store_cpu_share`: how many cores stores may keep busy on average. `store_io`: "idle" makes stores wait for a disk
    that others use, "normal" does not. `locality`: "local", "remote" or "auto", see `Tier.remote`.
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
    locality: str = "auto"
