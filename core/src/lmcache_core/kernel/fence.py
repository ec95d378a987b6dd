"""The fence of a clear: everything of its scope is out of the index at once, its memory follows in bounded steps.

A million residents take seconds to free, and nobody else must wait for that: `begin` detaches whole tables, and
`step` frees some objects at a time, and dooms what was being written. In between a key that was cleared may be stored
anew; its former incarnation leaves first, so that no key ever has two. A writer that commits is told what the clear has
not come to yet (`Residents.doom_cleared`). A store that needs room takes it from what was cleared before anything is
evicted that may still be read.
"""

from __future__ import annotations

from collections.abc import Sequence

from lmcache_core.kernel.clearing import Clearing
from lmcache_core.kernel.objects import Incarnation
from lmcache_core.kernel.pins import Pins
from lmcache_core.kernel.residents import Residents

STEP_OBJECTS = 128  # freed in one step: half a millisecond


class Fence:
    """Clears, in the order in which they were asked for: each is done after all before it."""

    def __init__(self, residents: Residents, pins: Pins) -> None:
        self._residents = residents
        self._pins = pins

    def begin(self, namespace: int | None, at_s: float, session_id: int) -> Clearing:
        """Take all that there is of a namespace, or of all (None), out of the table."""
        clearing = Clearing(self._residents.table.remove_namespace(namespace), at_s, session_id)
        self._residents.clearings.append(clearing)
        return clearing

    def step(self, objects_max: int = STEP_OBJECTS) -> int:
        """Free, or doom, some of what was cleared; how many. Afterwards what is done says so."""
        clearings = self._residents.clearings
        freed = 0
        while clearings:
            taken = clearings[0].take_some(objects_max - freed)
            self._free(clearings[0], taken)
            freed += len(taken)
            if clearings[0].tables:
                break
            if self._residents.untouched is not None and self._residents.untouched.pending:
                # What was adopted and is not made yet may be of its scope; it is freed as it is made.
                freed += self._residents.untouched.step(objects_max)
                break
            clearings.popleft().done = True
        return freed

    def make_way(self, namespace: int, keys: Sequence[bytes]) -> None:
        """These keys are about to be stored: what is left of their former incarnations leaves first."""
        for clearing in self._residents.clearings:
            table = clearing.tables.get(namespace)
            if table is not None:
                former = dict.fromkeys(item for key in keys if (item := table.get(key)) is not None)
                self._free(clearing, clearing.take(former))

    def _free(self, clearing: Clearing, taken: Sequence[Incarnation]) -> None:
        if taken:
            self._residents.cleared(clearing, taken)
            self._pins.remove(taken)
