"""What a new server does with the segment file of its pool's name. It holds the claim on the name (`pool/claim.py`):
no lock is taken on the file itself, because every worker can open it, and could hold such a lock."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import stat
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from pathlib import Path

from lmcache_core.descriptors import Descriptor
from lmcache_core.errors import NotEnoughMemoryError, PoolBusyError, PoolError, PoolMismatchError
from lmcache_core.files import FULL, reason_of
from lmcache_core.guard import on_failure
from lmcache_core.pool import header as headers
from lmcache_core.pool.header import Header
from lmcache_core.pool.mapping import punch_hole

log = logging.getLogger(__name__)

NOTHING_LEFT = "no earlier server left one: at an orderly end a pool is freed, unless l1.keep_pool is set"


class OnStale(StrEnum):
    """What a new server does with a dead one's named segment."""

    ADOPT = "adopt"  # continue with its content if it is the same kind of pool; otherwise start cold
    RECREATE = "recreate"  # free its memory and start cold
    REFUSE = "refuse"  # stop, and leave it to `lmcache-core clean`


@dataclass
class Owned:
    """The open segment file, and what was done with the file that was found there."""

    file: Descriptor
    adopted: Header | None = None  # the header of a dead server's segment that we continue with
    recreated: bool = False  # a dead server's segment was freed first …
    why_cold: str = ""  # why nothing was adopted


def own_segment(
    path: Path,
    name: str,
    on_stale: OnStale,
    adoptable: Callable[[int], Header],
    undo: contextlib.ExitStack,
    why_cold: str = "",
    check_ours: Callable[[int], None] | None = None,
    mark: bytes = b"",
) -> Owned:
    """The segment file, for the holder of the claim on it: a new one that we made, or a dead server's that
    `adoptable(fd)` accepted.

    `adoptable` raises PoolMismatchError with the reason if it does not accept it. `check_ours`: raises PoolError for a
    file that is not to be touched; None: the name says enough. `mark`: what a new file begins with before it
    has its name. If the creation fails later, a new file is removed again; an adopted one is not.
    """
    found = open_ours(path)
    if found is None:
        return Owned(_made(path, name, undo, mark), why_cold=NOTHING_LEFT)
    with contextlib.closing(found) as stale:
        if check_ours is not None:
            check_ours(stale.fileno())
        if not os.fstat(stale.fileno()).st_size:  # its maker died at once; it may be open elsewhere, so no filling it
            unlink(stale, path)
            return Owned(_made(path, name, undo, mark), why_cold=NOTHING_LEFT)
        why_cold = why_cold or 'l1.on_stale is "recreate"'
        if on_stale is OnStale.REFUSE:
            command = name if check_ours is None else f"--file {path}"
            raise PoolError(
                f"{path} is left over from a server that has ended: run lmcache-core clean {command}, or set "
                f'l1.on_stale = "{OnStale.ADOPT}" or "{OnStale.RECREATE}"'
            )
        if on_stale is OnStale.ADOPT:
            try:
                header = adoptable(stale.fileno())
            except PoolMismatchError as error:
                why_cold = str(error)
            else:
                adopted = Owned(Descriptor.of(stale.detach()), header)
                undo.callback(adopted.file.close)
                return adopted
        free_segment(stale, path)
    log.warning("pool %r starts cold, and the memory of an earlier server in %s is freed: %s", name, path, why_cold)
    return Owned(_made(path, name, undo, mark), recreated=True, why_cold=why_cold)


