"""A connection's socket during one exchange: send parts, receive parts, each wait bounded by the deadline. A plain
socket blocks in the kernel, which also enforces the time-out: one call sends or receives many whole parts, without
polling before each. TLS has no such calls; there one part is sent at a time.
"""

from __future__ import annotations

import socket
import ssl
from abc import ABC, abstractmethod
from types import TracebackType

from lmcache_core.tiers.streams import BUFFERS_MAX, advance, left_s, limit, receive_into

# A send call holds the socket, and acknowledgements wait for its end: 16 MiB at once were a fifth slower.
SEND_BYTES_MAX = 2 << 20


class Channel(ABC):
    """Raises `OSError` or `TimeoutError`: the stream is then in the middle of something."""

    join_bytes_max = 0  # joining parts up to this size is faster than sending them separately

    def __init__(self, sock: socket.socket, deadline: float) -> None:
        self._sock = sock
        self._deadline = deadline
        self._before = sock.gettimeout()

    def __enter__(self) -> Channel:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if kind is None:  # after an error the connection is closed
            self._sock.settimeout(self._before)

    @abstractmethod
    def send(self, parts: list[memoryview]) -> int:
        """Send as much as fits into one call; returns its length."""

    @abstractmethod
    def receive(self, parts: list[memoryview], *, whole: bool = False) -> int:
        """Receive what is there, at least one byte; with `whole` all parts, if the socket can. Returns the length."""

    def send_all(self, parts: list[memoryview]) -> None:
        at = 0
        while at < len(parts):
            at = advance(parts, at, self.send(_portion(parts, at)))


class PlainChannel(Channel):
    def send(self, parts: list[memoryview]) -> int:
        limit(self._sock, socket.SO_SNDTIMEO, self._deadline)
        try:
            return self._sock.sendmsg(parts)
        except BlockingIOError:
            raise TimeoutError("the deadline has come") from None

    def receive(self, parts: list[memoryview], *, whole: bool = False) -> int:
        got = receive_into(self._sock, parts, self._deadline, whole=whole)
        if not got:
            raise ConnectionResetError("the server closed the connection")
        return got


class TlsChannel(Channel):
    join_bytes_max = 16 << 10  # one TLS record

    def send(self, parts: list[memoryview]) -> int:
        self._sock.settimeout(left_s(self._deadline))
        return self._sock.send(parts[0])

    def receive(self, parts: list[memoryview], *, whole: bool = False) -> int:
        self._sock.settimeout(left_s(self._deadline))
        got = self._sock.recv_into(parts[0])
        if not got:
            raise ConnectionResetError("the server closed the connection")
        return got


def channel_on(sock: socket.socket, deadline: float) -> Channel:
    return (TlsChannel if isinstance(sock, ssl.SSLSocket) else PlainChannel)(sock, deadline)


def _portion(parts: list[memoryview], at: int) -> list[memoryview]:
    """The parts for one call: from `at` on, the last of them cut."""
    portion, room = [], SEND_BYTES_MAX
    for part in parts[at : at + BUFFERS_MAX]:
        portion.append(part[:room])
        room -= part.nbytes
        if room <= 0:
            break
    return portion
