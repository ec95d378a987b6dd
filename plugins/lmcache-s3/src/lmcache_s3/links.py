"""Persistent connections: bytes from memoryviews and into memoryviews, each wait bounded by a deadline."""

from __future__ import annotations

import http.client
import select
import socket
import ssl
import struct
import threading
import time
from collections.abc import Mapping, Sequence

from lmcache_s3.account import Endpoint, Proxy
from lmcache_s3.answers import Answer, LinkError, read_error

ERROR_BYTES_MAX = 64 << 10  # of a body that is not an object
_ONE_RECEIVE_BYTES = 4 << 20  # a receive holds at most this between two looks at the deadline
_TIMEVAL = struct.Struct("@ll")
_TIME_MIN_S = 0.001
_PARTS_MAX = 512  # in one receive; the system allows 1,024


class StaleError(Exception):
    """A kept connection had been closed by the other side before it answered anything: try on a new one."""


class Link:
    """One connection. After an exception, or with `reusable` False, its state is unknown and it must be closed."""

    def __init__(self, connection: http.client.HTTPConnection) -> None:
        self._connection = connection
        self.used = False
        self.reusable = False

    @classmethod
    def open(cls, endpoint: Endpoint, tls: ssl.SSLContext | None, proxy: Proxy | None, timeout_s: float) -> Link:
        host, port = (proxy.host, proxy.port) if proxy else (endpoint.host, endpoint.port)
        connection: http.client.HTTPConnection
        if tls is not None:
            connection = http.client.HTTPSConnection(host, port, timeout=timeout_s, context=tls)
            if proxy:
                connection.set_tunnel(endpoint.host, endpoint.port, proxy.headers)
        else:
            connection = http.client.HTTPConnection(host, port, timeout=timeout_s)
        try:
            connection.connect()
        except BaseException:
            connection.close()
            raise
        return cls(connection)

    @property
    def dropped(self) -> bool:
        """An idle connection that can be read has been closed, or holds an answer that nobody asked for."""
        sock = self._connection.sock
        if sock is None:
            return True
        poll = select.poll()
        poll.register(sock, select.POLLIN)
        return bool(poll.poll(0))

    def exchange(
        self,
        method: str,
        target: str,
        headers: Mapping[str, str],
        send: Sequence[memoryview],
        into: Sequence[memoryview],
        deadline: float,
    ) -> Answer:
        """Send one request with the buffers of `send` as its body; an object that comes back goes to `into`."""
        connection, self.reusable = self._connection, False
        sock = connection.sock
        assert isinstance(sock, socket.socket)
        began, self.used = self.used, True
        try:
            sock.settimeout(_left_s(deadline))
            connection.putrequest(method, target, skip_host=True, skip_accept_encoding=True)
            for name, value in headers.items():
                connection.putheader(name, value)
            try:
                connection.endheaders()
                for view in send:
                    sock.settimeout(_left_s(deadline))
                    sock.sendall(view)
            except (BrokenPipeError, ConnectionResetError):
                # A service that refuses a request may say so, and close, before it has read the body.
                if not sum(view.nbytes for view in send):
                    raise
            _acknowledge(sock)
            sock.settimeout(_left_s(deadline))
            response = connection.getresponse()
        except (ConnectionError, http.client.BadStatusLine) as error:
            if began and not isinstance(error, ConnectionRefusedError):
                raise StaleError from error
            raise
        return self._read(response, sock, into, deadline, method)

    def _read(
        self,
        response: http.client.HTTPResponse,
        sock: socket.socket,
        into: Sequence[memoryview],
        deadline: float,
        method: str,
    ) -> Answer:
        _acknowledge(sock)
        headers = {name.lower(): value for name, value in response.getheaders()}
        closes = response.will_close
        if method == "GET" and response.status in (200, 206):
            nbytes, whole = _fill(response, sock, into, deadline)
            response.close()
            self.reusable = whole and not closes
            return Answer(response.status, headers, nbytes)
        sock.settimeout(_left_s(deadline))
        body = response.read(ERROR_BYTES_MAX)
        self.reusable = not closes and response.isclosed()
        code, message = read_error(body) if response.status >= 300 else ("", "")
        return Answer(response.status, headers, len(body), code, message)

    def close(self) -> None:
        self._connection.close()


