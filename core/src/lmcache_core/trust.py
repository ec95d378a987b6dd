"""Who is at the other end: whom this process trusts, and what may stand on the way to them.

A directory in /tmp belongs to whoever came first, and so does a name in /dev/shm. So nothing is taken from a path
before every step of it has shown its owner and its mode: the walk opens each component by itself, from the root on, and
never follows a symbolic link that somebody else has put there. What was checked is held open and used through its
descriptor; between a check and its use only those who are trusted can change anything.

Trusted are our own uid, root's, and the one that settings name. In a sticky directory everybody may write, for there
nobody can replace what is another's.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import struct
from collections import deque
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path

from lmcache_core.descriptors import Descriptor
from lmcache_core.errors import DisconnectedError, UntrustedError, UsageError

SERVER_UID_VARIABLE = "LMCACHE_CORE_SERVER_UID"
_LINKS_MAX = 40  # as the kernel itself
_STEP = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC


@lru_cache(maxsize=1)
def overflow_uid() -> int:
    """As which a uid shows that has no name in this user namespace."""
    try:
        return int(Path("/proc/sys/kernel/overflowuid").read_text())
    except (OSError, ValueError):
        return 65534


def own_uids() -> set[int]:
    """Ours. None where it has no name in this user namespace: every stranger shows up with the same number there."""
    uid = os.geteuid()
    return {uid} if uid != overflow_uid() or _is_mapped(uid) else set()


def _is_mapped(uid: int) -> bool:
    try:
        lines = Path("/proc/self/uid_map").read_text().splitlines()
    except OSError:  # a kernel without user namespaces: every number is a name
        return True
    return any(int(first) <= uid < int(first) + int(count) for first, _, count in map(str.split, lines))


@dataclass(frozen=True)
class Trust:
    """Whose directories, sockets, segments and processes are taken for what they say they are."""

    uids: frozenset[int]
    is_server: bool = False  # it makes the directory; for the words of the cure

    @classmethod
    def of_client(cls, server_uid: int | None = None) -> Trust:
        """Our uid, root, and the uid that the server is said to run as: here, or in `LMCACHE_CORE_SERVER_UID`."""
        named = _uid_in(os.environ.get(SERVER_UID_VARIABLE, "")) if server_uid is None else {server_uid}
        return cls(frozenset({*own_uids(), 0, *named}))

    @classmethod
    def of_server(cls) -> Trust:
        """Our uid and root."""
        return cls(frozenset({*own_uids(), 0}), is_server=True)

    # --- paths --------------------------------------------------------------------------------------------

    def open_directory(self, path: Path, *, make_mode: int = 0) -> Descriptor:
        """A descriptor (O_PATH) of the directory, whose every step is trusted.

        `make_mode`: make what is missing, with these permissions. Raises `UntrustedError` with the step and the cure,
        `OSError` where there is no such directory.
        """
        steps = deque(path.absolute().parts[1:])
        (held, at), inner, links = _open_root(), Descriptor(), 0
        try:  # whatever is raised may be kept, and with it what these variables name
            self._check_directory(os.fstat(held.fileno()), at)
            while steps:
                name = steps.popleft()
                if make_mode and name != "..":
                    _make(name, make_mode, held.fileno())
                inner = Descriptor(partial(os.open, dir_fd=held.fileno()), name, _STEP)
                found = os.fstat(inner.fileno())
                if stat.S_ISLNK(found.st_mode):
                    self._check_owner(found, f"the symbolic link {at / name}")
                    target = Path(os.readlink("", dir_fd=inner.fileno()))
                    inner.close()
                    links += 1
                    if links > _LINKS_MAX:
                        raise UntrustedError(f"{path} leads through more than {_LINKS_MAX} symbolic links")
                    if target.is_absolute():
                        held.close()
                        held, at = _open_root()
                    steps.extendleft(reversed(target.parts[1:] if target.is_absolute() else target.parts))
                    continue
                held.close()
                held, at = inner, at / name
                self._check_directory(found, at)
        except BaseException:
            held.close()
            inner.close()
            raise
        return held

    def open_socket_directory(self, path: Path) -> Descriptor:
        """The same for the directory of the socket `path`, whose owner and mode are checked, too."""
        directory = self.open_directory(path.parent)
        try:
            found = os.stat(path.name, dir_fd=directory.fileno(), follow_symlinks=False)
            self._check_owner(found, str(path))
            if not stat.S_ISSOCK(found.st_mode):
                raise UntrustedError(f"{path} is not a socket, and no server of ours is there: remove it")
            if found.st_mode & 0o002:
                raise UntrustedError(f"the socket {path} is open to everybody, and no server of ours makes it so")
        except BaseException:
            directory.close()
            raise
        return directory

    def check_ipc(self, address: str) -> None:
        """The directory and the socket of a ZMQ address `ipc://PATH`; of other addresses their keys answer for them.
        Raises `UntrustedError`, and `DisconnectedError` where there is no such socket: whoever made one after this
        look would not have been looked at."""
        if not address.startswith("ipc://"):
            return
        path = address.removeprefix("ipc://")
        if not path.startswith("/"):
            raise UntrustedError(f"{address} has no owner that could be checked: give the whole path of a socket")
        try:
            self.open_socket_directory(Path(path)).close()
        except OSError as error:
            raise DisconnectedError(
                f"the server at {address} does not answer; is it running? ({error.strerror})"
            ) from error

    def check_segment(self, fd: int, what: str) -> None:
        """The owner and mode of a pool's segment. Raises `UntrustedError`."""
        found = os.fstat(fd)
        self._check_owner(found, what)
        if found.st_nlink and found.st_mode & 0o002:  # what has no name is opened by nobody who was not given it
            raise UntrustedError(f"{what} can be written by everybody, and no server of ours makes it so: remove it")

    def _check_directory(self, found: os.stat_result, path: Path) -> None:
        if not stat.S_ISDIR(found.st_mode):
            raise NotADirectoryError(20, "Not a directory", str(path))
        self._check_owner(found, f"the directory {path}")
        if found.st_mode & stat.S_ISVTX:
            return
        # A user's private group has the user's number, by the custom of every distribution that has such groups.
        by_group = found.st_mode & 0o020 and found.st_gid not in (0, found.st_uid)
        if found.st_mode & 0o002 or by_group:
            who, cure = ("everybody", "o-w") if found.st_mode & 0o002 else (f"all of group {found.st_gid}", "g-w")
            raise UntrustedError(
                f"the directory {path} can be written by {who}, who could put another server in the place of ours: "
                f"chmod {cure} it, or set runtime_dir (LMCACHE_CORE_RUNTIME_DIR) elsewhere"
            )

    def _check_owner(self, found: os.stat_result, what: str) -> None:
        if found.st_uid not in self.uids:
            raise UntrustedError(f"{what} belongs to uid {found.st_uid}, not to us: {self._cure(found.st_uid)}")

    # --- processes ----------------------------------------------------------------------------------------

    def check_peer(self, sock: socket.socket, what: str) -> None:
        """The uid of the process that listens at a Unix socket that we are connected to. Raises `UntrustedError`."""
        uid = peer_uid(sock)
        if uid not in self.uids:
            raise UntrustedError(f"the server at {what} runs as uid {uid}, not as ours: {self._cure(uid)}")

    def _cure(self, uid: int) -> str:
        if uid == overflow_uid():
            return (
                f"uid {uid} stands for every user that is not mapped into this user namespace, so who it is cannot be "
                "told; run both sides in the same user namespace, or map that user into this one"
            )
        if self.is_server:
            return "set runtime_dir to a directory of yours"
        return f"if that is who should serve here, connect with server_uid={uid} ({SERVER_UID_VARIABLE}={uid})"


def words_for_stranger(uid: int) -> str:
    """What a server says to a process that it does not let in."""
    if uid == overflow_uid():
        return (
            f"the server sees this process as uid {uid}, which stands for every user that is not mapped into its user "
            "namespace: run both sides in the same user namespace, or map this user into the server's"
        )
    return (
        f"the server runs as uid {os.geteuid()} and does not let uid {uid} in: run as the same user, or have it list "
        'one of your groups (l1.access = "group", l1.gids)'
    )


def peer_uid(sock: socket.socket) -> int:
    """The uid of the process at the other end of a Unix socket, as the kernel knows it."""
    uid: int = struct.unpack("iII", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[1]
    return uid


def _uid_in(text: str) -> set[int]:
    if text and not text.isdigit():
        raise UsageError(f"{SERVER_UID_VARIABLE} is {text!r}: write the number of a uid")
    return {int(text)} if text else set()


def _open_root() -> tuple[Descriptor, Path]:
    return Descriptor(os.open, "/", _STEP | os.O_DIRECTORY), Path("/")


def _make(name: str, mode: int, parent_fd: int) -> None:
    with contextlib.suppress(FileExistsError):
        os.mkdir(name, mode, dir_fd=parent_fd)
