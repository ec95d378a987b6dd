"""Populating the pool's memory off the loop: how much the kernel may hand out, and why the rest failed.

Where memory is short, the pool serves with what it has, and the rest is tried again: another process may have taken it
only for a while.
"""

from __future__ import annotations

import logging
import threading

from lmcache_core.errors import NotEnoughMemoryError, PoolError
from lmcache_core.kernel.kernel import Kernel
from lmcache_core.limits import HOUSEKEEPING_S, POPULATE_AGAIN_S, POPULATE_AGAIN_S_MAX
from lmcache_core.observe.lines import named
from lmcache_core.pool.hugepages import huge_page_fraction
from lmcache_core.pool.populate import Populator
from lmcache_core.pool.segment import Segment
from lmcache_core.server.process.loop import Loop

log = logging.getLogger(__name__)


class PoolPopulator:
    """A `Populator` that reports progress to the kernel, on the loop's thread. Any thread may call its methods."""

    def __init__(self, segment: Segment, kernel: Kernel, loop: Loop, name: str) -> None:
        self.error = ""  # why it has ended early
        self.huge_page_fraction = 0.0
        self._segment = segment
        self._kernel = kernel
        self._loop = loop
        self._name = name
        self._again_s = float("inf")  # when it is tried again
        self._pause_s = POPULATE_AGAIN_S
        self._populator = Populator(segment, on_progress=self._progressed, on_error=self._failed)

    @property
    def populated_bytes(self) -> int:
        """Bytes populated so far."""
        return self._populator.populated_bytes

    def start(self) -> None:
        """Begin. Call this once."""
        self._populator.start()

    def tend(self, now: float) -> None:
        """Try again, if its time has come. On the loop's thread."""
        if now >= self._again_s:
            self._again_s = float("inf")
            again = Populator(
                self._segment,
                on_progress=self._progressed,
                on_error=self._failed,
                populated_bytes=self._populator.populated_bytes,
            )
            try:
                again.start()
            except RuntimeError as error:  # there is no thread for it
                again.stop()
                self._stall(NotEnoughMemoryError(f"{error} to populate it"))
            else:
                self._populator = again

    def stop(self, timeout_s: float | None = None) -> bool:
        """End after the current step. True if it has ended within `timeout_s`."""
        return self._populator.stop(timeout_s)

    def wait_begun(self, timeout_s: float) -> bool:
        """Wait for the first step, or the end of the work. True if one of them has come."""
        return self._populator.wait_begun(timeout_s)

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait for the end of the work. True if it has ended, for whatever reason."""
        return self._populator.wait(timeout_s)

    def wait_known(self) -> None:
        """Wait until the kernel knows about all of it. Raises `PoolError` if there is not enough memory."""
        self._populator.wait()
        reached = threading.Event()
        self._loop.call(reached.set)  # after everything that was queued for the loop
        while not reached.wait(HOUSEKEEPING_S) and not self._loop.ended:
            pass
        if self.error:
            raise PoolError(f"the pool of {self._name!r} is not populated: {self.error}")

    def _progressed(self, nbytes: int) -> None:
        """Called on the populator's thread."""
        self._loop.call(lambda: self._add(nbytes))
        if nbytes == self._segment.info.data_bytes:
            fields = named("populated", nbytes=nbytes)
            log.info("%r: all of the pool is populated, %s bytes", self._name, f"{nbytes:,}", extra=fields)
            # This reads the page tables, which is too slow for the loop.
            self.huge_page_fraction = huge_page_fraction(self._segment)

    def _add(self, nbytes: int) -> None:
        self.error, self._pause_s = "", POPULATE_AGAIN_S
        self._kernel.add_memory(nbytes)

    def _failed(self, error: Exception) -> None:
        """Called on the populator's thread, as its last act."""
        self._loop.call(lambda: self._stall(error))

    def _stall(self, error: Exception) -> None:
        if not self.error:
            log.error("pool %r: population ended early: %s", self._name, error)
        self.error = str(error)
        self._kernel.memory_stalled()
        if isinstance(error, NotEnoughMemoryError):
            self._again_s = self._loop.clock.now + self._pause_s
            self._pause_s = min(POPULATE_AGAIN_S_MAX, 2 * self._pause_s)
