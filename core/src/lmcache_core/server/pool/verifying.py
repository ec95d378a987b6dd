"""Background check of adopted objects: do their bytes match their checksums?

The first reader of an object checks it by itself and need not wait for this. Objects checked here need no further
check, and damaged ones are dropped before anybody asks for them.

The bytes are read on a separate low-priority thread, in steps of bounded size. Objects are not held meanwhile: if one
left the pool while its slot was read, its state shows it, and its bytes are ignored. A turn of the loop picks the
objects of one step and settles those of the step before.
"""

from __future__ import annotations

import logging
import threading
import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

from lmcache_core.kernel.objects import Incarnation
from lmcache_core.limits import VERIFY_LOG_S, VERIFY_STEP_BYTES, VERIFY_STEP_LOOKS, VERIFY_STEP_OBJECTS
from lmcache_core.native import native
from lmcache_core.pool.mapping import Mapping
from lmcache_core.server.pool.l1 import L1
from lmcache_core.tiers.tier.background import step_behind

log = logging.getLogger(__name__)


@dataclass
class Checked:
    """One object of a step."""

    item: Incarnation
    offset: int
    nbytes: int
    fits: bool = False


class Verifying:
    """The check of one adopted pool, from its first object to its last. Lives on the loop's thread."""

    def __init__(self, l1: L1, nbytes_by_layout: dict[int, int], call: Callable[[Callable[[], None]], None]) -> None:
        """`call` runs a function on the loop's thread in one of the next turns."""
        self._l1 = l1
        self._nbytes_by_layout = nbytes_by_layout
        self._call = call
        self._mapping: Mapping | None = l1.segment.mapping  # it stays as long as the thread may read there
        self._steps: SimpleQueue[list[Checked] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="lmcache-verify", daemon=True)
        self._began_s = self._logged_s = time.monotonic()
        self.steps = 0  # whose bytes were read
        self.verified = 0  # objects
        self.verified_bytes = 0
        self.damaged = 0
        self.done_s: float | None = None  # how many seconds it took
        self._ended = False

    # --- on the loop's thread -----------------------------------------------------------------------------

    def begin(self) -> None:
        """All objects are made."""
        self._began_s = self._logged_s = time.monotonic()
        self._thread.start()
        self._next()

    def _next(self) -> None:
        """Hand the next step to the thread."""
        if self._ended:
            return
        items = self._l1.kernel.adoption.unverified(VERIFY_STEP_OBJECTS, VERIFY_STEP_BYTES, VERIFY_STEP_LOOKS)
        if items is None:
            self._finish()
        elif items:
            self._steps.put([Checked(each, each.offset, self._nbytes_by_layout[each.layout_id]) for each in items])
        else:
            self._call(self._next)  # nothing to check so far: continue after everybody's next message

    def _settle(self, step: Sequence[Checked]) -> None:
        """The thread has read these."""
        if self._ended:
            return
        l1 = self._l1
        try:
            sound, damaged = l1.kernel.settle_verified(
                [each.item for each in step if each.fits], [each.item for each in step if not each.fits], l1.clock.now
            )
            if l1.index is not None:
                l1.index.mark_verified(sound)
            l1.apply()
            self.verified += len(sound)
            self.verified_bytes += sum(item.nbytes for item in sound)
            self.damaged += len(damaged)
        finally:  # the loop logs and counts the failure; the rest is checked anyway
            self.steps += 1
            self._next()
        if time.monotonic() - self._logged_s >= VERIFY_LOG_S:
            self._logged_s = time.monotonic()
            log.info("pool %r: %s", l1.segment.info.name, self._so_far())

    def _finish(self) -> None:
        self._ended = True
        self._steps.put(None)
        self._mapping = None
        self.done_s = time.monotonic() - self._began_s
        level = logging.WARNING if self.damaged else logging.INFO
        log.log(level, "pool %r: %s, in %.3f s: that is all", self._l1.segment.info.name, self._so_far(), self.done_s)

    def _so_far(self) -> str:
        dropped = f"; {self.damaged} were damaged and are dropped" if self.damaged else ""
        return f"verified {self.verified} adopted objects of {self.verified_bytes} bytes{dropped}"

    def stop(self) -> None:
        """End after the current step. Waiting for that takes no longer than such a step."""
        self._ended = True
        self._steps.put(None)
        if self._thread.ident is not None:
            self._thread.join()
        self._mapping = None

    def describe(self) -> dict[str, Any]:
        """For `status`."""
        return {
            "verified": self.verified,
            "verified_bytes": self.verified_bytes,
            "damaged": self.damaged,
            "verified_s": None if self.done_s is None else round(self.done_s, 4),
        }

    # --- on a thread of its own ---------------------------------------------------------------------------

    def _work(self) -> None:
        step_behind()
        while (step := self._steps.get()) is not None:
            self._read(step)
            self._call(lambda step=step: self._settle(step))  # type: ignore[misc]

    def _read(self, step: Sequence[Checked]) -> None:
        mapping = self._mapping
        assert mapping is not None, "it is dropped only when this thread has nothing to read"
        assert native is not None, "adoption needs the C extension"
        base = mapping.address
        by_size: dict[int, list[Checked]] = {}
        for each in step:
            by_size.setdefault(each.nbytes, []).append(each)
        for nbytes, alike in by_size.items():
            sums = array("Q", native.checksum_many(array("Q", [base + each.offset for each in alike]), nbytes))
            for each, found in zip(alike, sums, strict=True):
                each.fits = found == each.item.checksum
