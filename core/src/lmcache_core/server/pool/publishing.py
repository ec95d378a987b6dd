"""The server's side of the index in the pool: what workers may find without a call, and what they found."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from lmcache_core import limits
from lmcache_core.guard import on_failure
from lmcache_core.kernel.answers import Reason
from lmcache_core.kernel.objects import Incarnation
from lmcache_core.pool.index import open_index
from lmcache_core.pool.segment import Segment

if TYPE_CHECKING:
    from lmcache_core._native import Index

log = logging.getLogger(__name__)


def open_publisher(segment: Segment) -> Publisher | None:
    """The publisher of a pool that this process owns, or None without the C extension: then no client uses the index,
    and all of them ask."""
    index = open_index(segment)
    if index is not None and segment.adopted:
        index.recount()
    return None if index is None else Publisher(index, segment.announce)


class Publisher:
    """The only writer of the index. Lives on the loop's thread."""

    def __init__(self, index: Index, announce: Callable[[], None]) -> None:
        """`announce`: wakes workers that wait for something to be published."""
        self.index = index
        self._announce = announce
        self.unindexed = 0  # ready objects without an entry: only the server can find them
        self.used = 0  # marks taken: an object counts once between two sweeps, however often it was read
        self.scribbled = 0  # entries that had already vanished when their objects left
        self._warned_of = 0  # the wanted entries at the last warning
        self._nbytes_by_layout: dict[int, int] = {}
        self._looked_at_s = 0.0
        self._due = 0.0  # entries to scan to keep up with the clock

    def add_layout(self, layout_id: int, nbytes: int) -> None:
        """Objects of this layout will be published."""
        self._nbytes_by_layout[layout_id] = nbytes

    def remove_layout(self, layout_id: int) -> None:
        """No objects of this layout are left, and its id may be reused."""
        self._nbytes_by_layout.pop(layout_id, None)

    def publish(self, objects: Sequence[Incarnation]) -> None:
        """Let workers find these. Their slots are already marked ready."""
        left_out = len(objects) - self.index.publish(objects, self._nbytes_by_layout, int(time.time()))
        self._announce()
        if left_out:
            self.unindexed += left_out
            wanted = self.entries_wanted
            if wanted > self._warned_of:  # at each doubling: the first figure is from a pool that is still filling
                self._warned_of = wanted
                log.warning(
                    "the index has %d entries, too few for what is stored: %d objects have none, so each hit on them "
                    "costs a call, and a restart loses them; set l1.index_entries = %d",
                    self.index.entries,
                    self.unindexed,
                    wanted,
                )

    @property
    def entries_wanted(self) -> int:
        """How many entries would be enough for what is stored now, a power of two; the current number if none are
        missing."""
        if not self.unindexed:
            return self.index.entries
        wanted = max(2 * self.index.entries, 1 << (2 * (self.index.ready + self.unindexed) - 1).bit_length())
        return min(wanted, limits.INDEX_ENTRIES_MAX)

    def remove(self, objects: Sequence[Incarnation], reason: Reason) -> None:
        """When this returns, no worker considers them ready any more: their slots may be reused."""
        missing = len(objects) - self.index.remove(objects, reason, int(time.time()))
        # An entry that has vanished was overwritten.
        lost = max(0, missing - self.unindexed)
        self.unindexed -= missing - lost
        self.scribbled += lost

    def remove_surely(self, item: Incarnation, reason: Reason) -> None:
        """`remove`; if that fails, remove whatever the index has for the object's slot. That scans the whole index."""
        with on_failure(lambda: self.index.remove_slot(item.offset)):
            self.remove([item], reason)

    def mark_verified(self, objects: Sequence[Incarnation]) -> None:
        """Workers no longer need to check these."""
        self.index.mark_verified(objects)

    def take_marks(self, now: float) -> list[tuple[int, bytes]]:
        """What workers have read since the last sweep, as (namespace, key), the end of a prompt before its beginning.
        Scans enough of the table to cover it every `INDEX_SWEEP_S`, and takes at most `INDEX_SWEEP_KEYS_MAX`: if it
        returns that many, there may be more."""
        entries = self.index.entries
        self._due = min(entries, self._due + entries * (now - self._looked_at_s) / limits.INDEX_SWEEP_S)
        self._looked_at_s = now
        marked = self.index.take_marks(max(limits.INDEX_SWEEP_ENTRIES_MIN, int(self._due)), limits.INDEX_SWEEP_KEYS_MAX)
        if len(marked) < limits.INDEX_SWEEP_KEYS_MAX:
            self._due = 0.0
        self.used += len(marked)
        return marked

    def keep_places(self, keep: bool) -> None:
        """Whether entries must stay where they are: an adoption identifies them by position until all objects are
        made."""
        self.index.keeps_places = keep

    def tidy(self) -> None:
        """One bounded step of removing tombstones, unless positions are kept."""
        self.index.tidy(limits.INDEX_TIDY_ENTRIES)

    def close(self) -> None:
        """Release the pool."""
        self.index.close()

    def status(self) -> dict[str, int]:
        """For `status`."""
        index = self.index
        return {
            "entries": index.entries,
            "ready": index.ready,
            "gone": index.gone,
            "unindexed": self.unindexed,
            "entries_wanted": self.entries_wanted,
            "scribbled": self.scribbled,
            "hits_by_index": self.used,
        }
