"""The event bus: a bounded queue of events from the loop, and one thread that calls the subscribers.

Nobody waits for anybody. A full bus drops new events, keeps the queued ones, and counts the loss. A subscriber that
raises or hangs is disabled, and the others continue; one that raised and may recover is tried again after a pause.
"""

from __future__ import annotations

import logging
import math
import threading
import time
import traceback
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

from lmcache_core.clock import Clock
from lmcache_core.guard import guarded
from lmcache_core.limits import (
    EVENT_BATCH_MAX,
    EVENT_BATCH_OBJECTS,
    EVENT_BATCH_S,
    EVENT_BUS_OBJECTS_MAX,
    EVENT_PATIENCE_S,
    EVENT_QUIET_S,
    EVENT_REST_S_MAX,
    EVENTS_CLOSE_S,
    SUBSCRIBER_HANG_S,
    SUBSCRIBER_RETRY_S,
    SUBSCRIBER_RETRY_S_MAX,
)
from lmcache_core.observe.events import CacheEvent, EventsMissed, Maker, one
from lmcache_core.observe.subscriber import EventSubscriber
from lmcache_core.threads import started

log = logging.getLogger(__name__)
BUS_THREAD = "lmcache-events"


class _Happened(NamedTuple):
    at_s: float
    make: Maker
    arguments: tuple[Any, ...]
    more: Mapping[str, Any]
    objects: int
    queued_at_s: float  # monotonic


class _State:
    """One subscriber and its state."""

    def __init__(self, subscriber: EventSubscriber) -> None:
        self.subscriber = subscriber
        self.events = 0
        self.missed = 0  # events that it missed while it was disabled,
        self.unreported = 0  # and how many of those were not reported to it
        self.closed = False
        self.disabled = ""  # why it was disabled; empty if it was not
        self.again_at_s = math.inf  # when it is tried again, on the monotonic clock
        self._pause_s = SUBSCRIBER_RETRY_S

    @property
    def left_out(self) -> bool:
        return bool(self.disabled) and time.monotonic() < self.again_at_s

    def miss(self, events: Sequence[CacheEvent]) -> None:
        dropped = [event.events for event in events if isinstance(event, EventsMissed)]  # by a full bus: `dropped`
        self.missed += len(events) - len(dropped)
        self.unreported += len(events) - len(dropped) + sum(dropped)

    def put_aside(self, why: str, *, may_recover: bool) -> None:
        self.disabled, self.again_at_s = why, math.inf
        if may_recover:
            self.again_at_s = time.monotonic() + self._pause_s
            self._pause_s = min(2 * self._pause_s, SUBSCRIBER_RETRY_S_MAX)

    def recover(self) -> None:
        self.disabled, self.unreported, self._pause_s = "", 0, SUBSCRIBER_RETRY_S


class _Call(NamedTuple):
    """Of one subscriber, which has not come back yet."""

    name: str
    events: Sequence[CacheEvent]
    since_s: float  # monotonic


