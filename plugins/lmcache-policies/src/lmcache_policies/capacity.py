"""Policies that divide the capacity need to know it."""

from __future__ import annotations

from abc import abstractmethod

from lmcache_core.policies import EvictionPolicy


class SizedPolicy(EvictionPolicy):
    """Knows the bytes of its store: from its settings, else from its owner (`resize`), else by observation. Until it is
    told, the most bytes that were ever resident at once count as the capacity: a store that evicts is full.
    """

    def __init__(self, capacity_bytes: int | None) -> None:
        self._fixed = capacity_bytes is not None
        self._sized = self._fixed
        self.capacity_bytes = capacity_bytes or 0
        self.resident_bytes = 0

    def resize(self, capacity_bytes: int) -> None:
        if not self._fixed:
            self._sized = True
            self.capacity_bytes = capacity_bytes
            self._resized()

    def _admit(self, nbytes: int) -> None:
        self.resident_bytes += nbytes
        if not self._sized and self.resident_bytes > self.capacity_bytes:
            self.capacity_bytes = self.resident_bytes
            self._resized()

    @abstractmethod
    def _resized(self) -> None:
        """`capacity_bytes` changed."""
