"""One connection to a server, over either carrier. Sends and receives whole frames.

Nothing here waits unless it is given a deadline: a link is opened in steps.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import socket
import struct
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lmcache_core.descriptors import Descriptor
from lmcache_core.errors import DisconnectedError, UsageError
from lmcache_core.limits import FRAME_BYTES_MAX, ZMQ_DESCRIPTORS
from lmcache_core.protocol.hostport import allow_ipv6

if TYPE_CHECKING:
    from lmcache_core.client.link.address import CurveKeys
    from lmcache_core.trust import Trust

_POLL_S = 1.0  # how long one blocking receive lasts before the deadline is checked again
_POLL_MAX_S = 86_400.0  # the longest wait passed to poll, which counts milliseconds in an int
_DONTWAIT = int(socket.MSG_DONTWAIT)
_WAIT, _DO_NOT_WAIT = (0,), (_DONTWAIT,)  # flags of a receive
_BACKLOG_POLL_S = 0.001  # nothing signals when a full backlog has room again
_FULL_POLL_S = 0.005  # nor when ZMQ's queue of 1,024 frames has, except by taking the receiver's wake-up
_FD = struct.Struct("i")
_CLOEXEC = int(socket.MSG_CMSG_CLOEXEC)
_ROOM = (socket.CMSG_SPACE(2 * _FD.size),)
_LENGTH = itemgetter(0)
_FIRST = ("first",)


class Connection(ABC):
    """`send` and `poll` may be called by any thread; `connect` and `receive` by one at a time.

    `deadline` is a time on the caller's clock; one in the past means: do not wait.
    """

    carrier: str
    takes_token = False  # whether a life token may come with the first frame

    @abstractmethod
    def connect(self) -> bool:
        """One step towards a connection, without waiting. False: the server's backlog is full, try again. Raises
        `DisconnectedError` if there is no server, or an untrusted one."""

    @abstractmethod
    def poll(self, deadline: float, also_fd: int = -1) -> None:
        """Wait until there may be something to do: a frame, an end, or, before it is connected, another attempt; or
        until `also_fd` is readable."""

    @abstractmethod
    def send(self, frame: bytes, deadline: float) -> bool:
        """Send a frame. False: the server does not read, there was no room until the deadline, and nothing was sent.
        Raises `DisconnectedError`."""

    @abstractmethod
    def send_waiting(self, frames: deque[bytes]) -> None:
        """Send as many of these frames as there is room for, and remove them. Each is sent once, even if an interrupt
        ends this half way and it is called again. One thread at a time; raises `DisconnectedError`."""

    @abstractmethod
    def receive(self, deadline: float) -> memoryview | None:
        """The next frame, or None at the deadline, and sometimes earlier. Raises `DisconnectedError`. Returns the same
        frame again until `received` is called, so an interrupted reader loses nothing."""

    received: Callable[[], None]
    """Mark the last frame as handled."""

    @abstractmethod
    def ended(self) -> bool:
        """Whether the server has hung up. Does not wait."""

    @abstractmethod
    def close(self) -> None:
        """Idempotent. Ends a receive in another thread."""

    @abstractmethod
    def close_in_child(self) -> None:
        """In a forked child: close our end of the parent's connection without ending it."""

    def take_fd(self) -> Descriptor:
        """The pool's descriptor, which came with the first frame; the caller owns it now. Closed if none came."""
        return Descriptor()

    def take_token(self) -> Descriptor:
        """The same for the life token."""
        return Descriptor()


