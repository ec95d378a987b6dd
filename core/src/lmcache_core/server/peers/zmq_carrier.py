"""The ZMQ carrier over TCP: a ROUTER of libzmq, since connections are encrypted; only admitted keys get in.

The socket's descriptor is edge-triggered, so `pump` is called once a turn of the loop and asks for the events itself. A
message that is not exactly one frame after the routing id is counted and dropped.
"""

from __future__ import annotations

import contextlib
import errno
import select
import socket as sockets
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import zmq
from zmq.auth import load_certificate
from zmq.auth.thread import ThreadAuthenticator

from lmcache_core import limits
from lmcache_core.errors import SettingsError
from lmcache_core.pool.atfork import forget_in_child
from lmcache_core.pool.backing import Access
from lmcache_core.protocol.hostport import allow_ipv6
from lmcache_core.protocol.unread import Backlog, Unread
from lmcache_core.server.peers.ipc_carrier import IpcCarrier
from lmcache_core.server.peers.session import Peer
from lmcache_core.server.process.loop import Loop
from lmcache_core.zmq_door import ZmqDoor

if TYPE_CHECKING:
    from lmcache_core.settings.model import ZmqSettings

IPC_NAME = "zmq"  # in the server's runtime directory
UNKNOWN_UID = 2**32 - 1  # no user has it
_MESSAGES_A_TURN = 16


class ZmqPeer(Peer, Backlog):
    """One DEALER, known by its routing id. The library says who it is, by its CURVE key."""

    def __init__(self, carrier: ZmqCarrier, identity: bytes, first: zmq.Frame) -> None:
        self.carrier = "zmq"
        self.uid = UNKNOWN_UID
        self.pid = 0  # often of another pid namespace
        self._carrier = carrier
        self.identity = identity
        self.origin = _origin(first)
        self.fd = first.get(zmq.SRCFD)  # of its connection …
        self.connection: object = None  # … which is not the next one with this number
        self.waiting: deque[bytes] = deque()
        self.unread = carrier.unread.open(self.origin)

    def send(self, frame: bytes, fd: int = -1, token_fd: int = -1) -> None:
        self._carrier.send(self, frame)

    def drop(self) -> None:
        """What it does not read is lost: the library does not let us end its connection."""
        self._carrier.garbage += len(self.waiting)
        self.waiting.clear()

    def close(self) -> None:
        self._carrier.remove(self)


def _origin(frame: zmq.Frame) -> str:
    """Who has sent it, as limits count."""
    key = _property(frame, "User-Id")
    return f"key {key}" if key else f"address {_property(frame, 'Peer-Address')}"


def _property(frame: zmq.Frame, what: str) -> str:
    try:
        return str(frame.get(what))
    except zmq.ZMQError:  # not available on this transport
        return ""


