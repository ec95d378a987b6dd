"""Which users this process trusts at the other end of a socket or path.

A directory in /tmp belongs to whoever made it first, and so does a name in /dev/shm. So before a path is used, the
owner and mode of every component are checked: the walk opens the components one by one from the root, and never follows
a symbolic link made by an untrusted user. The checked object stays open and is used through its descriptor; between the
check and the use, only trusted users can change anything.

Trusted are our own uid, root, and the uid named in the settings. A sticky directory may be writable by everybody,
because nobody can replace another user's files in it. One that is writable by everybody and not sticky, as Kubernetes
makes an `emptyDir`, is accepted in two cases: a directory above it is closed to all others; or somebody has named it as
the runtime directory, or as the one in which that stands. Whoever can write there can take names away and move them, so
that a server is not found; but what others put there is refused, for everything below still needs a trusted owner.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import struct
from collections import deque
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path

from lmcache_core.descriptors import Descriptor
from lmcache_core.errors import DisconnectedError, UntrustedError, UsageError
from lmcache_core.guard import on_failure

SERVER_UID_VARIABLE = "LMCACHE_CORE_SERVER_UID"
_LINKS_MAX = 40  # the same as in the kernel
_STEP = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC


@lru_cache(maxsize=1)
def overflow_uid() -> int:
    """The uid shown for users that are not mapped into this user namespace."""
    try:
        return int(Path("/proc/sys/kernel/overflowuid").read_text())
    except (OSError, ValueError):
        return 65534


def own_uids() -> set[int]:
    """Our uid. Empty if it is not mapped into this user namespace, because every stranger then shows up as the same
    uid."""
    uid = os.geteuid()
    return {uid} if uid != overflow_uid() or _is_mapped(uid) else set()


def _is_mapped(uid: int) -> bool:
    try:
        lines = Path("/proc/self/uid_map").read_text().splitlines()
    except OSError:  # a kernel without user namespaces: every uid is mapped
        return True
    return any(int(first) <= uid < int(first) + int(count) for first, _, count in map(str.split, lines))


@dataclass(frozen=True)
class Trust:
    """The users whose directories, sockets, segments and processes are accepted."""

    uids: frozenset[int]
    is_server: bool = False  # this process makes the directory; changes the wording of the cure
    named: tuple[Path, ...] = ()  # runtime directories that somebody chose, rather than a default

    @classmethod
    def of_client(cls, server_uid: int | None = None, named: Path | None = None) -> Trust:
        """Our uid, root, and the uid that the server runs as: given here or in `LMCACHE_CORE_SERVER_UID`."""
        other = _uid_in(os.environ.get(SERVER_UID_VARIABLE, "")) if server_uid is None else {server_uid}
        return cls(frozenset({*own_uids(), 0, *other}), named=() if named is None else (named,))

    @classmethod
    def of_server(cls, named: Path | None = None) -> Trust:
        """Our uid and root."""
        return cls(frozenset({*own_uids(), 0}), True, () if named is None else (named,))

    # --- paths --------------------------------------------------------------------------------------------

    def open_directory(self, path: Path, *, make_mode: int = 0) -> Descriptor:
        """A descriptor (O_PATH) of the directory, after every component was checked.

        `make_mode`: make missing directories with these permissions. Raises `UntrustedError` with the component and the
        cure, and `OSError` if there is no such directory.
        """
        steps = deque(path.absolute().parts[1:])
        (held, at), inner, links = _open_root(), Descriptor(), 0
        closed = False  # a directory above this one cannot be entered by others
        try:  # an exception may be kept, and with it the objects that these variables name
            self._check_directory(os.fstat(held.fileno()), at, closed)
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
                        (held, at), closed = _open_root(), False
                    steps.extendleft(reversed(target.parts[1:] if target.is_absolute() else target.parts))
                    continue
                held.close()
                held, at, closed = inner, at / name, closed and name != ".."
                self._check_directory(found, at, closed)
                closed = closed or (not found.st_mode & 0o001 and not _is_open_to_group(found, 0o010))
        except BaseException:  # the two that are open by then, which change on the way
            held.close()
            inner.close()
            raise
        return held

    def open_socket_directory(self, path: Path) -> Descriptor:
        """The same for the directory of the socket `path`; also checks the socket's owner and mode."""
        directory = self.open_directory(path.parent)
        with on_failure(directory.close):
            found = os.stat(path.name, dir_fd=directory.fileno(), follow_symlinks=False)
            self._check_owner(found, str(path))
            if not stat.S_ISSOCK(found.st_mode):
                raise UntrustedError(f"{path} is not a socket, so no lmcache-core server listens there: remove it")
            if found.st_mode & 0o002:
                raise UntrustedError(f"the socket {path} is open to everybody, and no lmcache-core server makes it so")
        return directory

    def check_ipc(self, address: str) -> None:
        """Check the directory and the socket of a ZMQ address `ipc://PATH`; other addresses are protected by CURVE
        keys. Raises `UntrustedError`, and `DisconnectedError` if there is no such socket: a socket made after this
        check would not have been checked."""
        if not address.startswith("ipc://"):
            return
        path = address.removeprefix("ipc://")
        if not path.startswith("/"):
            raise UntrustedError(f"{address} has no owner to check: give the absolute path of a socket")
        try:
            replace(self, named=(*self.named, Path(path).parent)).open_socket_directory(Path(path)).close()
        except OSError as error:
            raise DisconnectedError(
                f"the server at {address} does not answer; is it running? ({error.strerror})"
            ) from error

    def check_segment(self, fd: int, what: str) -> None:
        """Check the owner and mode of a pool's segment. Raises `UntrustedError`."""
        found = os.fstat(fd)
        self._check_owner(found, what)
        if found.st_nlink and found.st_mode & 0o002:  # nobody can open an unlinked file without being given it
            raise UntrustedError(f"{what} is writable by everybody, and no lmcache-core server makes it so: remove it")

    def _check_directory(self, found: os.stat_result, path: Path, closed: bool) -> None:
        if not stat.S_ISDIR(found.st_mode):
            raise NotADirectoryError(20, "Not a directory", str(path))
        self._check_owner(found, f"the directory {path}")
        if found.st_mode & stat.S_ISVTX or closed:
            return
        if found.st_mode & 0o002 or _is_open_to_group(found, 0o020):
            if self._is_named(found):
                return
            who, cure = ("everybody", "o-w") if found.st_mode & 0o002 else (f"all of group {found.st_gid}", "g-w")
            raise UntrustedError(
                f"the directory {path} is writable by {who}, who could replace the server by another one: "
                f"chmod {cure} it, or set runtime_dir (LMCACHE_CORE_RUNTIME_DIR) elsewhere, or to it"
            )

    def _is_named(self, found: os.stat_result) -> bool:
        """Whether it is a directory that somebody named, or the one in which that stands."""
        for named in self.named:
            for path in (named, named.parent):
                with contextlib.suppress(OSError):  # it is still to be made
                    if os.path.samestat(found, path.stat()):
                        return True
        return False

    def _check_owner(self, found: os.stat_result, what: str) -> None:
        if found.st_uid not in self.uids:
            raise UntrustedError(f"{what} belongs to uid {found.st_uid}, not to us: {self._cure(found.st_uid)}")

    # --- processes ----------------------------------------------------------------------------------------

    def check_peer(self, sock: socket.socket, what: str) -> None:
        """Check the uid of the process that listens at a connected Unix socket. Raises `UntrustedError`."""
        uid = peer_uid(sock)
        if uid not in self.uids:
            raise UntrustedError(f"the server at {what} runs as uid {uid}, not as your uid: {self._cure(uid)}")

    def _cure(self, uid: int) -> str:
        if uid == overflow_uid():
            return (
                f"uid {uid} stands for every user that is not mapped into this user namespace, so the owner is "
                "unknown: run both sides in the same user namespace, or map that user into this one"
            )
        if self.is_server:
            return "set runtime_dir to a directory that you own"
        return f"if the server should run as that user, connect with server_uid={uid} ({SERVER_UID_VARIABLE}={uid})"


