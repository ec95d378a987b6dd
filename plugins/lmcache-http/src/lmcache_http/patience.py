"""How long a connection may take to send a request."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.auto import AutoHTTPProtocol

REQUEST_S = 10.0  # a request's head fits into one packet, and a body into a few


class PatientProtocol(AutoHTTPProtocol):  # type: ignore[misc, valid-type]
    """Uvicorn's protocol, which also closes a connection without a complete request in time: each counts towards the
    limit, and one client that holds all of them would block the probes."""

    _hurry: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        """The first request is due."""
        super().connection_made(transport)
        self._await_request()

    def data_received(self, data: bytes) -> None:
        """A part of a request has arrived."""
        super().data_received(data)
        self._await_request()

    def connection_lost(self, exc: Exception | None) -> None:
        """Nothing is due any more."""
        self._end_wait()
        super().connection_lost(exc)

    def _await_request(self) -> None:
        cycle = self.cycle
        if cycle is not None and not cycle.more_body and not cycle.response_complete:
            self._end_wait()
        elif self._hurry is None:
            self._hurry = self.loop.call_later(REQUEST_S, self.transport.close)

    def _end_wait(self) -> None:
        if self._hurry is not None:
            self._hurry.cancel()
            self._hurry = None
