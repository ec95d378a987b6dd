"""The Redis tier of lmcache-core. This module only names things: the adapter is imported when a tier uses it."""

from __future__ import annotations

from collections.abc import Sequence

from lmcache_core.plugins.components import ComponentSpec, Kind
from lmcache_core.plugins.hookspecs import hookimpl


@hookimpl
def lmcache_components() -> Sequence[ComponentSpec]:
    return [
        ComponentSpec(
            Kind.L2_ADAPTER,
            "redis",
            factory="lmcache_redis.adapter:RedisAdapter",
            settings="lmcache_redis.settings:RedisSettings",
            summary="Redis, Redis Sentinel and Redis Cluster, shared by several servers",
        )
    ]
