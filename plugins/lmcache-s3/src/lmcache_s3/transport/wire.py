"""HTTP/1.1 on a socket, as far as requests for objects need it, with every received byte accounted for. Bodies are sent
from the caller's memory and received into it. Only this module parses answers: interim answers are skipped, and a
message whose end is uncertain leaves the stream unusable (`Stream.at_rest` is False).
"""

from __future__ import annotations

import re
import socket
import ssl
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from lmcache_core.tiers.streams import BUFFERS_MAX, advance, left_s, receive_into

AHEAD_BYTES = 4096  # read beyond a head; what of it is payload is copied
HEAD_BYTES_MAX = 64 << 10
INTERIM_MAX = 32  # answers that announce another one
_ONE_RECEIVE_BYTES = 4 << 20  # a receive over TLS reads at most this between two checks of the deadline
_CHUNK_LINE_MAX = 1024
_STATUS = re.compile(rb"HTTP/1\.([01]) ([1-9][0-9][0-9])(?: .*)?", re.DOTALL)
_NAME = re.compile(rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")
_SIZE = re.compile(rb"([0-9A-Fa-f]{1,15})[ \t]*(?:;.*)?", re.DOTALL)
_UNTIL_CLOSED = -1


class WireError(Exception):
    """The end of the answer cannot be determined; the connection must be closed."""


class ClosedError(WireError, ConnectionError):
    """The connection ended within an answer, or before one (`begun` False)."""

    def __init__(self, message: str, begun: bool) -> None:
        super().__init__(message)
        self.begun = begun


class Head(NamedTuple):
    """Names are in lower case; values of a repeated name are joined by commas."""

    status: int
    headers: Mapping[str, str]
    keeps: bool  # the service keeps the connection
    length: int  # of the body that follows; _UNTIL_CLOSED if only the end of the connection ends it
    chunked: bool


def request_head(method: str, target: str, headers: Mapping[str, str]) -> bytes:
    """The head of a request. Raises `ValueError` for text that would end a line."""
    lines = [f"{method} {target} HTTP/1.1", *(f"{name}: {value}" for name, value in headers.items())]
    head = "\r\n".join(lines).encode("latin-1")
    if head.count(b"\n") != len(lines) - 1 or head.count(b"\r") != len(lines) - 1:
        raise ValueError("a header of the request holds a line break")
    return head + b"\r\n\r\n"


class Stream:
    """One connection. Raises `OSError`, `TimeoutError` or `WireError`: it is then in the middle of something."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self._ahead = bytearray(AHEAD_BYTES)
        self._begin = self._end = 0  # received, and not yet read
        self._body_left = 0  # of the answer; _UNTIL_CLOSED: unknown
        self._chunked = False  # the rest of the body is in chunks; `_body_left` is the rest of one of them
        self.at_rest = True  # every received byte belongs to an answer that has been read to its end

    # --- out ------------------------------------------------------------------------------------------------
    def send(self, head: bytes, body: Sequence[memoryview], deadline: float) -> bool:
        """Send a request. False: the other side closed before it took the whole body; it may have answered."""
        self.at_rest = False
        self._send(head, deadline)
        try:
            for view in body:
                self._send(view, deadline)
        except (BrokenPipeError, ConnectionResetError):
            return False
        return True

    def _send(self, data: bytes | memoryview, deadline: float) -> None:
        self.sock.settimeout(left_s(deadline))
        self.sock.sendall(data)

    # --- in: the head ---------------------------------------------------------------------------------------
    def read_head(self, method: str, deadline: float) -> Head:
        """The head of the final answer to a request of this method."""
        for number in range(INTERIM_MAX):
            head = _head_of(self._lines(deadline, begun=number > 0), method)
            if head.status >= 200:
                self._body_left, self._chunked = head.length, head.chunked
                if head.chunked:
                    self._body_left = self._chunk_size(deadline)
                self._look_at_rest()
                return head
            if head.status == 101:
                raise WireError("the service switches to another protocol, which was not requested")
        raise WireError(f"{INTERIM_MAX} interim answers came, and no final one")

    def _lines(self, deadline: float, begun: bool) -> list[bytes]:
        """The lines of one head."""
        lines: list[bytes] = []
        nbytes = 0
        while True:
            line = self._line(HEAD_BYTES_MAX - nbytes, deadline, begun or bool(lines))
            nbytes += len(line) + 2
            if not line:
                if lines:
                    return lines
                raise WireError("an answer begins with an empty line")
            lines.append(line)

    def _line(self, bytes_max: int, deadline: float, begun: bool = True) -> bytes:
        """The next line, without its end."""
        looked = self._begin
        while (at := self._ahead.find(b"\n", looked, self._end)) < 0:
            if self._end - self._begin > bytes_max:
                raise WireError("a line of an answer is too long")
            looked = self._end - self._begin
            self._more(deadline, begun or self._end > self._begin)
        line = bytes(self._ahead[self._begin : at])
        self._begin = at + 1
        if len(line) > bytes_max:
            raise WireError("the head of an answer is too long")
        return line.removesuffix(b"\r")

    def _more(self, deadline: float, begun: bool) -> None:
        """Receive more, behind the unread bytes."""
        held = self._end - self._begin
        if self._begin:
            self._ahead[:held] = self._ahead[self._begin : self._end]
            self._begin, self._end = 0, held
        if held == len(self._ahead):
            self._ahead = self._ahead.ljust(2 * held, b"\0")
        self._end += self._receive([memoryview(self._ahead)[self._end :]], deadline, begun)

    # --- in: the body ---------------------------------------------------------------------------------------
    def read_into(self, into: Sequence[memoryview], deadline: float) -> int:
        """Fill the buffers with the body, as far as both go. Returns the bytes of the body: more than the buffers hold
        if it is longer, and then it was not read to its end."""
        room = sum(view.nbytes for view in into)
        if not self._chunked and self._body_left > room:
            return self._body_left
        parts = [view.cast("B") if view.format != "B" or view.ndim != 1 else view for view in into if view.nbytes]
        got = at = 0
        while self._body_left and at < len(parts):
            count = self._body_some(parts, at, deadline)
            got += count
            at = advance(parts, at, count)
        if self._body_left and self._ended(deadline):
            self._body_left = 0
        self._look_at_rest()
        return got + (1 if self._body_left else 0)

    def read_text(self, bytes_max: int, deadline: float) -> bytes:
        """The body, or the beginning of one that is longer than `bytes_max`."""
        open_ended = self._chunked or self._body_left < 0
        text = memoryview(bytearray(bytes_max if open_ended else min(bytes_max, self._body_left)))
        if not self._chunked and self._body_left > bytes_max:
            self._fill([text], deadline)
            return bytes(text)
        return bytes(text[: min(self.read_into([text], deadline), text.nbytes)])

    def _fill(self, parts: list[memoryview], deadline: float) -> None:
        at = 0
        while at < len(parts) and parts[at].nbytes:
            at = advance(parts, at, self._body_some(parts, at, deadline))

    def _body_some(self, parts: list[memoryview], at: int, deadline: float) -> int:
        """Move some of the body into the parts from `at` on: first the read-ahead, then from the socket. 0 only if the
        end of the connection ends the body."""
        left = self._body_left
        held = self._end - self._begin
        if held:
            count = min(held, parts[at].nbytes, held if left < 0 else left)
            parts[at][:count] = memoryview(self._ahead)[self._begin : self._begin + count]
            self._begin += count
        else:
            targets = parts[at : at + BUFFERS_MAX] if left < 0 else _cut(parts[at : at + BUFFERS_MAX], left)
            try:
                count = self._receive(targets, deadline, True, whole=left > 0)
            except ClosedError:
                if left >= 0:
                    raise
                self._body_left = 0
                return 0
        if left > 0:
            self._body_left -= count
            if not self._body_left and self._chunked:
                self._chunk_end(deadline)
        return count

    def _ended(self, deadline: float) -> bool:
        """Whether a body that only the end of the connection ends has ended."""
        if self._body_left > 0 or self._end > self._begin:
            return False
        try:
            self._more(deadline, True)
        except ClosedError:
            return True
        return False

    def _chunk_size(self, deadline: float) -> int:
        """The size of the next chunk; with the last one of size 0, its trailer is read as well."""
        line = self._line(_CHUNK_LINE_MAX, deadline)
        found = _SIZE.fullmatch(line)
        if found is None:
            raise WireError(f"a chunk begins with {line[:40]!r}")
        size = int(found[1], 16)
        if not size:
            room = HEAD_BYTES_MAX
            while line := self._line(room, deadline):
                room -= len(line)
            self._chunked = False
        return size

    def _chunk_end(self, deadline: float) -> None:
        if self._line(_CHUNK_LINE_MAX, deadline):
            raise WireError("a chunk is longer than it says")
        self._body_left = self._chunk_size(deadline)

    def _look_at_rest(self) -> None:
        self.at_rest = not self._body_left and self._begin == self._end

    # --- the socket -----------------------------------------------------------------------------------------
    def _receive(self, parts: list[memoryview], deadline: float, begun: bool, whole: bool = False) -> int:
        """At least one byte; with `whole` all of the parts, where the socket can."""
        sock = self.sock
        if isinstance(sock, ssl.SSLSocket) or not whole:
            sock.settimeout(left_s(deadline))
            count = sock.recv_into(parts[0][:_ONE_RECEIVE_BYTES])
        else:
            count = receive_into(sock, parts, deadline, whole=True)
        if not count:
            raise ClosedError("the connection ended within an answer" if begun else "the connection was closed", begun)
        return count


def _head_of(lines: Sequence[bytes], method: str) -> Head:
    """Parse the lines of a head. Raises `WireError` if two readers could understand them differently."""
    status = _STATUS.fullmatch(lines[0])
    if status is None:
        raise WireError(f"an answer begins with {lines[0][:40]!r}")
    headers: dict[str, str] = {}
    for line in lines[1:]:
        name, colon, value = line.partition(b":")
        if not colon or not _NAME.fullmatch(name) or b"\r" in line or b"\0" in line:
            raise WireError(f"a header reads {line[:40]!r}")
        key, text = name.decode("ascii").lower(), value.strip(b" \t").decode("latin-1")
        headers[key] = f"{headers[key]}, {text}" if key in headers else text
    code = int(status[2])
    connection = {part.strip().lower() for part in headers.get("connection", "").split(",")}
    keeps = "close" not in connection and (status[1] == b"1" or "keep-alive" in connection)
    lengths = {part.strip() for part in headers["content-length"].split(",")} if "content-length" in headers else set()
    if len(lengths) > 1 or not all(part.isascii() and part.isdigit() and len(part) < 19 for part in lengths):
        raise WireError(f"the length of an answer reads {headers['content-length'][:40]!r}")
    coding = headers.get("transfer-encoding", "").strip().lower()
    if method == "HEAD" or code < 200 or code in (204, 304) or (method == "CONNECT" and code < 300):
        return Head(code, headers, keeps, 0, False)
    if coding:
        # With a length beside it, two readers may see two ends.
        return Head(code, headers, keeps and coding == "chunked" and not lengths, _UNTIL_CLOSED, coding == "chunked")
    if lengths:
        return Head(code, headers, keeps, int(lengths.pop()), False)
    return Head(code, headers, False, _UNTIL_CLOSED, False)


def _cut(parts: Sequence[memoryview], nbytes: int) -> list[memoryview]:
    """The first `nbytes` of the parts."""
    found = []
    for part in parts:
        found.append(part[:nbytes])
        nbytes -= found[-1].nbytes
        if not nbytes:
            break
    return found
