"""Whether the tiers have keys, or will: what is asked by who waits until something is stored."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import IntEnum

from lmcache_core.tiers.flow.store import StoreController
from lmcache_core.tiers.flow.whereabouts import TierAnswer
from lmcache_core.tiers.object.format import tier_keys
from lmcache_core.tiers.tier.tier import Tier


class Stored(IntEnum):
    """What a tier's books say of one key."""

    NO = 0  # not there, and not on its way
    YES = 1
    ON_ITS_WAY = 2


class StoredWatch:
    """Some keys, as they were committed until now. By the books: no medium is asked."""

    def __init__(
        self, tiers: Mapping[str, Tier], stores: StoreController, namespace: int, epoch: int, keys: Sequence[bytes]
    ) -> None:
        self._tiers = tiers
        self._stores = stores
        self._names = tier_keys(keys, namespace, epoch)
        self._arrived = stores.arrived
        self._left = list(range(len(keys)))  # stores go in order: the last key is on its way for longest

    def settled(self) -> bool:
        """Nothing of it is on its way any more. Each call goes on where the last one stopped."""
        while self._left and not self._on_its_way(self._names[self._left[-1]]):
            self._left.pop()
        return not self._left

    def answers(self) -> list[TierAnswer]:
        """What each tier has, in their order, and how it lost what it does not have. `found` are values of `Stored`."""
        told = []
        for tier in self._tiers.values():
            found = [self._state(tier, name) for name in self._names]
            lost = [
                tier.losses.find(name) if state is Stored.NO else None
                for name, state in zip(self._names, found, strict=True)
            ]
            told.append(TierAnswer(tier.name, lost, found, text=tier.last_error))
        return told

    def _on_its_way(self, name: bytes) -> bool:
        return any(self._state(tier, name) is Stored.ON_ITS_WAY for tier in self._tiers.values())

    def _state(self, tier: Tier, name: bytes) -> Stored:
        if tier.accounting.knows(name):
            return Stored.YES
        if self._stores.is_going(tier.name, name):
            return Stored.ON_ITS_WAY
        # Nobody knows yet where the policy sends what has just arrived, nor what a medium has that is still scanned.
        open_still = tier.accounting.scanning or (not tier.draining and not self._stores.has_planned(self._arrived))
        return Stored.ON_ITS_WAY if open_still else Stored.NO
