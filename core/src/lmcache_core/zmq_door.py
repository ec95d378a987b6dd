"""How many connections the ZMQ sockets of a server have. Each socket has a door, and all doors of the process share
one number of seats, so that together they leave descriptors to others.

libzmq knows no limit, and takes every descriptor of the process. Where it serves a socket, `ZmqDoor` counts: the
library's monitor tells of each connection that it accepts, with its descriptor. Beyond the limit one of them is shut
down, and the library then sees an end of file, as if the other side had hung up.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import resource
import socket as sockets
import struct
import sys
import termios
import threading
from collections import Counter, defaultdict
from typing import TYPE_CHECKING

import zmq
from zmq.utils.monitor import recv_monitor_message

from lmcache_core.limits import (
    ZMQ_COMMANDS_BYTES_A_S,
    ZMQ_COMMANDS_BYTES_MAX,
    ZMQ_CONNECTIONS_FRACTION,
    ZMQ_CONNECTIONS_FRACTION_ALL,
    ZMQ_CONNECTIONS_MAX,
    ZMQ_UNFINISHED_BYTES_ALL_MAX,
    ZMQ_UNFINISHED_BYTES_MAX,
    ZMQ_UNFINISHED_CHECK_S,
    ZMQ_UNFINISHED_CHECK_S_EACH,
    ZMQ_UNPROVEN_MAX,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

_ENDS = int(zmq.EVENT_DISCONNECTED) | int(zmq.EVENT_CLOSED) | int(zmq.EVENT_CLOSE_FAILED)
_EVENTS_A_TURN = 256
_RECEIVED, _RECEIVED_AT = struct.Struct("=Q"), 128  # tcpi_bytes_received of linux/tcp.h
_TCP_INFO_BYTES = _RECEIVED_AT + _RECEIVED.size
_SEAL_BYTES = 8 + 8 + 16 + 1  # the command's name, nonce, authenticator, flags
_SHORT_BYTES, _LONG_BYTES, _SHORT_MAX = 2, 9, 255  # in front of a frame: flags, and its size in 1 byte or in 8


class _Seats:
    """The descriptors that all ZMQ doors of this process take together. For any thread."""

    def __init__(self) -> None:
        self._empty()
        os.register_at_fork(after_in_child=self._empty)  # the connections are the parent's

    def _empty(self) -> None:
        self._lock = threading.Lock()
        self._taken = 0

    @property
    def full(self) -> bool:
        """Whether somebody has to leave."""
        return self._taken > max(1, int(_descriptors_max() * ZMQ_CONNECTIONS_FRACTION_ALL))

    def add(self, connections: int) -> None:
        """So many more are open; negative: so many fewer."""
        with self._lock:
            self._taken += connections


SEATS = _Seats()


def door_seats() -> int:
    """How many connections one door may have. The doors of one server cannot take each other's."""
    return max(1, min(ZMQ_CONNECTIONS_MAX, int(_descriptors_max() * ZMQ_CONNECTIONS_FRACTION)))


def _descriptors_max() -> int:
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


class _Connection:
    __slots__ = ("address", "commands_left", "finished", "holder", "inode")

    def __init__(self, inode: int, address: str) -> None:
        self.inode = inode  # of the socket: the number of a descriptor is soon used again
        self.address = address
        self.holder = address  # until it is proven
        self.finished = 0  # bytes on the wire that belong to messages that have ended
        self.commands_left = ZMQ_COMMANDS_BYTES_MAX  # bytes that may count as commands before a message has ended


