"""Room: what a store needs, then and there; and headroom in the background."""

from __future__ import annotations

from lmcache_core.kernel.allocator import SizeClass, Slab
from lmcache_core.kernel.objects import Incarnation
from lmcache_core.kernel.residents import Residents

LOOK_OBJECTS_MAX = 8192  # victims looked at for one page before it is answered FULL: some 2 ms of walking
EVICTED_OBJECTS_MAX = 8192  # evicted for one page: the rest is answered FULL, and granted to the next try
TRIM_STEP_OBJECTS = 512  # evicted in one background step: well below the loop's page of 2 ms


def make_room(residents: Residents, size_class: SizeClass, slots: int, namespace: int) -> None:
    """Evict until `size_class` has `slots` free slots for objects of `namespace`, or nothing more can go.

    The policy's coldest first. Those of the same class give their slots; where these are not enough, the class
    takes a whole slab: the one that holds the coldest object of another class and nothing that is held.
    """
    allocator = residents.allocator
    made_way_max = residents.made_way + EVICTED_OBJECTS_MAX
    known_busy: set[Slab] = set()
    reach = 1
    while (missing := slots - size_class.slots_free) > 0 and residents.made_way < made_way_max:
        nbytes = missing * size_class.slot_bytes * reach
        coldest = residents.victims(nbytes)
        own = [item for item in coldest if item.slab.size_class is size_class][:missing]
        if residents.policy.spares(own, namespace):
            own = [item for item in own if not residents.policy.spares([item], namespace)]
        if own:
            residents.evict(own)
        if len(own) == missing:
            return
        if _empty_a_slab(residents, size_class, coldest, known_busy, namespace):
            while size_class.slots_free < slots and allocator.grow(size_class):
                pass
        elif not own:
            # Nothing near the cold end can be had: look further, a bounded way.
            if len(coldest) >= LOOK_OBJECTS_MAX or sum(item.nbytes for item in coldest) < nbytes:
                return
            reach *= 4


def _empty_a_slab(
    residents: Residents, size_class: SizeClass, coldest: list[Incarnation], known_busy: set[Slab], namespace: int
) -> bool:
    """Empty what stands where `size_class` could have a slab, and return those units to all classes."""
    allocator = residents.allocator
    for victim in coldest:
        slab = victim.slab
        if slab.size_class is size_class or slab in known_busy:
            continue
        slabs = allocator.slabs_to_empty(size_class, slab, known_busy)
        if slabs is None:
            known_busy.add(slab)  # or its neighbours are: the same for this purpose
            continue
        if any(residents.policy.spares(each.live(), namespace) for each in slabs):
            known_busy.add(slab)
            continue
        for each in slabs:
            live = each.live()
            if live:
                residents.evict(live)
        allocator.dissolve(slabs)
        return True
    return False


class Trimmer:
    """Keeps headroom: over the watermark it evicts `evict_ratio` of the pool, a bounded step a call."""

    def __init__(self, residents: Residents, watermark: float, evict_ratio: float) -> None:
        pool_bytes = residents.allocator.pool_bytes
        self._residents = residents
        self.above_bytes = int(watermark * pool_bytes)
        self._cut_bytes = int(evict_ratio * pool_bytes)
        self._goal_bytes: int | None = None

    def step(self) -> int:
        """One step; the objects it evicted. 0: nothing to do, or nothing that may go."""
        residents = self._residents
        if residents.clearings:  # they give more room than any eviction, and nobody misses it
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
            victims = residents.victims(nbytes, needed=False)[:TRIM_STEP_OBJECTS]
        if victims:
            residents.evict(victims)
        else:
            self._goal_bytes = None
        return len(victims)
