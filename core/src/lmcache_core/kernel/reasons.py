"""Remembers why keys are gone, within bounds and without stalls."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

from lmcache_core.kernel.answers import Reason
from lmcache_core.kernel.objects import Incarnation

GENERATIONS = 4  # the oldest quarter is forgotten at once: popping single keys off a dictionary's front is slow


class Loss(NamedTuple):
    """How a key was lost. One instance stands for all keys of a namespace that were lost together."""

    namespace: int
    reason: Reason
    at_s: float  # the kernel's clock
    session_id: int  # the session whose call caused it, or whose lease it was; 0: the server itself


class _Generation:
    """Keys that were lost one after the other."""

    __slots__ = ("began_s", "losses")

    def __init__(self, began_s: float) -> None:
        self.began_s = began_s
        self.losses: dict[bytes, Loss] = {}


class MissReasons:
    """Remembers how the latest keys were lost, at most `remembered_max` of them.

    It is keyed by key alone: if two namespaces lost the same key, only the later loss is remembered. `now` and
    `session_id` are those of the current call; the kernel sets them.
    """

    def __init__(self, remembered_max: int) -> None:
        self.now = 0.0
        self.session_id = 0
        # Every loss since then is remembered; None: every loss ever.
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
        """These are lost. Give `session_id` and `at_s` if another call, at another time, caused it."""
        at_s = self.now if at_s is None else at_s
        session_id = self.session_id if session_id is None else session_id
        young, room = self._young, self._generation_keys_max
        namespace, loss = -1, Loss(-1, reason, at_s, session_id)
        for item in objects:
            if item.namespace != namespace:  # one for the whole namespace: no tuple per key
                namespace = item.namespace
                loss = Loss(namespace, reason, at_s, session_id)
            young[item.key] = loss
            if len(young) >= room:
                young = self._next_generation()

    def find(self, namespace: int, key: bytes) -> Loss | None:
        """How the key was lost, if it is remembered."""
        for generation in self._all:
            found = generation.losses.get(key)
            if found is not None and found.namespace == namespace:
                return found
        return None

    def of(self, namespace: int, key: bytes) -> Reason:
        """Only the reason."""
        found = self.find(namespace, key)
        return Reason.NEVER_STORED if found is None else found.reason

    def __len__(self) -> int:
        """Number of keys remembered; a key that was lost repeatedly may count more than once."""
        return sum(len(generation.losses) for generation in self._all)

    def _next_generation(self) -> dict[bytes, Loss]:
        self._all.appendleft(_Generation(self.now))
        if len(self._all) > GENERATIONS:
            self._all.pop()
            self.since_s = self._all[-1].began_s
        self._young = self._all[0].losses
        return self._young
