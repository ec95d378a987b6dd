"""Shares of what everybody takes from one table: rows of the worker table, layouts, namespaces, what may wait.

A *holder* is who the sessions belong to, as in the kernel's ledger: a uid, over ZMQ a CURVE key. On most nodes all
workers have one uid, so one holder may have nearly all; and none may have the rest, or the next user finds nothing.
So a cap is a share of what is free: the less is left, the less more each may have. What somebody has is never taken
away.
"""

from __future__ import annotations

from collections import Counter

from lmcache_core import limits
from lmcache_core.limits import SHARE_FEW


class Share:
    """One table of `total` places, counted by holder.

    A holder that is alone has at most `fraction` of them. Of several, each is given one more for as long as it has at
    most `fraction / (1 - fraction)` times what is then free: whoever has most is refused first, and one that has next
    to nothing is given the last place.
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
        """Whether the holder is refused one more. `beyond`: places over its share, and over the total, that it may have
        for a moment."""
        left = self.total + beyond - self.taken - 1
        more = self._by_holder.get(holder, 0) + 1 - beyond  # asked by every store; for `[…]` a Counter runs Python code
        return left < 0 or (more > self._few and more * (1 - self._fraction) > left * self._fraction)

    def take(self, holder: str, places: int = 1) -> None:
        """The holder has so many more: it was asked before, or has a right to them."""
        self._by_holder[holder] += places
        self.taken += places

    def free(self, holder: str, places: int = 1) -> None:
        """It has so many less."""
        self.taken -= places
        self._by_holder[holder] -= places
        if not self._by_holder[holder]:  # users come and go
            del self._by_holder[holder]


class Shares:
    """All that is counted so, of one server. Lives on the loop's thread."""

    def __init__(self, fraction: float) -> None:
        """`fraction`: of each table, for one holder while nobody else has anything there."""
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
