"""One configured tier: adapter, lanes, breakers, serde chain, accounting."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lmcache_core.limits import EVICT_RATIO, L1_WATERMARK, TIER_DEADLINE_S
from lmcache_core.policies.contracts import EvictionPolicy
from lmcache_core.serde.contract import Serde
from lmcache_core.tiers.contract import AdapterContext, L2Adapter


@dataclass(frozen=True)
class TierConfig:
    """What is the tier's, whatever its adapter. `capacity_bytes` None: unlimited, and nothing is evicted."""

    capacity_bytes: int | None = None
    watermark: float = L1_WATERMARK
    evict_ratio: float = EVICT_RATIO
    deadline_s: float = TIER_DEADLINE_S
    connections: int = 4  # also the number of load lanes and of store lanes is bounded by it


def adapter_context(name: str, connections: int) -> AdapterContext:
    """The context to build an adapter with: `factory(settings, adapter_context(name, config.connections))`."""
    ...


class Tier:
    """`Tier(name, adapter, config, serdes=[…], eviction=policy | None)`. Give it to `Tiering`, which starts it.

    `eviction` is an instance of its own (one policy object orders one store); None: the tier runs none."""

    def __init__(
        self,
        name: str,
        adapter: L2Adapter,
        config: TierConfig = TierConfig(),
        *,
        serdes: Sequence[Serde] = (),
        eviction: EvictionPolicy | None = None,
    ) -> None: ...

    def status(self) -> dict[str, Any]: ...
