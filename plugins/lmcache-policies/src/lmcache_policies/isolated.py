"""A policy for each tenant, with byte quotas."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import ceil, inf

from lmcache_core import Kind
from lmcache_core.policies import Entry, EvictionPolicy
from lmcache_policies.settings import IsolatedSettings


class _Tenant:
    """Its entries are ordered by a policy of its own. `used_bytes`: of entries, and what it is charged with besides."""

    __slots__ = ("policy", "quota_bytes", "used_bytes")

    def __init__(self, policy: EvictionPolicy, quota_bytes: int) -> None:
        self.policy = policy
        self.used_bytes = 0
        self.allow(quota_bytes)

    def allow(self, quota_bytes: int) -> None:
        self.quota_bytes = quota_bytes
        self.policy.resize(quota_bytes)

    @property
    def fullness(self) -> float:
        """Used bytes ÷ quota."""
        if not self.quota_bytes:
            return inf if self.used_bytes > 0 else 0.0
        return self.used_bytes / self.quota_bytes


class IsolatedPolicy(EvictionPolicy):
    """Whoever is fullest by its own quota gives the victims: no tenant pushes out what another one's quota covers.

    Tenants are brought down to a common fullness (used bytes ÷ quota), the fullest first: those over their quotas
    give everything beyond them before any other gives a byte, and if what they have cannot go now (it is held, or still
    being written) nobody gives: the store is answered FULL. What is being written, loaded or reserved counts as used.
    While nobody needs room, a tenant may use more than its quota. Within a tenant the inner policy decides. Namespaces
    that no tenant lists share one quota: `others`.

    Source: our own; shares by quota as in max-min fairness (Bertsekas and Gallager, "Data networks", 1987), and
    pools as in CacheLib (Berg et al., OSDI 2020), without its fixed split. Costs O(1) an entry and a sort of
    the tenants (1,024 at the most) for each call of `victims`.
    """

    wants_charges = True

    def __init__(self, settings: IsolatedSettings) -> None:
        # Imported here: the loader imports every installed plugin's front module, this one's too.
        from lmcache_core.plugins.loader import load_plugins

        registry = load_plugins()

        def inner() -> EvictionPolicy:
            policy: EvictionPolicy = registry.build(
                Kind.EVICTION_POLICY, settings.inner, settings.inner_settings or None
            )
            return policy

        self._others_fixed = settings.others_quota_bytes is not None
        self._others = _Tenant(inner(), settings.others_quota_bytes or 0)
        self._tenants = [self._others]
        self._owner: dict[int, _Tenant] = {}
        for listed in settings.tenants.values():
            tenant = _Tenant(inner(), listed.quota_bytes)
            self._tenants.append(tenant)
            self._owner.update(dict.fromkeys(listed.namespaces, tenant))

    def insert(self, entries: Sequence[Entry]) -> None:
        for tenant, own in self._by_tenant(entries):
            tenant.used_bytes += sum(entry.nbytes for entry in own)
            tenant.policy.insert(own)

    def access(self, entries: Sequence[Entry]) -> None:
        for tenant, own in self._by_tenant(entries):
            tenant.policy.access(own)

    def remove(self, entries: Sequence[Entry]) -> None:
        for tenant, own in self._by_tenant(entries):
            tenant.used_bytes -= sum(entry.nbytes for entry in own)
            tenant.policy.remove(own)

    def charge(self, namespace: int, nbytes: int) -> None:
        self._owner.get(namespace, self._others).used_bytes += nbytes

    def surplus(self, nbytes: int) -> list[Entry]:
        """Only from those that are over their quotas: headroom is worth nothing that a quota covers."""
        return self._from(self._over(), nbytes, down_to=1.0) if nbytes > 0 else []

    def victims(self, nbytes: int) -> list[Entry]:
        if nbytes <= 0:
            return []
        over = self._over()
        named = self._from(over, nbytes, down_to=1.0) if over else []
        beyond = sum(tenant.used_bytes - tenant.quota_bytes for tenant in over)
        if _bytes(named) >= min(nbytes, beyond):
            # All who are over come down to their quotas by that; what is missing still is everybody's.
            return self._from([t for t in self._tenants if t.used_bytes > 0], nbytes, down_to=0.0)
        return named

    def spares(self, entries: Sequence[Entry], namespace: int) -> bool:
        """What somebody else's quota covers stays, for as long as anyone is over."""
        if not self._over():
            return False
        asking = self._owner.get(namespace, self._others)
        return any(
            tenant is not asking and tenant.used_bytes <= tenant.quota_bytes for tenant, _ in self._by_tenant(entries)
        )

    def _over(self) -> list[_Tenant]:
        return [tenant for tenant in self._tenants if tenant.used_bytes > tenant.quota_bytes]

    def _from(self, tenants: Sequence[_Tenant], nbytes: int, down_to: float) -> list[Entry]:
        """Victims of these tenants, who come down to a common fullness, and to none below `down_to`."""
        # Equally full tenants stand in the order of the settings, so the answer is always the same.
        order = sorted(tenants, key=lambda tenant: tenant.fullness, reverse=True)
        most = [max(0, ceil(tenant.used_bytes - down_to * tenant.quota_bytes)) for tenant in order]
        shares = _shares(order, nbytes, down_to)
        named: list[list[Entry]] = [[] for _ in order]
        missing = nbytes
        for position, share in enumerate(shares):
            if missing <= 0 or share <= 0:
                break
            named[position] = order[position].policy.victims(min(share, missing))
            missing -= _bytes(named[position])
        if missing > 0:
            # Someone's entries are held, or being written: the others give more than their share, the fullest first.
            for position, tenant in enumerate(order):
                given = _bytes(named[position])
                if given < most[position]:
                    named[position] = tenant.policy.victims(min(most[position], given + missing))
                    missing -= _bytes(named[position]) - given
                if missing <= 0:
                    break
        return [entry for own in named for entry in own]

    def resize(self, capacity_bytes: int) -> None:
        if not self._others_fixed:
            listed = sum(tenant.quota_bytes for tenant in self._tenants if tenant is not self._others)
            self._others.allow(max(0, capacity_bytes - listed))

    def held(self, entries: Sequence[Entry]) -> None:
        for tenant, own in self._by_tenant(entries):
            tenant.policy.held(own)

    def released(self, entries: Sequence[Entry]) -> None:
        for tenant, own in self._by_tenant(entries):
            tenant.policy.released(own)

    def _by_tenant(self, entries: Sequence[Entry]) -> Iterable[tuple[_Tenant, list[Entry]]]:
        groups: dict[_Tenant, list[Entry]] = {}
        for entry in entries:
            groups.setdefault(self._owner.get(entry.namespace, self._others), []).append(entry)
        return groups.items()


def _bytes(entries: Iterable[Entry]) -> int:
    return sum(entry.nbytes for entry in entries)


def _shares(order: Sequence[_Tenant], nbytes: int, down_to: float) -> list[int]:
    """Bytes that each tenant gives so that `nbytes` go and the givers end equally full, at `down_to` or above.
    `order`: fullest first."""
    givers = used = quotas = 0
    level = 0.0
    for position, tenant in enumerate(order):
        givers, used, quotas = position + 1, used + tenant.used_bytes, quotas + tenant.quota_bytes
        next_level = order[givers].fullness if givers < len(order) else 0.0
        if next_level == inf:
            continue
        # Where all givers stand once the bytes are gone; above the next tenant's level it need not give.
        level = max(0.0, (used - nbytes) / quotas) if quotas else 0.0
        if level >= next_level and used >= nbytes:
            break
    level = max(level, down_to)
    return [max(0, min(t.used_bytes, ceil(t.used_bytes - level * t.quota_bytes))) for t in order[:givers]]
