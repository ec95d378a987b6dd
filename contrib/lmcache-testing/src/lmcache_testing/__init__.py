"""The conformance kit: contract classes to subclass, wrappers that simulate trouble, and a reference model.

Public, and versioned with the contracts. The wrappers are those of lmcache-mock, for drills, too. Names are imported on
first use, so a pytest run that does not use them pays nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lmcache_mock.drills.faults import Fault, FaultRule, FaultScript, FaultyAdapter
    from lmcache_mock.drills.latency import LatencyAdapter
    from lmcache_mock.drills.recording import Recorded, RecordingAdapter
    from lmcache_testing.adapter import Backdoor, L2AdapterContract
    from lmcache_testing.companion import CompanionContract
    from lmcache_testing.eviction import EvictionPolicyContract
    from lmcache_testing.eviction_machine import Resident
    from lmcache_testing.helper import HelperContract
    from lmcache_testing.host_backend import HostBackend, HostBackendContract
    from lmcache_testing.machine import AdapterMachine
    from lmcache_testing.operation import OperationContract
    from lmcache_testing.package import PluginPackageContract
    from lmcache_testing.planning import PrefetchPolicyContract, StorePolicyContract
    from lmcache_testing.processes import ServerProcess
    from lmcache_testing.proxy import StallingProxy
    from lmcache_testing.serde import SerdeContract
    from lmcache_testing.subscriber import EventSubscriberContract
    from lmcache_testing.tracer import TracerContract

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
    "HostBackend",
    "HostBackendContract",
    "L2AdapterContract",
    "LatencyAdapter",
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
    "TracerContract",
]

_HOMES = {
    "AdapterMachine": "lmcache_testing.machine",
    "Backdoor": "lmcache_testing.adapter",
    "CompanionContract": "lmcache_testing.companion",
    "EventSubscriberContract": "lmcache_testing.subscriber",
    "EvictionPolicyContract": "lmcache_testing.eviction",
    "Fault": "lmcache_mock.drills.faults",
    "FaultRule": "lmcache_mock.drills.faults",
    "FaultScript": "lmcache_mock.drills.faults",
    "FaultyAdapter": "lmcache_mock.drills.faults",
    "HelperContract": "lmcache_testing.helper",
    "HostBackend": "lmcache_testing.host_backend",
    "HostBackendContract": "lmcache_testing.host_backend",
    "L2AdapterContract": "lmcache_testing.adapter",
    "LatencyAdapter": "lmcache_mock.drills.latency",
    "OperationContract": "lmcache_testing.operation",
    "PluginPackageContract": "lmcache_testing.package",
    "PrefetchPolicyContract": "lmcache_testing.planning",
    "Recorded": "lmcache_mock.drills.recording",
    "RecordingAdapter": "lmcache_mock.drills.recording",
    "Resident": "lmcache_testing.eviction_machine",
    "SerdeContract": "lmcache_testing.serde",
    "ServerProcess": "lmcache_testing.processes",
    "StallingProxy": "lmcache_testing.proxy",
    "StorePolicyContract": "lmcache_testing.planning",
    "TracerContract": "lmcache_testing.tracer",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)
