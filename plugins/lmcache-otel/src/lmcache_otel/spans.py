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
    from lmcache_otel.settings import OtelSettings

log = logging.getLogger(__name__)
_THEIR_LOG = logging.getLogger("opentelemetry.exporter.otlp.proto.http.trace_exporter")
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


class SpanFates(NamedTuple):
    """What has become of spans whose end is known."""

    exported: int = 0
    failed: int = 0

    def of(self, ended: int, dropped: int, *, given_up: bool) -> dict[str, int]:
        """The fate of each of `ended` spans, for `status`; the figures add up to `ended`. `dropped` of them never got
        to the exporter. One that has no other fate waits, or has failed if the exporter was given up."""
        left = ended - dropped - self.exported - self.failed
        failed, waiting = (self.failed + left, 0) if given_up else (self.failed, left)
        return {"exported": self.exported, "failed": failed, "waiting": waiting, "dropped": dropped}


class SpanExporter(EventSubscriber):
    """Sends spans to a collector. Spans that it does not accept in time are counted as failed, and not sent again.

    Raises `SettingsError` if the SDK is not installed.
    """

    def __init__(self, settings: OtelSettings, server: str) -> None:
        try:
            from opentelemetry import trace
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk import trace as sdk
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace.export import SpanExportResult
            from opentelemetry.sdk.util.instrumentation import InstrumentationScope

            from lmcache_otel.collector import CollectorSession
        except ImportError as error:
            raise SettingsError(
                f"otel.endpoint is set, but OpenTelemetry's SDK cannot be imported ({error}): "
                "pip install lmcache-otel, or remove otel.endpoint"
            ) from error
        self.fates = SpanFates()  # replaced whole: any thread may read it
        self._timeout_s = settings.timeout_s
        self._quiet_until_s = 0.0
        self._endpoint = settings.traces_url
        self._api, self._span = trace, sdk.ReadableSpan
        self._success = SpanExportResult.SUCCESS
        self._scope = InstrumentationScope("lmcache_core", __version__)
        self._resource = Resource.create(
            {"service.name": settings.service_name, "service.version": __version__, "lmcache.server": server}
        )
        headers = {name: value.get_secret_value() for name, value in settings.headers.items()}
        self._session = CollectorSession()
        self._exporter = OTLPSpanExporter(
            self._endpoint, headers=headers or None, timeout=settings.timeout_s, session=self._session
        )
        # The SDK logs every failed batch; we log it from time to time. Exports of an engine in this process are not
        # affected.
        _THEIR_LOG.addFilter(_not_ours)

    def hear(self, events: Sequence[CacheEvent]) -> None:
        spans = [event for event in events if isinstance(event, SpanEnded)]
        if not spans:
            return
        try:
            exported, why = self._send(spans)
        except Exception as error:  # noqa: BLE001  # whatever it is, the next batch may get there
            exported, why = 0, f"{type(error).__name__}: {error}"
        failed = len(spans) - exported
        self.fates = SpanFates(self.fates.exported + exported, self.fates.failed + failed)
        if why and events[-1].at_s >= self._quiet_until_s:
            self._quiet_until_s = events[-1].at_s + TIER_WARNING_PAUSE_S
            log.warning("%d of %d spans did not reach the collector %s: %s", failed, len(spans), self._endpoint, why)

    def _send(self, spans: Sequence[SpanEnded]) -> tuple[int, str]:
        """How many the collector accepted, and what there is to say of it."""
        with self._session.within(self._timeout_s):
            well = self._exporter.export([self._readable(span) for span in spans]) is self._success
        answer = self._session.answer
        if not (well and answer.accepted):
            return 0, answer.message or "it did not accept them in time, or refused them"
        rejected = min(answer.rejected, len(spans))
        return len(spans) - rejected, answer.message or ("it refused them, and did not say why" if rejected else "")

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


def _not_ours(record: logging.LogRecord) -> bool:
    return record.threadName != BUS_THREAD


def table() -> str:
    """The table for the docs."""
    lines = ["| span | kind | its parent | what it is | attributes |", "|---|---|---|---|---|"]
    for each in SPANS:
        parent = f"`{each.parent}`" if each.parent.startswith("lmcache.") else each.parent
        attributes = "<br>".join(f"`{name}`: {what}" for name, what in each.attributes.items())
        lines.append(f"| `{each.name}` | {each.kind} | {parent} | {each.help} | {attributes} |")
    return "\n".join(lines)
