"""From settings to a server's pool, and the kernel over it."""

from __future__ import annotations

import secrets
from pathlib import Path

from lmcache_core.kernel.allocator import slab_bytes_for
from lmcache_core.kernel.config import KernelConfig
from lmcache_core.kernel.contracts import EvictionPolicy
from lmcache_core.kernel.kernel import Kernel
from lmcache_core.kernel.sessions import SERVER_SESSION
from lmcache_core.native import why_not as native_missing
from lmcache_core.plugins.components import Kind
from lmcache_core.plugins.registry import Registry
from lmcache_core.pool.backing import Access
from lmcache_core.pool.ownership import OnStale
from lmcache_core.pool.segment import Segment
from lmcache_core.pool.tables import NO_ROW
from lmcache_core.settings.model import Component, Settings

EPOCH_BITS = 24  # of a lease id; the rest is a counter


def open_pool(settings: Settings, directory: Path) -> Segment:
    """The pool: a new one, or that of a dead server to be adopted. The log says why an existing one is not adopted."""
    l1 = settings.l1
    on_stale, why_not = OnStale(l1.on_stale), ""
    if on_stale is OnStale.ADOPT and native_missing:
        on_stale = OnStale.RECREATE
        why_not = f"adoption needs the C extension, and {native_missing}"
    return Segment.create(
        settings.name,
        l1.size_bytes,
        l1.backing,
        runtime_dir=directory,
        access=Access(l1.access),
        gids=l1.gids,
        on_stale=on_stale,
        why_not_adopt=why_not,
        index_entries=l1.index_entries or None,
        file=l1.path,
    )


def build_kernel(settings: Settings, registry: Registry, segment: Segment) -> Kernel:
    """The kernel over a segment's data area."""
    config = KernelConfig(
        pool_bytes=segment.info.data_bytes,
        data_offset=segment.info.data_offset,
        slab_bytes=slab_bytes_for(segment.info.data_bytes),
        write_ttl_s=settings.lease.write_ttl_s,
        read_ttl_s=settings.lease.read_ttl_s,
        promise_ttl_s=settings.lease.promise_ttl_s,
        watermark=settings.l1.watermark,
        evict_ratio=settings.l1.evict_ratio,
        keeps_dirty=settings.dirty != "drop",
        quarantine_fraction_max=settings.quarantine.fraction_max,
        quarantine_fraction_per_uid_max=settings.quarantine.fraction_per_uid_max,
        **settings.holding.model_dump(exclude={"shared_fraction_per_holder_max"}),  # the server's
    )
    epoch = former = segment.former_epoch
    while epoch == former:  # otherwise leases of the former server would seem to be ours
        epoch = 1 + secrets.randbelow((1 << EPOCH_BITS) - 1)
    kernel = Kernel(
        config,
        build_eviction(registry, settings.l1.eviction),
        epoch,
        lambda: build_eviction(registry, settings.l1.eviction),
    )
    kernel.attach_session(SERVER_SESSION, NO_ROW)  # slots that lanes write belong to no worker
    return kernel


def build_eviction(registry: Registry, component: Component) -> EvictionPolicy:
    """A policy object: each store needs its own."""
    policy: EvictionPolicy = registry.build(Kind.EVICTION_POLICY, component.type, component.settings)
    return policy
