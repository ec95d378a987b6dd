"""The contract of companions, which live in the server's process beside the L1 and follow what happens to its objects.

A companion keeps its own data (for example a table in shared memory) that must never contradict the L1. A plugin offers
it (`Kind.COMPANION`), and a table with its name in the settings, `[NAME]`, enables it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from lmcache_core.errors import UsageError

if TYPE_CHECKING:
    from lmcache_core.kernel.objects import Incarnation, Named
    from lmcache_core.pool.layout import Layout
    from lmcache_core.server.pool.l1 import L1

__all__ = [
    "Companion",
    "CompanionContext",
]


class CompanionContext:
    """A companion's access to its server. Only on the loop's thread, and not from `committed`, `left` or `read`."""

    def __init__(self, server: str, l1: L1) -> None:
        self.server = server  # its name
        self._l1 = l1

    @property
    def now(self) -> float:
        """Monotonic seconds: the time of this turn of the loop."""
        return self._l1.clock.now

    def layout(self, layout_id: int) -> Layout | None:
        """The layout of objects; None if no session has registered it with this server yet."""
        return self._l1.layouts.get(layout_id)

    def ready(self, namespace: int, wanted: Sequence[Named]) -> list[Incarnation | None]:
        """For each (key, generation) that object, if readers may have it now. Its bytes do not change until the caller
        returns to the loop."""
        return self._l1.kernel.ready(namespace, wanted)

    def view(self, item: Incarnation, nbytes: int) -> memoryview:
        """The first `nbytes` of an object. A worker may have overwritten them, so do not trust them."""
        return self._l1.view(item.offset, nbytes)

    def used(self, named: Sequence[tuple[int, bytes]]) -> None:
        """Report to the L1's eviction policy that these (namespace, key) were read somewhere other than in the L1."""
        self._l1.kernel.used(named, self.now)


class Companion(ABC):
    """Built before the server answers requests, as `factory(settings, context)`. Everything is called on the loop's
    thread and must be quick: calls come in batches, for a request or a step of a clear, of a thousand objects at most,
    and no call may take longer than 2 ms.

    The server guarantees that `committed` and `left` are called before any reply says that these objects were stored,
    evicted, dropped or cleared. A companion that raises there, in `read` or in `step` is disabled: only `abandon`,
    `status` and `close` are called from then on.
    """

    @abstractmethod
    def offers(self) -> dict[str, Any]:
        """What a worker must know to use it, as plain values of some hundred bytes: it travels with every welcome."""

    @abstractmethod
    def committed(self, objects: Sequence[Incarnation]) -> None:
        """These became ready. Their keys may have had other values before."""

    @abstractmethod
    def left(self, objects: Sequence[Incarnation]) -> None:
        """These have left the L1, for whatever reason: when this returns, none of them may be found in the companion's
        data."""

    def read(self, objects: Sequence[Incarnation]) -> None:  # noqa: B027  # optional
        """These were read, by a call or in place. Reads in place are reported once a second, however many there
        were."""

    def next_step(self) -> float | None:
        """When `step` is due, on the clock of `context.now`; None: not before the next call. Asked in every turn of the
        loop, so it should return a precomputed value."""
        return None

    def step(self, now: float) -> None:  # noqa: B027  # optional
        """Do a bounded part of its own work."""

    def operate(self, operation: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Serve an operation for the server's own user. Raises `UsageError` for an unknown one."""
        raise UsageError(f"it has no operation {operation!r}")

    def status(self) -> dict[str, Any]:
        """Plain values for `status`; must be cheap. Its numbers also become metrics; counters belong into a table
        `counts`. Names must not change while the server runs."""
        return {}

    @abstractmethod
    def abandon(self) -> None:
        """It has raised, or the server stops: make sure that nobody is served from its data."""

    @abstractmethod
    def close(self) -> None:
        """Release everything. `abandon` was called before."""
