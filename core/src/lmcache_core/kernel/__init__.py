"""Objects, leases, slots: the pure state machine, and the contracts that it calls."""

from lmcache_core.kernel.answers import (
    ClassUsage,
    Cleared,
    Grant,
    Grants,
    LeaseKind,
    LeaseStatus,
    Lookup,
    Reason,
    Settled,
    Usage,
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
    "Cleared",
    "Event",
    "Grant",
    "Grants",
    "Incarnation",
    "Kernel",
    "KernelConfig",
    "LeaseKind",
    "LeaseStatus",
    "Lookup",
    "Reason",
    "Settled",
    "State",
    "Usage",
]
