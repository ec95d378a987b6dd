"""Doubles of our own interfaces: an L1 over one piece of memory, an adapter that does what a script says, a loop."""

from __future__ import annotations

import hashlib
import itertools
import mmap
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import pytest

from lmcache_core.clock import Clock
from lmcache_core.errors import TierError
from lmcache_core.limits import PAGE_BYTES
from lmcache_core.policies.contracts import PrefetchPolicy
from lmcache_core.policies.prefetch import DefaultPrefetch
from lmcache_core.policies.store import DefaultStore
from lmcache_core.pool.layout import Layout
from lmcache_core.protocol.requests import LookupOptions
from lmcache_core.tiers.contract import (
    AdapterContext,
    Capabilities,
    L2Adapter,
    LoadItem,
    Outcome,
    Result,
    ScanEntry,
    ScanPage,
    StoreItem,
    Usage,
)
from lmcache_core.tiers.flow.jobs import Job, TierLookup
from lmcache_core.tiers.l1 import CommittedObject, LoadGrant, Loading, LoadWait, Named, Slot, StorePin, TierReason
from lmcache_core.tiers.tier.lanes import WAITED_FOR, Call, Priority
from lmcache_core.tiers.tier.tier import Tier, TierConfig
from lmcache_core.tiers.tiering import Tiering, TieringConfig

SAFETY_S = 60.0  # a net under tests that wait for a condition, never a measure
NAMESPACE = 7
LAYOUT = Layout("uint8", (5000,))  # no multiple of a page, so that tails are exercised


class FunctionCall(Call):
    """A call of a function; `told` notes its end, and that it is late."""

    def __init__(
        self,
        function: Callable[[], object] = lambda: None,
        deadline: float = float("inf"),
        priority: Priority = WAITED_FOR,
        told: Callable[[str], None] = lambda how: None,
    ) -> None:
        super().__init__(deadline, priority)
        self._function = function
        self._told = told

    def work(self) -> object:
        return self._function()

    def ended(self) -> None:
        self._told("ended")

    def late(self) -> None:
        self._told("late")


class MemoryWait:
    """A load that waits for slots."""

    def __init__(self, answer: Callable[[], None]) -> None:
        self.answer = answer
        self.cancelled = False

    def cancel(self) -> None:
        assert not self.cancelled
        self.cancelled = True


