"""Who is told how tiers fare, beside whoever asks them for something."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from lmcache_core.tiers.l1 import CommittedObject


class TierObserver(Protocol):
    """Called on the loop's thread; quick, and never raises."""

    def stored(self, tier: str, objects: Sequence[CommittedObject]) -> None:
        """The tier has these now."""

    def removed(self, tier: str, namespace: int, keys: Sequence[bytes]) -> None:
        """The tier does not have these any more."""

    def breaker_moved(self, tier: str, what: str, state: str, error: str) -> None:
        """`what`: "reads" or "writes". The tier is left alone (`open`), or used again (`closed`)."""

    def tier_changed(self, tier: str, action: str) -> None:
        """`add`, `drain`, `remove`, `reconfigure` or `replace`, at run time."""
