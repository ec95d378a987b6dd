"""A tier of lmcache-core. This module only names things: every `lmcache-core` command imports it."""

from __future__ import annotations

from collections.abc import Sequence

from lmcache_core import ComponentSpec, Kind, PluginInfo, hookimpl


@hookimpl
def lmcache_plugin_info() -> PluginInfo:
    return PluginInfo(api=1, summary="objects on etcd, in parts")


@hookimpl
def lmcache_components() -> Sequence[ComponentSpec]:
    return [
        ComponentSpec(
            Kind.L2_ADAPTER,
            "etcd",
            factory="lmcache_etcd.adapter:EtcdAdapter",
            settings="lmcache_etcd.settings:EtcdSettings",
            summary="objects on etcd, in parts",
        )
    ]
