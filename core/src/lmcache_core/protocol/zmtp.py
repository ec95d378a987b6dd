"""A listener for ZMQ peers that bounds what is kept for them.

libzmq bounds its queues in messages, and counts a message once it is whole. A peer that never ends its message,
subscribes to thousands of topics, or does not read what it asks for, makes it keep gigabytes. So wherever connections
are not encrypted we speak ZMTP 3.0 ourselves (https://rfc.zeromq.org/spec/23), on plain sockets: every byte that waits
for a peer is on its account, and what a peer sends is at most one frame before somebody looks at it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import socket
import stat
import struct
from collections import Counter, deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple, Protocol

from lmcache_core import limits
from lmcache_core.errors import ProtocolError
from lmcache_core.guard import on_failure
from lmcache_core.pool.atfork import forget_in_child
from lmcache_core.protocol.hostport import HostPort
from lmcache_core.protocol.unread import FRAME_OVERHEAD_BYTES, Backlog, Unread
from lmcache_core.zmq_door import SEATS, door_seats

__all__ = ["Bounds", "Turns", "Unread", "ZmtpListener", "encode_message"]

_GREETING = b"\xff" + bytes(8) + b"\x7f" + b"\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
_GREETING_BYTES = len(_GREETING)
_MORE, _LONG, _COMMAND = 1, 2, 4  # flags of a frame
_PARTNERS = {b"PUB": (b"SUB", b"XSUB"), b"ROUTER": (b"REQ", b"DEALER", b"ROUTER")}
PART_BYTES = 64  # of a frame of a message that is not whole, besides its own: the object around it
_READ_BYTES = 4096  # at once: larger frames need several
_FRAMES_A_TURN = 16
_PAUSE_S = 0.1  # before the next try to accept where there is no descriptor
_SIOCGIFADDR = 0x8915
_GONE = select.EPOLLHUP | select.EPOLLERR
_CREDENTIALS = struct.Struct("iII")  # pid, uid, gid
_SO_PEERGROUPS = 59
_GROUPS_SEEN_MAX = 256


def encode_message(*frames: bytes) -> bytes:
    """A whole message, as it is sent."""
    sent = bytearray()
    for at, frame in enumerate(frames, 1):
        sent += _frame(_MORE if at < len(frames) else 0, frame)
    return bytes(sent)


def _frame(flags: int, body: bytes) -> bytes:
    if len(body) < 256:
        return bytes((flags, len(body))) + body
    return bytes((flags | _LONG,)) + struct.pack(">Q", len(body)) + body


def _command(name: bytes, body: bytes) -> bytes:
    return _frame(_COMMAND, bytes((len(name),)) + name + body)


class Polls(Protocol):
    """What waits for descriptors: the server's loop, or `Turns`."""

    def add(self, fd: int, mask: int, handler: Callable[[int], None], /) -> None: ...
    def modify(self, fd: int, mask: int, /) -> None: ...
    def remove(self, fd: int, /) -> None: ...


class Turns:
    """The smallest `Polls`, for a thread that does nothing else."""

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._handlers: dict[int, Callable[[int], None]] = {}

    def add(self, fd: int, mask: int, handler: Callable[[int], None], /) -> None:
        """Call `handler` with what happened, of what is in `mask`, on this descriptor."""
        self._epoll.register(fd, mask)
        self._handlers[fd] = handler

    def modify(self, fd: int, mask: int, /) -> None:
        """Wait for something else on it."""
        self._epoll.modify(fd, mask)

    def remove(self, fd: int, /) -> None:
        """Wait for nothing on it any more."""
        del self._handlers[fd]
        self._epoll.unregister(fd)

    def turn(self, wait_s: float, events_max: int) -> int:
        """Wait for some events, and do what they are for. Returns how many there were."""
        ready = self._epoll.poll(wait_s, events_max)
        for fd, mask in ready:
            handler = self._handlers.get(fd)
            if handler is not None:
                handler(mask)
        return len(ready)

    def close(self) -> None:
        """Close its own descriptor; those that it waited for stay open."""
        self._epoll.close()


