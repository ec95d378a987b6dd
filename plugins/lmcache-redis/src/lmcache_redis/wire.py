"""RESP on a socket, with payloads that go from and into the caller's memory.

Only what payload commands need: arrays of bulk strings out; status, error, integer, bulk and null replies in. On a
plain socket many objects leave in one `sendmsg`, and the end of one reply arrives together with the head of the next;
TLS has no such calls, so there the small parts are joined and the large ones sent and received by themselves.
"""

from __future__ import annotations

import socket
import ssl
import struct
import time
from collections.abc import Iterator, Sequence

from lmcache_redis.commands import Command, Received, Refusal, Reply

AHEAD_BYTES = 4096  # read beyond an object for the next reply's head; what of it is payload is copied
IOV_MAX = 512  # parts in one sendmsg; the system allows 1,024
JOIN_BYTES_MAX = 16 << 10  # smaller parts are joined where there is no sendmsg: one TLS record each otherwise
LINE_BYTES_MAX = 64 << 10
_TIME_MIN_S = 0.001
_TIMEVAL = struct.Struct("@ll")


class WireError(Exception):
    """The stream is not what it should be; the connection cannot be used any more."""


def left_s(deadline: float) -> float:
    """Seconds until the deadline. Raises `TimeoutError` when it has come."""
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError("the deadline has come")
    return max(left, _TIME_MIN_S)


# --- out ----------------------------------------------------------------------------------------------------


def send(sock: socket.socket, commands: Sequence[Command], deadline: float) -> None:
    """Send all commands. Raises `OSError` or `TimeoutError`: the stream is then in the middle of something."""
    gather = not isinstance(sock, ssl.SSLSocket)
    parts = [*_joined(commands, 0 if gather else JOIN_BYTES_MAX)]
    at = 0
    while at < len(parts):
        sock.settimeout(left_s(deadline))
        sent = sock.sendmsg(parts[at : at + IOV_MAX]) if gather else sock.send(parts[at])
        while at < len(parts) and sent >= parts[at].nbytes:
            sent -= parts[at].nbytes
            at += 1
        if sent:
            parts[at] = parts[at][sent:]


def _joined(commands: Sequence[Command], copy_bytes_max: int) -> Iterator[memoryview]:
    """The stream in parts: framing joined across commands, payloads as they are unless they are small."""
    pending = bytearray()
    for command in commands:
        arguments = [*command.words]
        count = len(arguments) + bool(command.payload) + len(command.options)
        pending += b"*%d\r\n" % count
        for word in arguments:
            pending += b"$%d\r\n%b\r\n" % (len(word), word)
        if command.payload:
            pending += b"$%d\r\n" % command.payload_bytes
            for part in command.payload:
                if part.nbytes <= copy_bytes_max:
                    pending += part
                else:
                    yield memoryview(pending)
                    yield part.cast("B")
                    pending = bytearray()
            pending += b"\r\n"
        for word in command.options:
            pending += b"$%d\r\n%b\r\n" % (len(word), word)
    if pending:
        yield memoryview(pending)


# --- in -----------------------------------------------------------------------------------------------------


