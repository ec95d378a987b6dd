"""Objects that some tier is still to get, and that are therefore evicted last.

An object on its way to the tiers has one hold for that: no policy names it or has to walk past it. If nothing else can
be evicted, the oldest of them are uncovered, a few at a time, and the policy chooses among them. With `yields` False
they never are.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import TYPE_CHECKING

from lmcache_core.kernel.objects import Incarnation

if TYPE_CHECKING:
    from lmcache_core.kernel.residents import Residents

PASS_OBJECTS_MAX = 8192  # looked at per call, to find those of one namespace: a quarter of a millisecond
LOOK_OBJECTS_MAX = 512  # looked at per call: a policy takes them back in well below a millisecond


class Shield:
    """Ready objects on their way to tiers, the oldest first."""

    def __init__(self, residents: Residents) -> None:
        self._residents = residents
        self._covered: dict[Incarnation, None] = {}
        self.yields = True  # False: it is better to refuse a store than to lose one of these
        self.uncovered = 0  # running count, for any reason; it grows when more can be evicted

    def __len__(self) -> int:
        return len(self._covered)

    def covers(self, item: Incarnation) -> bool:
        """Whether it is on its way."""
        return item in self._covered

    def oldest(self, objects_max: int) -> list[Incarnation]:
        """The oldest ones. Changes nothing."""
        return list(islice(self._covered, objects_max))

    def cover(self, objects: Sequence[Incarnation]) -> None:
        """These are on their way to tiers. Those that it has already keep their place."""
        fresh = [item for item in objects if item not in self._covered]
        if fresh:
            self._covered.update(dict.fromkeys(fresh))
            self._residents.hold(fresh)

    def uncover(self, objects: Sequence[Incarnation]) -> None:
        """Every tier that should have these has them, or will not get them. Objects that are not covered are
        ignored."""
        known = [item for item in objects if item in self._covered]
        if known:
            for item in known:
                del self._covered[item]
            self.uncovered += len(known)
            self._residents.release(known)

    def uncover_some(self, objects_max: int) -> int:
        """Uncover the oldest, up to `objects_max`. Returns how many."""
        oldest = self.oldest(objects_max)
        self.uncover(oldest)
        return len(oldest)

    def uncover_for(self, nbytes: int, namespace: int | None = None) -> bool:
        """Uncover the oldest that this makes evictable (of one namespace, or of all), until their bytes suffice.
        Returns whether there were any. Looks at `LOOK_OBJECTS_MAX` at most, and walks past more of other namespaces.
        Objects that somebody else holds, too, move to the end."""
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
        """These have left the index and the policy: the tiers will not get them."""
        if self._covered:
            for item in objects:
                if item in self._covered:
                    del self._covered[item]
                    item.holds -= 1
                    self.uncovered += 1
