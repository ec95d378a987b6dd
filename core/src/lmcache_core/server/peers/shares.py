"""Shares of common tables: rows of the worker table, layouts, namespaces, waiting requests.

A *holder* is the owner of sessions, as in the kernel's ledger: a uid, or over ZMQ a CURVE key. On most nodes all
workers have one uid, so one holder may have nearly everything; but nobody may have the rest, so that the next user
finds something. So a cap is a share of what is free: the less is left, the less each may add. Places in use are never
taken away.
"""

from __future__ import annotations

from collections import Counter

from lmcache_core import limits
from lmcache_core.limits import SHARE_FEW


class Share:
    """One table of `total` places, counted by holder.

    A single holder has at most `fraction` of them. With several, a holder gets another place as long as it has at most
    `fraction / (1 - fraction)` times the number that is then free: the largest holder is refused first, and one with
    next to nothing gets the last place.
    """

    def __init__(self, total: int, fraction: float = 1.0) -> None:
        self.total = total
        self._fraction = fraction
        self._few = max(1, total // SHARE_FEW)
        self._by_holder: Counter[str] = Counter()
        self.taken = 0

    def of(self, holder: str) -> int:
        """Places that the holder has."""
        return self._by_holder.get(holder, 0)

    def full_for(self, holder: str, beyond: int = 0) -> bool:
        """Whether the holder is refused another place. `beyond`: places over its share, and over the total, that it may
        have temporarily."""
        left = self.total + beyond - self.taken - 1
        more = self._by_holder.get(holder, 0) + 1 - beyond  # every store comes here; `[…]` would run Python code
        return left < 0 or (more > self._few and more * (1 - self._fraction) > left * self._fraction)

    def take(self, holder: str, places: int = 1) -> None:
        """Give the holder more places: it was checked before, or has a right to them."""
        self._by_holder[holder] += places
        self.taken += places

    def free(self, holder: str, places: int = 1) -> None:
        """Take back places."""
        self.taken -= places
        self._by_holder[holder] -= places
        if not self._by_holder[holder]:  # users come and go
            del self._by_holder[holder]


class Shares:
    """All such tables of one server. Lives on the loop's thread."""

    def __init__(self, fraction: float) -> None:
        """`fraction`: of each table, for one holder while nobody else uses it."""
        self.rows = Share(limits.WORKERS_MAX - limits.ROWS_RETURNING_MAX, fraction)
        self.layouts = Share(limits.LAYOUTS_MAX - 1, fraction)
        self.namespaces = Share(limits.NAMESPACES_MAX, fraction)
        self.lookups = Share(limits.LOOKUPS_WAITING_MAX, fraction)
        self.stores_preparing = Share(limits.STORES_WAITING_MAX, fraction)
        self.stores_waiting = Share(limits.STORES_WAITING_MAX, fraction)
        self.explains = Share(limits.EXPLAINS_UNDER_WAY_MAX, fraction)
        self.stored_waits = Share(limits.STORED_WAITS_MAX, fraction)

    def describe(self, holder: str) -> dict[str, int]:
        """For `status`."""
        return {
            "rows": self.rows.of(holder),
            "namespaces": self.namespaces.of(holder),
            "layouts": self.layouts.of(holder),
            "lookups_waiting": self.lookups.of(holder),
            "stores_waiting": self.stores_preparing.of(holder) + self.stores_waiting.of(holder),
            "explains_waiting": self.explains.of(holder),
            "stored_waits": self.stored_waits.of(holder),
        }
