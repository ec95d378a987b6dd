"""Virtual time, and threads that run one at a time.

Everything that happens is an event at a moment of virtual time. Events of one moment come in an order that the seed
chooses. A task is a real thread that has the baton, or waits for it: at most one thread runs, and what runs next is
decided here alone, so a seed gives the same schedule every time.
"""

from __future__ import annotations

import _thread
import heapq
import random
import sys
import threading as real_threading
import time as real_time
from collections import deque
from collections.abc import Callable
from queue import Empty
from typing import Any

STEPS_MAX = 60_000  # of one schedule: more is a schedule that never ends
START_S = 1_000.0


class Broken(AssertionError):
    """A promise was broken. The message says which."""


class Killed(BaseException):
    """Unwinds a thread whose process is dead: nothing it does from here on may reach the world."""


class World:
    """The clock, the events, the tasks, and what has been found."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.now = START_S
        self.chance = random.Random(f"{seed}/schedule")
        self.steps = 0
        self.task: Task | None = None  # who has the baton
        self.failure: BaseException | None = None
        self.trace: list[str] = []
        self.on_step: Callable[[], None] = lambda: None
        self._events: list[tuple[float, float, int, Callable[[], None]]] = []
        self._sequence = 0
        self._baton = _thread.allocate_lock()
        self._baton.acquire()
        self.tasks: list[Task] = []
        self.process: Any = None  # the server's, whose loop runs where no task has the baton

    def note(self, who: str, what: str) -> None:
        self.trace.append(f"{self.now - START_S:12.6f} {who:12} {what}")

    def at(self, when: float, act: Callable[[], None]) -> None:
        """Let something happen at a moment; of those of the same moment, in any order."""
        self._sequence += 1
        heapq.heappush(self._events, (max(when, self.now), self.chance.random(), self._sequence, act))

    def soon(self, act: Callable[[], None]) -> None:
        self.at(self.now + self.pause(), act)

    def pause(self) -> float:
        """How long something takes: mostly next to nothing, now and then long."""
        draw = self.chance.random()
        if draw < 0.6:
            return 0.0
        scale = 0.0005 if draw < 0.85 else 0.02 if draw < 0.97 else 0.3 if draw < 0.995 else 3.0
        return self.chance.random() * scale

    def run(self, until: Callable[[], bool]) -> None:
        """Let events happen, one after the other, until the condition holds or something is found broken."""
        while self.failure is None and not until():
            if not self._events:
                raise Broken("nothing will ever happen again, and not everybody is done")
            self.step()

    def step(self) -> None:
        when, _, _, act = heapq.heappop(self._events)
        self.now = max(self.now, when)
        self.steps += 1
        if self.steps > STEPS_MAX:
            raise Broken(f"no end after {STEPS_MAX} steps")
        act()
        if self.failure is None:
            self.on_step()

    # --- tasks --------------------------------------------------------------------------------------------

    def start(self, name: str, node: Any, work: Callable[[], None]) -> Task:
        task = Task(self, name, node, work)
        self.tasks.append(task)
        self.soon(task.resume)
        return task

    @property
    def all_done(self) -> bool:
        """Whether every task is, but for those that serve for as long as their process lives."""
        return all(task.done or task.serves for task in self.tasks)

    def hand(self, task: Task) -> None:
        """Give the baton to a task, and wait until it comes back."""
        before, self.task = self.task, task
        task.go.release()
        self._baton.acquire()
        self.task = before

    def hand_back(self) -> None:
        self._baton.release()


class Task:
    """One thread of one simulated process."""

    def __init__(self, world: World, name: str, node: Any, work: Callable[[], None]) -> None:
        self.world = world
        self.name = name
        self.node = node
        self.done = self.serves = False
        self.began_step = 0  # of the schedule, of its operation
        self.busy_since = 0.0  # with its operation
        self.quick = ""  # what it is doing that must not wait for the server
        self.dawdles_s = 0.0  # in the middle of its next copy
        self.go = _thread.allocate_lock()
        self.go.acquire()
        self._work = work
        self._ticket = 0  # of the wait that it is in: a wake-up of an earlier one is nothing to it
        self.parked = True
        self._thread = real_threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def __str__(self) -> str:
        return self.name

    def _run(self) -> None:
        self.go.acquire()
        self.parked = False
        try:
            if not self.node.dead:
                self._work()
        except Killed:
            pass
        except BaseException as error:  # noqa: BLE001 - whatever it is, the schedule has found something
            if not self.node.dead and self.world.failure is None:
                self.world.failure = error
        self.done = True
        self.world.hand_back()

    def resume(self) -> None:
        """Go on, unless the process is stopped: then once it runs again."""
        if self.done or not self.parked:
            return
        if self.node.stopped_until > self.world.now and not self.node.dead:
            self.world.at(self.node.stopped_until, self.resume)
            return
        self.world.hand(self)

    def wait(self, until: float, arm: Callable[[Callable[[], None]], None] = lambda wake: None) -> bool:
        """Let others go on until the moment comes or `wake` was called. `arm(wake)` says who may call it. True: it
        was woken. Only the task itself calls this."""
        if self.node.dead:
            raise Killed
        self._ticket += 1
        ticket, woken = self._ticket, False

        def wake() -> None:
            nonlocal woken
            woken = True
            self.world.soon(again)

        def again() -> None:
            if self._ticket == ticket:
                self.resume()

        arm(wake)
        if until < float("inf"):
            self.world.at(until, again)
        self.park()
        self._ticket += 1
        return woken

    def park(self) -> None:
        self.parked = True
        self.world.hand_back()
        self.go.acquire()
        self.parked = False
        if self.node.dead:
            raise Killed

    def work(self) -> None:
        """Something that takes its time, while others go on."""
        draw = self.world.chance.random()
        if draw < 0.4:
            self.breathe()
        else:
            self.wait(self.world.now + (0.003 if draw < 0.8 else 0.1) * self.world.chance.random())

    def breathe(self) -> None:
        """A place at which anybody else may come in between."""
        if self.world.chance.random() < 0.7:
            self.wait(self.world.now + self.world.pause())


# --- what the code under test takes for `time` and `threading` ------------------------------------------------

world: World | None = None
real_monotonic = real_time.monotonic
real_unix_time = real_time.time
BEGAN_UNIX_S = 1.7e9


def monotonic() -> float:
    """Virtual while a schedule runs; real for the threads that are not part of it."""
    current = world
    if current is None or real_threading.current_thread().name.startswith("populat"):
        return real_monotonic()
    return current.now


def unix_time() -> float:
    """Virtual while a schedule runs: the index keeps the second at which an object was last used."""
    return real_unix_time() if world is None else BEGAN_UNIX_S + world.now


class Lock:
    """A lock of virtual threads. Outside of a schedule nobody waits for one."""

    def __init__(self) -> None:
        self._taken = False
        self._owner: Task | None = None
        self._waiters: list[Callable[[], None]] = []

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        task = None if world is None else world.task
        if task is not None and blocking and not task.node.dead and world is not None and world.chance.random() < 0.05:
            task.wait(world.now)
        until = float("inf") if timeout < 0 else monotonic() + timeout
        while self._taken:
            if not blocking or until <= monotonic():
                return False
            if task is None:
                raise Broken("a lock is waited for by nobody who could wait")
            task.wait(until, self._waiters.append)
        self._taken, self._owner = True, task
        return True

    def release(self) -> None:
        if not self._taken:
            raise RuntimeError("release unlocked lock")
        self._taken, self._owner = False, None
        waiters, self._waiters = self._waiters, []
        for wake in waiters:
            wake()

    def locked(self) -> bool:
        return self._taken

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *error: object) -> None:
        self.release()


class RLock(Lock):
    """The same for a thread that may take it again."""

    def __init__(self) -> None:
        super().__init__()
        self._depth = 0

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        task = None if world is None else world.task
        if self._taken and self._owner is task:
            self._depth += 1
            return True
        if not super().acquire(blocking, timeout):
            return False
        self._depth = 1
        return True

    def release(self) -> None:
        self._depth -= 1
        if not self._depth:
            super().release()


class Condition:
    """A condition of virtual threads."""

    def __init__(self, lock: Lock | None = None) -> None:
        self._lock = lock or RLock()
        self.acquire, self.release = self._lock.acquire, self._lock.release
        self._waiters: list[Callable[[], None]] = []

    def __enter__(self) -> bool:
        return self._lock.acquire()

    def __exit__(self, *error: object) -> None:
        self._lock.release()

    def wait(self, timeout: float | None = None) -> bool:
        assert world is not None
        assert world.task is not None
        task = world.task
        self._lock.release()
        try:
            return task.wait(float("inf") if timeout is None else world.now + timeout, self._waiters.append)
        finally:
            if not task.node.dead:
                self._lock.acquire()

    def wait_for(self, predicate: Callable[[], Any], timeout: float | None = None) -> object:
        until = float("inf") if timeout is None else monotonic() + timeout
        while not (result := predicate()):
            left = until - monotonic()
            if left <= 0:
                return result
            self.wait(None if left == float("inf") else left)
        return result

    def notify(self, n: int = 1) -> None:
        chosen, self._waiters = self._waiters[:n], self._waiters[n:]
        for wake in chosen:
            wake()

    def notify_all(self) -> None:
        self.notify(len(self._waiters))


class Event:
    """An event of virtual threads."""

    def __init__(self) -> None:
        self._condition = Condition(Lock())
        self._set = False

    def is_set(self) -> bool:
        return self._set

    def set(self) -> None:
        self._set = True
        self._condition.notify_all()

    def clear(self) -> None:
        self._set = False

    def wait(self, timeout: float | None = None) -> bool:
        with self._condition:
            return bool(self._condition.wait_for(lambda: self._set, timeout))


class SimpleQueue:
    """A queue of virtual threads."""

    def __init__(self) -> None:
        self._condition = Condition(Lock())
        self._things: deque[object] = deque()

    def __class_getitem__(cls, kind: object) -> type[SimpleQueue]:
        return cls

    def put(self, thing: Any) -> None:
        self._things.append(thing)
        self._condition.notify_all()

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        with self._condition:
            self._condition.wait_for(lambda: self._things, timeout if block else 0.0)
        if not self._things:
            raise Empty
        return self._things.popleft()


class Thread:
    """A thread of the server's process, such as those of its lanes. Nobody waits for the end of one."""

    def __init__(self, target: Callable[[], None], name: str, daemon: bool) -> None:
        self._target = target
        self._name = name

    def start(self) -> None:
        if world is None:
            return  # the schedule is over, and what there was of processes is being put away
        process = world.process if world.task is None else world.task.node
        if not process.dead:
            world.start(self._name, process, self._target).serves = True

    def join(self, timeout: float) -> None:
        pass


class VirtualThreading:
    """`threading`, as the modules of clients and tiers see it."""

    Lock, RLock, Condition, Event, Thread = Lock, RLock, Condition, Event, Thread

    def __getattr__(self, name: str) -> object:
        return getattr(real_threading, name)


def take_over_time() -> None:
    """Before anything of ours is imported: some of it takes `time.monotonic` as a default."""
    real_time.monotonic = monotonic
    real_time.time = unix_time


def take_over_threading() -> None:
    """Once everything of ours is imported."""
    virtual = VirtualThreading()
    for name, module in list(sys.modules.items()):
        ours = name.startswith(("lmcache_core.client", "lmcache_core.threads", "lmcache_core.tiers"))
        if ours and getattr(module, "threading", None) is real_threading:
            module.threading = virtual  # type: ignore[attr-defined]
        if name.startswith("lmcache_core.client") and hasattr(module, "SimpleQueue"):
            module.SimpleQueue = SimpleQueue  # type: ignore[attr-defined]
