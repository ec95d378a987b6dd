"""Pins: what an operator wants kept. They belong to the server, end by themselves, and are capped in bytes."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence

from lmcache_core.kernel.answers import Grant
from lmcache_core.kernel.ledger import Account
from lmcache_core.kernel.objects import Incarnation
from lmcache_core.kernel.residents import Residents
from lmcache_core.kernel.states import State


class Pins:
    """Ready objects with a server's hold on them, until a time."""

    def __init__(self, residents: Residents, nbytes_max: int) -> None:
        self._residents = residents
        self._nbytes_max = nbytes_max
        self._until: dict[Incarnation, float] = {}
        self._by: dict[Incarnation, Account] = {}  # whom each is charged to: who pinned it first
        self._batches: list[tuple[float, int, list[Incarnation]]] = []
        self._count = 0
        self.nbytes = 0

    def __len__(self) -> int:
        return len(self._until)

    def pin(self, namespace: int, keys: Sequence[bytes], until: float, account: Account) -> bytearray:
        """GRANTED (a pin that is there already is made to last longer), QUOTA at a cap, or MISS."""
        table = self._residents.table.of(namespace)
        statuses = bytearray(len(keys))
        batch: list[Incarnation] = []
        fresh: list[Incarnation] = []
        for at, key in enumerate(keys):
            found = table.get(key)
            if found is None or found.state is not State.READY:
                statuses[at] = Grant.MISS
                continue
            if found not in self._until:
                if self.nbytes + found.nbytes > self._nbytes_max or found.nbytes > account.room:
                    statuses[at] = Grant.QUOTA
                    continue
                self.nbytes += found.nbytes
                fresh.append(found)
                account.take((found,))
                self._by[found] = account
            self._until[found] = max(until, self._until.get(found, until))
            batch.append(found)
        if batch:
            self._count += 1
            heapq.heappush(self._batches, (until, self._count, batch))
        if fresh:
            self._residents.hold(fresh)
        return statuses

    def unpin(self, namespace: int, keys: Sequence[bytes]) -> bytearray:
        """GRANTED where there was a pin, MISS elsewhere."""
        table = self._residents.table.of(namespace)
        found = [table.get(key) for key in keys]
        pinned = dict.fromkeys(item for item in found if item is not None and item in self._until)
        self.let_go(pinned)
        return bytearray([Grant.GRANTED if item in pinned else Grant.MISS for item in found])

    def let_go(self, objects: Iterable[Incarnation]) -> None:
        """End the pins on these; those that have none are passed over."""
        if not self._until:
            return
        pinned = [item for item in objects if self._until.pop(item, None) is not None]
        if pinned:
            for item in pinned:
                self._by.pop(item).give((item,))
            self.nbytes -= sum(item.nbytes for item in pinned)
            self._residents.release(pinned)
        if len(self._batches) > 64 and len(self._batches) > 2 * len(self._until):
            self._sift()

    def expire(self, now: float, objects_max: int) -> None:
        """End what is due, a bounded number at a time."""
        while self._batches and self._batches[0][0] <= now and objects_max > 0:
            batch = heapq.heappop(self._batches)[2]
            objects_max -= len(batch)
            self.let_go([item for item in batch if self._until.get(item, now + 1) <= now])

    def next_deadline(self) -> float | None:
        return self._batches[0][0] if self._batches else None

    def _sift(self) -> None:
        # Batches of which nothing is pinned any more: an operator who pins and unpins all day leaves none behind.
        self._batches = [entry for entry in self._batches if any(item in self._until for item in entry[2])]
        heapq.heapify(self._batches)
