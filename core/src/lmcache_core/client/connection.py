"""One connection to a server, over either carrier. Sends whole frames, receives whole frames."""

from __future__ import annotations

import array
import contextlib
import os
import select
import socket
import struct
import threading
import time
from abc import ABC, abstractmethod
from pathlib import Path
from typing import TYPE_CHECKING

from lmcache_core.errors import DisconnectedError, UsageError
from lmcache_core.limits import CALL_TIMEOUT_S, CONNECT_TIMEOUT_S, FRAME_BYTES_MAX

if TYPE_CHECKING:
    from lmcache_core.client.address import CurveKeys

_POLL_S = 1.0  # how long one blocking receive lasts before the deadline is looked at again


class Connection(ABC):
    """`send` may be called by any thread; `receive` by one at a time."""

    carrier: str

    @abstractmethod
    def send(self, frame: bytes) -> None:
        """Send a frame. Raises `DisconnectedError`."""

    @abstractmethod
    def receive(self, deadline: float) -> memoryview | None:
        """The next frame, valid until the next call, or None at the deadline. Raises `DisconnectedError`."""

    @abstractmethod
    def ended(self) -> bool:
        """Whether the server has hung up. Looks, and waits for nothing."""

    @abstractmethod
    def close(self) -> None:
        """Idempotent. A receive under way in another thread ends."""

    @abstractmethod
    def abandon(self) -> None:
        """In a forked child: let go of the parent's connection without ending it."""

    def take_fd(self) -> int:
        """The descriptor that came with the last frame received by `receive_with_fd`, or -1; now the caller's."""
        return -1


class LifelineConnection(Connection):
    """A Unix SEQPACKET socket: connected by path, or one end of a pair (embedded mode)."""

    carrier = "lifeline"

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._fd = -1
        self._buffer = memoryview(bytearray(FRAME_BYTES_MAX + 1))
        self._welcomed = False
        sock.settimeout(None)
        # The kernel's own timers: one system call a receive instead of a poll and a receive.
        timeout = struct.pack("ll", int(_POLL_S), 0)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, timeout)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", int(CALL_TIMEOUT_S), 0))

    @classmethod
    def open(cls, path: Path) -> LifelineConnection:
        """Connect. Raises `DisconnectedError` where nobody listens, or nobody may."""
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
        directory_fd = -1
        try:
            directory_fd = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            sock.settimeout(CONNECT_TIMEOUT_S)  # a server that is stopped has a backlog that fills up
            sock.connect(f"/proc/self/fd/{directory_fd}/{path.name}")
        except OSError as error:
            sock.close()
            cure = (
                'the server admits others with l1.access = "group" and its runtime_dir open to them'
                if isinstance(error, PermissionError)
                else "start one with `serve`"
            )
            raise DisconnectedError(f"no server answers at {path}: {error.strerror}; {cure}") from error
        finally:
            if directory_fd >= 0:
                os.close(directory_fd)
        return cls(sock)

    def send(self, frame: bytes) -> None:
        try:
            self._sock.send(frame)
        except OSError as error:
            raise DisconnectedError(f"the server went away: {error.strerror}") from error

    def receive(self, deadline: float) -> memoryview | None:
        left = deadline - time.monotonic()
        if left < _POLL_S and not _readable(self._sock.fileno(), left):
            return None
        try:
            nbytes = self._sock.recv_into(self._buffer) if self._welcomed else self._receive_with_fd()
        except BlockingIOError:
            return None if time.monotonic() >= deadline else self.receive(deadline)
        except OSError as error:
            raise DisconnectedError(f"the server went away: {error.strerror}") from error
        if nbytes == 0:
            raise DisconnectedError("the server closed the connection")
        return self._buffer[:nbytes]

    def _receive_with_fd(self) -> int:
        """The first frame may carry the pool's descriptor; no later one does."""
        room = socket.CMSG_SPACE(struct.calcsize("i"))
        nbytes, ancillary, _, _ = self._sock.recvmsg_into([self._buffer], room, socket.MSG_CMSG_CLOEXEC)
        for _, kind, data in ancillary:
            if kind == socket.SCM_RIGHTS:
                self._fd = array.array("i", data)[0]
        self._welcomed = True
        return nbytes

    def take_fd(self) -> int:
        fd, self._fd = self._fd, -1
        return fd

    def ended(self) -> bool:
        fd = self._sock.fileno()
        if fd < 0:
            return True
        poller = select.poll()
        poller.register(fd, select.POLLRDHUP)
        return bool(poller.poll(0))

    def abandon(self) -> None:
        self._sock.close()

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self.take_fd())
        if self._sock.fileno() >= 0:
            with contextlib.suppress(OSError):  # the peer may have ended it already
                self._sock.shutdown(socket.SHUT_RDWR)  # wakes a thread that is blocked in receive
            self._sock.close()


