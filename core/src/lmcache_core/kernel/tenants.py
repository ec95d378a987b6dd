"""Tenants: groups of namespaces that share one store, each with a policy of its own, a guaranteed part and a cap.

`TenantedPolicy` is an eviction policy over other policies. A store has one from the start if its settings say so;
otherwise it gets one when the first quota is set (`Tenancy`). Then objects change owner: when a namespace gets another
tenant, its objects move from policy to policy in bounded steps. They move in the order of a fixed position that each
key has, so a single number tells where every object is.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import ceil, inf
from typing import Any, Protocol

from lmcache_core.kernel.contracts import Entry, EvictionPolicy
from lmcache_core.kernel.guard import GuardedPolicy

POSITIONS = 1 << 16  # positions of keys, for moving objects between tenants
MOVED_OBJECTS = 512  # per step: half a millisecond
OTHERS = ""  # the name of the owner of all namespaces that no tenant lists


@dataclass(frozen=True, slots=True)
class Quota:
    """A tenant's quota of one store, in bytes of slots or of objects on a medium. `reserved_bytes`: nobody takes these
    while anyone is over its own share; None: an even part of what is not reserved. `limit_bytes`: never exceeded; None:
    no cap."""

    reserved_bytes: int | None = None
    limit_bytes: int | None = None


@dataclass(slots=True)
class TenantUsage:
    """One tenant of one store. `name` is empty for the namespaces without a tenant."""

    name: str
    used_bytes: int
    reserved_bytes: int | None
    limit_bytes: int | None


class TenantWalk(Protocol):
    """What a store does to move objects between tenants."""

    def position(self, entry: Entry) -> int:
        """A number below `POSITIONS` that never changes for an entry."""
        ...

    def entries_from(self, namespaces: frozenset[int], low: int, objects_max: int) -> tuple[list[Entry], int]:
        """Entries of these namespaces that the policy has, with positions from `low` up to (not including) the number
        returned. About `objects_max` of them."""
        ...


class Tenant:
    """`used_bytes`: bytes of entries and other charges. `share_bytes`: what it keeps before it must give."""

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
        """Bytes over its limit."""
        limit = self.quota.limit_bytes
        return 0 if limit is None else max(0, self.used_bytes - limit)


class _Move:
    """Moves objects of these namespaces from one tenant to another. Those below `boundary` have moved."""

    __slots__ = ("boundary", "namespaces", "source", "target")

    def __init__(self, namespaces: frozenset[int], source: Tenant, target: Tenant) -> None:
        self.namespaces = namespaces
        self.source = source
        self.target = target
        self.boundary = 0


class TenantedPolicy(EvictionPolicy):
    """The tenant that is fullest by its own share gives the victims: nobody evicts what another tenant's share covers.

    Tenants are brought down to a common fullness (used bytes ÷ share), the fullest first. Those over their shares give
    all their surplus before any other gives a byte. If their surplus cannot be evicted now (it is held, or still being
    written), nobody gives: the store is answered FULL. What is being written, loaded or reserved counts as used. While
    nobody needs room, a tenant may use more than its share, up to its limit. Within a tenant, its own policy decides.
    All namespaces that no tenant lists form one tenant: the others.

    Source: our own; shares by quota as in max-min fairness (Bertsekas and Gallager, "Data networks", 1987), and pools
    as in CacheLib (Berg et al., OSDI 2020), without its fixed split. Costs O(1) per entry, and sorting the tenants (at
    most 1,024) for each call of `victims`.
    """

    wants_charges = True

    def __init__(
        self,
        make: Callable[[], EvictionPolicy],
        others: EvictionPolicy | None = None,
        others_quota: Quota = Quota(),
    ) -> None:
        """`make` makes a policy for one tenant; `others` is the policy that had everything so far."""
        self.make = partial(self._heard, make)
        if others is not None:
            self.note = others.note  # type: ignore[method-assign]  # of whoever owns both
        self._capacity_bytes = 0
        self._others = Tenant(OTHERS, self.make() if others is None else others, others_quota)
        self.evicts = self._others.policy.evicts
        self._tenants: dict[str, Tenant] = {}
        self.owners: dict[int, Tenant] = {}
        self._move: _Move | None = None
        self._waiting: deque[tuple[frozenset[int], Tenant]] = deque()  # moves to come, each with its new owner
        self.position: Callable[[Entry], int] = lambda entry: 0  # set to the store's before objects move
        self.charged: Mapping[int, int] = {}  # the store's own record of `charge` calls, by namespace
        self._divide()

    def _heard(self, make: Callable[[], EvictionPolicy]) -> EvictionPolicy:
        policy = make()
        policy.note = lambda text: self.note(text)  # type: ignore[method-assign]  # ours may be set after this
        return policy

    def status(self) -> dict[str, Any]:
        """Of the policy for the namespaces without a tenant."""
        return self.inner.status()

    @property
    def inner(self) -> EvictionPolicy:
        """The policy for the namespaces without a tenant."""
        return self._others.policy

    # --- the tenants ----------------------------------------------------------------------------------------

    def begin(self, used_bytes: int) -> None:
        """Everything in the store so far, so many bytes, belongs to the others."""
        self._others.used_bytes = used_bytes

    def found(self, name: str, namespaces: Iterable[int], quota: Quota) -> None:
        """Add a tenant to a store that has nothing of these namespaces yet."""
        tenant = self._tenants[name] = Tenant(name, self.make(), quota)
        self.owners.update(dict.fromkeys(namespaces, tenant))
        self._divide()

    def change(self, name: str, namespaces: frozenset[int], quota: Quota) -> None:
        """From now on the tenant has exactly these namespaces, none of which is another tenant's. The figures apply at
        once; existing objects of the namespaces follow in steps."""
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
        """Its objects go back to the others, in steps. An unknown name is no error."""
        tenant = self._tenants.pop(name, None)
        if tenant is not None:
            self._waiting.append((frozenset(self._namespaces_of(tenant)), self._others))
            self._divide()
            self._begin_next()

    def _namespaces_of(self, tenant: Tenant) -> set[int]:
        """Namespaces that it has, or will have after the moves to come."""
        owners = dict(self.owners)
        for namespaces, target in self._waiting:
            owners.update(dict.fromkeys(namespaces, target))
        return {namespace for namespace, owner in owners.items() if owner is tenant}

    def tenant_of(self, namespace: int) -> str:
        """The tenant that owns the namespace, or will own it after the moves to come."""
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
        """Compute the shares. A tenant gets what it has reserved. Of the rest, each tenant without a reservation gets
        an even part, up to its limit; what is left is the others'."""
        rest = self._capacity_bytes - sum(each.quota.reserved_bytes or 0 for each in self._tenants.values())
        unreserved = [each for each in self._tenants.values() if each.quota.reserved_bytes is None]
        part = max(0, rest) // (1 + len(unreserved))
        for tenant in self._tenants.values():
            reserved, limit = tenant.quota.reserved_bytes, tenant.quota.limit_bytes
            tenant.allow(reserved if reserved is not None else part if limit is None else min(part, limit))
        fixed = self._others.quota.reserved_bytes
        taken = sum(each.share_bytes for each in self._tenants.values())
        self._others.allow(fixed if fixed is not None else max(0, self._capacity_bytes - taken))

    # --- objects that change owner --------------------------------------------------------------------------

    @property
    def moving(self) -> bool:
        """Whether `move_some` has something left to do."""
        return self._move is not None or bool(self._waiting)

    def move_some(self, walk: TenantWalk) -> int:
        """Do one bounded step. Returns how many objects it looked at."""
        self._begin_next()
        move = self._move
        if move is None:
            return 0
        entries, high = walk.entries_from(move.namespaces, move.boundary, MOVED_OBJECTS)
        try:
            self._hand_over(entries, move.source, move.target)
        finally:  # do not retry one whose policy fails: it would never end
            move.boundary = high
            if high >= POSITIONS:
                self._move = None
        return len(entries)

    def _begin_next(self) -> None:
        if self._move is None:
            self._move = self._next_move()

    def _next_move(self) -> _Move | None:
        """Start the next move: namespaces of one owner at a time. Their charges move at once. New objects belong to the
        new owner if their position is below the boundary."""
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
        """Bytes by which the namespace's owner is over its limit."""
        return self.owners.get(namespace, self._others).over_bytes

    def victims_of(self, namespace: int, nbytes: int) -> list[Entry]:
        """As `victims`, from the namespace's owner alone."""
        return self.owners.get(namespace, self._others).policy.victims(nbytes)

    def excess(self, nbytes: int) -> list[Entry]:
        """Victims of tenants over their limits, of `nbytes` or a little more."""
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
        """Only from tenants over their shares: headroom is not worth anything that a share covers."""
        return self._from(self._over(), nbytes, down_to=1.0) if nbytes > 0 else []

    def victims(self, nbytes: int) -> list[Entry]:
        if nbytes <= 0:
            return []
        over = self._over()
        named = self._from(over, nbytes, down_to=1.0) if over else []
        beyond = sum(tenant.used_bytes - tenant.share_bytes for tenant in over)
        if _bytes(named) >= min(nbytes, beyond):
            # This brings all who are over down to their shares; everybody gives what is still missing.
            return self._from([t for t in self._all if t.used_bytes > 0], nbytes, down_to=0.0)
        return named

    def spares(self, entries: Sequence[Entry], namespace: int) -> bool:
        """Keep what another tenant's share covers, while anyone is over its own."""
        if not self._over():
            return False
        asker = self.owners.get(namespace, self._others)
        return any(
            tenant is not asker and tenant.used_bytes <= tenant.share_bytes for tenant, _ in self._by_tenant(entries)
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
        """Victims of these tenants, bringing them down to a common fullness, and none below `down_to`."""
        # Equally full tenants keep the order of the settings, so the answer is deterministic.
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
            # Some entries are held, or being written: the other tenants give more than their share, the fullest first.
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
    """The tenants of one store, from the first quota that is set there. `make` makes a policy like the store's own;
    None: it can have no tenants. `used_bytes` and `charged` are the store's accounts: of everything that it has, and of
    what it has charged, by namespace."""

    def __init__(
        self, guarded: GuardedPolicy, used_bytes: Callable[[], int], charged: Mapping[int, int], walk: TenantWalk
    ) -> None:
        self.make: Callable[[], EvictionPolicy] | None = None
        self.working = False  # whether `step` may have something to do; a plain value, because every turn asks
        self.policy: TenantedPolicy | None = None  # None: there are no tenants
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
        """Each tenant, and the others last; empty if there are no tenants."""
        return [] if self.policy is None else self.policy.usage()

    def look(self) -> None:
        """Look again: a tenant that is over its limit may be able to give now."""
        if self.policy is not None:
            self.working = True

    def step(self, nbytes: int, evict: Callable[[Sequence[Entry]], int]) -> int:
        """Do one bounded step: some objects change owner, and `evict` gets those beyond limits, `nbytes` or a little
        more, and returns how many it could evict. Returns how many objects the step handled."""
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
        """Bytes by which the namespace's owner is over its limit."""
        return 0 if self.policy is None else self.policy.over_limit(namespace)

    def victims_of(self, namespace: int, nbytes: int) -> list[Entry]:
        """Victims from the namespace's owner alone."""
        policy = self.policy
        if policy is None:
            return []
        return list(dict.fromkeys(self._guarded.attempt("victims", [], policy.victims_of, namespace, nbytes)))


def _bytes(entries: Iterable[Entry]) -> int:
    return sum(entry.nbytes for entry in entries)


def _shares(order: Sequence[Tenant], nbytes: int, down_to: float) -> list[int]:
    """Bytes that each tenant gives so that `nbytes` are freed and the givers end equally full, at `down_to` or above.
    `order`: fullest first."""
    givers = used = shares = 0
    level = 0.0
    for position, tenant in enumerate(order):
        givers, used, shares = position + 1, used + tenant.used_bytes, shares + tenant.share_bytes
        next_level = order[givers].fullness if givers < len(order) else 0.0
        if next_level == inf:
            continue
        # The level of all givers once the bytes are gone. If it is above the next tenant's level, that tenant gives
        # nothing.
        level = max(0.0, (used - nbytes) / shares) if shares else 0.0
        if level >= next_level and used >= nbytes:
            break
    level = max(level, down_to)
    return [max(0, min(t.used_bytes, ceil(t.used_bytes - level * t.share_bytes))) for t in order[:givers]]
