"""What some tier is still to get, and what therefore goes last.

An object on its way to the tiers has one hold for that: no policy names it, and nobody walks past it. Where nothing
else can go, the oldest of them are uncovered, a few at a time, and the policy chooses; with `yields` False never.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import TYPE_CHECKING

from lmcache_core.kernel.objects import Incarnation

if TYPE_CHECKING:
    from lmcache_core.kernel.residents import Residents

PASS_OBJECTS_MAX = 8192  # at once, in search of those of one namespace: a quarter of a millisecond
LOOK_OBJECTS_MAX = 512  # at once: a policy takes them back in well below a millisecond


class Shield:
    """Ready objects, the oldest first."""

    def __init__(self, residents: Residents) -> None:
        self._residents = residents
        self._covered: dict[Incarnation, None] = {}
        self.yields = True  # False: it is better to refuse a store than to lose one of these
        self.uncovered = 0  # in all, for whatever reason: as it grows, so does what can go

    def __len__(self) -> int:
        return len(self._covered)

    def covers(self, item: Incarnation) -> bool:
        """Whether it is on its way."""
        return item in self._covered

    def oldest(self, objects_max: int) -> list[Incarnation]:
        """The first of them, to look only."""
        return list(islice(self._covered, objects_max))

    def cover(self, objects: Sequence[Incarnation]) -> None:
        """These are on their way. Those that it has stay in their place."""
        fresh = [item for item in objects if item not in self._covered]
        if fresh:
            self._covered.update(dict.fromkeys(fresh))
            self._residents.hold(fresh)

    def uncover(self, objects: Sequence[Incarnation]) -> None:
        """Every tier that is to have these has them, or will not get them. Others are no error."""
        known = [item for item in objects if item in self._covered]
        if known:
            for item in known:
                del self._covered[item]
            self.uncovered += len(known)
            self._residents.release(known)

    def uncover_some(self, objects_max: int) -> int:
        """The oldest, up to so many; how many."""
        oldest = self.oldest(objects_max)
        self.uncover(oldest)
        return len(oldest)

    def uncover_for(self, nbytes: int, namespace: int | None = None) -> bool:
        """The oldest that can go then (of one namespace, or of all), until their bytes suffice; whether there were any.
        Looks at `LOOK_OBJECTS_MAX` at most, and past more of other namespaces: those that somebody else holds, too,
        come to stand behind all others."""
        found: list[Incarnation] = []
        look = LOOK_OBJECTS_MAX if namespace is None else PASS_OBJECTS_MAX
        for item in self.oldest(look):
            if nbytes <= 0:
                break
            if namespace is not None and item.namespace != namespace:
                continue
            if item.holds > 1:
                del self._covered[item]
                self._covered[item] = None
            else:
                found.append(item)
                nbytes -= item.nbytes
        self.uncover(found)
        return bool(found)

    def remove(self, objects: Sequence[Incarnation]) -> None:
        """These have left the index and the policy: what they are owed is nobody's business any more."""
        if self._covered:
            for item in objects:
                if item in self._covered:
                    del self._covered[item]
                    item.holds -= 1
                    self.uncovered += 1
