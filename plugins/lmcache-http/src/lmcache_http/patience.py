"""How many connections there are, and how long each may be idle, in the middle of a request, or unread."""

from __future__ import annotations

import asyncio
import errno
import logging
from typing import Any

from uvicorn.protocols.http.auto import AutoHTTPProtocol

log = logging.getLogger(__name__)

CONNECTIONS_MAX = 240  # then the one that has waited longest for a request makes room for the newest
REQUEST_S = 10.0  # a request's head fits into one packet, and a body into a few
ANSWER_S = 10.0  # the peer must have read some of an answer within this time
NO_DESCRIPTOR_LOG_S = 60.0  # asyncio would tell it of each attempt, with a traceback


class PatientLoop(asyncio.SelectorEventLoop):
    """An event loop whose servers give a TLS handshake no longer than a request, since it is not counted among the
    connections before it has ended, and which says once a minute that there is no descriptor for another."""

    _quiet_until_s = 0.0

    async def create_server(self, *args: Any, ssl: Any = None, **more: Any) -> asyncio.Server:
        """As in any loop."""
        if ssl is not None:
            more["ssl_handshake_timeout"] = REQUEST_S
        return await super().create_server(*args, ssl=ssl, **more)

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """As in any loop, but for connections that cannot be accepted."""
        error = context.get("exception")
        if not (isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE)):
            super().call_exception_handler(context)
        elif self.time() >= self._quiet_until_s:
            self._quiet_until_s = self.time() + NO_DESCRIPTOR_LOG_S
            log.warning("connections are not accepted: %s; raise the limit of open files", error.strerror)


class PatientProtocol(AutoHTTPProtocol):  # type: ignore[misc, valid-type]
    """Uvicorn's protocol, for connections that may not keep others out, the probes above all. A connection either waits
    for a complete request, until `REQUEST_S`, or is being answered, and then must not leave the answer unread for
    `ANSWER_S`. Whoever waits makes room if there are too many."""

    _hurry: asyncio.TimerHandle | None = None  # while it waits for a request
    _unread: asyncio.TimerHandle | None = None  # while the peer does not read

    def connection_made(self, transport: Any) -> None:
        """The first request is due."""
        super().connection_made(transport)
        if len(self.connections) > CONNECTIONS_MAX:
            self._make_room()
        self._await_request()

    def data_received(self, data: bytes) -> None:
        """A part of a request has arrived."""
        super().data_received(data)
        self._await_request()

    def on_response_complete(self) -> None:
        """The next request is due."""
        super().on_response_complete()
        self._await_request()

    def pause_writing(self) -> None:
        """The peer does not read."""
        super().pause_writing()
        self._unread = self.loop.call_later(ANSWER_S, self.transport.abort)

    def resume_writing(self) -> None:
        """It has read most of what there was."""
        super().resume_writing()
        self._end_unread()

    def connection_lost(self, exc: Exception | None) -> None:
        """Nothing is due any more."""
        self._end_wait()
        self._end_unread()
        super().connection_lost(exc)

    def _make_room(self) -> None:
        waiting = [each for each in self.connections if each._hurry is not None]
        if waiting:
            oldest = min(waiting, key=lambda each: each._hurry.when())
            oldest._end_wait()  # it is gone only in the loop's next turn
            oldest.transport.abort()

    def _await_request(self) -> None:
        cycle = self.cycle
        if cycle is not None and not cycle.more_body and not cycle.response_complete:
            self._end_wait()
        elif self._hurry is None:  # not a close, which would wait for what the peer does not read
            self._hurry = self.loop.call_later(REQUEST_S, self.transport.abort)

    def _end_wait(self) -> None:
        if self._hurry is not None:
            self._hurry.cancel()
            self._hurry = None

    def _end_unread(self) -> None:
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None
