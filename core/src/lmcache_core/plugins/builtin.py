"""The components that come with lmcache-core. They are registered like those of any plugin."""

from __future__ import annotations

from collections.abc import Sequence

from lmcache_core.plugins.components import ComponentSpec, Kind
from lmcache_core.plugins.hookspecs import hookimpl

_POLICIES = "lmcache_core.policies"
_OBSERVE = "lmcache_core.observe"


@hookimpl
def lmcache_components() -> Sequence[ComponentSpec]:
    """What a server can use without further packages."""
    eviction, store, prefetch, hears = (
        Kind.EVICTION_POLICY,
        Kind.STORE_POLICY,
        Kind.PREFETCH_POLICY,
        Kind.EVENT_SUBSCRIBER,
    )
    return [
        ComponentSpec(eviction, "lru", f"{_POLICIES}.lru:LruEviction", summary="least recently used goes first"),
        ComponentSpec(eviction, "noop", f"{_POLICIES}.noop:NoopEviction", summary="nothing is ever evicted"),
        ComponentSpec(store, "default", f"{_POLICIES}.store:DefaultStore", summary="to every tier; L1 keeps it"),
        ComponentSpec(store, "skip_l1", f"{_POLICIES}.store:SkipL1Store", summary="to every tier; then L1 drops it"),
        ComponentSpec(
            prefetch,
            "default",
            f"{_POLICIES}.prefetch:DefaultPrefetch",
            summary="from the first tier that has it, for one reader",
        ),
        ComponentSpec(
            prefetch,
            "retain",
            f"{_POLICIES}.prefetch:RetainPrefetch",
            summary="from the first tier that has it; L1 keeps it",
        ),
        ComponentSpec(
            Kind.SERDE, "identity", "lmcache_core.serde.identity:IdentitySerde", summary="the bytes as they are"
        ),
        ComponentSpec(
            hears, "log", f"{_OBSERVE}.logs:LogEvents", f"{_OBSERVE}.logs:LogSettings", "events as lines of the log"
        ),
        ComponentSpec(
            hears,
            "jsonl",
            f"{_OBSERVE}.files:JsonlEvents",
            f"{_OBSERVE}.files:JsonlSettings",
            "events as lines of JSON in a file that is rotated",
        ),
        ComponentSpec(
            hears,
            "stream",
            f"{_OBSERVE}.stream:EventStream",
            f"{_OBSERVE}.stream:StreamSettings",
            "events over a Unix socket, for processes on this node",
        ),
    ]
