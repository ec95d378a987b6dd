"""The contract of companions: what lives in the server's process beside the L1 and follows what becomes of its objects.

A companion keeps something of its own (a table in shared memory, say) that must never contradict the L1. It is offered
by a plugin (`Kind.COMPANION`), and a table of its name in the settings, `[NAME]`, brings it to life.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from lmcache_core.errors import UsageError

if TYPE_CHECKING:
    from lmcache_core.kernel.objects import Incarnation, Named
    from lmcache_core.pool.layout import Layout
    from lmcache_core.server.l1 import L1

__all__ = [
    "Companion",
    "CompanionContext",
]


class CompanionContext:
    """What a companion may ask of its server. On the loop's thread only, and not from `committed`, `left` or `read`."""

    def __init__(self, server: str, l1: L1) -> None:
        self.server = server  # its name
        self._l1 = l1

    @property
    def now(self) -> float:
        """Seconds, monotonic: the time of this turn of the loop."""
        return self._l1.clock.now

    def layout(self, layout_id: int) -> Layout | None:
        """The layout of objects; None for one that no session has registered with this server yet."""
        return self._l1.layouts.get(layout_id)

    def ready(self, namespace: int, wanted: Sequence[Named]) -> list[Incarnation | None]:
        """For each (key, generation) that object, if readers may have it now. Its bytes stand still until the
        caller returns to the loop."""
        return self._l1.kernel.ready(namespace, wanted)

    def view(self, item: Incarnation, nbytes: int) -> memoryview:
        """The first `nbytes` of an object. A worker may have scribbled over them: a claim, never a fact."""
        return self._l1.view(item.offset, nbytes)

    def used(self, named: Sequence[tuple[int, bytes]]) -> None:
        """Tell the L1's eviction policy that these, (namespace, key), were read somewhere else than in the L1."""
        self._l1.kernel.used(named, self.now)


class Companion(ABC):
    """Built before the server answers anybody, as `factory(settings, context)`. Everything is called on the loop's
    thread and must be quick: what is heard comes in batches of a request or of a step of a clear, a thousand objects at
    most, and no call may take longer than 2 ms.

    The server guarantees that `committed` and `left` are called before anybody is answered that these objects were
    stored, evicted, dropped or cleared. A companion that raises there, in `read` or in `step` is abandoned: nothing is
    called any more but `abandon`, `status` and `close`.
    """

    @abstractmethod
    def offers(self) -> dict[str, Any]:
        """What a worker must know to use it, in plain values of some hundred bytes: it travels with every hello."""

    @abstractmethod
    def committed(self, objects: Sequence[Incarnation]) -> None:
        """These became ready. Another value may have stood under their keys before."""

    @abstractmethod
    def left(self, objects: Sequence[Incarnation]) -> None:
        """These are in the L1 no more, for whatever reason: none of it may be found in what the companion keeps once
        this returns."""

    def read(self, objects: Sequence[Incarnation]) -> None:  # noqa: B027  # may be left out
        """These were read, by a call or in place. What is read in place is heard of once a second, however often."""

    def next_step(self) -> float | None:
        """When `step` is due, on the clock of `context.now`; None: not before something is heard. Asked in every turn
        of the loop, so it should give what is known already."""
        return None

    def step(self, now: float) -> None:  # noqa: B027  # may be left out
        """A bounded part of its own work."""

    def operate(self, operation: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Serve an operation for the server's own user. Raises `UsageError` for one that it does not have."""
        raise UsageError(f"it has no operation {operation!r}")

    def status(self) -> dict[str, Any]:
        """Plain values for `status`; cheap. Its numbers are metrics too, as they stand; what only grows belongs into a
        table `counts` of it. Names stay the same for as long as the server runs."""
        return {}

    @abstractmethod
    def abandon(self) -> None:
        """It has raised, or the server is at its end: make sure that nobody is served from what it keeps."""

    @abstractmethod
    def close(self) -> None:
        """Let go of everything. `abandon` was called before."""
