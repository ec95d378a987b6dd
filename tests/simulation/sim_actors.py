"""What the threads of simulated processes do, one operation at a time."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import random
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import sim_world
from sim_nodes import ClientNode
from sim_shadow import NAMESPACES, OBJECT_BYTES, Place, Shadow
from sim_world import Broken, Task, World

import lmcache_core.client.move.leases as leases_module
import lmcache_core.client.move.retrieving as retrieving_module
from lmcache_core.client.client import Client
from lmcache_core.client.find.hits import Hits
from lmcache_core.client.find.lookups import ClientLookups, LookupHandle
from lmcache_core.client.promises import Promise
from lmcache_core.client.results import Status
from lmcache_core.errors import DisconnectedError, LeaseExpiredError, UsageError
from lmcache_core.pool.layout import Layout

KEYS = 18
RESTART_S = 0.15  # no server comes up sooner: a client that only hits has noticed the end of the former one by then
ENDED = (DisconnectedError, LeaseExpiredError)


def key(number: int) -> bytes:
    return number.to_bytes(32, "big")


@dataclass
class Step:
    """One item of a plan: an operation of a thread of a client, or a fault that hits a client at a step of the
    schedule. `what`: what an operation of a scene is about, where chance does not say it."""

    kind: str
    client: int
    thread: int
    seed: int
    at_step: int = 0
    what: str = ""


class Actor:
    """One thread of one client process."""

    def __init__(self, world: World, shadow: Shadow, node: ClientNode, promises: list[tuple[int, list[int], Promise]]):
        self.world = world
        self.shadow = shadow
        self.node = node
        self.promises = promises  # of all schedulers: (namespace, keys, promises)
        self.chance = random.Random(0)
        self.what = ""  # the operation of now is about

    def run(self, steps: Sequence[Step]) -> None:
        for step in steps:
            self.chance, self.what = random.Random(step.seed), step.what
            task = self.world.task
            assert task is not None
            task.busy_since, task.began_step = self.world.now, self.world.steps
            self.world.note(f"{self.node.name}.{step.thread}", f"{step.kind} {step.what}".rstrip())
            try:
                OPERATIONS[step.kind](self)
            except UsageError as error:
                if "closed" not in str(error):  # by another thread of its process
                    raise
            if self.chance.random() < 0.1:
                task.wait(self.world.now + self.chance.choice([0.05, 0.5, 3.0, 12.0]))
            task.breathe()

    # --- material -----------------------------------------------------------------------------------------

    @property
    def client(self) -> Client:
        client = self.node.client
        return self.node.connect() if client is None else client

    def choose(self) -> tuple[int, list[int]]:
        namespace, first = self.chance.randrange(2), self.chance.randrange(KEYS)
        return namespace, list(range(first, min(KEYS, first + self.chance.randint(1, 4))))

    def contents(self, namespace: int, numbers: Sequence[int]) -> list[bytes]:
        return [self.shadow.make(self.node.name, namespace, number) for number in numbers]

    def judge(self, numbers: Sequence[int], namespace: int, statuses: Sequence[Status], buffers: Sequence[Any]) -> None:
        for number, status, buffer in zip(numbers, statuses, buffers, strict=True):
            if status is Status.HIT:
                self.shadow.check(buffer, namespace, number, self.node.name, self.began_step)

    @property
    def began_step(self) -> int:
        """Of the schedule, of this operation."""
        assert self.world.task is not None
        return self.world.task.began_step

    # --- whole operations ---------------------------------------------------------------------------------

    def store(self) -> None:
        namespace, numbers = self.choose()
        self.client.store(
            [key(number) for number in numbers], self.contents(namespace, numbers), namespace=NAMESPACES[namespace]
        )

    def burst(self) -> None:
        """One tenant stores more than there is room for, as fast as it can."""
        namespace = self.chance.randrange(2)
        for first in range(0, KEYS, 3):
            numbers = list(range(first, first + 3))
            self.client.store(
                [key(number) for number in numbers], self.contents(namespace, numbers), namespace=NAMESPACES[namespace]
            )

    def retrieve(self, promise: Promise | None = None, chosen: tuple[int, list[int]] | None = None) -> None:
        namespace, numbers = chosen or self.choose()
        into = [bytearray(OBJECT_BYTES) for _ in numbers]
        result = self.client.retrieve(
            [key(number) for number in numbers],
            into,
            namespace=NAMESPACES[namespace],
            prefix=self.chance.random() < 0.5,
            promise=promise,
            verify=self.chance.choice(["never", "first", "always"]),
        )
        self.judge(numbers, namespace, result.statuses, into)

    def lookup(self) -> None:
        namespace, numbers = self.choose()
        hold, wait_s = self.chance.random() < 0.5, self.chance.choice([0.0, 0.0, 0.01, 0.2, 2.0])
        began = self.world.now
        result = self.client.lookup(
            [key(number) for number in numbers],
            namespace=NAMESPACES[namespace],
            hold=hold,
            wait_s=wait_s,
            deadline_s=self.chance.choice([0.0, 6.0]),
        )
        undone = not result.done and Status.UNREACHABLE not in result.statuses
        if undone and self.world.now - began < wait_s - 1e-9:
            raise Broken(f"a lookup of {wait_s} s came back undone after {self.world.now - began:.6f} s")
        self.told(namespace, numbers, result.promise)

    def redeem(self) -> None:
        """Read under a promise that some scheduler was given, or give it back."""
        if not self.promises:
            return
        namespace, numbers, promise = self.promises.pop(self.chance.randrange(len(self.promises)))
        if self.chance.random() < 0.6:
            self.retrieve(promise, (namespace, numbers))
        else:
            self.client.free_lookup_locks(promise)

    def lookup_nowait(self) -> None:
        namespace, numbers = self.choose()
        handle = self.client.lookup_nowait(
            [key(number) for number in numbers],
            namespace=NAMESPACES[namespace],
            hold=self.chance.random() < 0.5,
            wait_s=self.chance.choice([0.0, 0.5, 5.0]),
        )
        task = self.world.task
        assert task is not None
        task.breathe()
        end = self.chance.randrange(4)
        if end == 0:
            handle.cancel()
        elif end == 1:
            handle.wait(self.chance.choice([0.001, 0.3, 8.0]))
        elif end == 2:
            for _ in range(4):
                if handle.done:
                    break
                task.wait(self.world.now + 0.2)
        if end in (1, 2) and handle.done and handle.result is not None:
            self.told(namespace, numbers, handle.result.promise)

    def told(self, namespace: int, numbers: list[int], promise: Promise | None) -> None:
        if promise:
            self.shadow.told.update(promise.numbers)
            self.promises.append((namespace, numbers, promise))

    # --- the two phases -----------------------------------------------------------------------------------

    def write_in_place(self) -> None:
        namespace, numbers = self.choose()
        contents = self.contents(namespace, numbers)
        task = self.world.task
        assert task is not None
        try:
            with self.client.prepare_store(
                [key(number) for number in numbers], namespace=NAMESPACES[namespace]
            ) as lease:
                for position in list(lease.granted):
                    whole = self.fill(task, lease, position, contents[position])
                    if whole is None:
                        return
                    if not whole or self.chance.random() < 0.15:
                        lease.abort([position])
                    if self.chance.random() < 0.1:
                        return  # what was not committed is aborted, half written or not
                if self.chance.random() < 0.1:
                    lease.renew()
                lease.commit()
        except ENDED:
            pass
        except UsageError as error:
            if "is not open in this lease" not in str(error):  # another thread has ended it
                raise

    def fill(self, task: Task, lease: Any, position: int, content: bytes) -> bool | None:
        """Write the slot in two halves, with whatever may happen between them. False: its gather failed half way; None:
        the lease has ended."""
        try:
            view = lease.view(position)
        except (UsageError, *ENDED):
            return None  # another thread has ended the lease, or the server has
        address = ctypes.addressof(ctypes.c_char.from_buffer(view))
        place, complete = self.shadow.begin_write(task, address, content, lambda: _alive(view)), False
        half = OBJECT_BYTES // 2
        try:
            task.work()
            view[:half] = content[:half]
            if self.chance.random() < 0.15:
                task.wait(self.world.now + self.chance.choice([0.3, 2.0, 15.0]))
            if self.chance.random() < 0.1:
                return False
            task.work()
            view[half:] = content[half:]
            complete = True
        except ValueError:
            return None  # the lease ended, and its views with it
        finally:
            if not self.node.dead:
                self.shadow.end_write(task, place, complete=complete)
        return True

    def read_in_place(self) -> None:
        namespace, numbers = self.choose()
        task = self.world.task
        assert task is not None
        seen: list[tuple[int, bytes]] = []
        try:
            with self.client.prepare_retrieve([key(n) for n in numbers], namespace=NAMESPACES[namespace]) as lease:
                for position in list(lease.granted):
                    try:
                        view = lease.view(position)
                        first = bytes(view)
                        task.work()
                        if self.chance.random() < 0.25:
                            task.wait(self.world.now + self.chance.choice([0.3, 2.0, 15.0]))
                        again = bytes(view)
                    except (ValueError, UsageError):
                        return  # another thread has ended it
                    seen += [(numbers[position], first), (numbers[position], again)]
                lease.finish()
        except ENDED:
            return  # nothing that was read can be trusted, as it says
        for number, content in seen:
            self.shadow.check(content, namespace, number, self.node.name, self.began_step)
        if any(before != after for (_, before), (_, after) in zip(seen[::2], seen[1::2], strict=True)):
            raise Broken("bytes under a read lease have changed, and finish() said that they stood")

    # --- slowly, and meanwhile ----------------------------------------------------------------------------

    def store_slowly(self) -> None:
        """Its copy stands still for a while."""
        self.dawdle([0.4, 1.2])
        self.store()

    def read_slowly(self) -> None:
        """What it has just stored, under a lease; its copy outlasts the lease's time."""
        namespace, numbers = self.choose()
        keys = [key(number) for number in numbers]
        self.client.store(keys, self.contents(namespace, numbers), namespace=NAMESPACES[namespace])
        held = self.client.lookup(keys, namespace=NAMESPACES[namespace], hold=True, prefix=False)
        if held.promise:
            self.shadow.told.update(held.promise.numbers)
            self.dawdle([9.0, 11.0])
            self.retrieve(held.promise, (namespace, numbers))

    def dawdle(self, choices: Sequence[float]) -> None:
        task = self.world.task
        assert task is not None
        task.dawdles_s = self.chance.choice(choices)

    def pause_briefly(self) -> None:
        self.pause([0.05, 0.2, 0.4])

    def pause_long(self) -> None:
        self.pause([8.2, 8.6, 9.2])

    def pause(self, choices: Sequence[float]) -> None:
        task = self.world.task
        assert task is not None
        task.wait(self.world.now + self.chance.choice(choices))

    def lose_connection(self) -> None:
        self.node.cut()

    def turn_over(self) -> None:
        """Store so much that each slot that is free, or may be made free, is given to somebody."""
        for namespace in range(len(NAMESPACES)):
            for first in range(0, KEYS, 6):
                numbers = list(range(first, first + 6))
                self.client.store(
                    [key(number) for number in numbers],
                    self.contents(namespace, numbers),
                    namespace=NAMESPACES[namespace],
                )

    # --- what a scene says, word for word -------------------------------------------------------------------

    @property
    def told_keys(self) -> tuple[int, list[int]]:
        """`0:3-6`: of namespace 0 the keys 3 to 6."""
        namespace, _, numbers = self.what.partition(":")
        first, _, last = numbers.partition("-")
        return int(namespace), list(range(int(first), int(last or first) + 1))

    def put(self) -> None:
        namespace, numbers = self.told_keys
        self.client.store(
            [key(number) for number in numbers], self.contents(namespace, numbers), namespace=NAMESPACES[namespace]
        )

    def fetch(self) -> None:
        """Read what is in the pool or on a tier, and believe it."""
        namespace, numbers = self.told_keys
        keys = [key(number) for number in numbers]
        found = self.client.lookup(
            keys, namespace=NAMESPACES[namespace], hold=True, prefix=False, wait_s=4.0, deadline_s=4.0
        )
        self.shadow.told.update(found.promise.numbers if found.promise else ())
        into = [bytearray(OBJECT_BYTES) for _ in numbers]
        result = self.client.retrieve(
            keys, into, namespace=NAMESPACES[namespace], prefix=False, promise=found.promise, verify="never"
        )
        self.judge(numbers, namespace, result.statuses, into)

    def ask(self) -> None:
        """Have it loaded, and wait for nothing."""
        namespace, numbers = self.told_keys
        handle = self.client.lookup_nowait(
            [key(number) for number in numbers], namespace=NAMESPACES[namespace], prefix=False, deadline_s=30.0
        )
        self.pause([0.01])
        handle.wait(0.0)

    def hold(self) -> None:
        """Nothing of it can be evicted for a while."""
        namespace, numbers = self.told_keys
        with contextlib.suppress(DisconnectedError):
            self.client.pin([key(number) for number in numbers], namespace=NAMESPACES[namespace], ttl_s=20.0)

    def grab(self) -> None:
        """Be granted slots for all of it, page by page, and write nothing."""
        namespace, numbers = self.told_keys
        with contextlib.ExitStack() as leases, contextlib.suppress(*ENDED):
            for first in range(0, len(numbers), 3):
                keys = [key(number) for number in numbers[first : first + 3]]
                leases.enter_context(self.client.prepare_store(keys, namespace=NAMESPACES[namespace]))
                self.pause([0.01])

    def pause_for(self) -> None:
        self.pause([float(self.what)])

    def tiers_are(self) -> None:
        """In this mood."""
        for tier in self.node.server.tiers:
            tier.set_mood(self.what)

    def forget(self) -> None:
        """What the pool has of the namespace, and no tier."""
        self._clear(tiers=False)

    def clear_tiers(self) -> None:
        self._clear(tiers=True)

    def _clear(self, *, tiers: bool) -> None:
        with contextlib.suppress(DisconnectedError):
            self.client.clear(NAMESPACES[int(self.what)], tiers=tiers)

    def restart_server(self) -> None:
        # By nobody: what a task starts is its process's.
        self.world.at(self.world.now, self.node.server.kill)
        self.world.at(self.world.now + RESTART_S, self.node.server.start)
        self.pause([RESTART_S + 0.01])

    # --- the rest -----------------------------------------------------------------------------------------

    def pin(self) -> None:
        namespace, numbers = self.choose()
        try:
            if self.chance.random() < 0.7:
                self.client.pin([key(n) for n in numbers], namespace=NAMESPACES[namespace], ttl_s=3.0)
            else:
                self.client.unpin([key(n) for n in numbers], namespace=NAMESPACES[namespace])
        except DisconnectedError:
            pass

    def clear(self) -> None:
        with contextlib.suppress(UsageError, DisconnectedError):  # it may be none of this session's
            everything = self.chance.random() < 0.2
            self.client.clear(
                None if everything else NAMESPACES[self.chance.randrange(2)], tiers=self.chance.random() < 0.5
            )

    def end_session(self) -> None:
        with contextlib.suppress(DisconnectedError):
            self.client.end_session()

    def call(self) -> None:
        with contextlib.suppress(DisconnectedError):  # its hello came too late
            self.client.get_chunk_size()

    def close(self) -> None:
        """The next operation of this process makes another client."""
        client, self.node.client = self.node.client, None
        if client is not None:
            client.close()

    def drop(self) -> None:
        """The client is dropped without a word. What has lost a connection may wait for the collector."""
        self.node.client = None
        gc.collect()


