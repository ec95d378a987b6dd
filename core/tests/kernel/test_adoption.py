"""A kernel that goes on with what the one before left, in any order of calls, against the model on paper."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule
from kernel_model import World
from kernel_paper import MIB, PROMISE_TTL, READ_TTL, SIZES, UNCAPPED, WRITE_TTL, Thing, key
from test_machine import PICK, KernelMachine

from lmcache_core.kernel import Kernel, KernelConfig, State
from lmcache_core.kernel.adoption import AdoptingPolicy, Found
from lmcache_core.kernel.allocator import Slab
from lmcache_core.kernel.states import NO_ROW
from lmcache_core.policies.lru import LruEviction


class PaperPool:
    """What a scan of the pool gives, made from the model."""

    def __init__(self, slabs: Sequence[Slab], kept: list[Thing], waits: list[tuple[int, int, int]]) -> None:
        self._slabs = slabs
        self._kept = {thing.offset: thing for thing in kept}
        self._waits = waits
        self.objects = len(kept)
        self.nbytes = sum(thing.nbytes for thing in kept)

    @property
    def pending(self) -> int:
        return len(self._kept)

    def _give(self, things: list[Thing]) -> list[Found]:
        for thing in things:
            del self._kept[thing.offset]
        return [(thing.where[1], thing.where[0], thing.offset, thing.layout, None, 0) for thing in things]

    def touch(self, namespace: int, keys: Sequence[bytes], /) -> list[Found]:
        wanted = {(namespace, each) for each in keys}
        return self._give([thing for thing in self._kept.values() if thing.where in wanted])

    def take(self, most: int, /) -> list[Found]:
        return self._give(list(self._kept.values())[:most])

    def slab(self, offset: int, most: int, /) -> list[Found]:
        whole = next(slab for slab in self._slabs if slab.start == offset)
        return self._give([thing for at, thing in self._kept.items() if whole.start <= at < whole.end][:most])

    def slabs(self) -> list[tuple[int, int, int, int, int, int, list[int]]]:
        rows = []
        waiting = {offset for offset, _, _ in self._waits}
        for slab in self._slabs:
            slots = range(slab.start, slab.end, slab.slot_bytes)
            used = [offset for offset in slots if offset in self._kept or offset in waiting]
            if used:
                fresh = max(used) + slab.slot_bytes
                free = [offset for offset in slots if offset < fresh and offset not in used]
                objects = sum(offset in self._kept for offset in used)
                rows.append((slab.start, slab.nbytes, slab.slot_bytes, len(used), objects, fresh, free))
        return rows

    def waiting(self) -> list[tuple[int, int, int]]:
        return self._waits

    def layout_of(self, namespace: int, /) -> int:
        return next((thing.layout for thing in self._kept.values() if thing.where[0] == namespace), 0)


class RestartedWorld(World):
    """A model whose kernel can be exchanged for its successor."""

    def __init__(self, **config: object) -> None:
        super().__init__(**config)
        self._config = config
        self._epoch = 3
        self.written: dict[int, list[Thing]] = {}  # by the row of a former worker
        self.read: list[Thing] = []

    @property
    def rows(self) -> set[int]:
        former = self.kernel.adoption._former
        return set() if former is None else set(former.rows)

    def restart(self, lives: int) -> None:
        """The server dies, and of its workers those whose bit in `lives` is not set."""
        old = self.kernel.allocator
        slabs = list(dict.fromkeys(slab for slab in old.owners if slab is not None and slab.used))
        rows = {s % 100 for s in self.sessions if s and lives >> s % 8 & 1}
        rows |= {row for row in self.rows if lives >> row % 8 & 1}
        waits: list[tuple[int, int, int]] = []
        kept: list[Thing] = []
        self.written, self.read = {}, []
        for offset, thing in list(self.slots.items()):
            row = self.marks[offset][1]
            if thing.state is State.READY and self.index.get(thing.where) is thing:
                thing.holds, thing.temporary = 0, False
                kept.append(thing)
            elif thing.state is State.DOOMED and rows:
                self.read.append(thing)
                waits.append((offset, State.DOOMED, NO_ROW))
            elif thing.state in (State.WRITING, State.LOADING, State.QUARANTINED) and row in rows:
                self.written.setdefault(row, []).append(thing)
                self.index.pop(thing.where, None)
                thing.state = State.QUARANTINED
                self.marks[offset] = (State.QUARANTINED, row)
                waits.append((offset, State.QUARANTINED, row))
            else:
                self.out_of_index(thing, State.FREE)
                del self.marks[offset]
        self.permits.clear()
        self.pins.clear()
        self.clears.clear()
        self.preparations.clear()
        self.sessions = {0: "open"}
        self._epoch += 1
        sizes = {"pool_bytes": 6 * MIB, "data_offset": 4 * MIB, "slab_bytes": MIB}
        times = {"write_ttl_s": WRITE_TTL, "read_ttl_s": READ_TTL, "promise_ttl_s": PROMISE_TTL}
        self.kernel = Kernel(KernelConfig(**{**sizes, **times, **UNCAPPED, **self._config}), LruEviction(), self._epoch)
        for layout, nbytes in SIZES.items():
            self.kernel.register_layout(layout, nbytes)
        self.kernel.adoption.begin(PaperPool(slabs, kept, waits), rows)
        self.kernel.add_memory(6 * MIB)
        self.join()
        self.check()

    def gone(self, row: int) -> None:
        self.kernel.adoption.former_gone(row)
        self.drain()
        free = self.written.pop(row, [])
        if not self.rows:
            free, self.read = free + self.read, []
        for thing in free:
            thing.state = State.FREE
            del self.slots[thing.offset]
        self.check()

    def make(self, objects: int) -> None:
        self.kernel.adoption.step(objects)
        self.drain()
        self.check()

    def free_cleared(self) -> None:
        if not self.kernel.adoption.under_way:
            return super().free_cleared()
        self.due()
        assert self.kernel.free_cleared(self.now, 3) <= 6  # some freed, some made
        self.drain()
        return self.check()

    def check(self) -> None:
        for things in self.written.values():  # a former worker writes on, too
            for thing in things:
                self.memory[thing.offset] = ("scribble of a former worker", id(thing))
        if not self.kernel.adoption.under_way:
            return super().check()
        self.say_who_waits_no_longer()  # what those held may go
        # To name all victims would be to make all objects: then there would be nothing to see.
        policy = self.kernel.residents.policy
        assert isinstance(policy, AdoptingPolicy)
        evictable = [t.offset for t in self.slots.values() if t.state is State.READY and not t.holds]
        named = self._all_victims
        policy.victims = lambda nbytes: named(evictable)  # type: ignore[method-assign]
        try:
            return super().check()
        finally:
            del policy.victims

    def _all_victims(self, offsets: list[int]) -> object:
        return [type("Named", (), {"offset": offset})() for offset in offsets]


class RestartMachine(KernelMachine):
    """As the machine of the kernel, and the server may die at any time."""

    world_type = RestartedWorld

    @rule(lives=st.integers(0, 255))
    def restart(self, lives: int) -> None:
        self.world.restart(lives)

    @precondition(lambda self: self.world.kernel.adoption.under_way)
    @rule(objects=st.integers(1, 4))
    def make(self, objects: int) -> None:
        self.world.make(objects)

    @precondition(lambda self: self.world.rows)
    @rule(pick=PICK)
    def a_former_worker_has_gone(self, pick: int) -> None:
        rows = sorted(self.world.rows)
        self.world.gone(rows[pick % len(rows)])


TestRestartMachine = RestartMachine.TestCase
TestRestartMachine.settings = settings(
    max_examples=120,
    stateful_step_count=50,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)


def test_what_was_used_since_the_restart_outlives_what_was_not() -> None:
    world = RestartedWorld()
    session = world.join()
    for number in range(12):
        world.settle(session, world.store(session, 1, 1, [number]), None, "commit")
    world.restart(0)
    session = next(s for s in world.sessions if s)
    kernel = world.kernel
    for number in (3, 0):  # the oldest of all is used last
        lease = kernel.prepare_retrieve(session, 1, [key(number)], world.now).lease_id
        kernel.finish_read(session, lease, world.now)
    assert kernel.adoption.under_way
    while kernel.adoption.step(2):
        pass
    order = [item.key for item in kernel.residents.policy.victims(1 << 40)]
    assert order[-2:] == [key(3), key(0)]
    assert len(order) == 12
    assert order[:-2] == [key(number) for number in range(12) if number not in (0, 3)]


def test_room_is_made_of_what_nobody_asked_for() -> None:
    world = RestartedWorld()
    session = world.join()
    for first in range(0, 24, 8):
        world.settle(session, world.store(session, 1, 1, list(range(first, first + 8))), None, "commit")
    world.restart(0)
    session = next(s for s in world.sessions if s)
    world.lookup(session, 1, list(range(6)), hold=False, prefix=False)
    world.settle(session, world.store(session, 1, 1, list(range(100, 110))), None, "commit")
    held = [(1, key(number)) in world.index for number in range(24)]
    assert all(held[:6])
    assert sum(held) == 24 - 10


def test_whoever_asks_what_is_kept_sees_what_was_adopted_a_moment_ago() -> None:
    world = RestartedWorld()
    session = world.join()
    world.settle(session, world.store(session, 1, 1, [1, 2, 3]), None, "commit")
    world.restart(0)
    assert [item.key for item in world.kernel.kept(1, [key(2), key(4)])] == [key(2)]
    assert world.kernel.adoption.under_way, "the others are not made for it"
