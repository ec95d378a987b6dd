"""Most recently used first."""

from __future__ import annotations

from collections.abc import Sequence

from lmcache_core.policies import Entry, EvictionPolicy
from lmcache_policies.chain import Chain, unlink


class MruPolicy(EvictionPolicy):
    """The object that was used last goes first: optimal for a loop that is larger than the store.

    Source: Chou and DeWitt, "An evaluation of buffer management strategies for relational database systems", VLDB 1985.
    An entry that was skipped because it was held comes back as the newest.
    """

    def __init__(self, settings: None = None) -> None:
        self._chain = Chain()

    def insert(self, entries: Sequence[Entry]) -> None:
        chain = self._chain
        for entry in entries:
            entry.policy_data = chain
            chain.append(entry)

    def access(self, entries: Sequence[Entry]) -> None:
        chain = self._chain
        for entry in entries:
            if entry.newer is not None:
                unlink(entry)
            chain.append(entry)

    def remove(self, entries: Sequence[Entry]) -> None:
        for entry in entries:
            entry.policy_data = None
            if entry.newer is not None:
                unlink(entry)

    def victims(self, nbytes: int) -> list[Entry]:
        found: list[Entry] = []
        chain = self._chain
        entry = chain.older
        while nbytes > 0 and entry is not chain:
            older = entry.older
            if entry.holds:
                unlink(entry)
            else:
                found.append(entry)
                nbytes -= entry.nbytes
            entry = older
        return found

    def released(self, entries: Sequence[Entry]) -> None:
        for entry in entries:
            if entry.newer is None and entry.policy_data is not None:
                self._chain.append(entry)
