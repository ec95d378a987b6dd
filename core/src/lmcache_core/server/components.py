"""From settings to single components of a server: its pool, kernel, tiers and policies. `build` wires them."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Callable
from pathlib import Path

from lmcache_core.errors import PluginError, UsageError
from lmcache_core.kernel.allocator import slab_bytes_for
from lmcache_core.kernel.config import KernelConfig
from lmcache_core.kernel.contracts import EvictionPolicy
from lmcache_core.kernel.kernel import Kernel
from lmcache_core.kernel.sessions import SERVER_SESSION
from lmcache_core.limits import STORE_CPU_FRACTION
from lmcache_core.native import why_not as native_missing
from lmcache_core.plugins.components import Kind
from lmcache_core.plugins.registry import Registry
from lmcache_core.policies.contracts import PrefetchPolicy
from lmcache_core.pool.backing import Access
from lmcache_core.pool.cores import usable_cores
from lmcache_core.pool.ownership import OnStale
from lmcache_core.pool.segment import Segment
from lmcache_core.pool.tables import NO_ROW
from lmcache_core.server.l1 import L1
from lmcache_core.settings.model import Component, Settings, TierSettings
from lmcache_core.tiers.drills import wrapped
from lmcache_core.tiers.observer import TierObserver, TierTracer
from lmcache_core.tiers.tier.parallel import adapter_context
from lmcache_core.tiers.tier.tier import Tier, TierConfig
from lmcache_core.tiers.tiering import Tiering, TieringConfig

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


class PrefetchPolicies:
    """Prefetch policies named in requests, built with their defaults on first use."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._built: dict[str, PrefetchPolicy] = {}

    def __call__(self, name: str) -> PrefetchPolicy:
        """Raises `UsageError` for one that is not installed, or that needs settings."""
        if name not in self._built:
            try:
                self._built[name] = self._registry.build(Kind.PREFETCH_POLICY, name)
            except (PluginError, ValueError) as error:
                raise UsageError(f"no lookup can use the prefetch policy {name!r}: {error}") from error
        return self._built[name]


def build_tier(name: str, settings: TierSettings, registry: Registry) -> Tier:
    """One configured tier. Its medium need not be reachable. If it cannot be built, the plugin's error is raised and
    nothing stays open."""
    context = adapter_context(name, settings.connections)
    component = settings.eviction
    with contextlib.ExitStack() as undo:
        adapter = registry.build(Kind.L2_ADAPTER, settings.type, settings.settings, context)
        undo.callback(adapter.close)
        tier = Tier(
            name,
            wrapped(name, adapter, settings.wrap),
            tier_config(settings),
            serdes=[registry.build(Kind.SERDE, each.type, each.settings) for each in settings.serde],
            eviction=None if component is None else build_eviction(registry, component),
            wrap=settings.wrap,
            make_eviction=None if component is None else lambda: build_eviction(registry, component),
            context=context,
        )
        undo.pop_all()
    return tier


def tier_config(settings: TierSettings) -> TierConfig:
    """The settings of a tier that do not depend on its adapter."""
    return TierConfig(
        capacity_bytes=settings.capacity_bytes,
        watermark=settings.watermark,
        evict_ratio=settings.evict_ratio,
        deadline_s=settings.deadline_s,
        connections=settings.connections,
        rescan_s=settings.rescan_s,
        store_cpu_share=settings.store_cpu_share or STORE_CPU_FRACTION * usable_cores(),
        store_io=settings.store_io,
        eviction_name="" if settings.eviction is None else settings.eviction.type,
    )


class TierOpener:
    """Makes the tiering when the first tier comes, at the start or later."""

    def __init__(self, l1: L1, make: Callable[[], Tiering]) -> None:
        self._l1 = l1
        self._make = make

    def opened(self) -> Tiering:
        """The tiering; made by the first call. Raises what a plugin raises that cannot be built."""
        tiering = self._l1.tiering
        if tiering is None:
            tiering = self._make()
            self._l1.begin_tiering(tiering)
        return tiering


def build_tiering(
    settings: Settings,
    registry: Registry,
    l1: L1,
    wake: Callable[[], None],
    *,
    observer: TierObserver | None,
    tracer: TierTracer | None,
    on_tier: Callable[[Tier], None],
) -> Tiering:
    """All tiers of the settings, in their order. If one cannot be built, none stays open. See `Tiering` for its
    observers."""
    store_policy = registry.build(Kind.STORE_POLICY, settings.store_policy.type, settings.store_policy.settings)
    prefetch_policy = registry.build(
        Kind.PREFETCH_POLICY, settings.prefetch_policy.type, settings.prefetch_policy.settings
    )
    config = TieringConfig(
        prefetch_in_flight_max=settings.prefetch_in_flight_max,
        store_in_flight_bytes_max=settings.store_in_flight_bytes_max,
        dirty=settings.dirty,
        epochs_path=str(settings.state_dir / f"{settings.name}.epochs"),
    )
    with contextlib.ExitStack() as undo:
        tiers = []
        for name, each in settings.l2.items():
            tiers.append(build_tier(name, each, registry))
            undo.callback(tiers[-1].adapter.close)
        tiering = Tiering(
            l1,
            tiers,
            wake=wake,
            clock=l1.clock,
            store_policy=store_policy,
            prefetch_policy=prefetch_policy,
            config=config,
            observer=observer,
            tracer=tracer,
            on_tier=on_tier,
        )
        undo.pop_all()
    return tiering