class Replies:
    """Reads the replies of one exchange; when all have been read, `finish` proves that nothing is left."""

    def __init__(self, sock: socket.socket, deadline: float) -> None:
        self._sock = sock
        self._deadline = deadline
        self._scatter = not isinstance(sock, ssl.SSLSocket)
        self._ahead = memoryview(bytearray(AHEAD_BYTES))
        self._begin = self._end = 0

    def read(self, command: Command) -> Reply:
        """The next reply. Raises `OSError`, `TimeoutError` or `WireError`."""
        line = self._line()
        kind, rest = line[:1], line[1:]
        try:
            if kind == b"$":
                return self._bulk(int(rest), command)
            if kind == b":":
                return int(rest)
            if kind == b"!":
                text = bytearray(int(rest))
                self._fill([memoryview(text)])
                self._line_end()
                return _refusal(bytes(text))
        except ValueError as error:
            raise WireError(f"a reply begins with {line[:40]!r}") from error
        if kind == b"-":
            return _refusal(rest)
        if kind == b"+":
            return rest
        if kind == b"_":
            return None
        raise WireError(f"a reply begins with {line[:40]!r}")

    def finish(self) -> None:
        """All replies have been read: is the stream at rest?"""
        if self._begin != self._end:
            raise WireError("more came than was asked for")

    def _bulk(self, nbytes: int, command: Command) -> Reply:
        if nbytes == -1:
            return None
        if nbytes < 0 or command.into is None:
            raise WireError("an object came that nobody asked for")
        whole = nbytes <= command.room_bytes
        if whole:
            self._fill(_cut(command.into, nbytes))
        else:
            self._skip(nbytes)
        self._line_end()
        return Received(nbytes, whole)

    def _line(self) -> bytes:
        while True:
            content = bytes(self._ahead[self._begin : self._end])
            at = content.find(b"\r\n")
            if at >= 0:
                self._begin += at + 2
                return content[:at]
            if self._begin:
                self._ahead[: len(content)] = content
                self._begin, self._end = 0, len(content)
            if self._end == len(self._ahead):
                if self._end >= LINE_BYTES_MAX:
                    raise WireError("a line does not end")
                self._ahead = memoryview(bytearray(content).ljust(2 * self._end, b"\0"))
            self._end += self._receive([self._ahead[self._end :]])

    def _line_end(self) -> None:
        if self._line():
            raise WireError("an object is longer than its head says")

    def _fill(self, parts: list[memoryview]) -> None:
        """Fill all parts, from what was read ahead and then from the socket."""
        at = 0
        while at < len(parts):
            part, held = parts[at], self._end - self._begin
            if not part.nbytes:
                at += 1
                continue
            if held:
                taken = min(held, part.nbytes)
                part[:taken] = self._ahead[self._begin : self._begin + taken]
                self._begin += taken
            elif self._scatter:
                at = _advance(parts, at, self._receive(parts[at:], whole=True))
                continue
            else:
                taken = self._receive([part])
            parts[at] = part[taken:]

    def _skip(self, nbytes: int) -> None:
        """Throw an object away, so that the replies behind it can be read."""
        held = min(nbytes, self._end - self._begin)
        self._begin += held
        nbytes -= held
        scratch = memoryview(bytearray(min(nbytes, 1 << 18)))
        while nbytes:
            nbytes -= self._receive([scratch[: min(nbytes, len(scratch))]])

    def _receive(self, parts: list[memoryview], *, whole: bool = False) -> int:
        left = left_s(self._deadline)
        if whole and self._scatter:
            got = self._receive_all(parts, left)
        else:
            self._sock.settimeout(left)
            got = self._sock.recv_into(parts[0])
        if not got:
            raise ConnectionResetError("the server closed the connection")
        return got

    def _receive_all(self, parts: list[memoryview], left: float) -> int:
        """One call for all of them. The kernel keeps the time: a socket with a Python time-out does not block, and
        would return with every piece that arrives."""
        self._sock.settimeout(None)
        self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _TIMEVAL.pack(int(left), int(left % 1 * 1e6)))
        try:
            return self._sock.recvmsg_into(parts, 0, socket.MSG_WAITALL)[0]
        except BlockingIOError:
            raise TimeoutError("the deadline has come") from None


def _advance(parts: list[memoryview], at: int, nbytes: int) -> int:
    while at < len(parts) and nbytes >= parts[at].nbytes:
        nbytes -= parts[at].nbytes
        at += 1
    if nbytes:
        parts[at] = parts[at][nbytes:]
    return at


def _cut(parts: Sequence[memoryview], nbytes: int) -> list[memoryview]:
    """The first `nbytes` of the parts."""
    cut = []
    for part in parts:
        flat = part.cast("B")[:nbytes]
        cut.append(flat)
        nbytes -= flat.nbytes
    return cut


def _refusal(text: bytes) -> Refusal:
    code, _, rest = text.decode(errors="replace").partition(" ")
    return Refusal(code, rest)
