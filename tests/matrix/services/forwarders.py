"""What stands between a client and an HTTP service: TLS that ends in front of it, and a proxy that asks who comes."""

from __future__ import annotations

import base64
import contextlib
import select
import socket
import ssl
import threading
from abc import ABC, abstractmethod

from services.certificates import Certificates

_PIECE_BYTES = 64 << 10
_HEAD_BYTES_MAX = 16 << 10
_WAIT_S = 60.0  # a safety net: both sides end by themselves


class Forwarder(ABC):
    """Listens on loopback; a thread for each connection."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=64)
        self.port: int = self._listener.getsockname()[1]
        self._open: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()

    @abstractmethod
    def meet(self, near: socket.socket) -> tuple[socket.socket, socket.socket] | None:
        """Both ends, ready to carry bytes; None: the client is not served."""

    def stop(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._listener.close()
        with self._lock:
            left = list(self._open)
        for sock in left:
            self._close(sock)

    # --- threads --------------------------------------------------------------------------------------------
    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            near.settimeout(_WAIT_S)
            threading.Thread(target=self._serve, args=(near,), daemon=True).start()

    def _serve(self, near: socket.socket) -> None:
        try:
            ends = self.meet(near)
        except OSError:  # of TLS too: a client that does not trust us goes away
            ends = None
        if ends is None:
            near.close()
            return
        near, far = ends
        with self._lock:
            self._open |= {near, far}
        with contextlib.suppress(OSError, ValueError):  # `stop` closes them under our hands
            self._carry(near, far)
        for sock in (near, far):
            self._close(sock)

    def _carry(self, near: socket.socket, far: socket.socket) -> None:
        """Until either side ends. Both directions in this one thread: two must not use a TLS connection at a time."""
        other = {near: far, far: near}
        while True:
            ready = [each for each in other if isinstance(each, ssl.SSLSocket) and each.pending()]
            for source in ready or select.select(list(other), [], [], _WAIT_S)[0]:
                piece = source.recv(_PIECE_BYTES)
                if not piece:
                    return
                other[source].sendall(piece)

    def _close(self, sock: socket.socket) -> None:
        with self._lock:
            self._open.discard(sock)
        with contextlib.suppress(OSError):
            sock.shutdown(socket.SHUT_RDWR)
        sock.close()


class TlsFront(Forwarder):
    """Ends TLS, and passes what was in it on to `target`."""

    def __init__(self, target: tuple[str, int], certificates: Certificates) -> None:
        self._target = target
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._context.load_cert_chain(certificates.cert, certificates.key)
        super().__init__()
        self.url = f"https://127.0.0.1:{self.port}"

    def meet(self, near: socket.socket) -> tuple[socket.socket, socket.socket]:
        wrapped = self._context.wrap_socket(near, server_side=True)
        return wrapped, socket.create_connection(self._target, timeout=_WAIT_S)


class ConnectProxy(Forwarder):
    """An HTTP proxy that knows CONNECT only, and one user."""

    def __init__(self, user: str, password: str) -> None:
        self._word = base64.b64encode(f"{user}:{password}".encode())
        self.tunnels: list[str] = []  # HOST:PORT of each that it opened
        self.refused = 0
        super().__init__()

    def meet(self, near: socket.socket) -> tuple[socket.socket, socket.socket] | None:
        head = b""
        while b"\r\n\r\n" not in head:
            piece = near.recv(_PIECE_BYTES)
            if not piece or len(head) > _HEAD_BYTES_MAX:
                return None
            head += piece
        method, where, _ = head.split(b"\r\n", 1)[0].split(b" ", 2)
        if method != b"CONNECT" or b"Basic " + self._word not in head:
            self.refused += 1
            near.sendall(b"HTTP/1.1 407 Proxy Authentication Required\r\nContent-Length: 0\r\n\r\n")
            return None
        host, _, port = where.decode().rpartition(":")
        far = socket.create_connection((host, int(port)), timeout=_WAIT_S)
        self.tunnels.append(where.decode())
        near.sendall(b"HTTP/1.1 200 Connection established\r\n\r\n")
        return near, far
