"""What several tests of the client do to one."""

from __future__ import annotations

import os
import socket
import threading
from typing import Any

from lmcache_core.client.connection import Connection, LifelineConnection


def cut(connection: Connection) -> None:
    """The line ends under the client, which has not noticed yet."""
    assert isinstance(connection, LifelineConnection)
    with socket.socket(fileno=os.dup(connection.fileno())) as line:
        line.shutdown(socket.SHUT_RDWR)


def locks_of(*things: object) -> list[Any]:
    """All that these have, whatever they call them."""
    kind = type(threading.Lock())
    found = [each for thing in things for each in vars(thing).values() if isinstance(each, kind)]
    assert len(found) >= len(things)
    return found
