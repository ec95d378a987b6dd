"""Adaptive replacement cache."""

from __future__ import annotations

from collections.abc import Sequence

from lmcache_core.policies import Entry
from lmcache_policies.capacity import SizedPolicy
from lmcache_policies.chain import Chain, unlink
from lmcache_policies.ghosts import Ghosts
from lmcache_policies.settings import ArcSettings


class _Segment(Chain):
    """Entries in order of use, their bytes (parked ones too), and the ghosts of those that left."""

    __slots__ = ("ghosts", "nbytes")

    def __init__(self, ghost_keys_max: int) -> None:
        super().__init__()
        self.nbytes = 0
        self.ghosts = Ghosts(ghost_keys_max)


class ArcPolicy(SizedPolicy):
    """Divides the store between objects used once and objects used again, and learns the division from its ghosts.

    Source: Megiddo and Modha, "ARC: a self-tuning, low overhead replacement cache", FAST 2003, counted in bytes. One
    difference: victims are named before the newcomer is known, so a ghost that comes back moves the target for the next
    eviction, not for the one that made its own room. An entry that was skipped because it was held comes back at the
    old end of its segment.
    """

    def __init__(self, settings: ArcSettings | None = None) -> None:
        settings = settings or ArcSettings()
        super().__init__(settings.capacity_bytes)
        self.once = _Segment(settings.ghost_keys_max)
        self.again = _Segment(settings.ghost_keys_max)
        self._once_target_bytes = 0

    def insert(self, entries: Sequence[Entry]) -> None:
        once, again = self.once, self.again
        for entry in entries:
            nbytes = entry.nbytes
            self._admit(nbytes)
            segment = again if self._returns(entry) else once
            entry.policy_data = segment
            segment.nbytes += nbytes
            segment.append(entry)
        self._resized()

    def access(self, entries: Sequence[Entry]) -> None:
        again = self.again
        for entry in entries:
            segment = entry.policy_data
            if entry.newer is not None:
                unlink(entry)
            if segment is not again:
                segment.nbytes -= entry.nbytes
                again.nbytes += entry.nbytes
                entry.policy_data = again
            again.append(entry)

    def remove(self, entries: Sequence[Entry]) -> None:
        for entry in entries:
            segment = entry.policy_data
            entry.policy_data = None
            if entry.newer is not None:
                unlink(entry)
            segment.nbytes -= entry.nbytes
            self.resident_bytes -= entry.nbytes
            segment.ghosts.put(entry)
        self._resized()

    def victims(self, nbytes: int) -> list[Entry]:
        found: list[Entry] = []
        once, again = self.once, self.again
        once_bytes = once.nbytes
        next_once, next_again = once.newer, again.newer
        while nbytes > 0 and not (next_once is once and next_again is again):
            from_once = next_once is not once and (once_bytes > self._once_target_bytes or next_again is again)
            if from_once:
                entry, next_once = next_once, next_once.newer
            else:
                entry, next_again = next_again, next_again.newer
            if entry.holds:
                unlink(entry)
                continue
            found.append(entry)
            nbytes -= entry.nbytes
            if from_once:
                once_bytes -= entry.nbytes
        return found

    def released(self, entries: Sequence[Entry]) -> None:
        for entry in entries:
            if entry.newer is None and entry.policy_data is not None:
                entry.policy_data.prepend(entry)

    def _returns(self, entry: Entry) -> bool:
        """Whether the new entry is a ghost of either kind; if so, move the target towards that kind."""
        gone_once, gone_again = self.once.ghosts, self.again.ghosts
        once_bytes, again_bytes = gone_once.nbytes, gone_again.nbytes
        if gone_once.take(entry) is not None:
            step = entry.nbytes * max(1, again_bytes // max(1, once_bytes))
            self._once_target_bytes = min(self.capacity_bytes, self._once_target_bytes + step)
            return True
        if gone_again.take(entry) is not None:
            step = entry.nbytes * max(1, once_bytes // max(1, again_bytes))
            self._once_target_bytes = max(0, self._once_target_bytes - step)
            return True
        return False

    def _resized(self) -> None:
        capacity_bytes = self.capacity_bytes
        once, again = self.once, self.again
        self._once_target_bytes = min(self._once_target_bytes, capacity_bytes)
        # Both kinds of "once" together fit one capacity, and everything, ghosts included, fits two.
        once.ghosts.trim(max(0, capacity_bytes - once.nbytes))
        again.ghosts.trim(max(0, 2 * capacity_bytes - self.resident_bytes - once.ghosts.nbytes))
