"""`build`: from settings to the parts of a server. This is the only place where they are wired."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from lmcache_core.clock import Clock
from lmcache_core.errors import SettingsError
from lmcache_core.kernel.effects import LeaseExpired
from lmcache_core.limits import START_STEP_S
from lmcache_core.observe.bus import EventBus
from lmcache_core.observe.subscriber import EventSubscriber, SubscriberContext
from lmcache_core.observe.tracer import RequestTracer, TracerContext
from lmcache_core.plugins.components import Kind
from lmcache_core.plugins.registry import Registry
from lmcache_core.pool.backing import Access
from lmcache_core.protocol import messages as m
from lmcache_core.protocol.address import make_server_directory
from lmcache_core.protocol.unread import Unread
from lmcache_core.server.extensions.helper_processes import Helpers, check_helper_names, configured
from lmcache_core.server.extensions.request_watch import RequestWatch
from lmcache_core.server.extensions.running_companions import RunningCompanions
from lmcache_core.server.extensions.running_operations import RunningOperations
from lmcache_core.server.helper import HelperContext
from lmcache_core.server.peers.lifeline import LifelineListener
from lmcache_core.server.peers.session import Session
from lmcache_core.server.peers.session_table import SessionTable
from lmcache_core.server.peers.shares import Shares
from lmcache_core.server.pool.adopting import Adopting, FormerPool
from lmcache_core.server.pool.l1 import L1
from lmcache_core.server.pool.namespaces import Namespaces
from lmcache_core.server.pool.observer import ServerObserver
from lmcache_core.server.pool.opening import build_kernel, open_pool
from lmcache_core.server.pool.populating import PoolPopulator
from lmcache_core.server.pool.quotas import Quotas
from lmcache_core.server.pool.verifying import Verifying
from lmcache_core.server.process.loop import Alarm, Loop
from lmcache_core.server.server_parts import Parts
from lmcache_core.server.tiers.changes import TierChanges
from lmcache_core.server.tiers.opening import PrefetchPolicies, TierOpener, build_tiering
from lmcache_core.server.waiting.clears import Clears
from lmcache_core.server.waiting.explains import Explains
from lmcache_core.server.waiting.lookups import Lookups
from lmcache_core.server.waiting.stores import Stores
from lmcache_core.server.waiting.tier_waits import TierWaits
from lmcache_core.server.waiting.wait_stored import StoredWaits
from lmcache_core.settings.model import Settings
from lmcache_core.state_thread import StateThread, within
from lmcache_core.tiers.object.epochs import Epochs

if TYPE_CHECKING:
    from lmcache_core.server.peers.ipc_carrier import IpcCarrier
    from lmcache_core.server.peers.zmq_carrier import ZmqCarrier


def build(settings: Settings, registry: Registry, clock: Clock, undo: contextlib.ExitStack) -> Parts:
    """All parts: the pool and the sockets exist, and nothing is served yet. `undo` gets what closes each of them: if
    this raises, or the server cannot begin, nothing is left behind."""
    name = settings.name
    access, gids = Access(settings.l1.access), settings.l1.gids
    directory = within(
        START_STEP_S,
        lambda: make_server_directory(name, settings.runtime_dir, access, gids),
        SettingsError(
            f"runtime_dir ({settings.runtime_dir or 'the default'}) has not answered for {START_STEP_S:g} s: see "
            "whether its disk or mount hangs, or set another one"
        ),
    )
    segment = open_pool(settings, directory)
    undo.callback(segment.close)
    loop = Loop(clock)
    undo.callback(loop.close)
    state = StateThread(loop.call, settings.state_dir)
    undo.callback(state.close)
    kernel = build_kernel(settings, registry, segment)
    shares = Shares(settings.holding.shared_fraction_per_holder_max)
    unread = Unread(kernel.memory)

    former = FormerPool(segment, settings.l1.adopt.verify) if segment.adopted else None
    if former is not None:
        undo.callback(former.close)
    observer = ServerObserver(kernel, loop, settings.l1.eviction.type)
    undo.callback(observer.close)
    _watch(observer, settings, registry, clock)
    companions, configured_companions = RunningCompanions(), settings.companions()
    undo.callback(companions.close)
    connected: dict[int, Session] = {}
    l1 = L1(
        kernel,
        segment,
        clock,
        _expiry_notice(connected),
        shares.layouts,
        former_layouts=None if former is None else former.layouts,
        former_described=None if former is None else former.described,
        on_effect=companions.on_effect if configured_companions else None,
        observer=observer,
    )
    adopting = None if former is None else _adopting(former, l1, loop)
    if adopting is not None:
        undo.callback(adopting.close)

    housekeeping = Alarm()
    quotas = Quotas(settings.state_dir / f"{name}.quotas.json", state, kernel, l1, housekeeping, settings.quotas)

    epochs = Epochs(settings.state_dir / f"{name}.epochs", state)

    watching = observer if observer.listens else None
    tiers = TierOpener(
        l1,
        partial(build_tiering, settings, registry, l1, loop.wake, epochs, observer=watching, on_tier=quotas.tell_tier),
    )
    if settings.l2:
        undo.callback(tiers.opened().close)
    quotas.check()
    companions.start(registry, configured_companions, name, l1)

    lookups = Lookups(kernel, l1, PrefetchPolicies(registry), shares.lookups)
    namespaces = Namespaces(kernel, l1, shares.namespaces)
    store_wait_s = settings.store_wait_s if settings.dirty == "wait" else 0.0
    tier_waits = TierWaits(kernel, l1, shares.stores_waiting, store_wait_s)
    stores = Stores(kernel, l1, tier_waits, shares.stores_preparing)

    sessions = SessionTable(kernel, segment, loop, shares.rows, l1.tallies, stores.session_gone, connected)
    explains = Explains(kernel, l1, settings.l1.eviction.type, sessions.name_of, namespaces.is_known, shares.explains)
    stored_waits = StoredWaits(l1, explains, shares.stored_waits)
    sessions.at_end(*(part.session_ended for part in (observer, lookups, explains, stored_waits, namespaces)))
    request_watch = RequestWatch(l1)
    operations = RunningOperations(registry, settings, l1, namespaces, epochs, loop, request_watch)
    undo.callback(operations.close)

    listener = LifelineListener(directory, loop, access, gids)
    undo.callback(listener.close)
    helpers = _helpers(settings, registry, str(listener.path), directory.parent)
    carriers = _carriers(settings, directory, loop, unread)
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
        state_thread=state,
        kernel=kernel,
        shares=shares,
        unread=unread,
        l1=l1,
        adopting=adopting,
        tiers=tiers,
        observer=observer,
        companions=companions,
        quotas=quotas,
        lookups=lookups,
        namespaces=namespaces,
        tier_waits=tier_waits,
        stores=stores,
        sessions=sessions,
        clears=Clears(kernel, l1, tier_waits, epochs),
        explains=explains,
        stored_waits=stored_waits,
        request_watch=request_watch,
        operations=operations,
        tier_changes=TierChanges(name, registry, loop, settings.l2, tiers, namespaces.described),
        listener=listener,
        carriers=carriers,
        helpers=helpers,
        populator=populator,
        housekeeping=housekeeping,
    )


def _expiry_notice(connected: dict[int, Session]) -> Callable[[LeaseExpired], None]:
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
    l1.observer.adopted(former.objects, former.nbytes)
    if l1.index is not None:
        l1.index.keep_places(True)
    return adopting


def _watch(observer: ServerObserver, settings: Settings, registry: Registry, clock: Clock) -> None:
    """Let those watch that the settings name: event subscribers, and a tracer."""
    context = SubscriberContext(settings.name, settings.state_dir, observer.ask_tiers)
    with contextlib.ExitStack() as undo:
        subscribers: dict[str, EventSubscriber] = {}
        for name, own in settings.subscribers.items():
            subscribers[name] = within(
                START_STEP_S,
                partial(registry.build, Kind.EVENT_SUBSCRIBER, name, own, context),
                SettingsError(
                    f"subscribers.{name} has not come up within {START_STEP_S:g} s: see whether the disk, mount or "
                    "service that its settings name hangs"
                ),
                EventSubscriber.close,
            )
            undo.callback(subscribers[name].close)
        tracer = _tracer(settings, registry, clock, observer)
        bus = EventBus(subscribers, settings.event_bus_queue_size, clock) if subscribers else None
        undo.pop_all()
    observer.watch(
        bus,
        tracer,
        wants_blocks=any(each.wants_blocks for each in subscribers.values()),
        wants_tokens=any(each.wants_tokens for each in subscribers.values()),
    )


def _tracer(settings: Settings, registry: Registry, clock: Clock, observer: ServerObserver) -> RequestTracer | None:
    """The one that the settings name, and that has something to do."""
    context = TracerContext(settings.name, clock, observer.for_tiers)
    made: dict[str, RequestTracer] = {}
    for name, own in settings.tracers().items():
        tracer = registry.build(Kind.TRACER, name, own, context)
        if tracer is not None:
            made[name] = tracer
    if len(made) > 1:
        for tracer in made.values():
            tracer.close()
        raise SettingsError(
            f"a server has one tracer, and the settings name {', '.join(made)}: keep one table of these"
        )
    return next(iter(made.values()), None)


def _helpers(settings: Settings, registry: Registry, address: str, runtime_dir: Path) -> Helpers:
    """The helper processes. Raises what a plugin raises if its helper cannot be described."""
    processes = configured(settings.helpers)
    check_helper_names(list(processes), settings.helper_names)
    context = HelperContext(settings.name, address, runtime_dir)
    for name, own in settings.plugin_helpers().items():
        processes[name] = registry.build(Kind.HELPER, name, own, context)
    return Helpers(processes, context)


def _carriers(settings: Settings, directory: Path, loop: Loop, unread: Unread) -> list[IpcCarrier | ZmqCarrier]:
    if not settings.zmq.ipc and settings.zmq.tcp is None:
        return []
    from lmcache_core.server.peers.zmq_carrier import bind_carriers

    return bind_carriers(settings.zmq, directory, loop, unread, Access(settings.l1.access), settings.l1.gids)
