"""A plain model of the kernel, and a pool made of a dictionary: what every test machine compares with.

The model knows nothing of slabs, lists or heaps. It keeps what a reader of the design would write on paper, takes
the kernel's choice of slots and victims as given, and checks that each choice was allowed. Its memory is scribbled
on by everyone who may write, at every step; whoever may read looks whether the bytes are still the right ones.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from lmcache_core.kernel import Kernel, KernelConfig, LeaseKind, Reason, Settled, State
from lmcache_core.kernel.effects import Evicted, LeaseExpired, Removed, SlotsMarked
from lmcache_core.kernel.leases import LEASE_BYTES, POSITION_BYTES
from lmcache_core.kernel.memory import MemoryAccount, MemorySort
from lmcache_core.policies.lru import LruEviction

MIB = 1 << 20
SIZES = {1: 256 << 10, 2: 300 << 10, 3: MIB + 4096}  # layout → bytes; the last takes two units of 1 MiB
UIDS = {1: 1000, 2: 1000, 3: 2000}
WRITE_TTL, READ_TTL, PROMISE_TTL = 10.0, 8.0, 5.0


def key(number: int) -> bytes:
    return number.to_bytes(32, "little")


@dataclass(eq=False)
class Thing:
    """One incarnation on paper."""

    where: tuple[int, bytes]  # namespace, key
    offset: int
    nbytes: int
    layout: int
    state: State
    holds: int = 0
    temporary: bool = False

    @property
    def content(self) -> tuple[str, int]:
        return ("written", id(self))


@dataclass(eq=False)
class Permit:
    """One lease on paper."""

    kind: LeaseKind
    owner: int
    namespace: int
    deadline: float
    ttl: float
    things: list[Thing | None] = field(default_factory=list)
    answers: list[int] = field(default_factory=list)
    expired: bool = False

    def open_at(self) -> list[int]:
        return [at for at, thing in enumerate(self.things) if thing is not None]


UNCAPPED = dict.fromkeys(
    (
        "promised_fraction_max",
        "promised_fraction_per_session_max",
        "pinned_fraction_per_holder_max",
        "pinned_fraction_per_session_max",
        "read_fraction_max",
        "read_fraction_per_session_max",
    ),
    1.0,
)


class Paper:
    """A kernel, and what a reader of the design would write on paper about it."""

    def __init__(self, pool_mib: int = 6, **config: Any) -> None:
        settings: dict[str, Any] = {
            "pool_bytes": pool_mib * MIB,
            "data_offset": 4 * MIB,
            "slab_bytes": MIB,
            "write_ttl_s": WRITE_TTL,
            "read_ttl_s": READ_TTL,
            "promise_ttl_s": PROMISE_TTL,
            **UNCAPPED,
            **config,
        }
        whole = pool_mib * MIB
        self.pool_cap = int(settings.get("quarantine_fraction_max", 0.25) * whole)
        self.uid_cap = int(settings.get("quarantine_fraction_per_uid_max", 0.125) * whole)
        self.kernel = Kernel(KernelConfig(**settings), LruEviction(), epoch=3)
        self.kernel.add_memory(whole)
        for layout, nbytes in SIZES.items():
            self.kernel.register_layout(layout, nbytes)
        self.now = 100.0
        self.index: dict[tuple[int, bytes], Thing] = {}
        self.slots: dict[int, Thing] = {}  # all that is not free, by offset
        self.marks: dict[int, tuple[State, int]] = {}  # SlotsMarked, replayed
        self.permits: dict[int, Permit] = {}
        self.pins: dict[Thing, float] = {}
        # Under way: answer, what is left, objects, and their bytes and what was doomed.
        self.clears: list[tuple[Any, set[Thing], int, tuple[int, int]]] = []
        self.preparations: list[Any] = []  # stores that wait for room: the kernel's, its arguments, what it holds
        self.memory: dict[int, Any] = {}
        self.sessions: dict[int, str] = {0: "open"}
        self.expired_told: list[int] = []
        self.next_session = 1

    # --- what follows from time and effects -----------------------------------------------------------------

    def uid(self, session: int) -> int:
        return -1 if session == 0 else UIDS[(session - 1) % 3 + 1]

    def due(self) -> None:
        """Do on paper what time alone does."""
        for permit in list(self.permits.values()):
            if permit.expired or not permit.open_at() or permit.deadline > self.now:
                continue
            permit.expired = True
            if permit.kind is LeaseKind.PROMISE:
                self.let_go(permit, permit.open_at(), Settled.FINISHED)
            elif permit.kind is LeaseKind.WRITE:
                for at in permit.open_at():
                    self.out_of_index(permit.things[at], State.QUARANTINED)
        for thing, until in list(self.pins.items()):
            if until <= self.now:
                self.unpin_thing(thing)

    def out_of_index(self, thing: Thing | None, state: State) -> None:
        assert thing is not None
        if self.index.get(thing.where) is thing:
            del self.index[thing.where]
        thing.state = state
        if state is State.FREE:
            del self.slots[thing.offset]

    def release(self, thing: Thing, *, read: bool = False) -> None:
        thing.holds -= 1
        assert thing.holds >= 0
        if not thing.holds and (thing.state is State.DOOMED or (read and thing.temporary)):
            self.out_of_index(thing, State.FREE)

    def take_out(self, thing: Thing) -> None:
        """A ready object leaves the index, by clear or drop."""
        self.out_of_index(thing, State.DOOMED if thing.holds else State.FREE)
        if thing in self.pins:
            self.unpin_thing(thing)

    def unpin_thing(self, thing: Thing) -> None:
        del self.pins[thing]
        self.release(thing)

    def let_go(self, permit: Permit, positions: Sequence[int], answer: Settled, *, read: bool = False) -> None:
        for at in positions:
            thing = permit.things[at]
            if thing is None:
                continue
            permit.things[at] = None
            permit.answers[at] = answer
            if permit.kind is not LeaseKind.WRITE:
                self.release(thing, read=read)
            elif thing.state is State.QUARANTINED:
                if answer is Settled.COMMITTED:
                    permit.answers[at] = Settled.CLEARED
                self.out_of_index(thing, State.FREE)
            elif answer is Settled.COMMITTED:
                thing.state = State.READY
                self.memory[thing.offset] = thing.content
            else:
                self.out_of_index(thing, State.FREE)

    def drain(self) -> tuple[list[Thing], list[Any]]:
        """Replay the marks; evict on paper what the kernel evicted, if it was allowed to."""
        evicted, effects = [], self.kernel.take_effects()
        for effect in effects:
            if isinstance(effect, SlotsMarked):
                for offset in effect.offsets:
                    if effect.state is State.FREE:
                        assert self.marks.pop(offset)[0] is not State.FREE
                        continue
                    row = self.marks[offset][1] if effect.row is None else effect.row
                    self.marks[offset] = (effect.state, row)
                    if effect.state is State.QUARANTINED:
                        self.doomed_by_clear(self.slots[offset])
            elif isinstance(effect, Evicted):
                for item in effect.objects:
                    thing = self.index[item.namespace, item.key]
                    assert thing.offset == item.offset, "what was cleared is not evicted as well"
                    assert thing.state is State.READY, "only what is ready is evicted"
                    assert not thing.holds, "nothing that is held is evicted"
                    self.out_of_index(thing, State.FREE)
                    evicted.append(thing)
            elif isinstance(effect, LeaseExpired):
                self.expired_told.append(effect.lease_id)
            elif isinstance(effect, Removed):
                assert len({(item.namespace, item.key) for item in effect.objects}) == len(effect.objects)
                if effect.reason is Reason.CLEARED:
                    for item in effect.objects:
                        self.freed_by_clear(self.slots[item.offset])
        return evicted, effects

    def freed_by_clear(self, thing: Thing) -> None:
        """What a clear took out of the index leaves its slot now, or with its last hold."""
        left = next(left for _, left, _, _ in self.clears if thing in left)
        left.discard(thing)
        self.take_out(thing)

    def doomed_by_clear(self, thing: Thing) -> None:
        """What a clear took out of the index while it was written or loaded waits for its writer now."""
        for _, left, _, _ in self.clears:
            left.discard(thing)
        thing.state = State.QUARANTINED

    def cleared(self) -> list[Thing]:
        """Out of the index, and the clear has not come to them yet."""
        return [thing for _, left, _, _ in self.clears for thing in left]

    def overdue(self) -> dict[int, int]:
        """Bytes in quarantine past their deadline, by session."""
        sums: dict[int, int] = {}
        for permit in self.permits.values():
            if permit.kind is LeaseKind.WRITE and permit.expired:
                nbytes = sum(thing.nbytes for thing in permit.things if thing is not None)
                if nbytes:
                    sums[permit.owner] = sums.get(permit.owner, 0) + nbytes
        return sums

    def is_refused(self, session: int) -> bool:
        overdue, uid = self.overdue(), self.uid(session)
        of_uid = {owner: nbytes for owner, nbytes in overdue.items() if self.uid(owner) == uid}
        left_behind = sum(nbytes for owner, nbytes in of_uid.items() if self.sessions[owner] == "lost")
        at_cap = sum(of_uid.values()) >= self.uid_cap or sum(overdue.values()) >= self.pool_cap
        return left_behind >= self.uid_cap or (at_cap and session in of_uid)

    def say_who_waits_no_longer(self) -> None:
        for each in [each for each in self.preparations if each[0].cancelled]:
            self.preparations.remove(each)
            for thing in each[-1]:
                self.release(thing)

    # --- invariants -----------------------------------------------------------------------------------------

    def check_memory(self) -> None:
        """What the leases of a session cost is charged to it, and nothing else is."""
        book, costs = self.kernel.leases, Counter[MemoryAccount]()
        for lease in book.by_id.values():
            assert len(lease.entries) == len(lease.answers) <= lease.positions
            costs[lease.session.memory] += LEASE_BYTES + POSITION_BYTES * len(lease.entries)
        for lease in [*book.by_id.values(), *book.settled.values()]:
            assert lease.session.memory.nbytes == costs[lease.session.memory]
        of_clients = sum(nbytes for account, nbytes in costs.items() if account.wholes)
        assert self.kernel.memory.all[MemorySort.LEASES].nbytes == of_clients

    def check(self) -> None:
        kernel, slots = self.kernel, self.slots
        self.say_who_waits_no_longer()
        for permit in self.permits.values():  # everyone who may write does, all the time
            if permit.kind is LeaseKind.WRITE:
                for thing in permit.things:
                    if thing is not None:
                        self.memory[thing.offset] = ("scribble", id(permit))
        for thing in slots.values():  # and everyone who may read finds the right bytes
            if thing.state in (State.READY, State.DOOMED):
                assert self.memory[thing.offset] == thing.content, f"{thing} was overwritten"

        spans = sorted((thing.offset, thing.offset + thing.nbytes) for thing in slots.values())
        for (_, end), (start, _) in pairwise(spans):
            assert end <= start, "two slots overlap"
        if spans:
            assert spans[0][0] >= 4 * MIB
            assert spans[-1][1] <= 4 * MIB + kernel.usage().pool_bytes

        assert {offset: mark[0] for offset, mark in self.marks.items()} == {
            offset: thing.state for offset, thing in slots.items()
        }, "the marks in the pool are not what the kernel thinks"
        for permit in self.permits.values():
            if permit.kind is LeaseKind.WRITE:
                for thing in permit.things:
                    if thing is not None and permit.owner != 0:
                        assert self.marks[thing.offset][1] == permit.owner % 100, "the mark names the writer"

        usage = kernel.usage()
        assert usage.used_bytes == sum(thing.nbytes for thing in slots.values())
        for state in State:
            if state is not State.FREE:
                of_state = [thing for thing in slots.values() if thing.state is state]
                assert usage.objects_by_state[state.name.lower()] == len(of_state)
                assert usage.bytes_by_state[state.name.lower()] == sum(thing.nbytes for thing in of_state)
        for kind in LeaseKind:
            of_kind = [p for p in self.permits.values() if p.kind is kind and p.open_at()]
            assert usage.leases_by_kind[kind.name.lower()] == len(of_kind)
        for sort, kinds in (("promised_bytes", LeaseKind.PROMISE), ("read_bytes", LeaseKind.READ)):
            by_holder: dict[str, set[Thing]] = {}
            for permit in self.permits.values():
                if permit.kind is kinds and permit.owner:
                    things = {thing for thing in permit.things if thing is not None}
                    by_holder.setdefault(f"uid {self.uid(permit.owner)}", set()).update(things)
            if kinds is LeaseKind.PROMISE:
                for _, session, _, _, _, held in self.preparations:
                    if session:
                        by_holder.setdefault(f"uid {self.uid(session)}", set()).update(held)
            expected = {name: sum(thing.nbytes for thing in things) for name, things in by_holder.items() if things}
            told = {name: getattr(each, sort) for name, each in usage.holders.items() if getattr(each, sort)}
            assert told == expected, f"{sort}: an object counts once, however often it is held"
        self.check_memory()
        assert sum(each.pinned_bytes for each in usage.holders.values()) == usage.pinned_bytes
        assert usage.pinned_bytes == sum(thing.nbytes for thing in self.pins)
        assert usage.quarantine_by_session == self.overdue()
        of_holder: dict[str, int] = {}
        for session, nbytes in self.overdue().items():
            name = f"uid {self.uid(session)}" if session else "the server"
            of_holder[name] = of_holder.get(name, 0) + nbytes
        assert usage.quarantine_by_holder == of_holder
        in_classes = sum(each.slots_used * each.slot_bytes for each in usage.classes)
        assert in_classes + usage.emptying_bytes == usage.used_bytes
        assert kernel.working == bool(self.preparations)
        assert kernel.working or not usage.emptying_bytes, "what nobody waits for is not being emptied"
        assert 0.0 <= usage.fragmentation <= 1.0

        while self.clears and self.clears[0][0].done:
            answer, left, objects, expected = self.clears.pop(0)
            assert not left, "done means that all of it is gone"
            assert (answer.cleared.objects, answer.cleared.nbytes, answer.cleared.doomed) == (objects, *expected)
        for thing in self.cleared():
            there = self.index.get(thing.where)
            assert there is not thing, "what was cleared is not found"
            assert there is None, "the former incarnation of a key leaves before the next one comes"
        assert kernel.clearing == bool(self.clears)
        assert not any(answer.done for answer, _, _, _ in self.clears), "clears are done in their order"

        evictable = {thing.offset for thing in slots.values() if thing.state is State.READY and not thing.holds}
        named = [item.offset for item in kernel.residents.policy.victims(1 << 60)]
        assert len(named) == len(set(named))
        assert set(named) == evictable, "the policy orders exactly what may go"
        deadline = kernel.next_deadline()
        waiting = [p.deadline for p in self.permits.values() if p.open_at() and not p.expired] + list(
            self.pins.values()
        )
        assert not waiting or (deadline is not None and deadline <= min(waiting))
