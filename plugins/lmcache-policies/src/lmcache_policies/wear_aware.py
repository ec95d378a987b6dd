"""Store to the tiers at once while that pays, and otherwise only what is asked for twice."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

from lmcache_core.policies import StoreCandidate, StorePlan, StorePolicy, TierView
from lmcache_policies.ghosts import Ghosts, fingerprint
from lmcache_policies.settings import WearAwareSettings

WINDOW_ASKS = 16384  # a verdict rests on about so many objects
WARM_ASKS = 4 * WINDOW_ASKS  # without a verdict, unless enough has come back before
WARM_RETURNS = 256
SURE = 0.1  # of what is written at once: by so much a change has to pay
NEVER = -1


class _Shadow:
    """A tier without bytes: a clock of the bytes that a rule would have written to it.

    What was stored or read within the last `capacity` of them is there, as in a cache that evicts what was used longest
    ago. `hits` and `writes`: bytes, the old ones faded.
    """

    __slots__ = ("hits", "now", "writes")

    def __init__(self) -> None:
        self.hits = self.writes = 0.0
        self.now = 0

    def store(self, nbytes: int) -> int:
        """Returns when it was stored."""
        self.now += nbytes
        self.writes += nbytes
        return self.now

    def read(self, used: int, nbytes: int, capacity: float) -> int:
        """It is asked for, and stored if it is not there. Returns when it was used."""
        if used == NEVER or self.now - used > capacity:
            return self.store(nbytes)
        self.hits += nbytes
        return self.now

    def fade(self, kept: float) -> None:
        self.hits *= kept
        self.writes *= kept


class _Seen:
    """What is known of one object. `at_once`, `at_reuse`: when it was last used in each shadow tier."""

    __slots__ = ("at_once", "at_reuse", "generation")

    def __init__(self, generation: int, at_once: int) -> None:
        self.generation = generation
        self.at_once = at_once
        self.at_reuse = NEVER


class WearAwareStore(StorePolicy):
    """Stores each object at once, or at its first reuse, by what a hit costs in bytes written.

    The request that computed it is the first to ask; reading it is the second, and so is computing it again after the
    L1 dropped it. Where most objects are never asked for again, storing at once costs a tier its write bandwidth and
    its lifetime, and the place of others; where most are, waiting loses their first return.

    Two shadow tiers, one for each rule, say what each would have written and hit: whatever returns after the L1 lost it
    has a new generation, whether a tier had it or it was computed again. An object goes to every healthy tier and stays
    in the L1. What is asked for again is planned again: the tiers know what they have, and one whose store failed, or
    that came later, gets it then. One whose history is lost (too long ago, server restarted) counts as new. Costs O(1)
    an object.

    Source: "cache on second hit" as in Maggs and Sitaraman, "Algorithmic nuggets in content delivery", CCR 2015, with
    an exact bounded history instead of their Bloom filter; the shadows are clocks of its bytes.
    """

    wants_reuse = True

    def __init__(self, settings: WearAwareSettings | None = None) -> None:
        settings = settings or WearAwareSettings()
        self.stores_at_once = settings.writes_per_hit_max > 0
        self._writes_per_hit_max = settings.writes_per_hit_max
        self._history = Ghosts(settings.remembered_keys_max)
        self._at_once, self._at_reuse = _Shadow(), _Shadow()
        self._asks = self._returns = 0

    def plan(self, batch: Sequence[StoreCandidate], tiers: Sequence[TierView]) -> StorePlan:
        targets = [tier.name for tier in tiers if tier.healthy]
        capacity = max((inf if tier.capacity_bytes is None else tier.capacity_bytes for tier in tiers), default=inf)
        positions = [at for at, each in enumerate(batch) if self._ask(each, capacity)]
        self._judge(len(batch))
        return StorePlan(dict.fromkeys(targets, positions) if positions else {})

    def _ask(self, candidate: StoreCandidate, capacity: float) -> bool:
        """Returns whether the tiers shall have it, too."""
        number = fingerprint(candidate.key, candidate.namespace)
        seen: _Seen | None = self._history.get_fingerprint(number)
        again = seen is not None
        if seen is None:
            seen = _Seen(candidate.generation, self._at_once.store(candidate.nbytes))
        else:
            self._note(seen, candidate, capacity)
        self._history.put_fingerprint(number, candidate.nbytes, seen)
        return again or self.stores_at_once

    def _note(self, seen: _Seen, candidate: StoreCandidate, capacity: float) -> None:
        nbytes = candidate.nbytes
        if seen.generation != candidate.generation:
            seen.generation = candidate.generation
            seen.at_once = self._at_once.read(seen.at_once, nbytes, capacity)
            seen.at_reuse = self._at_reuse.read(seen.at_reuse, nbytes, capacity)
            self._returns += 1
        elif seen.at_reuse == NEVER:
            seen.at_reuse = self._at_reuse.store(nbytes)

    def _judge(self, asks: int) -> None:
        at_once, at_reuse = self._at_once, self._at_reuse
        for shadow in (at_once, at_reuse):
            shadow.fade((1.0 - 1.0 / WINDOW_ASKS) ** asks)
        self._asks += asks
        if self._asks < WARM_ASKS and self._returns < WARM_RETURNS:
            return
        worth = self._writes_per_hit_max * (at_once.hits - at_reuse.hits) - (at_once.writes - at_reuse.writes)
        if abs(worth) > SURE * at_once.writes:
            self.stores_at_once = worth > 0
