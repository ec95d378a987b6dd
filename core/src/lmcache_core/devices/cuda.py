"""GPUs of NVIDIA: by CUDA's driver, which all libraries of a process share.

Nothing is needed of CUDA's runtime, nor of torch: who has memory on a GPU has the driver. The copies themselves are
made by threads of the extension (`native/device.h`), which are given the addresses of the driver's calls.
"""

from __future__ import annotations

import ctypes
import sys
from array import array
from collections import deque
from functools import cache
from typing import Any

from lmcache_core.devices import contract
from lmcache_core.errors import UsageError

LIBRARY = "libcuda.so.1"
_STREAMS = 4  # copies of several threads go on beside each other, as far as the device can
_CALLS = (
    "cuCtxPushCurrent_v2",
    "cuCtxPopCurrent_v2",
    "cuEventSynchronize",
    "cuMemcpyHtoDAsync_v2",
    "cuMemcpyDtoHAsync_v2",
    "cuStreamSynchronize",
)  # in the order of native/device.h
_NON_BLOCKING = 1  # of a stream: it waits for no other, and no other for it
_SLEEPS_UNTIMED = 3  # of an event: who waits for it sleeps; it measures nothing
_MEMORY_TYPE, _BUFFER_ID, _ORDINAL = 2, 7, 9  # attributes of a pointer
_ON_DEVICE = 2


class _Event:
    """A point in what a device was given to do. Dropped, its handle is used again."""

    def __init__(self, handle: int, unused: deque[int]) -> None:
        self.handle = handle
        self._unused = unused

    def __del__(self) -> None:
        self._unused.append(self.handle)


class CudaDevice:
    """One GPU, and streams of our own on it, for as long as the process lives."""

    def __init__(self, library: str, number: int) -> None:
        """Raises `UsageError` with CUDA's words."""
        self._driver = _driver(library)
        self._number = number
        self._unused: deque[int] = deque()
        device, context = ctypes.c_int(), ctypes.c_void_p()
        self._ask("cuDeviceGet", ctypes.byref(device), number)
        self._ask("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        self._context = context.value or 0
        streams = [self._made("cuStreamCreate", _NON_BLOCKING) for _ in range(_STREAMS)]
        calls = [ctypes.cast(getattr(self._driver, name), ctypes.c_void_p).value or 0 for name in _CALLS]
        self.words = array("Q", [*calls, self._context, contract.PIN_STEP_BYTES, *streams])

    def record(self, stream: int | None) -> _Event:
        """See `contract.Device`."""
        behind = _current_stream(self._number) if stream is None else stream
        captured = ctypes.c_int()
        self._within("cuStreamIsCapturing", ctypes.c_void_p(behind), ctypes.byref(captured))
        if captured.value:
            raise UsageError(
                "the stream is being captured into a CUDA graph, which would copy the same pages at each replay: store "
                "and retrieve outside of the capture"
            )
        try:
            handle = self._unused.popleft()
        except IndexError:
            handle = self._made("cuEventCreate", _SLEEPS_UNTIMED)
        event = _Event(handle, self._unused)
        self._within("cuEventRecord", ctypes.c_void_p(handle), ctypes.c_void_p(behind))
        return event

    def message_of(self, fault: int) -> str:
        """What an error number of the driver means."""
        return _message_of(self._driver, fault)

    def _made(self, call: str, flags: int) -> int:
        handle = ctypes.c_void_p()
        self._within(call, ctypes.byref(handle), flags)
        return handle.value or 0

    def _within(self, call: str, *arguments: Any) -> None:
        self._ask("cuCtxPushCurrent_v2", ctypes.c_void_p(self._context))
        try:
            self._ask(call, *arguments)
        finally:
            self._ask("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))

    def _ask(self, call: str, *arguments: Any) -> None:
        _ask(self._driver, call, *arguments)


@cache
def _device(library: str, number: int) -> CudaDevice:
    return CudaDevice(library, number)


def device_at(address: int) -> CudaDevice:
    """The GPU that this memory lies on. Raises `UsageError` where there is no driver, or it lies on none."""
    driver = _driver(LIBRARY)
    kind, number = ctypes.c_uint(), ctypes.c_int()
    _ask(driver, "cuPointerGetAttribute", ctypes.byref(kind), _MEMORY_TYPE, ctypes.c_uint64(address))
    if kind.value != _ON_DEVICE:
        raise UsageError(f"memory at {address:#x} is not a device's own (CUDA says {kind.value}): give that of a GPU")
    _ask(driver, "cuPointerGetAttribute", ctypes.byref(number), _ORDINAL, ctypes.c_uint64(address))
    return _device(LIBRARY, number.value)


def allocation_at(address: int) -> int:
    """The number of the allocation at an address of a device, which no other one has; -1: there is none."""
    found = ctypes.c_ulonglong()
    fault = _driver(LIBRARY).cuPointerGetAttribute(ctypes.byref(found), _BUFFER_ID, ctypes.c_uint64(address))
    return -1 if fault else found.value


def _current_stream(number: int) -> int:
    torch = sys.modules.get("torch")
    return int(torch.cuda.current_stream(number).cuda_stream) if torch and torch.cuda.is_initialized() else 0


@cache
def _driver(library: str) -> ctypes.CDLL:
    try:
        driver = ctypes.CDLL(library)
    except OSError as error:
        raise UsageError(
            f"memory of a GPU needs NVIDIA's driver, and {library} cannot be loaded ({error}): give the container the "
            "GPU (--gpus), or give host memory"
        ) from error
    _ask(driver, "cuInit", 0)
    return driver


def _ask(driver: ctypes.CDLL, call: str, *arguments: Any) -> None:
    if fault := getattr(driver, call)(*arguments):
        raise UsageError(f"CUDA refuses {call}: {_message_of(driver, fault)}")


def _message_of(driver: ctypes.CDLL, fault: int) -> str:
    text = ctypes.c_char_p()
    driver.cuGetErrorString(fault, ctypes.byref(text))
    return f"{text.value.decode()} ({fault})" if text.value else f"error {fault}"