class Bounds(NamedTuple):
    """What a listener allows one of its peers."""

    frame_bytes: int
    message_bytes: int  # of all frames of a message, with `PART_BYTES` for each
    connections: int
    unproven: int | None = None  # connections that `proven` was not called for; None: nobody can prove anything


class ZmtpPeer(Backlog):
    """One connection."""

    def __init__(self, listener: ZmtpListener, sock: socket.socket, address: str, now: float) -> None:
        self.address = address
        self.pid, self.uid, self._gid = 0, -1, 0
        if sock.family == socket.AF_UNIX:
            credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
            self.pid, self.uid, self._gid = _CREDENTIALS.unpack(credentials)
            self.address = f"uid {self.uid}"
        self.user: object = None  # whatever the listener's owner keeps with it
        self.topics: set[bytes] = set()
        self.requests: deque[list[bytes]] = deque()  # not answered yet
        self.answer: Iterator[bytes] | None = None  # the rest of the answer to the first of them
        self.ready = False  # the handshake is over
        self.moved_s = now  # when it connected, or last read something
        self.unread = listener.unread.open(self.address)
        self._listener = listener
        self._sock = sock
        self._came = bytearray()  # at most a frame and what one read adds
        self._parts: list[bytes] = []  # of a message that is not whole
        self._parts_bytes = 0
        self._greeted = False
        self._ended = False  # it sends nothing more
        self._waiting: deque[bytes] = deque()
        self._first_sent = 0  # bytes of the first that waits

    def fileno(self) -> int:
        """-1 once it is closed."""
        return self._sock.fileno()

    def gids(self) -> set[int]:
        """The groups of the process at the other end of a Unix socket."""
        more = b""
        with contextlib.suppress(OSError):  # it has more groups than we can read
            more = self._sock.getsockopt(socket.SOL_SOCKET, _SO_PEERGROUPS, 4 * _GROUPS_SEEN_MAX)
        return {self._gid, *struct.unpack(f"{len(more) // 4}I", more)}

    @property
    def waits(self) -> bool:
        """Whether there is something that it has to read first."""
        return bool(self._waiting)

    @property
    def paused(self) -> bool:
        """Whether it must read before it is read from."""
        return len(self.requests) >= limits.ZMTP_REQUESTS_MAX or Unread.pauses(self, len(self._waiting))

    def send(self, message: bytes) -> bool:
        """Send it, or let it wait. False: there is no room for it, and the connection ends."""
        if self.fileno() < 0 or not self._listener.unread.keep(self, len(message)):
            return False
        self._waiting.append(message)
        if len(self._waiting) == 1:
            self._flush()
        return True

    def has_room(self, message: bytes) -> bool:
        """Whether it may wait for this connection, as far as that one's own account goes."""
        return self.unread.full_for(len(message) + FRAME_OVERHEAD_BYTES) is not self.unread

    def drop(self) -> None:
        self._abandon()
        with contextlib.suppress(OSError):  # it has ended already
            self._sock.shutdown(socket.SHUT_RDWR)  # whoever waits for it sees an end of file

    def close(self) -> None:
        """Forget it, and all that is kept for it."""
        if self.fileno() >= 0:
            self._listener.forget(self)
            self._sock.close()
        self._abandon()
        self._came.clear()
        self._parts.clear()

    def close_in_child(self) -> None:
        """The connection is the parent's."""
        self._sock.close()

    def _abandon(self) -> None:
        """Answer nothing more."""
        self.requests.clear()
        self.answer = None
        self._waiting.clear()
        self._first_sent = 0
        self._listener.unread.free(self)

    def on_ready(self, mask: int) -> None:
        """Do what its socket is ready for."""
        if mask & select.EPOLLOUT:
            before = len(self._waiting), self._first_sent
            self._flush()
            if before != (len(self._waiting), self._first_sent):
                self.moved_s = self._listener.now()
        if mask & _GONE:
            if not self._listener.acts:
                self.close()
                return
            self._abandon()  # nobody will read it; but it may have asked for something to be done
        if self.fileno() >= 0 and mask & ~select.EPOLLOUT and self not in self._listener.pending:
            self._read()

    def watch(self) -> None:
        """Wait for what can be done now."""
        if self.fileno() >= 0:
            reads = not (self._ended or self.paused or self in self._listener.pending)
            mask = (select.EPOLLIN if reads else 0) | (select.EPOLLOUT if self._waiting else 0)
            self._listener.watch.modify(self.fileno(), mask)

    def _flush(self) -> None:
        try:
            self._send_waiting()
        except OSError:
            self.drop()  # not closed: whoever sends may be going through all peers
        if self._came and not self.paused:
            self._listener.pending[self] = None
        self.watch()

    def _send_waiting(self) -> None:
        while self._waiting:
            try:
                with memoryview(self._waiting[0]) as first:
                    self._first_sent += self._sock.send(first[self._first_sent :], socket.MSG_NOSIGNAL)
            except BlockingIOError:  # its socket is full: `watch` waits until there is room
                return
            if self._first_sent == len(self._waiting[0]):
                self._listener.unread.sent(self, len(self._waiting.popleft()))
                self._first_sent = 0

    def _read(self) -> None:
        try:
            data = self._sock.recv(_READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        self._ended = not data
        self._came += data
        self._listener.pending[self] = None
        self.watch()

    def take(self) -> bool:
        """Take what has come whole: the greeting, or one frame. False: there is no more of it. Raises
        `ProtocolError`."""
        came = self._came
        if not self._greeted:
            return self._greet()
        if len(came) < 2:
            return False
        flags, first = came[0], 9 if came[0] & _LONG else 2
        if flags > (_MORE | _LONG | _COMMAND):
            raise ProtocolError("no frame begins like this")
        if len(came) < first:
            return False
        nbytes = int.from_bytes(came[1:first], "big")
        if nbytes > (self._listener.bounds.frame_bytes if self.ready else limits.ZMTP_COMMAND_BYTES_MAX):
            raise ProtocolError("the frame is too large")
        if len(came) < first + nbytes:
            return False
        body = bytes(came[first : first + nbytes])
        del came[: first + nbytes]
        if flags & _COMMAND:
            self._obey(body)
        else:
            self._add(body, last=not flags & _MORE)
        return True

    @property
    def ended(self) -> bool:
        """Whether it sends nothing more."""
        return self._ended

    def _greet(self) -> bool:
        came = self._came
        if came and came[0] != 0xFF:
            raise ProtocolError("it does not speak ZMTP")
        if len(came) < _GREETING_BYTES:
            return False
        if came[9] != 0x7F or came[10] < 3 or bytes(came[12:32]) != _GREETING[12:32]:
            raise ProtocolError("it speaks another version, or wants another mechanism")
        del came[:_GREETING_BYTES]
        self._greeted = True
        kind = self._listener.kind
        self.send(_command(b"READY", b"\x0bSocket-Type" + struct.pack(">I", len(kind)) + kind))
        return True

    def _obey(self, command: bytes) -> None:
        name, body = command[1 : 1 + command[0]] if command else b"", command[1 + command[0] :] if command else b""
        if not self.ready:
            if name != b"READY" or _properties(body).get(b"socket-type") not in _PARTNERS[self._listener.kind]:
                raise ProtocolError("its socket is no partner of this one")
            self.ready = True
        elif name == b"PING":
            self.send(_command(b"PONG", body[2:18]))
        elif name in (b"SUBSCRIBE", b"CANCEL") and self._listener.kind == b"PUB":
            self._subscribe(body, name == b"SUBSCRIBE")

    def _add(self, part: bytes, *, last: bool) -> None:
        """A frame of a message."""
        self._parts.append(part)
        self._parts_bytes += len(part) + PART_BYTES
        if not self.ready or self._parts_bytes > self._listener.bounds.message_bytes:
            raise ProtocolError("the message is too large, or too early")
        if not last:
            return
        parts, self._parts, self._parts_bytes = self._parts, [], 0
        if self._listener.kind == b"ROUTER":
            self._listener.on_message(self, parts)
        elif parts[0][:1] in (b"\0", b"\1"):
            self._subscribe(parts[0][1:], parts[0][0] == 1)

    def _subscribe(self, topic: bytes, wants: bool) -> None:
        if not wants:
            self.topics.discard(topic)
            return
        self.topics.add(topic)
        if len(self.topics) > limits.ZMTP_TOPICS_MAX or len(topic) > limits.ZMTP_TOPIC_BYTES_MAX:
            raise ProtocolError("it has too many subscriptions, or too long ones")


def _ask_later(peer: ZmtpPeer, parts: list[bytes]) -> None:
    peer.requests.append(parts)


class ZmtpListener:
    """A bound PUB or ROUTER, on the thread of `watch`: call `pump` once a turn, and `tend` once a second.

    Beyond its limit of connections, or where the seats of all doors are taken, one of the unproven ones of the address
    that has most is closed: the oldest where peers can prove themselves, otherwise the newest. So newcomers from
    elsewhere find a place.
    """

    def __init__(
        self,
        kind: bytes,
        endpoint: str,
        watch: Polls,
        unread: Unread,
        now: Callable[[], float],
        bounds: Bounds,
        on_message: Callable[[ZmtpPeer, list[bytes]], None] = _ask_later,
        admits: Callable[[ZmtpPeer], bool] = lambda peer: True,
    ) -> None:
        """`on_message`: what a ROUTER does with a message; without it, messages wait in `requests` for `answer`. Raises
        `OSError` if it cannot listen there."""
        self.kind = kind
        self.watch = watch
        self.unread = unread
        self.now = now
        self.bounds = bounds
        self.on_message = on_message
        self.acts = on_message is not _ask_later  # messages do something, besides being answered
        self._admits = admits
        self.peers: dict[int, ZmtpPeer] = {}  # by descriptor, in the order of their arrival
        self.pending: dict[ZmtpPeer, None] = {}  # of which something has come that was not looked at
        self.turned_away = 0
        self._connections_max = min(bounds.connections, door_seats())
        self._unproven: dict[ZmtpPeer, None] = {}
        self._by_address: Counter[str] = Counter()  # of unproven ones
        self._accepts_s = 0.0  # not before, for lack of a descriptor
        self._endpoint = endpoint
        self._sock, self.path = _bound(endpoint)
        self._file = None if self.path is None else _file_at(self.path)
        watch.add(self._sock.fileno(), select.EPOLLIN, self._accept)
        forget_in_child(self)

    def after_fork_in_child(self) -> None:
        """Otherwise peers would wait for a child that answers nothing."""
        for peer in self.peers.values():
            peer.close_in_child()
        self._sock.close()

    @property
    def waits(self) -> bool:
        """Whether any peer has something that it has to read first."""
        return any(peer.waits for peer in self.peers.values())

    def pump(self) -> bool:
        """Look at what has come, a frame of each peer in turn. True: there is more, come back at once."""
        for _ in range(_FRAMES_A_TURN):
            if not self.pending:
                return False
            peer = next(iter(self.pending))
            del self.pending[peer]
            try:
                more = not peer.paused and peer.take()
            except ProtocolError:
                peer.close()
                continue
            if peer.fileno() < 0:
                continue
            if more:
                self.pending[peer] = None
            elif peer.ended and not peer.paused:
                peer.close()
            else:
                peer.watch()
        return bool(self.pending)

    def tend(self) -> None:
        """Close who does not finish the handshake, or does not read an answer, and accept again."""
        now = self.now()
        for peer in list(self.peers.values()):
            stalled = peer.moved_s + (limits.ZMTP_STALLED_S if peer.ready else limits.HELLO_S) <= now
            if stalled and (not peer.ready or peer.answer is not None):
                peer.close()
        if self._accepts_s and self._accepts_s <= now:
            self._accepts_s = 0.0
            self.watch.modify(self._sock.fileno(), select.EPOLLIN)

    def publish(self, topic: bytes, message: bytes) -> None:
        """Send it to all that have subscribed. Those that do not read miss it."""
        for peer in list(self.peers.values()):
            if any(map(topic.startswith, peer.topics)) and peer.has_room(message):
                peer.send(message)

    def answer(self, answer_to: Callable[[list[bytes]], Iterator[bytes]]) -> bool:
        """Go on with everybody's answer, as far as they read. True: there is more to do at once."""
        more = False
        for peer in [peer for peer in self.peers.values() if peer.requests or peer.answer is not None]:
            if Unread.pauses(peer, int(peer.waits)):
                continue
            if not peer.waits:
                peer.moved_s = self.now()
            if peer.answer is None:
                peer.answer = answer_to(peer.requests.popleft())
                self.pending[peer] = None  # it may have been paused
            message = next(peer.answer, None)
            if message is None:
                peer.answer = None
            else:
                peer.send(message)  # if there is no room the connection ends: no part of an answer may be missing
            more = more or peer.answer is not None or bool(peer.requests)
        return more

    def proven(self, peer: ZmtpPeer) -> None:
        """The peer has shown that it is one of ours: it is not closed for others from now on."""
        if peer in self._unproven:
            del self._unproven[peer]
            self._uncount(peer.address)

    def unproven(self, peer: ZmtpPeer) -> None:
        """What proved the peer has ended: from now on it makes way for others, as a newcomer does."""
        if peer.fileno() in self.peers and peer not in self._unproven:
            self._unproven[peer] = None
            self._by_address[peer.address] += 1

    def forget(self, peer: ZmtpPeer) -> None:
        """It is about to close."""
        del self.peers[peer.fileno()]
        self.watch.remove(peer.fileno())
        self.pending.pop(peer, None)
        self.proven(peer)
        SEATS.add(-1)

    def close(self) -> None:
        """Close all of it; the name of a Unix socket is the caller's to remove."""
        for peer in list(self.peers.values()):
            peer.close()
        if self._sock.fileno() >= 0:
            self.watch.remove(self._sock.fileno())
            self._sock.close()

    def remove_name(self) -> None:
        """Remove our own socket's name; it may block."""
        if self.path is not None:
            with contextlib.suppress(OSError):
                if self.stands:
                    self.path.unlink()

    @property
    def stands(self) -> bool:
        """Whether the path still names our socket; always with TCP. For any thread."""
        return self.path is None or _file_at(self.path) == self._file

    def make_again(self, grant: Callable[[], None]) -> Callable[[], None]:
        """Make a Unix socket again whose name was removed; what must then be done on the thread of `watch`. Connections
        stay. `grant` opens the new file to peers. For any thread. Raises `OSError` if somebody else listens there, or
        it cannot be made, and what `grant` raises."""
        assert self.path is not None
        if not self.path.is_socket():
            self.path.unlink(missing_ok=True)  # a file in its place
        sock, _ = _bound(self._endpoint)
        file = _file_at(self.path)
        with on_failure(sock.close):
            grant()
        return lambda: self._listen_at(sock, file)

    def _listen_at(self, sock: socket.socket, file: tuple[int, int] | None) -> None:
        former = self._sock
        if former.fileno() < 0:  # it was closed meanwhile
            sock.close()
            self._file = file
            self.remove_name()
            return
        self._accept(select.EPOLLIN)  # who came to the former one; others try again
        self.watch.remove(former.fileno())
        former.close()
        self._sock, self._file, self._accepts_s = sock, file, 0.0
        self.watch.add(sock.fileno(), select.EPOLLIN, self._accept)

    def _accept(self, mask: int) -> None:
        try:
            sock, came_from = self._sock.accept()
        except (BlockingIOError, ConnectionError):
            return
        except OSError:  # there is no descriptor for it: it would wake us again at once
            self._accepts_s = self.now() + _PAUSE_S
            self.watch.modify(self._sock.fileno(), 0)
            return
        sock.setblocking(False)
        if sock.family != socket.AF_UNIX:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        peer = ZmtpPeer(self, sock, f"address {came_from[0]}" if isinstance(came_from, tuple) else "", self.now())
        if not self._admits(peer):
            sock.close()
            return
        SEATS.add(1)
        self.peers[sock.fileno()] = peer
        self._unproven[peer] = None
        self._by_address[peer.address] += 1
        self.watch.add(sock.fileno(), select.EPOLLIN, peer.on_ready)
        unproven_max = self._connections_max if self.bounds.unproven is None else self.bounds.unproven
        if len(self._unproven) > unproven_max or len(self.peers) > self._connections_max or SEATS.full:
            self._turn_away()
        if peer.fileno() >= 0:
            peer.send(_GREETING)

    def _turn_away(self) -> None:
        most = max(self._by_address, key=self._by_address.__getitem__)
        order = reversed(self._unproven) if self.bounds.unproven is None else iter(self._unproven)
        next(each for each in order if each.address == most).close()
        self.turned_away += 1

    def _uncount(self, address: str) -> None:
        self._by_address[address] -= 1
        if not self._by_address[address]:
            del self._by_address[address]


def _properties(body: bytes) -> dict[bytes, bytes]:
    """What a READY says: names in lower case."""
    found: dict[bytes, bytes] = {}
    at = 0
    while at < len(body):
        name = body[at + 1 : at + 1 + body[at]]
        at += 1 + body[at]
        nbytes = int.from_bytes(body[at : at + 4], "big")
        found[name.lower()] = body[at + 4 : at + 4 + nbytes]
        at += 4 + nbytes
    return found


def _bound(endpoint: str) -> tuple[socket.socket, Path | None]:
    """A socket that listens at `tcp://HOST:PORT`, where the host may be `*` or an interface, or at `ipc://PATH`."""
    if endpoint.startswith("ipc://"):
        path = Path(endpoint.removeprefix("ipc://"))
        return _listening(socket.AF_UNIX, str(path), path), path
    host, port = HostPort.parse(endpoint.removeprefix("tcp://"))
    if host == "*":
        return _listening(socket.AF_INET, ("", port)), None
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError:
        family, address = socket.AF_INET, (_address_of(host), port)
    return _listening(family, address), None


def _file_at(path: Path) -> tuple[int, int] | None:
    """Which file is there; None: none."""
    try:
        found = path.lstat()
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _listening(family: socket.AddressFamily, address: object, path: Path | None = None) -> socket.socket:
    sock = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
    with on_failure(sock.close):
        if path is not None:
            _remove_leftover(path)
        else:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        sock.bind(address)  # type: ignore[arg-type]
        sock.listen()
    return sock


def _remove_leftover(path: Path) -> None:
    """Remove the socket of a server that is not there any more."""
    try:
        if not stat.S_ISSOCK(path.lstat().st_mode):
            return
    except FileNotFoundError:
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK) as asks:
        try:
            asks.connect(os.fspath(path))
        except ConnectionRefusedError:
            path.unlink(missing_ok=True)
        except OSError:  # somebody listens, or it is of another kind: binding says so
            return


def _address_of(interface: str) -> str:
    """The IPv4 address of a network interface. Raises `OSError`."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asks:
        found = fcntl.ioctl(asks, _SIOCGIFADDR, struct.pack("256s", interface.encode()[:15]))
    return socket.inet_ntoa(found[20:24])
