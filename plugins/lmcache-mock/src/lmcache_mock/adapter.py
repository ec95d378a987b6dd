"""The mock tier: memory behind a simulated slow wire and scripted faults."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from lmcache_core.plugins.components import Finding
from lmcache_core.tiers.contract import AdapterContext, Capabilities
from lmcache_mock.check import check_faults
from lmcache_mock.control import Control
from lmcache_mock.drills.faults import FaultRule, FaultScript, FaultyAdapter
from lmcache_mock.drills.latency import LatencyAdapter
from lmcache_mock.memory import MemoryAdapter
from lmcache_mock.settings import MockSettings


class MockAdapter(FaultyAdapter):
    """Keeps objects in the server's own memory. Thread-safe; objects are lost with the adapter. `set_faults` replaces
    the rules at any time, even for a call that hangs just now. A hang ignores its deadline on purpose: that is what it
    simulates. It ends when its rule is removed, or with `close`.
    """

    capabilities: ClassVar[Capabilities] = Capabilities()

    def __init__(self, settings: MockSettings, context: AdapterContext) -> None:
        self._tier = context.tier
        self._settings = settings
        self.memory = MemoryAdapter(None, context, medium_bytes=settings.medium_bytes)
        script = FaultScript(settings.faults, seed=settings.seed)
        control = Control(settings.control, script, settings.faults)
        wire = LatencyAdapter(self.memory, latency_s=settings.latency_s, bandwidth_bytes_s=settings.bandwidth_bytes_s)
        super().__init__(wire, script, before_call=control.look)

    def check(self, deadline: float) -> Iterator[Finding]:
        """Of the memory, as it is without faults."""
        yield from super().check(deadline)
        yield check_faults(self._tier, self._settings)

    def set_faults(self, *rules: FaultRule | str) -> None:
        """Replace all rules. A control file overrides them when it next changes."""
        self.script.set(*rules)
