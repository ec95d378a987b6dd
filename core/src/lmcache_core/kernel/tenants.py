"""Tenants: groups of namespaces that share one store, each with a policy of its own, a guaranteed part and a cap.

`TenantedPolicy` is an eviction policy over other ones. A store has one from the start where its settings say so, and
gets one while it runs when the first quota is set (`Tenancy`). Then objects change hands: those of a namespace that
gets another tenant move from policy to policy a bounded step at a time, in the order of a position that each key has,
so that one number says of every object where it is.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil, inf
from typing import Protocol

from lmcache_core.kernel.contracts import Entry, EvictionPolicy
from lmcache_core.kernel.guard import GuardedPolicy

POSITIONS = 1 << 16  # of keys, while objects change hands
MOVED_OBJECTS = 512  # in one step: half a millisecond
OTHERS = ""  # the name of the owner of all namespaces that no tenant lists


@dataclass(frozen=True, slots=True)
class Quota:
    """What a tenant has of one store, in bytes of slots or of objects on a medium. `reserved_bytes` nobody takes from
    it while somebody has more than his part; None: an even part of what nobody has reserved. `limit_bytes` it never
    exceeds; None: no cap."""

    reserved_bytes: int | None = None
    limit_bytes: int | None = None


@dataclass(slots=True)
class TenantUsage:
    """One tenant of one store. `name` is empty for all namespaces without a tenant."""

    name: str
    used_bytes: int
    reserved_bytes: int | None
    limit_bytes: int | None


class TenantWalk(Protocol):
    """What a store does for objects that change hands."""

    def position(self, entry: Entry) -> int:
        """A number below `POSITIONS` that the entry always has."""
        ...

    def entries_from(self, namespaces: frozenset[int], low: int, objects_max: int) -> tuple[list[Entry], int]:
        """Entries that the policy has, of these namespaces, with positions from `low` up to, not including, the number
        given back. About `objects_max` of them."""
        ...


class Tenant:
    """`used_bytes`: of entries, and what it is charged with besides. `share_bytes`: what it has before it is asked to
    give."""

    __slots__ = ("name", "policy", "quota", "share_bytes", "used_bytes")

    def __init__(self, name: str, policy: EvictionPolicy, quota: Quota) -> None:
        self.name = name
        self.policy = policy
        self.quota = quota
        self.used_bytes = 0
        self.share_bytes = 0

    def allow(self, share_bytes: int) -> None:
        if share_bytes != self.share_bytes:
            self.share_bytes = share_bytes
            self.policy.resize(share_bytes)

    @property
    def fullness(self) -> float:
        """Used bytes ÷ share."""
        if not self.share_bytes:
            return inf if self.used_bytes > 0 else 0.0
        return self.used_bytes / self.share_bytes

    @property
    def over_bytes(self) -> int:
        """Beyond its limit."""
        limit = self.quota.limit_bytes
        return 0 if limit is None else max(0, self.used_bytes - limit)


class _Move:
    """Objects of these namespaces go from one tenant to another. Those below `boundary` have gone."""

    __slots__ = ("boundary", "namespaces", "source", "target")

    def __init__(self, namespaces: frozenset[int], source: Tenant, target: Tenant) -> None:
        self.namespaces = namespaces
        self.source = source
        self.target = target
        self.boundary = 0


class TenantedPolicy(EvictionPolicy):
    """Whoever is fullest by its own share gives the victims: no tenant pushes out what another one's share covers.

    Tenants are brought down to a common fullness (used bytes ÷ share), the fullest first: those over their shares
    give everything beyond them before any other gives a byte, and if what they have cannot go now (it is held, or still
    being written) nobody gives: the store is answered FULL. What is being written, loaded or reserved counts as used.
    While nobody needs room, a tenant may use more than its share, up to its limit. Within a tenant a policy of its own
    decides. Namespaces that no tenant lists are one tenant: the others.

    Source: our own; shares by quota as in max-min fairness (Bertsekas and Gallager, "Data networks", 1987), and
    pools as in CacheLib (Berg et al., OSDI 2020), without its fixed split. Costs O(1) an entry and a sort of
    the tenants (1,024 at the most) for each call of `victims`.
    """

    wants_charges = True

    def __init__(
        self,
        make: Callable[[], EvictionPolicy],
        others: EvictionPolicy | None = None,
        others_quota: Quota = Quota(),
    ) -> None:
        """`make` gives a policy for one tenant; `others` has been that of all so far."""
        self.make = make
        self._capacity_bytes = 0
        self._others = Tenant(OTHERS, make() if others is None else others, others_quota)
        self.evicts = self._others.policy.evicts
        self._tenants: dict[str, Tenant] = {}
        self.owners: dict[int, Tenant] = {}
        self._move: _Move | None = None
        self._waiting: deque[tuple[frozenset[int], Tenant]] = deque()  # moves to come: to whom
        self.position: Callable[[Entry], int] = lambda entry: 0  # the store's, once objects may change hands
        self.charged: Mapping[int, int] = {}  # the store's own account of what `charge` was told, by namespace
        self._divide()

    @property
    def inner(self) -> EvictionPolicy:
        """What orders the namespaces without a tenant."""
        return self._others.policy

    # --- who there is ---------------------------------------------------------------------------------------

    def begin(self, used_bytes: int) -> None:
        """All that the store has so far is the others': so many bytes."""
        self._others.used_bytes = used_bytes

    def found(self, name: str, namespaces: Iterable[int], quota: Quota) -> None:
        """A tenant of a store that has nothing of these namespaces yet."""
        tenant = self._tenants[name] = Tenant(name, self.make(), quota)
        self.owners.update(dict.fromkeys(namespaces, tenant))
        self._divide()

    def change(self, name: str, namespaces: frozenset[int], quota: Quota) -> None:
        """A tenant with these namespaces, and no others, from now on. The figures hold at once; what there is of the
        namespaces follows in steps. No namespace is another tenant's."""
        tenant = self._tenants.get(name)
        if tenant is None:
            tenant = self._tenants[name] = Tenant(name, self.make(), quota)
        tenant.quota = quota
        self._divide()
        leaving = self._namespaces_of(tenant) - namespaces
        for target, some in ((self._others, leaving), (tenant, namespaces)):
            if some:
                self._waiting.append((frozenset(some), target))
        self._begin_next()

    def remove_tenant(self, name: str) -> None:
        """What it has is the others' again, in steps. An unknown name is no error."""
        tenant = self._tenants.pop(name, None)
        if tenant is not None:
            self._waiting.append((frozenset(self._namespaces_of(tenant)), self._others))
            self._divide()
            self._begin_next()

    def _namespaces_of(self, tenant: Tenant) -> set[int]:
        """That it has, or will have."""
        owners = dict(self.owners)
        for namespaces, target in self._waiting:
            owners.update(dict.fromkeys(namespaces, target))
        return {namespace for namespace, owner in owners.items() if owner is tenant}

    def tenant_of(self, namespace: int) -> str:
        """Whose the namespace is, or is to be once what waits has moved."""
        owner = self.owners.get(namespace, self._others)
        for namespaces, target in self._waiting:
            if namespace in namespaces:
                owner = target
        return owner.name

    def usage(self) -> list[TenantUsage]:
        """Each tenant, and the others last."""
        return [
            TenantUsage(each.name, each.used_bytes, each.quota.reserved_bytes, each.quota.limit_bytes)
            for each in self._all
        ]

    @property
    def _all(self) -> list[Tenant]:
        return [*self._tenants.values(), self._others]

    def _divide(self) -> None:
        """Shares: what is reserved; of the rest an even part for each tenant that has reserved nothing, up to its
        limit, and what is left for the others."""
        rest = self._capacity_bytes - sum(each.quota.reserved_bytes or 0 for each in self._tenants.values())
        unreserved = [each for each in self._tenants.values() if each.quota.reserved_bytes is None]
        part = max(0, rest) // (1 + len(unreserved))
        for tenant in self._tenants.values():
            reserved, limit = tenant.quota.reserved_bytes, tenant.quota.limit_bytes
            tenant.allow(reserved if reserved is not None else part if limit is None else min(part, limit))
        fixed = self._others.quota.reserved_bytes
        taken = sum(each.share_bytes for each in self._tenants.values())
        self._others.allow(fixed if fixed is not None else max(0, self._capacity_bytes - taken))

    # --- objects that change hands --------------------------------------------------------------------------

    @property
    def moving(self) -> bool:
        """Whether `move_some` has something left to do."""
        return self._move is not None or bool(self._waiting)

    def move_some(self, walk: TenantWalk) -> int:
        """One bounded step; how many objects it looked at."""
        self._begin_next()
        move = self._move
        if move is None:
            return 0
        entries, high = walk.entries_from(move.namespaces, move.boundary, MOVED_OBJECTS)
        try:
            self._hand_over(entries, move.source, move.target)
        finally:  # one whose policy fails is not tried again, or it would be for ever
            move.boundary = high
            if high >= POSITIONS:
                self._move = None
        return len(entries)

    def _begin_next(self) -> None:
        if self._move is None:
            self._move = self._next_move()

    def _next_move(self) -> _Move | None:
        """Namespaces of one owner at a time. What is charged to them goes over at once, and what comes from now on is
        the new owner's where it stands before the boundary."""
        while self._waiting:
            namespaces, target = self._waiting.popleft()
            by_source: dict[Tenant, list[int]] = {}
            for namespace in namespaces:
                by_source.setdefault(self.owners.get(namespace, self._others), []).append(namespace)
            by_source.pop(target, None)
            if not by_source:
                continue
            source, some = by_source.popitem()
            if by_source:
                rest = frozenset(namespace for group in by_source.values() for namespace in group)
                self._waiting.appendleft((rest, target))
            for namespace in some:
                if target is self._others:
                    self.owners.pop(namespace, None)
                else:
                    self.owners[namespace] = target
                charged = self.charged.get(namespace, 0)
                source.used_bytes -= charged
                target.used_bytes += charged
            return _Move(frozenset(some), source, target)
        return None

    def _hand_over(self, entries: Sequence[Entry], source: Tenant, target: Tenant) -> None:
        if not entries:
            return
        nbytes = _bytes(entries)
        source.used_bytes -= nbytes
        target.used_bytes += nbytes
        try:
            source.policy.remove(entries)
        finally:
            target.policy.insert(entries)
        held = [entry for entry in entries if entry.holds]
        if held:
            target.policy.held(held)

    # --- caps -----------------------------------------------------------------------------------------------

    def over_limit(self, namespace: int) -> int:
        """Bytes by which whoever owns the namespace is over its limit."""
        return self.owners.get(namespace, self._others).over_bytes

    def victims_of(self, namespace: int, nbytes: int) -> list[Entry]:
        """As `victims`, of the namespace's owner alone."""
        return self.owners.get(namespace, self._others).policy.victims(nbytes)

    def excess(self, nbytes: int) -> list[Entry]:
        """Victims of those that are over their limits, of `nbytes` or a little more."""
        named: list[Entry] = []
        for tenant in self._tenants.values():
            if nbytes <= 0:
                break
            over = min(nbytes, tenant.over_bytes)
            if over:
                own = tenant.policy.victims(over)
                named += own
                nbytes -= _bytes(own)
        return named

    # --- the policy -----------------------------------------------------------------------------------------

    def insert(self, entries: Sequence[Entry]) -> None:
        for tenant, own in self._by_tenant(entries):
            tenant.used_bytes += _bytes(own)
            tenant.policy.insert(own)

    def access(self, entries: Sequence[Entry]) -> None:
        for tenant, own in self._by_tenant(entries):
            tenant.policy.access(own)

    def remove(self, entries: Sequence[Entry]) -> None:
        for tenant, own in self._by_tenant(entries):
            tenant.used_bytes -= _bytes(own)
            tenant.policy.remove(own)

    def charge(self, namespace: int, nbytes: int) -> None:
        self.owners.get(namespace, self._others).used_bytes += nbytes

    def surplus(self, nbytes: int) -> list[Entry]:
        """Only from those that are over their shares: headroom is worth nothing that a share covers."""
        return self._from(self._over(), nbytes, down_to=1.0) if nbytes > 0 else []

    def victims(self, nbytes: int) -> list[Entry]:
        if nbytes <= 0:
            return []
        over = self._over()
        named = self._from(over, nbytes, down_to=1.0) if over else []
        beyond = sum(tenant.used_bytes - tenant.share_bytes for tenant in over)
        if _bytes(named) >= min(nbytes, beyond):
            # All who are over come down to their shares by that; what is missing still is everybody's.
            return self._from([t for t in self._all if t.used_bytes > 0], nbytes, down_to=0.0)
        return named

    def spares(self, entries: Sequence[Entry], namespace: int) -> bool:
        """What somebody else's share covers stays, for as long as anyone is over."""
        if not self._over():
            return False
        asking = self.owners.get(namespace, self._others)
        return any(
            tenant is not asking and tenant.used_bytes <= tenant.share_bytes for tenant, _ in self._by_tenant(entries)
        )

    def resize(self, capacity_bytes: int) -> None:
        self._capacity_bytes = capacity_bytes
        self._divide()

    def held(self, entries: Sequence[Entry]) -> None:
        for tenant, own in self._by_tenant(entries):
            tenant.policy.held(own)

    def released(self, entries: Sequence[Entry]) -> None:
        for tenant, own in self._by_tenant(entries):
            tenant.policy.released(own)

    def _over(self) -> list[Tenant]:
        return [tenant for tenant in self._all if tenant.used_bytes > tenant.share_bytes]

    def _from(self, tenants: Sequence[Tenant], nbytes: int, down_to: float) -> list[Entry]:
        """Victims of these tenants, who come down to a common fullness, and to none below `down_to`."""
        # Equally full tenants stand in the order of the settings, so the answer is always the same.
        order = sorted(tenants, key=lambda tenant: tenant.fullness, reverse=True)
        most = [max(0, ceil(tenant.used_bytes - down_to * tenant.share_bytes)) for tenant in order]
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

    def _by_tenant(self, entries: Sequence[Entry]) -> Iterable[tuple[Tenant, list[Entry]]]:
        owners, others, move = self.owners, self._others, self._move
        groups: dict[Tenant, list[Entry]] = {}
        for entry in entries:
            owner = owners.get(entry.namespace, others)
            if move is not None and entry.namespace in move.namespaces and self.position(entry) >= move.boundary:
                owner = move.source
            groups.setdefault(owner, []).append(entry)
        return groups.items()