class MemoryL1:
    """An L1 that checks every promise of the interface: who holds what, and that each is settled once."""

    def __init__(self, slots: int = 64) -> None:
        self.slot_bytes = 2 * PAGE_BYTES
        self.memory = memoryview(mmap.mmap(-1, slots * self.slot_bytes))
        self.free = list(range(slots))
        self.ready: dict[tuple[int, bytes], int] = {}
        self.generations: dict[tuple[int, bytes], int] = {}  # of what is ready
        self.temporary: set[tuple[int, bytes]] = set()
        self.loading: dict[tuple[int, bytes], int] = {}
        self.quarantined: set[int] = set()
        self.load_deadlines: dict[int, float] = {}  # of leases that have not expired
        self.shielded: dict[tuple[int, bytes, int], None] = {}  # namespace, key, generation
        self.room = 0  # below a watermark, which this L1 does not have
        self.evicts = True
        self.let_go: list[int] = []  # how many of them at a time
        self.holds: dict[int, dict[int, int]] = {}  # read lease → position → slot
        self.loads: dict[int, dict[int, tuple[tuple[int, bytes], int]]] = {}
        self.loading_as: dict[int, int] = {}  # load lease → generation
        self.checksums: dict[tuple[int, bytes], int | None] = {}  # as it was told by who wrote it
        self.adopted = False  # whether what it has is a former server's
        self.gone_while_held: set[int] = set()
        self.aborted: Counter[str] = Counter()
        self.next_lease = 1
        self.generation = 0
        self.makes_wait = False  # loads wait for slots until `make_room`
        self.waits: list[MemoryWait] = []

    # --- as workers do ------------------------------------------------------------------------------------
    def put(
        self, key: bytes, content: bytes, namespace: int = NAMESPACE, checksum: int | None = None
    ) -> CommittedObject:
        slot = self.free.pop(0)
        self.memory[slot * self.slot_bytes : slot * self.slot_bytes + len(content)] = content
        self.ready[namespace, key] = slot
        self.generations[namespace, key] = self.next_generation()
        self.checksums[namespace, key] = checksum
        return CommittedObject(key, namespace, 1, len(content), self.generations[namespace, key])

    def next_generation(self) -> int:
        self.generation += 1
        return self.generation

    def get(self, key: bytes, namespace: int = NAMESPACE) -> bytes | None:
        slot = self.ready.get((namespace, key))
        if slot is None:
            return None
        return bytes(self.memory[slot * self.slot_bytes : slot * self.slot_bytes + LAYOUT.nbytes])

    def evict(self, key: bytes, namespace: int = NAMESPACE) -> None:
        slot = self.ready.pop((namespace, key))
        self.shielded.pop((namespace, key, self.generations[namespace, key]), None)
        self.temporary.discard((namespace, key))
        if any(slot in positions.values() for positions in self.holds.values()):
            self.gone_while_held.add(slot)
        else:
            self.free.append(slot)

    @property
    def held(self) -> int:
        return sum(map(len, self.holds.values())) + sum(map(len, self.loads.values()))

    # --- the interface ------------------------------------------------------------------------------------
    def slot_of(self, namespace: int, named: Named) -> int | None:
        key, generation = named
        same = self.generations.get((namespace, key)) == generation
        return self.ready.get((namespace, key)) if same else None

    def leading_gone(self, namespace: int, wanted: Iterable[Named]) -> int:
        return sum(1 for _ in itertools.takewhile(lambda named: self.slot_of(namespace, named) is None, wanted))

    def shield(self, namespace: int, wanted: Sequence[Named]) -> None:
        self.shielded.update(
            {(namespace, *named): None for named in wanted if self.slot_of(namespace, named) is not None}
        )

    def unshield(self, namespace: int, wanted: Sequence[Named]) -> None:
        for named in wanted:
            self.shielded.pop((namespace, *named), None)

    def unshield_some(self, objects_max: int) -> int:
        oldest = list(itertools.islice(self.shielded, objects_max))
        for each in oldest:
            del self.shielded[each]
        if oldest:
            self.let_go.append(len(oldest))
        return len(oldest)

    def pin_for_store(self, namespace: int, wanted: Sequence[Named]) -> StorePin:
        lease, self.next_lease = self.next_lease, self.next_lease + 1
        slots = [self.slot_of(namespace, named) for named in wanted]
        self.holds[lease] = {i: slot for i, slot in enumerate(slots) if slot is not None}
        return StorePin(
            lease,
            [
                None
                if slot is None
                else Slot(slot * self.slot_bytes, 1, self.checksums.get((namespace, key)), self.adopted)
                for slot, (key, _) in zip(slots, wanted, strict=True)
            ],
        )

    def finish(self, lease: int, positions: Sequence[int]) -> None:
        for position in positions:
            slot = self.holds[lease].pop(position)
            still = any(slot in held.values() for held in self.holds.values())
            if slot in self.gone_while_held and not still:
                self.gone_while_held.discard(slot)
                self.free.append(slot)

    def drop(self, namespace: int, wanted: Sequence[Named]) -> None:
        for named in wanted:
            if self.slot_of(namespace, named) is not None:
                self.evict(named[0], namespace)

    def room_for(self, layout_id: int) -> int:
        return self.room

    def begin_load(
        self,
        namespace: int,
        layout_id: int,
        keys: Sequence[bytes],
        deadline: float,
        granted: Callable[[Loading], None],
    ) -> Loading | LoadWait:
        if self.makes_wait:
            wait = MemoryWait(lambda: granted(self.grant_load(namespace, keys, deadline)))
            self.waits.append(wait)
            return wait
        return self.grant_load(namespace, keys, deadline)

    def make_room(self) -> None:
        """Answer the loads that wait for slots."""
        waits, self.waits = self.waits, []
        for wait in waits:
            if not wait.cancelled:
                wait.answer()

    def grant_load(self, namespace: int, keys: Sequence[bytes], deadline: float) -> Loading:
        lease, self.next_lease = self.next_lease, self.next_lease + 1
        self.load_deadlines[lease] = deadline
        grants, offsets = [], []
        self.loads[lease] = {}
        generation = self.next_generation()
        for position, key in enumerate(keys):
            slot = 0
            if (namespace, key) in self.ready:
                grants.append(LoadGrant.EXISTS)
            elif (namespace, key) in self.loading:
                grants.append(LoadGrant.BUSY)
            elif not self.free:
                grants.append(LoadGrant.FULL)
            else:
                slot = self.free.pop(0)
                self.loading[namespace, key] = slot
                self.loads[lease][position] = ((namespace, key), slot)
                self.loading_as[lease] = generation
                grants.append(LoadGrant.GRANTED)
            offsets.append(slot * self.slot_bytes)
        return Loading(lease, grants, offsets, generation)

    def commit_load(
        self, lease: int, positions: Sequence[int], retain: bool, checksums: Sequence[int | None]
    ) -> Sequence[int]:
        ready = []
        for position, checksum in zip(positions, checksums, strict=True):
            name, slot = self.loads[lease].pop(position)
            if self.loading.get(name) != slot:  # its lease has expired, or it was cleared
                self.quarantined.discard(slot)
                self.free.append(slot)
                continue
            del self.loading[name]
            self.checksums[name] = checksum
            self.ready[name] = slot
            self.generations[name] = self.loading_as[lease]
            if not retain:
                self.temporary.add(name)
            ready.append(position)
        return ready

    def abort_load(self, lease: int, positions: Sequence[int], reason: TierReason) -> None:
        for position in positions:
            name, slot = self.loads[lease].pop(position)
            if self.loading.get(name) == slot:
                del self.loading[name]
            self.quarantined.discard(slot)
            self.free.append(slot)
            self.aborted[reason] += 1

    def expire(self, now: float) -> None:
        """Leases past their deadline: their keys are free, their slots are not while a lane may be writing to them."""
        for lease, deadline in list(self.load_deadlines.items()):
            if deadline <= now:
                del self.load_deadlines[lease]
                for name, slot in self.loads[lease].values():
                    if self.loading.get(name) == slot:
                        del self.loading[name]
                    self.quarantined.add(slot)

    def view(self, offset: int, nbytes: int) -> memoryview:
        return self.memory[offset : offset + nbytes]

    @property
    def ready_objects(self) -> int:
        return len(self.ready)

    walkable = True

    def walk(self) -> Iterator[CommittedObject | None]:
        for (namespace, key), generation in list(self.generations.items()):
            there = (namespace, key) in self.ready and (namespace, key) not in self.temporary
            yield CommittedObject(key, namespace, 1, LAYOUT.nbytes, generation) if there else None

    def layout(self, layout_id: int) -> Layout:
        assert layout_id == 1
        return LAYOUT


