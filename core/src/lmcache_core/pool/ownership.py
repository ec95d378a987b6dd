"""One server per pool name, enforced by a lock that is never passed on.

A `flock` belongs to an open file description, and goes wherever a descriptor or a mapping of it goes: to a worker that
receives one, to a forked child. So the locked description is neither sent nor mapped, and closes itself in forked
children. The operating system frees the lock when the server dies, however it dies.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import stat
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from lmcache_core.errors import PoolBusyError, PoolError, PoolMismatchError
from lmcache_core.pool import header as headers
from lmcache_core.pool.atfork import PrivateDescriptor
from lmcache_core.pool.header import Header
from lmcache_core.pool.mapping import punch_hole

log = logging.getLogger(__name__)

_TRIES = 100  # each failure means that another process unlinked the file at that moment


class OnStale(StrEnum):
    """What a new server does with a dead one's named segment."""

    ADOPT = "adopt"  # continue with its content if it is the same kind of pool; otherwise begin cold
    RECREATE = "recreate"  # free its memory and begin cold
    REFUSE = "refuse"  # stop, and leave it to `lmcache-core clean`


class OwnerLock(PrivateDescriptor):
    """An exclusive lock on a file, held as long as this process has it open."""

    def __init__(self, fd: int, path: Path, *, created: bool) -> None:
        super().__init__(fd)
        self.path = path
        self.created = created  # exclusively by us, so nobody else can have it open
        self.found_bytes = os.fstat(fd).st_size  # more than 0: it was in use before

    @classmethod
    def acquire(cls, path: Path) -> OwnerLock:
        """Lock the file, and make it if necessary. Raises PoolBusyError if a living process holds it."""
        for _ in range(_TRIES):
            lock = cls._try_once(path, create=True)
            if lock is not None:
                return lock
        raise PoolError(f"{path} was replaced at every attempt to lock it: look for a service that restarts in a loop")

    @classmethod
    def acquire_existing(cls, path: Path) -> OwnerLock | None:
        """Lock an existing file. None if there is none; PoolBusyError if a living process holds it."""
        for _ in range(_TRIES):
            try:
                lock = cls._try_once(path, create=False)
            except FileNotFoundError:
                return None
            if lock is not None:
                return lock
        raise PoolError(f"{path} was replaced at every attempt to lock it")

    @classmethod
    def _try_once(cls, path: Path, *, create: bool) -> OwnerLock | None:
        flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW
        created = False
        try:
            try:
                fd = os.open(path, flags)
            except FileNotFoundError:
                if not create:
                    raise
                fd, created = os.open(path, flags | os.O_CREAT | os.O_EXCL, 0o600), True
        except FileExistsError:
            return None  # another process was faster: look again
        except FileNotFoundError:
            if create:
                raise PoolError(f"{path.parent} does not exist: create it, or name another directory") from None
            raise
        except OSError as error:
            _refuse_foreign(path, path.lstat() if path.is_symlink() or path.exists() else None)
            raise PoolError(f"{path} cannot be opened: {error.strerror}; use another pool name") from error
        try:
            found = os.fstat(fd)
            if not stat.S_ISREG(found.st_mode):
                raise PoolError(f"{path} is not a file, so it is not a pool")
            _refuse_foreign(path, found)
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            lock = cls(fd, path, created=created)
        except BlockingIOError:
            os.close(fd)
            raise PoolBusyError(f"{path} is locked by a living process") from None
        except BaseException:
            os.close(fd)
            raise
        # The former holder may have unlinked the name before it released the lock: then this lock protects nothing.
        if lock.named():
            return lock
        lock.close()
        return None

    def write_pid(self) -> None:
        """Write the holder's pid into a lock file. Only for messages: the lock decides."""
        os.ftruncate(self.fileno(), 0)
        os.pwrite(self.fileno(), f"{os.getpid()}\n".encode(), 0)

    def named(self) -> bool:
        """True while the locked file is the one that the path names."""
        return same_file(self.fileno(), self.path)

    def unlink(self) -> None:
        """Remove the name, if it is still this file's. Only ever called under the lock."""
        if not self.closed and self.named():
            with contextlib.suppress(FileNotFoundError):
                self.path.unlink()


def _refuse_foreign(path: Path, found: os.stat_result | None) -> None:
    """Another user's file is neither used nor removed: it may be that user's live pool, or a trap."""
    if found is not None and found.st_uid != os.geteuid():
        raise PoolError(
            f"{path} belongs to uid {found.st_uid} but this process runs as uid {os.geteuid()}: it is "
            f"left alone, because "
            f"it may be that user's pool; have them remove it (sudo -u '#{found.st_uid}' rm {path}), or use "
            "another pool name"
        )


def same_file(fd: int, path: Path) -> bool:
    """True if the path names the file that is open as `fd`."""
    try:
        named = path.lstat()
    except FileNotFoundError:
        return False
    opened = os.fstat(fd)
    return (named.st_dev, named.st_ino) == (opened.st_dev, opened.st_ino)


