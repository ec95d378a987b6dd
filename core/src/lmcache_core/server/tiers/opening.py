"""From settings to the tiers of a server, and to the prefetch policies that lookups may name."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial

from lmcache_core.errors import CacheError, PluginError, SettingsError, UsageError
from lmcache_core.limits import PLUGIN_GRACE_S, START_STEP_S, STORE_CPU_FRACTION
from lmcache_core.plugins.components import Kind
from lmcache_core.plugins.patience import patience
from lmcache_core.plugins.registry import Registry
from lmcache_core.policies.contracts import PrefetchPolicy
from lmcache_core.pool.cores import usable_cores
from lmcache_core.serde.certificate import certificate_for
from lmcache_core.server.pool.l1 import L1
from lmcache_core.server.pool.opening import build_eviction
from lmcache_core.settings.model import Settings, TierSettings
from lmcache_core.state_thread import within
from lmcache_core.tiers.drills import wrapped
from lmcache_core.tiers.object.epochs import Epochs
from lmcache_core.tiers.observer import TierObserver
from lmcache_core.tiers.tier.parallel import adapter_context
from lmcache_core.tiers.tier.tier import Tier, TierConfig
from lmcache_core.tiers.tiering import Tiering, TieringConfig


class PrefetchPolicies:
    """Prefetch policies that lookups may name, with their defaults. All are built before the server answers: a request
    finds one that is there, or the reason why it is not, and imports nothing."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._built: dict[str, PrefetchPolicy] = {}
        self._why_not: dict[str, str] = {}
        for spec in registry.components(Kind.PREFETCH_POLICY):
            self._build(spec.name)

    def __call__(self, name: str) -> PrefetchPolicy:
        """Raises `UsageError` for one that is not installed, that needs settings, or that could not be built."""
        policy = self._built.get(name)
        if policy is None:
            raise UsageError(f"no lookup can use the prefetch policy {name!r}: {self._reason(name)}")
        return policy

    def _build(self, name: str) -> None:
        kind, plugin = Kind.PREFETCH_POLICY, str(self._registry.owner(Kind.PREFETCH_POLICY, name))
        late = PluginError(f"plugin {plugin} has not built it within {START_STEP_S:g} s of the server's start")
        try:
            # The thread may hang in C code; `patience` survives a plugin that ends the process.
            with patience(plugin, f"building the {kind} {name!r}", START_STEP_S + PLUGIN_GRACE_S):
                self._built[name] = within(START_STEP_S, lambda: self._registry.build(kind, name), late)
        except (CacheError, ValueError) as error:  # no lookup has asked for it: the server starts without it
            self._why_not[name] = str(error)

    def _reason(self, name: str) -> str:
        if name not in self._why_not:
            try:
                self._registry.spec(Kind.PREFETCH_POLICY, name)
            except PluginError as error:
                return str(error)
        return self._why_not.get(name, "it was installed after the server's start")


def build_tier(name: str, settings: TierSettings, registry: Registry, server: str) -> Tier:
    """One configured tier. Its medium need not be reachable. If it cannot be built, the plugin's error is raised and
    nothing stays open. Raises `SettingsError` if its plugin hangs."""
    late = SettingsError(
        f"tier {name!r} has not come up within {START_STEP_S:g} s: see whether the disk, mount or service that "
        f"l2.{name} names hangs"
    )
    build = partial(_built, name, settings, registry, server)
    return within(START_STEP_S, build, late, lambda tier: tier.adapter.close())


def _built(name: str, settings: TierSettings, registry: Registry, server: str) -> Tier:
    context = adapter_context(name, settings.connections, server)
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
        if settings.require_certificate is not None and tier.chain.lossy:
            tier.certificate = certificate_for(
                tier.chain.lossy,
                settings.require_certificate,
                settings.divergence_max,
                settings.agreement_min,
                f"l2.{name}.require_certificate",
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
        locality=settings.locality,
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
    epochs: Epochs,
    *,
    observer: TierObserver | None,
    on_tier: Callable[[Tier], None],
) -> Tiering:
    """All tiers of the settings, in their order. If one cannot be built, none stays open. See `Tiering` for its
    observer."""
    store_policy = registry.build(Kind.STORE_POLICY, settings.store_policy.type, settings.store_policy.settings)
    prefetch_policy = registry.build(
        Kind.PREFETCH_POLICY, settings.prefetch_policy.type, settings.prefetch_policy.settings
    )
    config = TieringConfig(
        prefetch_in_flight_max=settings.prefetch_in_flight_max,
        # What lanes read is pinned for as long as a tier hangs: the rest of the pool stays in service.
        store_in_flight_bytes_max=min(settings.store_in_flight_bytes_max, l1.segment.header.data_bytes // 4),
        dirty=settings.dirty,
    )
    with contextlib.ExitStack() as undo:
        tiers = []
        for name, each in settings.l2.items():
            tiers.append(build_tier(name, each, registry, settings.name))
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
            on_tier=on_tier,
            epochs=epochs,
        )
        undo.pop_all()
    return tiering
