"""Servers that misbehave as told: they trickle, announce, cut, repeat, or say nothing. HTTP and RESP on loopback.

    def script(talk):
        while request := talk.request():
            talk.send(answer(200, b"content"), trickled=True)

    with Scripted(script) as server: …  # server.port

A script serves one connection, in a thread of its own, and may wait for `talk.over`: the test has ended.
"""

from __future__ import annotations

import contextlib
import select
import socket
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any, NamedTuple, TypeVar
from urllib.parse import parse_qs, urlsplit

import pytest

T = TypeVar("T")
ENDS_WITHIN_S = 60.0  # a safety net: what ends at all ends within a few seconds
TRICKLE_S = 0.02  # between two bytes


class Request(NamedTuple):
    """One HTTP request, whole."""

    method: str
    target: str
    headers: dict[str, str]
    body: bytes

    @property
    def path(self) -> str:
        return urlsplit(self.target).path

    @property
    def query(self) -> dict[str, str]:
        parts = parse_qs(urlsplit(self.target).query, keep_blank_values=True)
        return {name: values[0] for name, values in parts.items()}


class Talk:
    """One connection, the server's side. Reads give None once the other side has gone."""

    def __init__(self, sock: socket.socket, number: int, over: threading.Event) -> None:
        self.sock = sock
        self.number = number  # of the connection, from 0 on
        self.over = over
        self._file = sock.makefile("rb")

    def request(self) -> Request | None:
        """The next HTTP request."""
        first = self._file.readline().split()
        if len(first) != 3:
            return None
        headers: dict[str, str] = {}
        while (line := self._file.readline().strip()) != b"":
            name, _, value = line.decode("latin-1").partition(":")
            headers[name.lower()] = value.strip()
        body = self._file.read(int(headers.get("content-length", 0)))
        return Request(first[0].decode(), first[1].decode(), headers, body)

    def command(self) -> list[bytes] | None:
        """The next RESP command, an array of bulk strings."""
        line = self._file.readline()
        if not line.startswith(b"*"):
            return None
        words = []
        for _ in range(int(line[1:])):
            words.append(self._file.read(int(self._file.readline()[1:])))
            self._file.read(2)
        return words

    def asked_again(self, within_s: float) -> bool:
        """Whether more comes from the other side, within a time."""
        return bool(self._file.peek(1)) if select.select([self.sock], [], [], within_s)[0] else False  # type: ignore[attr-defined]

    def send(self, *parts: bytes, trickled: bool = False) -> None:
        """Send all of it; `trickled`, one byte after the other, slowly."""
        data = b"".join(parts)
        pieces: Iterable[bytes] = (data[i : i + 1] for i in range(len(data))) if trickled else [data]
        for piece in pieces:
            self.sock.sendall(piece)
            if trickled and self.over.wait(TRICKLE_S):
                return

    def close(self) -> None:
        """End the connection; with a reset, if there is something that was sent and not read."""
        with contextlib.suppress(OSError, ValueError):
            self._file.close()
            self.sock.close()

    def trickle_for_ever(self, byte: bytes) -> None:
        """Send one byte after the other until the other side goes away, or the test has ended."""
        while not self.over.wait(TRICKLE_S):
            self.sock.sendall(byte)


class Scripted:
    """A server on loopback whose connections are served by `script`. What a script raises ends its connection."""

    def __init__(self, script: Callable[[Talk], None]) -> None:
        self._script = script
        self.over = threading.Event()
        self.connections = 0
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=64)
        self.port: int = self._listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._socks: list[socket.socket] = []
        self._lock = threading.Lock()
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while not self.over.is_set():
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with self._lock:
                self._socks.append(sock)
                talk = Talk(sock, self.connections, self.over)
                self.connections += 1
            threading.Thread(target=self._serve, args=(talk,), daemon=True).start()

    def _serve(self, talk: Talk) -> None:
        with contextlib.suppress(OSError, ValueError):  # the other side went away
            self._script(talk)
        talk.close()

    def close(self) -> None:
        self.over.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        with self._lock:
            for sock in self._socks:
                with contextlib.suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)
                sock.close()

    def __enter__(self) -> Scripted:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def answer(status: int, body: bytes = b"", *headers: str, length: bool = True) -> bytes:
    """An HTTP answer."""
    lines = [f"HTTP/1.1 {status} Said", *headers, *([f"Content-Length: {len(body)}"] if length else [])]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


def chunked(body: bytes, size: int) -> bytes:
    """The body in chunks, with an extension and a trailer, as a service may send them."""
    pieces = [body[at : at + size] for at in range(0, len(body), size)]
    return b"".join(b"%x;name=value\r\n%b\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\nX-Trailer: 1\r\n\r\n"


@contextmanager
def silent_addresses(count: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, int]]:
    """A host with `count` addresses that answer no connection at all; its name and port."""
    name = "silent.test"
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.socket())
        listener.bind(("0.0.0.0", 0))  # all of 127/8 leads here
        listener.listen(0)
        port = listener.getsockname()[1]
        for _ in range(4):  # a queue that is full takes nobody else
            filler = stack.enter_context(socket.socket())
            filler.setblocking(False)
            filler.connect_ex(("127.0.0.1", port))
        known = socket.getaddrinfo

        def resolve(host: str, *arguments: Any, **more: Any) -> object:
            if host not in (name, name.encode()):
                return known(host, *arguments, **more)
            addresses = [f"127.0.{1 + i // 250}.{1 + i % 250}" for i in range(count)]
            return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port)) for address in addresses]

        monkeypatch.setattr(socket, "getaddrinfo", resolve)
        yield name, port


def ends(call: Callable[[], T]) -> T:
    """The call's result, or what it raised. Fails if it does not end, however long a server goes on."""
    done: list[T] = []
    failed: list[BaseException] = []

    def run() -> None:
        try:
            done.append(call())
        except BaseException as error:  # noqa: BLE001 - raised again below
            failed.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(ENDS_WITHIN_S)
    assert not thread.is_alive(), "the call did not end"
    if failed:
        raise failed[0]
    return done[0]
