"""A server that continues with the pool of a dead one: what it took over, and which former workers it waits for."""

from __future__ import annotations

import contextlib
import logging
import time
from typing import TYPE_CHECKING, Any

from lmcache_core.errors import UsageError
from lmcache_core.kernel.allocator import slab_bytes_for
from lmcache_core.kernel.kernel import Kernel
from lmcache_core.limits import LIFE_CHECK_S_MAX, LIFE_CHECK_S_MIN, OBJECT_BYTES_MAX, SLAB_BYTES_MIN
from lmcache_core.native import native
from lmcache_core.observe.lines import named
from lmcache_core.pool.backing import Backing
from lmcache_core.pool.layout import Layout
from lmcache_core.pool.segment import Segment
from lmcache_core.server.pool.verifying import Verifying

if TYPE_CHECKING:
    from collections.abc import Callable

    from lmcache_core._native import Adoption

log = logging.getLogger(__name__)


def read_pool(segment: Segment, living: bytes, *, distrust: bool = False) -> Adoption:
    """Validate and repair the tables and the index of a dead server's pool. `living`: the rows of its live workers.
    `distrust`: objects without a checksum are dropped, and others must be checked by their first reader."""
    assert native is not None, "a cold start does not get here"
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
        torn=segment.rebooted,
        stored_after=segment.stored_after_s,
    )


class FormerPool:
    """What a dead server left, read and repaired. Meanwhile nobody may find anything in it without a call."""

    def __init__(self, segment: Segment, verify: str) -> None:
        """`verify`: `AdoptSettings.verify`. Of a pool on a disk, "never" means "first"."""
        self.began_s = time.monotonic()
        segment.serve(0)
        self.segment = segment
        on_disk = segment.info.backing is Backing.FILE  # which may have other bytes than were there
        self.verify = verify = "first" if on_disk and verify == "never" else verify
        living = segment.living_rows()
        self.living_rows = [row for row, lives in enumerate(living) if lives]
        pool = read_pool(segment, living, distrust=verify != "never")
        self.pool: Adoption | None = pool
        self.layouts = pool.layouts()
        self.described = self._described(segment)
        self.objects = pool.objects
        self.nbytes = pool.nbytes
        self.dropped = pool.dropped
        self.read_s = time.monotonic() - self.began_s

    def _described(self, segment: Segment) -> dict[int, Layout]:
        """The layouts of which the pool says what they are, if it is true: tiers can have their objects before any
        session registers them."""
        described: dict[int, Layout] = {}
        for layout_id, text in segment.tables.take_layout_texts().items():
            with contextlib.suppress(UsageError):
                layout = Layout.from_text(text)
                if self.layouts.get(layout_id) == (layout.fingerprint, layout.nbytes):
                    segment.add_layout(layout_id, layout.fingerprint, layout.nbytes, text)
                    described[layout_id] = layout
        return described

    def close(self) -> None:
        """Free its mapping."""
        self.pool = None


class Adopting:
    """The adoption of one pool, from its first step to the last former worker. Lives on the loop's thread.

    A former worker is a row of the worker table that the dead server had given to somebody. It has left once its life
    lock is free (the worker has reconnected, and its earlier copies have ended), or once its process is proven dead. A
    lock that is held proves nothing, because others can take it, too. Until then, slots that the worker may touch are
    withheld; nothing else waits for it.
    """

    def __init__(
        self, former: FormerPool, kernel: Kernel, verifying: Verifying | None, on_row_gone: Callable[[int], None]
    ) -> None:
        """Hands the pool to the kernel, before any other call to that. `verifying`: None if the settings do not ask for
        a background check. `on_row_gone`: called before a row can go to another worker."""
        assert former.pool is not None
        self.former = former
        self._kernel = kernel
        self.verifying = verifying
        self._on_row_gone = on_row_gone
        self._checks = dict.fromkeys(former.living_rows, (0.0, LIFE_CHECK_S_MIN))
        self._made_s: float | None = None
        self._longest_step_s = 0.0  # of the loop's own time, without delays by a busy machine
        kernel.adoption.begin(former.pool, self._checks, unverified=former.verify != "never")
        log.info(
            "pool %r: adopted %d objects of %d bytes in %.3f s; %d former workers live",
            former.segment.info.name,
            former.objects,
            former.nbytes,
            time.monotonic() - former.began_s,
            len(self._checks),
            extra=named("adopting", objects=former.objects, nbytes=former.nbytes),
        )

    def step(self, now: float) -> bool:
        """One bounded step of making objects, and a check of the life locks that are due. True: there is more to
        make."""
        former, segment = self.former, self.former.segment
        for row, (check_at_s, pause_s) in list(self._checks.items()):
            if check_at_s > now:
                continue
            if segment.row_left(row):
                del self._checks[row]
                self._kernel.adoption.former_gone(row)
                self._on_row_gone(row)
                if segment.tables.row_claimed(row):
                    segment.release_row(row)
            else:
                self._checks[row] = (now + pause_s, min(2 * pause_s, LIFE_CHECK_S_MAX))
        if former.pool is not None:
            began_s = time.thread_time()
            more = self._kernel.adoption.step()
            self._longest_step_s = max(self._longest_step_s, time.thread_time() - began_s)
            if not more:
                former.close()
                self._made_s = time.monotonic() - former.began_s
                if self.verifying is not None:
                    self.verifying.begin()
        return self.makes_objects

    @property
    def makes_objects(self) -> bool:
        """Whether some objects are still to be made."""
        return self.former.pool is not None

    @property
    def due(self) -> float | None:
        """When `step` must be called next; None: never."""
        if self.makes_objects:
            return 0.0
        return min((check_at_s for check_at_s, _ in self._checks.values()), default=None)

    def close(self) -> None:
        """End the check, and free what was read from the pool."""
        if self.verifying is not None:
            self.verifying.stop()
        self.former.close()
        self._kernel.adoption.close()

    def describe(self) -> dict[str, Any]:
        """For `status`."""
        former = self.former
        return {
            "objects": former.objects,
            "nbytes": former.nbytes,
            "verify": former.verify,
            "dropped": dict(former.dropped),
            "lost": self._kernel.adoption.lost,
            "pending": 0 if former.pool is None else former.pool.pending,
            "waiting_for_workers": len(self._checks),
            "read_s": round(former.read_s, 4),
            "longest_step_s": round(self._longest_step_s, 6),
            "made_s": None if self._made_s is None else round(self._made_s, 4),
            "checked": None if self.verifying is None else self.verifying.describe(),
        }
