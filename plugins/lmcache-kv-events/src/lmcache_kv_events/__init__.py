"""KV events for routers of LLM engines. This module only names things."""

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
            Kind.EVENT_SUBSCRIBER,
            "kv_events",
            factory="lmcache_kv_events.subscriber:KvEvents",
            settings="lmcache_kv_events.settings:KvEventsSettings",
            summary="blocks stored and removed, as vLLM tells routers over ZMQ",
        )
    ]


@hookimpl
def lmcache_check(settings: Settings) -> Sequence[Finding]:
    from lmcache_kv_events.settings import check

    return check(settings.subscribers["kv_events"])
