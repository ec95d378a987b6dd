"""Moves objects between the caller's buffers and a slot: straight where the medium takes them as they are, else through
a bounded number of aligned buffers."""

from __future__ import annotations

import errno
import mmap
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from lmcache_block.medium.file import Medium
from lmcache_block.medium.format import BLOCK_BYTES

BOUNCE_BYTES = 1 << 20


def aligned(nbytes: int) -> memoryview:
    """Memory that every medium takes, of zeros."""
    return memoryview(mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))


def timeout(deadline: float) -> float:
    """Seconds to wait, as locks take them. Raises `TimeoutError` once the deadline has passed."""
    left_s = min(deadline - time.monotonic(), threading.TIMEOUT_MAX)
    if left_s <= 0:
        raise TimeoutError
    return left_s


@contextmanager
def holding(lock: threading.Lock, deadline: float) -> Iterator[None]:
    """Within it, we have the lock. Raises `TimeoutError`."""
    if not lock.acquire(timeout=timeout(deadline)):
        raise TimeoutError
    try:
        yield
    finally:
        lock.release()


def cut(parts: Sequence[memoryview], nbytes: int) -> list[memoryview]:
    """The first `nbytes` of the buffers."""
    some: list[memoryview] = []
    for part in parts:
        if nbytes <= 0:
            break
        if part.nbytes:
            some.append(part[:nbytes])
        nbytes -= part.nbytes
    return some


class Buffers:
    """Of one medium. Thread-safe."""

    def __init__(self, medium: Medium, bounce_buffers: int) -> None:
        self._medium = medium
        self._free = threading.Semaphore(bounce_buffers)
        self._lock = threading.Lock()
        self._idle: list[memoryview] = []
        self._tails = threading.local()

    def write(self, at: int, parts: Sequence[memoryview], deadline: float) -> None:
        """Write an object at the start of a slot, and zeros up to the end of its last block. Raises `TimeoutError` and
        `OSError`."""
        parts = [part for part in parts if part.nbytes]
        shape = self._shape(parts)
        if shape is not None:
            whole, rest = shape
            tail = self._tail()
            tail[: rest.nbytes] = rest
            tail[rest.nbytes :] = bytes(BLOCK_BYTES - rest.nbytes)
            try:
                self._medium.write(at, [*whole, tail] if rest.nbytes else whole)
            except OSError as error:
                if error.errno != errno.EINVAL or not self._medium.direct:
                    raise
            else:
                return
        with self.bounce(deadline) as bounce:
            for start, nbytes, pieces in _steps(parts):
                filled = 0
                for piece in pieces:
                    bounce[filled : filled + piece.nbytes] = piece
                    filled += piece.nbytes
                padded = -(-nbytes // BLOCK_BYTES) * BLOCK_BYTES
                bounce[filled:padded] = bytes(padded - filled)
                self._medium.write(at + start, [bounce[:padded]])

    def read(self, at: int, parts: Sequence[memoryview], deadline: float) -> bool:
        """Fill the buffers from the start of a slot. False: behind them are no zeros, up to the end of the last block.
        Raises `TimeoutError` and `OSError`."""
        shape = self._shape(parts)
        if shape is not None:
            whole, rest = shape
            tail = self._tail()
            try:
                self._medium.read(at, [*whole, tail] if rest.nbytes else whole)
            except OSError as error:
                if error.errno != errno.EINVAL or not self._medium.direct:
                    raise
            else:
                rest[:] = tail[: rest.nbytes]
                return not rest.nbytes or _is_zero(tail[rest.nbytes :])
        with self.bounce(deadline) as bounce:
            zeros = True
            for start, nbytes, pieces in _steps(parts):
                padded = -(-nbytes // BLOCK_BYTES) * BLOCK_BYTES
                self._medium.read(at + start, [bounce[:padded]])
                taken = 0
                for piece in pieces:
                    piece[:] = bounce[taken : taken + piece.nbytes]
                    taken += piece.nbytes
                zeros = _is_zero(bounce[nbytes:padded])
            return zeros

    @contextmanager
    def bounce(self, deadline: float) -> Iterator[memoryview]:
        """An aligned buffer of `BOUNCE_BYTES`. Raises `TimeoutError` if all are in use until the deadline."""
        if not self._free.acquire(timeout=timeout(deadline)):
            raise TimeoutError
        try:
            with self._lock:
                buffer = self._idle.pop() if self._idle else None
            if buffer is None:
                buffer = aligned(BOUNCE_BYTES)
            yield buffer
            with self._lock:
                self._idle.append(buffer)
        finally:
            self._free.release()

    def _shape(self, parts: Sequence[memoryview]) -> tuple[list[memoryview], memoryview] | None:
        """Whole blocks, and the rest of the last one; None if a buffer in the middle is not of whole blocks."""
        if not parts or any(part.nbytes % BLOCK_BYTES for part in parts[:-1]):
            return None
        last = parts[-1]
        whole = last.nbytes // BLOCK_BYTES * BLOCK_BYTES
        return [*parts[:-1], *([last[:whole]] if whole else [])], last[whole:]

    def _tail(self) -> memoryview:
        tail: memoryview | None = getattr(self._tails, "block", None)
        if tail is None:
            tail = self._tails.block = aligned(BLOCK_BYTES)
        return tail


def _is_zero(content: memoryview) -> bool:
    return content.tobytes() == bytes(content.nbytes)


def _steps(parts: Sequence[memoryview]) -> Iterator[tuple[int, int, list[memoryview]]]:
    """Offset, length and pieces of each part of an object that a bounce buffer takes."""
    start, pieces, filled = 0, [], 0
    for whole in parts:
        part = whole
        while part.nbytes:
            piece = part[: BOUNCE_BYTES - filled]
            pieces.append(piece)
            filled += piece.nbytes
            part = part[piece.nbytes :]
            if filled == BOUNCE_BYTES:
                yield start, filled, pieces
                start, pieces, filled = start + filled, [], 0
    if filled:
        yield start, filled, pieces
