"""A connection's socket for the time of one exchange: parts out, parts in, each wait bounded by the deadline.

A plain socket blocks in the kernel, which also keeps the time: one call sends or receives many parts whole, without a
look at readiness before each. TLS has no such calls; there one part goes at a time.
"""

from __future__ import annotations

import socket
import ssl
import struct
import time
from abc import ABC, abstractmethod
from types import TracebackType

IOV_MAX = 512  # parts in one call; the system allows 1,024
# A call that sends holds the socket, and acknowledgements wait for its end: 16 MiB at once went a fifth slower.
SEND_BYTES_MAX = 2 << 20
_TIME_MIN_S = 0.001
_TIME_MAX_S = 1e6  # deadlines may be further away, and infinite: sockets count to 24 days
_TIMEVAL = struct.Struct("@ll")


def left_s(deadline: float) -> float:
    """Seconds until the deadline. Raises `TimeoutError` when it has come."""
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError("the deadline has come")
    return min(max(left, _TIME_MIN_S), _TIME_MAX_S)


class Channel(ABC):
    """Raises `OSError` or `TimeoutError`: the stream is then in the middle of something."""

    join_bytes_max = 0  # parts up to this size are better joined than sent by themselves

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
        """Send what goes in one call; its length."""

    @abstractmethod
    def receive(self, parts: list[memoryview], *, whole: bool = False) -> int:
        """Receive what there is, at least one byte; with `whole` all of the parts, where the socket can. The
        length."""

    def send_all(self, parts: list[memoryview]) -> None:
        at = 0
        while at < len(parts):
            at = advance(parts, at, self.send(_portion(parts, at)))


class PlainChannel(Channel):
    def __init__(self, sock: socket.socket, deadline: float) -> None:
        super().__init__(sock, deadline)
        sock.settimeout(None)

    def send(self, parts: list[memoryview]) -> int:
        self._limit(socket.SO_SNDTIMEO)
        try:
            return self._sock.sendmsg(parts)
        except BlockingIOError:
            raise TimeoutError("the deadline has come") from None

    def receive(self, parts: list[memoryview], *, whole: bool = False) -> int:
        self._limit(socket.SO_RCVTIMEO)
        try:
            got = self._sock.recvmsg_into(parts[:IOV_MAX], 0, socket.MSG_WAITALL if whole else 0)[0]
        except BlockingIOError:
            raise TimeoutError("the deadline has come") from None
        if not got:
            raise ConnectionResetError("the server closed the connection")
        return got

    def _limit(self, which: int) -> None:
        left = left_s(self._deadline)
        self._sock.setsockopt(socket.SOL_SOCKET, which, _TIMEVAL.pack(int(left), int(left % 1 * 1e6)))


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
    """What goes in one call: the first parts from `at`, the last of them cut."""
    portion, room = [], SEND_BYTES_MAX
    for part in parts[at : at + IOV_MAX]:
        portion.append(part[:room])
        room -= part.nbytes
        if room <= 0:
            break
    return portion


def advance(parts: list[memoryview], at: int, nbytes: int) -> int:
    """Where to go on in `parts` once `nbytes` of those from `at` have been moved; a part that is half moved is cut."""
    while at < len(parts) and nbytes >= parts[at].nbytes:
        nbytes -= parts[at].nbytes
        at += 1
    if nbytes:
        parts[at] = parts[at][nbytes:]
    return at
