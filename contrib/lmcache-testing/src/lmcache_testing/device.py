"""A device that is none: `lmcache_core.devices.contract.Device` over host memory, for tests of what is ordered how.

Streams are queues of copies. Each copy is made as late as the contract allows, or as early, as the test decides: a
thread of the job stops at each of its calls (`at_gate`) until the test lets it on (`advance`), and in between the test
lands copies of any stream, ends work of the engine, or has a call fail.
"""

from __future__ import annotations

import ctypes
import threading
from array import array
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

OUT_OF_MEMORY, INVALID_VALUE, ILLEGAL_ADDRESS = 2, 1, 700  # as CUDA numbers them
_STREAM, _CONTEXT = 0x5000, 0x7000
_P, _N, _U64, _INT = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint64, ctypes.c_int


class FakeMemory:
    """Memory of a device, as arrays announce it."""

    def __init__(self, nbytes: int) -> None:
        self._bytes = (ctypes.c_uint8 * nbytes)()
        self.view = memoryview(self._bytes).cast("B")
        self.__cuda_array_interface__ = {
            "shape": (nbytes,), "typestr": "|u1", "data": (ctypes.addressof(self._bytes), False), "strides": None,
            "version": 3,
        }  # fmt: skip


class FakeEvent(NamedTuple):
    """Behind how much work of the engine it was recorded."""

    handle: int


class _Copy(NamedTuple):
    to: int
    source: int
    nbytes: int


class FakeDevice:
    """One device. Its calls come from threads of jobs, and all else from the test's own thread."""

    def __init__(self, *, pin_step_bytes: int = 2 << 20, streams: int = 2) -> None:
        """`pin_step_bytes`: copies whose host side crosses a multiple of it are refused."""
        self._step = pin_step_bytes
        self._moved = threading.Condition(threading.RLock())
        self._allowed = 0  # calls that may pass the gate
        self.at_gate = 0
        self.behind_engine = 0  # threads that wait for the engine's work to end
        self.runs_free = True  # no call waits at the gate, and the engine's work ends when it is waited for
        self.streams: list[deque[_Copy]] = [deque() for _ in range(streams)]
        self._engine: deque[Callable[[], object]] = deque()
        self._given = self._ended = 0
        self._fault = 0
        kinds: dict[str, tuple[tuple[Any, ...], Callable[..., int]]] = {
            "push": ((_P,), self._push), "pop": ((_P,), self._pop), "wait_event": ((_P,), self._wait_event),
            "to_device": ((_U64, _P, _N, _P), self._to_device), "to_host": ((_P, _U64, _N, _P), self._to_host),
            "wait_stream": ((_P,), self._wait_stream),
        }  # fmt: skip
        self._calls: list[Any] = [ctypes.CFUNCTYPE(_INT, *takes)(call) for takes, call in kinds.values()]
        addresses = [ctypes.cast(each, _P).value or 0 for each in self._calls]
        self.words = array("Q", [*addresses, _CONTEXT, pin_step_bytes, *range(_STREAM, _STREAM + streams)])

    # --- what the client asks -----------------------------------------------------------------------------------

    def record(self, stream: int | None) -> FakeEvent:
        """Behind what the engine has been given so far; there is one stream of its own."""
        del stream
        return FakeEvent(self._given + 1)  # no event has the handle 0

    def message_of(self, fault: int) -> str:
        """CUDA's own words for some of its errors."""
        known = {OUT_OF_MEMORY: "out of memory", ILLEGAL_ADDRESS: "an illegal memory access was encountered"}
        return f"{known.get(fault, 'error')} ({fault})"

    # --- what the test does -------------------------------------------------------------------------------------

    def engine_begins(self, work: Callable[[], object]) -> None:
        """Queue work on the engine's stream."""
        self._engine.append(work)
        self._given += 1

    @property
    def engine_is_busy(self) -> bool:
        """Whether it was given work that has not ended."""
        return bool(self._engine)

    def engine_advances(self) -> None:
        """End the oldest of it, if there is any."""
        with self._moved:
            if self._engine:
                self._engine.popleft()()
                self._ended += 1
                self._moved.notify_all()

    def advance(self) -> None:
        """Let one call pass the gate."""
        with self._moved:
            self._allowed += 1
            self._moved.notify_all()

    def wait_gate(self, ended: Callable[[], bool]) -> bool:
        """Wait until a thread stands at the gate. False: one waits for the engine, or none will come (`ended`)."""
        with self._moved:
            while not self.at_gate or self._allowed:
                if self.behind_engine or ended():
                    return False
                self._moved.wait(0.0005)
            return True

    def run_free(self, free: bool = True) -> None:
        """Let every call pass, as before a wait that would otherwise never end."""
        with self._moved:
            self.runs_free, self._allowed = free, 0
            self._moved.notify_all()

    def fail_next(self, fault: int) -> None:
        """The next call that may fail does."""
        self._fault = fault

    def land(self, stream: int, count: int = 1) -> None:
        """Make the oldest copies of a stream."""
        queue = self.streams[stream]
        for _ in range(min(count, len(queue))):
            copy = queue.popleft()
            ctypes.memmove(copy.to, copy.source, copy.nbytes)

    @property
    def queued(self) -> int:
        """Copies that have not landed."""
        return sum(map(len, self.streams))

    # --- the calls of native/device.h ---------------------------------------------------------------------------

    def _pass_gate(self) -> int:
        """Returns the error that this call is to have."""
        with self._moved:
            self.at_gate += 1
            self._moved.notify_all()
            while not self.runs_free and not self._allowed:
                self._moved.wait()
            self._allowed -= self._allowed > 0
            self.at_gate -= 1
            fault, self._fault = self._fault, 0
            return fault

    @staticmethod
    def _push(context: int) -> int:
        return 0 if context == _CONTEXT else INVALID_VALUE

    @staticmethod
    def _pop(context: int) -> int:
        del context
        return 0

    def _wait_event(self, handle: int) -> int:
        self._pass_gate()  # who waits for an event learns of no error here: the copies after it do
        with self._moved:
            self.behind_engine += 1
            self._moved.notify_all()
            while self._ended < handle - 1:
                if self.runs_free:
                    self.engine_advances()
                else:
                    self._moved.wait()
            self.behind_engine -= 1
        return 0

    def _to_device(self, to: int, source: int, nbytes: int, stream: int) -> int:
        return self._queue(source, _Copy(to, source, nbytes), stream)

    def _to_host(self, to: int, source: int, nbytes: int, stream: int) -> int:
        return self._queue(to, _Copy(to, source, nbytes), stream)

    def _queue(self, host: int, copy: _Copy, stream: int) -> int:
        if fault := self._pass_gate():
            return fault
        if host // self._step != (host + copy.nbytes - 1) // self._step:
            return INVALID_VALUE
        self.streams[stream - _STREAM].append(copy)
        return 0

    def _wait_stream(self, stream: int) -> int:
        fault, number = self._pass_gate(), stream - _STREAM
        if fault:  # some of it has landed, the rest never will
            self.land(number, len(self.streams[number]) // 2)
            self.streams[number].clear()
            return fault
        self.land(number, len(self.streams[number]))
        return 0
