"""Least frequently used first."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from lmcache_core.policies import Entry, EvictionPolicy
from lmcache_policies.chain import Chain, name_oldest, unlink


class LfuPolicy(EvictionPolicy):
    """The object with the fewest uses goes first; among equals, the one that reached that count first.

    Source: the constant-time form of Shah, Mitra and Matani, "An O(1) algorithm for implementing the LFU cache eviction
    scheme", 2010. The count starts at one with the insertion, and starts again when an object comes back. An entry that
    was skipped because it was held comes back as the first of its count.
    """

    def __init__(self, settings: None = None) -> None:
        self.levels: dict[int, Chain] = {}
        # The counts that occur, in order. There are few (n different counts need n²/2 uses), and the list
        # moves only when a count appears or disappears.
        self.counts: list[int] = []

    def insert(self, entries: Sequence[Entry]) -> None:
        if not entries:
            return
        level = self._level(1)
        for entry in entries:
            entry.policy_data = 1
            level.append(entry)

    def access(self, entries: Sequence[Entry]) -> None:
        levels = self.levels
        for entry in entries:
            count = entry.policy_data
            if entry.newer is not None:
                unlink(entry)
                if levels[count].empty:
                    self._drop(count)
            entry.policy_data = count = count + 1
            level = levels.get(count)
            (level if level is not None else self._level(count)).append(entry)

    def remove(self, entries: Sequence[Entry]) -> None:
        levels = self.levels
        for entry in entries:
            count = entry.policy_data
            entry.policy_data = None
            if entry.newer is not None:
                unlink(entry)
                if levels[count].empty:
                    self._drop(count)

    def victims(self, nbytes: int) -> list[Entry]:
        found: list[Entry] = []
        emptied = []
        for count in self.counts:
            if nbytes <= 0:
                break
            level = self.levels[count]
            nbytes = name_oldest(level, nbytes, found)
            if level.empty:
                emptied.append(count)
        for count in emptied:
            self._drop(count)
        return found

    def released(self, entries: Sequence[Entry]) -> None:
        for entry in entries:
            if entry.newer is None and entry.policy_data is not None:
                self._level(entry.policy_data).prepend(entry)

    def _level(self, count: int) -> Chain:
        level = self.levels.get(count)
        if level is None:
            level = self.levels[count] = Chain()
            self.counts.insert(bisect_left(self.counts, count), count)
        return level

    def _drop(self, count: int) -> None:
        del self.levels[count]
        del self.counts[bisect_left(self.counts, count)]