class Tenancy:
    """The tenants of one store, from the first quota that is set there. `make` gives a policy as the store's own;
    None: it can have no tenants. `used_bytes` and `charged` are the store's accounts: of all that it has, and of what
    it has charged, by namespace."""

    def __init__(
        self, guarded: GuardedPolicy, used_bytes: Callable[[], int], charged: Mapping[int, int], walk: TenantWalk
    ) -> None:
        self.make: Callable[[], EvictionPolicy] | None = None
        self.working = False  # whether `step` may have something to do: plain values, for they are asked for every turn
        self.policy: TenantedPolicy | None = None  # None: nobody is a tenant here
        self._guarded = guarded
        self._used_bytes = used_bytes
        self._charged = charged
        self._walk = walk
        if isinstance(guarded.inner, TenantedPolicy):
            self.policy = guarded.inner

    def change(self, name: str, namespaces: frozenset[int], quota: Quota, capacity_bytes: int) -> None:
        """See `TenantedPolicy.change`."""
        policy = self.policy
        if policy is None:
            assert self.make is not None
            policy = TenantedPolicy(self.make, self._guarded.inner)
            policy.resize(capacity_bytes)
            policy.begin(self._used_bytes())
            self._guarded.inner, self._guarded.wants_charges = policy, True
            self.policy = policy
        policy.position, policy.charged = self._walk.position, self._charged
        policy.change(name, namespaces, quota)
        self.working = True

    def remove(self, name: str) -> None:
        """See `TenantedPolicy.remove_tenant`."""
        if self.policy is not None:
            self.policy.position, self.policy.charged = self._walk.position, self._charged
            self.policy.remove_tenant(name)
            self.working = True

    def tenant_of(self, namespace: int) -> str:
        """See `TenantedPolicy.tenant_of`."""
        return OTHERS if self.policy is None else self.policy.tenant_of(namespace)

    def usage(self) -> list[TenantUsage]:
        """Each tenant, and the others last; nothing where nobody is a tenant."""
        return [] if self.policy is None else self.policy.usage()

    def look(self) -> None:
        """Somebody may be over a limit who could not give before."""
        if self.policy is not None:
            self.working = True

    def step(self, nbytes: int, evict: Callable[[Sequence[Entry]], int]) -> int:
        """One bounded step: some objects change hands, and `evict` gets what is beyond limits, of `nbytes` or a little
        more; it says how many it could evict. How many objects the step has to do with."""
        policy = self.policy
        if policy is None:
            self.working = False
            return 0
        moved = self._guarded.attempt("remove", 0, policy.move_some, self._walk)
        going = self._guarded.attempt("victims", [], policy.excess, nbytes)
        evicted = evict(going) if going else 0
        self.working = policy.moving or evicted > 0
        return moved + evicted

    def over_limit(self, namespace: int) -> int:
        """Bytes by which whoever owns the namespace is over its limit."""
        return 0 if self.policy is None else self.policy.over_limit(namespace)

    def victims_of(self, namespace: int, nbytes: int) -> list[Entry]:
        """Of the namespace's owner alone."""
        policy = self.policy
        if policy is None:
            return []
        return list(dict.fromkeys(self._guarded.attempt("victims", [], policy.victims_of, namespace, nbytes)))


def _bytes(entries: Iterable[Entry]) -> int:
    return sum(entry.nbytes for entry in entries)


def _shares(order: Sequence[Tenant], nbytes: int, down_to: float) -> list[int]:
    """Bytes that each tenant gives so that `nbytes` go and the givers end equally full, at `down_to` or above.
    `order`: fullest first."""
    givers = used = shares = 0
    level = 0.0
    for position, tenant in enumerate(order):
        givers, used, shares = position + 1, used + tenant.used_bytes, shares + tenant.share_bytes
        next_level = order[givers].fullness if givers < len(order) else 0.0
        if next_level == inf:
            continue
        # Where all givers stand once the bytes are gone; above the next tenant's level it need not give.
        level = max(0.0, (used - nbytes) / shares) if shares else 0.0
        if level >= next_level and used >= nbytes:
            break
    level = max(level, down_to)
    return [max(0, min(t.used_bytes, ceil(t.used_bytes - level * t.share_bytes))) for t in order[:givers]]
