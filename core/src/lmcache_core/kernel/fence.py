"""The fence of a clear: everything in its scope leaves the index at once, and its memory is freed in bounded steps.

Freeing a million residents takes seconds, and nobody else may wait for that. So `begin` detaches whole tables, and
`step` frees some objects at a time and dooms what was being written. In between, a cleared key may be stored again; its
former incarnation leaves first, so no key ever has two. A writer's commit is refused even if the clear has not reached
its object yet (`Residents.doom_cleared`). A store that needs room takes it from cleared objects before it evicts
anything that can still be read.
"""

from __future__ import annotations

from collections.abc import Sequence

from lmcache_core.kernel.clearing import Clearing
from lmcache_core.kernel.objects import Incarnation
from lmcache_core.kernel.pins import Pins
from lmcache_core.kernel.residents import Residents

STEP_OBJECTS = 128  # freed in one step: half a millisecond


class Fence:
    """Clears, in the order of the requests: each is done after all earlier ones."""

    def __init__(self, residents: Residents, pins: Pins) -> None:
        self._residents = residents
        self._pins = pins

    def begin(self, namespace: int | None, at_s: float, session_id: int) -> Clearing:
        """Take everything of a namespace, or of all (None), out of the table."""
        clearing = Clearing(self._residents.table.remove_namespace(namespace), at_s, session_id)
        self._residents.clearings.append(clearing)
        return clearing

    def step(self, objects_max: int = STEP_OBJECTS) -> int:
        """Free or doom some of what was cleared, and mark clears that are done. Returns how many objects."""
        clearings = self._residents.clearings
        freed = 0
        while clearings:
            taken = clearings[0].take_some(objects_max - freed)
            self._free(clearings[0], taken)
            freed += len(taken)
            if clearings[0].tables:
                break
            if self._residents.untouched is not None and self._residents.untouched.pending:
                # Adopted objects that are not made yet may be in its scope; each is freed as it is made.
                freed += self._residents.untouched.step(objects_max)
                break
            clearings.popleft().done = True
        return freed

    def make_way(self, namespace: int, keys: Sequence[bytes]) -> None:
        """These keys are about to be stored: first remove what is left of their former incarnations."""
        for clearing in self._residents.clearings:
            table = clearing.tables.get(namespace)
            if table is not None:
                former = dict.fromkeys(item for key in keys if (item := table.get(key)) is not None)
                self._free(clearing, clearing.take(former))

    def _free(self, clearing: Clearing, taken: Sequence[Incarnation]) -> None:
        if taken:
            self._residents.cleared(clearing, taken)
            self._pins.remove(taken)
