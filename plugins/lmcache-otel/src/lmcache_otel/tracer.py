"""The traces of requests: which spans exist, and which are their parents.

A lookup's span ends with its loads, a store's with its last slot. Loads know the lookups that wait for them. Objects on
their way to tiers are remembered by incarnation, so that a later object with the same key does not join an earlier
trace. The loop queues each ended span on a separate bus; another thread makes and sends what a collector accepts.
"""

from __future__ import annotations

import random
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import compress
from typing import TYPE_CHECKING, Any, NamedTuple

from lmcache_core.kernel.answers import Grant, Settled
from lmcache_core.limits import KEY_BYTES
from lmcache_core.observe.bus import EventBus
from lmcache_core.observe.events import one
from lmcache_core.observe.tracer import RequestTracer, TracerContext
from lmcache_core.protocol.traceparent import parse_traceparent
from lmcache_core.tiers.contract import Outcome, Result
from lmcache_otel.limits import SPAN_BATCH_S, SPANS_WAITING_MAX, TRACED_OBJECTS_MAX, TRACED_STORES_MAX
from lmcache_otel.spans import (
    COMMIT,
    LOOKUP,
    STORE,
    TIER_LOAD,
    TIER_STORE,
    SpanEnded,
    SpanExporter,
    SpanType,
)

if TYPE_CHECKING:
    from lmcache_core.tiers.l1 import CommittedObject
    from lmcache_core.tiers.object.transfer import Loaded
    from lmcache_otel.settings import OtelSettings

Figures = dict[str, str | int]
_GRANTED, _COMMITTED = int(Grant.GRANTED), int(Settled.COMMITTED)


class Span(NamedTuple):
    """A span that has begun. `parent` 0: the root of its trace."""

    trace: int
    id: int
    parent: int
    began_s: float


@dataclass(eq=False)
class _Store:
    """A store whose slots are not all settled."""

    span: Span
    namespace: int
    keys: bytearray = field(default_factory=bytearray)  # one behind the other, by position in its lease
    open: set[int] = field(default_factory=set)
    granted: int = 0
    committed: int = 0


def otel_tracer(settings: OtelSettings, context: TracerContext) -> OtelTracer | None:
    """None: the settings name no collector. Raises `SettingsError`."""
    return None if settings.endpoint is None else OtelTracer(settings, context)


