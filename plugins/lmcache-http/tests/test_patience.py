"""Connections that send nothing, or half a request: they are closed after a while."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import uvicorn

from lmcache_http import patience
from lmcache_http.__main__ import where_from
from lmcache_http.settings import HttpSettings

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


@pytest.fixture
def connect(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], socket.socket]]:
    """Connections to what is served with the settings of the command."""
    monkeypatch.setattr(patience, "REQUEST_S", 0.2)
    path = str(tmp_path / "http")
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(path)
    server = uvicorn.Server(uvicorn.Config(app, **where_from(HttpSettings(unix_socket=Path(path)))))
    thread = threading.Thread(target=server.run, args=([listening],))
    listening.listen()
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
