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
    """What a policy sees of the tiers, in configured order.

    Attributes:
        name: Its name in the settings.
        healthy: Whether its breaker is closed, so that it is used. An unhealthy one may recover at any time.
        capacity_bytes: What it may hold, by its settings; None: no bound.
    """

    name: str
    healthy: bool
    capacity_bytes: int | None = None


class StoreCandidate(NamedTuple):
    """An object that was just committed to the L1, or read again.

    Attributes:
        key: 32 opaque bytes.
        namespace: The 64-bit id of its namespace.
        nbytes: Bytes of the object, before any serde.
        reused: It was read again rather than committed. Only for policies with `wants_reuse`.
        generation: Of its incarnation in the L1. Another one than the last time: the L1 had lost it in between.
    """

    key: bytes
    namespace: int
    nbytes: int
    reused: bool = False
    generation: int = 0


class StorePlan(NamedTuple):
    """`targets`: tier name → positions in the batch to store there. `drop`: positions to delete from the L1 once every
    target has them (at once for a position without a target)."""

    targets: Mapping[str, Sequence[int]]
    drop: Sequence[int] = ()


class StorePolicy(ABC):
    """Decides which tiers get each committed object, and what the L1 drops afterwards. Called on the server's loop: be
    quick.

    Built as `Policy(settings)`, with an instance of the settings model that its ComponentSpec names (None: it has
    none).
    Pure: no I/O, no clock, no lock. If it raises, nothing of the batch is stored, which is counted and logged.

    Attributes:
        wants_reuse: True: `plan` is also called for objects that were read, as `reused`.
    """

    wants_reuse: bool = False

    @abstractmethod
    def plan(self, batch: Sequence[StoreCandidate], tiers: Sequence[TierView]) -> StorePlan:
        """The caller guarantees unique keys in a batch; other tiers than those in `tiers` do not exist."""


class PrefetchPlan(NamedTuple):
    """`sources[i]` is the tier to load key i from, or None. `retain`: keep loaded objects in the L1 after their first
    reader; otherwise they are dropped after it."""

    sources: Sequence[str | None]
    retain: bool = False


class PrefetchPolicy(ABC):
    """Decides which tier loads a key that the L1 does not have. Called on the server's loop: be quick.

    Built as `Policy(settings)`, with an instance of the settings model that its ComponentSpec names (None: it has
    none).
    Pure: no I/O, no clock, no lock.
    """

    @abstractmethod
    def plan(
        self, keys: Sequence[bytes], found: Mapping[str, Sequence[bool]], tiers: Sequence[TierView]
    ) -> PrefetchPlan:
        """`found[tier][i]`: whether that tier has key i. Tiers that did not answer in time are missing from `found`."""

    def retains(self, keys: Sequence[bytes], room: int) -> Sequence[bool]:
        """For each of these keys, whether it stays in the L1 after its first reader anyway.

        Called with the keys that are about to be loaded, in order, if the plan does not `retain`. `room`: how many of
        them fit into the L1 without an eviction, now or soon. Kept objects are evicted like all others. By default
        nothing is kept.
        """
        del room
        return [False] * len(keys)
