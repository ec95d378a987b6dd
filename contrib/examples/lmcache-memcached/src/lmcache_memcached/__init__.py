"""A tier of lmcache-core. This module only names things: every `lmcache-core` command imports it."""

from __future__ import annotations

from collections.abc import Sequence

from lmcache_core import ComponentSpec, Kind, PluginInfo, hookimpl


@hookimpl
def lmcache_plugin_info() -> PluginInfo:
    return PluginInfo(api=1, summary="objects on Memcached")


@hookimpl
def lmcache_components() -> Sequence[ComponentSpec]:
    return [
        ComponentSpec(
            Kind.L2_ADAPTER,
            "memcached",
            factory="lmcache_memcached.adapter:MemcachedAdapter",
            settings="lmcache_memcached.settings:MemcachedSettings",
            summary="objects on Memcached",
        )
    ]
