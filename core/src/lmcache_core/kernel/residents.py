"""Everything in the pool: the table, the slots and the policy, moved together.

Every change of state goes through `move`, so the transition table, the sums and the marks in the pool cannot
disagree. All methods take whole batches.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from operator import length_hint
from typing import TYPE_CHECKING

from lmcache_core.errors import InvariantError
from lmcache_core.kernel.allocator import Allocator
from lmcache_core.kernel.answers import Reason
from lmcache_core.kernel.clearing import Clearing
from lmcache_core.kernel.contracts import Entry, EvictionPolicy
from lmcache_core.kernel.effects import Effect, Evicted, PolicyFailed, PolicyNoted, Removed, SlabAssigned, SlotsMarked
from lmcache_core.kernel.guard import GuardedPolicy
from lmcache_core.kernel.objects import Incarnation, Named, ObjectTable
from lmcache_core.kernel.reasons import Loss, MissReasons
from lmcache_core.kernel.shield import Shield
from lmcache_core.kernel.states import NO_ROW, TRANSITIONS, Event, State
from lmcache_core.kernel.tenants import POSITIONS, Tenancy
from lmcache_core.kernel.undo import Undo
from lmcache_core.limits import ERROR_EXCERPT_CHARS_MAX

if TYPE_CHECKING:
    from lmcache_core.kernel.adoption import Untouched

READY = State.READY


class Residents:
    """The objects of the pool and what is known about them."""

    def __init__(self, allocator: Allocator, policy: EvictionPolicy, remembered_max: int, undo: Undo) -> None:
        self.undo = undo
        self.allocator = allocator
        guarded = GuardedPolicy(policy, self._policy_failed)
        self.policy: EvictionPolicy = guarded
        policy.note = self._policy_noted  # type: ignore[method-assign]
        self.untouched: Untouched | None = None  # adopted objects that are not made yet
        self.unverified = False  # some adopted objects must be verified by their readers
        self.table = ObjectTable()
        self.reasons = MissReasons(remembered_max)
        self.shield = Shield(self)  # objects that tiers do not have yet
        self.charged: dict[int, int] = {}  # bytes that take room without being ready, by namespace
        self.tenancy = Tenancy(guarded, self._bytes_taken, self.charged, self)
        self.clearings: deque[Clearing] = deque()  # clears whose objects are out of the table, but not all freed yet
        self.effects: list[Effect] = []
        self.objects_by_state = [0] * len(State)
        self.bytes_by_state = [0] * len(State)
        self.objects_by_layout: defaultdict[int, int] = defaultdict(int)  # in slots, of all states
        self.doubtful: Sequence[Incarnation] = ()  # what a step that has not ended was about to change: see `recount`
        self.touched = 0  # objects and keys looked at or changed since it was set to 0: the cost of a turn
        self.evictions = 0
        self.policy_faults = 0
        self.policy_error = ""  # the last error

    # --- one step of the transition table -------------------------------------------------------------------

    def move(self, objects: Sequence[Incarnation], before: State, event: Event, row: int | None = NO_ROW) -> None:
        """Take every object one step on from `before`, update the sums, and have the slots marked (`row`: see
        `SlotsMarked`).

        All or none: if one of them is in another state, or appears twice in the batch, it raises `InvariantError` and
        changes nothing.
        """
        after = TRANSITIONS[before, event]
        self.doubtful = objects
        self.touched += len(objects)
        nbytes = 0
        offsets: list[int] = []
        for item in objects:
            if item.state is not before:
                refusal = f"{item!r} cannot {event.name}: expected {before.name}"
                for moved in objects[: len(offsets)]:
                    moved.state = before
                self.doubtful = ()
                raise InvariantError(refusal)
            item.state = after
            nbytes += item.nbytes
            offsets.append(item.offset)
        self.effects.append(SlotsMarked(offsets, after, row))
        if before is READY:
            if after is not State.FREE:
                self.charge(objects, +1)
        elif after is READY:
            self.charge_bytes(objects[0].namespace, -nbytes)  # one lease, one namespace
        elif after is State.FREE:
            self.charge(objects, -1)
        self.count(before, -len(objects), -nbytes)
        if after is State.FREE:
            self.allocator.free(objects)
            by_layout = self.objects_by_layout
            for item in objects:
                by_layout[item.layout_id] -= 1
        else:
            self.count(after, len(objects), nbytes)

    def charge(self, objects: Sequence[Incarnation], sign: int) -> None:
        """Tell the policy whose bytes take room without being ready: from the claim of a key until its commit or until
        its slot is free, and from the removal of a held object until its last hold ends."""
        sums: dict[int, int] = {}
        for item in objects:
            sums[item.namespace] = sums.get(item.namespace, 0) + item.nbytes
        for namespace, nbytes in sums.items():
            self.charge_bytes(namespace, sign * nbytes)

    def charge_bytes(self, namespace: int, nbytes: int) -> None:
        """As `charge`, for bytes of one namespace."""
        left = self.charged.get(namespace, 0) + nbytes
        if left:
            self.charged[namespace] = left
        else:
            self.charged.pop(namespace, None)
        if self.policy.wants_charges:
            self.policy.charge(namespace, nbytes)

    def _bytes_taken(self) -> int:
        """Bytes of the policy's entries plus bytes charged."""
        ungiven = 0 if self.untouched is None else self.untouched.ungiven_bytes
        return self.bytes_by_state[READY] - ungiven + sum(self.charged.values())

    def count(self, state: State, objects: int, nbytes: int) -> None:
        self.objects_by_state[state] += objects
        self.bytes_by_state[state] += nbytes

    def flush_slabs(self) -> None:
        """Report slabs that changed class, before any slot in them is marked."""
        if self.allocator.assigned:
            self.effects.extend(SlabAssigned(*change) for change in self.allocator.assigned)
            self.allocator.assigned.clear()

    # --- what is being written ------------------------------------------------------------------------------

    def cancel_claim(self, objects: Sequence[Incarnation]) -> None:
        """Undo a claim that was never answered: keys leave the table, slots return to their slabs."""
        self.table.remove(objects)
        self.charge(objects, -1)
        seated = [item for item in objects if hasattr(item, "slab")]
        for item in seated:
            item.state = State.FREE
        self.allocator.free(seated)

    def granted(self, objects: Sequence[Incarnation], live: State, nbytes: int, row: int) -> None:
        """These objects are in the table and have their slots: do the first step of each incarnation."""
        self.count(live, len(objects), nbytes)
        self.objects_by_layout[objects[0].layout_id] += len(objects)  # one grant is of one layout
        self.effects.append(SlotsMarked([item.offset for item in objects], live, row))
        self.undo.add((self._ungrant, (objects, live, nbytes)))

    def _ungrant(self, objects: Sequence[Incarnation], live: State, nbytes: int) -> None:
        """It was never answered. What is left is a claim."""
        self.count(live, -len(objects), -nbytes)
        self.objects_by_layout[objects[0].layout_id] -= len(objects)
        self.effects.append(SlotsMarked([item.offset for item in objects], State.FREE, NO_ROW))

    def doom_cleared(self, objects: Sequence[Incarnation]) -> None:
        """These are or were being written, and are about to change state. Doom those that a clear took out of the index
        and has not processed yet."""
        for clearing in self.clearings:
            taken = clearing.take(objects)
            if taken:
                self.cleared(clearing, taken)

    def change_owner(self, objects: Sequence[Incarnation], state: State, row: int) -> None:
        """A worker with another row holds them now. They stay in `state`."""
        if objects:
            self.touched += len(objects)
            self.effects.append(SlotsMarked([item.offset for item in objects], state, row))

    def publish(self, objects: Sequence[Incarnation], live: State) -> None:
        """Make written objects visible, all in one step."""
        self.move(objects, live, Event.COMMIT)
        self.policy.insert(objects[::-1])  # last to first: a suffix goes before its prefix

    def remove_unfinished(
        self,
        objects: Sequence[Incarnation],
        live: State,
        event: Event,
        reason: Reason,
        row: int,
        session_id: int,
    ) -> None:
        """Take what was being written out of the index: ABORT frees slots, EXPIRE quarantines them. `session_id` is the
        responsible session. The caller has called `doom_cleared` before."""
        if objects:
            self.table.remove(objects)
            self.move(objects, live, event, row)
            if reason is not Reason.NONE:
                self.reasons.note(objects, reason, session_id=session_id)

    # --- what is ready --------------------------------------------------------------------------------------

    def hold(self, objects: Sequence[Incarnation]) -> None:
        """Add one hold to each."""
        self.touched += len(objects)
        fresh = []
        for item in objects:
            if not item.holds:
                fresh.append(item)
            item.holds += 1
        if fresh:
            self.policy.held(fresh)

    def release(self, objects: Sequence[Incarnation], *, read: bool = False) -> None:
        """Take one hold from each. `read`: a session has read them, so temporary ones are dropped once nobody holds
        them."""
        self.touched += len(objects)
        idle, gone, used_up = [], [], []
        backwards = reversed(objects)  # last to first: a suffix goes before its prefix
        for item in backwards:
            holds = item.holds - 1
            if holds < 0:
                for released in objects[length_hint(backwards) + 1 :]:
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
        """The ready object that each (key, generation) names; None if that one is gone."""
        table = self.table.of(namespace)
        found = [(table.get(key), generation) for key, generation in wanted]
        return [
            item if item is not None and item.state is READY and item.generation == generation else None
            for item, generation in found
        ]

    def remove(self, objects: Sequence[Incarnation], reason: Reason) -> None:
        """Take ready objects out of the index. Held slots are freed with the last hold."""
        objects = self._standing(objects)
        if objects:
            self.table.remove(objects)
            self.free_removed(objects, reason)

    def free_removed(
        self,
        objects: Sequence[Incarnation],
        reason: Reason,
        *,
        session_id: int | None = None,
        at_s: float | None = None,
    ) -> None:
        """As `remove`, for objects that have left the table already, at `at_s` by `session_id`."""
        self.policy.remove(objects)
        self.shield.remove(objects)
        loose = [item for item in objects if not item.holds]
        if loose:
            self.move(loose, READY, Event.REMOVE)
        if len(loose) < len(objects):
            self.move([item for item in objects if item.holds], READY, Event.REMOVE_HELD)
        self.reasons.note(objects, reason, session_id=session_id, at_s=at_s)
        self.effects.append(Removed(list(objects), reason))

    def cleared(self, clearing: Clearing, taken: Sequence[Incarnation]) -> None:
        """A clear reaches these, which only its tables had: ready ones are removed, those being written are doomed."""
        cleared, session_id, at_s = clearing.cleared, clearing.session_id, clearing.at_s
        ready = [item for item in taken if item.state is READY]
        if ready:
            cleared.objects += len(ready)
            cleared.nbytes += sum(item.nbytes for item in ready)
            self.free_removed(ready, Reason.CLEARED, session_id=session_id, at_s=at_s)
        if len(ready) == len(taken):
            return
        cleared.doomed += len(taken) - len(ready)
        for live in (State.WRITING, State.LOADING):
            doomed = [item for item in taken if item.state is live]
            if doomed:
                self.move(doomed, live, Event.CLEAR, row=None)
                self.reasons.note(doomed, Reason.CLEARED, session_id=session_id, at_s=at_s)

    # --- what may go ----------------------------------------------------------------------------------------

    def victims(self, nbytes: int, objects_max: int) -> list[Incarnation]:
        """The coldest objects by the policy, about `objects_max` at most; it looks at no more than twice as many.
        Leaves out any that must stay: a policy is a plugin and may be wrong. Objects that tiers do not have yet come
        last."""
        found, all_named = self._named(self.policy.victims, nbytes, objects_max)
        shield = self.shield
        if shield.yields and len(shield):
            # A quota may protect what this uncovers, so that it is not named. Each round asks for all victims again.
            last = self.touched + objects_max // 2
            while all_named and (missing := nbytes - sum(item.nbytes for item in found)) > 0 and self.touched < last:
                if not shield.uncover_for(missing):
                    break
                found, all_named = self._named(self.policy.victims, nbytes, objects_max)
        return found

    def coldest(self, nbytes: int, objects_max: int) -> list[Incarnation]:
        """As `victims`, without objects that a tier is still to get. Changes nothing."""
        return self._named(self.policy.victims, nbytes, objects_max)[0]

    def surplus(self, nbytes: int, objects_max: int) -> list[Incarnation]:
        """As `coldest`, for headroom that nobody needs yet."""
        return self._named(self.policy.surplus, nbytes, objects_max)[0]

    def _named(
        self, ask: Callable[[int], Sequence[Entry]], nbytes: int, objects_max: int
    ) -> tuple[list[Incarnation], bool]:
        """What the policy names, and whether that is everything that may be evicted. A policy counts bytes only, and if
        many small objects come before a large one, naming them all takes long. No object is smaller than the smallest
        slot: so ask for as many bytes as cannot be too many objects, and ask again if larger ones came."""
        least = self.allocator.slot_bytes_least
        wanted = covered = looked_at = 0
        while True:
            wanted = min(nbytes, covered + (objects_max - looked_at) * least)
            named = ask(wanted)
            self.touched += len(named)
            looked_at += len(named)
            found = [item for item in named if isinstance(item, Incarnation) and item.state is READY and not item.holds]
            covered = sum(item.nbytes for item in found)
            if covered < wanted:  # the rest of an adopted pool is not made yet: asking again gets it
                return found, self.untouched is None
            if wanted >= nbytes or looked_at > objects_max // 2:
                return found, False

    @property
    def may_make_room(self) -> bool:
        """Whether anything may be evicted, or was cleared and is not freed yet."""
        return bool(
            self.clearings
            or self.untouched is not None
            or self.coldest(1, 1)
            or (self.shield.yields and len(self.shield))
        )

    def evict(self, victims: Sequence[Incarnation]) -> None:
        """Make room. The victims are ready, and nobody holds them."""
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
        """Those that are in the table. The others were cleared and nobody holds them: free them now, before their
        step."""
        if not self.clearings:
            return objects
        for clearing in self.clearings:
            taken = clearing.take(objects)
            if taken:
                self.cleared(clearing, taken)
                objects = [item for item in objects if item.state is READY]
        return objects

    # --- tenants --------------------------------------------------------------------------------------------

    def keep_limit(self, namespace: int, slot_bytes: int, slots: int, objects_max: int) -> int:
        """Evict from a namespace's owner what stands in the way of so many slots, which are charged to it already.
        Returns how many of them fit below its limit. Nothing is evicted for slots that will not fit anyway, unless more
        than `objects_max` objects must go: then so many are evicted, and the caller asks again."""
        over = self.tenancy.over_limit(namespace)
        own = self._may_go(self.tenancy.victims_of(namespace, over), objects_max)
        missing = over - sum(item.nbytes for item in own)
        if missing > 0 and self.shield.yields and self.shield.uncover_for(missing, namespace):
            own = self._may_go(self.tenancy.victims_of(namespace, over), objects_max)
            missing = over - sum(item.nbytes for item in own)
        refused = min(slots, max(0, -(-missing // slot_bytes)))
        if len(own) < objects_max:
            own = _first(own, over - refused * slot_bytes)
        if own:
            self.evict(own)
        return slots - refused

    def step_tenants(self, objects_max: int) -> None:
        """Do one bounded step of moving objects between tenants, and of evicting what is over a limit."""
        mean = max(1, self.allocator.used_bytes // max(1, self.objects()))

        def evict(named: Sequence[Entry]) -> int:
            going = self._may_go(named, objects_max)
            if going:
                self.evict(going)
            return len(going)

        self.touched += self.tenancy.step(objects_max * mean, evict)

    @property
    def tenants_wait(self) -> bool:
        """Whether `step_tenants` has something to do now. False while an adopted pool is being made."""
        return self.tenancy.working and self.untouched is None

    def _may_go(self, named: Sequence[Entry], objects_max: int) -> list[Incarnation]:
        self.touched += len(named)
        found = [item for item in named if isinstance(item, Incarnation) and item.state is READY and not item.holds]
        return found[:objects_max]

    def position(self, entry: Entry) -> int:
        """For `TenantWalk`: in a large table, by the shard of the key first."""
        key = entry.key
        return (key[0] ^ key[31]) << 8 | (key[1] ^ key[30])

    def entries_from(self, namespaces: frozenset[int], low: int, objects_max: int) -> tuple[list[Entry], int]:
        """For `TenantWalk`: ready objects, also those that clears have removed from the table and not freed yet."""
        tables = [self.table.of(namespace) for namespace in namespaces]
        for clearing in self.clearings:
            tables += [clearing.tables[namespace] for namespace in namespaces if namespace in clearing.tables]
        shard = low >> 8
        counts = [len(table.shards[shard & table.mask]) for table in tables]
        if any(table.mask for table in tables):  # a part of one shard
            high = min(low + max(1, 256 * objects_max // max(1, sum(counts))), shard + 1 << 8)
        else:  # single dictionaries: as many shards as make a step
            high = min(low + max(1, POSITIONS * objects_max // max(1, sum(counts))), POSITIONS)
        found: list[Entry] = [
            item
            for table in tables
            for item in table.shards[shard & table.mask].values()
            if item.state is READY and low <= self.position(item) < high
        ]
        self.touched += sum(counts) // 8  # looking at one costs an eighth of moving it
        return found, high

    # --- telling --------------------------------------------------------------------------------------------

    def lost(self, namespace: int, key: bytes) -> Loss | None:
        """How a key that is not in the table was lost, if it is remembered."""
        for clearing in reversed(self.clearings):
            if clearing.find(namespace, key) is not None:
                return Loss(namespace, Reason.CLEARED, clearing.at_s, clearing.session_id)
        return self.reasons.find(namespace, key)

    def _policy_failed(self, method: str, error: BaseException) -> None:
        self.policy_faults += 1
        self.policy_error = f"{method}: {error!r}"[:ERROR_EXCERPT_CHARS_MAX]
        self.effects.append(PolicyFailed(method, error))

    def _policy_noted(self, text: str) -> None:
        self.effects.append(PolicyNoted(text))

    def objects(self) -> int:
        """Number of incarnations in slots, in any state."""
        return sum(self.objects_by_state)


def _first(objects: list[Incarnation], nbytes: int) -> list[Incarnation]:
    """The first objects that together have so many bytes."""
    for at, item in enumerate(objects):
        if nbytes <= 0:
            return objects[:at]
        nbytes -= item.nbytes
    return objects
