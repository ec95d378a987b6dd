"""The HTTP session in which spans go to a collector. Imported only if a server exports: needs `requests`.

The SDK's own session keeps an answer in memory however long it is, has a time limit only for each read, takes a
redirection for success, and does not look at what the collector says of spans that it refused.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import requests
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse
from requests.adapters import HTTPAdapter
from urllib3.connection import HTTPConnection, HTTPSConnection
from urllib3.connectionpool import HTTPConnectionPool, HTTPSConnectionPool

_ANSWER_BYTES_MAX = 64 << 10  # of a collector's answer; an OTLP answer has a few bytes
_WORDS_MAX = 200  # characters of what a collector says, for the log


class Answer(NamedTuple):
    """The collector's last answer."""

    accepted: bool
    rejected: int = 0  # spans that it says it refused, among those that it accepted
    message: str = ""


class CollectorSession(requests.Session):
    """For one exporter, which calls it from one thread at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.answer = Answer(False)
        self._lines: weakref.WeakSet[socket.socket] = weakref.WeakSet()
        self._lock = threading.Lock()  # guards the lines, and whether time is up
        self._late = False
        self.headers["Accept-Encoding"] = "identity"  # nothing to unpack, of whatever size
        self.hooks["response"].append(self._hear)
        adapter = _Adapter(self._connected)
        self.mount("http://", adapter)
        self.mount("https://", adapter)

    @contextlib.contextmanager
    def within(self, limit_s: float) -> Iterator[None]:
        """For all that is done meanwhile, repetitions included: after `limit_s` the collector is hung up on."""
        self.answer, self._late = Answer(False), False
        timer = threading.Timer(limit_s, self._hang_up)
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()
            timer.join()  # it does not cut what comes next

    def get_redirect_target(self, resp: requests.Response) -> None:
        """None: our headers, which may be secret, go nowhere else."""

    def _connected(self, line: socket.socket) -> None:
        with self._lock:
            self._lines.add(line)
            if self._late:
                _cut(line)

    def _hang_up(self) -> None:
        with self._lock:
            self._late = True
            for line in self._lines:
                _cut(line)

    def _hear(self, response: requests.Response, **_: Any) -> None:
        """Read a normal answer to its end, for the connection to be kept, and hang up on a longer one."""
        body = response.raw.read(_ANSWER_BYTES_MAX)
        cut = len(body) < _ANSWER_BYTES_MAX and bool(response.raw.length_remaining)
        if not response.raw.closed:
            response.close()
        if not 200 <= response.status_code < 300:
            self.answer = Answer(False, message=f"it answered {response.status_code}")
        elif cut or self._late:
            self.answer = Answer(False, message="its answer has no end")
        elif response.headers.get("Content-Type", "").startswith("application/x-protobuf"):
            self.answer = _read(body)
        else:  # some say no more than that they have them
            self.answer = Answer(True)


def _read(body: bytes) -> Answer:
    try:
        partial = ExportTraceServiceResponse.FromString(body).partial_success
    except Exception:  # noqa: BLE001  # protobuf's own, in another module in each of its versions
        return Answer(True, message="it accepted them with an answer that is not OTLP's")
    message = f"it says {partial.error_message[:_WORDS_MAX]!r}" if partial.error_message else ""
    return Answer(True, max(0, partial.rejected_spans), message)


def _cut(line: socket.socket) -> None:
    """End its reads and writes, in whatever thread. For TLS, too, without a word of TLS: the other thread is in it."""
    with contextlib.suppress(OSError):  # it was closed already
        socket.socket.shutdown(line, socket.SHUT_RDWR)


class _Adapter(HTTPAdapter):
    """Tells of each connection that it makes."""

    def __init__(self, connected: Callable[[socket.socket], None]) -> None:
        class Plain(HTTPConnection):
            def connect(self) -> None:
                super().connect()
                connected(self.sock)

        class Secure(HTTPSConnection):
            def connect(self) -> None:
                super().connect()
                connected(self.sock)

        class PlainPool(HTTPConnectionPool):
            ConnectionCls = Plain

        class SecurePool(HTTPSConnectionPool):
            ConnectionCls = Secure

        self._pools = {"http": PlainPool, "https": SecurePool}
        super().__init__()

    def init_poolmanager(self, *args: Any, **more: Any) -> None:
        super().init_poolmanager(*args, **more)
        self.poolmanager.pool_classes_by_scheme = self._pools

    def proxy_manager_for(self, *args: Any, **more: Any) -> Any:
        manager = super().proxy_manager_for(*args, **more)
        manager.pool_classes_by_scheme = self._pools
        return manager
