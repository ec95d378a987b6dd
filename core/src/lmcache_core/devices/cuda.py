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
_SHARED = 4  # of an event: other processes may open it
_LAZY_PEER_ACCESS = 1  # of an opened handle: the only flag there is, and it must be given
_HANDLE_BYTES = 64  # of memory and of an event
_UUID_BYTES = 16
_MEMORY_TYPE, _BUFFER_ID, _ORDINAL = 2, 7, 9  # attributes of a pointer
_ON_DEVICE = 2


class _Event:
    """A point in what a device was given to do. Dropped, its handle is used again."""

    def __init__(self, handle: int, unused: deque[int]) -> None:
        self.handle = handle
        self._unused = unused

    def __del__(self) -> None:
        self._unused.append(self.handle)


class _SharedEvent(_Event):
    """The same, which other processes may open by its name."""

    def __init__(self, handle: int, unused: deque[int], name: bytes) -> None:
        super().__init__(handle, unused)
        self.name = name


class _OpenedEvent:
    """Another process's event."""

    def __init__(self, device: CudaDevice, handle: int) -> None:
        self.handle = handle
        self._device = device

    def __del__(self) -> None:
        self._device.destroy_event(self.handle)


class _Handle(ctypes.Structure):
    """By value, as the driver takes it."""

    _fields_ = (("reserved", ctypes.c_char * _HANDLE_BYTES),)


class CudaDevice:
    """One GPU, and streams of our own on it, for as long as the process lives."""

    def __init__(self, library: str, number: int) -> None:
        """Raises `UsageError` with CUDA's words."""
        self._driver = _driver(library)
        self._number = number
        self._unused: deque[int] = deque()
        self._unused_shared: deque[int] = deque()
        self._names: dict[int, bytes] = {}  # of shared events
        device, context = ctypes.c_int(), ctypes.c_void_p()
        self._ask("cuDeviceGet", ctypes.byref(device), number)
        self._ask("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        self._context = context.value or 0
        uuid = ctypes.create_string_buffer(_UUID_BYTES)
        self._ask("cuDeviceGetUuid_v2", uuid, device)
        self.uuid = uuid.raw
        streams = [self._made("cuStreamCreate", _NON_BLOCKING) for _ in range(_STREAMS)]
        calls = [ctypes.cast(getattr(self._driver, name), ctypes.c_void_p).value or 0 for name in _CALLS]
        self.words = array("Q", [*calls, self._context, contract.PIN_STEP_BYTES, *streams])

    def record(self, stream: int | None) -> _Event:
        """See `contract.Device`."""
        event = _Event(self._event(self._unused, _SLEEPS_UNTIMED), self._unused)
        self._record(event, stream)
        return event

    def message_of(self, fault: int) -> str:
        """What an error number of the driver means."""
        return _message_of(self._driver, fault)

    # --- with another process: see `contract.SharingDevice` -----------------------------------------------------

    def shared(self, address: int) -> contract.SharedAllocation:
        """See there. The driver refuses memory that it mapped in pieces, as torch does with expandable segments."""
        handle = _Handle()
        self._within("cuIpcGetMemHandle", ctypes.byref(handle), ctypes.c_uint64(address))
        return contract.SharedAllocation(bytes(handle), *self._range(address))

    def open(self, handle: bytes) -> contract.SharedAllocation:
        """See there."""
        start = ctypes.c_uint64()
        given = _Handle.from_buffer_copy(handle)
        self._within("cuIpcOpenMemHandle_v2", ctypes.byref(start), given, _LAZY_PEER_ACCESS)
        return contract.SharedAllocation(handle, *self._range(start.value))

    def close(self, start: int) -> None:
        """See there."""
        self._within("cuIpcCloseMemHandle", ctypes.c_uint64(start))

    def record_shared(self, stream: int | None) -> _SharedEvent:
        """See there."""
        handle = self._event(self._unused_shared, _SLEEPS_UNTIMED | _SHARED)
        if handle not in self._names:
            name = _Handle()
            self._within("cuIpcGetEventHandle", ctypes.byref(name), ctypes.c_void_p(handle))
            self._names[handle] = bytes(name)
        event = _SharedEvent(handle, self._unused_shared, self._names[handle])
        self._record(event, stream)
        return event

    def event_named(self, name: bytes) -> _OpenedEvent:
        """See there."""
        handle = ctypes.c_void_p()
        self._within("cuIpcOpenEventHandle", ctypes.byref(handle), _Handle.from_buffer_copy(name))
        return _OpenedEvent(self, handle.value or 0)

    def destroy_event(self, handle: int) -> None:
        """Of an opened one."""
        self._within("cuEventDestroy_v2", ctypes.c_void_p(handle))

    def _range(self, address: int) -> tuple[int, int]:
        start, nbytes = ctypes.c_uint64(), ctypes.c_size_t()
        self._within("cuMemGetAddressRange_v2", ctypes.byref(start), ctypes.byref(nbytes), ctypes.c_uint64(address))
        return start.value, nbytes.value

    # --- the driver ---------------------------------------------------------------------------------------------

    def _event(self, unused: deque[int], flags: int) -> int:
        try:
            return unused.popleft()
        except IndexError:
            return self._made("cuEventCreate", flags)

    def _record(self, event: _Event, stream: int | None) -> None:
        behind = _current_stream(self._number) if stream is None else stream
        captured = ctypes.c_int()
        self._within("cuStreamIsCapturing", ctypes.c_void_p(behind), ctypes.byref(captured))
        if captured.value:
            raise UsageError(
                "the stream is being captured into a CUDA graph, which would copy the same pages at each replay: store "
                "and retrieve outside of the capture"
            )
        self._within("cuEventRecord", ctypes.c_void_p(event.handle), ctypes.c_void_p(behind))

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


def device_named(uuid: bytes) -> CudaDevice:
    """The GPU that has this name in every process. Raises `UsageError` where this one does not see it."""
    driver, count = _driver(LIBRARY), ctypes.c_int()
    _ask(driver, "cuDeviceGetCount", ctypes.byref(count))
    for number in range(count.value):
        device, found = ctypes.c_int(), ctypes.create_string_buffer(_UUID_BYTES)
        _ask(driver, "cuDeviceGet", ctypes.byref(device), number)
        _ask(driver, "cuDeviceGetUuid_v2", found, device)
        if found.raw == uuid:
            return _device(LIBRARY, number)
    raise UsageError(
        f"this process sees {count.value} GPUs, and not the one that has the memory ({uuid.hex()}): let both see it "
        "(--gpus, CUDA_VISIBLE_DEVICES)"
    )


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
