"""The ZMQ carrier: a ROUTER for all clients that are not on the lifeline.

The socket's descriptor is edge-triggered, so `pump` is called once a turn of the loop and asks for the events itself. A
message that is not exactly one frame after the routing id is counted and dropped.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket as sockets
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import zmq
from zmq.auth import load_certificate
from zmq.auth.thread import ThreadAuthenticator

from lmcache_core.errors import CacheError, SettingsError
from lmcache_core.limits import FRAME_BYTES_MAX, HELLO_S, SEND_QUEUE_FRAMES_MAX
from lmcache_core.pool.atfork import forget_in_child
from lmcache_core.pool.backing import Access, grant_access
from lmcache_core.server.loop import Loop
from lmcache_core.server.session import Peer
from lmcache_core.trust import Trust

if TYPE_CHECKING:
    from lmcache_core.settings.model import ZmqSettings

IPC_NAME = "zmq"  # in the server's runtime directory
UNKNOWN_UID = 2**32 - 1  # no user has it
_MESSAGES_A_TURN = 16


class ZmqPeer(Peer):
    """One DEALER, known by its routing id. The library says who it is: over ipc by uid, over CURVE by key."""

    def __init__(self, carrier: ZmqCarrier, identity: bytes, first: zmq.Frame) -> None:
        self.carrier = "zmq"
        self.uid = UNKNOWN_UID
        self.pid = 0  # often of another pid namespace
        self._carrier = carrier
        self.identity = identity
        address, key = _said(first, "Peer-Address"), _said(first, "User-Id")
        if carrier.is_ipc:  # HOST:UID:GID:PID
            uid = address.split(":")[-3:-2]
            self.uid = int(uid[0]) if uid and uid[0].isdigit() else UNKNOWN_UID
        self.origin = f"uid {self.uid}" if carrier.is_ipc else f"key {key}" if key else f"address {address}"

    def send(self, frame: bytes, fd: int = -1) -> None:
        self._carrier.send(self.identity, frame)

    def close(self) -> None:
        self._carrier.remove(self)


def _said(frame: zmq.Frame, what: str) -> str:
    try:
        return str(frame.get(what))
    except zmq.ZMQError:  # not available on this transport
        return ""


class ZmqCarrier:
    """Binds one ROUTER and turns its messages into frames of peers. With `curve`, only from the keys that it names;
    over ipc, only from our uid, root, and the groups that `access` admits."""

    def __init__(
        self,
        address: str,
        loop: Loop,
        curve: CurveServer | None = None,
        access: Access = Access.OWNER,
        gids: Sequence[int] = (),
    ) -> None:
        self._loop = loop
        self.garbage = 0  # messages that were dropped
        self._peers: dict[bytes, ZmqPeer] = {}
        self.is_ipc = address.startswith("ipc://")
        self._context = zmq.Context()
        self._authenticator = None if curve is None else curve.authenticate(self._context)
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.MAXMSGSIZE, FRAME_BYTES_MAX)
        self._socket.setsockopt(zmq.SNDHWM, SEND_QUEUE_FRAMES_MAX)
        self._socket.setsockopt(zmq.RCVHWM, SEND_QUEUE_FRAMES_MAX)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.ROUTER_HANDOVER, 0)  # nobody can take over another's routing id
        self._socket.setsockopt(zmq.HANDSHAKE_IVL, int(HELLO_S * 1000))
        if curve is not None:
            curve.apply(self._socket)
        self._path = Path(address.removeprefix("ipc://")) if self.is_ipc else None
        self._inode = 0  # of our own socket there, if any
        try:
            if self._path is not None:
                self._admit(access, gids)
                Trust.of_server().open_directory(self._path.parent).close()
            self._socket.bind(address)
            if self._path is not None:
                self._inode = self._path.stat().st_ino
                grant_access(self._path, access, gids)
        except (zmq.ZMQError, CacheError, OSError) as error:
            self._end()
            raise SettingsError(f"cannot serve on {address}: {error}; is another server there?") from error
        self.address = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        loop.add(self._socket.fileno(), select.EPOLLIN, self._ready)
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

    def _admit(self, access: Access, gids: Sequence[int]) -> None:
        """Make the library close connections of all others before a byte is read."""
        for uid in {os.geteuid(), 0}:
            self._socket.setsockopt(zmq.IPC_FILTER_UID, uid)
        for gid in gids if access is Access.GROUP else ():
            self._socket.setsockopt(zmq.IPC_FILTER_GID, gid)

    def _ready(self, mask: int) -> None:
        """Does nothing: the turn that follows pumps. The descriptor only wakes the loop."""

    def pump(self, on_frame: Callable[[Peer, memoryview], None]) -> bool:
        """Pass what has come to `on_frame`, up to a bound. True: there is more, come back at once."""
        socket = self._socket
        for _ in range(_MESSAGES_A_TURN):
            if not int(socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
                return False
            identity = socket.recv(zmq.NOBLOCK)
            peer = self._peers.get(identity)
            if peer is not None:
                frame = memoryview(socket.recv(zmq.NOBLOCK))
            else:  # the library says who it is with the bytes, and only if they are not copied
                first = socket.recv(zmq.NOBLOCK, copy=False)
                peer, frame = ZmqPeer(self, identity, first), first.buffer
            if socket.getsockopt(zmq.RCVMORE):
                socket.recv_multipart(zmq.NOBLOCK)
                self.garbage += 1
                continue
            on_frame(peer, frame)
            if peer.session is not None:  # only peers with a session are remembered: routing ids cost nothing to make
                self._peers[identity] = peer
        return True

    def send(self, identity: bytes, frame: bytes) -> None:
        """Queue a frame; for a peer that does not read, the socket's own bound drops it."""
        try:
            self._socket.send_multipart([identity, frame], zmq.NOBLOCK)
        except zmq.Again:
            self.garbage += 1

    def remove(self, peer: ZmqPeer) -> None:
        """Forget a peer."""
        self._peers.pop(peer.identity, None)

    def close(self) -> None:
        """Unbind and drop everything that waits."""
        self._loop.remove(self._socket.fileno())
        self._end()

    def _end(self) -> None:
        self._socket.close()
        if self._path is not None and self._inode:  # ZMQ leaves it there; another server may have bound it again
            with contextlib.suppress(FileNotFoundError):
                if self._path.stat().st_ino == self._inode:
                    self._path.unlink()
        if self._authenticator is not None:
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
    access: Access,
    gids: Sequence[int],
) -> list[ZmqCarrier]:
    """One carrier for each address that the settings name; all of them, or none. tcp is served with CURVE only."""
    carriers = []
    with contextlib.ExitStack() as undo:
        if settings.ipc:
            path = directory / IPC_NAME if settings.ipc is True else settings.ipc
            carriers.append(ZmqCarrier(f"ipc://{path}", loop, None, access, gids))
            undo.callback(carriers[-1].close)
        if settings.tcp is not None:
            assert settings.curve_secret_key_file is not None
            assert settings.curve_clients_dir is not None
            curve = CurveServer(settings.curve_secret_key_file, settings.curve_clients_dir)
            carriers.append(ZmqCarrier(f"tcp://{settings.tcp}", loop, curve))
        undo.pop_all()
    return carriers


def _is_address(bound: object, address: str) -> bool:
    """Whether a socket's own name matches a ZMQ address."""
    if isinstance(bound, str):
        return address == f"ipc://{bound}"
    return isinstance(bound, tuple) and address.startswith("tcp://") and address.endswith(f":{bound[1]}")