class OtelTracer(RequestTracer):
    """Makes the spans, and leaves them to a thread that sends them."""

    def __init__(self, settings: OtelSettings, context: TracerContext) -> None:
        """Raises `SettingsError`."""
        self._exporter = SpanExporter(settings, context.server)
        self._endpoint = settings.traces_url
        self._ratio = settings.sample_ratio
        self._clock = context.clock
        self._for_tiers = context.for_tiers
        self._bus = EventBus({"otel": self._exporter}, SPANS_WAITING_MAX, context.clock, batch_s=SPAN_BATCH_S)
        # The oldest go first: taken from the front of a plain dict, each would cost a look at all that went before.
        self._stores: OrderedDict[int, _Store] = OrderedDict()  # by lease
        # By namespace, key and generation: the store's.
        self._objects: OrderedDict[tuple[int, bytes, int], Span] = OrderedDict()

    # --- requests -------------------------------------------------------------------------------------------

    def begin(self, traceparent: str) -> Span | None:
        parent = parse_traceparent(traceparent) if traceparent else None
        if parent is None:
            if random.random() >= self._ratio:
                return None
            return Span(random.getrandbits(128) or 1, _new_id(), 0, self._clock.now)
        return Span(parent.trace, _new_id(), parent.span, self._clock.now) if parent.sampled else None

    def lookup_ended(self, trace: Span, namespace: int, keys: int, hits: int, loaded: int) -> None:
        figures: Figures = {"lmcache.keys": keys, "lmcache.hits": hits, "lmcache.loaded": loaded}
        self._end(LOOKUP, trace, _named(namespace) | figures, remote=True)

    def store_refused(self, trace: Span, namespace: int, keys: bytes, why: str) -> None:
        self._store_ended(_Store(trace, namespace, bytearray(keys)), why)

    def store_granted(self, trace: Span, namespace: int, keys: bytes, lease: int, statuses: bytes) -> None:
        store = self._stores.get(lease)
        if store is None:
            while len(self._stores) >= TRACED_STORES_MAX:
                self._store_ended(self._stores.popitem(last=False)[1], "unsettled")
            store = self._stores[lease] = _Store(trace, namespace)
        first = len(store.keys) // KEY_BYTES
        store.keys += keys
        fresh = _equal(_GRANTED, statuses, range(first, first + len(statuses)))
        store.open.update(fresh)
        store.granted += len(fresh)
        if not store.open:
            self._store_ended(self._stores.pop(lease))

    def settled(self, lease: int, positions: Sequence[int], outcomes: bytes | bytearray) -> None:
        store = self._stores.get(lease)
        if store is None:
            return
        done = store.open.intersection(_equal(_COMMITTED, outcomes, positions))
        store.open.difference_update(positions)
        store.committed += len(done)
        if done:
            self._remember(store, [bytes(store.keys[at * KEY_BYTES : (at + 1) * KEY_BYTES]) for at in sorted(done)])
        if not store.open:
            self._store_ended(self._stores.pop(lease))

    def _remember(self, store: _Store, keys: Sequence[bytes]) -> None:
        objects = self._objects
        for item in self._for_tiers(store.namespace, keys):
            objects[store.namespace, item.key, item.generation] = store.span
        while len(objects) > TRACED_OBJECTS_MAX:
            objects.popitem(last=False)

    def _store_ended(self, store: _Store, failed: str = "") -> None:
        figures: Figures = {
            "lmcache.keys": len(store.keys) // KEY_BYTES,
            "lmcache.granted": store.granted,
            "lmcache.committed": store.committed,
        }
        self._end(STORE, store.span, _named(store.namespace) | figures, failed, remote=True)

    # --- tiers ----------------------------------------------------------------------------------------------

    def loaded(
        self, tier: str, began_s: float, returned_s: float, waiters: Mapping[Any, Sequence[int]], nbytes: int,
        results: Sequence[Loaded],
    ) -> None:  # fmt: skip
        ended_s = self._clock.read()
        for lookup, positions in waiters.items():
            span = _below(lookup, began_s)
            reasons = [results[at].reason for at in positions]
            there = reasons.count(None)
            failed = next((str(reason) for reason in reasons if reason is not None), "")
            figures: Figures = {"lmcache.keys": len(reasons), "lmcache.loaded": there, "lmcache.bytes": there * nbytes}
            self._end(TIER_LOAD, span, _of_tier(tier) | figures, failed, ended_s=returned_s)
            if there:
                self._end(COMMIT, _below(span, returned_s), {"lmcache.keys": there}, ended_s=ended_s)

    def load_failed(self, tier: str, began_s: float, waiters: Mapping[Any, Sequence[int]], reason: str) -> None:
        for lookup, positions in waiters.items():
            figures: Figures = {"lmcache.keys": len(positions), "lmcache.loaded": 0, "lmcache.bytes": 0}
            self._end(TIER_LOAD, _below(lookup, began_s), _of_tier(tier) | figures, reason)

    def storing(self, tier: str, objects: Sequence[CommittedObject]) -> Callable[[Sequence[Outcome]], None] | None:
        by_store: dict[Span, list[int]] = {}
        for at, item in enumerate(objects):
            span = None if item.reused else self._objects.get((item.namespace, *item.named))
            if span is not None:
                by_store.setdefault(span, []).append(at)
        if not by_store:
            return None
        nbytes, began_s = objects[0].nbytes, self._clock.now  # all of one layout

        def ended(outcomes: Sequence[Outcome]) -> None:
            for span, positions in by_store.items():
                results = [outcomes[at].result for at in positions]
                there = results.count(Result.DONE)
                failed = next((str(result) for result in results if result is not Result.DONE), "")
                figures = _of_tier(tier) | {"lmcache.keys": len(results), "lmcache.stored": there}
                self._end(TIER_STORE, _below(span, began_s), figures | {"lmcache.bytes": there * nbytes}, failed)

        return ended

    # --- the server -----------------------------------------------------------------------------------------

    def _end(
        self,
        kind: SpanType,
        span: Span,
        attributes: Figures,
        failed: str = "",
        *,
        remote: bool = False,
        ended_s: float = 0.0,
    ) -> None:
        now = self._clock.read()
        unix_s = time.time() - now  # at which the monotonic clock began
        self._bus.emit(
            one,
            SpanEnded,
            type=kind,
            trace=span.trace,
            span=span.id,
            parent=span.parent,
            remote=remote,
            began_s=unix_s + span.began_s,
            ended_s=unix_s + (ended_s or now),
            attributes=attributes,
            failed=failed,
        )

    def check(self) -> None:
        """Called regularly: a collector that never finishes an answer is given up."""
        self._bus.check()

    def close(self) -> None:
        """Send the rest, for a moment at most."""
        self._bus.close()

    def status(self) -> dict[str, Any]:
        """For `status`."""
        fates = self._exporter.fates  # before the spans that have ended are counted: some of them may be of these
        status = self._bus.status()
        dropped, disabled = status["dropped"], status["subscribers"]["otel"]["disabled"]
        figures = fates.of(status["emitted"] + dropped, dropped, given_up=bool(disabled))
        return {"endpoint": self._endpoint, **figures, "disabled": disabled}


def _equal(wanted: int, values: bytes | bytearray, positions: Sequence[int]) -> list[int]:
    """The positions whose value is the wanted one. It runs for each key of a store, on the loop."""
    return list(compress(positions, map(wanted.__eq__, values)))


def _new_id() -> int:
    return random.getrandbits(64) or 1


def _below(span: Span, began_s: float) -> Span:
    return Span(span.trace, _new_id(), span.id, began_s)


def _named(namespace: int) -> Figures:
    return {"lmcache.namespace": f"{namespace:016x}"}


def _of_tier(tier: str) -> Figures:
    return {"lmcache.tier": tier}
