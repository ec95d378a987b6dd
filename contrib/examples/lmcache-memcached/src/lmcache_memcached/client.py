"""memcached's text protocol, as far as a tier needs it. Each call keeps its deadline, whatever the server does."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from io import BufferedReader
from typing import cast

from lmcache_core.tiers import budget

_LINE_BYTES_MAX = 2048  # longer than any answer of one line


class MemcachedError(Exception):
    """It cannot be reached, does not answer, or breaks the protocol: the connection is not used again."""


class RefusedError(Exception):
    """It refuses the command."""


class Connection:
    """One connection; one thread at a time."""

    def __init__(self, host: str, port: int, deadline: float) -> None:
        self._socket = budget.connect(host, port, deadline)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._read = cast(BufferedReader, self._socket.makefile("rb", buffering=1 << 16))

    def close(self) -> None:
        self._read.close()
        self._socket.close()

    def send(self, *parts: bytes | memoryview) -> None:
        for part in parts:
            self._socket.sendall(part)

    def line(self) -> bytes:
        line = self._read.readline(_LINE_BYTES_MAX)
        if not line.endswith(b"\r\n"):
            raise MemcachedError("it hung up" if not line else f"no line of its protocol: {line[:60]!r}")
        return line[:-2]

    def answer(self) -> bytes:
        """A line that is no error. Raises `RefusedError`."""
        line = self.line()
        if line.startswith(b"SERVER_ERROR"):
            raise RefusedError(line.decode("ascii", "replace"))
        if line.startswith((b"CLIENT_ERROR", b"ERROR")):  # who knows what it has read of what was sent
            raise MemcachedError(line.decode("ascii", "replace"))
        return line

    def read_into(self, buffers: Sequence[memoryview], nbytes: int) -> None:
        """The next bytes into the buffers, one after the other; they have room for them."""
        for buffer in buffers:
            part = buffer[: min(nbytes, buffer.nbytes)]
            nbytes -= part.nbytes
            while part:
                got = self._read.readinto(part)
                if not got:
                    raise MemcachedError("it hung up in the middle of an object")
                part = part[got:]

    def skip(self, nbytes: int) -> None:
        while nbytes:
            got = self._read.read(min(nbytes, 1 << 16))
            if not got:
                raise MemcachedError("it hung up in the middle of an object")
            nbytes -= len(got)


class Pool:
    """Connections that are not in use, and as many more as threads ask for."""

    def __init__(self, host: str, port: int) -> None:
        self._where = host, port
        self._lock = threading.Lock()
        self._idle: list[Connection] = []
        self._closed = False

    @contextmanager
    def connection(self, deadline: float) -> Iterator[Connection]:
        """For one call. Raises `MemcachedError` for all that goes wrong on the way; such a connection is closed, and so
        is one that was given up by any other exception but a refusal."""
        with self._lock:
            if self._closed:
                raise MemcachedError("closed")
            connection = self._idle.pop() if self._idle else None
        with budget.within(deadline):
            try:
                if time.monotonic() >= deadline:
                    raise MemcachedError("no time is left")
                connection = connection or Connection(*self._where, deadline)
                yield connection
            except RefusedError:
                self._give_back(connection)
                raise
            except (OSError, MemcachedError, ValueError) as error:
                if connection is not None:
                    connection.close()
                raise MemcachedError(f"{self._where[0]}:{self._where[1]}: {error or type(error).__name__}") from error
            except BaseException:
                if connection is not None:
                    connection.close()
                raise
            else:
                self._give_back(connection)

    def _give_back(self, connection: Connection | None) -> None:
        assert connection is not None
        with self._lock:
            if not self._closed:
                self._idle.append(connection)
                return
        connection.close()

    def close(self) -> None:
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()
