"""What several tests of the client do to one."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable

import pytest

from lmcache_core.client.link.connection import Connection, LifelineConnection
from lmcache_core.server.server import Server

NBYTES = 4096


def key(number: int) -> bytes:
    return number.to_bytes(32, "big")


def keys(*numbers: int) -> list[bytes]:
    return [key(number) for number in numbers]


def payload(number: int) -> bytes:
    return bytes([number % 199 + 1]) * NBYTES


@pytest.fixture
def server(start: Callable[..., Server]) -> Server:
    return start(l1={"size_bytes": 4 << 20}, drain_s=0.1)


def cut(connection: Connection) -> None:
    """The line ends under the client, which has not noticed yet."""
    assert isinstance(connection, LifelineConnection)
    with socket.socket(fileno=os.dup(connection.fileno())) as line:
        line.shutdown(socket.SHUT_RDWR)


def locks_of(*things: object) -> list[threading.Lock]:
    """All that these have, whatever they call them."""
    kind = type(threading.Lock())
    found = [each for thing in things for each in vars(thing).values() if isinstance(each, kind)]
    assert len(found) >= len(things)
    return found