OPERATIONS: dict[str, Callable[[Actor], None]] = {
    "store": Actor.store,
    "burst": Actor.burst,
    "retrieve": Actor.retrieve,
    "lookup": Actor.lookup,
    "redeem": Actor.redeem,
    "lookup_nowait": Actor.lookup_nowait,
    "write_in_place": Actor.write_in_place,
    "read_in_place": Actor.read_in_place,
    "pin": Actor.pin,
    "clear": Actor.clear,
    "end_session": Actor.end_session,
    "close": Actor.close,
    "drop": Actor.drop,
    "store_slowly": Actor.store_slowly,
    "read_slowly": Actor.read_slowly,
    "pause_briefly": Actor.pause_briefly,
    "pause_long": Actor.pause_long,
    "turn_over": Actor.turn_over,
    "lose_connection": Actor.lose_connection,
    "call": Actor.call,
    "put": Actor.put,
    "fetch": Actor.fetch,
    "ask": Actor.ask,
    "hold": Actor.hold,
    "grab": Actor.grab,
    "pause_for": Actor.pause_for,
    "tiers_are": Actor.tiers_are,
    "forget": Actor.forget,
    "clear_tiers": Actor.clear_tiers,
    "restart_server": Actor.restart_server,
}


# --- copies, with others in between ---------------------------------------------------------------------------


