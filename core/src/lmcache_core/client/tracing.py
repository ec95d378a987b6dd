"""The trace that a call belongs to: given by the caller, or OpenTelemetry's current one."""

from __future__ import annotations

from msgspec import structs

from lmcache_core.errors import UsageError
from lmcache_core.protocol import messages as m
from lmcache_core.protocol.traceparent import parse_traceparent

_TRACED: dict[type[m.Message], type[m.TracedLookup | m.TracedPrepareStore]] = {
    m.LookupRequest: m.TracedLookup,
    m.PrepareStore: m.TracedPrepareStore,
}


def check_traceparent(given: object) -> str:
    """The text, or "" if it does not name a trace: it may come from a user's header, and the standard says to ignore
    such ones. Raises `UsageError` for other types."""
    if not isinstance(given, str):
        raise UsageError(f"traceparent is {given!r}: give the text of W3C Trace Context, 00-TRACE-SPAN-FLAGS")
    return given if given and parse_traceparent(given) is not None else ""


def current_traceparent() -> str:
    """Of OpenTelemetry's current span in this thread; empty without one, or without its API."""
    try:
        from opentelemetry import trace
    except ImportError:
        return ""
    context = trace.get_current_span().get_span_context()
    if not context.is_valid:
        return ""
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"


def with_trace(request: m.Message, traceparent: str) -> m.Message:
    """The request with a trace, if requests of its kind can have one."""
    kind = _TRACED.get(type(request))
    if kind is None or not traceparent:
        return request
    return kind(**structs.asdict(request), traceparent=traceparent)
