"""Room: what a store needs at once, and headroom in the background."""

from __future__ import annotations

from lmcache_core.kernel.allocator import SizeClass
from lmcache_core.kernel.objects import Incarnation
from lmcache_core.kernel.residents import Residents

LOOK_OBJECTS_MAX = 2048  # victims looked at for one page: half a millisecond of walking
TRIM_STEP_OBJECTS = 512  # evicted in one background step: well below the loop's page of 2 ms


def make_room(
    residents: Residents, size_class: SizeClass, slots: int, namespace: int, *, may_wait: bool = False
) -> bool:
    """Evict the coldest objects of `size_class` until it has `slots` free slots for objects of `namespace`, or no more
    of them can be evicted. Costs at most a page of evictions and a bounded search for them.

    `may_wait`: stop if something of another class is as cold as the next victim. Returns False if slots are still
    missing, and another class's slab may be emptied in steps (`rooms`).
    """
    if not size_class.slots_used:  # do not uncover in vain what tiers lack
        return size_class.slots_free >= slots
    reach = 1
    last = residents.touched + LOOK_OBJECTS_MAX
    while (missing := slots - size_class.slots_free) > 0 and residents.touched < last:
        nbytes = missing * size_class.slot_bytes * reach
        coldest = residents.victims(nbytes, LOOK_OBJECTS_MAX)
        own = [item for item in coldest if item.slab.size_class is size_class][:missing]
        if residents.policy.spares(own, namespace):
            own = [item for item in own if not residents.policy.spares([item], namespace)]
        if own:
            residents.evict(own)
        if len(own) == missing:
            return True
        if may_wait:
            return False
        if not own:
            # Nothing near the cold end can be evicted: look further, within bounds.
            if len(coldest) >= LOOK_OBJECTS_MAX or sum(item.nbytes for item in coldest) < nbytes:
                break
            reach *= 4
    return size_class.slots_free >= slots


class Trimmer:
    """Keeps headroom: above the watermark it evicts `evict_ratio` of the pool, in bounded steps."""

    def __init__(self, residents: Residents, watermark: float, evict_ratio: float) -> None:
        pool_bytes = residents.allocator.pool_bytes
        self._residents = residents
        self.above_bytes = int(watermark * pool_bytes)
        self._cut_bytes = int(evict_ratio * pool_bytes)
        self._goal_bytes: int | None = None

    def step(self) -> int:
        """Do one step. Returns how many objects it evicted; 0 if there is nothing to do, or nothing may be evicted."""
        residents = self._residents
        if residents.clearings:  # they free more than any eviction, and cost no hit
            return 0
        used = residents.allocator.used_bytes
        if self._goal_bytes is None:
            if used <= self.above_bytes:
                return 0
            self._goal_bytes = max(0, used - self._cut_bytes)
        over = used - self._goal_bytes
        victims: list[Incarnation] = []
        if over > 0:
            mean = max(1, used // max(1, residents.objects()))
            nbytes = min(over, TRIM_STEP_OBJECTS * mean)
            victims = residents.surplus(nbytes, TRIM_STEP_OBJECTS)[:TRIM_STEP_OBJECTS]
        if victims:
            residents.evict(victims)
        else:
            self._goal_bytes = None
        return len(victims)
