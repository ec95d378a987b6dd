"""From a path to a descriptor of a finished table file: open it, or create it.

A table is built in a separate file, under another name, and gets its final name by link() once it is finished. So a
name leads to a whole table or to none; an existing file is never written to, and a creator that dies or fails damages
nothing. One process builds at a time: the others wait, for at most `wait_s`, and then attach to the result.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
import stat
import time
from collections.abc import Iterator
from pathlib import Path

from lmcache_l0 import _table
from lmcache_l0.errors import TableBusyError, TableError, TableRoomError
from lmcache_l0.sizing import GIB, Plan

_STEP_BYTES = 64 << 20  # allocated between two checks of the free space
_HUGE_PAGES = Path("/sys/kernel/mm/hugepages")
_PAGE_BYTES_MAX = 1 << 16  # an ordinary page, on any machine
_OPEN_TRIES = 8  # a try fails if somebody removes the file at that moment
_LOOK_S = 0.02  # between two checks whether the other creator is done


def open_table(path: Path, *, read_only: bool) -> int:
    """A descriptor of the file at `path`, if it is safe to map. FileNotFoundError if there is none; TableError if it is
    not a file, or others can write it.
    """
    flags = (os.O_RDONLY if read_only else os.O_RDWR) | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        fd = os.open(path, flags)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise TableError(f"{path} is a symbolic link, which somebody may point elsewhere: name the file") from None
        if error.errno in (errno.EISDIR, errno.ENXIO):
            raise _no_file(path) from None
        raise
    try:
        _check_owner(path, os.fstat(fd), read_only=read_only)
    except BaseException:
        os.close(fd)
        raise
    return fd


def open_or_make(path: Path, plan: Plan, *, reserve: bool, enabled: bool, wait_s: float) -> int:
    """Like open_table; if there is nothing at `path`, create the table of this plan there."""
    until = time.monotonic() + wait_s
    for _ in range(_OPEN_TRIES):
        try:
            return open_table(path, read_only=False)
        except FileNotFoundError:
            pass
        building = path.with_name(f".{path.name}.making")
        with _alone(path, building, until) as fd:
            if fd is not None:
                _build(path, fd, plan, reserve=reserve, enabled=enabled)
                _name(path, building)
    raise TableError(f"{path} was removed {_OPEN_TRIES} times while it was opened: somebody clears that folder")


def _no_file(path: Path) -> TableError:
    return TableError(f"{path} is not a file: name one in a folder of shared memory, such as /dev/shm")


def _check_owner(path: Path, found: os.stat_result, *, read_only: bool) -> None:
    """Whoever may write a table's file can crash its readers (by truncating it) and show them any bytes."""
    if not stat.S_ISREG(found.st_mode):
        raise _no_file(path)
    me = os.geteuid()
    if found.st_uid != me and not (read_only and me == 0):
        raise TableError(
            f"{path} belongs to user {found.st_uid} and this process is user {me}: a table is for processes of one user"
        )
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise TableError(
            f"{path} has mode {stat.S_IMODE(found.st_mode):04o}, so others than its owner may write it: "
            "chmod it to 0600, if you trust what they have written"
        )


@contextlib.contextmanager
def _alone(path: Path, building: Path, until: float) -> Iterator[int | None]:
    """An empty file called `building`, if nobody else is building; None if somebody has finished meanwhile. The builder
    locks the file, and the lock ends with its owner. A file with bytes and without a lock was left by a creator that
    died: it is removed, never reused, because its inode may already have the table's name.
    """
    while True:
        fd = os.open(building, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                locked = False
            else:
                locked = _names(building, fd)
            if locked and os.fstat(fd).st_size:
                building.unlink(missing_ok=True)  # under its lock, so nobody else uses it: start again with a new one
                continue
            if locked:
                try:
                    yield None if os.path.lexists(path) else fd
                finally:
                    building.unlink(missing_ok=True)
                return
        finally:
            os.close(fd)
        if os.path.lexists(path):
            yield None
            return
        if time.monotonic() > until:
            raise TableBusyError(
                f"another process has been making the table {path} for longer than wait_s and has not finished: it was "
                f"stopped, or is slow; end it, or give wait_s more time ({building} is locked by it)"
            )
        time.sleep(_LOOK_S)


def _names(path: Path, fd: int) -> bool:
    try:
        named = path.stat(follow_symlinks=False)
    except FileNotFoundError:
        return False
    ours = os.fstat(fd)
    return (named.st_dev, named.st_ino) == (ours.st_dev, ours.st_ino)


def _build(path: Path, fd: int, plan: Plan, *, reserve: bool, enabled: bool) -> None:
    os.fchmod(fd, 0o600)  # whatever the umask
    _allocate(path, fd, plan, reserve)
    _table.initialise(
        fd,
        plan.hash_slots,
        plan.max_value_size,
        plan.max_key_size,
        plan.versions,
        plan.spares,
        secrets.randbits(64),
        secrets.randbits(64),
        int(time.time()),
        enabled,
    )


def _name(path: Path, building: Path) -> None:
    try:
        os.link(building, path, follow_symlinks=False)
    except FileExistsError:
        pass  # not created by us: open_table checks it
    except OSError as error:
        raise TableError(
            f"{path} cannot be named ({error.strerror}): its file system must support hard links"
        ) from error


def _allocate(path: Path, fd: int, plan: Plan, reserve: bool) -> None:
    page_bytes = _table.page_bytes(fd)
    file_bytes = -(-plan.file_bytes // page_bytes) * page_bytes
    if reserve:
        _check_room(path, file_bytes)
    os.ftruncate(fd, file_bytes)
    if not reserve or not hasattr(os, "posix_fallocate"):
        return
    step_bytes = max(_STEP_BYTES, page_bytes)  # a partial page takes a whole one, and the rest would seem to lack space
    for offset in range(0, file_bytes, step_bytes):
        left = file_bytes - offset
        _check_room(path, left)
        try:
            os.posix_fallocate(fd, offset, min(step_bytes, left))
        except OSError as error:
            raise TableRoomError(f"{path} cannot be given {left:,} bytes more ({error.strerror})") from error


def _check_room(path: Path, needed_bytes: int) -> None:
    available_bytes, where = room_at(path)
    if needed_bytes > available_bytes:
        raise TableRoomError(
            f"{where} has room for {available_bytes / GIB:.3f} GiB and the table {path} needs "
            f"{needed_bytes / GIB:.3f} GiB: make it smaller (size_gb, hash_slots, max_value_size), or give the "
            "container more (--shm-size, memory limit; on a hugetlbfs, vm.nr_hugepages)"
        )


def room_at(path: Path) -> tuple[int, str]:
    """Bytes that can be allocated at `path`, and what limits them."""
    folder = path.parent
    if folder.resolve().is_relative_to("/dev/shm"):
        # Memory: the mount, the machine and every control group limit it; beyond that comes an OOM kill.
        from lmcache_core.pool.room import room

        found = room(mount=folder)
        return found.available_bytes, found.where
    held = os.statvfs(folder)
    free = held.f_bavail * held.f_frsize
    if held.f_frsize > _PAGE_BYTES_MAX:
        pages = _HUGE_PAGES / f"hugepages-{held.f_frsize >> 10}kB"
        if pages.is_dir():  # a hugetlbfs; without a size limit it reports zero blocks
            unused = int((pages / "free_hugepages").read_text()) - int((pages / "resv_hugepages").read_text())
            free = min(free, unused * held.f_frsize) if held.f_blocks else unused * held.f_frsize
    return free, str(folder)
