"""Mooncake Store as a tier of lmcache-core. This module only names things: the adapter is imported when it is used."""

from __future__ import annotations

from collections.abc import Sequence

from lmcache_core.plugins.components import ComponentSpec, Kind
from lmcache_core.plugins.hookspecs import hookimpl


@hookimpl
def lmcache_components() -> Sequence[ComponentSpec]:
    return [
        ComponentSpec(
            Kind.L2_ADAPTER,
            "mooncake",
            factory="lmcache_mooncake.adapter:MooncakeAdapter",
            settings="lmcache_mooncake.settings:MooncakeSettings",
            summary="Mooncake Store: the memory of many nodes, shared by several servers",
        )
    ]
