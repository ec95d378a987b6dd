"""Spans for OpenTelemetry: this server's part of a trace, exported over OTLP (http/protobuf) off the loop.

The SDK is imported only if a server exports. A span says how many keys, how many bytes, which tier and the namespace's
id; it has no key, token or salt, and no byte of an object.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from lmcache_core import __version__
from lmcache_core.errors import SettingsError
from lmcache_core.limits import TIER_WARNING_PAUSE_S
from lmcache_core.observe.bus import BUS_THREAD
from lmcache_core.observe.events import CacheEvent
from lmcache_core.observe.subscriber import EventSubscriber

if TYPE_CHECKING:
    from lmcache_core.settings.model import OtelSettings

log = logging.getLogger(__name__)
_THEIR_LOG = logging.getLogger("opentelemetry.exporter.otlp.proto.http.trace_exporter")
_ANSWER_BYTES_MAX = 64 << 10  # of a collector's answer; an OTLP answer has a few bytes
SpanKind = Literal["server", "client", "internal"]


class SpanType(NamedTuple):
    """One row of the table in docs/operating/tracing.md."""

    name: str
    kind: SpanKind
    parent: str
    help: str
    attributes: Mapping[str, str]  # each with its meaning


_NAMESPACE = {"lmcache.namespace": "the namespace's id, 16 hexadecimal digits"}
_TIER = {"lmcache.tier": "the tier's name"}
LOOKUP = SpanType(
    "lmcache.lookup",
    "server",
    "the caller's",
    "a lookup that the server was asked for, until its loads have ended",
    _NAMESPACE
    | {
        "lmcache.keys": "keys that were asked for",
        "lmcache.hits": "of these, those in the L1 at the end",
        "lmcache.loaded": "of these, those that tiers brought for it",
    },
)
TIER_LOAD = SpanType(
    "lmcache.tier.load",
    "client",
    "lmcache.lookup",
    "one call to a tier, its wait included",
    _TIER
    | {
        "lmcache.keys": "keys of the lookup that it was to load",
        "lmcache.loaded": "of these, those that came",
        "lmcache.bytes": "bytes of these in the L1",
    },
)
COMMIT = SpanType(
    "lmcache.commit",
    "internal",
    "lmcache.tier.load",
    "what came is made visible to readers",
    {"lmcache.keys": "keys that are there now"},
)
STORE = SpanType(
    "lmcache.store",
    "server",
    "the caller's",
    "a store, from the request for slots until the last of them is settled",
    _NAMESPACE
    | {
        "lmcache.keys": "keys that were to be stored",
        "lmcache.granted": "of these, those that got a slot",
        "lmcache.committed": "of these, those that were written",
    },
)
TIER_STORE = SpanType(
    "lmcache.tier.store",
    "client",
    "lmcache.store",
    "one call to a tier, its wait included",
    _TIER
    | {
        "lmcache.keys": "keys of the store that it was to keep",
        "lmcache.stored": "of these, those that the tier has now",
        "lmcache.bytes": "bytes of these in the L1",
    },
)
SPANS = (LOOKUP, TIER_LOAD, COMMIT, STORE, TIER_STORE)


class SpanEnded(CacheEvent, tag="span", frozen=True):
    """A span. Only for the exporter, never on the event bus. `parent` 0: none. `failed`: one word for why not all of it
    succeeded."""

    type: SpanType
    trace: int
    span: int
    parent: int
    remote: bool  # the parent is in another process
    began_s: float  # Unix
    ended_s: float
    attributes: dict[str, str | int]
    failed: str = ""


class SpanExporter(EventSubscriber):
    """Sends spans to a collector. Spans that it does not accept in time are counted as `failed`, and not sent again.

    Raises `SettingsError` if the SDK is not installed.
    """

    def __init__(self, settings: OtelSettings, server: str) -> None:
        try:
            import requests
            from opentelemetry import trace
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk import trace as sdk
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace.export import SpanExportResult
            from opentelemetry.sdk.util.instrumentation import InstrumentationScope
        except ImportError as error:
            raise SettingsError(
                f"otel.endpoint is set, but OpenTelemetry's SDK cannot be imported ({error}): "
                "pip install 'lmcache-core[otel]', or remove otel.endpoint"
            ) from error
        self.exported = 0
        self.failed = 0
        self._quiet_until_s = 0.0
        self._endpoint = settings.traces_url
        self._api, self._span = trace, sdk.ReadableSpan
        self._success = SpanExportResult.SUCCESS
        self._scope = InstrumentationScope("lmcache_core", __version__)
        self._resource = Resource.create(
            {"service.name": settings.service_name, "service.version": __version__, "lmcache.server": server}
        )
        headers = {name: value.get_secret_value() for name, value in settings.headers.items()}
        # The SDK's own session keeps an answer in memory however long it is, and its time-out is for each read.
        session = requests.Session()
        session.hooks["response"].append(_read_briefly)
        self._exporter = OTLPSpanExporter(
            self._endpoint, headers=headers or None, timeout=settings.timeout_s, session=session
        )
        # The SDK logs every failed batch; we log it from time to time. Exports of an engine in this process are not
        # affected.
        _THEIR_LOG.addFilter(_not_ours)

    def hear(self, events: Sequence[CacheEvent]) -> None:
        spans = [self._readable(event) for event in events if isinstance(event, SpanEnded)]
        if not spans:
            return
        try:
            well = self._exporter.export(spans) is self._success
        except Exception as error:  # noqa: BLE001  # whatever it is, the next batch may get there
            well, said = False, f"{type(error).__name__}: {error}"
        else:
            said = "it did not accept them in time, or refused them"
        if well:
            self.exported += len(spans)
            return
        self.failed += len(spans)
        if events[-1].at_s >= self._quiet_until_s:
            self._quiet_until_s = events[-1].at_s + TIER_WARNING_PAUSE_S
            log.warning("%d spans did not reach the collector %s: %s", len(spans), self._endpoint, said)

    def close(self) -> None:
        self._exporter.shutdown()
        _THEIR_LOG.removeFilter(_not_ours)

    def _readable(self, event: SpanEnded) -> Any:
        api, kinds = self._api, self._api.SpanKind
        kind = {"server": kinds.SERVER, "client": kinds.CLIENT, "internal": kinds.INTERNAL}[event.type.kind]
        status = api.Status(api.StatusCode.ERROR, event.failed) if event.failed else api.Status()
        return self._span(
            event.type.name,
            context=self._context(event.trace, event.span, remote=False),
            parent=self._context(event.trace, event.parent, remote=event.remote) if event.parent else None,
            resource=self._resource,
            attributes=event.attributes,
            kind=kind,
            status=status,
            start_time=int(1e9 * event.began_s),
            end_time=int(1e9 * event.ended_s),
            instrumentation_scope=self._scope,
        )

    def _context(self, trace: int, span: int, *, remote: bool) -> Any:
        sampled = self._api.TraceFlags(self._api.TraceFlags.SAMPLED)
        return self._api.SpanContext(trace, span, remote, sampled)


def _read_briefly(response: Any, **_: Any) -> None:
    """Read a normal answer to its end, for the connection to be kept, and hang up on a longer one."""
    response.raw.read(_ANSWER_BYTES_MAX)
    if not response.raw.closed:
        response.close()


def _not_ours(record: logging.LogRecord) -> bool:
    return record.threadName != BUS_THREAD


def table() -> str:
    """The table for the docs."""
    lines = ["| span | kind | its parent | what it is | attributes |", "|---|---|---|---|---|"]
    for each in SPANS:
        parent = f"`{each.parent}`" if each.parent.startswith("lmcache.") else each.parent
        said = "<br>".join(f"`{name}`: {what}" for name, what in each.attributes.items())
        lines.append(f"| `{each.name}` | {each.kind} | {parent} | {each.help} | {said} |")
    return "\n".join(lines)