class EventBus:
    """`emit` and `check` are for the loop, `status` for any thread; everything else runs on the bus's own thread."""

    def __init__(
        self,
        subscribers: Mapping[str, EventSubscriber],
        queue_size: int,
        clock: Clock,
        *,
        batch_s: float = EVENT_BATCH_S,
        now: Any = time.time,
    ) -> None:
        """`queue_size`: how many calls of `emit` may wait; one may be about a thousand objects, and the objects are
        limited too. `clock`: the loop's. `batch_s`: how long to wait for more before subscribers are called."""
        self.queue_size = queue_size
        self.emitted = 0
        self.dropped = 0
        self._unreported = 0  # of these, the number not yet reported to subscribers
        self._clock = clock
        self._batch_s = batch_s
        self._now = now
        self._states = {name: _State(subscriber) for name, subscriber in subscribers.items()}
        self._queue: deque[_Happened] = deque()
        self._objects_in = 0  # changed only by the loop
        self._objects_out = 0  # changed only by the bus's thread
        self._awake = False
        self._wake = threading.Event()
        self._stopping = threading.Event()
        self._owed: deque[tuple[str, Sequence[CacheEvent]]] = deque()  # for subscribers without the current batch
        self._lock = threading.Lock()  # guards the next two, briefly
        self._busy: _Call | None = None
        self._turn = 0  # changes when a thread is abandoned with its subscriber
        self._thread: threading.Thread | None = None
        self._lacks_thread = False
        self._restart()

    # --- the loop's side ------------------------------------------------------------------------------------

    def emit(self, make: Maker, *arguments: Any, keeps: int = 0, **more: Any) -> None:
        """Queue an occurrence: `make(at_s, *arguments, **more)` will build its events later. Never waits and builds
        nothing. The arguments must not change afterwards. `keeps`: how many objects it keeps in memory until it is
        delivered; no event has a field of that name."""
        waiting = self._objects_in - self._objects_out
        if len(self._queue) >= self.queue_size or (waiting and waiting + keeps > EVENT_BUS_OBJECTS_MAX):
            self.dropped += 1
            self._unreported += 1
            return
        if self._unreported:
            self._tell_missed()
        self._queue.append(_Happened(self._now(), make, arguments, more, keeps, time.monotonic()))
        self._objects_in += keeps
        self.emitted += 1
        if not self._awake:
            self._awake = True
            self._wake.set()

    def check(self) -> None:
        """Disable a subscriber that has hung too long, and continue without it. Call this regularly."""
        if self._unreported and len(self._queue) < self.queue_size:
            self._tell_missed()
            self._wake.set()
        if self._lacks_thread:
            self._restart()
        self._leave(SUBSCRIBER_HANG_S)

    def _leave(self, hang_s: float) -> None:
        """If a subscriber has not come back for so long: disable it, and go on with the others in another thread."""
        with self._lock:
            call = self._busy
            if call is None or time.monotonic() - call.since_s <= hang_s:
                return
            self._turn += 1  # its thread closes the subscriber and ends when it returns
            self._busy = None
        self._states[call.name].miss(call.events)
        self._put_aside(call.name, f"it did not return within {hang_s:g} s", may_recover=False)
        self._restart()

    def _restart(self) -> None:
        """Another thread; if there is none to be had, `check` tries again."""
        thread = self._start()
        self._lacks_thread = thread is None
        self._thread = thread or self._thread

    def _tell_missed(self) -> None:
        """In order: after everything queued before, and before everything queued from now on."""
        self._queue.append(
            _Happened(self._now(), one, (EventsMissed,), {"events": self._unreported}, 0, time.monotonic())
        )
        self._unreported = 0

    def close(self) -> None:
        """Deliver the rest and close the subscribers. Waits for `EVENTS_CLOSE_S` for the first that hangs, and as long
        again for all others that do."""
        self._stopping.set()
        patience_s = EVENTS_CLOSE_S
        for _ in range(len(self._states) + 1):
            self._wake.set()
            if self._thread is not None:
                self._thread.join(patience_s)
                if not self._thread.is_alive() and not self._lacks_thread:
                    return
            self._leave(patience_s / 2)
            patience_s = EVENTS_CLOSE_S / len(self._states)
        with self._lock:
            self._turn += 1
        log.warning("not all events were delivered at shutdown: the subscribers took too long")

    def status(self) -> dict[str, Any]:
        """For `status`."""
        return {
            "queue": len(self._queue),
            "queue_size": self.queue_size,
            "emitted": self.emitted,
            "dropped": self.dropped,
            "subscribers": {
                name: {"events": each.events, "missed": each.missed, "disabled": each.disabled}
                for name, each in self._states.items()
            },
        }

    # --- the bus's thread -----------------------------------------------------------------------------------

    def _start(self) -> threading.Thread | None:
        return started(partial(self._run, self._turn), BUS_THREAD)

    def _run(self, turn: int) -> None:
        while self._turn == turn:
            ended = self._stopping.is_set()  # checked first, so that everything queued before it is delivered
            if ended:
                self._end_pauses()
            self._awake = False
            began_s = time.monotonic()
            while self._tell_owed(turn) and self._wait_for_quiet() and self._take():
                if len(self._queue) < self.queue_size // 2:
                    self._stopping.wait(min(EVENT_REST_S_MAX, time.monotonic() - began_s))
                began_s = time.monotonic()
            if self._turn != turn:
                return
            if ended and not self._queue:
                self._close_all(turn)
                return
            self._wake.wait()
            self._wake.clear()
            self._stopping.wait(self._batch_s)  # a moment, for more to come: fewer and larger batches

    def _end_pauses(self) -> None:
        """There is no later: one that may recover gets the count of events that it missed, and the rest."""
        for name, each in self._states.items():
            if each.disabled and each.again_at_s < math.inf:
                each.again_at_s = 0.0
                self._owed.append((name, ()))

    def _wait_for_quiet(self) -> bool:
        """Leave the interpreter to the loop until that has had nothing to do for `EVENT_QUIET_S`. Not where the queue
        is half full, and no event waits for this longer than `EVENT_PATIENCE_S`. Returns True."""
        while (
            self._queue
            and len(self._queue) < self.queue_size // 2
            and self._objects_in - self._objects_out < EVENT_BUS_OBJECTS_MAX // 2
            and time.monotonic() - self._queue[0].queued_at_s < EVENT_PATIENCE_S
            and self._clock.read() - self._clock.rests_since_s < EVENT_QUIET_S
        ):
            if self._stopping.wait(EVENT_BATCH_S):
                break
        return True

    def _take(self) -> bool:
        """Build the next batch for every subscriber; it may be empty. False: nothing waits."""
        if not self._queue:
            return False
        batch: list[CacheEvent] = []
        objects = 0
        while self._queue and len(batch) < EVENT_BATCH_MAX and objects < EVENT_BATCH_OBJECTS:
            happened = self._queue.popleft()
            objects += happened.objects
            self._objects_out += happened.objects
            batch += _made(happened)
        if batch:
            self._owed.extend((name, batch) for name in self._states)
        return True

    def _tell_owed(self, turn: int) -> bool:
        """Deliver what is owed. False: this thread was abandoned meanwhile, and must not touch anything."""
        while self._owed:
            name, batch = self._owed.popleft()
            state = self._states[name]
            if state.left_out:
                state.miss(batch)
                continue
            events = [EventsMissed(at_s=self._now(), events=state.unreported), *batch] if state.unreported else batch
            if not self._begins(turn, name, batch):
                return False
            failure: BaseException | None = guarded(_itself, state.subscriber.hear, events)
            if not self._comes_back(turn):
                self._close_one(name)  # it was disabled meanwhile, and only this thread knows that it is idle
                return False
            if failure is not None:
                state.miss(batch)
                self._failed(name, failure)
                continue
            state.events += len(batch)
            if state.disabled:
                log.warning("the event subscriber %s is enabled again: it missed %d events", name, state.unreported)
                state.recover()
        return True

    def _begins(self, turn: int, name: str, events: Sequence[CacheEvent] = ()) -> bool:
        """This thread is about to call a subscriber. False: the bus was closed, and no longer waits for it."""
        with self._lock:
            if self._turn == turn:
                self._busy = _Call(name, events, time.monotonic())
            return self._turn == turn

    def _comes_back(self, turn: int) -> bool:
        """The subscriber has returned. False: too late, another thread has taken over."""
        with self._lock:
            if self._turn == turn:
                self._busy = None
            return self._turn == turn

    def _failed(self, name: str, error: BaseException) -> None:
        state = self._states[name]
        if not state.disabled:
            log.error("the event subscriber %s failed", name, exc_info=error)
        # Also for errors that cannot say what they are.
        why = traceback.format_exception_only(error)[-1].strip()
        self._put_aside(name, why, may_recover=state.subscriber.may_recover)
        if not state.subscriber.may_recover:
            self._close_one(name)

    def _put_aside(self, name: str, why: str, *, may_recover: bool) -> None:
        state = self._states[name]
        if not state.disabled:
            again = ", and tried again after a pause" if may_recover else ""
            log.error("the event subscriber %s is disabled%s: %s", name, again, why)
        state.put_aside(why, may_recover=may_recover)

    def _close_all(self, turn: int) -> None:
        for name, each in self._states.items():
            if each.closed or (each.disabled and each.again_at_s == math.inf):
                continue
            if not self._begins(turn, name):
                return
            self._close_one(name)
            if not self._comes_back(turn):
                return

    def _close_one(self, name: str) -> None:
        state = self._states[name]
        state.closed = True
        guarded(partial(_failed_closing, name), state.subscriber.close)


def _itself(error: BaseException) -> BaseException:
    return error


def _failed_closing(name: str, error: BaseException) -> None:
    log.error("the event subscriber %s failed while closing", name, exc_info=error)


def _made(happened: _Happened) -> Iterable[CacheEvent]:
    def make() -> Iterable[CacheEvent]:
        return list(islice(happened.make(happened.at_s, *happened.arguments, **happened.more), EVENT_BATCH_MAX))

    def failed(error: BaseException) -> Iterable[CacheEvent]:
        log.error("an event could not be made", exc_info=error)
        return ()

    return guarded(failed, make)
