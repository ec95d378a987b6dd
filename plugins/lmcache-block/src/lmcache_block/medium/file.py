"""The calls to the file or device: everything that reaches the medium goes through one of these."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import stat
import struct
from collections.abc import Sequence
from typing import Protocol

_IOV_MAX = 1024
_BLKDISCARD = 0x1277
_BLKGETSIZE64 = 0x80081272
_PUNCH_HOLE, _KEEP_SIZE = 2, 1


class Medium(Protocol):
    """Blocks at offsets. All methods raise `OSError`; several threads may call them at once.

    `direct`: offsets, lengths and the addresses of buffers have to be aligned to blocks.
    """

    direct: bool

    @property
    def nbytes(self) -> int: ...

    def read(self, at: int, parts: Sequence[memoryview]) -> None:
        """Fill the buffers."""

    def write(self, at: int, parts: Sequence[memoryview]) -> None:
        """Write all of the buffers."""

    def sync(self) -> None:
        """What was written before survives a power cut when this returns."""

    def discard(self, at: int, nbytes: int) -> None:
        """The bytes are not needed any more, and read as zeros or as before."""

    def allocate(self) -> None:
        """All of it has its blocks, as far as the file system can promise that."""

    def is_at(self, path: str) -> bool:
        """Whether the path still leads here, and to all of it."""

    def close(self) -> None: ...


class FileMedium:
    """A file or a block device that is open."""

    def __init__(self, handle: int, *, direct: bool) -> None:
        self._handle = handle
        self.direct = direct
        about = os.fstat(handle)
        self._is_device = stat.S_ISBLK(about.st_mode)
        self._id = (about.st_dev, about.st_ino, about.st_rdev)
        self._nbytes_min = 0
        _open_media.add(self)

    def expect_bytes(self, nbytes: int) -> None:
        """A file that is shorter from now on is not ours any more: what was cut off is gone."""
        self._nbytes_min = nbytes

    @property
    def nbytes(self) -> int:
        if not self._is_device:
            return os.fstat(self._handle).st_size
        (nbytes,) = struct.unpack("Q", fcntl.ioctl(self._handle, _BLKGETSIZE64, bytes(8)))
        return int(nbytes)

    def read(self, at: int, parts: Sequence[memoryview]) -> None:
        left = list(parts)
        while left:
            done = os.preadv(self._handle, left[:_IOV_MAX], at)
            if done == 0 and any(part.nbytes for part in left):
                raise OSError(errno.EIO, f"the medium ends at byte {at:,}")
            at += done
            left = _after(left, done)

    def write(self, at: int, parts: Sequence[memoryview]) -> None:
        left = list(parts)
        while left:
            done = os.pwritev(self._handle, left[:_IOV_MAX], at)
            if done == 0 and any(part.nbytes for part in left):
                raise OSError(errno.EIO, "the medium accepts no more bytes and gives no reason")
            at += done
            left = _after(left, done)

    def sync(self) -> None:
        try:
            os.fdatasync(self._handle)
        except OSError:
            # What could not be written counts as clean in the page cache, and would be read back as if it were there.
            os.posix_fadvise(self._handle, 0, 0, os.POSIX_FADV_DONTNEED)
            raise

    def discard(self, at: int, nbytes: int) -> None:
        if self._is_device:
            fcntl.ioctl(self._handle, _BLKDISCARD, struct.pack("QQ", at, nbytes))
        else:
            fallocate(self._handle, _PUNCH_HOLE | _KEEP_SIZE, at, nbytes)

    def allocate(self) -> None:
        if not self._is_device:
            try:
                fallocate(self._handle, 0, 0, self.nbytes)
            except OSError as error:
                if error.errno not in (errno.EOPNOTSUPP, errno.ENOSYS):
                    raise

    def is_at(self, path: str) -> bool:
        try:
            about = os.stat(path)  # noqa: PTH116  # each call asks
        except (FileNotFoundError, NotADirectoryError):
            return False
        return (about.st_dev, about.st_ino, about.st_rdev) == self._id and about.st_size >= self._nbytes_min

    def close(self) -> None:
        handle, self._handle = self._handle, -1
        _open_media.discard(self)
        if handle >= 0:
            os.close(handle)


_open_media: set[FileMedium] = set()


def close_all() -> None:
    """In a forked child, which would keep the locks of these media when its parent has ended."""
    for medium in tuple(_open_media):
        medium.close()


_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)


def fallocate(handle: int, mode: int, at: int, nbytes: int) -> None:
    if _libc.fallocate(handle, mode, at, nbytes):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def _after(parts: list[memoryview], done: int) -> list[memoryview]:
    """What is left of the buffers after `done` bytes."""
    for position, part in enumerate(parts):
        if done < part.nbytes:
            return [part[done:], *parts[position + 1 :]]
        done -= part.nbytes
    return []
