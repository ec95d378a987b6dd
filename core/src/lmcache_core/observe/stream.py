"""Events for processes on this node, over a Unix socket: a reader gets everything from its connection on."""

from __future__ import annotations

import json
import os
import select
import socket
import stat
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import Field

from lmcache_core.guard import on_failure
from lmcache_core.observe.events import CacheEvent
from lmcache_core.observe.files import plain
from lmcache_core.observe.subscriber import EventSubscriber, SubscriberContext
from lmcache_core.pool.atfork import forget_in_child
from lmcache_core.settings.model import Section
from lmcache_core.settings.paths import OptionalPath

ITEMS_MAX = 256  # of all lists of an event together: its line must fit into a packet
PACKET_BYTES = 32 << 10  # a packet is sent once it has this size; its last line adds less than that again
PACKET_BYTES_MAX = 2 * PACKET_BYTES  # what a reader's buffer must hold
ACCEPT_RETRY_S = 0.1  # there was no descriptor for a reader
TEXT_CHARS_MAX = 2000  # of a text field in an event


class StreamSettings(Section):
    """Where readers connect."""

    path: OptionalPath = Field(default=None, description="the socket; none: NAME-events.sock in state_dir")
    readers_max: int = Field(default=64, ge=1, le=1024, description="concurrent readers; others are refused")


def stream_path(path: Path | None, state_dir: Path, server: str) -> Path:
    """Where the socket is."""
    return path or state_dir / f"{server}-events.sock"


class EventStream(EventSubscriber):
    """Packets (SOCK_SEQPACKET) of whole JSON lines, as in an event file. The lists of an event have at most 256 items
    together, and `more_keys`, say, is how many keys were left out. Nobody waits for a reader: events for which it has
    no room are lost, and the next line it reads is `{"event": "missed", "events": n}`. Lines are made only while
    somebody reads."""

    def __init__(self, settings: StreamSettings, context: SubscriberContext) -> None:
        self._path = stream_path(settings.path, context.state_dir, context.server)
        self._readers_max = settings.readers_max
        self._readers: dict[int, _Reader] = {}  # by descriptor
        self._lock = threading.Lock()  # guards them
        self._stopping = threading.Event()
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._epoll = select.epoll()
        self._inode = 0
        self._thread = threading.Thread(target=self._run, name="lmcache-event-stream", daemon=True)
        with on_failure(self._close_sockets, self._unlink):
            self._inode = _listen(self._sock, self._path)
            self._epoll.register(self._sock, select.EPOLLIN)
            self._thread.start()
        forget_in_child(self)

    def after_fork_in_child(self) -> None:
        """Otherwise readers would wait for a child that sends nothing."""
        self._lock = threading.Lock()  # a thread that does not exist here may have held it
        self._close_sockets()

    def hear(self, events: Sequence[CacheEvent]) -> None:
        with self._lock:  # nothing here waits for a reader
            self._tend()  # whoever connected before these events gets them
            packets = list(_packets(events)) if self._readers else []
            for fd, reader in list(self._readers.items()):
                if not reader.tell(packets):
                    self._remove(fd)

    def close(self) -> None:
        if self._sock.fileno() < 0:
            return  # closed before, or in a child
        self._stopping.set()
        self._sock.shutdown(socket.SHUT_RDWR)  # the thread wakes up
        self._thread.join()
        self._close_sockets()
        self._unlink()

    def _unlink(self) -> None:
        """Remove our own socket's name; another server may have replaced it."""
        try:
            if self._path.lstat().st_ino == self._inode:
                self._path.unlink()
        except FileNotFoundError:
            return

    def _run(self) -> None:
        """Tend the readers also while nothing happens."""
        while True:
            self._epoll.poll()
            if self._stopping.is_set():
                return
            with self._lock:
                accepted = self._tend()
            if not accepted:
                self._stopping.wait(ACCEPT_RETRY_S)

    def _tend(self) -> bool:
        """Remove readers that hung up, and accept new ones; needs the lock. False: one could not be accepted, and still
        waits."""
        self._remove_gone()
        while True:
            try:
                sock, _ = self._sock.accept()
            except BlockingIOError:
                return True
            except OSError:  # it hung up, or there is no descriptor for it
                return False
            if len(self._readers) >= self._readers_max:
                self._remove_gone()  # those just accepted, too
            if len(self._readers) >= self._readers_max:
                sock.close()
                continue
            try:
                self._epoll.register(sock, 0)
            except OSError:
                sock.close()
                return False
            self._readers[sock.fileno()] = _Reader(sock)

    def _remove_gone(self) -> None:
        for fd, _ in self._epoll.poll(0):
            if fd in self._readers:  # watched for nothing but its end
                self._remove(fd)

    def _remove(self, fd: int) -> None:
        self._epoll.unregister(fd)  # closing is not enough while a child has a duplicate
        self._readers.pop(fd).close()

    def _close_sockets(self) -> None:
        self._epoll.close()
        self._sock.close()
        for reader in self._readers.values():
            reader.close()
        self._readers = {}


class _Packet(NamedTuple):
    data: bytes
    events: int


class _Reader:
    """One connection, and how many events it has missed since the last report of it."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._missed = 0

    def tell(self, packets: Sequence[_Packet]) -> bool:
        """Returns False if the reader is gone."""
        try:
            for packet in packets:
                if not (self._owes_nothing() and self._send(packet.data)):
                    self._missed += packet.events
        except OSError:
            return False
        return True

    def close(self) -> None:
        self._sock.close()

    def _owes_nothing(self) -> bool:
        """Whether everything that it missed was reported to it."""
        if self._missed and self._send(_line({"event": "missed", "events": self._missed})):
            self._missed = 0
        return not self._missed

    def _send(self, data: bytes) -> bool:
        """Send one whole packet; False: there is no room for it."""
        try:
            self._sock.send(data, socket.MSG_NOSIGNAL)
        except BlockingIOError:
            return False
        return True


def _listen(sock: socket.socket, path: Path) -> int:
    """Listen for this user only; returns the socket's inode. A leftover of a dead server with this name is replaced."""
    directory = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        if path.is_socket():
            path.unlink()
        sock.bind(f"/proc/self/fd/{directory}/{path.name}")  # works for paths of any length
        path.chmod(stat.S_IRUSR | stat.S_IWUSR)
        sock.setblocking(False)
        sock.listen()
        return path.lstat().st_ino
    finally:
        os.close(directory)


def _packets(events: Sequence[CacheEvent]) -> Iterator[_Packet]:
    lines: list[bytes] = []
    nbytes = 0
    for event in events:
        lines.append(_line(_shown(event)))
        nbytes += len(lines[-1])
        if nbytes >= PACKET_BYTES:
            yield _Packet(b"".join(lines), len(lines))
            lines, nbytes = [], 0
    if lines:
        yield _Packet(b"".join(lines), len(lines))


def _shown(event: CacheEvent) -> dict[str, Any]:
    fields: dict[str, Any] = plain(event)
    lists = {name: each for name, each in fields.items() if isinstance(each, list)}
    for name, each in lists.items():
        most = ITEMS_MAX // len(lists)
        if len(each) > most:
            fields |= {name: each[:most], f"more_{name}": len(each) - most}
    return {name: each[:TEXT_CHARS_MAX] if isinstance(each, str) else each for name, each in fields.items()}


def _line(fields: dict[str, Any]) -> bytes:
    return json.dumps(fields, separators=(",", ":")).encode() + b"\n"
