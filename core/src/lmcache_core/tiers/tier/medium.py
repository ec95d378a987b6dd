"""The medium of one tier, as the tier's parts use it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from lmcache_core.clock import Clock
from lmcache_core.tiers.contract import L2Adapter, Outcome
from lmcache_core.tiers.retry import ask_batch, call_batch
from lmcache_core.tiers.tier.config import TierConfig
from lmcache_core.tiers.tier.lanes import Call, Lane, Note
from lmcache_core.tiers.tier.order import KeyOrder


class Medium:
    """An adapter, the lanes on which it is called, and the order of the calls for each key. Lives on the loop's thread,
    except for the methods that block: lanes call those.

    `config`: the tier's current settings. `stopping`: set when the tier is closed; it ends retries and their pauses.
    """

    def __init__(
        self,
        name: str,
        adapter: L2Adapter,
        config: TierConfig,
        batch_keys_max: int,
        clock: Clock,
        post: Callable[[Call | Note], None],
    ) -> None:
        self.adapter = adapter
        self.config = config
        self.batch_keys_max = batch_keys_max
        self.clock = clock
        self.order = KeyOrder()
        self.stopping = threading.Event()
        connections = max(1, config.connections)
        if adapter.capabilities.thread_safe:
            self.lookups = Lane(f"{name}-lookup", min(2, connections), post)
            self.loads = Lane(f"{name}-load", min(4, connections), post)
            self.stores = Lane(f"{name}-store", min(2, connections), post, idle_disk=config.store_io == "idle")
        else:
            self.lookups = Lane(name, 1, post, replaces=False)
            self.loads = self.stores = self.lookups
        self.lanes = list(dict.fromkeys((self.lookups, self.loads, self.stores)))

    def exists(self, keys: Sequence[bytes], deadline: float) -> list[bool]:
        """Which tier keys are there, at most a batch of them. Blocks. Raises `TierError` if it cannot answer."""
        return ask_batch(self.adapter.exists, keys, deadline, self.stopping)

    def delete(self, keys: Sequence[bytes], deadline: float) -> list[Outcome]:
        """Delete a batch of tier keys. Blocks."""
        return call_batch(self.adapter.delete, keys, deadline, self.stopping)

    def set_aside(self, keys: Sequence[bytes], deadline: float) -> list[Outcome]:
        """Set a batch of damaged objects aside. Blocks."""
        return call_batch(self.adapter.set_aside, keys, deadline, self.stopping)

    def expire(self, now: float) -> None:
        """Report every call whose deadline has passed."""
        for call in self.order.expire(now):  # # first: it submits held calls, which their lanes then expire too
            call.tell_late()
        for lane in self.lanes:
            for call in lane.expire(now):
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
