"""What pytest loads wherever lmcache-core is installed: one fixture. Imports nothing but pytest."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from lmcache_core.tiers.contract import AdapterContext

# Their assertions are shown with the values on both sides, as those of a test file are.
_MODULES = (
    "adapter", "adapter_batches", "adapter_medium", "adapter_trouble", "adapter_values", "eviction",
    "eviction_machine", "machine", "material", "package", "planning", "serde",
)  # fmt: skip
pytest.register_assert_rewrite(*(f"lmcache_core.testing.{name}" for name in _MODULES))


@pytest.fixture
def adapter_context() -> AdapterContext:
    """What the kernel gives an adapter, with requests that really run in parallel."""
    from lmcache_core.tiers.parallel import adapter_context

    return adapter_context("contract", connections=4)
