"""LRU-2: the second-to-last use decides."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lmcache_core.policies import Entry
from lmcache_policies.capacity import SizedPolicy
from lmcache_policies.chain import Chain, name_oldest, unlink
from lmcache_policies.ghosts import Ghosts
from lmcache_policies.settings import LrukSettings


class _Use:
    """One use of an object, on the timeline of all uses. `entry` is None once the object is gone."""

    __slots__ = ("entry", "newer", "older")

    def __init__(self, entry: Entry) -> None:
        self.entry: Entry | None = entry
        self.older: Any = None
        self.newer: Any = None


class _Uses:
    """The last two uses of a resident. `before` is None while it had only one."""

    __slots__ = ("before", "last")

    def __init__(self, before: _Use | None, last: _Use) -> None:
        self.before = before
        self.last = last


class LrukPolicy(SizedPolicy):
    """Objects used once go first, oldest first; then those whose second-to-last use is oldest.

    Source: O'Neil, O'Neil and Weikum, "The LRU-K page replacement algorithm for database disk buffering",
    SIGMOD 1993, for K = 2, without a correlated reference period; the history of objects that are gone is
    bounded to `ghost_capacities` times the capacity.

    No heap: every use is on one timeline, and when an object is used again its last use *becomes* its second-to-last in
    place. So the oldest second-to-last use is always the first that a walk from the old end meets. Uses of evicted
    objects are removed when a walk meets them; a ghost that comes back after that is placed at the old end. The order
    differs from the paper's only among such ghosts. An entry that was skipped because it was held comes back at the old
    end.
    """

    def __init__(self, settings: LrukSettings | None = None) -> None:
        settings = settings or LrukSettings()
        super().__init__(settings.capacity_bytes)
        self._ghost_capacities = settings.ghost_capacities
        self.ghosts = Ghosts(settings.ghost_keys_max)
        self._once = Chain()
        self.timeline = Chain()

    def insert(self, entries: Sequence[Entry]) -> None:
        for entry in entries:
            self._admit(entry.nbytes)
            before = self.ghosts.take(entry)
            entry.policy_data = _Uses(before, _Use(entry))
            if before is None:
                self._once.append(entry)
            else:
                before.entry = entry
                self._place(before)
            self.timeline.append(entry.policy_data.last)

    def access(self, entries: Sequence[Entry]) -> None:
        for entry in entries:
            uses = entry.policy_data
            use = uses.before
            if use is None:
                if entry.newer is not None:
                    unlink(entry)
                use = _Use(entry)
            elif use.newer is not None:
                unlink(use)
            self._place(uses.last)
            uses.before = uses.last
            uses.last = use
            self.timeline.append(use)

    def remove(self, entries: Sequence[Entry]) -> None:
        for entry in entries:
            uses = entry.policy_data
            entry.policy_data = None
            if entry.newer is not None:
                unlink(entry)
            if uses.before is not None and uses.before.newer is not None:
                unlink(uses.before)
            self.resident_bytes -= entry.nbytes
            uses.last.entry = None
            self._forget(self.ghosts.put(entry, uses.last))
        self._resized()

    def victims(self, nbytes: int) -> list[Entry]:
        found: list[Entry] = []
        nbytes = name_oldest(self._once, nbytes, found)
        use = self.timeline.newer
        # Every use that the walk passes without effect belongs to an entry named here: at most two for each.
        while nbytes > 0 and use is not self.timeline:
            newer = use.newer
            entry = use.entry
            if entry is None:
                unlink(use)
            elif entry.policy_data.before is use:
                if entry.holds:
                    unlink(use)
                else:
                    found.append(entry)
                    nbytes -= entry.nbytes
            elif entry.holds:
                unlink(use)  # the only or the last use of a parked entry
            use = newer
        return found

    def released(self, entries: Sequence[Entry]) -> None:
        for entry in entries:
            uses = entry.policy_data
            if uses is None:
                continue
            if uses.before is not None:
                self._place(uses.before)
            elif entry.newer is None:
                self._once.prepend(entry)

    def _place(self, use: _Use) -> None:
        """Put back a use that a walk has removed: it is older than those that the walk left."""
        if use.newer is None:
            self.timeline.prepend(use)

    def _forget(self, use: _Use | None) -> None:
        if use is not None and use.newer is not None:
            unlink(use)

    def _resized(self) -> None:
        for use in self.ghosts.trim(int(self.capacity_bytes * self._ghost_capacities)):
            self._forget(use)
