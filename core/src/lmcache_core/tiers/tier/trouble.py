"""What went wrong with a tier: its last errors, and the objects that it lost. Bounded; on the loop's thread."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

from lmcache_core import limits
from lmcache_core.clock import Clock
from lmcache_core.errors import excerpt, printable
from lmcache_core.tiers.l1 import TierReason

log = logging.getLogger(__name__)


class Trouble:
    """The last error of each operation (lookup, load, store, scan, …), until the operation succeeds again.

    If an operation is no longer tried, its error is dropped some time later, when the tier answers anything else.
    `counts`: the tier's counters, which include failures.
    """

    def __init__(self, tier: str, counts: Counter[str]) -> None:
        self._tier = tier
        self._counts = counts
        self._errors: dict[str, tuple[float, str]] = {}
        self._quiet_until = 0.0

    def note(self, what: str, error: str, now: float) -> None:
        """Keep the error for `status`, and log it, unless this tier has just logged another."""
        error = excerpt(error)
        self._errors.pop(what, None)  # the newest is last
        self._errors[what] = (now, error)
        if now >= self._quiet_until:
            self._quiet_until = now + limits.TIER_WARNING_PAUSE_S
            log.warning("tier %s: %s", self._tier, error)

    def failed(self, what: str, error: str, now: float) -> None:
        """An operation failed."""
        self._counts[f"{what}_failed"] += 1
        self.note(what, error, now)

    def well(self, what: str, now: float) -> None:
        """An operation succeeded."""
        if self._errors:
            self._errors.pop(what, None)
            old = [each for each, (at, _) in self._errors.items() if now - at > limits.TIER_ERROR_KEPT_S]
            for each in old:
                del self._errors[each]

    @property
    def text(self) -> str:
        """The last error; empty if the tier is well."""
        return next(reversed(self._errors.values()))[1] if self._errors else ""

    def age_s(self, now: float) -> float | None:
        """The age of that error; None if the tier is well."""
        return now - next(reversed(self._errors.values()))[0] if self._errors else None


class TierLoss(NamedTuple):
    """How a tier lost an object, or never got it. Objects lost together share one."""

    reason: TierReason
    at_s: float  # monotonic
    text: str  # the tier's own message, or who chose the victim; empty if the reason says it all


class Losses:
    """The last loss of each tier key that one tier should have and does not. When the younger half is full, the older
    half is dropped at once, so nothing here stalls."""

    def __init__(self, clock: Clock, remembered_max: int = limits.TIER_LOSSES_REMEMBERED) -> None:
        self._clock = clock
        self._half_max = max(1, remembered_max // 2)
        self._young: dict[bytes, TierLoss] = {}
        self._old: dict[bytes, TierLoss] = {}

    def note(self, tier_keys: Iterable[bytes], reason: TierReason, text: str = "") -> None:
        """These are not on the tier."""
        loss = TierLoss(reason, self._clock.now, printable(text)[: limits.ERROR_EXCERPT_CHARS_MAX])
        young = self._young
        for key in tier_keys:
            young[key] = loss
            if len(young) >= self._half_max:
                self._old = young
                young = self._young = {}

    def find(self, tier_key: bytes) -> TierLoss | None:
        """The last loss of this key, if it is remembered."""
        return self._young.get(tier_key) or self._old.get(tier_key)

    def __len__(self) -> int:
        """Keys that are remembered."""
        return len(self._young) + len(self._old)
