"""The lifeline: Unix SEQPACKET sockets in a private runtime directory.

It passes the pool's descriptor, carries the calls, and is the first to notice that a peer has ended. Traps avoided
here: an empty packet reads like an end of file (the epoll mask tells them apart); a receive with room for descriptors
would accept hostile ones (ours has none); paths over 108 bytes fail (we bind through the directory's descriptor).
"""

from __future__ import annotations

import array
import contextlib
import errno
import os
import select
import socket
import struct
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

from lmcache_core.errors import PoolBusyError
from lmcache_core.guard import on_failure
from lmcache_core.limits import SEND_QUEUE_FRAMES_MAX
from lmcache_core.pool.atfork import forget_in_child
from lmcache_core.pool.backing import LIFELINE_NAME, Access, grant_access
from lmcache_core.pool.claim import bind_at, listener_at
from lmcache_core.protocol.unread import Backlog, Unread
from lmcache_core.server.peers.session import Peer
from lmcache_core.server.process.loop import Loop
from lmcache_core.state_thread import remove_name

SO_PEERGROUPS = 59
SO_PEERPIDFD = 77
GROUPS_SEEN_MAX = 256  # as many as Python's getsockopt returns; a user with more is not admitted by group
_READ = select.EPOLLIN | select.EPOLLRDHUP


class LifelinePeer(Peer, Backlog):
    """One accepted connection."""

    carrier = "lifeline"
    can_pass_fd = True

    def __init__(
        self,
        sock: socket.socket,
        loop: Loop,
        on_frame: Callable[[Peer, memoryview], None],
        on_end: Callable[[Peer], None],
        unread: Unread,
    ) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._loop = loop
        self._on_frame = on_frame
        self._on_end = on_end
        self.waiting: deque[tuple[bytes, tuple[int, ...]]] = deque()  # frames, and descriptors that go with them
        self._buffer = loop.buffer  # one byte more than the largest frame: a larger packet fills it
        credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        self.pid, self.uid, self._gid = struct.unpack("iII", credentials)
        self.origin = f"uid {self.uid}"
        self._backlogs, self.unread = unread, unread.open(self.origin)
        self._paused = False  # it must read what waits before its next request is read
        loop.add(sock.fileno(), _READ, self._ready)
        forget_in_child(self)

    def after_fork_in_child(self) -> None:
        """Close it, so that the client of an embedded server notices the server's end at once, even after a fork."""
        self._sock.close()

    def gids(self) -> set[int]:
        """The groups of the peer, including supplementary ones."""
        more = b""
        with contextlib.suppress(OSError):  # the peer has more groups than we can read
            more = self._sock.getsockopt(socket.SOL_SOCKET, SO_PEERGROUPS, 4 * GROUPS_SEEN_MAX)
        return {self._gid, *struct.unpack(f"{len(more) // 4}I", more)}

    def pidfd(self) -> int:
        """A descriptor that becomes readable when the peer's process has ended, or -1 if there is none."""
        with contextlib.suppress(OSError):
            return self._sock.getsockopt(socket.SOL_SOCKET, SO_PEERPIDFD)
        if self.pid > 0:
            with contextlib.suppress(OSError):
                return os.pidfd_open(self.pid)
        return -1

    def turn_away(self, frame: bytes) -> None:
        """Tell the peer why it is refused. Whatever it sends ends the connection, unread; ending it at once would lose
        the message if the peer sends at the same moment."""
        self._on_frame = lambda peer, frame: self._end()
        self.send(frame)

    def _ready(self, mask: int) -> None:
        if mask & select.EPOLLOUT:
            self._flush()
        if self._paused and mask & (select.EPOLLRDHUP | select.EPOLLHUP) == select.EPOLLRDHUP:
            # It will send nothing more, and does not read. One that is gone altogether may have said goodbye.
            self._end()
            return
        if not mask & (select.EPOLLIN | select.EPOLLRDHUP | select.EPOLLHUP | select.EPOLLERR):
            return
        try:
            nbytes = self._sock.recv_into(self._buffer)
        except BlockingIOError:
            return
        except OSError:
            self._end()
            return
        if nbytes == 0 and mask & (select.EPOLLRDHUP | select.EPOLLHUP | select.EPOLLERR):
            self._end()
            return
        self._on_frame(self, self._buffer[:nbytes])

    def send(self, frame: bytes, fd: int = -1, token_fd: int = -1) -> None:
        fds = () if fd < 0 else (fd,) if token_fd < 0 else (fd, token_fd)
        if self.waiting or not self._send_now(frame, fds):
            if len(self.waiting) >= SEND_QUEUE_FRAMES_MAX:
                self._end()
                return
            if self._sock.fileno() < 0 or not self._backlogs.keep(self, len(frame)):
                return
            self.waiting.append((frame, tuple(map(os.dup, fds))))
            self._watch()

    def _send_now(self, frame: bytes, fds: tuple[int, ...]) -> bool:
        if self._sock.fileno() < 0:
            return True
        try:
            if fds:
                self._sock.sendmsg([frame], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))])
            else:
                self._sock.send(frame)
        except BlockingIOError:
            return False
        except OSError:
            pass  # the peer is gone: the loop sees its end of file and ends the session
        return True

    def _flush(self) -> None:
        while self.waiting:
            frame, fds = self.waiting[0]
            if not self._send_now(frame, fds):
                self._watch()
                return
            self.waiting.popleft()
            self._backlogs.sent(self, len(frame))
            for fd in fds:
                os.close(fd)
        self._watch()

    def drop(self) -> None:
        self._let_go()
        with contextlib.suppress(OSError):  # it has ended already
            self._sock.shutdown(socket.SHUT_RDWR)  # the loop sees the end of file, as if the peer had hung up

    def _let_go(self) -> None:
        """Nothing of what waits will be sent."""
        while self.waiting:
            for fd in self.waiting.popleft()[1]:
                os.close(fd)
        self._backlogs.free(self)

    def _watch(self) -> None:
        """Wait for what can be done now: to send what waits, and to read, unless the peer must read first."""
        self._paused = self._backlogs.pauses(self, len(self.waiting))
        mask = (select.EPOLLRDHUP if self._paused else _READ) | (select.EPOLLOUT if self.waiting else 0)
        if self._sock.fileno() >= 0:
            self._loop.modify(self._sock.fileno(), mask)

    def _end(self) -> None:
        if self._sock.fileno() >= 0:
            self.close()
            self._on_end(self)

    def close(self) -> None:
        if self._sock.fileno() >= 0:
            self._loop.remove(self._sock.fileno())
            self._sock.close()
            self._let_go()


