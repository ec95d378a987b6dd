"""Store to the tiers only what has been asked for twice."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

from lmcache_core.policies import StoreCandidate, StorePlan, StorePolicy, TierView
from lmcache_policies.ghosts import Ghosts, fingerprint
from lmcache_policies.settings import FirstReuseSettings


class _Known(Enum):
    ONCE = 1  # computed once, not asked for since
    STORED = 2  # stored to the tiers


class FirstReuseStore(StorePolicy):
    """An object goes to every healthy tier at its first reuse, and stays in the L1.

    The request that computed it is the first to ask; reading it is the second, and so is computing it again after
    the L1 dropped it. Most chunks of a prompt are never asked for again, and they cost a tier its write bandwidth
    and its lifetime.

    Source: admission at the second request, as in Maggs and Sitaraman, "Algorithmic nuggets in content delivery", CCR
    2015 ("cache on second hit"), with an exact bounded history instead of their Bloom filter. An object whose history
    is lost (too long ago, server restarted) is stored at its next read.
    """

    wants_reuse = True

    def __init__(self, settings: FirstReuseSettings | None = None) -> None:
        settings = settings or FirstReuseSettings()
        self._history = Ghosts(settings.remembered_keys_max)

    def plan(self, batch: Sequence[StoreCandidate], tiers: Sequence[TierView]) -> StorePlan:
        targets = [tier.name for tier in tiers if tier.healthy]
        positions = [position for position, candidate in enumerate(batch) if self._admit(candidate, bool(targets))]
        return StorePlan(dict.fromkeys(targets, positions) if positions else {})

    def _admit(self, candidate: StoreCandidate, can_store: bool) -> bool:
        number = fingerprint(candidate.key, candidate.namespace)
        known = self._history.get_fingerprint(number)
        # Committed again although it was stored: no tier returned it, so none has it any more.
        wanted = known is not _Known.STORED if candidate.reused else known is not None
        stored = wanted and can_store
        self._history.put_fingerprint(number, candidate.nbytes, _Known.STORED if stored else known or _Known.ONCE)
        return stored
