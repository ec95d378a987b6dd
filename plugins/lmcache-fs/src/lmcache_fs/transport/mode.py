"""Buffered or direct writes: what `io_mode = auto` decides.

Measured: a load of a file that is still in the page cache runs at 9 to 14 GB/s, one from the medium at 0.6 to 1. So
files go through the page cache while the machine has memory to spare for it; when memory is short they bypass it, since
then they would only evict other pages and not stay themselves.
"""

from __future__ import annotations

import time
from collections.abc import Callable

_SHORT_FRACTION = 0.1  # of the machine's memory
_LOOK_EVERY_S = 1.0


def memory_spare_fraction() -> float:
    """The part of the machine's memory that is free for new pages. 1.0 if the system does not say."""
    found: dict[str, int] = {}
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            for line in file:
                name, _, rest = line.partition(":")
                if name in ("MemTotal", "MemAvailable"):
                    found[name] = int(rest.split()[0])
    except OSError:
        return 1.0
    return found.get("MemAvailable", 1) / max(1, found.get("MemTotal", 1))


class WriteMode:
    """Chooses the mode of each write. Threads may race here: at worst memory is checked once too often."""

    def __init__(self, spare_fraction: Callable[[], float] = memory_spare_fraction) -> None:
        self._spare_fraction = spare_fraction
        self._looked_at = float("-inf")
        self._short = False
        self._direct_works = True

    def direct(self) -> bool:
        """True: bypass the page cache."""
        now = time.monotonic()
        if now - self._looked_at >= _LOOK_EVERY_S:
            self._looked_at = now
            self._short = self._spare_fraction() < _SHORT_FRACTION
        return self._short and self._direct_works

    def refused(self) -> None:
        """The medium does not support it: never try again."""
        self._direct_works = False
