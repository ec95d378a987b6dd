"""A server that goes on with the pool of a dead one: what it took over, and which former workers it waits for."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Any

from lmcache_core.kernel.allocator import slab_bytes_for
from lmcache_core.kernel.kernel import Kernel
from lmcache_core.limits import LIFE_CHECK_S_MAX, LIFE_CHECK_S_MIN, OBJECT_BYTES_MAX, SLAB_BYTES_MIN
from lmcache_core.native import native
from lmcache_core.pool.lifelock import life_lock_free
from lmcache_core.pool.segment import Segment
from lmcache_core.server.verifying import Verifying

if TYPE_CHECKING:
    from collections.abc import Callable

    from lmcache_core._native import Adoption
    from lmcache_core.server.l1 import L1

log = logging.getLogger(__name__)


def read_pool(segment: Segment, living: bytes, *, distrust: bool = False) -> Adoption:
    """Validate the tables and the index of a dead server's pool, and put them right. `living`: its workers' rows.
    `distrust`: what has no checksum is dropped, and what has one is to be checked by whoever reads it."""
    assert native is not None, "who begins cold does not come here"
    header = segment.header
    return native.Adoption(
        segment.buffer,
        living,
        **segment.index_numbers,
        layouts_offset=header.layouts_offset,
        layout_rows=header.layout_rows,
        slabs_offset=header.slabs_offset,
        slab_rows=header.slab_rows,
        slots_offset=header.slots_offset,
        slot_rows=header.slot_rows,
        unit_bytes=slab_bytes_for(header.data_bytes),
        slab_bytes_min=SLAB_BYTES_MIN,
        object_bytes_max=OBJECT_BYTES_MAX,
        master=None if segment.master is None else segment.master.buffer,
        distrust=distrust,
    )


class Adopting:
    """The adoption of one pool, from its first look to the last former worker. Lives on the loop's thread.

    A former worker is a row of the worker table whose life lock is held. It gives the lock up when it has reconnected
    and its copies of before have ended, or when it dies: until then slots that it may touch wait for it, and nothing
    else does.
    """

    verifying: Verifying | None = None  # of verify = "background", once the kernel has the pool

    def __init__(self, segment: Segment, verify: str) -> None:
        """`verify`: `AdoptSettings.verify`."""
        began_s = time.monotonic()
        # Nobody may find anything here without a call while it is read and put right.
        segment.serve(0)
        self._segment = segment
        self._verify = verify
        living = segment.living_rows()
        self._checks = {row: (0.0, LIFE_CHECK_S_MIN) for row, lives in enumerate(living) if lives}
        self._pool: Adoption | None = read_pool(segment, living, distrust=verify != "never")
        self.layouts = self._pool.layouts()
        self.objects = self._pool.objects
        self.nbytes = self._pool.nbytes
        self._dropped = self._pool.dropped
        self._began_s = began_s
        self._read_s = time.monotonic() - began_s
        self._made_s: float | None = None
        self._longest_step_s = 0.0  # of the loop's own time: what a busy machine adds is not ours
        self._kernel: Kernel | None = None
        self.on_row_gone: Callable[[int], None] = lambda row: None  # told before the row may be another's

    @property
    def rows(self) -> list[int]:
        """Rows whose workers have not been heard of yet."""
        return list(self._checks)

    def begin(self, kernel: Kernel) -> None:
        """Hand it to the kernel, before anything else is asked of that."""
        assert self._pool is not None
        self._kernel = kernel
        kernel.adoption.begin(self._pool, self._checks, unverified=self._verify != "never")
        log.info(
            "pool %r: adopted %d objects of %d bytes in %.3f s; %d former workers live",
            self._segment.info.name,
            self.objects,
            self.nbytes,
            time.monotonic() - self._began_s,
            len(self._checks),
        )

    def verify_beside(self, l1: L1, call: Callable[[Callable[[], None]], None]) -> None:
        """Where the settings ask for it: check what was adopted in the background, once all of it is made. `call` runs
        a function on the loop's thread."""
        if self._verify == "background":
            nbytes_by_layout = {layout_id: nbytes for layout_id, (_, nbytes) in self.layouts.items()}
            self.verifying = Verifying(l1, nbytes_by_layout, call)

    def step(self, now: float) -> bool:
        """One bounded step of making objects, and a look at the life locks that are due. True: more to make."""
        assert self._kernel is not None
        for row, (check_at_s, pause_s) in list(self._checks.items()):
            if check_at_s > now:
                continue
            if life_lock_free(self._segment, row):
                del self._checks[row]
                self._kernel.adoption.former_gone(row)
                self.on_row_gone(row)
                if self._segment.tables.row_claimed(row):
                    self._segment.release_row(row)
            else:
                self._checks[row] = (now + pause_s, min(2 * pause_s, LIFE_CHECK_S_MAX))
        if self._pool is not None:
            began_s = time.thread_time()
            more = self._kernel.adoption.step()
            self._longest_step_s = max(self._longest_step_s, time.thread_time() - began_s)
            if not more:
                self._pool = None  # it keeps the mapping
                self._made_s = time.monotonic() - self._began_s
                if self.verifying is not None:
                    self.verifying.begin()
        return self.makes_objects

    @property
    def makes_objects(self) -> bool:
        """Whether some are still to be made."""
        return self._pool is not None

    @property
    def due(self) -> float | None:
        """When `step` is to be called, None: no more."""
        if self._pool is not None:
            return 0.0
        return min((check_at_s for check_at_s, _ in self._checks.values()), default=None)

    def close(self) -> None:
        """Let go of the pool."""
        if self.verifying is not None:
            self.verifying.stop()
        self._pool = None
        if self._kernel is not None:
            self._kernel.adoption.close()

    def describe(self) -> dict[str, Any]:
        """For `status`."""
        return {
            "objects": self.objects,
            "nbytes": self.nbytes,
            "verify": self._verify,
            "dropped": dict(self._dropped),
            "lost": 0 if self._kernel is None else self._kernel.adoption.lost,
            "pending": 0 if self._pool is None else self._pool.pending,
            "waiting_for_workers": len(self._checks),
            "read_s": round(self._read_s, 4),
            "longest_step_s": round(self._longest_step_s, 6),
            "made_s": None if self._made_s is None else round(self._made_s, 4),
            "checked": None if self.verifying is None else self.verifying.describe(),
        }
