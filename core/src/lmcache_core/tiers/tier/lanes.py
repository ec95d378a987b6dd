"""Lanes: the bounded threads on which a tier's blocking calls run.

The loop's thread submits, cancels and expires; lane threads run calls and post them back. `call_states` says where a
call stands. The state of a call in a lane changes under the lane's lock.
"""

from __future__ import annotations

import heapq
import logging
import math
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

from lmcache_core.errors import excerpt
from lmcache_core.guard import guarded
from lmcache_core.limits import HANGING_TIER_S, LANE_NICE, LANE_QUEUE_MAX, LANE_REPLACEMENTS_MAX
from lmcache_core.threads import started
from lmcache_core.tiers.tier.background import step_behind
from lmcache_core.tiers.tier.call_states import CALL_TRANSITIONS, CallEvent, CallState

log = logging.getLogger(__name__)

_SILENCES = 8  # remembered of each lane: more than it has threads, which may return together


class Priority(int):
    """Lower goes first."""


WAITED_FOR = Priority(0)  # a request waits for it
DELETE = Priority(5)  # makes room for stores
WRITE_BACK = Priority(10)
WARM_UP = Priority(20)  # nobody waits
HOUSEKEEPING = Priority(30)  # scans and probes


class Order(Protocol):
    """Whoever holds calls back until their keys allow them."""

    def leave(self, call: Call) -> None:
        """The call is over, and its caller has updated the accounts."""


class Posted(Protocol):
    """What lane threads hand to the loop: a call that has returned, or what one reports while it still runs."""

    def tell_end(self) -> None:
        """On the loop's thread."""


class Call(ABC):
    """One blocking call of a tier: its work, and what becomes of it.

    `ended` follows exactly once for every call that ran, even after `late`; by then `result` or `error` is set. `late`
    comes at most once: if `state` is EXPIRED the call never ran and `ended` will not follow, if LATE it is still
    running.
    """

    what = ""  # the operation, for `Lane.give_up`

    def __init__(self, deadline: float, priority: Priority, allowed_s: float = math.inf) -> None:
        """`allowed_s`: from its submission to its deadline."""
        self.deadline = deadline
        self.priority = priority
        self.allowed_s = allowed_s
        self.order: Order | None = None  # notified when it is over
        self.state = CallState.QUEUED
        self.was_late = False
        self.starved = False  # it expired in the queue of a lane, and no call of that lane had returned meanwhile
        self.returns_before = 0  # calls of its lane that had returned when it was submitted
        self.sequence = 0
        self.result: Any = None  # what `work` has returned
        self.error: BaseException | None = None
        self.failure = "it gave no answer"  # what `error` says

    @abstractmethod
    def work(self) -> Any:
        """The blocking part, on a lane thread."""

    @abstractmethod
    def ended(self) -> None:
        """Its work has returned or raised. On the loop's thread."""

    @abstractmethod
    def late(self) -> None:
        """Its deadline has passed. On the loop's thread."""

    def move(self, event: CallEvent) -> None:
        """The only way to change the state. A step that is not in the table is a bug of the caller: `KeyError`."""
        self.state = CALL_TRANSITIONS[self.state, event]
        if event is CallEvent.EXPIRE:
            self.was_late = True

    def tell_end(self) -> None:
        """It has returned: end it, and then what waits for its keys may begin."""
        try:
            self.ended()
        finally:
            self.result = None
            self._leave()

    def tell_late(self) -> None:
        """Its deadline has passed: it never ran, or is still running."""
        try:
            self.late()
        finally:
            if self.state is CallState.EXPIRED:  # otherwise it is over when it returns
                self._leave()

    def _leave(self) -> None:
        if self.order is not None:
            self.order.leave(self)

    def __lt__(self, other: Call) -> bool:
        return (self.priority, self.sequence) < (other.priority, other.sequence)


