"""The server's events, as this process passes them on: each stream has a connection of its own to the server's socket.

Nothing is kept here. A client that does not read lets its connection here fill up, then this process does not read from
the server either, and the server leaves events out and says how many: it waits for nobody.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Mapping
from typing import Any

from lmcache_core.client.event_stream import connect_events
from lmcache_core.observe.stream import PACKET_BYTES_MAX
from lmcache_http.guard import RefusedError

SILENCE_S = 15.0  # then a line that means nothing is sent: who is between keeps the connection, and a dead one shows
STREAMS_MAX = 32
TYPE = "text/event-stream"


class EventStreams:
    """All of them. `open` is for any thread, the rest for the event loop's."""

    def __init__(self, server_uid: int | None) -> None:
        self._server_uid = server_uid
        self._open: set[socket.socket] = set()

    def open(self, config: Mapping[str, Any]) -> AsyncIterator[bytes]:
        """A new stream of a server with these settings. Raises `RefusedError` where it has none, or there are too many,
        and `DisconnectedError`."""
        if len(self._open) >= STREAMS_MAX:
            raise RefusedError(429, f"{STREAMS_MAX} streams are open, the limit: close one")
        sock = connect_events(config, self._server_uid)
        if sock is None:
            raise RefusedError(404, "this server streams no events: give it a table [subscribers.stream]")
        self._open.add(sock)
        return self._passed_on(sock)

    async def _passed_on(self, sock: socket.socket) -> AsyncIterator[bytes]:
        """As server-sent events; ends with the server's stream."""
        loop = asyncio.get_running_loop()
        received: asyncio.Task[bytes] | None = None
        try:
            yield b"retry: 1000\n\n"
            while True:
                received = received or loop.create_task(loop.sock_recv(sock, PACKET_BYTES_MAX))
                await asyncio.wait({received}, timeout=SILENCE_S)
                if not received.done():
                    yield b": nothing new\n\n"
                    continue
                packet, received = received.result(), None
                if not packet:
                    return
                yield b"".join(b"data: %s\n\n" % line for line in packet.splitlines())
        except OSError:
            return  # the server was killed
        finally:
            if received is not None:
                received.cancel()
                with contextlib.suppress(asyncio.CancelledError, OSError):
                    await received
            self._open.discard(sock)
            sock.close()
