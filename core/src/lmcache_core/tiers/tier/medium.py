"""The medium of one tier, as the tier's parts use it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from lmcache_core.clock import Clock
from lmcache_core.limits import LANE_NICE
from lmcache_core.tiers.contract import L2Adapter
from lmcache_core.tiers.retry import ask_batch
from lmcache_core.tiers.tier.config import TierConfig
from lmcache_core.tiers.tier.deletes import Deletes
from lmcache_core.tiers.tier.lanes import Lane, Posted
from lmcache_core.tiers.tier.order import KeyOrder


class Medium:
    """An adapter, the lanes on which it is called, and the order of the calls for each key. Lives on the loop's thread,
    except for the methods that block: lanes call those.

    `config`: the tier's current settings. `stores_waited_for`: by whoever gives them, as loads are; else all lanes step
    behind the caller's other threads, and fewer of them store. `stopping`: set when the tier is closed; it ends retries
    and their pauses.
    """

    def __init__(
        self,
        name: str,
        adapter: L2Adapter,
        config: TierConfig,
        batch_keys_max: int,
        clock: Clock,
        post: Callable[[Posted], None],
        stores_waited_for: bool = False,
    ) -> None:
        self.adapter = adapter
        self.config = config
        self.batch_keys_max = batch_keys_max
        self.clock = clock
        self.order = KeyOrder()
        self.stopping = threading.Event()
        self.deletes = Deletes(adapter, self.stopping)
        connections = max(1, config.connections)
        nice, stores = (0, 4) if stores_waited_for else (LANE_NICE, 2)
        if adapter.capabilities.thread_safe:
            self.lookups = Lane(f"{name}-lookup", min(2, connections), post, nice=nice)
            self.loads = Lane(f"{name}-load", min(4, connections), post, nice=nice)
            idle_disk = config.store_io == "idle"
            self.stores = Lane(f"{name}-store", min(stores, connections), post, nice=nice, idle_disk=idle_disk)
            # A lane of their own: deletes that hang must not take the threads of stores for which there is room.
            self.removals = Lane(f"{name}-delete", min(2, connections), post, idle_disk=idle_disk)
        else:
            self.lookups = Lane(name, 1, post, replaces=False, nice=nice)
            self.loads = self.stores = self.removals = self.lookups
        self.lanes = list(dict.fromkeys((self.lookups, self.loads, self.stores, self.removals)))

    def exists(self, keys: Sequence[bytes], deadline: float) -> list[bool]:
        """Which tier keys are there, at most a batch of them. Blocks. Raises `TierError` if it cannot answer."""
        return ask_batch(self.adapter.exists, keys, deadline, self.stopping)

    def expire(self, now: float) -> None:
        """Report every call whose deadline has passed."""
        for call in self.order.expire(now):  # # first: it submits held calls, which their lanes then expire too
            call.tell_late()
        for lane in self.lanes:
            for call in lane.expire(now):
                call.tell_late()

    def give_up(self, what: str, lane: Lane, *, running: bool) -> None:
        """Report the calls of this operation as late, those that have begun only with `running`: nobody waits for a
        tier whose breaker is open."""
        now = self.clock.now
        for call in (*self.order.expire(now, what), *lane.give_up(what, now, running=running)):
            call.tell_late()

    @property
    def next_deadline(self) -> float:
        """No call is late before this; infinity if there is none."""
        return min(self.order.next_deadline, *(lane.next_deadline for lane in self.lanes))

    def close(self) -> bool:
        """Start nothing any more. Never waits. True: no call is out."""
        self.stopping.set()
        self.order.close()
        idle = [lane.close() for lane in self.lanes]
        return all(idle)

    def close_adapter(self) -> None:
        """Close the adapter after its last call has returned. Blocks, on a thread of its own."""
        for lane in self.lanes:
            lane.wait_idle()
        self.adapter.close()
