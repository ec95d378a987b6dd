"""Room for grants that need more than one step: whole slabs of other size classes, emptied a bounded step at a time.

A hundred thousand small objects may stand in the way of one large one, and to evict these takes half a second. So such
a grant, to a worker that stores or to a lane that loads, waits as a `Preparation`: none of its keys is claimed and no
slot is its own, so one that is given up leaves nothing, and others may store the same keys meanwhile. What is being
emptied for it is a state of the units themselves (`Allocator.begin_emptying`): nothing new comes to stand there, and
nobody else is given it. In the step in which the last slot that it needs is there, the grant is carried out whole.

They wait in the order in which they came. Those whose own class has room, or victims, do not come here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from lmcache_core.errors import CacheError
from lmcache_core.kernel.allocator import Emptying, SizeClass, Slab
from lmcache_core.kernel.answers import Grants
from lmcache_core.kernel.eviction import LOOK_OBJECTS_MAX, make_room
from lmcache_core.kernel.fence import STEP_OBJECTS, Fence
from lmcache_core.kernel.ledger import Sort
from lmcache_core.kernel.objects import Incarnation
from lmcache_core.kernel.releases import Releases
from lmcache_core.kernel.residents import Residents
from lmcache_core.kernel.states import State

if TYPE_CHECKING:
    from lmcache_core.kernel.sessions import KernelSession

JUDGED_SLOTS = 2048  # slots looked at in one step, before anything is evicted: a tenth of a millisecond
WALKED_UNITS = 64  # of the pool, in one step, in search of a slab whose neighbours may be had, too
_THROUGH = object()


class Preparation:
    """A grant under way. It is `done` once it has `grants`, an `error`, or was given up."""

    __slots__ = (
        "cancelled", "cleared", "deadline", "emptied", "emptying", "error", "existing", "gave_up", "grants", "keys",
        "known_busy", "layout_id", "lease_id", "live", "looked", "namespace", "sacrifices", "session", "size_class",
        "slots", "until_s", "walk",
    )  # fmt: skip

    def __init__(
        self,
        session: KernelSession,
        namespace: int,
        layout_id: int,
        size_class: SizeClass,
        keys: Sequence[bytes],
        lease_id: int,
        live: State,
        deadline: float | None,
        slots: int,
        existing: Sequence[Incarnation],
        until_s: float,
    ) -> None:
        self.session = session
        self.namespace = namespace
        self.layout_id = layout_id
        self.size_class = size_class
        self.keys = keys
        self.lease_id = lease_id
        self.live = live
        self.deadline = deadline  # of its lease; None: it has all its time from when it is carried out
        self.slots = slots  # that it needs
        self.existing = existing  # held: what it will say exists must not go for the rest of its own prefix
        self.until_s = until_s  # with what there is by then it is carried out
        self.emptying: EmptyingSteps | None = None
        self.emptied: list[Emptying] = []
        self.known_busy: set[Slab] = set()
        self.looked = False  # whether there is something of its own class that may go
        self.sacrifices = False  # nothing else can be had: slabs with what tiers lack, too
        self.gave_up = False  # there is nothing left to wait for
        self.walk: Iterator[Slab | None] | None = None  # once around the pool, where the coldest slabs are busy
        self.grants: Grants | None = None
        self.error: CacheError | None = None
        self.cancelled = False
        self.cleared = False  # a clear came: what was offered before it is granted nothing

    @property
    def done(self) -> bool:
        return self.grants is not None or self.error is not None or self.cancelled

    @property
    def slots_to_come(self) -> int:
        """Slots that what is emptied already will make."""
        return sum(each.slots for each in self.emptied)


class EmptyingSteps:
    """The slabs of one run of units on their way: first all slots are judged, so that nothing is evicted in vain, then
    all that stands in them is evicted. `sacrifices`: what a tier is still to get goes, too."""

    def __init__(self, residents: Residents, emptying: Emptying, namespace: int, *, sacrifices: bool) -> None:
        self.emptying = emptying
        self._residents = residents
        self._namespace = namespace
        self._sacrifices = sacrifices
        self._judging = True
        self._slab = self._slot = 0
        self.busy: Slab | None = None  # the one that something stands in that may not go

    def step(self) -> bool | None:
        """A bounded step. True: all is empty; False: something may not go; None: there is more to do."""
        slabs = self.emptying.slabs
        if self._slab == len(slabs):
            if not self._judging:
                return True
            self._judging, self._slab = False, 0
        if self._slab < len(slabs):
            slab = slabs[self._slab]
            if slab.unmade and self._residents.untouched is not None:
                self._residents.untouched.reveal(slab)
                return None
            standing = self._next(slab, JUDGED_SLOTS if self._judging else STEP_OBJECTS)
            held = any(item.state is not State.READY or (item.holds and not self._yields(item)) for item in standing)
            if held or (standing and self._residents.policy.spares(standing, self._namespace)):
                self.busy = slab
                return False
            if not self._judging and standing:
                if self._sacrifices:
                    self._residents.shield.uncover(standing)
                self._residents.evict(standing)
        return None

    def _yields(self, item: Incarnation) -> bool:
        """Whether nobody holds it but for a tier that is to get it, which may be in vain."""
        return self._sacrifices and item.holds == 1 and self._residents.shield.covers(item)

    def _next(self, slab: Slab, slots: int) -> list[Incarnation]:
        """What stands in the next slots of the slab."""
        some = slab.residents[self._slot : self._slot + slots]
        self._slot += slots
        if self._slot >= len(slab.residents):
            self._slab, self._slot = self._slab + 1, 0
        return [item for item in some if item is not None and item.state is not State.FREE]


class Rooms:
    """The grants that wait. `carry_out` does one with the room that there is by then."""

    def __init__(
        self,
        residents: Residents,
        fence: Fence,
        releases: Releases,
        carry_out: Callable[[Preparation, float], Grants],
    ) -> None:
        self._residents = residents
        self._fence = fence
        self._releases = releases
        self._carry_out = carry_out
        self.waiting: dict[Preparation, None] = {}

    def add(self, preparation: Preparation) -> None:
        """It is to wait, behind those that wait already. What is there of its keys is held, as if it were promised: the
        first of it, where the session is promised so much already."""
        session, existing = preparation.session, preparation.existing
        account = session.accounts[Sort.PROMISED]
        preparation.existing = existing = existing[: account.take_first(existing)]
        self._residents.hold(existing)
        self._charge(preparation, +1)
        self.waiting[preparation] = None
        session.preparations[preparation] = None

    def cancel(self, preparation: Preparation) -> None:
        """Nobody waits for it any more. What was being emptied for it is as before, less what was evicted."""
        if not preparation.done:
            preparation.cancelled = True
            self._take_out(preparation)
            self._free(preparation)

    def session_ended(self, session: KernelSession) -> None:
        """Nobody waits for what it has asked for any more."""
        for preparation in list(session.preparations):
            self.cancel(preparation)

    def hurry(self) -> None:
        """Nothing is granted any more: what waits is answered so, in the next steps."""
        for preparation in self.waiting:
            preparation.until_s = float("-inf")

    def clear(self, namespace: int | None) -> None:
        """What was offered for this scope (None: all) before the clear must not appear after it."""
        for preparation in self.waiting:
            if namespace in (None, preparation.namespace):
                preparation.cleared = True
                preparation.until_s = float("-inf")

    def step(self, now: float) -> None:
        """A bounded step for the first that waits."""
        first = next(iter(self.waiting), None)
        if first is None or (now < first.until_s and not first.gave_up and self._advance(first)):
            return
        for each in first.emptied:
            self._residents.allocator.give_emptied(each)
        first.emptied = []
        self._take_out(first)
        try:
            first.grants = self._carry_out(first, now)
        except CacheError as error:  # the lease that it was to be a page of is gone, for instance
            first.error = error
        except BaseException:  # a bug of ours: who waits is told of it, and nothing of the grant is left
            first.error = CacheError("the server failed on this grant; its log has the traceback")
            raise
        finally:
            self._free(first)

    def _advance(self, first: Preparation) -> bool:
        """Whether it is worth waiting for the next step. Each look at what is coldest has a step of its own, and so has
        the last one, where the grant is carried out with too little room."""
        residents, allocator = self._residents, self._residents.allocator
        missing = first.slots - first.slots_to_come
        while first.size_class.slots_free < missing and allocator.grow(first.size_class):
            pass  # somebody gave whole slabs back since
        if first.size_class.slots_free >= missing:
            return False
        if first.emptying is not None:
            self._empty_more(first, first.emptying)
            return True
        # Clears give more room than any eviction, and nobody misses it.
        if residents.clearings and self._fence.step():
            return True
        if not first.looked:
            first.looked = True
            return not make_room(residents, first.size_class, missing, first.namespace, may_wait=True)
        first.looked = False
        # Behind what is made already there is more of an adopted pool, and it may be what can go.
        more = self._begin_emptying(first) or (residents.untouched is not None and residents.untouched.step() > 0)
        first.gave_up = not more
        return True

    def _empty_more(self, first: Preparation, steps: EmptyingSteps) -> None:
        outcome = steps.step()
        if outcome is None:
            return
        first.emptying = None
        if outcome:
            first.emptied.append(steps.emptying)
        else:
            self._residents.allocator.keep(steps.emptying)
            if steps.busy is not None:
                first.known_busy.add(steps.busy)

    def _begin_emptying(self, first: Preparation) -> bool:
        """Choose the slabs around the coldest object that stands in any that can be had; where there are none, the same
        once more among those with what tiers lack, if that may go. False: none is left."""
        if self._begin_coldest(first):
            return True
        shield = self._residents.shield
        if first.sacrifices or not shield.yields or not len(shield):
            return False
        first.sacrifices, first.walk = True, None
        first.known_busy.clear()
        return True

    def _begin_coldest(self, first: Preparation) -> bool:
        """All that are looked at may stand in few slabs, and something that may not go in each of these: then the slabs
        behind them, as they lie in the pool, for they were filled in that order."""
        residents, allocator = self._residents, self._residents.allocator
        mean = max(1, allocator.used_bytes // max(1, residents.objects()))
        coldest = residents.coldest(LOOK_OBJECTS_MAX * mean, LOOK_OBJECTS_MAX)
        if first.sacrifices:
            oldest = residents.shield.oldest(LOOK_OBJECTS_MAX)
            residents.touched += len(oldest)
            coldest += oldest
        if not coldest:
            return False
        if any(self._begin_around(first, slab) for slab in dict.fromkeys(item.slab for item in coldest)):
            return True
        if first.walk is None:
            first.walk = allocator.slabs_from(coldest[0].slab.first_unit)
        units = first.size_class.units_least  # so many times as many are looked at around each
        for _ in range(max(1, WALKED_UNITS // units)):
            slab = next(first.walk, _THROUGH)
            if slab is _THROUGH:
                return False
            if isinstance(slab, Slab) and self._begin_around(first, slab):
                break
        return True

    def _begin_around(self, first: Preparation, slab: Slab) -> bool:
        """Begin to empty the units around this slab, if they can be had."""
        allocator = self._residents.allocator
        if slab.size_class in (first.size_class, allocator.emptying) or slab in first.known_busy:
            return False
        run = allocator.run_around(first.size_class, slab, first.known_busy)
        if run is None:
            first.known_busy.add(slab)  # its neighbours are busy: the same for this purpose
            return False
        first.emptying = EmptyingSteps(
            self._residents,
            allocator.begin_emptying(first.size_class, run),
            first.namespace,
            sacrifices=first.sacrifices,
        )
        return True

    def _charge(self, preparation: Preparation, sign: int) -> None:
        """What it waits for is its tenant's from the first byte: room is made of what others have too much, then."""
        nbytes = sign * preparation.slots * preparation.size_class.slot_bytes
        self._residents.charge_bytes(preparation.namespace, nbytes)

    def _take_out(self, preparation: Preparation) -> None:
        """It does not wait any more."""
        del self.waiting[preparation]
        del preparation.session.preparations[preparation]
        self._charge(preparation, -1)

    def _free(self, preparation: Preparation) -> None:
        """What was being emptied for it, and what it held."""
        if preparation.emptying is not None:
            self._residents.allocator.keep(preparation.emptying.emptying)
            preparation.emptying = None
        for each in preparation.emptied:
            self._residents.allocator.keep(each)
        preparation.emptied = []
        if preparation.existing:
            self._releases.held(list(preparation.existing), preparation.session.accounts[Sort.PROMISED])
            preparation.existing = ()
