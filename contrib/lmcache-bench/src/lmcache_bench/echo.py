"""Bare echo servers: the cost of a round trip over a socket with no work at the far end."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from abc import ABC, abstractmethod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lmcache_core.limits import FRAME_BYTES_MAX

if TYPE_CHECKING:
    from multiprocessing.connection import Connection


class Echo(ABC):
    """The client's end of an echo."""

    @abstractmethod
    def send(self, frame: bytes) -> None:
        """Send a frame."""

    @abstractmethod
    def receive(self) -> None:
        """Wait for the reply."""

    @abstractmethod
    def close(self) -> None:
        """Close the connection."""

    def call(self, frame: bytes) -> None:
        """One round trip."""
        self.send(frame)
        self.receive()


class SeqpacketEcho(Echo):
    """Over a Unix SEQPACKET socket, blocking."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._buffer = memoryview(bytearray(FRAME_BYTES_MAX))

    @classmethod
    def connect(cls, path: str) -> SeqpacketEcho:
        """Connect to `serve_seqpacket`."""
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        sock.connect(path)
        return cls(sock)

    @classmethod
    def pair(cls) -> SeqpacketEcho:
        """Connect to a thread of this process, as in embedded mode."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        threading.Thread(target=_echo_packets, args=(theirs,), daemon=True).start()
        return cls(ours)

    def send(self, frame: bytes) -> None:
        self._sock.send(frame)

    def receive(self) -> None:
        self._sock.recv_into(self._buffer)

    def close(self) -> None:
        self._sock.close()


class ZmqEcho(Echo):
    """A DEALER, over ipc or over tcp with CURVE."""

    def __init__(self, address: str, keys: Path | None) -> None:
        import zmq

        self._context = zmq.Context()
        self._socket: zmq.Socket[bytes] = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        if keys is not None:
            _curve(self._socket, keys / "client.key_secret")
            self._socket.curve_serverkey = _certificate(keys / "server.key")[0]
        self._socket.connect(address)

    def send(self, frame: bytes) -> None:
        self._socket.send(frame)

    def receive(self) -> None:
        self._socket.recv()

    def close(self) -> None:
        self._socket.close()
        self._context.term()


def serve_seqpacket(ready: Connection, path: str) -> None:
    """In its own process: a blocking thread per client. Ends when the far end of `ready` closes."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(path)
    listener.listen()
    threading.Thread(target=_accept, args=(listener,), daemon=True).start()
    _stay(ready, path)


def serve_zmq(ready: Connection, address: str, keys: Path | None) -> None:
    """In its own process: a bare ROUTER, with CURVE if keys are given. Sends its address."""
    import zmq

    context = zmq.Context()
    router: zmq.Socket[bytes] = context.socket(zmq.ROUTER)
    router.setsockopt(zmq.LINGER, 0)
    if keys is not None:
        _curve(router, keys / "server.key_secret")
        router.curve_server = True
    router.bind(address)
    threading.Thread(target=_echo_messages, args=(router,), daemon=True).start()
    _stay(ready, router.getsockopt_string(zmq.LAST_ENDPOINT))


def _accept(listener: socket.socket) -> None:
    while True:
        sock, _ = listener.accept()
        threading.Thread(target=_echo_packets, args=(sock,), daemon=True).start()


def _echo_packets(sock: socket.socket) -> None:
    buffer = memoryview(bytearray(FRAME_BYTES_MAX))
    with sock, contextlib.suppress(ConnectionError):
        while nbytes := sock.recv_into(buffer):
            sock.send(buffer[:nbytes])


def _echo_messages(router: Any) -> None:
    while True:
        router.send_multipart(router.recv_multipart())


def _stay(ready: Connection, address: str) -> None:
    ready.send(address)
    with contextlib.suppress(EOFError, OSError, KeyboardInterrupt):
        ready.recv()
    os._exit(0)  # its threads block in calls that nothing else ends


def _curve(sock: Any, secret_file: Path) -> None:
    sock.curve_publickey, sock.curve_secretkey = _certificate(secret_file)


def _certificate(path: Path) -> tuple[bytes, bytes | None]:
    from zmq.auth import load_certificate

    return load_certificate(path)
