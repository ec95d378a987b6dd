"""Mapped memory, and the few system calls on it that Python does not offer or runs under the GIL.

`mmap.mmap` can neither choose an address (huge pages need file and address aligned alike) nor populate
without the GIL (512 MiB held it for 503 ms). Every call here goes through ctypes, which releases it.

The mapping is a ctypes array of a class of its own, with `munmap` as its finalizer: a memoryview, numpy
array or tensor over any part of it keeps it alive, and the last one to go unmaps it. So nothing is ever
unmapped under a view, and `close` needs no count of them.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import weakref
from typing import Any

from lmcache_core.errors import NotEnoughMemoryError, PoolError
from lmcache_core.limits import HUGE_PAGE_BYTES

MADV_DONTFORK = 10
MADV_HUGEPAGE = 14
MADV_DONTDUMP = 16
MADV_POPULATE_WRITE = 23
MADV_COLLAPSE = 25

_MAP_FIXED = 0x10
_MAP_NORESERVE = 0x4000
_PROT_NONE = 0
_FALLOC_FL_KEEP_SIZE = 1
_FALLOC_FL_PUNCH_HOLE = 2
_MAP_FAILED = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [
    ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64,
]  # fmt: skip
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]


class Mapping:
    """A shared, writable mapping of a whole segment, aligned to huge pages. Gone with its last view.

    `array` is the exporter: hold it (or a view of it) for as long as `address` is used.
    """

    def __init__(self, fd: int, nbytes: int) -> None:
        self.nbytes = nbytes
        self.address = _map_aligned(fd, nbytes)
        self.pinned = False  # by pool/cuda.py
        # A class of its own, since plain ctypes arrays take no weak reference and so no finalizer.
        kind: Any = type("MappedArray", (ctypes.c_ubyte * nbytes,), {})
        self.array: Any = kind.from_address(self.address)
        finalizer = weakref.finalize(self.array, _unmap, self.address, nbytes, os.getpid())
        # The end of the process unmaps: a daemon thread may still copy while the interpreter winds down.
        finalizer.atexit = False
        # A child that forks off has no lease and no life lock, so it gets no memory to write to either;
        # and what users' prompts left here does not belong in a core file.
        for advice in (MADV_DONTFORK, MADV_DONTDUMP):
            error = advise(self.address, nbytes, advice)
            if error:
                raise PoolError(f"madvise({advice}) of the pool's mapping failed: {os.strerror(error)}")
        # Only where the mount says "advise" does this give anything; elsewhere it is refused or ignored.
        advise(self.address, nbytes, MADV_HUGEPAGE)

    def view(self) -> memoryview:
        """A writable view of all bytes, format B."""
        return memoryview(self.array).cast("B")


def _map_aligned(fd: int, nbytes: int) -> int:
    reserved = nbytes + HUGE_PAGE_BYTES
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    start: int = _libc.mmap(None, reserved, _PROT_NONE, flags, -1, 0)
    if start == _MAP_FAILED:
        raise PoolError(
            f"no address space for a pool of {nbytes:,} bytes: {os.strerror(ctypes.get_errno())}; "
            "look at ulimit -v of this process"
        )
    address = -(-start // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
    protection = mmap.PROT_READ | mmap.PROT_WRITE
    mapped = _libc.mmap(address, nbytes, protection, mmap.MAP_SHARED | _MAP_FIXED, fd, 0)
    if mapped == _MAP_FAILED:
        error = ctypes.get_errno()
        _libc.munmap(start, reserved)
        kind = NotEnoughMemoryError if error == errno.ENOMEM else PoolError
        raise kind(f"a pool segment of {nbytes:,} bytes cannot be mapped: {os.strerror(error)}")
    # Give back what the alignment left over. Segments are whole pages of their backing, so the ends are too.
    if address > start:
        _libc.munmap(start, address - start)
    end = address + nbytes
    if start + reserved > end:
        _libc.munmap(end, start + reserved - end)
    return address


def _unmap(address: int, nbytes: int, pid: int) -> None:
    # A forked child never had the mapping (MADV_DONTFORK): the addresses may be something else by now.
    if os.getpid() == pid:
        _libc.munmap(address, nbytes)


def advise(address: int, nbytes: int, advice: int) -> int:
    """madvise without the GIL. 0, or the errno."""
    while _libc.madvise(address, nbytes, advice) != 0:
        error = ctypes.get_errno()
        if error != errno.EINTR:
            return error
    return 0


def punch_hole(fd: int, offset: int, nbytes: int) -> None:
    """Give the memory of a range back. Whoever still maps it reads zeros; nobody gets a SIGBUS. Raises OSError."""
    if _libc.fallocate(fd, _FALLOC_FL_PUNCH_HOLE | _FALLOC_FL_KEEP_SIZE, offset, nbytes) != 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
