"""What `isolated` promises, over a kernel and a tier: a tenant inside its quota loses nothing to others."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lmcache_core.kernel import Kernel, KernelConfig
from lmcache_core.kernel.sessions import SERVER_SESSION
from lmcache_core.kernel.states import NO_ROW, State
from lmcache_core.tiers.object.format import tier_key
from lmcache_core.tiers.tier.accounting import Accounting
from lmcache_policies.isolated import IsolatedPolicy
from lmcache_policies.settings import IsolatedSettings

SLOT = 256 << 10  # four to a slab
SLOTS = 64
WORKER = 7
TENANTS = (1, 2, 3)
SIZES = [{1: 1, 2: 1, 3: 1}, {1: 1, 2: 2, 3: 1}, {1: 1, 2: 7, 3: 1}]  # slots of an object of each tenant
QUOTAS = {1: 20 * SLOT, 2: 30 * SLOT, 3: 14 * SLOT}  # all of the pool


def policy() -> IsolatedPolicy:
    tenants = {f"t{name}": {"namespaces": [name], "quota_bytes": quota} for name, quota in QUOTAS.items()}
    return IsolatedPolicy(IsolatedSettings.model_validate({"tenants": tenants}))


def key(number: int) -> bytes:
    return number.to_bytes(32, "big")


class Pool:
    """A kernel of 64 slots and three tenants, at whom bursts are thrown."""

    def __init__(self, seed: int, layouts: dict[int, int]) -> None:
        self.rng = random.Random(seed)
        config = KernelConfig(
            pool_bytes=SLOTS * SLOT, data_offset=1 << 16, slab_bytes=4 * SLOT, write_ttl_s=50.0, watermark=0.9,
            quarantine_fraction_max=0.9, quarantine_fraction_per_uid_max=0.9,
        )  # fmt: skip
        self.kernel = Kernel(config, policy(), epoch=1)
        self.kernel.attach_session(SERVER_SESSION, NO_ROW)
        self.kernel.add_memory(SLOTS * SLOT)
        self.kernel.open_session(WORKER, uid=1)
        self.kernel.attach_session(WORKER, row=0)
        for layout, slots in layouts.items():
            self.kernel.register_layout(layout, slots * SLOT)
        self.layouts = layouts
        self.now = 0.0
        self.leases: list[tuple[int, int, int]] = []  # session, id, tenant
        self.reads: list[int] = []
        self.numbers = 0

    def ready(self, tenant: int) -> set[bytes]:
        table = self.kernel.residents.table.of(tenant)
        return {item.key for item in table if item.state is State.READY}

    def used(self, tenant: int) -> int:
        """All the bytes that the tenant takes, counted by looking at every slab."""
        slabs = {slab for slab in self.kernel.allocator.owners if slab is not None}
        standing = (item for slab in slabs for item in slab.residents if item is not None)
        return sum(item.nbytes for item in standing if item.state is not State.FREE and item.namespace == tenant)

    def shield(self, tenant: int) -> None:
        """Some tier is still to get what the tenant has."""
        ready = [item for item in self.kernel.residents.table.of(tenant) if item.state is State.READY]
        self.kernel.shield(tenant, [(item.key, item.generation) for item in ready])

    def act(self) -> int | None:
        """One thing happens; the tenant that caused it."""
        rng, kernel = self.rng, self.kernel
        self.now += rng.random()
        tenant = rng.choice(TENANTS)
        match rng.choice(
            ("store", "store", "load", "commit", "commit", "abort", "read", "finish", "trim", "late", "clean")
        ):
            case "store" | "load" as how:
                keys = [key(self.numbers + at) for at in range(rng.choice((1, 4, 24)))]
                self.numbers += len(keys)
                session = SERVER_SESSION if how == "load" else WORKER
                granted = kernel.prepare_store(session, tenant, tenant, keys, self.now, loading=how == "load")
                self.leases.append((session, granted.lease_id, tenant))
                return tenant
            case "commit" | "abort" as how if self.leases:
                session, lease, owner = self.leases.pop(rng.randrange(len(self.leases)))
                status = kernel.lease_status(session, lease, self.now)
                if status.expired or how == "abort":
                    kernel.abort_store(session, lease, self.now)
                else:
                    kernel.commit_store(session, lease, self.now)
                    if rng.random() < 0.5:
                        self.shield(owner)
                return owner
            case "read":
                found = list(self.ready(tenant))[:5]
                if found:
                    self.reads.append(kernel.prepare_retrieve(WORKER, tenant, found, self.now).lease_id)
                return None
            case "finish" if self.reads:
                kernel.finish_read(WORKER, self.reads.pop(), self.now)
                return None
            case "clean":
                kernel.unshield_some(rng.randrange(30))
            case "trim":
                kernel.trim(self.now)
            case "late" if rng.random() < 0.1:
                self.now += 60.0
                kernel.expire(self.now)
        return None


@pytest.mark.parametrize("layouts", SIZES, ids=["one size", "two sizes", "one large"])
@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_no_bursts_take_anything_in_the_pool_from_a_tenant_inside_its_quota(layouts: dict[int, int], seed: int) -> None:
    pool = Pool(seed, layouts)
    for _ in range(120):
        before = {tenant: (pool.ready(tenant), pool.used(tenant)) for tenant in TENANTS}
        cause = pool.act()
        over = [tenant for tenant in TENANTS if before[tenant][1] > QUOTAS[tenant]]
        for tenant in TENANTS:
            ready, used = before[tenant]
            # With one size of slots the quotas fit into the pool: what somebody lost went to a tenant that is over.
            # With two, slabs can be wanting: what somebody loses then is lost because nobody is over any more.
            still = [other for other in over if other != tenant and pool.used(other) > QUOTAS[other]]
            others = still if layouts[2] > 1 else [cause]
            if tenant != cause and used <= QUOTAS[tenant] and others:
                assert ready <= pool.ready(tenant), f"tenant {tenant} lost objects to {cause}, {over} are over"


def test_a_burst_of_writes_in_flight_takes_nothing_from_a_tenant_inside_its_quota() -> None:
    pool = Pool(0, {1: 1, 2: 1, 3: 1})
    kernel = pool.kernel
    for tenant, count in ((1, 20), (2, 30)):
        granted = kernel.prepare_store(WORKER, tenant, tenant, [key(n) for n in range(count)], 0.0)
        kernel.commit_store(WORKER, granted.lease_id, 0.0)
    burst = [kernel.prepare_store(WORKER, 3, 3, [key(100 * n + at) for at in range(24)], 0.0) for n in range(5)]
    assert sum(grants.statuses.count(0) for grants in burst) == 14, "its own quota, and not a slot more"
    for grants in burst:
        if 0 in grants.statuses:
            kernel.commit_store(WORKER, grants.lease_id, 0.0)
    assert (len(pool.ready(1)), len(pool.ready(2)), len(pool.ready(3))) == (20, 30, 14)


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_no_bursts_take_anything_on_a_tier_from_a_tenant_inside_its_quota(seed: int) -> None:
    rng = random.Random(seed)
    books = Accounting(SLOTS * SLOT, 0.9, 0.2, policy())
    reserved: list[tuple[int, list[tuple[bytes, int]]]] = []
    leaving: list[Any] = []
    numbers = 0

    def held() -> dict[int, tuple[set[bytes], int]]:
        staying = [entry for shard in books.shards() for entry in shard if not entry.holds]
        on_the_way = [(owner, nbytes) for owner, batch in reserved for _, nbytes in batch]
        return {
            tenant: (
                {entry.tier_key for entry in staying if entry.namespace == tenant},
                sum(entry.nbytes for entry in staying if entry.namespace == tenant)
                + sum(nbytes for owner, nbytes in on_the_way if owner == tenant),
            )
            for tenant in TENANTS
        }

    for _ in range(150):
        before = held()
        cause: int | None = rng.choice(TENANTS)
        match rng.choice(("reserve", "reserve", "stored", "deleted", "stays", "trim")):
            case "reserve":
                wanted = [(tier_key(key(numbers + at), cause, 0), SLOT) for at in range(rng.choice((1, 8)))]
                numbers += len(wanted)
                leaving += books.victims(len(wanted) * SLOT, cause)
                if books.fits(len(wanted) * SLOT):
                    books.reserve(cause, len(wanted) * SLOT)
                    reserved.append((cause, wanted))
            case "stored" if reserved:
                cause, batch = reserved.pop(rng.randrange(len(reserved)))
                books.reserve(cause, -len(batch) * SLOT)
                books.add(batch if rng.random() < 0.9 else [])
            case "deleted" | "stays" as how if leaving:
                entry = leaving.pop(rng.randrange(len(leaving)))
                if how == "deleted":
                    books.remove([entry.tier_key])
                else:
                    books.stays(entry.tier_key)
            case _:
                cause = None
                leaving += books.victims()
        after = held()
        for tenant in TENANTS:
            ours, used = before[tenant]
            if tenant != cause and used <= QUOTAS[tenant]:
                assert ours <= after[tenant][0], f"tenant {tenant} lost objects to {cause}"
    assert books.bytes_used + books.bytes_reserved <= SLOTS * SLOT
