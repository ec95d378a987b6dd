"""Room for grants that need several steps: slabs of other size classes are emptied, a bounded step at a time.

A hundred thousand small objects may stand where one large object must go, and evicting them takes half a second. So the
grant, for a worker that stores or a lane that loads, waits as a `Preparation`. It claims no key and owns no slot:
giving it up leaves nothing behind, and others may store the same keys meanwhile. The units that are being emptied for
it are marked as such (`Allocator.begin_emptying`): nothing new is placed there, and nobody else gets them. The step
that frees the last slot it needs carries out the whole grant.

Grants wait in the order in which they came. A grant whose own class has room or victims does not come here.
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

JUDGED_SLOTS = 2048  # slots looked at in one step, before any eviction: a tenth of a millisecond
WALKED_UNITS = 64  # units looked at in one step, when also searching for a slab with neighbours that can be emptied
_THROUGH = object()


class Preparation:
    """A grant under way. It is `done` once it has `grants` or an `error`, or was cancelled."""

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
        self.deadline = deadline  # of its lease; None: its full time starts when it is carried out
        self.slots = slots  # slots that it needs
        self.existing = existing  # held, so they are not evicted for the rest of their own prefix
        self.until_s = until_s  # then it is carried out with the room there is
        self.emptying: EmptyingSteps | None = None
        self.emptied: list[Emptying] = []
        self.known_busy: set[Slab] = set()
        self.looked = False  # it has looked for victims of its own class
        self.sacrifices = False  # nothing else is left: also take slabs with objects that tiers lack
        self.gave_up = False  # there is nothing left to wait for
        self.walk: Iterator[Slab | None] | None = None  # once around the pool, if the coldest slabs are busy
        self.grants: Grants | None = None
        self.error: CacheError | None = None
        self.cancelled = False
        self.cleared = False  # a clear came after the request: it is granted nothing

    @property
    def done(self) -> bool:
        return self.grants is not None or self.error is not None or self.cancelled

    @property
    def slots_to_come(self) -> int:
        """Slots that the units being emptied for it will give."""
        return sum(each.slots for each in self.emptied)


class EmptyingSteps:
    """Empties the slabs of one run of units. It first judges all slots, so that nothing is evicted in vain, and then
    evicts every object in them. `sacrifices`: also objects that a tier is still to get."""

    def __init__(self, residents: Residents, emptying: Emptying, namespace: int, *, sacrifices: bool) -> None:
        self.emptying = emptying
        self._residents = residents
        self._namespace = namespace
        self._sacrifices = sacrifices
        self._judging = True
        self._slab = self._slot = 0
        self.busy: Slab | None = None  # the slab with an object that must stay

    def step(self) -> bool | None:
        """Do one bounded step. True: all is empty. False: an object must stay. None: there is more to do."""
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
        """Whether nobody holds it, except a tier that is still to get it and may lose it."""
        return self._sacrifices and item.holds == 1 and self._residents.shield.covers(item)

    def _next(self, slab: Slab, slots: int) -> list[Incarnation]:
        """The objects in the next slots of the slab."""
        some = slab.residents[self._slot : self._slot + slots]
        self._slot += slots
        if self._slot >= len(slab.residents):
            self._slab, self._slot = self._slab + 1, 0
        return [item for item in some if item is not None and item.state is not State.FREE]


class Rooms:
    """The grants that wait. `carry_out` does one with the room that there is then."""

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
        """Let it wait behind the others. Those of its keys that exist are held as if they were promised; if the session
        has little room for promises left, only the first ones."""
        session, existing = preparation.session, preparation.existing
        account = session.accounts[Sort.PROMISED]
        preparation.existing = existing = existing[: account.take_first(existing)]
        self._residents.hold(existing)
        self._charge(preparation, +1)
        self.waiting[preparation] = None
        session.preparations[preparation] = None
        self._residents.undo.add((self.cancel, (preparation,)))

    def cancel(self, preparation: Preparation) -> None:
        """Nobody waits for it any more. Units that were being emptied for it return to normal, less what was
        evicted."""
        if not preparation.done:
            preparation.cancelled = True
            self._take_out(preparation)
            self._free(preparation)

    def session_ended(self, session: KernelSession) -> None:
        """The session has ended: cancel its waiting grants."""
        for preparation in list(session.preparations):
            self.cancel(preparation)

    def hurry(self) -> None:
        """No more grants are given: the next steps answer all that wait."""
        for preparation in self.waiting:
            preparation.until_s = float("-inf")

    def clear(self, namespace: int | None) -> None:
        """What was offered in this scope (None: all) before the clear must not appear after it."""
        for preparation in self.waiting:
            if namespace in (None, preparation.namespace):
                preparation.cleared = True
                preparation.until_s = float("-inf")

    def step(self, now: float) -> None:
        """Do one bounded step for the first grant in line."""
        first = next(iter(self.waiting), None)
        if first is None or (now < first.until_s and not first.gave_up and self._advance(first)):
            return
        for each in first.emptied:
            self._residents.allocator.give_emptied(each)
        first.emptied = []
        self._take_out(first)
        try:
            first.grants = self._carry_out(first, now)
        except CacheError as error:  # for instance, the lease that it should extend is gone
            first.error = error
        except BaseException:  # a bug of ours: the waiting caller gets an error, and nothing of the grant is left
            first.error = CacheError("the server failed on this grant; its log has the traceback")
            raise
        finally:
            self._free(first)

    def _advance(self, first: Preparation) -> bool:
        """Whether it is worth waiting for the next step. Each look at the coldest objects takes a step of its own, and
        so does the last one, which carries the grant out with too little room."""
        residents, allocator = self._residents, self._residents.allocator
        missing = first.slots - first.slots_to_come
        while first.size_class.slots_free < missing and allocator.grow(first.size_class):
            pass  # somebody has freed whole slabs meanwhile
        if first.size_class.slots_free >= missing:
            return False
        if first.emptying is not None:
            self._empty_more(first, first.emptying)
            return True
        # Clears free more than any eviction, and cost no hit.
        if residents.clearings and self._fence.step():
            return True
        if not first.looked:
            first.looked = True
            return not make_room(residents, first.size_class, missing, first.namespace, may_wait=True)
        first.looked = False
        # An adopted pool has more objects than were made so far, and those may be evictable.
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
        """Choose the slabs around the coldest object in any slab that can be emptied. If there are none, try again with
        slabs that hold objects tiers lack, if those may be evicted. False: there are none either."""
        if self._begin_coldest(first):
            return True
        shield = self._residents.shield
        if first.sacrifices or not shield.yields or not len(shield):
            return False
        first.sacrifices, first.walk = True, None
        first.known_busy.clear()
        return True

    def _begin_coldest(self, first: Preparation) -> bool:
        """The coldest objects may all be in a few slabs, each with an object that must stay. Then try the slabs behind
        these in the pool, because slabs were filled in that order."""
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
        units = first.size_class.units_least  # each look covers this many units around the slab
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
            first.known_busy.add(slab)  # its neighbours are busy, which means the same here
            return False
        first.emptying = EmptyingSteps(
            self._residents,
            allocator.begin_emptying(first.size_class, run),
            first.namespace,
            sacrifices=first.sacrifices,
        )
        return True

    def _charge(self, preparation: Preparation, sign: int) -> None:
        """Charge its tenant for what it waits for from the first byte, so that other tenants' surplus is evicted for
        it."""
        nbytes = sign * preparation.slots * preparation.size_class.slot_bytes
        self._residents.charge_bytes(preparation.namespace, nbytes)

    def _take_out(self, preparation: Preparation) -> None:
        """Take it out of the queue."""
        del self.waiting[preparation]
        del preparation.session.preparations[preparation]
        self._charge(preparation, -1)

    def _free(self, preparation: Preparation) -> None:
        """Release what was being emptied for it, and what it held."""
        if preparation.emptying is not None:
            self._residents.allocator.keep(preparation.emptying.emptying)
            preparation.emptying = None
        for each in preparation.emptied:
            self._residents.allocator.keep(each)
        preparation.emptied = []
        if preparation.existing:
            self._releases.held(list(preparation.existing), preparation.session.accounts[Sort.PROMISED])
            preparation.existing = ()
