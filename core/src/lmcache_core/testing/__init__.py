"""The conformance kit: contract classes to subclass, wrappers that simulate trouble, and a reference model.

Public, and versioned with the contracts. Needs `lmcache-core[testing]`; `MemoryAdapter`, the wrappers and
`ServerProcess` need only lmcache-core. Names are imported on first use, so a pytest run that does not use them pays
nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lmcache_core.testing.adapter import Backdoor, L2AdapterContract
    from lmcache_core.testing.companion import CompanionContract
    from lmcache_core.testing.eviction import EvictionPolicyContract
    from lmcache_core.testing.eviction_machine import Resident
    from lmcache_core.testing.faults import Fault, FaultRule, FaultScript, FaultyAdapter
    from lmcache_core.testing.helper import HelperContract
    from lmcache_core.testing.latency import LatencyAdapter
    from lmcache_core.testing.machine import AdapterMachine
    from lmcache_core.testing.memory import MemoryAdapter
    from lmcache_core.testing.operation import OperationContract
    from lmcache_core.testing.package import PluginPackageContract
    from lmcache_core.testing.planning import PrefetchPolicyContract, StorePolicyContract
    from lmcache_core.testing.processes import ServerProcess
    from lmcache_core.testing.proxy import StallingProxy
    from lmcache_core.testing.recording import Recorded, RecordingAdapter
    from lmcache_core.testing.serde import SerdeContract
    from lmcache_core.testing.subscriber import EventSubscriberContract

__all__ = [
    "AdapterMachine",
    "Backdoor",
    "CompanionContract",
    "EventSubscriberContract",
    "EvictionPolicyContract",
    "Fault",
    "FaultRule",
    "FaultScript",
    "FaultyAdapter",
    "HelperContract",
    "L2AdapterContract",
    "LatencyAdapter",
    "MemoryAdapter",
    "OperationContract",
    "PluginPackageContract",
    "PrefetchPolicyContract",
    "Recorded",
    "RecordingAdapter",
    "Resident",
    "SerdeContract",
    "ServerProcess",
    "StallingProxy",
    "StorePolicyContract",
]

_HOMES = {
    "AdapterMachine": "machine",
    "Backdoor": "adapter",
    "CompanionContract": "companion",
    "EventSubscriberContract": "subscriber",
    "EvictionPolicyContract": "eviction",
    "Fault": "faults",
    "FaultRule": "faults",
    "FaultScript": "faults",
    "FaultyAdapter": "faults",
    "HelperContract": "helper",
    "L2AdapterContract": "adapter",
    "LatencyAdapter": "latency",
    "MemoryAdapter": "memory",
    "OperationContract": "operation",
    "PluginPackageContract": "package",
    "PrefetchPolicyContract": "planning",
    "Recorded": "recording",
    "RecordingAdapter": "recording",
    "Resident": "eviction_machine",
    "SerdeContract": "serde",
    "ServerProcess": "processes",
    "StallingProxy": "proxy",
    "StorePolicyContract": "planning",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
