"""A claim: this process is the one server of a name, for as long as its socket listens there.

A lock on a file proves nothing about a server: every process that can open the file can take the lock, keep it behind
the server's back, or wait for it until the server dies. A listening socket is its maker's alone. It is never passed on,
closes itself in forked children and on `exec`, and the system closes it when the process dies, however it dies. Others
can only ask whether somebody listens: in any pid or network namespace, and without taking anything.

Each claim has a name of its own, `STEM.RANDOM.owner`. Whoever wants the name `STEM` publishes a claim first and looks
for those of others afterwards. So of two that come at the same time at least the later one sees the other. Whoever sees
a living claim withdraws: also a server whose claim was removed, and that publishes another. A dead claim is removed by
whoever comes next: its name is never used again.
"""

from __future__ import annotations

import contextlib
import errno
import glob
import os
import random
import secrets
import socket
import struct
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from lmcache_core.descriptors import Descriptor
from lmcache_core.errors import PoolBusyError, PoolError
from lmcache_core.limits import CLAIM_BACKLOG, CLAIM_CONTENTION_S, CLAIM_PAUSE_S, CLAIM_TRIES_MAX
from lmcache_core.pool.atfork import PrivateDescriptor
from lmcache_core.state_thread import remove_name

SUFFIX = ".owner"
_UNFINISHED = "~"  # behind the name of a socket that does not listen yet
_NOBODY = frozenset((errno.ECONNREFUSED, errno.ENOENT, errno.ENOTDIR))
SOCKET_PATH_BYTES_MAX = 107  # in sockaddr_un, with its end


@dataclass(frozen=True)
class Living:
    """Somebody listens at this path. `pid`: 0 if unknown. `young`: perhaps it has not looked for others yet."""

    path: Path
    pid: int = 0
    young: bool = False

    @property
    def who(self) -> str:
        """In words, for a message."""
        return f" (pid {self.pid})" if self.pid else ""


def bind_at(sock: socket.socket, directory_fd: int, path: Path) -> None:
    """Bind a socket to `path`, in the directory that is open and was checked. Where it fits, under its real path, which
    the kernel then lists in /proc/net/unix: cleaners of /tmp spare the sockets that stand there."""
    real = os.fsencode(path)
    if len(real) <= SOCKET_PATH_BYTES_MAX and _same(os.stat(directory_fd), path.parent):
        sock.bind(real)
    else:
        sock.bind(f"/proc/self/fd/{directory_fd}/{path.name}")


def _same(found: os.stat_result, path: Path) -> bool:
    with contextlib.suppress(OSError):
        named = path.stat()
        return (named.st_dev, named.st_ino) == (found.st_dev, found.st_ino)
    return False


def listener_at(path: Path) -> Living | None:
    """Who listens at a socket's path. None: nobody. Never waits; an answer that proves nothing counts as somebody."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
    with sock:
        try:
            found = path.lstat()
            directory = Descriptor(os.open, path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
            with contextlib.closing(directory):
                sock.connect(f"/proc/self/fd/{directory.fileno()}/{path.name}")
        except OSError as error:
            if error.errno in _NOBODY:
                return None
            return Living(path)  # its backlog is full, or we may not connect
        pid: int = struct.unpack("iII", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[0]
        return Living(path, max(0, pid), abs(time.time() - found.st_mtime) < CLAIM_CONTENTION_S)


def claims_in(directory: Path, stem: str) -> Iterator[Path]:
    """The claims of our uid on this name, dead or alive. A file of somebody else's says nothing."""
    for path in sorted(directory.glob(f"{glob.escape(stem)}.*{SUFFIX}")):
        with contextlib.suppress(OSError):
            if path.lstat().st_uid == os.geteuid() and path.is_socket():
                yield path


def stem_of(path: Path) -> str:
    """The name that a claim is on; empty if the path is not a claim's."""
    stem, _, number = path.name.removesuffix(SUFFIX).rpartition(".")
    return stem if path.name.endswith(SUFFIX) and number else ""


def living_claim(directory: Path, stem: str, beside: Sequence[str] = (), besides: Path | None = None) -> Living | None:
    """The first living claim on the name, other than `besides`. `beside`: sockets of other names in the directory that
    only the name's server listens at."""
    for path in [*claims_in(directory, stem), *(directory / name for name in beside)]:
        if path != besides and (living := listener_at(path)) is not None:
            return living
    return None


