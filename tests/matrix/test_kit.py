"""The conformance kit over every backend that says how to look behind it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest

from lmcache_core.plugins.components import Kind
from lmcache_core.plugins.loader import load_plugins
from lmcache_core.tiers.contract import L2Adapter
from lmcache_core.tiers.tier.parallel import adapter_context
from lmcache_testing import L2AdapterContract

if TYPE_CHECKING:
    from services.service import Service


class TestTheKit(L2AdapterContract):
    """Each test has a corner of the service to itself."""

    quick_scan_pages_objects = 60  # some services take 10 ms to store one

    @pytest.fixture
    def corner(self, service: Service, label: str) -> dict[str, object]:
        settings: dict[str, object] | None = service.corner(label)
        if settings is None:
            pytest.skip(f"the tests of {service.name}'s own package apply the kit to it")
        return settings

    @pytest.fixture
    def reopen(self, service: Service, corner: dict[str, object]) -> Callable[[], L2Adapter]:
        registry = load_plugins()

        def make(**more: object) -> L2Adapter:
            context = adapter_context("remote", 4)
            adapter = registry.build(Kind.L2_ADAPTER, service.tier_type, {**corner, **more}, context)
            assert isinstance(adapter, L2Adapter)
            return adapter

        return make

    @pytest.fixture
    def adapter(self, reopen: Callable[[], L2Adapter]) -> Iterator[L2Adapter]:
        with reopen() as adapter:
            yield adapter

    @pytest.fixture
    def backdoor(self, service: Service, corner: dict[str, object]) -> Any:
        return service.backdoor(corner)

    @pytest.fixture
    def expire(self, service: Service, corner: dict[str, object]) -> Any:
        return service.expire(corner)

    @pytest.fixture
    def small_adapter(
        self, service: Service, label: str, reopen: Callable[..., L2Adapter]
    ) -> Iterator[L2Adapter | None]:
        if not service.ours:
            pytest.skip("a service of your own is not filled")
        with service.small() as possible:
            if not possible:
                yield None
                return
            with reopen(**service.corner(f"{label}-small")) as adapter:  # another medium: in a corner of its own
                yield adapter

    @pytest.fixture
    def hang(self, service: Service) -> Any:
        return service.hang()