class ScriptedAdapter(L2Adapter):
    """Keeps objects in a dictionary, and errs as it is told.

    `hang(op)` stops the calls of one method until `release(op)`; `errors[op]` is raised; `answers[op]` replaces
    the outcomes; `corrupt(key)` flips a bit of what is kept.
    """

    capabilities = Capabilities(durable=True)

    def __init__(self, settings: object = None, context: AdapterContext | None = None) -> None:
        del settings, context
        self.objects: dict[bytes, bytes] = {}
        self.calls: Counter[str] = Counter()
        self.errors: dict[str, Exception] = {}
        self.answers: dict[str, Outcome] = {}
        self.entered = threading.Semaphore(0)
        self.closed = False
        self.gates: dict[str, threading.Event] = {}
        self._lock = threading.Lock()

    def hang(self, method: str) -> None:
        self.gates[method] = threading.Event()

    def release(self, method: str) -> None:
        self.gates.pop(method).set()

    def corrupt(self, key: bytes) -> None:
        damaged = bytearray(self.objects[key])
        damaged[-1] ^= 1
        self.objects[key] = bytes(damaged)

    def _enter(self, method: str) -> None:
        with self._lock:
            self.calls[method] += 1
        gate = self.gates.get(method)
        if gate is not None:
            self.entered.release()
            assert gate.wait(SAFETY_S)
        error = self.errors.get(method)  # it may go at this moment
        if error is not None:
            raise error

    def store(self, items: Sequence[StoreItem], deadline: float) -> Sequence[Outcome]:
        self._enter("store")
        if "store" in self.answers:
            return [self.answers["store"]] * len(items)
        for item in items:
            self.objects[item.key] = b"".join(item.buffers)
        return [Outcome(Result.DONE, item.nbytes) for item in items]

    def exists(self, keys: Sequence[bytes], deadline: float) -> Sequence[bool]:
        self._enter("exists")
        return [key in self.objects for key in keys]

    def load(self, items: Sequence[LoadItem], deadline: float) -> Sequence[Outcome]:
        self._enter("load")
        if "load" in self.answers:
            return [self.answers["load"]] * len(items)
        return [self.load_one(item) for item in items]

    def load_one(self, item: LoadItem) -> Outcome:
        content = self.objects.get(item.key)
        if content is None:
            return Outcome(Result.MISS)
        at = 0
        for part in item.buffers:
            piece = content[at : at + part.nbytes]
            part[: len(piece)] = piece
            at += len(piece)
        return Outcome(Result.DONE, len(content)) if at == len(content) else Outcome(Result.DAMAGED)

    def delete(self, keys: Sequence[bytes], deadline: float) -> Sequence[Outcome]:
        self._enter("delete")
        for key in keys:
            self.objects.pop(key, None)
        return [Outcome(Result.DONE)] * len(keys)

    def usage(self) -> Usage:
        return Usage(sum(map(len, self.objects.values())), len(self.objects))

    def scan(self, cursor: str | None, deadline: float) -> ScanPage:
        self._enter("scan")
        names = sorted(self.objects)
        at = int(cursor or 0)
        page = [ScanEntry(name, len(self.objects[name]), float(i)) for i, name in enumerate(names)][at : at + 3]
        return ScanPage(page, str(at + 3) if at + 3 < len(names) else None)

    def close(self) -> None:
        self.closed = True


