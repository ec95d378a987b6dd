"""The life lock: a process holds it as long as it maps the pool. A free lock means that the process is dead.

It is an open-file-description lock on the first byte of the worker's row in the pool itself, so it works in any pid
namespace and over any carrier, and a new server finds it, too. The worker makes its own description by reopening the
segment, because the one that the server passed is shared with the server. A forked child closes its duplicate before it
runs on; otherwise its parent's death would go unnoticed.
"""

from __future__ import annotations

import fcntl
import os
import struct
from typing import TYPE_CHECKING

from lmcache_core.descriptors import Descriptor
from lmcache_core.errors import PoolError, RowTakenError
from lmcache_core.pool.atfork import PrivateDescriptor, forget_in_child
from lmcache_core.pool.backing import reopen
from lmcache_core.pool.tables import NO_ROW

if TYPE_CHECKING:
    from lmcache_core.pool.segment import Segment

__all__ = ["LifeLock", "PrivateDescriptor", "forget_in_child", "life_lock_free"]

# struct flock with 64-bit offsets: type, whence, start, length, pid (0 for this kind of lock), padding.
_FLOCK = struct.Struct("hhqqi4x")


class LifeLock(PrivateDescriptor):
    """The proof that this process lives. `closed` in a forked child, which must connect by itself."""

    def __init__(self, fd: int | Descriptor, row: int) -> None:
        super().__init__(fd)
        self.row = row

    @classmethod
    def acquire(cls, segment: Segment, row: int) -> LifeLock:
        """Take the lock of `row`; NO_ROW: of any free row. Raises RowTakenError if another living process has it."""
        if row == NO_ROW:
            return cls._acquire_any(segment)
        ours = reopen(segment.fileno())
        try:
            wanted = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, segment.life_offset(row), 1, 0)
            fcntl.fcntl(ours.fileno(), fcntl.F_OFD_SETLK, wanted)
            return cls(ours, row)
        except BlockingIOError:
            ours.close()
            raise RowTakenError(
                f"the life lock of worker row {row} in pool {segment.info.name!r} is held by another process: "
                "connect again for a row of your own"
            ) from None

    @classmethod
    def _acquire_any(cls, segment: Segment) -> LifeLock:
        tables = segment.tables
        # From the end: the server assigns rows from the beginning to workers that have not locked them yet.
        for row in reversed(range(segment.header.worker_rows)):
            if not tables.row_claimed(row) and lock_is_free(segment.fileno(), tables.life_offset(row)):
                try:
                    lock = cls.acquire(segment, row)
                except PoolError:  # another process was faster
                    continue
                if not tables.row_claimed(row):
                    return lock
                lock.close()
        raise PoolError(f"all worker rows of pool {segment.info.name!r} are in use")


def lock_is_free(fd: int, offset: int) -> bool:
    """True if no other open file description locks the byte at `offset`."""
    answer = fcntl.fcntl(fd, fcntl.F_OFD_GETLK, _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, offset, 1, 0))
    return bool(_FLOCK.unpack(answer)[0] == fcntl.F_UNLCK)


def life_lock_free(segment: Segment, row: int) -> bool:
    """True if nobody holds the life lock of `row`: the worker is dead, or has not taken it yet."""
    return lock_is_free(segment.fileno(), segment.life_offset(row))
