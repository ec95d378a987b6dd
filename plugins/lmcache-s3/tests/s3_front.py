"""A front of ours before an S3 service: passes HTTP through, and misbehaves when told to."""

from __future__ import annotations

import contextlib
import http.client
import socket
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple
from urllib.parse import urlsplit

_HOP = frozenset({"connection", "keep-alive", "transfer-encoding", "proxy-authorization", "te", "upgrade"})


class Seen(NamedTuple):
    """One request that came."""

    method: str
    path: str
    headers: dict[str, str]
    nbytes: int


def error_body(code: str) -> bytes:
    return f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>said the front</Message></Error>".encode()


class Fault(NamedTuple):
    """What becomes of a request: `status` with `code`, or `cut` of the answer, after `delay` is set."""

    status: int = 0
    code: str = ""
    reset: bool = False  # close before an answer
    keep: float = 1.0  # of the answer's body; below 1 the connection ends early
    headers: tuple[tuple[str, str], ...] = ()


Rule = Callable[[Seen], Fault | None]


class Front:
    """Listens on loopback; forwards to `upstream`. `rule(seen)` gives the fault of a request, or None."""

    def __init__(self, upstream: str) -> None:
        parts = urlsplit(upstream)
        self._upstream = (parts.hostname or "", parts.port or 80)
        self.rule: Rule | None = None
        self.seen: list[Seen] = []
        self.connections = 0  # that were made
        self.under_way = 0
        self.most_under_way = 0
        self._lock = threading.Lock()
        self._flowing = threading.Event()
        self._flowing.set()
        front = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True

            def setup(self) -> None:
                super().setup()
                front.connections += 1

            def handle_one_request(self) -> None:
                try:
                    super().handle_one_request()
                except OSError:
                    self.close_connection = True

            def log_message(self, format: str, *args: Any) -> None:
                pass

            def do_any(self) -> None:
                front.serve(self)

            do_GET = do_PUT = do_HEAD = do_POST = do_DELETE = do_any

        class Server(ThreadingHTTPServer):
            daemon_threads = True
            block_on_close = False
            request_queue_size = 64

            def handle_error(self, request: Any, client_address: Any) -> None:
                pass  # a client that went away; what the tests want to know they see themselves

        self._server = Server(("127.0.0.1", 0), Handler)
        self.port = int(self._server.server_address[1])
        self.url = f"http://127.0.0.1:{self.port}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)
        self._thread.start()

    def count(self) -> Counter[str]:
        return Counter(one.method for one in self.seen)

    @contextmanager
    def hanging(self) -> Iterator[None]:
        """Requests are taken, and none is answered."""
        self._flowing.clear()
        try:
            yield
        finally:
            self._flowing.set()

    def close(self) -> None:
        self._flowing.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    # --- one request --------------------------------------------------------------------------------------
    def serve(self, handler: BaseHTTPRequestHandler) -> None:
        length = int(handler.headers.get("Content-Length") or 0)
        body = handler.rfile.read(length) if length else b""
        seen = Seen(handler.command, handler.path, {k.lower(): v for k, v in handler.headers.items()}, length)
        with self._lock:
            self.seen.append(seen)
            self.under_way += 1
            self.most_under_way = max(self.most_under_way, self.under_way)
        try:
            hung = not self._flowing.is_set()
            self._flowing.wait()
            fault = self.rule(seen) if self.rule is not None else None
            if hung or (fault is not None and fault.reset):
                self._drop(handler)
            elif fault is not None and fault.status:
                answer = error_body(fault.code) if handler.command != "HEAD" and fault.code else b""
                self._answer(handler, fault.status, fault.headers, answer, 1.0)
            else:
                self._forward(handler, body, fault.keep if fault else 1.0)
        finally:
            with self._lock:
                self.under_way -= 1

    def _forward(self, handler: BaseHTTPRequestHandler, body: bytes, keep: float) -> None:
        upstream = http.client.HTTPConnection(*self._upstream, timeout=60)
        try:
            upstream.putrequest(handler.command, handler.path, skip_host=True, skip_accept_encoding=True)
            for name, value in handler.headers.items():
                if name.lower() not in _HOP and name.lower() != "expect":
                    upstream.putheader(name, value)
            upstream.endheaders(body or None)
            response = upstream.getresponse()
            headers = [(name, value) for name, value in response.getheaders() if name.lower() not in _HOP]
            self._answer(handler, response.status, headers, response.read(), keep)
        except (OSError, http.client.HTTPException):
            self._drop(handler)
        finally:
            upstream.close()

    def _answer(
        self,
        handler: BaseHTTPRequestHandler,
        status: int,
        headers: Sequence[tuple[str, str]],
        body: bytes,
        keep: float,
    ) -> None:
        handler.send_response_only(status)
        for name, value in headers:
            if name.lower() != "content-length" or handler.command == "HEAD":
                handler.send_header(name, value)
        if handler.command != "HEAD":
            handler.send_header("Content-Length", str(len(body)))
        handler.end_headers()
        if handler.command != "HEAD":
            handler.wfile.write(body[: int(len(body) * keep)])
        if keep < 1.0:
            self._drop(handler)

    def _drop(self, handler: BaseHTTPRequestHandler) -> None:
        handler.close_connection = True
        with contextlib.suppress(OSError):  # the client was quicker
            handler.connection.shutdown(socket.SHUT_RDWR)
