"""The kit against every policy of ours, built through the registry as a server builds them."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

import pytest

from lmcache_core import Kind
from lmcache_core.plugins.loader import load_plugins
from lmcache_testing import EvictionPolicyContract, PrefetchPolicyContract, StorePolicyContract

REGISTRY = load_plugins()
TENANTS = {"a": {"namespaces": [1], "quota_bytes": 400}, "b": {"namespaces": [2], "quota_bytes": 100}}


class Built:
    """`make_policy` for a component of the registry."""

    component: ClassVar[str]
    kind: ClassVar[Kind]
    settings: ClassVar[dict[str, object] | None] = None

    @pytest.fixture
    def make_policy(self) -> Callable[[], object]:
        return lambda: REGISTRY.build(self.kind, self.component, self.settings)


class Eviction(Built, EvictionPolicyContract):
    kind = Kind.EVICTION_POLICY


class TestLru(Eviction):
    component = "lru"


class TestNoop(Eviction):
    component = "noop"
    never_evicts = True


class TestFifo(Eviction):
    component = "fifo"


class TestLfu(Eviction):
    component = "lfu"


class TestMru(Eviction):
    component = "mru"


class TestArc(Eviction):
    component = "arc"


class TestS3Fifo(Eviction):
    component = "s3fifo"


class TestLruk(Eviction):
    component = "lruk"


class TestAdaptive(Eviction):
    component = "adaptive"
    remembers_keys_max = (
        10_000  # four capacities, and as many for its shadow caches, all of which sample every key here
    )


class TestIsolated(Eviction):
    component = "isolated"
    settings: ClassVar[dict[str, object] | None] = {"tenants": TENANTS}
    excess_entries_max = 3  # each tenant rounds up


class TestIsolatedWithAnotherInner(TestIsolated):
    settings: ClassVar[dict[str, object] | None] = {"tenants": TENANTS, "inner": "s3fifo"}


class Store(Built, StorePolicyContract):
    kind = Kind.STORE_POLICY


class TestDefaultStore(Store):
    component = "default"


class TestSkipL1(Store):
    component = "skip_l1"


class TestSizeAware(Store):
    component = "size_aware"
    settings: ClassVar[dict[str, object] | None] = {
        "tiers": {"ssd": {"max_bytes": "64KiB"}, "cold": {"min_bytes": "64KiB"}}
    }


class TestWearAware(Store):
    component = "wear_aware"


class Prefetch(Built, PrefetchPolicyContract):
    kind = Kind.PREFETCH_POLICY


class TestDefaultPrefetch(Prefetch):
    component = "default"


class TestRetain(Prefetch):
    component = "retain"
