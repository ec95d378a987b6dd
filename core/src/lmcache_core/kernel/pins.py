"""Pins: what an operator wants to keep. They belong to the server, expire by themselves, and are capped in bytes."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence

from lmcache_core.kernel.answers import Grant
from lmcache_core.kernel.ledger import Account
from lmcache_core.kernel.objects import Incarnation
from lmcache_core.kernel.residents import Residents
from lmcache_core.kernel.states import State

PIN_BYTES = 90  # of a pin: its places in tables; measured
STALE_KEPT = 1024  # so few removed pins in the list are not worth a cleanup


class Pins:
    """Ready objects that the server holds until a given time."""

    def __init__(self, residents: Residents, nbytes_max: int) -> None:
        self._residents = residents
        self._nbytes_max = nbytes_max
        self._until: dict[Incarnation, float] = {}
        self._by: dict[Incarnation, Account] = {}  # the account each is charged to: of whoever pinned it first
        # When to look at which pin. A pin stays where it was listed first. If it was extended since, it is put back
        # when its old time comes, so pinning again costs no memory.
        self._batches: list[tuple[float, int, list[Incarnation]]] = []
        self._listed = 0  # in batches; more than are pinned, because of pins removed before their time
        self._count = 0
        self.nbytes = 0

    def __len__(self) -> int:
        return len(self._until)

    def pin(self, namespace: int, keys: Sequence[bytes], until: float, account: Account) -> bytearray:
        """GRANTED (an existing pin is extended), QUOTA at a cap, or MISS."""
        table = self._residents.table.of(namespace)
        statuses = bytearray(len(keys))
        fresh: list[Incarnation] = []
        self._residents.undo.add((self.remove, (fresh,)))  # before the first of them: they follow
        for at, key in enumerate(keys):
            found = table.get(key)
            if found is None or found.state is not State.READY:
                statuses[at] = Grant.MISS
                continue
            if found not in self._until:
                if self.nbytes + found.nbytes > self._nbytes_max or found.nbytes > account.room:
                    statuses[at] = Grant.QUOTA
                    continue
                fresh.append(found)
                self.nbytes += found.nbytes
                account.take((found,))
                self._by[found] = account
                account.memory.charge(PIN_BYTES)
            self._until[found] = max(until, self._until.get(found, until))
        if fresh:
            self._list(until, fresh)
            self._residents.hold(fresh)
        return statuses

    def _list(self, until: float, objects: list[Incarnation]) -> None:
        self._count += 1
        self._listed += len(objects)
        heapq.heappush(self._batches, (until, self._count, objects))

    def unpin(self, namespace: int, keys: Sequence[bytes]) -> bytearray:
        """GRANTED if there was a pin, otherwise MISS."""
        table = self._residents.table.of(namespace)
        found = [table.get(key) for key in keys]
        pinned = dict.fromkeys(item for item in found if item is not None and item in self._until)
        self.remove(pinned)
        return bytearray([Grant.GRANTED if item in pinned else Grant.MISS for item in found])

    def remove(self, objects: Iterable[Incarnation]) -> None:
        """End the pins on these; objects without a pin are skipped."""
        if not self._until:
            return
        pinned = [item for item in objects if self._until.pop(item, None) is not None]
        if pinned:
            for item in pinned:
                account = self._by.pop(item)
                account.free((item,))
                account.memory.charge(-PIN_BYTES)
            self.nbytes -= sum(item.nbytes for item in pinned)
            self._residents.release(pinned)
        if self._listed > STALE_KEPT and self._listed > 2 * len(self._until):
            self._sift()

    def expire(self, now: float, objects_max: int) -> None:
        """End what is due, a bounded number at a time."""
        while self._batches and self._batches[0][0] <= now and objects_max > 0:
            batch = heapq.heappop(self._batches)[2]
            objects_max -= len(batch)
            self._listed -= len(batch)
            later: dict[float, list[Incarnation]] = {}
            for item in batch:
                until = self._until.get(item, now)
                if until > now:
                    later.setdefault(until, []).append(item)
            for until, items in later.items():
                self._list(until, items)
            self.remove([item for item in batch if self._until.get(item, now + 1) <= now])

    def next_deadline(self) -> float | None:
        return self._batches[0][0] if self._batches else None

    def _sift(self) -> None:
        # An operator who pins and unpins all day must not grow this list.
        kept: dict[Incarnation, tuple[float, int]] = {}
        for until, number, batch in self._batches:
            for item in batch:
                if item in self._until:
                    kept[item] = min((until, number), kept.get(item, (until, number)))
        batches: dict[tuple[float, int], list[Incarnation]] = {}
        for item, place in kept.items():
            batches.setdefault(place, []).append(item)
        self._batches = [(until, number, batch) for (until, number), batch in batches.items()]
        heapq.heapify(self._batches)
        self._listed = len(kept)
