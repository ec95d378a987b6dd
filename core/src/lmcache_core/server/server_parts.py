"""The parts of a server. `build` makes all of them; `Server` runs them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lmcache_core.clock import Clock
    from lmcache_core.kernel.kernel import Kernel
    from lmcache_core.plugins.registry import Registry
    from lmcache_core.pool.segment import Segment
    from lmcache_core.protocol.unread import Unread
    from lmcache_core.server.extensions.helper_processes import Helpers
    from lmcache_core.server.extensions.request_watch import RequestWatch
    from lmcache_core.server.extensions.running_companions import RunningCompanions
    from lmcache_core.server.extensions.running_operations import RunningOperations
    from lmcache_core.server.peers.ipc_carrier import IpcCarrier
    from lmcache_core.server.peers.lifeline import LifelineListener
    from lmcache_core.server.peers.session_table import SessionTable
    from lmcache_core.server.peers.shares import Shares
    from lmcache_core.server.peers.zmq_carrier import ZmqCarrier
    from lmcache_core.server.pool.adopting import Adopting
    from lmcache_core.server.pool.l1 import L1
    from lmcache_core.server.pool.namespaces import Namespaces
    from lmcache_core.server.pool.observer import ServerObserver
    from lmcache_core.server.pool.populating import PoolPopulator
    from lmcache_core.server.pool.quotas import Quotas
    from lmcache_core.server.process.loop import Alarm, Loop
    from lmcache_core.server.tiers.changes import TierChanges
    from lmcache_core.server.tiers.opening import TierOpener
    from lmcache_core.server.waiting.clears import Clears
    from lmcache_core.server.waiting.explains import Explains
    from lmcache_core.server.waiting.lookups import Lookups
    from lmcache_core.server.waiting.stores import Stores
    from lmcache_core.server.waiting.tier_waits import TierWaits
    from lmcache_core.server.waiting.wait_stored import StoredWaits
    from lmcache_core.settings.model import Settings
    from lmcache_core.state_thread import StateThread


@dataclass(frozen=True, eq=False, slots=True)
class Parts:
    """Each is made once and never replaced. None: the settings do not ask for that part."""

    settings: Settings
    registry: Registry
    clock: Clock
    directory: Path  # of the sockets
    # what everything else uses
    segment: Segment
    loop: Loop
    state_thread: StateThread
    kernel: Kernel
    shares: Shares
    unread: Unread
    l1: L1
    adopting: Adopting | None
    tiers: TierOpener
    # what is informed of everything that happens
    observer: ServerObserver
    companions: RunningCompanions
    # what handles requests
    quotas: Quotas
    lookups: Lookups
    namespaces: Namespaces
    tier_waits: TierWaits
    stores: Stores
    sessions: SessionTable
    clears: Clears
    explains: Explains
    stored_waits: StoredWaits
    request_watch: RequestWatch
    operations: RunningOperations
    tier_changes: TierChanges
    # where requests come from, and what runs off the loop
    listener: LifelineListener
    carriers: list[IpcCarrier | ZmqCarrier]
    helpers: Helpers
    populator: PoolPopulator
    housekeeping: Alarm
