"""A tier whose calls take virtual time: the real tiering, over lanes without threads and a dictionary."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from sim_shadow import OBJECT_BYTES, Shadow
from sim_world import World

import lmcache_core.tiers.tier as tier_module
from lmcache_core.client.copying import address_of
from lmcache_core.errors import TierError
from lmcache_core.tiers.config import TierConfig
from lmcache_core.tiers.contract import (
    Capabilities,
    L2Adapter,
    LoadItem,
    Outcome,
    Result,
    ScanPage,
    StoreItem,
    Usage,
)
from lmcache_core.tiers.lanes import Call, CallState, Lane
from lmcache_core.tiers.tier import Tier

if TYPE_CHECKING:
    from sim_nodes import ServerNode

    from lmcache_core.server.server import Server

NAME = "far"
DEADLINE_S = 5.0


class SimulatedTier:
    """The medium, which outlives its servers."""

    def __init__(self, world: World, shadow: Shadow) -> None:
        self.world = world
        self.shadow = shadow
        self.objects: dict[bytes, bytes] = {}
        self.calls_out = 0
        self._node: ServerNode | None = None

    def attach(self, server: Server, node: ServerNode) -> None:
        """A new server begins to use it."""
        self._node = node
        medium, incarnation = self, node.incarnation

        class VirtualLane(Lane):
            """Its threads are events."""

            def _start_thread(self) -> None:
                self._threads += 1
                medium.world.soon(self._begin)

            def _begin(self) -> None:
                if node.incarnation != incarnation or node.server is None:
                    return  # the process is gone, and its threads with it
                while self._queue and self._queue[0].state is not CallState.QUEUED:
                    heapq.heappop(self._queue)
                if self._closing or self._threads > self._allowed_threads() or not self._queue:
                    self._threads -= 1
                    return
                call = heapq.heappop(self._queue)
                self._queued -= 1
                call.state = CallState.RUNNING
                self._running.add(call)
                medium.calls_out += 1
                medium.world.at(medium.world.now + medium.latency(), lambda: self._end(call))

            def _end(self, call: Call) -> None:
                medium.calls_out -= 1
                if node.incarnation != incarnation or node.server is None:
                    return
                if node.stopped_until > medium.world.now:
                    medium.calls_out += 1
                    medium.world.at(node.stopped_until, lambda: self._end(call))
                    return
                try:
                    call.result = call.work()
                except TierError as error:
                    call.error = error
                self._running.discard(call)
                if call.state is CallState.LATE:
                    self._hung -= 1
                call.state = CallState.ENDED
                self._post(call)
                medium.world.soon(node.turn)
                self._begin()

            def wait_idle(self) -> None:
                pass

        tier_module.Lane = VirtualLane  # type: ignore[misc]
        tiering = server._tiering_made()
        tiering.add_tier(Tier(NAME, Medium(self), TierConfig(deadline_s=DEADLINE_S)))

    def detach(self) -> None:
        self._node = None

    def latency(self) -> float:
        """Of one call: mostly short, now and then past every deadline."""
        draw = self.world.chance.random()
        return self.world.pause() if draw < 0.8 else 0.4 * self.world.chance.random() if draw < 0.95 else 4 * DEADLINE_S


class Medium(L2Adapter):
    """The adapter of one server."""

    capabilities: ClassVar[Capabilities] = Capabilities(scan=False, durable=True)

    def __init__(self, tier: SimulatedTier, context: Any = None) -> None:
        self._tier = tier

    def store(self, items: Sequence[StoreItem], deadline: float) -> Sequence[Outcome]:
        for item in items:
            content = b"".join(item.buffers)
            body = content[-OBJECT_BYTES:]
            incarnation = self._tier.shadow.incarnation(body)
            self._tier.shadow.check(body, incarnation.namespace, incarnation.key, "a lane")
            self._tier.objects[item.key] = content
        return [Outcome(Result.DONE, item.nbytes) for item in items]

    def exists(self, keys: Sequence[bytes], deadline: float) -> Sequence[bool]:
        return [key in self._tier.objects for key in keys]

    def load(self, items: Sequence[LoadItem], deadline: float) -> Sequence[Outcome]:
        return [self._load(item) for item in items]

    def _load(self, item: LoadItem) -> Outcome:
        content = self._tier.objects.get(item.key)
        if content is None:
            return Outcome(Result.MISS)
        at = 0
        for buffer in item.buffers:
            if buffer.nbytes == OBJECT_BYTES:
                self._tier.shadow.lane_writes(address_of(buffer))
            buffer[:] = content[at : at + buffer.nbytes]
            at += buffer.nbytes
        return Outcome(Result.DONE, at)

    def delete(self, keys: Sequence[bytes], deadline: float) -> Sequence[Outcome]:
        for key in keys:
            self._tier.objects.pop(key, None)
        return [Outcome(Result.DONE)] * len(keys)

    def usage(self) -> Usage:
        return Usage(sum(map(len, self._tier.objects.values())), len(self._tier.objects))

    def scan(self, cursor: str | None, deadline: float) -> ScanPage:
        raise TierError("this medium cannot be scanned", retryable=False)

    def close(self) -> None:
        pass
