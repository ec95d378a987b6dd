"""The policy that evicts nothing: a full store answers FULL until something is deleted."""

from __future__ import annotations

from collections.abc import Sequence

from lmcache_core.kernel.contracts import Entry, EvictionPolicy


class NoopEviction(EvictionPolicy):
    """Never names a victim. For buffers whose objects are dropped by the store policy, not by age."""

    evicts = False

    def __init__(self, settings: None = None) -> None:
        del settings

    def insert(self, entries: Sequence[Entry]) -> None:
        """Nothing to order."""

    def access(self, entries: Sequence[Entry]) -> None:
        """Nothing to order."""

    def remove(self, entries: Sequence[Entry]) -> None:
        """Nothing to forget."""

    def victims(self, nbytes: int) -> list[Entry]:
        """Always empty."""
        return []
