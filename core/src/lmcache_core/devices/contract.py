"""What copies of an engine's pages need of a device, and of a runtime that registers the pool with it.

There are two implementations: CUDA's driver (`cuda`, and torch's runtime in `pinning`), and the fake one of
lmcache-testing, which explores schedules. Host memory has no device: the processor copies it.
"""

from __future__ import annotations

from array import array
from typing import NamedTuple, Protocol

# Host memory is registered in steps that begin at multiples of this, and no copy of ours crosses one: CUDA refuses a
# copy whose host side lies in two registrations. One call over all of a large pool would keep every other call of the
# process waiting for seconds.
PIN_STEP_BYTES = 1 << 30


class DeviceEvent(Protocol):
    """A point in what a device was given to do. Whoever waits behind it keeps it."""

    @property
    def handle(self) -> int:
        """What the device's own calls take."""


class Device(Protocol):
    """One device, for as long as the process lives.

    The copies themselves are queued by threads of the extension, which cannot call Python: `words` are the addresses of
    the calls in the order of `native/device.h`, the context, the step of registrations, and streams of our own.

    The implementation must: make a copy no sooner than its stream's earlier ones, and have it landed when `wait_stream`
    returns, however that ends; return from `wait_event` no sooner than all that the event was recorded behind has
    ended. It may: run copies of several streams in any order, and late.
    """

    @property
    def words(self) -> array[int]:
        """See above; items of u64."""

    def record(self, stream: int | None) -> DeviceEvent:
        """Where `stream` stands now. None: torch's current stream, where there is torch, or else the default one.
        Raises `UsageError` with the device's words, and where the stream is being captured into a graph."""

    def message_of(self, fault: int) -> str:
        """What an error number of the device means."""


class SharedAllocation(NamedTuple):
    """An allocation of a device that another process may open. `handle`: what it opens."""

    handle: bytes
    start: int
    nbytes: int


class SharedEvent(DeviceEvent, Protocol):
    """An event that another process may wait for. It is not recorded anew while anybody keeps this."""

    @property
    def name(self) -> bytes:
        """What `SharingDevice.event_named` takes there."""


class SharingDevice(Device, Protocol):
    """A device whose memory two processes may have: one has allocated it, the other opens, uses and closes it. All
    raise `UsageError` with the device's words.

    The caller sees to the order: closed before it is freed, and not used once it is closed.
    """

    @property
    def uuid(self) -> bytes:
        """16 bytes that name it in every process."""

    def shared(self, address: int) -> SharedAllocation:
        """The allocation at an address of this process."""

    def open(self, handle: bytes) -> SharedAllocation:
        """Another process's, mapped here. Open it once."""

    def close(self, start: int) -> None:
        """End that."""

    def record_shared(self, stream: int | None) -> SharedEvent:
        """As `record`."""

    def event_named(self, name: bytes) -> DeviceEvent:
        """Another process's event."""


class HostRegistrar(Protocol):
    """Registers host memory with a device. All return 0 or an error number, which `error_text` explains."""

    def register(self, address: int, nbytes: int) -> int:
        """Lock these bytes, so that the device reads and writes them directly."""

    def unregister(self, address: int) -> int:
        """End it; the address is that of a registration."""

    def error_text(self, error: int) -> str:
        """What an error number means."""
