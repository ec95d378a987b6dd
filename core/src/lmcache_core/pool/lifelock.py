"""What shows that a worker may still touch the slots of its row, for as long as it holds it.

Over the lifeline that is a *life token*: one end of a pipe that the server made for this worker alone. When the last
copy of it is closed, the server's end says so, at once; nobody else can keep it open. A forked child closes its
duplicate before it runs on.

Beside it, and alone where a worker attaches by name, stands the *life lock*: an open-file-description lock on the first
byte of the worker's row in the pool itself. It works in any pid namespace and over any carrier, and the next server
finds it, too. The worker makes its own description by reopening the segment, because the one that the server passed is
shared with the server. Everybody who maps the pool can lock any row. So free means that its worker is gone; held means
nothing, and where somebody else holds it when the worker comes, the worker goes without, and says so.
"""

from __future__ import annotations

import fcntl
import os
import random
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
    """What shows that this client lives. `closed` in a forked child, which must connect by itself."""

    _beside: PrivateDescriptor | None = None

    def __init__(
        self, fd: int | Descriptor, row: int, *, locked: bool = True, beside: PrivateDescriptor | None = None
    ) -> None:
        """`fd`: the token, or what holds the lock. `beside`: what holds the lock of the same row."""
        super().__init__(fd)
        self.row = row
        self.locked = locked  # whether the row's lock is ours
        self._beside = beside

    def close(self) -> None:
        beside, self._beside = self._beside, None
        if beside is not None:  # first: who sees the end of the token gives the row to the next worker
            beside.close()
        super().close()

    @classmethod
    def with_token(cls, segment: Segment, row: int, token: Descriptor) -> LifeLock:
        """For a worker to which the server has given a token; it also takes the row's lock, if it can."""
        try:
            lock = cls.acquire(segment, row)
        except RowTakenError:
            return cls(token, row, locked=False)
        return cls(token, row, beside=lock)

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
        free = [row for row in range(segment.header.worker_rows) if not tables.row_claimed(row)]
        if not free:
            raise PoolError(f"all worker rows of pool {segment.info.name!r} are in use")
        return cls(reopen(segment.fileno()), random.choice(free), locked=False)  # somebody else has locked all of them


def lock_is_free(fd: int, offset: int, nbytes: int = 1) -> bool:
    """True if no other open file description locks any of the bytes from `offset` on."""
    answer = fcntl.fcntl(fd, fcntl.F_OFD_GETLK, _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, offset, nbytes, 0))
    return bool(_FLOCK.unpack(answer)[0] == fcntl.F_UNLCK)


def life_lock_free(segment: Segment, row: int) -> bool:
    """True if nobody holds the life lock of `row`: the worker is dead, or has not taken it yet."""
    return lock_is_free(segment.fileno(), segment.life_offset(row))
