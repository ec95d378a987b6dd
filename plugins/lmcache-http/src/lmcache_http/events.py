"""Passes on the server's events: each stream has its own connection to the server's socket.

Nothing is buffered here. If a client does not read, its connection fills up, this process stops reading from the
server, and the server drops events and says how many: it waits for nobody.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Mapping
from typing import Any

from lmcache_core.client import connect_events
from lmcache_core.observe.stream import PACKET_BYTES_MAX
from lmcache_http.guard import RefusedError

SILENCE_S = 15.0  # then send a comment line: proxies keep the connection, and a dead one is noticed
STREAMS_MAX = 32
TYPE = "text/event-stream"


class EventStreams:
    """All streams. `open` may be called by any thread, the rest only by the event loop's."""

    def __init__(self, server_uid: int | None) -> None:
        self._server_uid = server_uid
        self._open: set[socket.socket] = set()

    def open(self, config: Mapping[str, Any]) -> AsyncIterator[bytes]:
        """A new stream of a server with these settings. Raises `RefusedError` if the server has none, or too many are
        open, and `DisconnectedError`."""
        if len(self._open) >= STREAMS_MAX:
            raise RefusedError(429, f"{STREAMS_MAX} streams are open, the limit: close one")
        sock = connect_events(config, self._server_uid)
        if sock is None:
            raise RefusedError(404, "this server streams no events: give it a table [subscribers.stream]")
        self._open.add(sock)
        return self._passed_on(sock)

    def end(self) -> None:
        """Each ends once it has passed on what has arrived."""
        for sock in tuple(self._open):  # other threads may add one
            sock.shutdown(socket.SHUT_RDWR)

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
