"""A TCP proxy that misbehaves on command: it delays, resets, truncates, and swallows."""

from __future__ import annotations

import contextlib
import selectors
import socket
import struct
import threading
import time
from collections.abc import Sequence

_CHUNK_BYTES = 64 << 10
_RESET = struct.pack("ii", 1, 0)  # SO_LINGER: closing sends RST


class Proxy:
    """Forwards one port of loopback to another, on a thread. What it does wrong can be changed at any time:

    `delay_s`: each piece from the server waits that long. `black_hole`: connections are taken, nothing is passed on.
    `cut_after(nbytes, reset)`: after so many bytes from the server each connection ends, by an orderly close or by a
    reset, as often as `times` says.
    """

    def __init__(self, host: str, port: int) -> None:
        self._target = (host, port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.setblocking(False)
        self.port: int = self._listener.getsockname()[1]
        self.delay_s = 0.0
        self.black_hole = False
        self.cuts = 0  # how often it has cut a connection
        self._cut_bytes: int | None = None
        self._cut_times = 0
        self._reset = False
        self._ends: dict[socket.socket, socket.socket] = {}
        self._from_server: dict[socket.socket, int] = {}
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._drop_all = threading.Event()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, name="proxy", daemon=True)
        self._thread.start()

    def cut_after(self, nbytes: int, *, reset: bool, times: int = 1) -> None:
        """The next `times` connections that have brought `nbytes` from the server from now on are ended."""
        with self._lock:
            self._cut_bytes, self._reset, self._cut_times = nbytes, reset, times
            self._from_server = dict.fromkeys(self._from_server, 0)

    def mend(self) -> None:
        """Behave again. Connections that were swallowed are closed."""
        with self._lock:
            swallowed, self.black_hole = self.black_hole, False
            self.delay_s, self._cut_bytes, self._cut_times = 0.0, None, 0
        if swallowed:
            self._drop_all.set()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join(10)
        for sock in [*self._ends, self._listener]:
            sock.close()
        self._selector.close()

    # --- the thread -----------------------------------------------------------------------------------------
    def _run(self) -> None:
        while not self._stop.is_set():
            if self._drop_all.is_set():
                self._drop_all.clear()
                for sock in list(self._ends):
                    self._end(sock)
            for key, _ in self._selector.select(0.02):
                sock = key.fileobj
                assert isinstance(sock, socket.socket)
                if sock is self._listener:
                    self._accept()
                elif sock in self._ends:
                    self._pass_on(sock)

    def _accept(self) -> None:
        near, _ = self._listener.accept()
        try:
            far = socket.create_connection(self._target, timeout=5)
        except OSError:
            near.close()  # as a server that is down
            return
        for sock, other in ((near, far), (far, near)):
            sock.settimeout(20)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._ends[sock] = other
            self._selector.register(sock, selectors.EVENT_READ)
        self._from_server[far] = 0

    def _pass_on(self, sock: socket.socket) -> None:
        try:
            piece = sock.recv(_CHUNK_BYTES)
        except OSError:
            piece = b""
        if not piece:
            self._end(sock)
            return
        if self.black_hole:
            return
        cut = False
        if sock in self._from_server:
            if self.delay_s:
                time.sleep(self.delay_s)
            piece, cut = self._allowed(sock, piece)
        try:
            self._ends[sock].sendall(piece)
        except OSError:
            cut = True
        if cut:
            self._end(sock)

    def _allowed(self, sock: socket.socket, piece: bytes) -> tuple[bytes, bool]:
        """What of a piece may pass, and whether the connection ends after it."""
        with self._lock:
            before = self._from_server[sock]
            self._from_server[sock] = before + len(piece)
            if self._cut_bytes is None or not self._cut_times or before + len(piece) < self._cut_bytes:
                return piece, False
            self._cut_times -= 1
            self.cuts += 1
            if self._reset:
                self._ends[sock].setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            return piece[: self._cut_bytes - before], True

    def _end(self, sock: socket.socket) -> None:
        other = self._ends.pop(sock, None)
        if other is None:
            return
        self._ends.pop(other, None)
        for each in (sock, other):
            self._from_server.pop(each, None)
            with contextlib.suppress(KeyError, ValueError):
                self._selector.unregister(each)
            each.close()


class Proxies:
    """A proxy in front of each of a service's ports, all told the same. `settings` lead an adapter through them."""

    def __init__(self, targets: Sequence[tuple[str, int]], *, kept: bool = False) -> None:
        self._each = [Proxy(*target) for target in targets]
        self.ports = [proxy.port for proxy in self._each]
        self.settings: dict[str, object] = {}
        self.kept = kept  # the service stops them, with itself

    @property
    def cuts(self) -> int:
        return sum(proxy.cuts for proxy in self._each)

    def delay(self, seconds: float) -> None:
        for proxy in self._each:
            proxy.delay_s = seconds

    def swallow(self) -> None:
        for proxy in self._each:
            proxy.black_hole = True

    def cut_after(self, nbytes: int, *, reset: bool, times: int = 1) -> None:
        """For each port."""
        for proxy in self._each:
            proxy.cuts = 0
            proxy.cut_after(nbytes, reset=reset, times=times)

    def mend(self) -> None:
        for proxy in self._each:
            proxy.mend()

    def stop(self) -> None:
        for proxy in self._each:
            proxy.stop()
