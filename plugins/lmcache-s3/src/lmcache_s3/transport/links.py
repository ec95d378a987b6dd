"""Persistent connections: send from memoryviews and receive into them, each call bounded by one deadline. A connection
is kept only if every byte received belongs to an answer that was read to its end, and every byte of the request was
sent. Otherwise the next request could get another one's answer.
"""

from __future__ import annotations

import select
import socket
import ssl
import threading
import time
from collections.abc import Mapping, Sequence

from lmcache_core.tiers import budget
from lmcache_core.tiers.streams import left_s
from lmcache_s3.errors import Answer, read_error
from lmcache_s3.transport.account import Endpoint, Proxy
from lmcache_s3.transport.wire import ClosedError, Stream, request_head

ERROR_BYTES_MAX = 64 << 10  # of a body that is not an object


class StaleError(Exception):
    """The other side had closed a kept connection before it answered: try on a new one."""


class TunnelError(OSError):
    """The proxy did not open a way to the service."""


class Link:
    """One connection. With `reusable` False, as after an exception, it must be closed."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self.used = False
        self.reusable = False

    @classmethod
    def open(cls, endpoint: Endpoint, tls: ssl.SSLContext | None, proxy: Proxy | None, deadline: float) -> Link:
        """Connected, through the proxy and with TLS where there are any, by the deadline. Raises `OSError`."""
        host, port = (proxy.host, proxy.port) if proxy else (endpoint.host, endpoint.port)
        sock: socket.socket = budget.connect(host, port, deadline)
        try:
            if tls is not None:
                if proxy:
                    _tunnel(sock, endpoint, proxy, deadline)
                sock.settimeout(left_s(deadline))
                sock = tls.wrap_socket(sock, server_hostname=endpoint.host)
        except BaseException:
            sock.close()
            raise
        return cls(Stream(sock))

    @property
    def dropped(self) -> bool:
        """An idle connection that is readable has been closed, or has an answer that was not requested."""
        sock = self._stream.sock
        if isinstance(sock, ssl.SSLSocket) and sock.pending():
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
        """Send one request with the buffers of `send` as its body; a returned object goes to `into`."""
        stream, self.reusable = self._stream, False
        began, self.used = self.used, True
        try:
            # A service that refuses a request may answer, and close, before it has read the body.
            taken = stream.send(request_head(method, target, headers), send, deadline)
            _acknowledge(stream.sock)
            head = stream.read_head(method, deadline)
        except ConnectionError as error:
            if began and not (isinstance(error, ClosedError) and error.begun):
                raise StaleError from error
            raise
        _acknowledge(stream.sock)
        if method == "GET" and head.status in (200, 206):
            answer = Answer(head.status, head.headers, stream.read_into(into, deadline))
        else:
            body = stream.read_text(ERROR_BYTES_MAX, deadline)
            code, message = read_error(body) if head.status >= 300 else ("", "")
            answer = Answer(head.status, head.headers, len(body), code, message)
        self.reusable = taken and head.keeps and stream.at_rest
        return answer

    def close(self) -> None:
        self._stream.sock.close()


def _tunnel(sock: socket.socket, endpoint: Endpoint, proxy: Proxy, deadline: float) -> None:
    """Ask the proxy for a tunnel to the service; the socket then leads there."""
    stream, there = Stream(sock), f"{endpoint.bracketed}:{endpoint.port}"
    stream.send(request_head("CONNECT", there, {"Host": there, **proxy.headers}), (), deadline)
    head = stream.read_head("CONNECT", deadline)
    if not 200 <= head.status < 300:
        raise TunnelError(f"the proxy refused a tunnel with status {head.status}")
    if not stream.at_rest:
        raise TunnelError("the proxy sent more than its answer")


def _acknowledge(sock: socket.socket) -> None:
    """Do not delay acknowledgements. A service that sends head and body of a short answer separately waits for our
    acknowledgement of the head, which the system would delay by 40 ms. The option does not last, so it is set again."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK, 1)


class Links:
    """Idle connections to one endpoint. Thread-safe; the newest is used first, so that the others can time out."""

    def __init__(self, endpoint: Endpoint, tls: ssl.SSLContext | None, proxy: Proxy | None) -> None:
        self._way = (endpoint, tls, proxy)
        self._idle: list[Link] = []
        self._lock = threading.Lock()
        self._closed = False

    def take(self, deadline: float, connect_timeout_s: float) -> Link:
        """An idle connection, or a new one."""
        while True:
            with self._lock:
                link = self._idle.pop() if self._idle else None
            if link is None:
                return Link.open(*self._way, min(deadline, time.monotonic() + connect_timeout_s))
            if not link.dropped:
                return link
            link.close()

    def give(self, link: Link) -> None:
        """Keep a connection after a complete exchange; close any other."""
        with self._lock:
            if link.reusable and not self._closed:
                self._idle.append(link)
                return
        link.close()

    def drop_idle(self) -> None:
        """The other side went away: idle connections belong to its previous process."""
        with self._lock:
            idle, self._idle = self._idle, []
        for link in idle:
            link.close()

    def close(self) -> None:
        with self._lock:
            self._closed = True
        self.drop_idle()
