"""All that is in the pool: the table, the slots and the policy, moved together.

Every change of state goes through `move`, so the transition table, the sums and the marks in the pool cannot
disagree. All methods take whole batches.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from lmcache_core.errors import InvariantError
from lmcache_core.kernel.allocator import Allocator
from lmcache_core.kernel.answers import Reason
from lmcache_core.kernel.clearing import Clearing
from lmcache_core.kernel.contracts import Entry, EvictionPolicy
from lmcache_core.kernel.effects import Effect, Evicted, PolicyFailed, Removed, SlabAssigned, SlotsMarked
from lmcache_core.kernel.guard import GuardedPolicy
from lmcache_core.kernel.objects import Incarnation, Named, ObjectTable
from lmcache_core.kernel.reasons import Loss, MissReasons
from lmcache_core.kernel.shield import Shield
from lmcache_core.kernel.states import NO_ROW, TRANSITIONS, Event, State
from lmcache_core.limits import ERROR_EXCERPT_CHARS_MAX

if TYPE_CHECKING:
    from lmcache_core.kernel.adoption import Untouched

READY = State.READY
VICTIMS_LOOKS_MAX = 4  # what tiers do not have yet is uncovered so often for one question


class Residents:
    """The objects of the pool and what is known about them."""

    def __init__(self, allocator: Allocator, policy: EvictionPolicy, remembered_max: int) -> None:
        self.allocator = allocator
        self.policy: EvictionPolicy = GuardedPolicy(policy, self._policy_failed)
        self.untouched: Untouched | None = None  # what was adopted and is not made yet
        self.unverified = False  # something was adopted that readers are to check
        self.table = ObjectTable()
        self.reasons = MissReasons(remembered_max)
        self.shield = Shield(self)  # what tiers do not have yet
        self.clearings: deque[Clearing] = deque()  # what clears took out of the table and steps have yet to free
        self.effects: list[Effect] = []
        self.objects_by_state = [0] * len(State)
        self.bytes_by_state = [0] * len(State)
        self.objects_by_layout: defaultdict[int, int] = defaultdict(int)  # in slots, of all states
        self.evictions = 0
        self.made_way = 0  # evicted, or cleared before its step, because somebody needed the room
        self.policy_faults = 0
        self.policy_error = ""  # the last one

    # --- one step of the transition table -------------------------------------------------------------------

    def move(self, objects: Sequence[Incarnation], before: State, event: Event, row: int = NO_ROW) -> None:
        """Take every object one step on from `before`, keep the sums, have the slots marked.

        All or none: where one of them is in another state (or stands in the batch twice) `InvariantError` is raised and
        nothing has changed.
        """
        after = TRANSITIONS[before, event]
        nbytes = 0
        offsets: list[int] = []
        for item in objects:
            if item.state is not before:
                refusal = f"{item!r} cannot {event.name}: expected {before.name}"
                for moved in objects[: len(offsets)]:
                    moved.state = before
                raise InvariantError(refusal)
            item.state = after
            nbytes += item.nbytes
            offsets.append(item.offset)
        self.effects.append(SlotsMarked(offsets, after, row))
        if before is READY and after is not State.FREE:
            self.charge(objects, +1)
        elif before is not READY and after in (READY, State.FREE):
            self.charge(objects, -1)
        self.count(before, -len(objects), -nbytes)
        if after is State.FREE:
            self.allocator.free(objects)
            for layout_id, freed in Counter([item.layout_id for item in objects]).items():
                self.objects_by_layout[layout_id] -= freed
        else:
            self.count(after, len(objects), nbytes)

    def charge(self, objects: Sequence[Incarnation], sign: int) -> None:
        """Tell the policy whose bytes take room without being ready: from the claim of a key until it is committed or
        its slot is free, and from the removal of what is held until its last hold ends."""
        if self.policy.wants_charges:
            sums: dict[int, int] = {}
            for item in objects:
                sums[item.namespace] = sums.get(item.namespace, 0) + item.nbytes
            for namespace, nbytes in sums.items():
                self.policy.charge(namespace, sign * nbytes)

    def count(self, state: State, objects: int, nbytes: int) -> None:
        self.objects_by_state[state] += objects
        self.bytes_by_state[state] += nbytes

    def flush_slabs(self) -> None:
        """Say which slabs changed class, before anything that stands in them."""
        if self.allocator.assigned:
            self.effects.extend(SlabAssigned(*change) for change in self.allocator.assigned)
            self.allocator.assigned.clear()

    # --- what is being written ------------------------------------------------------------------------------

    def unclaim(self, objects: Sequence[Incarnation]) -> None:
        """Undo a claim that was never granted: keys out of the table, slots back to their slabs."""
        self.table.remove(objects)
        self.charge(objects, -1)
        seated = [item for item in objects if hasattr(item, "slab")]
        for item in seated:
            item.state = State.FREE
        self.allocator.free(seated)

    def granted(self, objects: Sequence[Incarnation], live: State, nbytes: int, row: int) -> None:
        """Objects that stand in the table and have their slots: the first step of each incarnation."""
        self.count(live, len(objects), nbytes)
        self.objects_by_layout[objects[0].layout_id] += len(objects)  # one grant is of one layout
        self.effects.append(SlotsMarked([item.offset for item in objects], live, row))

    def change_owner(self, objects: Sequence[Incarnation], state: State, row: int) -> None:
        """The worker of another row holds them now; they are in `state`, and stay in it."""
        if objects:
            self.effects.append(SlotsMarked([item.offset for item in objects], state, row))

    def publish(self, objects: Sequence[Incarnation], live: State) -> None:
        """Make written objects visible, in one step."""
        self.move(objects, live, Event.COMMIT)
        self.policy.insert(objects[::-1])  # last to first: a suffix goes before its prefix

    def unwrite(
        self, objects: Sequence[Incarnation], live: State, event: Event, reason: Reason, row: int, session_id: int
    ) -> None:
        """Take what was being written out of the index: ABORT frees slots, EXPIRE and CLEAR quarantine. `session_id`
        is who is to blame."""
        if objects:
            self.table.remove(objects)
            self.move(objects, live, event, row)
            if reason is not Reason.NONE:
                self.reasons.note(objects, reason, session_id=session_id)

    # --- what is ready --------------------------------------------------------------------------------------

    def hold(self, objects: Sequence[Incarnation]) -> None:
        """Add one hold to each."""
        fresh = []
        for item in objects:
            if not item.holds:
                fresh.append(item)
            item.holds += 1
        if fresh:
            self.policy.held(fresh)

    def release(self, objects: Sequence[Incarnation], *, read: bool = False) -> None:
        """Take one hold from each. `read`: a session has read them, so temporary ones go when nobody holds them."""
        idle, gone, used_up = [], [], []
        for at, item in enumerate(reversed(objects)):  # last to first: a suffix goes before its prefix
            holds = item.holds - 1
            if holds < 0:
                for released in objects[len(objects) - at :]:
                    released.holds += 1
                raise InvariantError(f"{item!r} was released once too often")
            item.holds = holds
            if not holds:
                if item.state is not READY:
                    gone.append(item)
                elif read and item.temporary:
                    used_up.append(item)
                else:
                    idle.append(item)
        if idle:
            self.policy.released(idle)
        if gone:
            self.move(gone, State.DOOMED, Event.LAST_RELEASE)
        if used_up:
            self.remove(used_up, Reason.DROPPED)

    def standing_as(self, namespace: int, wanted: Iterable[Named]) -> list[Incarnation | None]:
        """For each (key, generation) the ready object that it names, None where that one is gone."""
        table = self.table.of(namespace)
        found = [(table.get(key), generation) for key, generation in wanted]
        return [
            item if item is not None and item.state is READY and item.generation == generation else None
            for item, generation in found
        ]

    def remove(self, objects: Sequence[Incarnation], reason: Reason) -> None:
        """Take ready objects out of the index; slots that someone holds follow with the last hold."""
        objects = self._standing(objects)
        if objects:
            self.table.remove(objects)
            self.forget(objects, reason)

    def forget(
        self,
        objects: Sequence[Incarnation],
        reason: Reason,
        *,
        session_id: int | None = None,
        at_s: float | None = None,
    ) -> None:
        """As `remove`, for objects that the table has lost already, at `at_s` by `session_id`."""
        self.policy.remove(objects)
        self.shield.forget(objects)
        loose = [item for item in objects if not item.holds]
        if loose:
            self.move(loose, READY, Event.REMOVE)
        if len(loose) < len(objects):
            self.move([item for item in objects if item.holds], READY, Event.REMOVE_HELD)
        self.reasons.note(objects, reason, session_id=session_id, at_s=at_s)
        self.effects.append(Removed(list(objects), reason))

    def victims(self, nbytes: int, *, needed: bool = True) -> list[Incarnation]:
        """The coldest by the policy, without any that may not go: a policy is a plugin, and may err. What tiers do not
        have yet comes last. `needed` False: for headroom, which none of that goes for."""
        found = self._may_go(self.policy.victims(nbytes) if needed else self.policy.surplus(nbytes))
        shield = self.shield
        if needed and shield.yields and len(shield):
            looks_left = VICTIMS_LOOKS_MAX  # what it uncovers may be covered by somebody's quota, and not be named
            while (missing := nbytes - sum(item.nbytes for item in found)) > 0 and looks_left:
                if not shield.uncover_for(missing):
                    break
                looks_left -= 1
                found = self._may_go(self.policy.victims(nbytes))
        return found

    @staticmethod
    def _may_go(named: Sequence[Entry]) -> list[Incarnation]:
        return [item for item in named if isinstance(item, Incarnation) and item.state is READY and not item.holds]

    def evict(self, victims: Sequence[Incarnation]) -> None:
        """Make room: the victims are ready, and nobody holds them."""
        self.made_way += len(victims)
        victims = self._standing(victims)
        if not victims:
            return
        self.policy.remove(victims)
        self.table.remove(victims)
        self.move(victims, READY, Event.REMOVE)
        self.reasons.note(victims, Reason.EVICTED)
        self.effects.append(Evicted(list(victims)))
        self.evictions += len(victims)

    def _standing(self, objects: Sequence[Incarnation]) -> Sequence[Incarnation]:
        """Those that the table has. The others, which nobody holds, were cleared: they do not wait for their step."""
        if not self.clearings:
            return objects
        for clearing in self.clearings:
            cleared = clearing.take(objects)
            if cleared:
                self.forget(cleared, Reason.CLEARED, session_id=clearing.session_id, at_s=clearing.at_s)
                objects = [item for item in objects if item.state is READY]
        return objects

    # --- telling --------------------------------------------------------------------------------------------

    def lost(self, namespace: int, key: bytes) -> Loss | None:
        """How a key that is not in the table was lost, if that is remembered."""
        for clearing in reversed(self.clearings):
            if clearing.find(namespace, key) is not None:
                return Loss(namespace, Reason.CLEARED, clearing.at_s, clearing.session_id)
        return self.reasons.find(namespace, key)

    def _policy_failed(self, method: str, error: BaseException) -> None:
        self.policy_faults += 1
        self.policy_error = f"{method}: {error!r}"[:ERROR_EXCERPT_CHARS_MAX]
        self.effects.append(PolicyFailed(method, error))

    def objects(self) -> int:
        """Incarnations in slots, of all states."""
        return sum(self.objects_by_state)
