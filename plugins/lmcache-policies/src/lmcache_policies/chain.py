"""A doubly linked list whose links are in the entries themselves. A node or a dictionary slot for each of a million
residents costs too much, and this list never stalls to grow. An entry is on at most one chain; one that is on none is
*parked*: a walk for victims found it held and took it off, so that no later walk meets it again. `released` puts it
back.
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
        """Put an entry that is on no chain at the newest end."""
        newest = self.older
        entry.older = newest
        entry.newer = self
        newest.newer = entry
        self.older = entry

    def prepend(self, entry: Any) -> None:
        """Put an entry that is on no chain at the oldest end."""
        oldest = self.newer
        entry.newer = oldest
        entry.older = self
        oldest.older = entry
        self.newer = entry

    @property
    def empty(self) -> bool:
        return self.newer is self


def unlink(entry: Any) -> None:
    """Take an entry off its chain."""
    older = entry.older
    newer = entry.newer
    older.newer = newer
    newer.older = older
    # A removed entry must not keep its old neighbours alive; and having no links means parked.
    entry.older = entry.newer = None


def name_oldest(chain: Chain, nbytes: int, found: list[Entry]) -> int:
    """Append the oldest entries to `found` until `nbytes` are covered; returns the bytes still missing (≤ 0: none).
    Parks every held entry that it meets. The named entries stay in place.
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
