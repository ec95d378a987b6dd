"""Tiering: the one object that the server's loop talks to about tiers. One thread, no locks, no blocking call.

How a loop drives it (`now` is always `time.monotonic()`):

    tiering = Tiering(l1, tiers, wake=eventfd_write, store_policy=…, prefetch_policy=…, config=TieringConfig())
    tiering.on_committed([Committed(…), …])    # after each commit of a worker: cheap, only queues
    job = tiering.lookup(Lookup(namespace, layout_id, keys, missing, deadline), on_done, now)
    …
    loop:
        poll(timeout = tiering.next_deadline(now) - now)   # None: nothing to wait for
        tiering.step(now)                      # completions, what is late, next batches; bounded work; calls on_done
    …
    tiering.begin_drain(now)                   # SIGTERM: everything dirty goes out; go on calling step()
    tiering.drained                            # True: nothing is pending or in flight any more
    idle = tiering.close(now)                  # never waits; False: a lane call is still out, keep the mapping

`wake()` is called from lane threads whenever a completion is waiting; it must be thread-safe and cheap.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from lmcache_core.limits import PREFETCH_IN_FLIGHT_MAX
from lmcache_core.policies.contracts import PrefetchPolicy, StorePolicy
from lmcache_core.tiers.jobs import Job, Lookup
from lmcache_core.tiers.l1 import L1, Committed
from lmcache_core.tiers.tier import Tier


@dataclass(frozen=True)
class TieringConfig:
    """`dirty`: what happens to an object that is evicted from the L1 before it was stored: "drop" counts it as
    lost, "keep" holds it in the L1 until it is stored (new stores then answer FULL while the tiers are behind).
    """

    prefetch_in_flight_max: int = PREFETCH_IN_FLIGHT_MAX
    store_in_flight_bytes_max: int = 512 << 20
    dirty: str = "drop"
    epochs_path: str | None = None  # where the namespaces' epochs are kept; None: forgotten with the process


class Tiering:
    """See the module."""

    def __init__(
        self,
        l1: L1,
        tiers: Sequence[Tier],
        *,
        wake: Callable[[], None],
        store_policy: StorePolicy,
        prefetch_policy: PrefetchPolicy,
        config: TieringConfig = TieringConfig(),
    ) -> None: ...

    def on_committed(self, objects: Sequence[Committed]) -> None:
        """Queue what a worker committed (unique keys). Costs next to nothing; `step` does the work."""

    def lookup(
        self, request: Lookup, on_done: Callable[[Job], None], now: float, policy: PrefetchPolicy | None = None
    ) -> Job:
        """Ask the tiers for what the L1 lacks, and load what the policy picks. Ask the kernel again in
        `on_done`: what was loaded may have been evicted since."""
        ...

    def cancel(self, job: Job) -> None:
        """The request went away. What nobody else waits for is released; `on_done` is called."""

    def step(self, now: float) -> None:
        """Apply completions, report what is late, start what can start. Bounded work a call."""

    def next_deadline(self, now: float) -> float | None:
        """When `step` should be called even if nothing wakes the loop. `now` if there is work left already."""
        ...

    def clear(self, namespace: int | None, now: float, *, tiers: bool = False) -> None:
        """A fence: loads and lookups in flight of this scope (None: everything) end as CLEARED. With `tiers` the
        epoch moves, stores in flight are followed by a delete, and what the tiers hold is deleted in the
        background. Call it after the kernel's own clear."""

    def add_tier(self, tier: Tier, now: float) -> None:
        """Use one more tier, as the last in order. Raises `SettingsError` if the name is taken."""

    def drain_tier(self, name: str) -> None:
        """Store nothing more there; what is on it is still served. Raises `UsageError` for an unknown name."""

    def remove_tier(self, name: str, now: float) -> None:
        """Forget the tier at once (its objects stay on the medium)."""

    def begin_drain(self, now: float) -> None:
        """No new lookups; everything dirty goes out."""

    @property
    def drained(self) -> bool:
        """Nothing is pending or in flight."""
        ...

    def close(self, now: float) -> bool:
        """End everything without waiting. True: no lane call is out, the pool may be unmapped."""
        ...

    def status(self) -> dict[str, Any]:
        """For `status`: queues, counters, and one entry for each tier in order."""
        ...