class Loop:
    near: ScriptedAdapter  # these three of tests that have such tiers
    far: ScriptedAdapter
    adapter: ScriptedAdapter
    """Drives a Tiering as the server's loop does. `jump` moves its clock.

    `stands`: nothing else moves it. Then a turn does all that there is to do, however slow the machine is: one that
    goes by the time of day may find its slice of time used up, and leave the rest to the next turn.
    """

    def __init__(self, l1: MemoryL1, tiers: Sequence[Tier], *, stands: bool = False, **options: object) -> None:
        self.l1 = l1
        self._stands_at_s = time.monotonic() if stands else None
        self._skew_s = 0.0
        self.clock = Clock(self.now)
        self.woken = threading.Event()
        config = TieringConfig(**options.pop("config", {}))  # type: ignore[arg-type]
        policies = {"store_policy": DefaultStore(), "prefetch_policy": DefaultPrefetch()} | options
        self.tiering = Tiering(
            l1,
            tiers,
            wake=self.woken.set,
            config=config,
            clock=self.clock,
            **policies,  # type: ignore[arg-type]
        )
        self.done: list[Job] = []

    def now(self) -> float:
        return (time.monotonic() if self._stands_at_s is None else self._stands_at_s) + self._skew_s

    def jump(self, seconds: float) -> None:
        self._skew_s += seconds
        self.clock.turn()

    def clear(self, namespace: int | None, *, tiers: bool = False) -> None:
        """As the server does, once the kernel has cleared its part."""
        failed: list[Exception | None] = []
        if tiers:
            self.tiering.move_epoch(namespace, failed.append)
        self.tiering.clear(namespace)
        for error in filter(None, failed):
            raise error

    def turn(self) -> None:
        self.clock.turn()
        self.l1.expire(self.clock.now)
        self.tiering.step()

    def until(self, condition: Callable[[], object]) -> None:
        """Turn the loop until the condition holds."""
        end = time.monotonic() + SAFETY_S
        while True:
            self.woken.clear()
            self.turn()
            if condition():
                return
            assert time.monotonic() < end, f"never came true; {self.tiering.status()}"
            pause = self.tiering.next_deadline() - self.now()
            self.woken.wait(min(0.01, max(0.0, pause)))  # conditions may also become true on a lane

    def lookups_heard(self, adapter: L2Adapter) -> int:
        """Answers of this adapter to lookups that have come."""
        (tier,) = [each for each in self.tiering.tiers if each.adapter is adapter]
        return sum(tier.health.latencies["lookup"].counts)

    def idle(self) -> None:
        """Turn until nothing is under way and the tiers are scanned."""
        self.until(lambda: self.tiering.drained and self.scanned())

    def scanned(self) -> bool:
        return all(tier["scan"] in ("done", "off") for tier in self.tiering.status()["tiers"])

    def store(self, contents: dict[bytes, bytes]) -> None:
        self.tiering.on_committed([self.l1.put(key, content) for key, content in contents.items()])

    def ask(
        self, keys: Sequence[bytes], seconds: float = 1000.0, policy: PrefetchPolicy | None = None, **options: object
    ) -> Job:
        missing = [i for i, key in enumerate(keys) if (NAMESPACE, key) not in self.l1.ready]
        self.clock.turn()
        wanted = LookupOptions(**options)  # type: ignore[arg-type]
        request = TierLookup(NAMESPACE, 1, keys, missing, self.now() + seconds, wanted)
        return self.tiering.lookup(request, self.done.append, policy)

    def fetch(self, keys: Sequence[bytes], **options: object) -> Job:
        job = self.ask(keys, **options)  # type: ignore[arg-type]
        self.until(lambda: job in self.done)
        return job


