"""OpenTelemetry for lmcache-core: spans of a server, the current trace of a client. This module only names things."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from lmcache_core.plugins.components import ComponentSpec, Kind
from lmcache_core.plugins.hookspecs import hookimpl


@hookimpl
def lmcache_components() -> Sequence[ComponentSpec]:
    return [
        ComponentSpec(
            Kind.TRACER,
            "otel",
            factory="lmcache_otel.tracer:otel_tracer",
            settings="lmcache_otel.settings:OtelSettings",
            summary="spans of requests, sent to an OpenTelemetry collector",
        )
    ]


@hookimpl
def lmcache_trace_context() -> Callable[[], str]:
    from lmcache_otel.context import current_traceparent

    return current_traceparent
