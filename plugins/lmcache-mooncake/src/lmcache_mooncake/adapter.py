"""The Mooncake tier: objects in the memory of Mooncake's nodes, over a client in a process of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar, TypeVar

from lmcache_core.errors import TierError
from lmcache_core.tiers.blocking import BatchAdapter, Connections
from lmcache_core.tiers.contract import (
    AdapterContext,
    Capabilities,
    LoadItem,
    Outcome,
    Result,
    StoreItem,
)
from lmcache_mooncake.client import CallLane, EndedError, StoreProcess
from lmcache_mooncake.errors import refusal
from lmcache_mooncake.messages import ALIGN, DAMAGED, NOT_THERE, Reply, Request, places, room_bytes
from lmcache_mooncake.settings import MooncakeSettings

Item = TypeVar("Item")


class _StaleError(Exception):
    """A connection of a process that has gone."""


class MooncakeAdapter(BatchAdapter):
    """Starts its client process when it is first used."""

    capabilities: ClassVar[Capabilities] = Capabilities(scan=False, durable=True, evicts=True, shared=True)
    errors = (EndedError, TierError)

    def __init__(self, settings: MooncakeSettings, context: AdapterContext) -> None:
        self._settings = settings
        self._process = StoreProcess(settings, context.tier)
        self._lanes = Connections(self._process.connect)
        self._object_bytes_max = settings.staging_bytes - ALIGN
        self.capabilities = Capabilities(  # type: ignore[misc]
            scan=False,
            durable=True,
            evicts=True,
            shared=True,
            batch_bytes_max=settings.staging_bytes,
            object_bytes_max=self._object_bytes_max,
        )
        super().__init__(context, self._lanes, self._process)

    # --- the contract ---------------------------------------------------------------------------------------
    def store(self, items: Sequence[StoreItem], deadline: float) -> Sequence[Outcome]:
        most = self._object_bytes_max
        fitting = [item for item in items if item.nbytes <= most]
        outcomes = iter(self._in_runs("store", fitting, lambda item: item.nbytes, self._store_run, deadline))
        refused = f"an object has {most:,} bytes here at most (l2.{self._tier}.staging_bytes)"
        return [next(outcomes) if item.nbytes <= most else Outcome(Result.FAILED, error=refused) for item in items]

    def exists(self, keys: Sequence[bytes], deadline: float) -> Sequence[bool]:
        """The master also notes a use of each, and leases it to this client for its `default_kv_lease_ttl`: what was
        looked up is not evicted before it is loaded."""
        codes = self.whole("look up", lambda: self._call(Request("exists", self._names(keys)), deadline))
        for code in codes:
            if code < 0:
                raise refusal(self._tier, "look up", code).as_error()
        return [code == 1 for code in codes]

    def load(self, items: Sequence[LoadItem], deadline: float) -> Sequence[Outcome]:
        return self._in_runs("load", items, self._room, self._load_run, deadline)

    def delete(self, keys: Sequence[bytes], deadline: float) -> Sequence[Outcome]:
        def removed() -> list[Outcome]:
            codes = self._call(Request("delete", self._names(keys)), deadline)
            return [refusal(self._tier, "delete", code) if code else Outcome(Result.DONE) for code in codes]

        return self.together("delete", len(keys), removed)

    def medium(self) -> str:
        settings = self._settings
        return f"Mooncake Store at {settings.master}, tenant {settings.tenant}, keys of {settings.key_prefix!r}"

    def status(self) -> dict[str, Any]:
        return dict(self._process.status())

    def refused(self, what: str, error: Exception) -> Outcome:
        if isinstance(error, TierError):
            return Outcome.of(error)
        message = f"tier {self._tier!r} cannot {what}: the process of Mooncake's client ended: {error}"
        return Outcome.of(TierError(message, cure="look for its last words in the server's log"))

    # --- parts ----------------------------------------------------------------------------------------------
    def _names(self, keys: Sequence[bytes]) -> list[str]:
        return [self._settings.key_prefix + key.hex() for key in keys]

    def _room(self, item: LoadItem) -> int:
        """Larger objects are not ours."""
        return min(sum(each.nbytes for each in item.buffers), self._object_bytes_max)

    def _in_runs(
        self,
        what: str,
        items: Sequence[Item],
        nbytes_of: Callable[[Item], int],
        move: Callable[[Sequence[Item], list[int], float], list[Outcome]],
        deadline: float,
    ) -> list[Outcome]:
        """The outcomes of all items, as many at a time as the shared memory holds."""
        self.check_open()
        outcomes: list[Outcome] = []
        for run in _runs(items, nbytes_of, self._settings.staging_bytes):
            sizes = [nbytes_of(item) for item in run]
            outcomes += self.together(what, len(run), lambda run=run, sizes=sizes: move(run, sizes, deadline))  # type: ignore[misc]
        return outcomes

    def _store_run(self, items: Sequence[StoreItem], sizes: list[int], deadline: float) -> list[Outcome]:
        def put(lane: CallLane) -> Reply:
            for at, item in zip(places(sizes), items, strict=True):
                lane.write(at, item.buffers)
            return lane.call(Request("store", self._names([item.key for item in items]), sizes), deadline)

        codes = self._on_lane(put, deadline)
        return [
            refusal(self._tier, "store", code) if code else Outcome(Result.DONE, nbytes)
            for code, nbytes in zip(codes, sizes, strict=True)
        ]

    def _load_run(self, items: Sequence[LoadItem], sizes: list[int], deadline: float) -> list[Outcome]:
        def get(lane: CallLane) -> Reply:
            reply = lane.call(Request("load", self._names([item.key for item in items]), sizes), deadline)
            for code, at, item in zip(reply.codes, places(sizes), items, strict=False):
                lane.read(at, code, item.buffers)
            return reply

        codes = self._on_lane(get, deadline)
        return [self._loaded(item, code) for item, code in zip(items, codes, strict=True)]

    def _loaded(self, item: LoadItem, code: int) -> Outcome:
        if code >= 0:
            return Outcome(Result.DONE, code)
        if code in NOT_THERE:
            return Outcome(Result.MISS)
        if code == DAMAGED:
            about = f"key {item.key.hex()} is longer than expected, or not what was stored"
            return Outcome(Result.DAMAGED, error=f"tier {self._tier!r}: {about}")
        return refusal(self._tier, "load", code)

    def _call(self, request: Request, deadline: float) -> list[int]:
        return self._on_lane(lambda lane: lane.call(request, deadline), deadline) if request.names else []

    def _on_lane(self, call: Callable[[CallLane], Reply], deadline: float) -> list[int]:
        while True:
            try:
                with self._lanes.one(deadline) as lane:
                    if lane.ended:
                        raise _StaleError
                    reply = call(lane)
                break
            except _StaleError:
                continue
        if reply.error:
            cure = reply.cure.replace("l2.NAME", f"l2.{self._tier}")
            raise TierError(f"tier {self._tier!r}: {reply.error}", cure=cure)
        return reply.codes


def _runs(items: Sequence[Item], nbytes_of: Callable[[Item], int], most: int) -> Iterator[Sequence[Item]]:
    """The items in order, so many at a time that their rooms together have `most` bytes at most."""
    run: list[Item] = []
    total = 0
    for item in items:
        room = room_bytes(nbytes_of(item))
        if run and total + room > most:
            yield run
            run, total = [], 0
        run.append(item)
        total += room
    if run:
        yield run
