"""Mapped memory, and the system calls on it that Python lacks or runs under the GIL.

`mmap.mmap` can neither choose an address (huge pages need file and address aligned alike) nor populate
without the GIL (512 MiB held it for 503 ms). Every call here goes through ctypes, which releases it.

The mapping is a ctypes array of its own class, with `munmap` as its finalizer: a memoryview, numpy array or tensor over
any part of it keeps it alive, and the last of them unmaps it. So nothing is ever unmapped under a view, and `close`
does not need to count views.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from functools import lru_cache, partial
from itertools import starmap
from operator import call
from typing import Any

from lmcache_core.errors import NotEnoughMemoryError, PoolError
from lmcache_core.limits import HUGE_PAGE_BYTES

MADV_DONTFORK = 10
MADV_HUGEPAGE = 14
MADV_DONTDUMP = 16
MADV_POPULATE_WRITE = 23
MADV_COLLAPSE = 25

_MAP_FIXED = 0x10
_MAP_FIXED_NOREPLACE = 0x100000  # only a hint for kernels before 4.17
_MAP_NORESERVE = 0x4000
_PROT_NONE = 0
_FALLOC_FL_KEEP_SIZE = 1
_FALLOC_FL_PUNCH_HOLE = 2
_MS_SYNC = 4
_MAP_FAILED = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [
    ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64,
]  # fmt: skip
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.msync.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]


class Mapping:
    """A shared mapping of a whole segment, aligned to huge pages. Unmapped with its last view.

    `array` is the exporter: keep it (or a view of it) while `address` is in use. A write to a mapping that is not
    `writable` raises SIGSEGV in the writing process.
    """

    def __init__(self, fd: int, nbytes: int, *, writable: bool = True) -> None:
        self.nbytes = nbytes
        held = _Range(nbytes + HUGE_PAGE_BYTES)
        self.address = held.map_aligned(fd, nbytes, writable)
        self.pinned = False  # by devices/pinning.py
        # A class of its own, because plain ctypes arrays support no weak references, and so no finalizers.
        kind: Any = type("MappedArray", (ctypes.c_ubyte * nbytes,), {})
        self.array: Any = kind.from_address(self.address)
        self._mapped_by = [os.getpid()]
        finalizer = weakref.finalize(self.array, _unmap, held.spans, self._mapped_by)
        # The mapping ends with the process: a daemon thread may still copy while the interpreter shuts down.
        finalizer.atexit = False
        held.spans = deque()  # from here on the array owns it
        # A forked child has no lease and no life lock, so it must not get writable memory; and users' prompts in the
        # pool do not belong in a core file.
        for advice in (MADV_DONTFORK, MADV_DONTDUMP):
            error = advise(self.address, nbytes, advice)
            if error:
                raise PoolError(f"madvise({advice}) of the pool's mapping failed: {os.strerror(error)}")
        # This only has an effect if the mount says "advise"; otherwise it is refused or ignored.
        advise(self.address, nbytes, MADV_HUGEPAGE)

    def in_forked_child(self) -> Callable[[int], None]:
        """What to do in a forked child, with a descriptor of the segment, once it has dropped this: nothing, unless
        something there still shows the memory. Then it is mapped again, for the child alone, unless something else
        stands in its place by then: reads find what the pool holds, and what is written stays in the child."""
        shown, address, nbytes, mapped_by = weakref.ref(self.array), self.address, self.nbytes, self._mapped_by

        def map_again(fd: int) -> None:
            if shown() is not None:
                protection = mmap.PROT_READ | mmap.PROT_WRITE
                # Something of the child's may be there by now.
                flags = mmap.MAP_PRIVATE | _MAP_FIXED_NOREPLACE | _MAP_NORESERVE
                mapped = _libc.mmap(address, nbytes, protection, flags, fd, 0)
                if mapped == address:
                    mapped_by[0] = os.getpid()
                elif mapped != _MAP_FAILED:
                    _libc.munmap(mapped, nbytes)

        return map_again

    def view(self) -> memoryview:
        """A writable view of all bytes, with format B."""
        return memoryview(self.array).cast("B")

    def part(self, offset: int, nbytes: int) -> Any:
        """Bytes of the mapping, as a separate object: what refers to them keeps it, and it keeps the mapping. It
        supports weak references and attributes."""
        part = _part_type(nbytes).from_address(self.address + offset)
        part.mapping = self.array
        return part


@lru_cache(maxsize=64)
def _part_type(nbytes: int) -> Any:
    return type("MappedPart", (ctypes.c_ubyte * nbytes,), {})


class _Range:
    """Owns a range of addresses from the system call on: it is unmapped once, with its last reference.

    An address held only by a local variable is lost on an interrupt. So mapping or unmapping and recording it here is
    one call into C: an interrupt comes before or after.
    """

    spans: deque[tuple[int, int]] = deque()  # noqa: RUF012 - of one that an interrupt kept from being made; never filled

    def __init__(self, nbytes: int) -> None:
        """Reserves address space without memory. Raises `PoolError` if there is none left."""
        self.spans = deque()  # at most one: start and length
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
        self.spans.extend(
            zip(map(_libc.mmap, (None,), (nbytes,), (_PROT_NONE,), (flags,), (-1,), (0,)), (nbytes,), strict=True)
        )
        if self.spans[0][0] == _MAP_FAILED:
            self.spans.clear()
            raise PoolError(
                f"no address space for a pool of {nbytes:,} bytes: {os.strerror(ctypes.get_errno())}; "
                "check ulimit -v of this process"
            )

    def map_aligned(self, fd: int, nbytes: int, writable: bool) -> int:
        """Map the file into the range, aligned to huge pages, and release the rest of it; returns the address."""
        ((start, reserved),) = self.spans
        address = -(-start // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
        protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        if _libc.mmap(address, nbytes, protection, mmap.MAP_SHARED | _MAP_FIXED, fd, 0) == _MAP_FAILED:
            error = ctypes.get_errno()
            kind = NotEnoughMemoryError if error == errno.ENOMEM else PoolError
            raise kind(f"a pool segment of {nbytes:,} bytes cannot be mapped: {os.strerror(error)}")
        # Segments are whole pages of their backing, so both ends are, too.
        ends = (start, address - start), (address + nbytes, start + reserved - address - nbytes)
        over = [partial(_libc.munmap, *end) for end in ends if end[1]]
        _call_each([*over, self.spans.clear, partial(self.spans.append, (address, nbytes))])
        return address

    def __del__(self) -> None:
        _unmap(self.spans, [os.getpid()])


def _call_each(calls: Iterable[Any]) -> None:
    """In a single call into C, if each of them is one."""
    _exhaust(map(call, calls))


_exhaust = deque[None](maxlen=0).extend


def _unmap(spans: deque[tuple[int, int]], mapped_by: list[int]) -> None:
    # A forked child never had the mapping (MADV_DONTFORK): the addresses may belong to something else by now.
    if os.getpid() == mapped_by[0] and spans:
        _exhaust(starmap(_libc.munmap, map(deque.pop, (spans,))))


def advise(address: int, nbytes: int, advice: int) -> int:
    """madvise without the GIL. Returns 0 or the errno."""
    while _libc.madvise(address, nbytes, advice) != 0:
        error = ctypes.get_errno()
        if error != errno.EINTR:
            return error
    return 0


def flush(address: int, nbytes: int) -> None:
    """Write these bytes of a mapped file to its disk, and wait for that. Raises OSError."""
    if _libc.msync(address, nbytes, _MS_SYNC) != 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))


def punch_hole(fd: int, offset: int, nbytes: int) -> None:
    """Free the memory of a range. Processes that still map it read zeros; nobody gets SIGBUS. Raises OSError."""
    if _libc.fallocate(fd, _FALLOC_FL_PUNCH_HOLE | _FALLOC_FL_KEEP_SIZE, offset, nbytes) != 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
