"""Why keys that are gone are gone: bounded, and never a stall."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from lmcache_core.kernel.answers import Reason
from lmcache_core.kernel.objects import Incarnation

GENERATIONS = 4  # the oldest quarter is forgotten at once: popping keys one by one off a dictionary's front is slow


class MissReasons:
    """Remembers the reason for the last keys that were lost, at most `remembered_max` of them.

    Kept by key alone: where two namespaces lost the same key, the later one is remembered.
    """

    def __init__(self, remembered_max: int) -> None:
        self._generation_keys_max = max(1, remembered_max // GENERATIONS)
        self._young: dict[bytes, tuple[int, Reason]] = {}
        self._all: deque[dict[bytes, tuple[int, Reason]]] = deque([self._young], maxlen=GENERATIONS)

    def note(self, objects: Iterable[Incarnation], reason: Reason) -> None:
        young, room = self._young, self._generation_keys_max
        namespace, mark = -1, (-1, reason)
        for item in objects:
            if item.namespace != namespace:  # one mark for all of a namespace: no tuple a key
                namespace = item.namespace
                mark = (namespace, reason)
            young[item.key] = mark
            if len(young) >= room:
                young = self._young = {}
                self._all.appendleft(young)

    def of(self, namespace: int, key: bytes) -> Reason:
        for generation in self._all:
            found = generation.get(key)
            if found is not None and found[0] == namespace:
                return found[1]
        return Reason.NEVER_STORED