def watch_copies(shadow: Callable[[], Shadow]) -> None:
    """Let whole operations copy in two halves, and the shadow know of it."""
    copy_in, copy_out = leases_module.copy_in, retrieving_module.copy_out

    def slow_in(base: int, slots: Any, found: Any, layout: Layout, **options: Any) -> bytes:
        task, chosen = _task(), list(slots)
        places: list[Place] = []
        complete = False
        try:
            for position, offset in chosen:
                content = ctypes.string_at(found[position][0], OBJECT_BYTES)
                places.append(shadow().begin_write(task, base + offset, content))
            task.work()
            for position, offset in chosen:
                ctypes.memmove(base + offset, found[position][0], OBJECT_BYTES // 2)
            task.work()
            _dawdle(task)
            checksums = copy_in(base, chosen, found, layout, **options)
            complete = True
        finally:
            if not task.node.dead:
                for place in places:
                    shadow().end_write(task, place, complete=complete)
        return checksums

    def slow_out(base: int, slots: Any, found: Any, layout: Layout, **options: Any) -> array[int]:
        task, chosen = _task(), list(slots)
        places = [shadow().begin_read(task, base + offset) for _, offset in chosen]
        try:
            task.work()
            _dawdle(task)
            checksums = copy_out(base, chosen, found, layout, **options)
            task.breathe()
        finally:
            for place in places:
                shadow().end_read(task, place)
        return checksums

    leases_module.copy_in, retrieving_module.copy_out = slow_in, slow_out


def _dawdle(task: Task) -> None:
    if task.dawdles_s:
        until, task.dawdles_s = task.world.now + task.dawdles_s, 0.0
        task.wait(until)


def watch_waits() -> None:
    """What must not wait for the server, says so while it is at work."""
    Hits.find = _quick("a look into the index", Hits.find)  # type: ignore[method-assign]
    Hits.read = _quick("a read by the index", Hits.read)  # type: ignore[method-assign]
    ClientLookups.start = _quick("lookup_nowait", ClientLookups.start)  # type: ignore[method-assign]
    LookupHandle.cancel = _quick("cancel", LookupHandle.cancel)  # type: ignore[method-assign]


def _quick(what: str, method: Callable[..., Any]) -> Callable[..., Any]:
    def quickly(*arguments: object, **options: object) -> object:
        task = _task()
        task.quick = what
        try:
            return method(*arguments, **options)
        finally:
            task.quick = ""

    return quickly


def _alive(view: memoryview) -> bool:
    try:
        return view.nbytes > 0
    except ValueError:
        return False


def _task() -> Task:
    assert sim_world.world is not None
    assert sim_world.world.task is not None
    return sim_world.world.task
