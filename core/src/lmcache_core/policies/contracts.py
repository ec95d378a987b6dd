"""The contracts of the policies: pure, batched, without I/O, locks or clocks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from lmcache_core.kernel.contracts import Entry, EvictionPolicy

__all__ = [
    "Entry",
    "EvictionPolicy",
    "PrefetchPlan",
    "PrefetchPolicy",
    "StoreCandidate",
    "StorePlan",
    "StorePolicy",
    "TierView",
]


class TierView(NamedTuple):
    """What a policy sees of a tier, in configured order."""

    name: str
    healthy: bool  # its breaker is closed


class StoreCandidate(NamedTuple):
    """An object that was just committed to the L1, or, with `reused`, one that was just read again."""

    key: bytes
    namespace: int
    nbytes: int
    reused: bool = False


class StorePlan(NamedTuple):
    """`targets`: tier name → positions in the batch to store there. `drop`: positions to delete from the L1
    once every target has them (at once for a position without a target)."""

    targets: Mapping[str, Sequence[int]]
    drop: Sequence[int] = ()


class StorePolicy(ABC):
    """Decides which tiers get what was committed, and what then leaves the L1."""

    wants_reuse: bool = False  # True: `plan` is also called for objects that were read, as `reused`

    @abstractmethod
    def plan(self, batch: Sequence[StoreCandidate], tiers: Sequence[TierView]) -> StorePlan:
        """The caller guarantees unique keys in a batch; tiers not named in `tiers` do not exist."""


class PrefetchPlan(NamedTuple):
    """`sources[i]` is the tier to load key i from, or None. `retain`: keep loaded objects in the L1 after their
    first reader; otherwise they are dropped with it."""

    sources: Sequence[str | None]
    retain: bool = False


class PrefetchPolicy(ABC):
    """Decides which tier loads a key that the L1 lacks."""

    @abstractmethod
    def plan(
        self, keys: Sequence[bytes], found: Mapping[str, Sequence[bool]], tiers: Sequence[TierView]
    ) -> PrefetchPlan:
        """`found[tier][i]`: that tier has key i. Tiers that did not answer in time are missing from `found`."""

    def retains(self, keys: Sequence[bytes], room: int) -> Sequence[bool]:
        """For each of these keys, whether it stays in the L1 after its first reader all the same.

        Called with those that are about to be loaded, in order, where the plan does not `retain`. `room`: so many of
        them fit into the L1 without an eviction, now or soon. What stays is evicted like everything else. By default
        nothing stays.
        """
        del room
        return [False] * len(keys)