class Lane:
    """A bounded priority queue and the daemon threads that empty it.

    `post(call)` is called from lane threads when a call has ended; it must be thread-safe. A thread whose call hangs
    past its deadline is replaced, a bounded number of times (`replaces` False: never, for adapters that are not
    thread-safe), so that a tier that comes back is used even if the old calls never return. `nice`: how far its threads
    step behind others. `idle_disk`: they use disks only when nobody else does, for background work.
    """

    def __init__(
        self,
        name: str,
        threads: int,
        post: Callable[[Call], None],
        *,
        replaces: bool = True,
        nice: int = LANE_NICE,
        idle_disk: bool = False,
    ) -> None:
        self.name = name
        self._threads_max = threads
        self._replacements_max = LANE_REPLACEMENTS_MAX if replaces else 0
        self._nice = nice
        self._idle_disk = idle_disk
        self._post = post
        self._wakeup = threading.Condition()
        self._queue: list[Call] = []
        self._queued = 0  # without calls that were cancelled or expired in the queue
        self._running: dict[Call, None] = {}  # in the order in which they began
        self._threads = 0
        self._idle = 0
        self._hung = 0
        self._returns = 0  # calls that have returned, late ones included
        self._returns_seen = 0
        self._quiet_since_s = math.inf  # when the loop last saw that one had returned, or that none was out
        self._hoped_since_s = math.inf  # the same, where calls that hang do not count as out
        self._silences_s: deque[float] = deque([0.0], _SILENCES)  # the last ones that ended with a return
        self._sequence = 0
        self._closing = False
        self._stuck_since_s: float | None = None
        self._soonest = math.inf  # no deadline in this lane is earlier; used by the loop's thread only

    # --- the loop's side ----------------------------------------------------------------------------------
    def submit(self, call: Call) -> bool:
        """False: the queue is full, or the lane is closed; the call will not run, and no callback follows."""
        with self._wakeup:
            if self._queued >= LANE_QUEUE_MAX or self._closing:
                return False
            self._sequence += 1
            call.sequence = self._sequence
            call.returns_before = self._returns
            heapq.heappush(self._queue, call)
            self._queued += 1
            self._wakeup.notify()
            # Idle threads may have been notified for earlier calls: count what waits against them.
            if self._queued > self._idle and self._threads < self._allowed_threads():
                self._start_thread()
        self._soonest = min(self._soonest, call.deadline)
        return True

    def cancel(self, call: Call) -> bool:
        """True: it was still queued and will never run; no callback follows. False: it is running or has ended."""
        with self._wakeup:
            if call.state is not CallState.QUEUED:
                return False
            call.move(CallEvent.CANCEL)
            self._queued -= 1
            self._sweep()
            return True

    def expire(self, now: float) -> list[Call]:
        """The calls whose deadline has just passed, EXPIRED or LATE; each is reported once."""
        if self._returns_seen != self._returns:
            self._silences_s.append(now - self._hoped_since_s)
            self._returns_seen, self._quiet_since_s, self._hoped_since_s = self._returns, now, now
        elif not self._queued and len(self._running) == self._hung:
            self._hoped_since_s = now
            if not self.busy:
                self._quiet_since_s = now
        if now < self._soonest:
            return []
        return self._expire(now, lambda call: call.deadline <= now)

    def give_up(self, what: str, now: float, *, running: bool) -> list[Call]:
        """The queued calls of this operation, and with `running` also those that have begun: all are late now."""
        return self._expire(now, lambda call: call.what == what and (running or call.state is CallState.QUEUED))

    def _expire(self, now: float, is_late: Callable[[Call], bool]) -> list[Call]:
        late: list[Call] = []
        with self._wakeup:
            self._soonest = math.inf
            for call in (*self._queue, *self._running):
                if call.state not in (CallState.QUEUED, CallState.RUNNING):
                    continue
                if not is_late(call):
                    self._soonest = min(self._soonest, call.deadline)
                    continue
                late.append(call)
                if call.state is CallState.RUNNING:
                    self._hung += 1
                else:
                    self._queued -= 1
                    call.starved = call.returns_before == self._returns
                call.move(CallEvent.EXPIRE)
            self._sweep()
            if self.stuck and self._stuck_since_s is None:
                self._stuck_since_s = now
            if self._queued > self._idle and self._threads < self._allowed_threads():
                self._start_thread()
        return late

    @property
    def has_spare(self) -> bool:
        """Whether background work may risk a thread: none hangs, or one that hangs too would be replaced."""
        return self._hung < max(1, self._replacements_max)

    @property
    def next_deadline(self) -> float:
        """No call is late before this; infinity if there is none."""
        return self._soonest

    @property
    def queued(self) -> int:
        return self._queued

    @property
    def backlog(self) -> int:
        """Queued calls that no thread is free to take: unchanged while a thread wakes up."""
        free = self._threads_max - (len(self._running) - self._hung)
        return max(0, self._queued - max(0, free))

    @property
    def running(self) -> int:
        """Calls that have not returned, late ones included."""
        return len(self._running)

    @property
    def hung(self) -> int:
        return self._hung

    @property
    def busy(self) -> bool:
        """Whether a call is out, or waits for a thread."""
        return bool(self._queued or self._running)

    def silent(self, since_s: float, now: float) -> bool:
        """Whether it is busy and nothing has returned since then for as long as a tier that hangs is waited for; of one
        that was slow lately, and did return, for twice as long as that took."""
        silence_s = max(HANGING_TIER_S, 2 * max(self._silences_s))
        return self.busy and now - max(since_s, self._quiet_since_s) >= silence_s

    @property
    def stuck(self) -> bool:
        """Whether as many calls hang as this lane has threads by rights, and at least two: it works, if at all, with
        the threads that replace them."""
        return self._hung >= min(max(2, self._threads_max), self._threads_max + self._replacements_max)

    @property
    def used_up(self) -> bool:
        """Whether every thread hangs, with those that replace them: nothing runs here until a call returns."""
        return self._hung >= self._threads_max + self._replacements_max

    def stuck_for_s(self, now: float) -> float:
        """How long it has been stuck; 0 if it is not."""
        since_s = self._stuck_since_s
        return 0.0 if since_s is None else now - since_s

    def close(self) -> bool:
        """Start nothing any more. Never waits. True: no call is out."""
        with self._wakeup:
            self._closing = True
            for call in self._queue:
                if call.state is CallState.QUEUED:  # the others stay in the heap until they come up
                    call.move(CallEvent.CANCEL)
            self._queue.clear()
            self._queued = 0
            self._wakeup.notify_all()
            return not self._running

    def wait_idle(self) -> None:
        """Block until no call is out. For a closed lane, and never from the loop's thread."""
        with self._wakeup:
            self._wakeup.wait_for(lambda: not self._running)

    # --- under the lock -----------------------------------------------------------------------------------
    def _allowed_threads(self) -> int:
        return self._threads_max + min(self._hung, self._replacements_max)

    def _start_thread(self) -> None:
        """If the system gives no thread, queued calls wait for the existing ones, or become late; the next submission
        tries again. Raising here would leave a call behind that runs although nobody waits for it."""
        self._threads += 1
        if started(self._work, f"lane-{self.name}") is None:
            self._threads -= 1

    def _sweep(self) -> None:
        # Cancelled calls stay in the heap until they come up; when they outnumber the rest, they are removed together.
        if len(self._queue) > 2 * self._queued + 16:
            self._queue = [call for call in self._queue if call.state is CallState.QUEUED]
            heapq.heapify(self._queue)

    # --- lane threads -------------------------------------------------------------------------------------
    def _work(self) -> None:
        step_behind(by=self._nice, idle_disk=self._idle_disk)
        while (call := self._take()) is not None:
            try:
                call.result = call.work()
            except BaseException as error:  # noqa: BLE001 - belongs to whoever waits for the call
                call.error, call.failure = error, _message_of(error)
            with self._wakeup:
                self._running.pop(call, None)
                self._returns += 1
                if call.state is CallState.LATE:
                    self._hung -= 1
                    if not self.stuck:
                        self._stuck_since_s = None
                call.move(CallEvent.RETURN)
                if self._closing:
                    self._wakeup.notify_all()
            self._post(call)
            del call  # a waiting thread must not keep views of the pool alive

    def _take(self) -> Call | None:
        with self._wakeup:
            while True:
                while self._queue and self._queue[0].state is not CallState.QUEUED:
                    heapq.heappop(self._queue)
                if self._closing or self._threads > self._allowed_threads():
                    self._threads -= 1
                    return None
                if self._queue:
                    call = heapq.heappop(self._queue)
                    self._queued -= 1
                    call.move(CallEvent.TAKE)
                    self._running[call] = None
                    return call
                self._idle += 1
                self._wakeup.wait()
                self._idle -= 1


def _message_of(error: BaseException) -> str:
    """Here, on the lane: the text of a stranger's exception may raise, or take its time, and the loop has none."""
    return guarded(lambda second: type(error).__name__, lambda: excerpt(str(error) or repr(error)))