class ZmqCarrier:
    """Binds one ROUTER and turns its messages into frames of peers, only from the keys that `curve` names."""

    def __init__(self, address: str, loop: Loop, unread: Unread, curve: CurveServer) -> None:
        self._loop = loop
        self.unread = unread
        self._unsent: dict[ZmqPeer, None] = {}  # peers that do not read what is sent to them
        self.garbage = 0  # messages that were dropped
        self._check_at_s = 0.0  # for messages without end
        self._serving: ZmqPeer | None = None
        self._more = False  # parts of a message that is no frame are still to be dropped, a bounded number a turn
        self._peers: dict[bytes, ZmqPeer] = {}
        self._context = zmq.Context()
        self._authenticator = curve.authenticate(self._context)
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.MAXMSGSIZE, limits.FRAME_BYTES_MAX)
        self._socket.setsockopt(zmq.SNDHWM, limits.ZMQ_QUEUE_FRAMES)
        self._socket.setsockopt(zmq.RCVHWM, limits.ZMQ_QUEUE_FRAMES)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # it says when its queue for a peer is full
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.ROUTER_HANDOVER, 0)  # nobody can take over another's routing id
        self._socket.setsockopt(zmq.HANDSHAKE_IVL, int(limits.HELLO_S * 1000))
        curve.apply(self._socket)
        self._door = ZmqDoor(self._socket)
        try:
            allow_ipv6(self._socket, address, resolve=True)
            self._socket.bind(address)
        except (zmq.ZMQError, OSError) as error:
            self._end()
            raise SettingsError(f"cannot serve on {address}: {error}; is another server there?") from error
        self.address = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        loop.add(self._socket.fileno(), select.EPOLLIN, self._ready)
        self._monitor_fd = self._door.monitor.fileno()
        loop.add(self._monitor_fd, select.EPOLLIN, self._at_the_door)
        forget_in_child(self)

    def after_fork_in_child(self) -> None:
        """ZMQ's threads do not exist in the child, but its sockets do: one that listens on would let clients wait for a
        dead server. ZMQ does not say which descriptors they are; their address does."""
        for entry in list(Path("/proc/self/fd").iterdir()):
            fd = int(entry.name)
            try:
                found = sockets.socket(fileno=fd)
            except OSError:  # it is not a socket, or the listing's own descriptor
                continue
            with found:
                try:
                    ours = _is_address(found.getsockname(), self.address)
                except OSError:
                    ours = False
                if not ours:
                    found.detach()

    @property
    def next_check(self) -> float | None:
        """When `pump` is to be called, even if nothing comes: what comes may be a message without end."""
        return self._check_at_s if len(self._door) else None

    def _ready(self, mask: int) -> None:
        """Does nothing: the turn that follows pumps. The descriptor only wakes the loop."""

    def _at_the_door(self, mask: int) -> None:
        self._look()

    def _look(self) -> bool:
        """Look who has come and gone, up to a bound. Returns whether that was all."""
        more = self._door.look()
        if more:
            self._loop.call(lambda: self._at_the_door(0))  # after everybody's next message
        return not more

    def pump(self, on_frame: Callable[[Peer, memoryview], None]) -> bool:
        """Pass what has come to `on_frame`, up to a bound. True: there is more, come back at once."""
        socket = self._socket
        if self._unsent:
            self._flush()
        if (now := self._loop.clock.now) >= self._check_at_s:
            self._door.end_unfinished(now)
            self._check_at_s = now + self._door.next_check_s
        for _ in range(_MESSAGES_A_TURN):
            if not int(socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
                return False
            if self._more:
                part = socket.recv(zmq.NOBLOCK, copy=False)
                self._door.received(part.get(zmq.SRCFD), part.buffer.nbytes)
                self._more = bool(socket.getsockopt(zmq.RCVMORE))
                continue
            identity = socket.recv(zmq.NOBLOCK)
            # The library says who it is with the bytes, and only if they are not copied.
            first = socket.recv(zmq.NOBLOCK, copy=False)
            peer, frame = self._peers.get(identity) or ZmqPeer(self, identity, first), first.buffer
            fd, stranger = first.get(zmq.SRCFD), _origin(first) != peer.origin  # routing ids are chosen by the peers
            there = self._door.connection(fd)
            if not stranger and (there is None or there is not peer.connection):
                while (
                    not self._look() and self._door.connection(fd) is there
                ):  # it has come, or come back, behind others
                    pass
                peer.fd, peer.connection = fd, self._door.connection(fd)
                if peer.session is not None:
                    self._door.proven(fd, peer.origin)
            self._door.received(fd, frame.nbytes)
            self._more = bool(socket.getsockopt(zmq.RCVMORE))
            if stranger:  # a session belongs to the key that has opened it
                self._door.end(fd)
            if stranger or self._more:
                self.garbage += 1
                continue
            self._serving = peer
            on_frame(peer, frame)
            self._serving = None
            if peer.session is not None:  # only peers with a session are remembered: routing ids cost nothing to make
                if identity not in self._peers:
                    self._door.proven(peer.fd, peer.origin)
                self._peers[identity] = peer
        return True

    def send(self, peer: ZmqPeer, frame: bytes) -> None:
        """Send a frame, or let it wait while the peer does not read; at the limit it is dropped."""
        if not peer.waiting and self._sent(peer, frame):
            return
        if peer.unread.nbytes + len(frame) > limits.UNREAD_PAUSE_BYTES:
            self.garbage += 1
        elif self.unread.keep(peer, len(frame)):
            peer.waiting.append(frame)
            self._unsent[peer] = None

    def _sent(self, peer: ZmqPeer, frame: bytes) -> bool:
        """Whether the library has taken it, or there is nobody to take it. The library knows a peer by its routing id
        alone, which anybody may show once its connection has ended."""
        if peer is not self._serving and not self._look():
            return False
        if peer.connection is None or self._door.connection(peer.fd) is not peer.connection:
            self.garbage += 1
            return True
        try:
            self._socket.send_multipart([peer.identity, frame], zmq.NOBLOCK)
        except zmq.Again:
            return False
        except zmq.ZMQError as error:  # its connection has ended: nobody can read it
            if error.errno != errno.EHOSTUNREACH:
                raise
        return True

    def _flush(self) -> None:
        """Send what waits, as far as the peers read. The library wakes the loop when one has read."""
        for peer in list(self._unsent):
            while peer.waiting and self._sent(peer, peer.waiting[0]):
                self.unread.sent(peer, len(peer.waiting.popleft()))
            if not peer.waiting:
                del self._unsent[peer]

    def remove(self, peer: ZmqPeer) -> None:
        """Forget a peer."""
        known = self._peers.pop(peer.identity, None) is not None
        if known and self._door.connection(peer.fd) is peer.connection:
            self._door.unproven(peer.fd)
        self._unsent.pop(peer, None)
        peer.waiting.clear()
        self.unread.free(peer)

    def close(self) -> None:
        """Unbind and drop everything that waits."""
        self._loop.remove(self._monitor_fd)
        self._loop.remove(self._socket.fileno())
        self._end()

    def _end(self) -> None:
        self._door.close()
        self._socket.close()
        self._authenticator.stop()
        self._context.term()


class CurveServer:
    """The server's key and the clients that it admits, from files made by `zmq.auth.create_certificates`."""

    def __init__(self, secret_key_file: Path, clients_dir: Path) -> None:
        try:
            self._public, secret = load_certificate(secret_key_file)
        except (OSError, ValueError) as error:
            raise SettingsError(f"zmq.curve_secret_key_file: {error}") from error
        if secret is None:
            raise SettingsError(f"{secret_key_file} has no secret key: use the file that ends in .key_secret")
        if not clients_dir.is_dir():
            raise SettingsError(
                f"zmq.curve_clients_dir {clients_dir} is not a directory: make it, with one .key file per client"
            )
        self._secret = secret
        self._clients_dir = clients_dir

    def authenticate(self, context: zmq.Context[zmq.Socket[bytes]]) -> ThreadAuthenticator:
        """Start answering the library's question whether a key is admitted."""
        authenticator = ThreadAuthenticator(context)
        authenticator.start()
        authenticator.configure_curve(domain="*", location=self._clients_dir)
        return authenticator

    def apply(self, socket: zmq.Socket[bytes]) -> None:
        """Make the socket a CURVE server."""
        socket.curve_secretkey = self._secret
        socket.curve_publickey = self._public
        socket.curve_server = True


def bind_carriers(
    settings: ZmqSettings,
    directory: Path,
    loop: Loop,
    unread: Unread,
    access: Access,
    gids: Sequence[int],
) -> list[IpcCarrier | ZmqCarrier]:
    """One carrier for each address that the settings name; all of them, or none. tcp is served with CURVE only."""
    carriers: list[IpcCarrier | ZmqCarrier] = []
    with contextlib.ExitStack() as undo:
        if settings.ipc:
            path = directory / IPC_NAME if settings.ipc is True else settings.ipc
            named = directory.parent if settings.ipc is True else settings.ipc.parent
            carriers.append(IpcCarrier(path, loop, unread, access, gids, named))
            undo.callback(carriers[-1].close)
        if settings.tcp is not None:
            assert settings.curve_secret_key_file is not None
            assert settings.curve_clients_dir is not None
            curve = CurveServer(settings.curve_secret_key_file, settings.curve_clients_dir)
            carriers.append(ZmqCarrier(f"tcp://{settings.tcp}", loop, unread, curve))
        undo.pop_all()
    return carriers


def _is_address(bound: object, address: str) -> bool:
    """Whether a socket's own name matches a ZMQ address."""
    return isinstance(bound, tuple) and address.endswith(f":{bound[1]}")
