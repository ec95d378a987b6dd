"""A doubly linked list whose links stand in the entries themselves.

A million residents cannot afford a node or a dictionary slot each, and a list that grows by itself never stalls.
An entry stands on one chain at most; one that stands on none is *parked*: a walk for victims met it with holds
and took it off, so that no later walk meets it again. `released` puts it back.
"""

from __future__ import annotations

from typing import Any

from lmcache_core.policies import Entry


class Chain:
    """From the oldest (`newer` of the chain) to the newest (`older` of the chain), as a ring through the chain."""

    __slots__ = ("newer", "older")

    def __init__(self) -> None:
        self.older: Any = self
        self.newer: Any = self

    def append(self, entry: Any) -> None:
        """Put an entry that stands on no chain at the newest end."""
        newest = self.older
        entry.older = newest
        entry.newer = self
        newest.newer = entry
        self.older = entry

    def prepend(self, entry: Any) -> None:
        """Put an entry that stands on no chain at the oldest end."""
        oldest = self.newer
        entry.newer = oldest
        entry.older = self
        oldest.older = entry
        self.newer = entry

    @property
    def empty(self) -> bool:
        return self.newer is self


def unlink(entry: Any) -> None:
    """Take an entry off the chain on which it stands."""
    older = entry.older
    newer = entry.newer
    older.newer = newer
    newer.older = older
    # An entry that is gone must not keep its former neighbours alive; and no links is how parked is told.
    entry.older = entry.newer = None


def name_oldest(chain: Chain, nbytes: int, found: list[Entry]) -> int:
    """Append the oldest entries to `found` until `nbytes` are covered; the bytes still missing (≤ 0: none).

    Parks every entry with holds that it meets. What it names stays where it is.
    """
    entry = chain.newer
    while nbytes > 0 and entry is not chain:
        newer = entry.newer
        if entry.holds:
            unlink(entry)
        else:
            found.append(entry)
            nbytes -= entry.nbytes
        entry = newer
    return nbytes
