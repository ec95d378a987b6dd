"""The contract of tracers, which follow single requests through a server.

A plugin offers a tracer (`Kind.TRACER`), and a table with its name in the settings, `[NAME]`, enables it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lmcache_core.clock import Clock
from lmcache_core.kernel.objects import Incarnation
from lmcache_core.tiers.contract import Outcome
from lmcache_core.tiers.l1 import CommittedObject
from lmcache_core.tiers.object.transfer import Loaded

__all__ = [
    "RequestTracer",
    "TracerContext",
]


@dataclass(frozen=True)
class TracerContext:
    """What a tracer knows about its server.

    Attributes:
        server: Its name.
        clock: The time of the server's loop.
        for_tiers: The incarnations that the pool has of these keys of a namespace, if there are tiers that may be given
            them. Only on the loop's thread.
    """

    server: str
    clock: Clock
    for_tiers: Callable[[int, Sequence[bytes]], Sequence[Incarnation]]


class RequestTracer:
    """Follows no request: a tracer overrides what it needs. Built before the server answers requests, as
    `factory(settings, context)`; raise errors there, or return None to trace nothing.

    The server guarantees that all methods are called on its loop's thread. Times are seconds of the server's clock.

    The implementation is quick, never waits, and never raises: what it wants to send, it sends from another thread.
    """

    def begin(self, traceparent: str) -> Hashable | None:
        """A request begins, with the W3C trace context that its caller gave ("": none). Returns what stands for its
        trace from here on, or None if it is not traced."""
        return None

    def lookup_ended(self, trace: Any, namespace: int, keys: int, hits: int, loaded: int) -> None:
        """A lookup is answered, and nothing more is loaded for it. `hits` of its keys are in the L1; tiers `loaded`
        that many of these for it."""

    def store_granted(self, trace: Any, namespace: int, keys: bytes, lease: int, statuses: bytes) -> None:
        """Slots were granted under this lease, which may already have some: a status of `Grant` for each key of 32
        bytes."""

    def store_refused(self, trace: Any, namespace: int, keys: bytes, why: str) -> None:
        """No slot was granted. `why`: the code of the error, `unanswered` if the client left, or "" if none was
        needed."""

    def settled(self, lease: int, positions: Sequence[int], outcomes: bytes | bytearray) -> None:
        """Positions of a lease, of a store or another one, were settled: with these values of `Settled`."""

    def loaded(
        self,
        tier: str,
        began_s: float,
        returned_s: float,
        waiters: Mapping[Any, Sequence[int]],
        nbytes: int,
        results: Sequence[Loaded],
    ) -> None:
        """A call has loaded objects of `nbytes` each, and they are committed. `waiters`: the trace of each traced
        lookup, with the positions in `results` that it waited for."""

    def load_failed(self, tier: str, began_s: float, waiters: Mapping[Any, Sequence[int]], reason: str) -> None:
        """A call did not come back by its deadline."""

    def storing(self, tier: str, objects: Sequence[CommittedObject]) -> Callable[[Sequence[Outcome]], None] | None:
        """A call to store objects begins. Returns what to call with its outcomes, or None if none of them is traced."""
        return None

    def check(self) -> None:
        """Called about once a second."""

    def close(self) -> None:
        """The server shuts down. May wait for a moment."""

    def status(self) -> dict[str, Any] | None:
        """For `status`: plain values, and no secrets."""
        return None
