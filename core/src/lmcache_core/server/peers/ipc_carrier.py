"""The ZMQ carrier for processes on this machine that share no directory with the server but this socket's: peers are
DEALERs of libzmq, and the server's end is ours, which bounds what is kept for them.

A message that is not exactly one frame is counted and dropped.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from lmcache_core.errors import CacheError, SettingsError
from lmcache_core.limits import FRAME_BYTES_MAX, TEND_S, ZMQ_CONNECTIONS_MAX, ZMQ_UNPROVEN_MAX
from lmcache_core.pool.backing import Access, grant_access
from lmcache_core.protocol.unread import Unread
from lmcache_core.protocol.zmtp import PART_BYTES, Bounds, ZmtpListener, ZmtpPeer, encode_message
from lmcache_core.server.peers.session import Peer
from lmcache_core.server.process.loop import Loop
from lmcache_core.state_thread import remove_name
from lmcache_core.trust import Trust

_BOUNDS = Bounds(FRAME_BYTES_MAX, FRAME_BYTES_MAX + PART_BYTES, ZMQ_CONNECTIONS_MAX, ZMQ_UNPROVEN_MAX)


class IpcPeer(Peer):
    """One session of a connection. The connection may outlive it, and say hello again."""

    carrier = "zmq"
    pid = 0  # often of another pid namespace

    def __init__(self, connection: ZmtpPeer, forgotten: Callable[[ZmtpPeer], None]) -> None:
        """`forgotten`: called when the connection has no session any more."""
        self._connection = connection
        self._forgotten = forgotten
        self.uid = connection.uid
        self.origin = f"uid {self.uid}"

    def send(self, frame: bytes, fd: int = -1, token_fd: int = -1) -> None:
        self._connection.send(encode_message(frame))

    def close(self) -> None:
        if self._connection.user is self:
            self._connection.user = None
            self._forgotten(self._connection)


class IpcCarrier:
    """Listens at one path, and turns messages into frames of peers: of our uid, root, and the groups that `access`
    admits."""

    def __init__(
        self, path: Path, loop: Loop, unread: Unread, access: Access, gids: Sequence[int], named: Path
    ) -> None:
        self.address = f"ipc://{path}"
        self.path = path
        self.garbage = 0  # messages that were dropped
        self._loop = loop
        self._tend_at_s = 0.0
        self._uids = {0, os.geteuid()}
        self._gids = set(gids) if access is Access.GROUP else set()
        self._grant = partial(grant_access, path, access, gids)
        self._named = named
        self._on_frame: Callable[[Peer, memoryview], None] | None = None
        try:
            self._check_directory()
            self._listener = ZmtpListener(
                b"ROUTER", self.address, loop, unread, lambda: loop.clock.now, _BOUNDS, self._take, self._admits
            )
        except (CacheError, OSError) as error:
            raise SettingsError(f"cannot serve on {self.address}: {error}; is another server there?") from error
        try:
            self._grant()
        except (CacheError, OSError) as error:
            self.close()
            raise SettingsError(f"cannot serve on {self.address}: {error}") from error

    def _check_directory(self) -> None:
        Trust.of_server(self._named).open_directory(self.path.parent).close()

    @property
    def stands(self) -> bool:
        """Whether the path still names our socket. For any thread."""
        return self._listener.stands

    def make_again(self) -> Callable[[], None]:
        """See `NamedSocket`."""
        self._check_directory()
        return self._listener.make_again(self._grant)

    next_check: float | None = None  # its own protocol bounds what a peer sends

    def pump(self, on_frame: Callable[[Peer, memoryview], None]) -> bool:
        """Pass what has come to `on_frame`, up to a bound. True: there is more, come back at once."""
        self._on_frame = on_frame
        if self._loop.clock.now >= self._tend_at_s:
            self._tend_at_s = self._loop.clock.now + TEND_S
            self._listener.tend()
        return self._listener.pump()

    def _admits(self, connection: ZmtpPeer) -> bool:
        return connection.uid in self._uids or not connection.gids().isdisjoint(self._gids)

    def _take(self, connection: ZmtpPeer, frames: list[bytes]) -> None:
        if len(frames) != 1:
            self.garbage += 1
            return
        assert self._on_frame is not None
        peer = connection.user
        if not isinstance(peer, IpcPeer):
            peer = IpcPeer(connection, self._listener.unproven)
        self._on_frame(peer, memoryview(frames[0]))
        if peer.session is not None:  # only peers with a session are remembered
            connection.user = peer
            self._listener.proven(connection)

    def close(self) -> None:
        """Drop everything that waits, and the socket's name."""
        self._listener.close()
        remove_name(self.path, self._listener.remove_name)
