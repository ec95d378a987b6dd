"""A TCP proxy that hangs, stalls or goes away on demand: network trouble for any medium behind TCP.

proxy = StallingProxy("127.0.0.1", 6379)
settings = AcmeSettings(port=proxy.port)
with proxy.stall():
    ...
proxy.close()
"""

from __future__ import annotations

import contextlib
import select
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum

PIECE_BYTES = 65536
DRIP_S = 0.05  # between two bytes of a stalled answer
TURN_S = 0.02


class Way(Enum):
    """What happens to the traffic."""

    PASSES = "passes"
    HANGS = "hangs"  # requests are accepted, answers are held back
    STALLS = "stalls"  # answers arrive byte by byte
    AWAY = "away"  # connections are closed, and new ones are refused


class _Flag:
    """A flag that threads can wait for."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._value = True

    def set(self, value: bool) -> None:
        with self._changed:
            self._value = value
            self._changed.notify_all()

    def wait_for(self, value: bool) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._value is value)


class StallingProxy:
    """Listens on `port` of 127.0.0.1 and, unless in trouble, forwards everything to `host` and `target_port`."""

    def __init__(self, host: str, target_port: int) -> None:
        self._target = host, target_port
        self._way = Way.PASSES
        self._closed = threading.Event()
        self._links: set[tuple[socket.socket, socket.socket]] = set()
        self._lock = threading.Lock()
        self._listens = _Flag()
        self._listener = self._listening(0)
        self.port: int = self._listener.getsockname()[1]
        self._thread = threading.Thread(target=self._accept, name="kit-proxy", daemon=True)
        self._thread.start()

    @contextmanager
    def hang(self) -> Iterator[None]:
        """While in this context, requests are accepted and nothing is answered."""
        with self._in(Way.HANGS):
            yield

    @contextmanager
    def stall(self) -> Iterator[None]:
        """While in this context, answers arrive a byte at a time: each wait is short, but the answer never ends."""
        with self._in(Way.STALLS):
            yield

    @contextmanager
    def outage(self) -> Iterator[None]:
        """While in this context, nothing listens, and existing connections are closed."""
        with self._in(Way.AWAY):
            self._listens.wait_for(False)
            self._hang_up()
            yield
        self._listens.wait_for(True)

    def close(self) -> None:
        """End everything. Idempotent."""
        self._closed.set()
        self._hang_up()
        self._thread.join()
        self._listener.close()

    def __enter__(self) -> StallingProxy:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @contextmanager
    def _in(self, way: Way) -> Iterator[None]:
        self._way = way
        try:
            yield
        finally:
            self._way = Way.PASSES

    def _listening(self, port: int) -> socket.socket:
        made = socket.socket()
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind(("127.0.0.1", port))
        made.listen(64)
        return made

    def _hang_up(self) -> None:
        with self._lock:
            links = list(self._links)
        for link in links:
            for end in link:
                with contextlib.suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        while not self._closed.is_set():
            if self._way is Way.AWAY:
                self._listener.close()
                self._listens.set(False)
                while self._way is Way.AWAY and not self._closed.is_set():
                    time.sleep(TURN_S)
                self._listener = self._listening(self.port)
                self._listens.set(True)
            if select.select([self._listener], [], [], TURN_S)[0]:
                near, _ = self._listener.accept()
                threading.Thread(target=self._link, args=(near,), name="kit-proxy-link", daemon=True).start()

    def _link(self, near: socket.socket) -> None:
        try:
            far = socket.create_connection(self._target, timeout=10.0)
        except OSError:
            near.close()
            return
        link = near, far
        for end in link:  # a request in two pieces would wait for an acknowledgement between them, some 40 ms
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with self._lock:
            self._links.add(link)
        if self._way is Way.AWAY:  # accepted just before the outage
            self._hang_up()
        try:
            self._pass_on(near, far)
        finally:
            with self._lock:
                self._links.discard(link)
            near.close()
            far.close()

    def _pass_on(self, near: socket.socket, far: socket.socket) -> None:
        while not self._closed.is_set():
            way = self._way
            sources = [near] if way is Way.HANGS else [near, far]
            try:
                ready = select.select(sources, [], [], TURN_S)[0]
                for source in ready:
                    answers = source is far
                    drips = answers and way is Way.STALLS
                    piece = source.recv(1 if drips else PIECE_BYTES)
                    if not piece:
                        return
                    (near if answers else far).sendall(piece)
                    if drips:
                        time.sleep(DRIP_S)
            except OSError:
                return
