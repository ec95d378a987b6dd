"""Three static queues, first in first out."""

from __future__ import annotations

from collections.abc import Sequence

from lmcache_core.policies import Entry
from lmcache_policies.capacity import SizedPolicy
from lmcache_policies.chain import Chain, name_oldest, unlink
from lmcache_policies.ghosts import Ghosts
from lmcache_policies.settings import S3FifoSettings

USES_MAX = 3  # two bits an object, as in the paper
# Used objects that one call moves on: otherwise one eviction would walk a whole main queue of used objects. On the
# public traces 1,024 changes no hit rate, 256 costs 0.2 points.
SECOND_CHANCES_MAX = 1024  # for a call
SECOND_CHANCES_FOR_EACH = 16  # more for each victim of a batch


class _Place:
    """The queue of an entry, and its uses since it came there."""

    __slots__ = ("newcomer", "queue", "uses")

    def __init__(self, queue: Chain, newcomer: bool) -> None:
        self.queue = queue
        self.newcomer = newcomer
        self.uses = 0


class S3FifoPolicy(SizedPolicy):
    """A small queue sorts out what is used once; what was used more, or comes back soon, goes to the main queue.

    Source: Yang, Zhang, Qiu, Yue and Rashmi, "FIFO queues are all you need for cache eviction", SOSP 2023, counted in
    bytes. One difference: one call moves on at most `SECOND_CHANCES_MAX` used objects (and a few more for each victim);
    then the next one goes, used or not, so that the cost of an eviction does not grow with the number of residents.
    Named victims wait in a separate queue; a use before their removal moves them to the main queue. An entry that was
    skipped because it was held comes back at the old end of its queue.
    """

    def __init__(self, settings: S3FifoSettings | None = None) -> None:
        settings = settings or S3FifoSettings()
        super().__init__(settings.capacity_bytes)
        self._small_fraction = settings.small_fraction
        self._promote_uses = settings.promote_uses
        self._small = Chain()
        self._main = Chain()
        self._named = Chain()
        self._small_bytes = 0
        self._small_target_bytes = 0
        self._chances = 0
        self.ghosts = Ghosts(settings.ghost_keys_max)
        self._resized()

    def insert(self, entries: Sequence[Entry]) -> None:
        for entry in entries:
            self._admit(entry.nbytes)
            newcomer = self.ghosts.take(entry) is None
            queue = self._small if newcomer else self._main
            if newcomer:
                self._small_bytes += entry.nbytes
            entry.policy_data = _Place(queue, newcomer)
            queue.append(entry)

    def access(self, entries: Sequence[Entry]) -> None:
        for entry in entries:
            place = entry.policy_data
            if place.uses < USES_MAX:
                place.uses += 1
            if place.queue is self._named:
                if entry.newer is not None:
                    unlink(entry)
                place.queue = self._main
                place.newcomer = False
                self._main.append(entry)

    def remove(self, entries: Sequence[Entry]) -> None:
        for entry in entries:
            place = entry.policy_data
            entry.policy_data = None
            if entry.newer is not None:
                unlink(entry)
            self.resident_bytes -= entry.nbytes
            if place.queue is self._small:
                self._small_bytes -= entry.nbytes
            if place.newcomer:
                self.ghosts.put(entry)
        self._trim()

    def victims(self, nbytes: int) -> list[Entry]:
        found: list[Entry] = []
        nbytes = name_oldest(self._named, nbytes, found)
        self._chances = SECOND_CHANCES_MAX
        while nbytes > 0:
            self._chances += SECOND_CHANCES_FOR_EACH
            entry = self._choose()
            if entry is None:
                break
            found.append(entry)
            nbytes -= entry.nbytes
        return found

    def released(self, entries: Sequence[Entry]) -> None:
        for entry in entries:
            if entry.newer is None and entry.policy_data is not None:
                entry.policy_data.queue.prepend(entry)

    def _choose(self) -> Entry | None:
        """Move the next victim to the named queue; None when nothing is left that may go."""
        main, small = self._main, self._small
        from_small = self._small_bytes >= self._small_target_bytes
        while True:
            if small.empty and main.empty:
                return None
            if small.empty or main.empty:
                from_small = main.empty
            queue = small if from_small else main
            entry: Entry = queue.newer
            unlink(entry)
            if entry.holds:
                continue  # parked: `released` brings it back
            place = entry.policy_data
            if from_small:
                self._small_bytes -= entry.nbytes
            if self._chances and place.uses >= (self._promote_uses if from_small else 1):
                self._chances -= 1
                place.uses = 0 if from_small else place.uses - 1
                place.queue = main
                place.newcomer = False
                main.append(entry)
                continue
            place.queue = self._named
            self._named.append(entry)
            return entry

    def _resized(self) -> None:
        self._small_target_bytes = max(1, int(self.capacity_bytes * self._small_fraction))
        self._trim()

    def _trim(self) -> None:
        # The history is as long as the main queue: what would have been kept there.
        self.ghosts.trim(self.capacity_bytes - self._small_target_bytes)
