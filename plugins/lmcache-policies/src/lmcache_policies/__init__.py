"""Eviction and store policies for lmcache-core. This module only names them."""

from __future__ import annotations

from collections.abc import Sequence

from lmcache_core import ComponentSpec, Kind, hookimpl

__version__ = "0.1.0"

_SETTINGS = "lmcache_policies.settings"


@hookimpl
def lmcache_components() -> Sequence[ComponentSpec]:
    eviction, store = Kind.EVICTION_POLICY, Kind.STORE_POLICY
    return [
        ComponentSpec(eviction, "fifo", "lmcache_policies.fifo:FifoPolicy", summary="first in, first out"),
        ComponentSpec(eviction, "lfu", "lmcache_policies.lfu:LfuPolicy", summary="fewest uses go first"),
        ComponentSpec(eviction, "mru", "lmcache_policies.mru:MruPolicy", summary="most recently used goes first"),
        ComponentSpec(
            eviction,
            "arc",
            "lmcache_policies.arc:ArcPolicy",
            settings=f"{_SETTINGS}:ArcSettings",
            summary="learns how much room objects used once deserve",
        ),
        ComponentSpec(
            eviction,
            "s3fifo",
            "lmcache_policies.s3fifo:S3FifoPolicy",
            settings=f"{_SETTINGS}:S3FifoSettings",
            summary="a small queue keeps objects used once out of the large one",
        ),
        ComponentSpec(
            eviction,
            "lruk",
            "lmcache_policies.lruk:LrukPolicy",
            settings=f"{_SETTINGS}:LrukSettings",
            summary="LRU-2: the second-to-last use decides",
        ),
        ComponentSpec(
            eviction,
            "adaptive",
            "lmcache_policies.adaptive:AdaptivePolicy",
            settings=f"{_SETTINGS}:AdaptiveSettings",
            summary="follows the order of eviction that would have had the most hits",
        ),
        ComponentSpec(
            eviction,
            "isolated",
            "lmcache_policies.isolated:IsolatedPolicy",
            settings=f"{_SETTINGS}:IsolatedSettings",
            summary="a policy for each tenant, with byte quotas",
        ),
        ComponentSpec(
            store,
            "wear_aware",
            "lmcache_policies.wear_aware:WearAwareStore",
            settings=f"{_SETTINGS}:WearAwareSettings",
            summary="to the tiers at once, or only what was asked for twice, by the bytes written for a hit",
        ),
        ComponentSpec(
            store,
            "size_aware",
            "lmcache_policies.size_aware:SizeAwareStore",
            settings=f"{_SETTINGS}:SizeAwareSettings",
            summary="to each tier the sizes that suit it",
        ),
    ]
