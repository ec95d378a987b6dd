"""memcached's text protocol, as far as a tier needs it. Each call keeps its deadline, whatever the server does."""

from __future__ import annotations

import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from io import BufferedReader
from typing import cast

from lmcache_core.tiers import budget
from lmcache_core.tiers.blocking import Connections

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
    """Connections to one memcached."""

    def __init__(self, host: str, port: int) -> None:
        self._where = f"{host}:{port}"
        self._connections = Connections(lambda deadline: Connection(host, port, deadline), keeps=(RefusedError,))
        self.close = self._connections.close

    @contextmanager
    def connection(self, deadline: float) -> Iterator[Connection]:
        """For one call. Raises `MemcachedError` for all that goes wrong on the way; such a connection is closed, and so
        is one that was given up by any other exception but a refusal."""
        try:
            with budget.within(deadline):
                budget.left_s()
                with self._connections.one(deadline) as connection:
                    yield connection
        except (OSError, MemcachedError, ValueError) as error:
            raise MemcachedError(f"{self._where}: {error or type(error).__name__}") from error
