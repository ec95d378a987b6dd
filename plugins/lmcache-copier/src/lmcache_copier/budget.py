"""What engines may have of the copier's memory: so much together, and so much each."""

from __future__ import annotations

import threading

from lmcache_core.errors import LimitError


class Budget:
    """Of one thing. Thread-safe."""

    def __init__(self, what: str, total: int, each: int) -> None:
        """`what`: in the plural, for errors."""
        self.what = what
        self.each = each
        self._total = total
        self._taken = 0
        self._lock = threading.Lock()

    def take(self, share: Share, amount: int) -> None:
        """Raises `LimitError`, and takes nothing then."""
        with self._lock:
            if share.taken + amount > self.each:
                raise LimitError(
                    f"{amount:,} {self.what}, and this engine has {share.taken:,} already: it may have {self.each:,}"
                )
            if self._taken + amount > self._total:
                raise LimitError(
                    f"{amount:,} {self.what}, and all engines have {self._taken:,} already: they may have "
                    f"{self._total:,}"
                )
            share.taken += amount
            self._taken += amount

    def free(self, share: Share, amount: int) -> None:
        """Of what was taken."""
        with self._lock:
            share.taken -= amount
            self._taken -= amount


class Share:
    """One engine's part of a budget."""

    def __init__(self, budget: Budget) -> None:
        self._budget = budget
        self.taken = 0

    def take(self, amount: int) -> None:
        """Raises `LimitError`."""
        self._budget.take(self, amount)

    def free(self, amount: int) -> None:
        """Of what was taken."""
        self._budget.free(self, amount)
