"""The Redis tier of lmcache-core. This module only names things: the adapter is imported when a tier uses it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from lmcache_core.plugins.components import ComponentSpec, Finding, Kind
from lmcache_core.plugins.hookspecs import hookimpl

if TYPE_CHECKING:
    from lmcache_core.settings.model import Settings


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


@hookimpl
def lmcache_check(settings: Settings) -> Sequence[Finding]:
    from lmcache_redis.check import check_tiers

    return check_tiers(settings)
