"""A small router for two vLLM engines with one cache: one computes prompts, the other goes on with them.

    python examples/prefill_decode_router.py --prefill http://127.0.0.1:8100 --decode http://127.0.0.1:8200 --port 8000

Only the standard library. It shows what a router has to send; for production take one that also knows loads and health.
`--mode together`: both engines get a request at once, and the second one waits for the first block by block. `after`:
the second one gets it when the first has answered, with what that answer says. `across`: the same, but the second one
is on another node, and looks the prompt up as any other.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import socket
import threading
from collections.abc import Iterator
from http.client import HTTPConnection, HTTPException, HTTPResponse
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit
from uuid import uuid4

Json = dict[str, Any]

ROUTED = ("/v1/completions", "/v1/chat/completions")
BODY_BYTES_MAX = 64 << 20
TIMEOUT_S = 600.0  # without a byte from an engine
ERRORS = (OSError, HTTPException)


def for_prefill(body: Json, transfer_id: str) -> Json:
    """The request for the engine that computes the prompt: one token, for another engine."""
    short = {name: value for name, value in body.items() if name not in ("stream_options", "min_tokens")}
    if "max_completion_tokens" in short:
        short["max_completion_tokens"] = 1
    params = {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": transfer_id}
    return _with(params, {**short, "max_tokens": 1, "n": 1, "stream": False})


def for_decode(body: Json, transfer_id: str) -> Json:
    """The request for the engine that decodes while the other one computes."""
    params = {"do_remote_decode": False, "do_remote_prefill": True, "transfer_id": transfer_id}
    return _with(params, body)


def _with(params: Json, body: Json) -> Json:
    """With these parameters beside those of the client, which limit what the cache may do."""
    return {**body, "kv_transfer_params": (body.get("kv_transfer_params") or {}) | params}


class Call:
    """One request to an engine. `stop` ends it before its answer begins, from any thread."""

    def __init__(self, engine: str, method: str, path: str, body: bytes, headers: dict[str, str]) -> None:
        where = urlsplit(engine)
        self._connection = HTTPConnection(where.hostname or "", where.port or 80, timeout=TIMEOUT_S)
        self._request = (method, path, body or None, headers)
        self._lock = threading.Lock()
        self._begun = False
        self.stopped = False

    def response(self) -> HTTPResponse:
        """Send it, and wait for the first line of the answer."""
        self._connection.connect()
        if self.stopped:
            raise ConnectionAbortedError("stopped before it was sent")
        method, path, body, headers = self._request
        self._connection.request(method, path, body, headers)
        response = self._connection.getresponse()
        with self._lock:
            if self.stopped:
                raise ConnectionAbortedError("stopped while the answer began")
            self._begun = True
        return response

    def stop(self) -> None:
        """Whoever waits for the answer gets an error, and the engine drops the request."""
        with self._lock:
            if self._begun:
                return
            self.stopped = True
        with contextlib.suppress(OSError, AttributeError):  # it is closed, or not open yet
            self._connection.sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """After the answer."""
        self._connection.close()


class Router(ThreadingHTTPServer):
    """Which engine is next."""

    daemon_threads = True

    def __init__(self, address: tuple[str, int], prefill: list[str], decode: list[str], mode: str) -> None:
        super().__init__(address, Handler)
        self.mode = mode
        self._lock = threading.Lock()
        self._prefill, self._decode = itertools.cycle(prefill), itertools.cycle(decode)

    def next_prefill(self) -> str:
        """An engine that computes prompts."""
        with self._lock:
            return next(self._prefill)

    def next_decode(self) -> str:
        """An engine that decodes."""
        with self._lock:
            return next(self._decode)


class Handler(BaseHTTPRequestHandler):
    """One request of a client."""

    server: Router

    def do_GET(self) -> None:
        """Models, health, metrics: those of an engine that decodes."""
        self._pass_on(Call(self.server.next_decode(), "GET", self.path, b"", {}))

    def do_POST(self) -> None:
        """Completions take both engines, everything else one."""
        nbytes = int(self.headers.get("Content-Length") or 0)
        if nbytes > BODY_BYTES_MAX:
            return self.send_error(413)
        given = self.rfile.read(nbytes)
        if self.path not in ROUTED:
            return self._pass_on(self._decode_call(given))
        try:
            body = json.loads(given)
        except ValueError:
            return self.send_error(400, "the body is no JSON")
        if not isinstance(body, dict):
            return self.send_error(400, "the body is no JSON object")
        limits = body.get("kv_transfer_params") or {}
        if not isinstance(limits, dict):
            return self.send_error(400, "kv_transfer_params is no JSON object")
        # what the first engine may not store, the second one would wait for in vain, until the first says so
        if self.server.mode == "together" and limits.get("max_offload_tokens") is None:
            return self._together(body)
        answer = self._prefilled(body, uuid4().hex)
        params = None if self.server.mode == "across" or answer is None else answer.get("kv_transfer_params")
        return self._pass_on(self._decode_call(json.dumps(_with(params, body) if params else body)))

    def _together(self, body: Json) -> None:
        """If the first engine fails, the second one computes the prompt, at once rather than when its time is over."""
        transfer_id = uuid4().hex
        call = self._decode_call(json.dumps(for_decode(body, transfer_id)))

        def prefill() -> None:
            if self._prefilled(body, transfer_id) is None:
                call.stop()

        threading.Thread(target=prefill, daemon=True).start()
        try:
            response = call.response()
        except ERRORS as error:
            call.close()
            if not call.stopped:
                return self._unreachable(error)
            return self._pass_on(self._decode_call(json.dumps(body)))
        return self._answer(call, response)

    def _prefilled(self, body: Json, transfer_id: str) -> Json | None:
        """The answer of the engine that has computed the prompt; None: it failed."""
        content = json.dumps(for_prefill(body, transfer_id)).encode()
        call = Call(self.server.next_prefill(), "POST", self.path, content, self._headers())
        try:
            response = call.response()
            answer = json.loads(response.read())
            return answer if response.status == 200 and isinstance(answer, dict) else None
        except (*ERRORS, ValueError) as error:
            self.log_error("transfer %s: the prompt was not computed: %s", transfer_id, error)
            return None
        finally:
            call.close()

    def _headers(self) -> dict[str, str]:
        kept = ("Authorization", "X-Request-Id", "traceparent", "tracestate")
        return {"Content-Type": "application/json"} | {name: self.headers[name] for name in kept if self.headers[name]}

    def _decode_call(self, content: bytes | str) -> Call:
        raw = content.encode() if isinstance(content, str) else content
        return Call(self.server.next_decode(), "POST", self.path, raw, self._headers())

    def _pass_on(self, call: Call) -> None:
        try:
            response = call.response()
        except ERRORS as error:
            call.close()
            return self._unreachable(error)
        return self._answer(call, response)

    def _unreachable(self, error: Exception) -> None:
        self.send_error(502, f"the engine does not answer: {error}")

    def _answer(self, call: Call, response: HTTPResponse) -> None:
        """What the engine answers, as it comes. A client that leaves ends its request."""
        try:
            self.send_response(response.status)
            for name in ("Content-Type", "Content-Length"):
                if value := response.headers[name]:
                    self.send_header(name, value)
            self.end_headers()
            for part in _parts(response):
                self.wfile.write(part)
        except ERRORS as error:  # after the first byte there is no other way to tell the client than to hang up
            self.close_connection = True
            self.log_error("an answer ended early: %s", error)
        finally:
            call.close()


def _parts(response: HTTPResponse) -> Iterator[bytes]:
    while part := response.read1(65536):
        yield part


def main() -> None:
    """Until it is interrupted."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prefill", action="append", required=True, metavar="URL", help="repeatable: taken in turn")
    parser.add_argument("--decode", action="append", required=True, metavar="URL", help="repeatable: taken in turn")
    parser.add_argument("--mode", choices=("together", "after", "across"), default="together")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    given = parser.parse_args()
    with Router((given.host, given.port), given.prefill, given.decode, given.mode) as router:
        print(f"listening on {given.host}:{router.server_address[1]}", flush=True)
        with contextlib.suppress(KeyboardInterrupt):
            router.serve_forever()


if __name__ == "__main__":
    main()
