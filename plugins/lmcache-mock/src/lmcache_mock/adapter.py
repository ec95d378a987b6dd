"""The mock tier: memory behind a simulated slow wire and scripted faults."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from lmcache_core.testing.faults import FaultRule, FaultScript, FaultyAdapter
from lmcache_core.testing.latency import LatencyAdapter
from lmcache_core.testing.memory import MemoryAdapter
from lmcache_core.tiers.contract import (
    AdapterContext,
    Capabilities,
    L2Adapter,
    LoadItem,
    Outcome,
    ScanPage,
    StoreItem,
    Usage,
)
from lmcache_mock.control import Control
from lmcache_mock.settings import MockSettings


class MockAdapter(L2Adapter):
    """Keeps objects in the server's own memory. Thread-safe; objects are lost with the adapter. `set_faults` replaces
    the rules at any time, even for a call that hangs just now. A hang ignores its deadline on purpose: that is what it
    simulates. It ends when its rule is removed, or with `close`.
    """

    capabilities: ClassVar[Capabilities] = Capabilities()

    def __init__(self, settings: MockSettings, context: AdapterContext) -> None:
        self.memory = MemoryAdapter(None, context, medium_bytes=settings.medium_bytes)
        self.script = FaultScript(settings.faults, seed=settings.seed)
        control = Control(settings.control, self.script, settings.faults)
        wire = LatencyAdapter(self.memory, latency_s=settings.latency_s, bandwidth_bytes_s=settings.bandwidth_bytes_s)
        self._way = FaultyAdapter(wire, self.script, before_call=control.look)

    def set_faults(self, *rules: FaultRule | str) -> None:
        """Replace all rules. A control file overrides them when it next changes."""
        self.script.set(*rules)

    def store(self, items: Sequence[StoreItem], deadline: float) -> Sequence[Outcome]:
        return self._way.store(items, deadline)

    def exists(self, keys: Sequence[bytes], deadline: float) -> Sequence[bool]:
        return self._way.exists(keys, deadline)

    def load(self, items: Sequence[LoadItem], deadline: float) -> Sequence[Outcome]:
        return self._way.load(items, deadline)

    def delete(self, keys: Sequence[bytes], deadline: float) -> Sequence[Outcome]:
        return self._way.delete(keys, deadline)

    def set_aside(self, keys: Sequence[bytes], deadline: float) -> Sequence[Outcome]:
        return self._way.set_aside(keys, deadline)

    def usage(self) -> Usage:
        return self._way.usage()

    def scan(self, cursor: str | None, deadline: float) -> ScanPage:
        return self._way.scan(cursor, deadline)

    def try_to_lead(self) -> bool:
        return self._way.try_to_lead()

    def close(self) -> None:
        self._way.close()
