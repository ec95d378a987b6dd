"""The parts of a server. `build` makes all of them; `Server` runs them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lmcache_core.clock import Clock
    from lmcache_core.kernel.kernel import Kernel
    from lmcache_core.observe.bus import EventBus
    from lmcache_core.plugins.registry import Registry
    from lmcache_core.pool.segment import Segment
    from lmcache_core.server.adopting import Adopting
    from lmcache_core.server.clears import Clears
    from lmcache_core.server.companions import Companions
    from lmcache_core.server.components import TierOpener
    from lmcache_core.server.explains import Explains
    from lmcache_core.server.helper_processes import Helpers
    from lmcache_core.server.l1 import L1
    from lmcache_core.server.lifeline import LifelineListener
    from lmcache_core.server.lookups import Lookups
    from lmcache_core.server.loop import Alarm, Loop
    from lmcache_core.server.namespaces import Namespaces
    from lmcache_core.server.operations import Operations
    from lmcache_core.server.populating import PoolPopulator
    from lmcache_core.server.quotas import Quotas
    from lmcache_core.server.recording import Recording
    from lmcache_core.server.sessions import Sessions
    from lmcache_core.server.shares import Shares
    from lmcache_core.server.store_waits import StoreWaits
    from lmcache_core.server.stored_waits import StoredWaits
    from lmcache_core.server.stores import Stores
    from lmcache_core.server.tier_changes import TierChanges
    from lmcache_core.server.tracing import Tracing
    from lmcache_core.server.zmq_carrier import ZmqCarrier
    from lmcache_core.settings.model import Settings


@dataclass(frozen=True, eq=False)
class Parts:
    """Each is made once and never replaced. None: the settings do not ask for that part."""

    settings: Settings
    registry: Registry
    clock: Clock
    directory: Path  # of the sockets
    # what everything else uses
    segment: Segment
    loop: Loop
    kernel: Kernel
    shares: Shares
    l1: L1
    adopting: Adopting | None
    tiers: TierOpener
    # what is told about events
    events: EventBus | None
    tracing: Tracing | None
    companions: Companions
    # what handles requests
    quotas: Quotas
    lookups: Lookups
    namespaces: Namespaces
    store_waits: StoreWaits
    stores: Stores
    sessions: Sessions
    clears: Clears
    explains: Explains
    stored_waits: StoredWaits
    recording: Recording
    operations: Operations
    tier_changes: TierChanges
    # where requests come from, and what runs off the loop
    listener: LifelineListener
    carriers: list[ZmqCarrier]
    helpers: Helpers
    populator: PoolPopulator
    housekeeping: Alarm
