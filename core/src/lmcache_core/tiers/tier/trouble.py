"""What went wrong with a tier: its last errors, and the objects that it lost. Bounded; on the loop's thread."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

from lmcache_core.clock import Clock
from lmcache_core.limits import (
    ERROR_EXCERPT_CHARS_MAX,
    TIER_ERROR_KEPT_S,
    TIER_LOSSES_REMEMBERED,
    TIER_WARNING_PAUSE_S,
)
from lmcache_core.tiers.l1 import TierReason

log = logging.getLogger(__name__)


class Trouble:
    """The last error of each thing that is tried (lookup, load, store, scan, …), until that goes well again.

    An error of something that is not tried any more goes when the tier answers anything else, after a while. `counts`:
    the tier's own, where failures are counted, too.
    """

    def __init__(self, tier: str, counts: Counter[str]) -> None:
        self._tier = tier
        self._counts = counts
        self._errors: dict[str, tuple[float, str]] = {}
        self._quiet_until = 0.0

    def note(self, what: str, error: str, now: float) -> None:
        """Keep it for `status`, and log it, unless this tier has logged another a moment ago."""
        self._errors.pop(what, None)  # the newest stands last
        self._errors[what] = (now, error)
        if now >= self._quiet_until:
            self._quiet_until = now + TIER_WARNING_PAUSE_S
            log.warning("tier %s: %s", self._tier, error)

    def failed(self, what: str, error: str, now: float) -> None:
        """It was tried, and failed."""
        self._counts[f"{what}_failed"] += 1
        self.note(what, error, now)

    def well(self, what: str, now: float) -> None:
        """It was tried, and went well."""
        if self._errors:
            self._errors.pop(what, None)
            old = [each for each, (at, _) in self._errors.items() if now - at > TIER_ERROR_KEPT_S]
            for each in old:
                del self._errors[each]

    @property
    def text(self) -> str:
        """The last error; empty when the tier is well."""
        return next(reversed(self._errors.values()))[1] if self._errors else ""

    def age_s(self, now: float) -> float | None:
        """How long ago it was; None when the tier is well."""
        return now - next(reversed(self._errors.values()))[0] if self._errors else None


class TierLoss(NamedTuple):
    """How a tier lost an object, or never got it. One stands for all that went together."""

    reason: TierReason
    at_s: float  # monotonic
    text: str  # the tier's own words, or who chose it; empty where the reason says all


class Losses:
    """What one tier was to have and does not have, by tier key: the last of it. The older half is forgotten at once
    when the younger one is full: nothing here ever stalls."""

    def __init__(self, clock: Clock, remembered_max: int = TIER_LOSSES_REMEMBERED) -> None:
        self._clock = clock
        self._half_max = max(1, remembered_max // 2)
        self._young: dict[bytes, TierLoss] = {}
        self._old: dict[bytes, TierLoss] = {}

    def note(self, tier_keys: Iterable[bytes], reason: TierReason, text: str = "") -> None:
        """These are not on the tier."""
        loss = TierLoss(reason, self._clock.now, text[:ERROR_EXCERPT_CHARS_MAX])
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
