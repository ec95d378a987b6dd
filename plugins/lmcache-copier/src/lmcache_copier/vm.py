"""Memory of engines, as the copier reaches it: by `process_vm_readv` and `process_vm_writev`, which answer EFAULT for
what is not there, where a copy through a mapping would be ended by a signal.

A pid names whoever has it now. So an engine registers a *mark*: random bytes that stand at one place of its memory.
Each read takes the mark along in the same system call, and so knows whose bytes it got. Each write is preceded by a
look at the mark, and followed by one at the engine's pidfd: a pid is nobody else's before its process has ended, so
what was written while it had not was written to the engine.
"""

from __future__ import annotations

import ctypes
import errno
import os
import select
from abc import ABC, abstractmethod
from array import array

from lmcache_copier.limits import MARK_BYTES
from lmcache_core.descriptors import Descriptor

_libc = ctypes.CDLL(None, use_errno=True)
_READ, _WRITE = _libc.process_vm_readv, _libc.process_vm_writev
for _call in (_READ, _WRITE):
    _call.restype = ctypes.c_ssize_t
    _call.argtypes = (
        ctypes.c_int, ctypes.c_void_p, ctypes.c_ulong, ctypes.c_void_p, ctypes.c_ulong, ctypes.c_ulong
    )  # fmt: skip


class UnreachableMemoryError(OSError):
    """Memory of an engine cannot be copied: it is not there, the engine has ended, or the kernel forbids it."""


class Reach(ABC):
    """A way to copy between pieces of this process's memory and pieces of an engine's. Both are given as pairs of
    address and length, arrays of u64, with the same number of bytes in all. Thread-safe."""

    @abstractmethod
    def read(self, ours: array[int], theirs: array[int], nbytes: int) -> None:
        """Copy to us. Raises `UnreachableMemoryError`."""

    @abstractmethod
    def check(self) -> None:
        """Whether the engine lives: what was read of a process that is ending may be anything. Raises
        `UnreachableMemoryError`."""

    @abstractmethod
    def write(self, ours: array[int], theirs: array[int], nbytes: int) -> None:
        """Copy to them. Raises `UnreachableMemoryError`; some of it may be written then."""


class MappedReach(Reach):
    """Of memory that an engine has given by descriptor, and that is mapped here: `theirs` are addresses of ours. The
    same system calls, on ourselves: an engine that truncates its file gets a failed job, and ends nobody."""

    def __init__(self, engine: EngineReach) -> None:
        self._engine = engine

    def check(self) -> None:
        self._engine.check_lives()

    def read(self, ours: array[int], theirs: array[int], nbytes: int) -> None:
        _do(_READ, os.getpid(), ours, theirs, nbytes)

    def write(self, ours: array[int], theirs: array[int], nbytes: int) -> None:
        _do(_WRITE, os.getpid(), ours, theirs, nbytes)


class EngineReach(Reach):
    """Of an engine's own memory. The caller closes `pidfd` when nobody uses this any more."""

    def __init__(self, pid: int, pidfd: Descriptor, mark_at: int, mark: bytes) -> None:
        self.pid = pid
        self._pidfd = pidfd
        self._mark = mark
        self._mark_at = array("Q", [mark_at, MARK_BYTES])

    def check(self) -> None:
        """Whether it is the engine that has this pid, and we may read its memory. An engine has lost its memory, for
        this call, before anything else of it ends. Raises `UnreachableMemoryError`."""
        self.check_lives()
        seen = ctypes.create_string_buffer(MARK_BYTES)
        _do(_READ, self.pid, array("Q", [ctypes.addressof(seen), MARK_BYTES]), self._mark_at, MARK_BYTES)
        self._check_mark(seen.raw)

    def check_lives(self) -> None:
        """Whether its process has not ended. Raises `UnreachableMemoryError`."""
        poll = select.poll()
        poll.register(self._pidfd.fileno(), select.POLLIN)
        if poll.poll(0):
            raise UnreachableMemoryError(errno.ESRCH, "the engine has ended")

    def read(self, ours: array[int], theirs: array[int], nbytes: int) -> None:
        seen = ctypes.create_string_buffer(MARK_BYTES)
        here = array("Q", [ctypes.addressof(seen), MARK_BYTES]) + ours
        _do(_READ, self.pid, here, self._mark_at + theirs, MARK_BYTES + nbytes)
        self._check_mark(seen.raw)

    def write(self, ours: array[int], theirs: array[int], nbytes: int) -> None:
        self.check()
        _do(_WRITE, self.pid, ours, theirs, nbytes)
        self.check_lives()

    def _check_mark(self, seen: bytes) -> None:
        if seen != self._mark:
            raise UnreachableMemoryError(errno.ESRCH, f"the memory of pid {self.pid} is not that of the engine")


def _do(call: object, pid: int, ours: array[int], theirs: array[int], nbytes: int) -> None:
    here, count = ours.buffer_info()
    there, there_count = theirs.buffer_info()
    done = call(pid, here, count // 2, there, there_count // 2, 0)  # type: ignore[operator]  # a function of libc
    if done == nbytes:
        return
    number = ctypes.get_errno() if done < 0 else errno.EFAULT  # a part: the next byte is not there
    raise UnreachableMemoryError(number, os.strerror(number))
