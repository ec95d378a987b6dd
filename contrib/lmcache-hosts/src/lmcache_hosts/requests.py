"""What a host asks for, and its memory while it is lent to us.

A host owns the buffers that objects are stored from and loaded into, and uses them again as soon as it has an answer.
So memory is lent: it is touched only inside one copy, and can be taken back at any moment, whatever a medium does.
"""

from __future__ import annotations

import ctypes
import logging
import math
import threading
from array import array
from collections.abc import Callable, Sequence
from typing import NamedTuple

from lmcache_core.buffers import address_of
from lmcache_core.errors import UsageError
from lmcache_core.guard import guarded
from lmcache_core.native import native
from lmcache_core.tokens import Namespace

__all__ = ["HostKey", "HostObject", "LentMemory", "Request"]

log = logging.getLogger(__name__)


class HostKey(NamedTuple):
    """One object by name. `key` has 32 bytes (`object_key`); `namespace.layout` is the object's layout."""

    namespace: Namespace
    key: bytes


class HostObject(NamedTuple):
    """One object and its bytes in the host's memory: contiguous, `namespace.layout.nbytes` long."""

    namespace: Namespace
    key: bytes
    view: memoryview


class LentMemory:
    """A buffer of the host. After `take_back` no thread of ours touches it, and copies answer False. Until then it is
    there, though the host may have released the view that it gave."""

    def __init__(self, view: memoryview) -> None:
        if not view.c_contiguous:
            raise UsageError("a host's buffer has gaps: give contiguous memory for each object")
        self.nbytes = view.nbytes
        self.checksum: int | None = None  # the xxh3_64 of what was copied out; None: unknown
        self._view: memoryview | None = memoryview(view)
        self._lock = threading.Lock()  # held during a copy, of one object at most

    def copy_to(self, target: memoryview) -> bool:
        """Copy the host's bytes out, with their checksum while they are in the processor's cache. False: it has its
        memory back."""
        return self._copy(lambda mine: self._copy_out(address_of(target), mine))

    def copy_from(self, source: memoryview) -> bool:
        """Copy an object into the host's memory. False: it has its memory back."""
        return self._copy(lambda mine: ctypes.memmove(mine, address_of(source), self.nbytes))

    def take_back(self) -> None:
        """From now on the memory is the host's alone. Waits for a copy that is under way."""
        with self._lock:
            self._view = None

    def _copy_out(self, target: int, mine: int) -> None:
        way = _copied if native is None else native.copy_many
        checksums = array("Q", way(array("Q", [target]), array("Q", [mine]), self.nbytes, 1, True) or b"")
        self.checksum = checksums[0] if checksums else None

    def _copy(self, move: Callable[[int], object]) -> bool:
        with self._lock:
            if self._view is None:
                return False
            if self.nbytes:
                move(address_of(self._view))  # without the GIL
            return True


class Request:
    """What a host has asked for some keys: a yes or no for each. Any thread may answer, and may wait.

    `on_done` gets all answers, once, on the thread that gives the last one; it must be quick. What it raises is logged:
    whoever answers has others to answer, too. Whoever waits for the request goes on after it.
    """

    def __init__(
        self,
        count: int,
        on_done: Callable[[Sequence[bool]], None] | None = None,
        memory: Sequence[LentMemory] = (),
        wait_s: float = math.inf,
    ) -> None:
        """`wait_s`: how long `result` waits at most."""
        self.memory = memory
        self._wait_s = wait_s
        self._on_done = on_done
        self._lock = threading.Lock()
        self._answers: list[bool | None] = [None] * count
        self._left = count
        self._done = threading.Event()
        if not count:
            self._finish()

    def answer(self, position: int, yes: bool) -> None:
        """The answer for one key; one that has an answer keeps it. Its memory is the host's again."""
        if self.memory:
            self.memory[position].take_back()
        with self._lock:
            if self._answers[position] is not None:
                return
            self._answers[position] = yes
            self._left -= 1
            if self._left:
                return
        self._finish()

    def refuse(self) -> None:
        """No, for every key that has no answer yet."""
        for position in range(len(self._answers)):
            self.answer(position, False)

    @property
    def answered(self) -> bool:
        """Whether every key has an answer: its memory is the host's again."""
        return not self._left

    @property
    def done(self) -> bool:
        """Whether `on_done` has been told all answers, too."""
        return self._done.is_set()

    def result(self) -> list[bool]:
        """The answers. Whatever is missing after the time that it may take is no: the host never waits longer."""
        if not self._done.wait(min(self._wait_s, threading.TIMEOUT_MAX)):
            self.refuse()
            self._done.wait()  # another thread may be giving the last answer
        return [bool(each) for each in self._answers]

    def _finish(self) -> None:
        if self._on_done is not None:
            guarded(_logged, self._on_done, [bool(each) for each in self._answers])
        self._done.set()


def _copied(targets: array[int], sources: array[int], nbytes: int, threads: int, checksums: bool) -> None:
    """Without the extension nothing is gained by a checksum here: whoever needs it computes it."""
    del threads, checksums
    for target, source in zip(targets, sources, strict=True):
        ctypes.memmove(target, source, nbytes)


def _logged(error: BaseException) -> None:
    log.error("a host's callback for its answers failed", exc_info=error)
