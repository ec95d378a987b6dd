"""The HTTP interface of lmcache-core, in a process beside the server. This module only names things."""

from __future__ import annotations

from collections.abc import Sequence

from lmcache_core.plugins.components import ComponentSpec, Kind
from lmcache_core.plugins.hookspecs import hookimpl


@hookimpl
def lmcache_components() -> Sequence[ComponentSpec]:
    return [
        ComponentSpec(
            Kind.HELPER,
            "http",
            factory="lmcache_http.helper:http_helper",
            settings="lmcache_http.settings:HttpSettings",
            summary="health, status, metrics and operations over HTTP",
        )
    ]
