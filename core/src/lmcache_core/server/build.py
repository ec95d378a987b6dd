"""`build`: from settings to the parts of a server. This is the only place where they are wired."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from lmcache_core.clock import Clock
from lmcache_core.kernel.effects import LeaseExpired
from lmcache_core.observe.bus import EventBus
from lmcache_core.observe.subscriber import EventSubscriber, SubscriberContext
from lmcache_core.plugins.components import Kind
from lmcache_core.plugins.registry import Registry
from lmcache_core.pool.backing import Access
from lmcache_core.protocol import messages as m
from lmcache_core.protocol.address import make_server_directory
from lmcache_core.server.adopting import Adopting, FormerPool
from lmcache_core.server.clears import Clears
from lmcache_core.server.companions import Companions
from lmcache_core.server.components import PrefetchPolicies, TierOpener, build_kernel, build_tiering, open_pool
from lmcache_core.server.explains import Explains
from lmcache_core.server.helper import HelperContext
from lmcache_core.server.helper_processes import Helpers, check_helper_names, configured
from lmcache_core.server.l1 import L1
from lmcache_core.server.lifeline import LifelineListener
from lmcache_core.server.lookups import Lookups
from lmcache_core.server.loop import Alarm, Loop
from lmcache_core.server.namespaces import Namespaces
from lmcache_core.server.operations import Operations
from lmcache_core.server.parts import Parts
from lmcache_core.server.populating import PoolPopulator
from lmcache_core.server.quotas import Quotas
from lmcache_core.server.recording import Recording
from lmcache_core.server.session import Session
from lmcache_core.server.sessions import Sessions
from lmcache_core.server.shares import Shares
from lmcache_core.server.store_waits import StoreWaits
from lmcache_core.server.stored_waits import StoredWaits
from lmcache_core.server.stores import Stores
from lmcache_core.server.taps import EventTaps
from lmcache_core.server.tier_changes import TierChanges
from lmcache_core.server.verifying import Verifying
from lmcache_core.settings.model import Settings

if TYPE_CHECKING:
    from lmcache_core.kernel.kernel import Kernel
    from lmcache_core.server.tracing import Tracing
    from lmcache_core.server.zmq_carrier import ZmqCarrier
    from lmcache_core.tiers.tiering import Tiering


def build(settings: Settings, registry: Registry, clock: Clock, undo: contextlib.ExitStack) -> Parts:
    """All parts: the pool and the sockets exist, and nothing is served yet. `undo` gets what closes each of them: if
    this raises, or the server cannot begin, nothing is left behind."""
    name = settings.name
    access, gids = Access(settings.l1.access), settings.l1.gids
    directory = make_server_directory(name, settings.runtime_dir, access, gids)
    segment = open_pool(settings, directory)
    undo.callback(segment.close)
    loop = Loop(clock)
    undo.callback(loop.close)
    kernel = build_kernel(settings, registry, segment)
    shares = Shares(settings.holding.shared_fraction_per_holder_max)

    former = FormerPool(segment, settings.l1.adopt.verify) if segment.adopted else None
    if former is not None:
        undo.callback(former.close)
    events = _events(settings, registry, clock)
    if events is not None:
        undo.callback(events.bus.close)
    tracing = _tracing(settings, clock, kernel, lambda: l1.tiering is not None)
    if tracing is not None:
        undo.callback(tracing.close)
    companions, configured_companions = Companions(), settings.companions()
    undo.callback(companions.close)
    connected: dict[int, Session] = {}
    l1 = L1(
        kernel,
        segment,
        clock,
        _telling_of_expiry(connected),
        shares.layouts,
        former_layouts=None if former is None else former.layouts,
        companions=companions if configured_companions else None,
        taps=events,
        tracing=tracing,
    )
    adopting = None if former is None else _adopting(former, l1, loop)
    if adopting is not None:
        undo.callback(adopting.close)

    housekeeping = Alarm()
    quotas = Quotas(settings.state_dir / f"{name}.quotas.json", kernel, l1, housekeeping, settings.quotas)

    def make_tiering() -> Tiering:
        return build_tiering(
            settings, registry, l1, loop.wake, observer=events, tracer=tracing, on_tier=quotas.tell_tier
        )

    tiers = TierOpener(l1, make_tiering)
    if settings.l2:
        undo.callback(tiers.opened().close)
    quotas.check()
    companions.start(registry, configured_companions, name, l1)

    lookups = Lookups(kernel, l1, PrefetchPolicies(registry), shares.lookups)
    namespaces = Namespaces(kernel, l1, shares.namespaces)
    store_wait_s = settings.store_wait_s if settings.dirty == "wait" else 0.0
    store_waits = StoreWaits(kernel, l1, shares.stores_waiting, store_wait_s)
    stores = Stores(kernel, l1, store_waits, shares.stores_preparing)

    def session_ended(session: Session) -> None:
        if events is not None and session.client_id:  # it has said hello
            events.session_ended(session)
        lookups.session_ended(session)
        explains.session_ended(session)
        stored_waits.session_ended(session)
        namespaces.session_ended(session)

    sessions = Sessions(kernel, segment, loop, shares.rows, l1.tallies, stores.session_gone, session_ended, connected)
    explains = Explains(kernel, l1, settings.l1.eviction.type, sessions.name_of, shares.explains)
    stored_waits = StoredWaits(l1, explains, shares.stored_waits)
    recording = Recording(settings, l1, loop)
    undo.callback(recording.stop)
    operations = Operations(registry, settings.operations, name, settings.state_dir, l1, loop)
    undo.callback(operations.close)

    listener = LifelineListener(directory, loop, access, gids)
    undo.callback(listener.close)
    helpers = _helpers(settings, registry, str(listener.path), directory.parent)
    carriers = _carriers(settings, directory, loop)
    for carrier in carriers:
        undo.callback(carrier.close)
    registry.close()
    populator = PoolPopulator(segment, kernel, loop, name)
    undo.callback(populator.stop)
    return Parts(
        settings=settings,
        registry=registry,
        clock=clock,
        directory=directory,
        segment=segment,
        loop=loop,
        kernel=kernel,
        shares=shares,
        l1=l1,
        adopting=adopting,
        tiers=tiers,
        events=None if events is None else events.bus,
        tracing=tracing,
        companions=companions,
        quotas=quotas,
        lookups=lookups,
        namespaces=namespaces,
        store_waits=store_waits,
        stores=stores,
        sessions=sessions,
        clears=Clears(kernel, l1, store_waits),
        explains=explains,
        stored_waits=stored_waits,
        recording=recording,
        operations=operations,
        tier_changes=TierChanges(registry, loop, settings.l2, tiers),
        listener=listener,
        carriers=carriers,
        helpers=helpers,
        populator=populator,
        housekeeping=housekeeping,
    )


def _telling_of_expiry(connected: dict[int, Session]) -> Callable[[LeaseExpired], None]:
    def tell(effect: LeaseExpired) -> None:
        session = connected.get(effect.session_id)
        if session is not None:
            session.send(m.LeaseExpiredNotice(0, effect.lease_id, effect.kind.name.lower()))

    return tell


def _adopting(former: FormerPool, l1: L1, loop: Loop) -> Adopting:
    l1.tallies.adopt(former.living_rows)
    verifying = None
    if former.verify == "background":
        nbytes_by_layout = {layout_id: nbytes for layout_id, (_, nbytes) in former.layouts.items()}
        verifying = Verifying(l1, nbytes_by_layout, loop.call)
    adopting = Adopting(former, l1.kernel, verifying, l1.tallies.fold)
    if l1.taps is not None:
        l1.taps.adopted(former.objects, former.nbytes)
    if l1.index is not None:
        l1.index.keep_places(True)
    return adopting


def _events(settings: Settings, registry: Registry, clock: Clock) -> EventTaps | None:
    """The event taps, if the settings name subscribers."""
    if not settings.subscribers:
        return None
    context = SubscriberContext(settings.name, settings.state_dir)
    with contextlib.ExitStack() as undo:
        subscribers: dict[str, EventSubscriber] = {}
        for name, own in settings.subscribers.items():
            subscribers[name] = registry.build(Kind.EVENT_SUBSCRIBER, name, own, context)
            undo.callback(subscribers[name].close)
        bus = EventBus(subscribers, settings.event_bus_queue_size, clock)
        undo.pop_all()
    wants_blocks = any(each.wants_blocks for each in subscribers.values())
    wants_tokens = any(each.wants_tokens for each in subscribers.values())
    return EventTaps(bus, settings.l1.eviction.type, wants_blocks, wants_tokens)


def _tracing(settings: Settings, clock: Clock, kernel: Kernel, tiered: Callable[[], bool]) -> Tracing | None:
    """What exports spans, where the settings name a collector. Without one nothing of it is imported."""
    if settings.otel.endpoint is None:
        return None
    from lmcache_core.server.tracing import Tracing

    return Tracing(settings.otel, settings.name, clock, kernel.kept, tiered)


def _helpers(settings: Settings, registry: Registry, address: str, runtime_dir: Path) -> Helpers:
    """The helper processes. Raises what a plugin raises if its helper cannot be described."""
    processes = configured(settings.helpers)
    check_helper_names(list(processes), settings.helper_names)
    context = HelperContext(settings.name, address, runtime_dir)
    for name, own in settings.plugin_helpers().items():
        processes[name] = registry.build(Kind.HELPER, name, own, context)
    return Helpers(processes, context)


def _carriers(settings: Settings, directory: Path, loop: Loop) -> list[ZmqCarrier]:
    if not settings.zmq.ipc and settings.zmq.tcp is None:
        return []
    from lmcache_core.server.zmq_carrier import bind_carriers

    return bind_carriers(settings.zmq, directory, loop, Access(settings.l1.access), settings.l1.gids)
