"""Tenants with quotas: nothing is taken from one that is inside its own while another one is over.

Who has how much is counted here from what stands in slots and in the books of a tier, without a word of the policy's;
and what the policy believes must be the same.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from sim_shadow import NAMESPACES, OBJECT_BYTES
from sim_world import Broken, World

from lmcache_core.kernel.contracts import Entry, EvictionPolicy
from lmcache_core.kernel.guard import GuardedPolicy
from lmcache_core.kernel.kernel import Kernel
from lmcache_core.kernel.states import State
from lmcache_core.tiers.tier.tier import Tier
from lmcache_policies.isolated import IsolatedPolicy
from lmcache_policies.settings import IsolatedSettings

if TYPE_CHECKING:
    from lmcache_core.server.server import Server

OF_THE_POOL = (10, 5)  # slots, of 16
OF_A_TIER = {12: (8, 4), 5: (3, 2)}  # its capacity in objects → its tenants' quotas


def tenants(objects: Sequence[int], nbytes: int = OBJECT_BYTES) -> dict[str, object]:
    """The settings of `isolated`: the first namespace may have so many objects, the second so many."""
    return {
        f"tenant{number}": {"namespaces": [NAMESPACES[number].id], "quota_bytes": quota * nbytes}
        for number, quota in enumerate(objects)
    }


def policy(capacity: int, nbytes: int) -> IsolatedPolicy:
    """Of a tier."""
    return IsolatedPolicy(IsolatedSettings.model_validate({"tenants": tenants(OF_A_TIER[capacity], nbytes)}))


class Store:
    """The pool, or a tier: whatever orders it evicts by `isolated`."""

    def __init__(self, world: World, name: str, policy: IsolatedPolicy) -> None:
        self._world = world
        self._name = name
        self._policy = policy
        self._quotas = {namespace: tenant.quota.reserved_bytes for namespace, tenant in policy.owners.items()}

    def used(self) -> Counter[int]:
        """Bytes of each namespace: there, or on their way."""
        raise NotImplementedError

    def evicts(self, victims: Sequence[Entry], wanted: Mapping[int, int]) -> None:
        """These are about to go, or have just begun to; `wanted` are bytes on their way that are not counted yet."""
        used = self.used()
        used.update(wanted)
        inside = Counter[int]()
        for victim in victims:
            if used[victim.namespace] <= self._quotas[victim.namespace]:
                inside[victim.namespace] += 1
            used[victim.namespace] -= victim.nbytes
        for namespace in inside:
            over = [each for each in self._quotas if each != namespace and used[each] > self._quotas[each]]
            if over:
                self._broken(
                    f"tenant {self._number(namespace)} is inside its quota and lost {inside[namespace]} objects of "
                    f"{self._name}, while tenant {self._number(over[0])} is over"
                )

    def check(self) -> None:
        """The policy believes what is so, whenever something leaves."""
        used = self.used()
        for namespace, tenant in self._policy.owners.items():
            if tenant.used_bytes != used[namespace]:
                self._broken(
                    f"tenant {self._number(namespace)} has {used[namespace]} bytes of {self._name}, and its policy "
                    f"counts {tenant.used_bytes}"
                )

    def _number(self, namespace: int) -> int:
        return [each.id for each in NAMESPACES].index(namespace)

    def _broken(self, said: str) -> None:
        """The server's own code holds off what is raised: it must be heard all the same."""
        self._world.failure = self._world.failure or Broken(said)


class PoolStore(Store):
    """What is claimed, written, loaded, ready, held beyond its removal, in quarantine, or waited for."""

    def __init__(self, world: World, kernel: Kernel, policy: IsolatedPolicy) -> None:
        super().__init__(world, "the pool", policy)
        self._residents = residents = kernel.residents
        self._rooms = kernel._rooms
        self._evict = residents.evict
        residents.evict = self.evict  # type: ignore[method-assign]

    def used(self) -> Counter[int]:
        taken = {item for item in self._residents.allocator.walk() if item is not None and item.state is not State.FREE}
        taken |= {item for table in self._residents.table.namespaces.values() for item in table}
        used = Counter[int]()
        for item in taken:
            used[item.namespace] += item.nbytes
        for waiting in self._rooms.waiting:
            used[waiting.namespace] += waiting.slots * waiting.size_class.slot_bytes
        return used

    def evict(self, victims: Sequence[Entry]) -> None:
        self.evicts(victims, {})
        self._evict(victims)
        self.check()


class TierStore(Store):
    """What the books of a tier have, without what is about to leave it, and what is reserved."""

    def __init__(self, world: World, tier: Tier, policy: IsolatedPolicy) -> None:
        super().__init__(world, f"tier {tier.name}", policy)
        self._books = books = tier.accounting
        self._reserved = Counter[int]()
        self._victims, self._shrink, self._reserve = books.victims, books.shrink, books.reserve
        books.victims, books.shrink, books.reserve = self.victims, self.shrink, self.reserve  # type: ignore[method-assign]

    def used(self) -> Counter[int]:
        used = Counter(self._reserved)
        for shard in self._books._shards:  # a thousand, nearly all of them empty: `shards` would copy each
            for entry in shard.values() if shard else ():
                if not entry.leaves:
                    used[entry.namespace] += entry.nbytes
        return used

    def reserve(self, namespace: int, nbytes: int) -> None:
        self._reserved[namespace] += nbytes
        self._reserve(namespace, nbytes)

    def victims(self, wanted_bytes: int = 0, namespace: int = 0) -> list[Entry]:
        chosen = self._victims(wanted_bytes, namespace)
        self._left(chosen, {namespace: wanted_bytes})
        return chosen

    def shrink(self) -> list[Entry]:
        chosen = self._shrink()
        self._left(chosen, {})
        return chosen

    def _left(self, chosen: Sequence[Entry], wanted: Mapping[int, int]) -> None:
        """They count as leaving already."""
        if not chosen:
            return
        before = Counter(wanted)
        for entry in chosen:
            before[entry.namespace] += entry.nbytes
        self.evicts(chosen, before)
        self.check()


def watched(world: World, server: Server, tiers: Sequence[Tier]) -> list[Store]:
    """Whatever of a server is ordered by `isolated`."""
    stores: list[Store] = []
    policy = _isolated(server.parts.kernel.residents.policy)
    if policy is not None:
        stores.append(PoolStore(world, server.parts.kernel, policy))
    for tier in tiers:
        policy = _isolated(tier.accounting.policy)
        if policy is not None:
            stores.append(TierStore(world, tier, policy))
    return stores


def _isolated(policy: EvictionPolicy | None) -> IsolatedPolicy | None:
    inner = policy.inner if isinstance(policy, GuardedPolicy) else policy
    return inner if isinstance(inner, IsolatedPolicy) else None
