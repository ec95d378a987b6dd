"""Objects, leases, slots: the pure state machine, and the contracts that it calls."""

from lmcache_core.kernel.answers import (
    ClassUsage,
    ClearedCount,
    Grant,
    Grants,
    KernelLookup,
    KernelUsage,
    LeaseKind,
    LeaseStatus,
    Reason,
    Settled,
)
from lmcache_core.kernel.config import KernelConfig
from lmcache_core.kernel.kernel import Kernel
from lmcache_core.kernel.objects import Incarnation
from lmcache_core.kernel.sessions import SERVER_SESSION
from lmcache_core.kernel.states import TRANSITIONS, Event, State

__all__ = [
    "SERVER_SESSION",
    "TRANSITIONS",
    "ClassUsage",
    "ClearedCount",
    "Event",
    "Grant",
    "Grants",
    "Incarnation",
    "Kernel",
    "KernelConfig",
    "KernelLookup",
    "KernelUsage",
    "LeaseKind",
    "LeaseStatus",
    "Reason",
    "Settled",
    "State",
]