class ZmqDoor:
    """Counts the connections of one socket of libzmq. Lives on the thread that uses the socket.

    A connection is *unproven* until the caller says that it is not. A proven one is never shut down for others: of
    those of the address that has most unproven ones, it is the oldest, so that an honest newcomer has time to prove
    itself.
    """

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self._socket = socket
        self._monitor = socket.get_monitor_socket(int(zmq.EVENT_ACCEPTED) | _ENDS)
        self._connections_max = door_seats()
        self._unproven_max = max(1, min(ZMQ_UNPROVEN_MAX, self._connections_max // 2))
        self._unproven: dict[int, _Connection] = {}  # by descriptor, in the order of their arrival
        self._proven: dict[int, _Connection] = {}
        self._by_address: Counter[str] = Counter()  # of unproven ones
        self.turned_away = 0
        self._checked_at_s = 0.0
        self.look()  # the library wakes only those who have found nothing

    def __len__(self) -> int:
        return len(self._unproven) + len(self._proven)

    @property
    def monitor(self) -> zmq.Socket[bytes]:
        """Readable when there is something to `look` at; edge-triggered, like every ZMQ socket's descriptor."""
        return self._monitor

    def look(self) -> bool:
        """Count who has come and gone, and shut down whoever is too many. True: there is more, come back at once."""
        for _ in range(_EVENTS_A_TURN):
            if not int(self._monitor.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
                return False
            event = recv_monitor_message(self._monitor, zmq.NOBLOCK)
            self._forget(event["value"])
            if event["event"] == zmq.EVENT_ACCEPTED:
                self._came(event["value"])
        return True

    def connection(self, fd: int) -> object:
        """What has this descriptor now, as far as `look` has seen: another object for each connection. None: nobody."""
        return self._proven.get(fd) or self._unproven.get(fd)

    def proven(self, fd: int, holder: str) -> None:
        """The connection with this descriptor is one of ours: its peer has said hello, as one of this holder's."""
        connection = self._unproven.pop(fd, None)
        if connection is not None:
            self._uncount(connection.address)
            self._proven[fd] = connection
            connection.holder = holder

    def unproven(self, fd: int) -> None:
        """Its session has ended: from now on it makes way for others, as a newcomer does."""
        connection = self._proven.pop(fd, None)
        if connection is not None:
            self._unproven[fd] = connection
            self._by_address[connection.address] += 1

    def end(self, fd: int) -> None:
        """Shut down the connection with this descriptor."""
        connection = self._proven.get(fd) or self._unproven.get(fd)
        if connection is not None:
            self._forget(fd)
            self._shut_down(fd, connection)

    def received(self, fd: int, nbytes: int) -> None:
        """A part of a whole message has come from the connection with this descriptor."""
        connection = self._proven.get(fd) or self._unproven.get(fd)
        if connection is not None:
            connection.finished += _bytes_on_the_wire(nbytes)
            connection.commands_left = ZMQ_COMMANDS_BYTES_MAX

    def end_unfinished(self, now: float) -> None:
        """Shut down whoever sends a message without end: libzmq keeps all of its parts until the last has come, and
        has a limit for each part alone. The kernel says how many bytes the library has taken from each peer, and
        `received` what became of them. If all of them together are too much, the holder with most of them loses its
        largest: many connections of one holder do not end another's."""
        allowed = int((now - self._checked_at_s) * ZMQ_COMMANDS_BYTES_A_S)
        self._checked_at_s = now
        of_holders: defaultdict[str, list[tuple[int, int]]] = defaultdict(list)
        sums: Counter[str] = Counter()
        for fd, connection in [*self._unproven.items(), *self._proven.items()]:
            taken = _bytes_taken(fd)
            finished = min(taken, connection.finished + min(allowed, connection.commands_left))
            connection.commands_left -= max(0, finished - connection.finished)
            connection.finished = finished
            if taken - finished > ZMQ_UNFINISHED_BYTES_MAX:
                self.end(fd)
            else:
                of_holders[connection.holder].append((taken - finished, fd))
                sums[connection.holder] += taken - finished
        total = sum(sums.values())
        while total > ZMQ_UNFINISHED_BYTES_ALL_MAX:
            most = max(sums, key=sums.__getitem__)
            largest = max(of_holders[most])
            of_holders[most].remove(largest)
            self.end(largest[1])
            sums[most] -= largest[0]
            total -= largest[0]

    @property
    def next_check_s(self) -> float:
        """How soon `end_unfinished` is to be called again."""
        return max(ZMQ_UNFINISHED_CHECK_S, len(self) * ZMQ_UNFINISHED_CHECK_S_EACH)

    def close(self) -> None:
        """Call this before the socket is closed."""
        SEATS.add(-len(self))
        self._socket.disable_monitor()
        self._monitor.close()

    def _came(self, fd: int) -> None:
        with contextlib.suppress(OSError), _borrowed(fd) as sock:  # OSError: it is gone already
            peer = sock.getpeername()
            connection = _Connection(os.fstat(fd).st_ino, str(peer[0]) if isinstance(peer, tuple) else "")
            self._unproven[fd] = connection
            self._by_address[connection.address] += 1
            SEATS.add(1)
        if len(self._unproven) > self._unproven_max or len(self) > self._connections_max or SEATS.full:
            self._turn_away()

    def _forget(self, fd: int) -> None:
        before = len(self)
        self._proven.pop(fd, None)
        connection = self._unproven.pop(fd, None)
        if connection is not None:
            self._uncount(connection.address)
        SEATS.add(len(self) - before)

    def _uncount(self, address: str) -> None:
        self._by_address[address] -= 1
        if not self._by_address[address]:
            del self._by_address[address]

    def _turn_away(self) -> None:
        if not self._unproven:
            return
        address = max(self._by_address, key=self._by_address.__getitem__)
        fd = next(fd for fd, each in self._unproven.items() if each.address == address)
        self.end(fd)

    def _shut_down(self, fd: int, connection: _Connection) -> None:
        self.turned_away += 1
        with contextlib.suppress(OSError):
            if os.fstat(fd).st_ino == connection.inode:
                with _borrowed(fd) as sock:
                    sock.shutdown(sockets.SHUT_RDWR)


def _bytes_taken(fd: int) -> int:
    """What the library has read from a TCP connection since it began; 0 if it is gone, or is none of TCP. What waits in
    the kernel is not in our memory."""
    try:
        with _borrowed(fd) as sock:
            waiting = int.from_bytes(fcntl.ioctl(fd, termios.FIONREAD, bytes(4)), sys.byteorder)
            info = sock.getsockopt(sockets.IPPROTO_TCP, sockets.TCP_INFO, _TCP_INFO_BYTES)
    except OSError:
        return 0
    return max(0, int(_RECEIVED.unpack_from(info, _RECEIVED_AT)[0]) - waiting) if len(info) == _TCP_INFO_BYTES else 0


def _bytes_on_the_wire(nbytes: int) -> int:
    """Of a part of a message, as ZMTP with CURVE sends it."""
    sealed = nbytes + _SEAL_BYTES
    return sealed + (_SHORT_BYTES if sealed <= _SHORT_MAX else _LONG_BYTES)


@contextlib.contextmanager
def _borrowed(fd: int) -> Iterator[sockets.socket]:
    """The library's socket, which stays open: it takes no descriptor to look at it."""
    sock = sockets.socket(sockets.AF_INET, sockets.SOCK_STREAM, fileno=fd)  # else Python asks the kernel what it is
    try:
        yield sock
    finally:
        sock.detach()
