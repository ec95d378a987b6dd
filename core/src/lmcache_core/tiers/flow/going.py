"""Which objects are on their way to a tier: planned for it, and neither stored there nor lost for it yet."""

from __future__ import annotations

from collections.abc import Iterable

_SHARDS = 64  # a large dictionary that grows stalls the loop: some hundred thousand objects may wait for a tier


class Going:
    """Of one tier. A key may be on its way more than once: committed again while its former incarnation waits."""

    def __init__(self) -> None:
        self._shards: list[dict[bytes, int]] = [{} for _ in range(_SHARDS)]

    def add(self, tier_key: bytes) -> None:
        shard = self._shards[tier_key[0] % _SHARDS]
        shard[tier_key] = shard.get(tier_key, 0) + 1

    def end(self, tier_keys: Iterable[bytes]) -> None:
        """Each is on its way once less."""
        for tier_key in tier_keys:
            shard = self._shards[tier_key[0] % _SHARDS]
            left = shard.pop(tier_key, 0) - 1
            if left > 0:
                shard[tier_key] = left

    def __contains__(self, tier_key: bytes) -> bool:
        return tier_key in self._shards[tier_key[0] % _SHARDS]
