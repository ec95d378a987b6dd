"""Connections of one adapter. Each use keeps its deadline, even if the database stops in the middle of an answer."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Iterator

import psycopg

_LONGEST_S = 86400.0  # neither the library nor the database counts beyond some weeks


class LateError(Exception):
    """No time was left to begin."""


class Pool:
    """Connections that are not in use, and as many more as threads ask for."""

    def __init__(self, dsn: str, setup: str) -> None:
        """`setup`: is run on each new connection."""
        self._dsn = dsn
        self._setup = setup
        self._lock = threading.Lock()
        self._idle: list[psycopg.Connection] = []
        self._closed = False

    @contextlib.contextmanager
    def transaction(self, deadline: float) -> Iterator[psycopg.Cursor]:
        """One transaction, committed at the end. Raises `psycopg.Error` and `LateError`."""
        deadline = min(deadline, time.monotonic() + _LONGEST_S)
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            raise LateError("not started by its deadline")
        with self._lock:
            connection = self._idle.pop() if self._idle else None
        connection = connection or self._made(deadline)
        try:
            with _cut_off_at(deadline, connection), connection.transaction(), connection.cursor(binary=True) as cursor:
                left_ms = max(1, int(1000 * (deadline - time.monotonic())))
                cursor.execute(f"SET LOCAL statement_timeout = {left_ms}", prepare=False)
                yield cursor
        except BaseException:
            if connection.broken or connection.info.transaction_status != psycopg.pq.TransactionStatus.IDLE:
                connection.close()
            else:
                self._give_back(connection)
            raise
        self._give_back(connection)

    def _made(self, deadline: float) -> psycopg.Connection:
        seconds = max(1, int(deadline - time.monotonic()))
        connection = psycopg.connect(self._dsn, autocommit=True, connect_timeout=seconds, prepare_threshold=None)
        try:
            with _cut_off_at(deadline, connection):
                connection.execute(self._setup)
        except BaseException:
            connection.close()
            raise
        return connection

    def _give_back(self, connection: psycopg.Connection) -> None:
        with self._lock:
            if not self._closed and not connection.broken:
                self._idle.append(connection)
                return
        connection.close()

    def close(self) -> None:
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()


@contextlib.contextmanager
def _cut_off_at(deadline: float, connection: psycopg.Connection) -> Iterator[None]:
    """The database cancels a statement that takes too long. If it does not answer at all, we close the socket, which
    ends the library's wait: the library has no time-out of its own."""
    ours = os.dup(connection.fileno())  # by now it may be closed, and its number reused

    def hang_up() -> None:
        with contextlib.suppress(OSError):
            with socket.socket(fileno=os.dup(ours)) as line:
                line.shutdown(socket.SHUT_RDWR)

    left_s = max(0.0, deadline - time.monotonic())
    timer = threading.Timer(left_s + 0.2, hang_up)  # the database's own answer comes first
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()
        os.close(ours)
