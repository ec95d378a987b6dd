"""The trace that is current in the calling thread, for clients."""

from __future__ import annotations

from opentelemetry import trace


def current_traceparent() -> str:
    """Of OpenTelemetry's current span in this thread, as the text of W3C Trace Context; empty without one."""
    context = trace.get_current_span().get_span_context()
    if not context.is_valid:
        return ""
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"
