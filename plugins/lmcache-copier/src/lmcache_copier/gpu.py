"""Memory of a GPU, as the copier reaches it: allocations of an engine's, opened here. Copied by the extension."""

from __future__ import annotations

import threading
from array import array
from collections.abc import Sequence
from typing import Any

from lmcache_copier.copying import Copies
from lmcache_core.client import page_engine
from lmcache_core.devices.contract import DeviceEvent, SharedAllocation, SharingDevice
from lmcache_core.errors import CacheError, UsageError


class OpenedAllocations:
    """An engine's allocations, open until `close`."""

    def __init__(self, device: SharingDevice, handles: Sequence[bytes]) -> None:
        """Raises `UsageError` where one cannot be opened: then none is."""
        self._device = device
        self._opened: list[SharedAllocation] = []
        try:
            for handle in handles:
                self._opened.append(device.open(handle))
        except BaseException:
            self.close()
            raise

    def address(self, number: int, offset: int, nbytes: int) -> int:
        """Of bytes in one of them. Raises `UsageError` for those that are not."""
        if not 0 <= number < len(self._opened):
            raise UsageError(f"allocation {number} was not named: {len(self._opened)} were")
        start, length = self._opened[number][1:]
        if offset + nbytes > length:
            raise UsageError(f"allocation {number} has no bytes {offset:,} to {offset + nbytes:,}: it has {length:,}")
        return start + offset

    def close(self) -> None:
        """Nothing copies any more. Raises `UsageError` with the device's words for the first that it did not close."""
        faults: list[CacheError] = []
        while self._opened:
            try:
                self._device.close(self._opened.pop().start)
            except CacheError as error:
                faults.append(error)
        if faults:
            raise faults[0]


class DeviceCopies(Copies):
    """The copies of one job by a device, behind an event of the engine's: a page engine, as `Pages` takes it, and the
    device that its tables name."""

    def __init__(self, tables: Any, device: SharingDevice, event: DeviceEvent) -> None:
        """`tables`: of the extension."""
        super().__init__()
        self._tables = tables
        self._device = device
        self._event = event
        self._making = threading.Lock()

    # --- the device ---------------------------------------------------------------------------------------------

    @property
    def words(self) -> array[int]:
        """As `Device.words`."""
        return self._device.words

    def record(self, stream: int | None) -> DeviceEvent:
        """The engine's, whatever this process has given to the device."""
        del stream
        return self._event

    def message_of(self, fault: int) -> str:
        """As `Device.message_of`."""
        return self._device.message_of(fault)

    # --- the engine of pages ------------------------------------------------------------------------------------

    def PageTables(self, *words: object) -> Any:
        """Those of the registration."""
        del words
        return self._tables

    def PageBatch(self, *given: Any) -> Any:
        """As the extension's."""
        return page_engine().PageBatch(*given)

    def PageJob(self, batch: Any, parts: Sequence[tuple[Any, ...]], *more: Any) -> Any:
        """As the extension's. Once the job was cancelled, it copies nothing."""
        job = page_engine().PageJob(batch, parts, *more)
        with self._making:
            self._made.append((job, parts))
            if self.cancelled:
                job.stop()
        return job

    def cancel(self) -> None:
        """When this returns, nothing touches the engine's pages any more, and nothing will. It lasts as long as what
        the engine had queued before the job."""
        with self._making:
            self.cancelled = True
        super().cancel()

    @property
    def fault(self) -> str:
        """What the device refused, in its words; empty: nothing."""
        fault = next((job.fault for job, _ in list(self._made) if job.fault), 0)
        return self._device.message_of(fault) if fault else ""
