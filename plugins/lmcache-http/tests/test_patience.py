"""Connections that send nothing or half a request, or do not read the answer: they are closed after a while, and keep
nobody out until then."""

from __future__ import annotations

import asyncio
import contextlib
import select
import socket
import ssl
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import uvicorn

from lmcache_http import patience
from lmcache_http.__main__ import where_from
from lmcache_http.settings import HttpSettings

MUCH = 4 << 20  # bytes: a socket's and uvicorn's buffers are far smaller
FOR_EVER_S = 1e6
ASKED = b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"
UNFINISHED = {
    "nothing": b"",
    "half a head": b"GET / HT",
    "half a body": b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\nhalf",
    "half a second request": ASKED + b"GET / HT",
}


async def app(scope: Any, receive: Callable[[], Any], send: Callable[[Any], Any]) -> None:
    """Answers once it has the whole body."""
    while (await receive()).get("more_body"):
        pass
    await send({"type": "http.response.start", "status": 204, "headers": []})
    await send({"type": "http.response.body", "body": b""})


async def much(scope: Any, receive: Callable[[], Any], send: Callable[[Any], Any]) -> None:
    """Has an answer that no buffer holds."""
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % MUCH)]})
    await send({"type": "http.response.body", "body": bytes(MUCH)})


@pytest.fixture
def connect(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> Iterator[Callable[[], socket.socket]]:
    """Connections to what is served with the settings of the command."""
    monkeypatch.setattr(patience, "REQUEST_S", getattr(request, "param", {}).get("request_s", 0.2))
    monkeypatch.setattr(patience, "ANSWER_S", 0.2)
    path = str(tmp_path / "http")
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(path)
    listening.listen()
    where = where_from(HttpSettings(unix_socket=Path(path)))
    server = uvicorn.Server(uvicorn.Config(getattr(request, "param", {}).get("app", app), **where))

    def serve() -> None:
        with asyncio.Runner(loop_factory=patience.PatientLoop) as runner:
            runner.run(server.serve([listening]))

    thread = threading.Thread(target=serve)
    thread.start()
    opened: list[socket.socket] = []

    def one() -> socket.socket:
        opened.append(made := socket.socket(socket.AF_UNIX))
        made.connect(path)  # with no time-out yet, which would turn a full backlog into an error
        made.settimeout(60)
        return made

    yield one
    for each in opened:
        each.close()
    server.should_exit = True
    thread.join(60)
    listening.close()


@pytest.mark.parametrize("sent", UNFINISHED.values(), ids=UNFINISHED)
def test_a_request_that_does_not_come_to_its_end_loses_its_connection(
    sent: bytes, connect: Callable[[], socket.socket]
) -> None:
    asking = connect()
    asking.sendall(sent)
    said = b""
    while more := asking.recv(4096):  # until it is closed
        said += more
    assert said.startswith(b"HTTP/1.1 204") == sent.startswith(ASKED)


def test_who_opens_many_connections_and_says_nothing_keeps_nobody_out_for_long(
    connect: Callable[[], socket.socket],
) -> None:
    silent = [connect() for _ in range(300)]
    for each in silent:
        assert each.recv(1) == b""  # closed
    asking = connect()
    asking.sendall(ASKED)
    assert asking.recv(4096).startswith(b"HTTP/1.1 204")


@pytest.mark.parametrize("connect", [{"request_s": FOR_EVER_S}], indirect=True)
def test_who_asks_is_answered_at_once_whoever_else_says_nothing(connect: Callable[[], socket.socket]) -> None:
    silent = [connect() for _ in range(300)]
    for _ in range(3):
        asking = connect()
        asking.sendall(ASKED)
        assert asking.recv(4096).startswith(b"HTTP/1.1 204")
        asking.close()
    assert silent[0].recv(1) == b"", "the first ones made room"


@pytest.mark.parametrize("connect", [{"request_s": FOR_EVER_S, "app": much}], indirect=True)
def test_an_answer_that_is_not_read_loses_its_connection(connect: Callable[[], socket.socket]) -> None:
    asking = [connect() for _ in range(260)]
    for each in asking:
        with contextlib.suppress(ConnectionError):  # one of the first, which made room for others
            each.sendall(ASKED)
    for each in asking:
        wait_for_hang_up(each)
        assert len(rest_of(each)) < MUCH


def wait_for_hang_up(sock: socket.socket) -> None:
    poll = select.poll()
    poll.register(sock, 0)  # for nothing but its end
    assert poll.poll(60_000)


def rest_of(sock: socket.socket) -> bytes:
    said = b""
    try:
        while more := sock.recv(1 << 20):
            said += more
    except ConnectionResetError:
        return said
    return said


def test_a_tls_handshake_may_take_as_long_as_a_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patience, "REQUEST_S", 0.2)
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", key, "-out", cert, "-subj", "/CN=x"],
        check=True, capture_output=True,
    )  # fmt: skip
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(cert, key)

    async def silence() -> bytes:
        server = await asyncio.get_running_loop().create_server(asyncio.Protocol, "127.0.0.1", 0, ssl=context)
        async with server:
            reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
            said = await reader.read()
            writer.close()
            return said

    with asyncio.Runner(loop_factory=patience.PatientLoop) as runner:
        assert runner.run(asyncio.wait_for(silence(), 60)) == b""