class LifelineConnection(Connection):
    """A Unix SEQPACKET socket: to a path, or one end of a pair (embedded mode)."""

    carrier = "lifeline"
    takes_token = True

    def __init__(self, sock: socket.socket, path: Path | None = None, trust: Trust | None = None) -> None:
        """`path`: where to connect; `trust`: which users to accept there. Without them the socket is already
        connected."""
        self._sock = sock  # `__del__` needs only this and the next two: no interrupt comes between them
        self._first: dict[str, Any] = {}  # the received first frame, which may bring descriptors
        self._taken: set[int] = set()  # which of those descriptors have an owner now
        self._trust = trust
        self._path = path
        self._connected = False
        self._buffer = memoryview(bytearray(FRAME_BYTES_MAX + 1))
        self._receive_now = partial(sock.recv_into, self._buffer, 0)
        self._lengths: deque[int] = deque()  # of the frame in the buffer, until `received`
        self.received = self._lengths.clear
        self._sent: deque[tuple[bytes, Any]] = deque(maxlen=1)
        sock.setblocking(False)
        if path is None:
            self._now_connected()

    @classmethod
    def to(cls, path: Path, trust: Trust) -> LifelineConnection:
        """A connection that is not made yet. Raises `DisconnectedError` if the process has no descriptor left for
        it."""
        try:
            return cls(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC), path, trust)
        except OSError as error:
            raise DisconnectedError(f"no connection to {path}: {error.strerror}; see ulimit -n") from error

    def fileno(self) -> int:
        """The socket's descriptor, for `select`; -1 once it is closed."""
        return self._sock.fileno()

    def connect(self) -> bool:
        if not self._connected:
            assert self._path is not None
            assert self._trust is not None
            try:
                with contextlib.closing(self._trust.open_socket_directory(self._path)) as directory:
                    self._sock.connect(f"/proc/self/fd/{directory.fileno()}/{self._path.name}")
                self._trust.check_peer(self._sock, str(self._path))
            except BlockingIOError:  # a stopped server's backlog fills up
                return False
            except OSError as error:
                raise DisconnectedError(
                    f"no server answers at {self._path}: {error.strerror}; {_cure(error, self._path)}"
                ) from error
            self._now_connected()
        return True

    def _now_connected(self) -> None:
        self._connected = True
        self._sock.settimeout(None)
        # The kernel's own timer: one system call per receive instead of a poll and a receive.
        self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", int(_POLL_S), 0))

    def poll(self, deadline: float, also_fd: int = -1) -> None:
        left = deadline - time.monotonic()
        if self._connected:
            _ready(self.fileno(), select.POLLIN | select.POLLRDHUP, left, also_fd)
        else:
            select.poll().poll(max(0.0, min(left, _BACKLOG_POLL_S)) * 1000)

    def send(self, frame: bytes, deadline: float) -> bool:
        while True:
            try:
                self._sock.send(frame, _DONTWAIT)
                return True
            except BlockingIOError:
                if not _ready(self.fileno(), select.POLLOUT, deadline - time.monotonic()):
                    return False
            except OSError as error:
                raise DisconnectedError(f"the server went away: {error.strerror}") from error

    def send_waiting(self, frames: deque[bytes]) -> None:
        try:
            _send_each_once(frames, self._sent, self._sock.send, _DO_NOT_WAIT)
        except BlockingIOError:
            return
        except OSError as error:
            raise DisconnectedError(f"the server went away: {error.strerror}") from error

    def receive(self, deadline: float) -> memoryview | None:
        lengths = self._lengths
        if not lengths:
            left = deadline - time.monotonic()
            if 0 < left < _POLL_S and not _ready(self.fileno(), select.POLLIN, left):
                return None
            flags = _WAIT if left >= _POLL_S else _DO_NOT_WAIT
            try:
                # All of it in C: an interrupt comes before or after it, never between a frame and its length.
                if self._first:
                    lengths.extend(map(self._receive_now, flags))
                else:  # it may carry the pool's descriptor; later frames never do
                    first = map(self._sock.recvmsg_into, ([self._buffer],), _ROOM, (flags[0] | _CLOEXEC,))
                    lengths.extend(map(_LENGTH, map(self._first.setdefault, _FIRST, first)))
            except BlockingIOError:
                return None
            except OSError as error:
                raise DisconnectedError(f"the server went away: {error.strerror}") from error
        nbytes = lengths[0]
        if not nbytes:
            raise DisconnectedError("the server closed the connection")
        return self._buffer[:nbytes]

    def take_fd(self) -> Descriptor:
        return self._take(0)

    def take_token(self) -> Descriptor:
        return self._take(1)

    def _take(self, at: int) -> Descriptor:
        passed = Descriptor()
        if self._first and at not in self._taken:
            received = [data for _, kind, data in self._first["first"][1] if kind == socket.SCM_RIGHTS]
            fds = [fd for data in received for (fd,) in _FD.iter_unpack(data[: len(data) // _FD.size * _FD.size])]
            passed.fds, self._taken = deque(fds[at : at + 1]), {*self._taken, at}  # no interrupt between the two
        return passed

    def ended(self) -> bool:
        fd = self.fileno()
        if fd < 0:
            return True
        poller = select.poll()
        poller.register(fd, select.POLLRDHUP)
        return bool(poller.poll(0))

    def close_in_child(self) -> None:
        self.take_fd().close()  # the welcome has come, and nobody has mapped the pool yet
        self.take_token().close()
        self._sock.close()

    def __del__(self) -> None:
        self.take_fd()
        self.take_token()
        self._sock.close()

    def close(self) -> None:
        self.take_fd().close()
        self.take_token().close()
        if self.fileno() >= 0:
            with contextlib.suppress(OSError):  # the peer may have ended it already
                self._sock.shutdown(socket.SHUT_RDWR)  # wakes a thread that is blocked in receive
            self._sock.close()


class ZmqConnection(Connection):
    """A DEALER socket. ZMQ sockets are for one thread: a lock guards it, and an eventfd wakes the receiving thread if
    another thread's send has consumed the socket's edge-triggered event.

    ZMQ would silently reconnect to a server that does not know us. A monitor reports the end of a connection instead,
    and servers that are absent or refuse us, so that no call waits in vain.
    """

    carrier = "zmq"

    def __init__(self, address: str, curve: CurveKeys | None, trust: Trust) -> None:
        self._closed = True  # until everything is set up
        import zmq
        from zmq.utils.monitor import recv_monitor_message

        self._zmq = zmq
        if address.startswith("tcp://") and curve is None:
            raise UsageError(
                f"{address} needs CURVE keys because it uses tcp: pass curve=CurveKeys(…), to a command "
                "--server-public-key and --client-secret-key"
            )
        trust.check_ipc(address)
        self._address = address
        self._endings = {
            int(zmq.EVENT_DISCONNECTED): "went away",
            int(zmq.EVENT_CONNECT_RETRIED): "does not answer; is it running?",
            int(zmq.EVENT_HANDSHAKE_FAILED_AUTH): "refuses this key: put its .key file into zmq.curve_clients_dir",
            int(zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL): "could not agree on keys: is server_public its public key?",
            int(zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL): "broke the handshake off: is server_public its public key?",
        }
        self._read_event = recv_monitor_message
        self._lock = threading.Lock()
        self._frames: deque[bytes] = deque()  # the received frame, until `received`
        self.received = self._frames.clear
        self._sent: deque[tuple[bytes, Any]] = deque(maxlen=1)
        self._polling = False
        try:
            with contextlib.ExitStack() as undo:
                self._open(curve, undo)
                undo.pop_all()
        except (zmq.ZMQError, OSError) as error:
            raise DisconnectedError(f"no connection to {address}: {error.strerror}; see ulimit -n") from error
        self._closed = False

    def _open(self, curve: CurveKeys | None, undo: contextlib.ExitStack) -> None:
        zmq = self._zmq
        _check_descriptors(ZMQ_DESCRIPTORS)
        self._context = zmq.Context()
        undo.callback(self._context.term)
        self._socket = self._context.socket(zmq.DEALER)
        undo.callback(self._socket.close)
        self._send_now = partial(zmq.backend.Socket.send, self._socket)  # `Socket.send` is a Python wrapper around this
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.SNDHWM, 1024)
        self._socket.setsockopt(zmq.MAXMSGSIZE, FRAME_BYTES_MAX)
        if curve is not None:
            self._socket.curve_serverkey = curve.server_public
            self._socket.curve_publickey = curve.public
            self._socket.curve_secretkey = curve.secret.get()
        self._monitor = self._socket.get_monitor_socket(sum(self._endings))
        undo.callback(self._monitor.close)
        undo.callback(self._socket.disable_monitor)
        self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        undo.callback(self._close_wake_fd)
        allow_ipv6(self._socket, self._address)
        self._socket.connect(self._address)
        self._poller = select.poll()
        self._poller.register(self._socket.fileno(), select.POLLIN)
        self._poller.register(self._monitor.fileno(), select.POLLIN)
        self._poller.register(self._wake_fd, select.POLLIN)

    def connect(self) -> bool:
        return True  # ZMQ connects on its own threads and then sends what has waited

    def poll(self, deadline: float, also_fd: int = -1) -> None:
        left = deadline - time.monotonic()
        with self._lock:
            closed = self._closed
            there = not closed and int(self._socket.getsockopt(self._zmq.EVENTS)) & self._zmq.POLLIN
        if left > 0 and not closed and not there:
            poller = select.poll()  # one of our own, because a poll object is for one thread at a time
            for fd in (self._socket.fileno(), self._monitor.fileno()):
                poller.register(fd, select.POLLIN)
            # Another thread may consume the edge that this one waits for, so it waits only briefly.
            poller.poll(min(left, _FULL_POLL_S) * 1000)

    def send(self, frame: bytes, deadline: float) -> bool:
        zmq = self._zmq
        while True:
            with self._lock:
                self._check()
                try:
                    self._socket.send(frame, zmq.NOBLOCK)
                    sent = True
                except zmq.Again:
                    sent = False
                if self._socket.getsockopt(zmq.EVENTS) & zmq.POLLIN:
                    os.eventfd_write(self._wake_fd, 1)
            left = deadline - time.monotonic()
            if sent or left <= 0:
                return sent
            time.sleep(min(left, _FULL_POLL_S))

    def send_waiting(self, frames: deque[bytes]) -> None:
        zmq = self._zmq
        with self._lock:
            self._check()
            try:
                _send_each_once(frames, self._sent, self._send_now, (zmq.NOBLOCK,))
            except zmq.Again:
                return
            finally:
                if self._socket.getsockopt(zmq.EVENTS) & zmq.POLLIN:
                    os.eventfd_write(self._wake_fd, 1)

    def receive(self, deadline: float) -> memoryview | None:
        zmq = self._zmq
        while True:
            with self._lock:
                if not self._frames and not self._closed and self._socket.getsockopt(zmq.EVENTS) & zmq.POLLIN:
                    self._frames.extend(map(self._socket.recv, (zmq.NOBLOCK,)))  # in C: see LifelineConnection
                if self._frames:
                    return memoryview(self._frames[0])
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
        """Raise `DisconnectedError` if the connection has ended. The caller holds the lock."""
        if self._closed:
            raise DisconnectedError("the connection is closed")
        while int(self._monitor.getsockopt(self._zmq.EVENTS)) & self._zmq.POLLIN:
            event = int(self._read_event(self._monitor, self._zmq.NOBLOCK)["event"])
            if event in self._endings:
                raise DisconnectedError(f"the server at {self._address} {self._endings[event]}")

    def close_in_child(self) -> None:
        # ZMQ's own threads do not exist in the child, so the socket can only be abandoned. pyzmq does so by process id.
        self._closed = True
        self._close_wake_fd()

    def __del__(self) -> None:
        """Like `close`, but without the lock: no other thread has a reference."""
        if not self._closed:
            self._closed = True
            self._socket.disable_monitor()
            self._monitor.close()
            self._socket.close()
            self._context.term()
            self._close_wake_fd()

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


def _send_each_once(
    frames: deque[bytes], sent: deque[tuple[bytes, Any]], send: Callable[..., Any], flags: tuple[int]
) -> None:
    """Send and remove frames until `send` raises. `sent`: the last frame sent, which an interrupt may have left in
    `frames`."""
    while frames:
        frame = frames[0]
        if not (sent and sent[0][0] is frame):
            sent.extend(zip((frame,), map(send, (frame,), flags), strict=True))  # in C: sent and noted, or neither
        frames.popleft()


def _ready(fd: int, events: int, timeout_s: float, also_fd: int = -1) -> bool:
    if fd < 0:
        raise DisconnectedError("the connection is closed")
    if timeout_s <= 0 and events == select.POLLOUT:
        return False  # the previous attempt was just now
    poller = select.poll()
    poller.register(fd, events)
    if also_fd >= 0:
        poller.register(also_fd, select.POLLIN)
    return bool(poller.poll(min(max(0.0, timeout_s), _POLL_MAX_S) * 1000))


def _check_descriptors(count: int) -> None:
    """Raise `OSError` if this process cannot open `count` more descriptors. For a library that aborts the process if it
    runs out half way."""
    with contextlib.ExitStack() as opened:
        for _ in range(count):
            opened.callback(os.close, os.eventfd(0, os.EFD_CLOEXEC))


def _cure(error: OSError, path: Path) -> str:
    if isinstance(error, PermissionError):
        return 'the server admits others with l1.access = "group" and its runtime_dir open to them'
    if error.errno in (errno.EMFILE, errno.ENFILE):
        return "this process has no descriptor left: see ulimit -n"
    start = "lmcache-core serve" + ("" if path.parent.name == "default" else f" --name {path.parent.name}")
    with contextlib.suppress(OSError):  # others of this user, if a name is wrong
        names = sorted(each.parent.name for each in path.parent.parent.glob(f"*/{path.name}"))
        if names and isinstance(error, FileNotFoundError):
            return f"start one with `{start}`, or use the name of one that is there: {', '.join(names[:8])}"
    return f"start one with `{start}`"
