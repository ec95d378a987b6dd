"""Why keys that are gone are gone: bounded, and never a stall."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

from lmcache_core.kernel.answers import Reason
from lmcache_core.kernel.objects import Incarnation

GENERATIONS = 4  # the oldest quarter is forgotten at once: popping keys one by one off a dictionary's front is slow


class Loss(NamedTuple):
    """How a key was lost. One stands for all keys of a namespace that went together."""

    namespace: int
    reason: Reason
    at_s: float  # the kernel's clock
    session_id: int  # whose call brought it about, or whose lease it was; 0: the server's own doing


class _Generation:
    """Some keys that were lost one after the other."""

    __slots__ = ("began_s", "losses")

    def __init__(self, began_s: float) -> None:
        self.began_s = began_s
        self.losses: dict[bytes, Loss] = {}


class MissReasons:
    """Remembers how the last keys were lost, at most `remembered_max` of them.

    Kept by key alone: where two namespaces lost the same key, the later one is remembered. `now` and `session_id`
    are those of the call that is being served; the kernel sets them.
    """

    def __init__(self, remembered_max: int) -> None:
        self.now = 0.0
        self.session_id = 0
        # Everything that was lost since then is remembered; None: everything that was ever lost.
        self.since_s: float | None = None
        self._generation_keys_max = max(1, remembered_max // GENERATIONS)
        self._all: deque[_Generation] = deque([_Generation(0.0)])
        self._young = self._all[0].losses

    def note(
        self,
        objects: Iterable[Incarnation],
        reason: Reason,
        *,
        session_id: int | None = None,
        at_s: float | None = None,
    ) -> None:
        """These are lost. `session_id` and `at_s`: where it is not this call, and not now."""
        at_s = self.now if at_s is None else at_s
        session_id = self.session_id if session_id is None else session_id
        young, room = self._young, self._generation_keys_max
        namespace, loss = -1, Loss(-1, reason, at_s, session_id)
        for item in objects:
            if item.namespace != namespace:  # one for all of a namespace: no tuple a key
                namespace = item.namespace
                loss = Loss(namespace, reason, at_s, session_id)
            young[item.key] = loss
            if len(young) >= room:
                young = self._next_generation()

    def find(self, namespace: int, key: bytes) -> Loss | None:
        """How the key was lost, if that is remembered."""
        for generation in self._all:
            found = generation.losses.get(key)
            if found is not None and found.namespace == namespace:
                return found
        return None

    def of(self, namespace: int, key: bytes) -> Reason:
        """The reason alone."""
        found = self.find(namespace, key)
        return Reason.NEVER_STORED if found is None else found.reason

    def __len__(self) -> int:
        """Keys that are remembered; one that was lost again and again may count more than once."""
        return sum(len(generation.losses) for generation in self._all)

    def _next_generation(self) -> dict[bytes, Loss]:
        self._all.appendleft(_Generation(self.now))
        if len(self._all) > GENERATIONS:
            self._all.pop()
            self.since_s = self._all[-1].began_s
        self._young = self._all[0].losses
        return self._young