class Claim(PrivateDescriptor):
    """A living claim of this process."""

    def __init__(self, directory: Path, stem: str) -> None:
        """Publish it; it says nothing before the caller has looked for others. Raises `PoolError`."""
        self.directory = directory
        self.stem = stem
        self.path = directory / f"{stem}.{secrets.token_hex(4)}{SUFFIX}"
        unfinished = self.path.with_name(self.path.name + _UNFINISHED)
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
        try:
            opened = Descriptor(os.open, directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            with contextlib.closing(opened):
                bind_at(sock, opened.fileno(), unfinished)
            unfinished.chmod(0o600)
            sock.listen(CLAIM_BACKLOG)
            unfinished.rename(self.path)  # only now: a name that does not listen would be taken for a dead one
            found = self.path.lstat()
        except OSError as error:
            sock.close()
            with contextlib.suppress(OSError):
                unfinished.unlink()
            raise PoolError(f"{self.path} cannot be made: {error.strerror}; use another directory or name") from error
        self._file = (found.st_dev, found.st_ino)
        super().__init__(sock.detach())

    @classmethod
    def take(cls, directory: Path, stem: str, beside: Sequence[str] = ()) -> Claim:
        """Claim the name. Raises PoolBusyError if a living process has it. `beside`: see `living_claim`."""
        for tries_left in reversed(range(CLAIM_TRIES_MAX)):
            claim = cls(directory, stem)
            living = claim.rival(beside)
            if living is None:
                break
            claim.withdraw()
            if not (living.young and tries_left):
                raise PoolBusyError(f"{living.path} belongs to a living process{living.who}")
            time.sleep(random.uniform(CLAIM_PAUSE_S, 4 * CLAIM_PAUSE_S))  # perhaps it withdraws, too
        claim.remove_dead()
        return claim

    def rival(self, beside: Sequence[str] = ()) -> Living | None:
        """Another living process that claims the name."""
        return living_claim(self.directory, self.stem, beside, self.path)

    def remove_dead(self) -> None:
        """Remove the claims of dead processes on this name."""
        unfinished = self.directory.glob(f"{self.stem}.*{SUFFIX}{_UNFINISHED}")
        for path in [*claims_in(self.directory, self.stem), *unfinished]:
            with contextlib.suppress(OSError):
                old = time.time() - path.lstat().st_mtime >= CLAIM_CONTENTION_S  # else it may be about to listen
                if path != self.path and (old or path.suffix == SUFFIX) and listener_at(path) is None:
                    path.unlink()

    @property
    def stands(self) -> bool:
        """Whether the path still names our socket."""
        with contextlib.suppress(OSError):
            found = self.path.lstat()
            return (found.st_dev, found.st_ino) == self._file
        return False

    def renew(self) -> None:
        """Publish it again if its name was removed. Raises `PoolBusyError` if another living process has the name by
        now, and `PoolError`."""
        if not self.closed and not self.stands:
            self._give_way(self.rival())  # without a claim of ours that others would see
            again = Claim(self.directory, self.stem)
            try:
                self._give_way(again.rival())
            except PoolBusyError:
                again.withdraw()
                raise
            # In one step: whoever closes this one meanwhile closes the new socket or the old one.
            self.path, self._file, again.path, again._file = again.path, again._file, self.path, self._file
            self.fds, again.fds = again.fds, self.fds
            again.close()

    @staticmethod
    def _give_way(living: Living | None) -> None:
        if living is not None:
            raise PoolBusyError(f"{living.path} belongs to another living server{living.who}")

    def withdraw(self) -> None:
        """Give the name up."""
        if not self.closed:
            remove_name(self.path, self._unlink)
        self.close()

    def _unlink(self) -> None:
        if self.stands:
            with contextlib.suppress(OSError):
                self.path.unlink()


def claim(directory: Path, stem: str, name: str, undo: contextlib.ExitStack, beside: Sequence[str] = ()) -> Claim:
    """Claim the name for a server of pool `name`; `undo` withdraws it."""
    try:
        taken = Claim.take(directory, stem, beside)
    except PoolBusyError as error:
        raise PoolBusyError(
            f"pool {name!r} belongs to a living server: {error}; stop it, or give this one another name (--name)"
        ) from error
    undo.callback(partial(Claim.withdraw, taken))
    return taken