def key(number: int) -> bytes:
    return hashlib.sha256(b"key %d" % number).digest()


def content(number: int) -> bytes:
    return hashlib.shake_256(b"content %d" % number).digest(LAYOUT.nbytes)


@pytest.fixture
def doubles() -> Iterator[Doubles]:
    made = Doubles()
    yield made
    made.close()


class Doubles:
    """What a test builds its world from."""

    namespace = NAMESPACE
    layout = LAYOUT
    key = staticmethod(key)
    content = staticmethod(content)
    adapter = ScriptedAdapter
    policy = DefaultStore

    def __init__(self) -> None:
        self.loops: list[Loop] = []

    def l1(self, slots: int = 64) -> MemoryL1:
        return MemoryL1(slots)

    def tier(self, name: str, adapter: L2Adapter, **options: object) -> Tier:
        tier_options = {k: options.pop(k) for k in ("serdes", "eviction") if k in options}
        return Tier(name, adapter, TierConfig(**options), **tier_options)  # type: ignore[arg-type]

    def loop(self, l1: MemoryL1, *tiers: Tier, **options: Any) -> Loop:
        loop = Loop(l1, tiers, **options)
        self.loops.append(loop)
        return loop

    def contents(self, count: int, first: int = 0) -> dict[bytes, bytes]:
        return {key(i): content(i) for i in range(first, first + count)}

    def close(self) -> None:
        for loop in self.loops:
            loop.tiering.close()


class FailingMedium(TierError):
    """What scripts raise."""
