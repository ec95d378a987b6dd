"""Recording the server's requests: started with it or at run time, and written off the loop.

While it records, the index is closed to clients, so they ask for what they would have found by themselves: a recording
without the hits would be useless. The loop queues each operation and its answer on a separate bus.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from lmcache_core import __version__
from lmcache_core.errors import UsageError
from lmcache_core.kernel.answers import Grant
from lmcache_core.limits import KEY_BYTES, RECORDS_WAITING_MAX
from lmcache_core.observe.bus import EventBus
from lmcache_core.observe.events import CacheEvent
from lmcache_core.observe.traces import (
    CLEAR,
    LOOKUP,
    RETRIEVE,
    STORE,
    OperationServed,
    TraceRecorder,
    header_of,
)
from lmcache_core.protocol import messages as m
from lmcache_core.server.late_answers import LateAnswers
from lmcache_core.settings.model import RecordSettings, Settings

if TYPE_CHECKING:
    from lmcache_core.server.l1 import L1
    from lmcache_core.server.loop import Loop
    from lmcache_core.server.session import Session

_KINDS: dict[type[m.Message], str] = {
    m.LookupRequest: LOOKUP,
    m.TracedLookup: LOOKUP,
    m.PrepareStore: STORE,
    m.TracedPrepareStore: STORE,
    m.PrepareRetrieve: RETRIEVE,
    m.Clear: CLEAR,
}
_GRANTED = bytes([Grant.GRANTED])


class _AskedOperation(NamedTuple):
    """An operation, as it was asked."""

    request: m.Message
    at_s: float  # of the loop's clock
    worker: int
    nbytes: int  # of an object; 0 if unknown


class Recording:
    """Lives on the loop's thread."""

    def __init__(self, server: Settings, l1: L1, loop: Loop) -> None:
        self.on = False
        self._loop = loop
        self._server = server
        self._l1 = l1
        self._clock = l1.clock
        self._bus: EventBus | None = None
        self._recorder: TraceRecorder | None = None
        self._settings = RecordSettings()
        self._late = LateAnswers[_AskedOperation](self._leave)

    def start(self, settings: RecordSettings) -> None:
        """Begin; raises `UsageError` for a directory that cannot be used."""
        if self._bus is not None:
            raise UsageError(f"the server is already recording into {self._settings.dir}: stop that first")
        try:
            header = header_of(self._server.name, __version__, self._about())
            self._recorder = TraceRecorder(settings, header, self._clock.now)
        except OSError as error:
            raise UsageError(f"cannot record into {settings.dir}: {error.strerror}") from error
        self._settings = settings
        self._bus = EventBus({"record": self._recorder}, RECORDS_WAITING_MAX, self._clock)
        self.on = True
        self._l1.serve_index(False)

    def stop(self) -> None:
        """Stop the recording, if there is one, and wait until it is written: for the server's end."""
        bus = self._end()
        if bus is not None:
            bus.close()

    def _end(self) -> EventBus | None:
        """Stop recording; whoever closes the returned bus waits until the rest is written."""
        self.on = False
        self._late.end()
        bus, self._bus, self._recorder = self._bus, None, None
        if bus is not None:
            self._l1.serve_index(True)
        return bus

    def _about(self) -> dict[str, Any]:
        """What a recording says about its server."""
        settings, tiering = self._server, self._l1.tiering
        return {
            "pool_bytes": self._l1.kernel.usage().pool_bytes,
            "eviction_policy": settings.l1.eviction.type,
            "watermark": settings.l1.watermark,
            "chunk_tokens": settings.chunk_tokens,
            "tiers": [] if tiering is None else [tier.name for tier in tiering.tiers],
        }

    def change(self, session: Session, request: m.ChangeRecording) -> m.Message | None:
        """Handle a request to start or stop. A stop is answered (None) once everything is written."""
        if session.carrier != "lifeline" or session.uid not in (0, os.geteuid()):
            raise UsageError(
                "only the server's own user may record, over the lifeline: run the command "
                "as that user on the server's node"
            )
        if request.dir is None:
            bus = self._end()
            if bus is None:
                raise UsageError("the server is not recording")
            done = m.Done(request.rid)

            def close() -> None:
                bus.close()
                self._loop.call(lambda: session.send(done))

            threading.Thread(target=close, name="lmcache-record-end", daemon=True).start()
            return None
        try:
            settings = RecordSettings.model_validate({"dir": request.dir, **request.settings})
        except ValueError as error:
            raise UsageError(f"this cannot be recorded: {error}") from error
        self.start(settings)
        return m.Done(request.rid)

    def check(self) -> None:
        """Call this regularly: a recorder that hangs is disabled."""
        if self._bus is not None:
            self._bus.check()

    def status(self) -> dict[str, Any] | None:
        """For `status`."""
        if self._bus is None or self._recorder is None:
            return None
        told = self._bus.status()
        return {
            "dir": str(self._settings.dir),
            "operations": self._recorder.operations,
            "waiting": told["queue"],
            "dropped": told["dropped"],
            "missed": told["subscribers"]["record"]["missed"],
            "aside": told["subscribers"]["record"]["aside"],
        }

    # --- the loop's side ------------------------------------------------------------------------------------

    def served(self, session: Session | None, request: m.Request, reply: m.Message | None) -> None:
        """A request was answered, or will be (None)."""
        if session is None or type(request) not in _KINDS:
            return
        layout = self._l1.layouts.get(session.namespaces.get(getattr(request, "namespace", None) or 0, 0))
        asked = _AskedOperation(request, self._clock.now, session.id, 0 if layout is None else layout.nbytes)
        if reply is not None:
            self._leave(asked, reply)
        else:
            self._late.keep(session, request.rid, asked)

    def _leave(self, asked: _AskedOperation, reply: m.Message | None) -> None:
        """Leave it to the writer. None: its client was gone before there was an answer."""
        if self._bus is None:
            return
        self._bus.emit(
            _operation,
            asked.at_s,
            self._clock.now - asked.at_s,
            asked.worker,
            asked.nbytes,
            asked.request,
            reply,
            keeps=len(getattr(asked.request, "keys", b"")) // KEY_BYTES,
        )


def _operation(
    at_s: float, asked_at_s: float, took_s: float, worker: int, nbytes: int, request: Any, reply: Any
) -> Iterator[CacheEvent]:
    """Called on the bus's thread."""
    statuses: bytes = getattr(reply, "statuses", b"")
    hits = reply.hits if isinstance(reply, m.LookupReply) else statuses.count(_GRANTED)
    yield OperationServed(
        at_s=at_s,
        asked_at_s=asked_at_s,
        took_s=took_s,
        worker=worker,
        kind=_KINDS[type(request)],
        namespace=request.namespace or 0,
        nbytes=nbytes,
        keys=getattr(request, "keys", b""),
        prefix=getattr(request, "prefix", False),
        hits=hits,
        statuses=statuses,
    )