def _acknowledge(sock: socket.socket) -> None:
    """Do not hold acknowledgements back. A service that sends head and body of a short answer one by one waits for ours
    of the head, and we would wait 40 ms for a chance to send it with something. The system forgets this soon."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK, 1)


def _fill(
    response: http.client.HTTPResponse, sock: socket.socket, into: Sequence[memoryview], deadline: float
) -> tuple[int, bool]:
    """Bytes of the body, and whether it was read to its end. A body larger than the buffers is not read."""
    room, length = sum(view.nbytes for view in into), response.length
    if length is None:
        return _fill_unknown(response, sock, into, deadline)
    if length > room:
        return length, False
    parts = _cut(into, length)
    # What came with the head first; then the reader holds nothing, and the socket may be read past it.
    got = at = 0
    sock.settimeout(_left_s(deadline))
    held = len(response.fp.peek(1)) if length else 0
    while got < length:
        if got < held or isinstance(sock, ssl.SSLSocket):
            sock.settimeout(_left_s(deadline))
            count = response.fp.readinto1(parts[at][: held - got] if got < held else parts[at])
        else:
            count = _receive_all(sock, parts[at : at + _PARTS_MAX], deadline)
        if not count:
            raise LinkError(f"the connection ended after {got:,} of {length:,} bytes")
        got += count
        at = _advance(parts, at, count)
    return got, True


def _receive_all(sock: socket.socket, parts: list[memoryview], deadline: float) -> int:
    """One call for all of them. The kernel keeps the time: a socket with a Python time-out does not block, and would
    return with every piece that arrives."""
    left = max(_left_s(deadline), _TIME_MIN_S)
    sock.settimeout(None)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _TIMEVAL.pack(int(left), int(left % 1 * 1e6)))
    try:
        return sock.recvmsg_into(parts, 0, socket.MSG_WAITALL)[0]
    except BlockingIOError:
        raise TimeoutError from None


def _cut(views: Sequence[memoryview], nbytes: int) -> list[memoryview]:
    """The first `nbytes` of the views."""
    parts = []
    for view in views:
        parts.append(view[:nbytes])
        nbytes -= parts[-1].nbytes
    return [part for part in parts if part.nbytes]


def _advance(parts: list[memoryview], at: int, nbytes: int) -> int:
    """Where to go on once `nbytes` from `at` have come; a part that is half full is cut."""
    while at < len(parts) and nbytes >= parts[at].nbytes:
        nbytes -= parts[at].nbytes
        at += 1
    if nbytes:
        parts[at] = parts[at][nbytes:]
    return at


def _fill_unknown(
    response: http.client.HTTPResponse, sock: socket.socket, into: Sequence[memoryview], deadline: float
) -> tuple[int, bool]:
    """A body that does not say its length: chunked, or up to the end of the connection."""
    got = 0
    for view in into:
        at = 0
        while at < view.nbytes:
            sock.settimeout(_left_s(deadline))
            count = response.readinto(view[at : at + _ONE_RECEIVE_BYTES])
            if not count:
                return got, True
            at += count
            got += count
    sock.settimeout(_left_s(deadline))
    more = response.read(1)
    return got + len(more), not more


def _left_s(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError
    return left


class Links:
    """Idle connections to one endpoint. Thread-safe; the newest is used first, so that the others may go."""

    def __init__(self, endpoint: Endpoint, tls: ssl.SSLContext | None, proxy: Proxy | None) -> None:
        self._way = (endpoint, tls, proxy)
        self._idle: list[Link] = []
        self._lock = threading.Lock()
        self._closed = False

    def take(self, timeout_s: float) -> Link:
        """An idle connection, or a new one."""
        while True:
            with self._lock:
                link = self._idle.pop() if self._idle else None
            if link is None:
                return Link.open(*self._way, timeout_s)
            if not link.dropped:
                return link
            link.close()

    def give(self, link: Link) -> None:
        """Keep a connection whose exchange has ended well; close any other."""
        with self._lock:
            if link.reusable and not self._closed:
                self._idle.append(link)
                return
        link.close()

    def drop_idle(self) -> None:
        """The other side has gone away: what is idle was opened to its former life."""
        with self._lock:
            idle, self._idle = self._idle, []
        for link in idle:
            link.close()

    def close(self) -> None:
        with self._lock:
            self._closed = True
        self.drop_idle()