class LifelineListener:
    """The listening socket `DIRECTORY/lifeline`. The caller holds the directory's lock, so a leftover is replaced.
    Connections wait in the backlog until `serve`."""

    def __init__(self, directory: Path, loop: Loop, access: Access, gids: Sequence[int]) -> None:
        self.path = directory / LIFELINE_NAME
        self._access, self._gids = access, gids
        self._loop = loop
        self._serves: Callable[[socket.socket], None] | None = None
        self._pauses = False
        self._sock, self._file = self._bound()
        self._spare_fd = _spare_fd()
        forget_in_child(self)

    def _bound(self) -> tuple[socket.socket, tuple[int, int]]:
        """A new socket that listens at the path, and its file there."""
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
        with on_failure(sock.close):
            self.path.unlink(missing_ok=True)
            directory_fd = os.open(self.path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                bind_at(sock, directory_fd, self.path)
            finally:
                os.close(directory_fd)
            grant_access(self.path, self._access, self._gids)
            sock.listen(1024)
            found = self.path.stat()
        return sock, (found.st_dev, found.st_ino)

    @property
    def stands(self) -> bool:
        """Whether the path still names our socket. For any thread."""
        with contextlib.suppress(OSError):
            found = self.path.lstat()
            return (found.st_dev, found.st_ino) == self._file
        return False

    def make_again(self) -> Callable[[], None]:
        """See `NamedSocket`."""
        living = listener_at(self.path)
        if living is not None and not self.stands:
            raise PoolBusyError(f"{self.path} belongs to another living server{living.who}")
        sock, file = self._bound()
        return lambda: self._listen_at(sock, file)

    def _listen_at(self, sock: socket.socket, file: tuple[int, int]) -> None:
        former, on_accept = self._sock, self._serves
        if former.fileno() < 0 or on_accept is None:  # it was closed meanwhile
            sock.close()
            self._file = file
            self._unlink()
            return
        self._accept(on_accept)  # who came to the former one; others try again
        self._loop.remove(former.fileno())
        former.close()
        self._sock, self._file = sock, file
        self.serve(on_accept)

    def serve(self, on_accept: Callable[[socket.socket], None]) -> None:
        """Pass every connection to `on_accept`, on the loop. Call this once."""
        self._loop.add(self._sock.fileno(), select.EPOLLIN, lambda mask: self._accept(on_accept))
        self._serves = on_accept

    def after_fork_in_child(self) -> None:
        """Close it: if the child kept listening, clients would wait for a dead server."""
        self._sock.close()
        if self._spare_fd >= 0:
            os.close(self._spare_fd)
            self._spare_fd = -1

    def _accept(self, on_accept: Callable[[socket.socket], None]) -> None:
        try:
            sock, _ = self._sock.accept()
        except OSError as error:  # it hung up before we accepted it, or …
            if error.errno in (errno.EMFILE, errno.ENFILE):
                self._turn_away()
            return
        on_accept(sock)

    def _turn_away(self) -> None:
        """Out of descriptors: a connection left in the backlog would wake the loop again at once, for good. Free the
        spare descriptor, accept with it and hang up; the client tries again. If another thread was quicker to take that
        descriptor, nobody is accepted before `resume`."""
        if self._spare_fd >= 0:
            os.close(self._spare_fd)
        try:
            self._sock.accept()[0].close()
        except BlockingIOError:
            pass  # it hung up
        except OSError:
            self._pauses = True
            self._loop.modify(self._sock.fileno(), 0)
        self._spare_fd = _spare_fd()

    def resume(self) -> None:
        """Accept connections again, if that has paused. Call this from time to time."""
        if self._pauses:
            self._pauses = False
            self._loop.modify(self._sock.fileno(), select.EPOLLIN)

    def close(self) -> None:
        """Stop listening and remove the socket, unless another server has put its own there."""
        if self._serves is not None:
            self._loop.remove(self._sock.fileno())
        self._sock.close()
        fd, self._spare_fd = self._spare_fd, -1  # a child that is forked later must not close this number again
        if fd >= 0:
            os.close(fd)
        remove_name(self.path, self._unlink)

    def _unlink(self) -> None:
        if self.stands:
            self.path.unlink(missing_ok=True)


def _spare_fd() -> int:
    """A descriptor to release when there are no others; -1 if another thread took the last one."""
    try:
        return os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return -1