def own(path: Path, name: str, undo: contextlib.ExitStack) -> OwnerLock:
    """Lock `path`. If the creation fails later, the file there is removed under the lock."""
    try:
        lock = OwnerLock.acquire(path)
    except PoolBusyError as error:
        raise PoolBusyError(
            f"pool {name!r} belongs to a living server{_who(path)}, which holds {path}: stop it, or choose "
            "another pool name"
        ) from error
    undo.callback(lock.close)
    undo.callback(lock.unlink)
    return lock


@dataclass
class Owned:
    """The lock on a segment's file, and what was done with the file that was found there."""

    lock: OwnerLock
    adopted: Header | None = None  # the header of a dead server's segment that we continue with
    recreated: bool = False  # a dead server's segment was freed first …
    why_cold: str = ""  # … for this reason


def own_segment(
    path: Path,
    name: str,
    on_stale: OnStale,
    adoptable: Callable[[int], Header],
    undo: contextlib.ExitStack,
    why_cold: str = "",
) -> Owned:
    """The lock on a segment file: a new one that we made, or a dead server's that `adoptable(fd)` accepted.

    `adoptable` raises PoolMismatchError with the reason if it does not accept it. If the creation fails later, a new
    file is removed again; an adopted one is not.
    """
    with contextlib.ExitStack() as undo_stale:
        lock = own(path, name, undo_stale)
        if lock.created:
            undo.push(undo_stale.pop_all())
            return Owned(lock)
        undo_stale.pop_all()
    undo_lock = undo.enter_context(contextlib.ExitStack())
    undo_lock.callback(lock.close)
    if not lock.found_bytes:  # its maker died at once; it may be open elsewhere, so we must not fill it
        lock.unlink()
        undo_lock.close()
        return Owned(_own_new(path, name, undo))
    why_cold = why_cold or 'l1.on_stale is "recreate"'
    if on_stale is OnStale.REFUSE:
        raise PoolError(
            f"{path} is left over from a server that has ended: run lmcache-core clean {name}, or set l1.on_stale = "
            f'"{OnStale.ADOPT}" or "{OnStale.RECREATE}"'
        )
    if on_stale is OnStale.ADOPT:
        try:
            return Owned(lock, adopted=adoptable(lock.fileno()))
        except PoolMismatchError as error:
            why_cold = str(error)
    free_segment(lock)
    undo_lock.close()
    log.warning("pool %r begins cold, and what a former server left in %s is given back: %s", name, path, why_cold)
    return Owned(_own_new(path, name, undo), recreated=True, why_cold=why_cold)


def _own_new(path: Path, name: str, undo: contextlib.ExitStack) -> OwnerLock:
    lock = own(path, name, undo)
    if not lock.created:
        raise PoolBusyError(f"pool {name!r}: another server is making {path} at this moment")
    return lock


def take_former_name(former: Path, path: Path, name: str) -> None:
    """Give a dead server's segment its present-day name, so that it can be adopted. Ignores another user's. Raises
    PoolBusyError if its server lives."""
    try:
        if former.lstat().st_uid != os.geteuid() or path.exists():
            return
        lock = OwnerLock.acquire_existing(former)
    except FileNotFoundError:
        return
    except PoolBusyError as error:
        raise PoolBusyError(
            f"pool {name!r} belongs to a living server of a former version{_who(former)}, which holds {former}: stop "
            "it, or choose another pool name"
        ) from error
    if lock is None:
        return
    with contextlib.closing(lock):
        with contextlib.suppress(FileExistsError):
            path.hardlink_to(former)  # unlike a rename, this replaces nothing
            lock.unlink()
            log.info("the segment %s of pool %r is called %s from now on", former, name, path)


def free_segment(lock: OwnerLock) -> None:
    """Remove the segment file of a dead owner, and free its memory even if workers still map it."""
    try:
        # Memory first, or it would stay with the workers that still map it. They read zeros from now on. (Touching a
        # page costs memory again, and a SIGBUS if the mount is full by then; a worker unmaps a pool as soon as its
        # server is gone.) The index goes before the data: whoever copies an object without a call then finds its entry
        # changed before any of its bytes may change.
        front = min(_front_bytes(lock.fileno()), lock.found_bytes)
        punch_hole(lock.fileno(), 0, front)
        if front < lock.found_bytes:
            punch_hole(lock.fileno(), front, lock.found_bytes - front)
        lock.unlink()
    except OSError as error:
        raise PoolError(f"{lock.path} is stale and cannot be removed: {error.strerror}; remove it by hand") from error


def _front_bytes(fd: int) -> int:
    """Bytes in front of the data. If the segment makes no sense, only its header: nobody can read it without that."""
    try:
        return headers.decode(os.pread(fd, headers.HEADER_BYTES, 0)).data_offset
    except PoolMismatchError:
        return headers.HEADER_BYTES


def _who(path: Path) -> str:
    """The owner's pid in words: from the lock file's text, or from the segment's header."""
    try:
        with open(path, "rb") as file:
            start = file.read(headers.HEADER_BYTES)
        pid = int(start) if start.strip().isdigit() else headers.decode(start).pid
    except (OSError, PoolMismatchError):
        return ""  # only the message needs it, and the owner may have just started
    return f" (pid {pid})"