class ZmqConnection(Connection):
    """A DEALER. ZMQ sockets are for one thread: a lock guards it, and an eventfd wakes the receiving thread where
    another thread's send has eaten the edge of the socket's descriptor.

    ZMQ would reconnect without a word, to a server that does not know us. A monitor tells of the end instead, and
    of a server that is not there or does not let us in, so that no call waits in vain.
    """

    carrier = "zmq"

    def __init__(self, address: str, curve: CurveKeys | None) -> None:
        import zmq
        from zmq.utils.monitor import recv_monitor_message

        self._zmq = zmq
        if address.startswith("tcp://") and curve is None:
            raise UsageError(f"{address} is reached over tcp and needs keys: pass curve=CurveKeys(…)")
        self._address = address
        self._endings = {
            int(zmq.EVENT_DISCONNECTED): "went away",
            int(zmq.EVENT_CONNECT_RETRIED): "does not answer; is it running?",
            int(zmq.EVENT_HANDSHAKE_FAILED_AUTH): "does not let this key in: put its .key into zmq.curve_clients_dir",
            int(zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL): "could not agree on keys: is server_public its public key?",
            int(zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL): "broke the handshake off: is server_public its public key?",
        }
        self._read_event = recv_monitor_message
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.SNDHWM, 1024)
        self._socket.setsockopt(zmq.MAXMSGSIZE, FRAME_BYTES_MAX)
        if curve is not None:
            self._socket.curve_serverkey = curve.server_public
            self._socket.curve_publickey = curve.public
            self._socket.curve_secretkey = curve.secret.get()
        self._monitor = self._socket.get_monitor_socket(sum(self._endings))
        self._socket.connect(address)
        self._lock = threading.Lock()
        self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._poller = select.poll()
        self._poller.register(self._socket.fileno(), select.POLLIN)
        self._poller.register(self._monitor.fileno(), select.POLLIN)
        self._poller.register(self._wake_fd, select.POLLIN)
        self._closed = False
        self._polling = False

    def send(self, frame: bytes) -> None:
        zmq = self._zmq
        with self._lock:
            self._check()
            try:
                self._socket.send(frame, zmq.NOBLOCK)
            except zmq.Again as error:
                raise DisconnectedError("the server does not read: its queue is full") from error
            if self._socket.getsockopt(zmq.EVENTS) & zmq.POLLIN:
                os.eventfd_write(self._wake_fd, 1)

    def receive(self, deadline: float) -> memoryview | None:
        zmq = self._zmq
        while True:
            with self._lock:
                if not self._closed and self._socket.getsockopt(zmq.EVENTS) & zmq.POLLIN:
                    return memoryview(self._socket.recv(zmq.NOBLOCK))
                self._check()
                left = deadline - time.monotonic()
                if left <= 0:
                    return None
                self._polling = True
            try:
                ready = self._poller.poll(min(left, _POLL_S) * 1000)
            finally:
                with self._lock:
                    self._polling = False
                    if self._closed:
                        self._close_wake_fd()
            if self._wake_fd >= 0 and any(fd == self._wake_fd for fd, _ in ready):
                os.eventfd_read(self._wake_fd)

    def ended(self) -> bool:
        with self._lock:
            try:
                self._check()
            except DisconnectedError:
                return True
            return False

    def _check(self) -> None:
        """Raise `DisconnectedError` where the connection has ended. The caller holds the lock."""
        if self._closed:
            raise DisconnectedError("the connection is closed")
        while int(self._monitor.getsockopt(self._zmq.EVENTS)) & self._zmq.POLLIN:
            event = int(self._read_event(self._monitor, self._zmq.NOBLOCK)["event"])
            if event in self._endings:
                raise DisconnectedError(f"the server at {self._address} {self._endings[event]}")

    def abandon(self) -> None:
        # ZMQ's own threads did not come along: the socket can only be forgotten. pyzmq does so by process id.
        self._closed = True

    def close(self) -> None:
        with self._lock:
            if not self._closed:
                self._closed = True
                self._socket.disable_monitor()
                self._monitor.close()
                self._socket.close()
                self._context.term()
                if self._polling:
                    os.eventfd_write(self._wake_fd, 1)  # who polls it closes it
                else:
                    self._close_wake_fd()

    def _close_wake_fd(self) -> None:
        fd, self._wake_fd = self._wake_fd, -1
        if fd >= 0:
            os.close(fd)


def _readable(fd: int, timeout_s: float) -> bool:
    if fd < 0:
        raise DisconnectedError("the connection is closed")
    poller = select.poll()
    poller.register(fd, select.POLLIN)
    return bool(poller.poll(max(0.0, timeout_s) * 1000))
