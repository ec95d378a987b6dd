"""Populating the pool's memory off the loop: how much the kernel may hand out, and why the rest failed."""

from __future__ import annotations

import logging
import threading

from lmcache_core.errors import PoolError
from lmcache_core.kernel.kernel import Kernel
from lmcache_core.limits import READY_WAIT_S
from lmcache_core.observe.lines import named
from lmcache_core.pool.hugepages import huge_page_fraction
from lmcache_core.pool.populate import Populator
from lmcache_core.pool.segment import Segment
from lmcache_core.server.loop import Loop

log = logging.getLogger(__name__)


class PoolPopulator:
    """A `Populator` that reports progress to the kernel, on the loop's thread. Any thread may call its methods."""

    def __init__(self, segment: Segment, kernel: Kernel, loop: Loop, name: str) -> None:
        self.error = ""  # why it ended early
        self.huge_page_fraction = 0.0
        self._segment = segment
        self._kernel = kernel
        self._loop = loop
        self._name = name
        self._populator = Populator(segment, on_progress=self._progressed, on_error=self._failed)

    @property
    def populated_bytes(self) -> int:
        """Bytes populated so far."""
        return self._populator.populated_bytes

    def start(self) -> None:
        """Begin. Call this once."""
        self._populator.start()

    def stop(self, timeout_s: float | None = None) -> bool:
        """End after the current step. True if it has ended within `timeout_s`."""
        return self._populator.stop(timeout_s)

    def wait_begun(self, timeout_s: float) -> bool:
        """Wait for the first step, or the end of the work. True if one of them has come."""
        return self._populator.wait_begun(timeout_s)

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait for the end of the work. True if it has ended, for whatever reason."""
        return self._populator.wait(timeout_s)

    def wait_heard(self) -> None:
        """Wait until the kernel knows about all of it. Raises `PoolError` if there is not enough memory."""
        self._populator.wait()
        heard = threading.Event()
        self._loop.call(heard.set)  # after everything that was queued for the loop
        while not heard.wait(READY_WAIT_S) and not self._loop.ended:
            pass
        if self.error:
            raise PoolError(f"the pool of {self._name!r} is not populated: {self.error}")

    def _progressed(self, nbytes: int) -> None:
        """Called on the populator's thread."""
        self._loop.call(lambda: self._kernel.add_memory(nbytes))
        if nbytes == self._segment.info.data_bytes:
            told = named("populated", nbytes=nbytes)
            log.info("%r: all of the pool is populated, %s bytes", self._name, f"{nbytes:,}", extra=told)
            # This reads the page tables, which is too slow for the loop.
            self.huge_page_fraction = huge_page_fraction(self._segment)

    def _failed(self, error: Exception) -> None:
        self.error = str(error)
