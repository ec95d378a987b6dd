"""Which objects hints keep in memory, for whom, until when, and in how many bytes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from lmcache_core.pool.layout import Layout

Name = tuple[int, bytes]  # (namespace, key)


class Objects(NamedTuple):
    """The objects that an action means. `tenant`: whose quota their namespace counts in. `known`: whether the server
    knows the namespace; if not, the layout is the sender's word."""

    namespace: int
    layout: Layout
    keys: tuple[bytes, ...]
    tenant: str
    known: bool


class Budget:
    """Bytes that hints may take of a pool, all together and for each tenant, as shares. Who is in no tenant shares the
    whole. Nothing fits before the pool's size is known."""

    def __init__(self, share: float, tenant_share: float) -> None:
        self._share = share
        self._tenant_share = tenant_share
        self._by_tenant: defaultdict[str, int] = defaultdict(int)
        self.pool_bytes = 0
        self.nbytes = 0

    def room(self, tenant: str) -> int:
        """Bytes that this tenant may take now."""
        room = self.most("") - self.nbytes
        if tenant:
            room = min(room, self.most(tenant) - self._by_tenant.get(tenant, 0))
        return max(0, room)

    def most(self, tenant: str) -> int:
        """Bytes that this tenant may have while nobody else has any."""
        limit = int(self._share * self.pool_bytes)
        return int(self._tenant_share * limit) if tenant else limit

    def take(self, tenant: str, nbytes: int) -> None:
        """They are taken; a negative number gives back."""
        self.nbytes += nbytes
        self._by_tenant[tenant] += nbytes
        if not self._by_tenant[tenant]:
            del self._by_tenant[tenant]


class _Held(NamedTuple):
    tenant: str
    nbytes: int
    until: dict[str, float]  # by holder


class Holdings:
    """Objects that holders hold, each until a time of its own. An object stays until its last holder ends; its bytes
    count once, for the tenant of its namespace."""

    def __init__(self, budget: Budget, entries_max: int) -> None:
        self.budget = budget
        self._entries_max = entries_max
        self._held: dict[Name, _Held] = {}
        self._by_holder: dict[str, dict[Name, None]] = {}
        self._entries = 0  # an object counts once for each holder

    def __len__(self) -> int:
        return len(self._held)

    def admit(self, holder: str, objects: Objects, keys: Iterable[bytes], until: float) -> list[bytes]:
        """Hold the first of these keys, as many as the budget allows, in their order."""
        admitted = []
        names = self._by_holder.setdefault(holder, {})
        for key in keys:
            name = objects.namespace, key
            if name not in names:
                if self._entries >= self._entries_max:
                    break
                if name not in self._held:
                    if self.budget.room(objects.tenant) < objects.layout.nbytes:
                        break
                    self.budget.take(objects.tenant, objects.layout.nbytes)
                    self._held[name] = _Held(objects.tenant, objects.layout.nbytes, {})
                names[name] = None
                self._entries += 1
            until_of = self._held[name].until
            until_of[holder] = max(until, until_of.get(holder, until))
            admitted.append(key)
        if not names:
            del self._by_holder[holder]
        return admitted

    def holds(self, holder: str) -> bool:
        """Whether it holds anything."""
        return holder in self._by_holder

    def end(self, holder: str) -> None:
        """It holds nothing any more."""
        for name in list(self._by_holder.get(holder, ())):
            self._let_go(holder, name)

    def forget(self, names: Iterable[Name]) -> None:
        """These are no longer in memory: nobody holds them."""
        for name in names:
            held = self._held.get(name)
            for holder in () if held is None else list(held.until):
                self._let_go(holder, name)

    def expire(self, now: float) -> None:
        """End what is over."""
        over = [
            (holder, name) for name, held in self._held.items() for holder, until in held.until.items() if until <= now
        ]
        for holder, name in over:
            self._let_go(holder, name)

    def _let_go(self, holder: str, name: Name) -> None:
        names, held = self._by_holder[holder], self._held[name]
        del names[name], held.until[holder]
        self._entries -= 1
        if not names:
            del self._by_holder[holder]
        if not held.until:
            del self._held[name]
            self.budget.take(held.tenant, -held.nbytes)

    def pages(self, size: int) -> Iterator[tuple[int, list[bytes]]]:
        """(namespace, keys) of everything held, at most `size` keys at a time, in the order in which they came."""
        by_namespace: dict[int, list[bytes]] = {}
        for namespace, key in self._held:
            by_namespace.setdefault(namespace, []).append(key)
        for namespace, keys in by_namespace.items():
            for first in range(0, len(keys), size):
                yield namespace, keys[first : first + size]
