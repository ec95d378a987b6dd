"""The kit against the mock tier."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from lmcache_core.tiers.contract import AdapterContext
from lmcache_mock.adapter import MockAdapter
from lmcache_mock.settings import MockSettings
from lmcache_testing import Backdoor, L2AdapterContract, PluginPackageContract


class TestPackage(PluginPackageContract):
    distribution = "lmcache-mock"


class Memory(Backdoor):
    def __init__(self, adapter: MockAdapter) -> None:
        self._memory = adapter.memory

    def read(self, key: bytes) -> bytes | None:
        found = self._memory.objects.get(key)
        return bytes(found[0]) if found else None

    def write(self, key: bytes, content: bytes) -> None:
        self._memory.objects[key] = (content, 0.0)

    def remove(self, key: bytes) -> None:
        del self._memory.objects[key]


@contextlib.contextmanager
def with_faults(adapter: MockAdapter, *rules: str) -> Iterator[None]:
    adapter.set_faults(*rules)
    try:
        yield
    finally:
        adapter.set_faults()


class TestMock(L2AdapterContract):
    component = "mock"

    @pytest.fixture
    def adapter(self, adapter_context: AdapterContext) -> Iterator[MockAdapter]:
        with MockAdapter(MockSettings(), adapter_context) as adapter:
            yield adapter

    @pytest.fixture
    def backdoor(self, adapter: MockAdapter) -> Backdoor:
        return Memory(adapter)

    @pytest.fixture
    def small_adapter(self, adapter_context: AdapterContext) -> Iterator[MockAdapter]:
        with MockAdapter(MockSettings(medium_bytes=2 << 20), adapter_context) as adapter:
            yield adapter

    @pytest.fixture
    def hang(self, adapter: MockAdapter) -> contextlib.AbstractContextManager[None]:
        """`hang` ignores deadlines on purpose; a medium that is this `slow` is the same to a client that keeps them."""

        return with_faults(adapter, "any slow s=1000")

    @pytest.fixture
    def stall(self, adapter: MockAdapter) -> contextlib.AbstractContextManager[None]:
        return with_faults(adapter, "load slow s=1000")

    @pytest.fixture
    def outage(self, adapter: MockAdapter) -> contextlib.AbstractContextManager[None]:
        return with_faults(adapter, "any gone")

    @pytest.fixture
    def lock(self, adapter: MockAdapter) -> contextlib.AbstractContextManager[None]:
        return with_faults(adapter, "store throttled")

    @pytest.fixture
    def unreachable(self, adapter_context: AdapterContext) -> Iterator[MockAdapter]:
        with MockAdapter(MockSettings(faults=("any gone",)), adapter_context) as adapter:
            yield adapter


class TestMockOnASlowWire(L2AdapterContract):
    """Latency and bandwidth change when, and nothing else."""

    @pytest.fixture
    def adapter(self, adapter_context: AdapterContext, tmp_path: Path) -> Iterator[MockAdapter]:
        settings = MockSettings(latency_s=0.0001, bandwidth_bytes_s=1 << 30, control=tmp_path / "control")
        with MockAdapter(settings, adapter_context) as adapter:
            yield adapter