def refusal_message(uid: int) -> str:
    """The message of a server to a process that it refuses."""
    if uid == overflow_uid():
        return (
            f"the server sees this process as uid {uid}, which stands for every user that is not mapped into its user "
            "namespace: run both sides in the same user namespace, or map this user into the server's"
        )
    return (
        f"the server runs as uid {os.geteuid()} and refuses uid {uid}: run as the same user, or have it list "
        'one of your groups (l1.access = "group", l1.gids)'
    )


def peer_uid(sock: socket.socket) -> int:
    """The uid of the process at the other end of a Unix socket, according to the kernel."""
    uid: int = struct.unpack("iII", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[1]
    return uid


def _is_open_to_group(found: os.stat_result, bit: int) -> bool:
    """Whether the permission `bit` of the group is for others, too: a user's private group has the same number as the
    user, in every distribution that has such groups."""
    return bool(found.st_mode & bit) and found.st_gid not in (0, found.st_uid)


def _uid_in(text: str) -> set[int]:
    if text and not text.isdigit():
        raise UsageError(f"{SERVER_UID_VARIABLE} must be a numeric uid, got {text!r}")
    return {int(text)} if text else set()


def _open_root() -> tuple[Descriptor, Path]:
    return Descriptor(os.open, "/", _STEP | os.O_DIRECTORY), Path("/")


def _make(name: str, mode: int, parent_fd: int) -> None:
    with contextlib.suppress(FileExistsError):
        os.mkdir(name, mode, dir_fd=parent_fd)
