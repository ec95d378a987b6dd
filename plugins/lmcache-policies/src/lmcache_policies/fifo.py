"""First in, first out."""

from __future__ import annotations

from collections.abc import Sequence

from lmcache_core.policies import Entry, EvictionPolicy
from lmcache_policies.chain import Chain, name_oldest, unlink


class FifoPolicy(EvictionPolicy):
    """The object that has been resident longest goes first; uses do not count. Source: the oldest replacement policy
    (Belady, "A study of replacement algorithms for a virtual-storage computer", IBM Systems Journal 1966, measures it
    against the optimum). An entry that was skipped because it was held comes back at the old end.
    """

    def __init__(self, settings: None = None) -> None:
        self._chain = Chain()

    def insert(self, entries: Sequence[Entry]) -> None:
        chain = self._chain
        for entry in entries:
            entry.policy_data = chain
            chain.append(entry)

    def access(self, entries: Sequence[Entry]) -> None:
        """Changes nothing."""

    def remove(self, entries: Sequence[Entry]) -> None:
        for entry in entries:
            entry.policy_data = None
            if entry.newer is not None:
                unlink(entry)

    def victims(self, nbytes: int) -> list[Entry]:
        found: list[Entry] = []
        name_oldest(self._chain, nbytes, found)
        return found

    def released(self, entries: Sequence[Entry]) -> None:
        for entry in entries:
            if entry.newer is None and entry.policy_data is not None:
                self._chain.prepend(entry)
