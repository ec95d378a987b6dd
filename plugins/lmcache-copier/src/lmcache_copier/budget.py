"""What engines may have of the copier's memory: so much together, and so much each."""

from __future__ import annotations

import threading
from collections import deque
from typing import NamedTuple

from lmcache_copier.limits import (
    FILES_MAX_EACH,
    FILES_MAX_TOTAL,
    JOB_BYTES_MAX_EACH,
    JOB_BYTES_MAX_TOTAL,
    ROWS_MAX_EACH,
    ROWS_MAX_TOTAL,
)
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

    @property
    def taken(self) -> int:
        """Of all engines."""
        with self._lock:
            return self._taken

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


class Shares(NamedTuple):
    """One engine's parts."""

    rows: Share
    files: Share
    job_bytes: Share


class Budgets:
    """All that engines share."""

    def __init__(self) -> None:
        self._rows = Budget("pages, or parts of large ones, of objects", ROWS_MAX_TOTAL, ROWS_MAX_EACH)
        self._files = Budget("files", FILES_MAX_TOTAL, FILES_MAX_EACH)
        self._job_bytes = Budget("bytes of jobs", JOB_BYTES_MAX_TOTAL, JOB_BYTES_MAX_EACH)

    def shares(self) -> Shares:
        """Of another engine."""
        return Shares(Share(self._rows), Share(self._files), Share(self._job_bytes))

    @property
    def taken(self) -> dict[str, int]:
        """What all engines have of each, as figures."""
        return {"rows": self._rows.taken, "files": self._files.taken, "job_bytes": self._job_bytes.taken}


class Charges:
    """What one thing of an engine's has taken of its shares: it is given back together, and once."""

    def __init__(self) -> None:
        self._taken: deque[tuple[Share, int]] = deque()

    def take(self, share: Share, amount: int) -> None:
        """Raises `LimitError`."""
        share.take(amount)
        self._taken.append((share, amount))

    def free(self) -> None:
        """All of it."""
        while self._taken:
            share, amount = self._taken.pop()
            share.free(amount)
