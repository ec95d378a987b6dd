"""The trace that a call belongs to: given by the caller, or the current one of its thread."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

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


@cache
def trace_context() -> Callable[[], str]:
    """What finds the trace of the calling thread, by a plugin. Raises `UsageError` if none has one."""
    from lmcache_core.plugins.loader import load_plugins
    from lmcache_core.plugins.suggest import install_command

    found = load_plugins().hook.lmcache_trace_context()
    if not found:
        needed = "trace=True needs a package that knows the current trace"
        raise UsageError(needed, cure=install_command("lmcache-otel"))
    context: Callable[[], str] = found[0]
    return context


def with_trace(request: m.Message, traceparent: str) -> m.Message:
    """The request with a trace, if requests of its kind can have one."""
    kind = _TRACED.get(type(request))
    if kind is None or not traceparent:
        return request
    return kind(**structs.asdict(request), traceparent=traceparent)
