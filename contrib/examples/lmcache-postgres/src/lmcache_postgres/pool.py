"""Connections of one adapter. Each use keeps its deadline, even if the database stops in the middle of an answer."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Iterator

import psycopg

from lmcache_core.tiers.blocking import Connections
from lmcache_core.tiers.streams import left_s

_LONGEST_S = 86400.0  # neither the library nor the database counts beyond some weeks


class Pool:
    """Connections to one database."""

    def __init__(self, dsn: str, setup: str) -> None:
        """`setup`: is run on each new connection."""
        self._dsn = dsn
        self._setup = setup
        self._connections = Connections(self._connect, self._prepare)
        self.close = self._connections.close

    @contextlib.contextmanager
    def transaction(self, deadline: float) -> Iterator[psycopg.Cursor]:
        """One transaction, committed at the end. Raises `psycopg.Error` and `TimeoutError`."""
        deadline = min(deadline, time.monotonic() + _LONGEST_S)
        left_s(deadline)
        with (
            self._connections.one(deadline) as connection,
            _cut_off_at(deadline, connection),
            connection.transaction(),
            connection.cursor(binary=True) as cursor,
        ):
            left_ms = max(1, int(1000 * (deadline - time.monotonic())))
            cursor.execute(f"SET LOCAL statement_timeout = {left_ms}", prepare=False)
            yield cursor

    def _connect(self, deadline: float) -> psycopg.Connection:
        seconds = max(1, int(deadline - time.monotonic()))
        return psycopg.connect(self._dsn, autocommit=True, connect_timeout=seconds, prepare_threshold=None)

    def _prepare(self, connection: psycopg.Connection, deadline: float) -> None:
        with _cut_off_at(deadline, connection):
            connection.execute(self._setup)


@contextlib.contextmanager
def _cut_off_at(deadline: float, connection: psycopg.Connection) -> Iterator[None]:
    """The database cancels a statement that takes too long. If it does not answer at all, we close the socket, which
    ends the library's wait: the library has no time-out of its own."""
    ours = os.dup(connection.fileno())  # by now it may be closed, and its number reused

    def hang_up() -> None:
        with contextlib.suppress(OSError):
            with socket.socket(fileno=os.dup(ours)) as line:
                line.shutdown(socket.SHUT_RDWR)

    wait_s = max(0.0, deadline - time.monotonic()) + 0.2  # the database's own answer comes first
    timer = threading.Timer(wait_s, hang_up)
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()
        os.close(ours)
