"""The steps of making and attaching a segment, before it is mapped: its file's size, memory, mode, owner and header."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Sequence
from pathlib import Path

from lmcache_core.errors import NotEnoughMemoryError, PoolError, PoolMismatchError
from lmcache_core.pool import backing as backings
from lmcache_core.pool import header as headers
from lmcache_core.pool.backing import SHM_DIR, Access
from lmcache_core.pool.header import Header
from lmcache_core.pool.room import Room, check_room, room


def adoptable(wanted: Header, access: Access, gids: Sequence[int], fd: int) -> Header:
    """The header of a segment that a dead server of our uid left with the same settings. PoolMismatchError says what
    differs."""
    found = os.fstat(fd)
    header = read_header(fd)
    headers.same_plan(header, wanted)
    mode, group = stat.S_IMODE(found.st_mode), found.st_gid
    open_to_group = access is Access.GROUP
    if bool(mode & 0o060) != open_to_group or (open_to_group and group != gids[0]):
        was = f"group {group}" if mode & 0o060 else "its owner"
        now = f"group {gids[0]}" if open_to_group else "its owner"
        raise PoolMismatchError(f"it is open to {was}, but l1.access and l1.gids open it to {now}")
    backings.grant_access(fd, access, gids)
    return header


def check_fits(header: Header, *, shm_dir: Path = SHM_DIR, there_bytes: int = 0) -> Room:
    """Where a new segment gets its memory: for the objects, the tables and the index. `shm_dir`: where its file is.
    `there_bytes`: of a former segment that it replaces. Raises `NotEnoughMemoryError`."""
    found = room(header.backing, mount=shm_dir)
    check_room(header.segment_bytes - there_bytes, found, what=f"pool {header.name!r}")
    return found


def size(fd: int, header: Header, access: Access, gids: Sequence[int]) -> None:
    """Give an empty segment its size, its mode, its seals, and memory for the tables and the index."""
    backings.grant_access(fd, access, gids)
    front_bytes = header.index_offset + header.index_bytes
    try:
        os.ftruncate(fd, header.segment_bytes)
        if not header.backing.has_name:
            backings.seal(fd)
        # The index, too: readers touch any entry, and on a full host a hole would give them SIGBUS.
        os.posix_fallocate(fd, 0, headers.round_up(front_bytes, header.backing.page_bytes))
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.ENOMEM):
            raise NotEnoughMemoryError(
                f"pool {header.name!r} got no memory for its tables and index ({front_bytes:,} bytes): "
                "make it smaller, set l1.index_entries, or free memory"
            ) from error
        raise PoolError(f"pool {header.name!r} cannot be sized: {error.strerror}") from error


def read_header(fd: int) -> Header:
    """The header of an open segment, checked against the file's size."""
    found = os.fstat(fd)
    if not stat.S_ISREG(found.st_mode):
        raise PoolMismatchError("the descriptor is not a memory segment")
    try:
        page = os.pread(fd, headers.HEADER_BYTES, 0)
    except OSError as error:
        raise PoolMismatchError(f"the segment's header cannot be read: {error.strerror}") from error
    header = headers.decode(page)
    if found.st_size != header.segment_bytes:
        raise PoolMismatchError(
            f"the segment has {found.st_size:,} bytes, but its header says {header.segment_bytes:,}: "
            "it was truncated, or is not finished"
        )
    return header
