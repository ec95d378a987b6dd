"""A limit on the average processor time of background work."""

from __future__ import annotations

import math
from collections.abc import Callable

SAVED_UP_S = 10.0  # of idle time that may be saved up for a burst at full speed


class CpuShare:
    """A bucket of processor seconds that fills at `share` seconds per second. Work is charged after it was done, and
    new work waits until the debt is paid."""

    def __init__(self, share: float, now: Callable[[], float]) -> None:
        """`share`: in cores, positive; infinity means no limit. `now`: returns monotonic seconds."""
        self._now = now
        self._at_s = now()
        self._share = share
        self._left_s = share * SAVED_UP_S
        self.used_s = 0.0

    @property
    def share(self) -> float:
        """Cores."""
        return self._share

    @share.setter
    def share(self, share: float) -> None:
        self._fill()
        self._share = share
        self._left_s = min(self._left_s, share * SAVED_UP_S)

    def charge(self, cpu_s: float) -> None:
        """Charge processor time that was used."""
        self._fill()
        self.used_s += cpu_s
        self._left_s -= cpu_s

    @property
    def rests_until(self) -> float:
        """When work may begin again, on the clock of `now`; minus infinity if it may begin now."""
        self._fill()
        return -math.inf if self._left_s >= 0 else self._at_s - self._left_s / self._share

    @property
    def rests(self) -> bool:
        """Whether work must wait."""
        return self._now() < self.rests_until

    def _fill(self) -> None:
        now_s = self._now()
        gained_s = (now_s - self._at_s) * self._share if now_s > self._at_s else 0.0
        self._left_s = min(self._left_s + gained_s, self._share * SAVED_UP_S)
        self._at_s = now_s
