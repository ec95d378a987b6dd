"""Evicts the least recently used first."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lmcache_core.kernel.contracts import Entry, EvictionPolicy

__all__ = [
    "LruEviction",
]


class _End:
    """Both ends of the ring: its `newer` is the oldest entry, its `older` the newest."""

    __slots__ = ("newer", "older")

    def __init__(self) -> None:
        self.newer: Any = self
        self.older: Any = self


class LruEviction(EvictionPolicy):
    """Orders entries by their last use, in a ring threaded through the entries themselves.

    A held entry is outside the ring (`newer` is None) and returns at the recent end when it is released, so a victim is
    found without walking past held entries.
    """

    def __init__(self, settings: None = None) -> None:
        del settings
        self._end = _End()

    def insert(self, entries: Sequence[Entry]) -> None:
        """Make them the most recently used."""
        self._append([entry for entry in entries if not entry.holds])
        for entry in entries:
            if entry.holds:
                entry.older = entry.newer = None

    def access(self, entries: Sequence[Entry]) -> None:
        """Make them the most recently used; held ones will be when they are released."""
        used = [entry for entry in entries if entry.newer is not None]
        if used:
            used = list(dict.fromkeys(reversed(used)))[::-1]  # used twice in a batch: its last use counts
            self._take_out(used)
            self._append(used)

    def remove(self, entries: Sequence[Entry]) -> None:
        """Forget them."""
        self._take_out(entries)

    def held(self, entries: Sequence[Entry]) -> None:
        """Out of the ring: they cannot be victims."""
        self._take_out(entries)

    def released(self, entries: Sequence[Entry]) -> None:
        """Return them to the ring as the most recently used."""
        self._append([entry for entry in entries if entry.newer is None])

    def victims(self, nbytes: int) -> list[Entry]:
        """The oldest entries whose bytes suffice."""
        found: list[Entry] = []
        end = self._end
        entry = end.newer
        while nbytes > 0 and entry is not end:
            if not entry.holds:  # a caller that never calls `held` has its held entries in the ring
                found.append(entry)
                nbytes -= entry.nbytes
            entry = entry.newer
        return found

    def _append(self, entries: Sequence[Entry]) -> None:
        end = self._end
        last = end.older
        for entry in entries:
            last.newer = entry
            entry.older = last
            last = entry
        last.newer = end
        end.older = last

    def _take_out(self, entries: Sequence[Entry]) -> None:
        for entry in entries:
            newer = entry.newer
            if newer is not None:
                older = entry.older
                older.newer = newer
                newer.older = older
                entry.older = entry.newer = None
