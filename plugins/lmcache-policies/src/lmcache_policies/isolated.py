"""A policy for each tenant, with byte quotas."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import ceil, inf

from lmcache_core import Kind
from lmcache_core.policies import Entry, EvictionPolicy
from lmcache_policies.settings import IsolatedSettings


class _Tenant:
    """Its entries are ordered by a policy of its own."""

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
        return self.used_bytes / self.quota_bytes if self.quota_bytes else inf


class IsolatedPolicy(EvictionPolicy):
    """Whoever is fullest by its own quota gives the victims: no tenant pushes out what another one's quota covers.

    Tenants are brought down to a common fullness (used bytes ÷ quota), the fullest first: those over their quotas
    give everything beyond them before any other gives a byte. While nobody needs room, a tenant may use more than
    its quota. Within a tenant the inner policy decides. Namespaces that no tenant lists share one quota: `others`.

    Source: our own; shares by quota as in max-min fairness (Bertsekas and Gallager, "Data networks", 1987), and
    pools as in CacheLib (Berg et al., OSDI 2020), without its fixed split. Costs O(1) an entry and a sort of
    the tenants (1,024 at the most) for each call of `victims`.
    """

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

    def victims(self, nbytes: int) -> list[Entry]:
        if nbytes <= 0:
            return []
        # Equally full tenants stand in the order of the settings, so the answer is always the same.
        order = sorted((t for t in self._tenants if t.used_bytes), key=lambda t: t.fullness, reverse=True)
        shares = _shares(order, nbytes)
        named: list[list[Entry]] = [[] for _ in order]
        missing = nbytes
        for position, share in enumerate(shares):
            if missing <= 0 or share <= 0:
                break
            named[position] = order[position].policy.victims(min(share, missing))
            missing -= _bytes(named[position])
        if missing > 0:
            # Someone's entries are held: the others give more than their share, the fullest first.
            for position, tenant in enumerate(order):
                given = _bytes(named[position])
                if given < tenant.used_bytes:
                    named[position] = tenant.policy.victims(given + missing)
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


def _shares(order: Sequence[_Tenant], nbytes: int) -> list[int]:
    """Bytes that each tenant gives so that `nbytes` go and the givers end equally full. `order`: fullest first."""
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
    return [max(0, min(t.used_bytes, ceil(t.used_bytes - level * t.quota_bytes))) for t in order[:givers]]