def open_ours(path: Path) -> Descriptor | None:
    """Open a file of our own. None if there is none. Raises `PoolError` for anything else of that name."""
    try:
        file = Descriptor(os.open, path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        if path.parent.is_dir():
            return None
        raise PoolError(f"{path.parent} does not exist: create it, or name another directory") from None
    except OSError as error:
        _refuse_foreign(path, path.lstat() if path.is_symlink() or path.exists() else None)
        raise PoolError(f"{path} cannot be opened: {error.strerror}; use another pool name") from error
    with on_failure(file.close):
        found = os.fstat(file.fileno())
        if not stat.S_ISREG(found.st_mode):
            raise PoolError(f"{path} is not a file, so it is not a pool")
        _refuse_foreign(path, found)
    return file


def _made(path: Path, name: str, undo: contextlib.ExitStack, mark: bytes) -> Descriptor:
    try:
        file = _marked(path, mark) if mark else _named(path)
    except FileExistsError:
        raise PoolBusyError(f"pool {name!r}: another process is making {path} at this moment") from None
    except OSError as error:
        kind = NotEnoughMemoryError if error.errno in FULL else PoolError
        cure = "free some room there, or use another path" if mark else "use another pool name"
        raise kind(f"{path} cannot be made: {reason_of(error, path.parent)}; {cure}") from error
    undo.callback(file.close)
    undo.callback(partial(unlink, file, path))
    return file


def _named(path: Path) -> Descriptor:
    return Descriptor(os.open, path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_CREAT | os.O_EXCL, 0o600)


def _marked(path: Path, mark: bytes) -> Descriptor:
    """A new file that has its mark before it has its name, where the file system can do that: an empty one of this name
    is not ours."""
    with contextlib.ExitStack() as undo:
        try:
            file = Descriptor(os.open, path.parent, os.O_RDWR | os.O_CLOEXEC | os.O_TMPFILE, 0o600)
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR):  # of the file system, of the kernel
                raise
            file = _named(path)
        undo.callback(file.close)
        if os.fstat(file.fileno()).st_nlink:
            undo.callback(partial(unlink, file, path))
        os.pwrite(file.fileno(), mark, 0)
        if not os.fstat(file.fileno()).st_nlink:
            # with a descriptor Python calls linkat(), which follows the link in /proc; link() does not
            os.link(f"/proc/self/fd/{file.fileno()}", path, src_dir_fd=file.fileno(), follow_symlinks=True)
        undo.pop_all()
    return file


def _refuse_foreign(path: Path, found: os.stat_result | None) -> None:
    """Another user's file is neither used nor removed: it may be that user's live pool, or a trap."""
    if found is not None and found.st_uid != os.geteuid():
        raise PoolError(
            f"{path} belongs to uid {found.st_uid} but this process runs as uid {os.geteuid()}, so it is not "
            f"touched: it may be that user's pool; have them remove it (sudo -u '#{found.st_uid}' rm {path}), or use "
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


def unlink(file: Descriptor, path: Path) -> None:
    """Remove the name, if it is still this file's. Only ever called under the claim on it."""
    if not file.closed and same_file(file.fileno(), path):
        path.unlink(missing_ok=True)


def free_segment(file: Descriptor, path: Path) -> None:
    """Remove the segment file of a dead owner, and free its memory even if workers still map it."""
    try:
        # Memory first, or it would stay with the workers that still map it. They read zeros from now on. (Touching a
        # page costs memory again, and a SIGBUS if the mount is full by then; a worker unmaps a pool as soon as its
        # server is gone.) The index goes before the data: whoever copies an object without a call then finds its entry
        # changed before any of its bytes may change.
        nbytes = os.fstat(file.fileno()).st_size
        front = min(_front_bytes(file.fileno()), nbytes)
        punch_hole(file.fileno(), 0, front)
        if front < nbytes:
            punch_hole(file.fileno(), front, nbytes - front)
        unlink(file, path)
    except OSError as error:
        raise PoolError(f"{path} is stale and cannot be removed: {error.strerror}; remove it by hand") from error


def _front_bytes(fd: int) -> int:
    """Bytes in front of the data. If the segment makes no sense, only its header: nobody can read it without that."""
    try:
        return headers.decode(os.pread(fd, headers.HEADER_BYTES, 0)).data_offset
    except PoolMismatchError:
        return headers.HEADER_BYTES
