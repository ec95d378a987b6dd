"""One tier of lmcache-core inside a host: its lanes, deadlines, breaker, checks and eviction, without a server.

A thread of ours does what the server's loop does for a tier. Bytes pass through a buffer of the lane's call on their
way: a lane that hangs in the medium's library holds that buffer, and never the host's memory.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from itertools import compress, groupby
from typing import Any, NamedTuple

from lmcache_core.clock import Clock
from lmcache_core.errors import CacheError, TierError
from lmcache_core.guard import guarded
from lmcache_core.limits import TIER_BATCH_KEYS_MAX
from lmcache_core.threads import started
from lmcache_core.tiers.contract import Outcome, Result
from lmcache_core.tiers.l1 import TierReason
from lmcache_core.tiers.object.epochs import Epochs
from lmcache_core.tiers.object.format import ObjectKind, tier_key
from lmcache_core.tiers.object.transfer import Loaded, Transfer
from lmcache_core.tiers.tier.call_states import CallState
from lmcache_core.tiers.tier.calls import ExistsCall, LoadCall, StoreCall
from lmcache_core.tiers.tier.lanes import WAITED_FOR, Posted
from lmcache_core.tiers.tier.tier import Tier
from lmcache_core.tokens import Namespace
from lmcache_hosts.requests import HostKey, HostObject, LentMemory, Request

__all__ = ["Deadlines", "TierObjects"]

log = logging.getLogger(__name__)

QUEUED_OBJECTS_MAX = 4096  # that wait to be stored: beyond it the answer is no, as a cache may give it
CALL_BYTES_MAX = 4 << 20  # a batch of the host goes over several lanes, and each has a buffer of this size at most
_IDLE_TURN_S = 1.0  # an adapter may ask for a recount without waking anybody
_WAITS = "waits"  # what becomes of a store that stays in the queue
_GRACE_S = 1.0  # beyond a deadline, for a loop that is short of processor time


class Deadlines(NamedTuple):
    """Seconds until the host has its answer, whatever the medium does. `store_s` is spent twice at most: in the queue,
    and on the medium (the tier's `deadline_s`)."""

    lookup_s: float = 1.0
    load_s: float = 5.0
    store_s: float = 30.0


class _Target(NamedTuple):
    """Where an object goes: a position of a request."""

    request: Request
    position: int

    @property
    def memory(self) -> LentMemory:
        return self.request.memory[self.position]


class _Flight:
    """One object on its way from the medium, for all who have asked for it meanwhile."""

    def __init__(self, transfer: Transfer, target: _Target) -> None:
        self.transfer = transfer
        self._targets = [target]
        self._lock = threading.Lock()
        self._landed = False
        self._filled: list[_Target] = []
        self.ended = False

    def join(self, target: _Target) -> bool:
        """False: too late, its bytes are being handed out."""
        with self._lock:
            if not self._landed:
                self._targets.append(target)
            return not self._landed

    def land(self, part: memoryview) -> None:
        """On the lane's thread: its checked bytes, for every target that still waits."""
        with self._lock:
            self._landed = True
        self._filled = [target for target in self._targets if target.memory.copy_from(part)]

    def end(self) -> bool:
        """On the loop's thread: an answer for everybody. Whether anybody has its bytes."""
        self.ended = True
        with self._lock:
            self._landed = True
        filled = self._filled
        for target in self._targets:
            target.request.answer(target.position, target in filled)
        return bool(filled)


class _Arrival:
    """One object that a host wants stored, and whoever else wants the same key stored meanwhile."""

    def __init__(self, transfer: Transfer, memory: LentMemory, target: _Target, deadline: float) -> None:
        self.transfer = transfer
        self.memory = memory
        self.deadline = deadline
        self._targets = [target]

    def join(self, target: _Target) -> None:
        self._targets.append(target)

    def answer(self, yes: bool) -> None:
        """For everybody. The host has its memory back."""
        self.memory.take_back()
        for target in self._targets:
            target.request.answer(target.position, yes)
        self._targets.clear()


class TierObjects:
    """Objects of a host on one tier. Every method may be called from any thread, never waits for the medium, and gives
    a `Request` that has its answers within its deadline. What cannot be had is a no; nothing is raised.

    `tier` is not started yet, and belongs to this from now on.
    """

    def __init__(self, tier: Tier, deadlines: Deadlines = Deadlines()) -> None:  # noqa: B008 - frozen
        self.tier = tier
        self.deadlines = deadlines
        self.counts: Counter[str] = Counter()
        self._epochs = Epochs()
        self._clock = Clock()
        self._wakeup = threading.Condition()
        self._woken = True  # for the first turn
        self._inbox: deque[Callable[[], None]] = deque()
        self._posted: deque[Posted] = deque()
        self._staging = _Staging()
        self._flights: dict[bytes, _Flight] = {}
        self._arrivals: dict[bytes, _Arrival] = {}  # on their way to the medium, those in the queue among them
        self._queue: deque[_Arrival] = deque()
        self._open: dict[Request, None] = {}
        self._close_by: float | None = None
        self._ended = False
        self._pid = os.getpid()
        tier.start(self._post, self._epochs, self._clock, stores_waited_for=True)
        self._thread = started(self._run, f"hosted-{tier.name}")
        if self._thread is None:
            self._ended = True
            self._end()
            raise TierError(f"tier {tier.name!r} has no thread to run on", cure="raise the limit of processes")

    # --- the host's side ----------------------------------------------------------------------------------
    def store(self, objects: Sequence[HostObject], on_done: Callable[[Sequence[bool]], None] | None = None) -> Request:
        """Yes: it is on the medium, whole, or was there already. The host may use its memory again at each answer."""
        return self._move(objects, on_done, self._begin_store, self.deadlines.store_s + self.tier.config.deadline_s)

    def load(self, objects: Sequence[HostObject], on_done: Callable[[Sequence[bool]], None] | None = None) -> Request:
        """Yes: the object's checked bytes are in the host's memory. No: the content of its memory is undefined."""
        return self._move(objects, on_done, self._begin_load, self.deadlines.load_s)

    def find(self, keys: Sequence[HostKey], on_done: Callable[[Sequence[bool]], None] | None = None) -> Request:
        """Yes: it is on the medium now, and its last load did not look damaged."""
        request = Request(len(keys), on_done, wait_s=self.deadlines.lookup_s + _GRACE_S)
        return self._ask(request, lambda request: self._begin_find(keys, request))

    def remove(self, keys: Sequence[HostKey], on_done: Callable[[Sequence[bool]], None] | None = None) -> Request:
        """From its answer on nobody finds them; they are deleted in the background. Yes: it was known to be there."""
        request = Request(len(keys), on_done, wait_s=self.deadlines.lookup_s + _GRACE_S)
        return self._ask(request, lambda request: self._remove(keys, request), though_late=True)

    def clear(self, namespaces: Sequence[Namespace]) -> Request:
        """As `remove`, for everything that is known of these namespaces. One answer: no, if the medium has not been
        listed to its end, so that it may hold more."""
        request = Request(1, wait_s=self.deadlines.store_s)
        return self._ask(request, lambda request: self._clear(namespaces, request), though_late=True)

    @property
    def serving(self) -> bool:
        """Whether lookups and loads are asked of the medium at all; False while its breaker is open."""
        return not self._ended and self.tier.view.healthy

    def status(self) -> dict[str, Any]:
        """Plain values: the tier's status, and what became of the host's requests."""
        box: list[dict[str, Any]] = []

        def look(request: Request) -> None:
            box.append(self.tier.status())
            request.answer(0, True)

        self._ask(Request(1, wait_s=self.deadlines.lookup_s), look).result()
        return {"counts": dict(self.counts), "closed": self._ended, "tier": box[0] if box else {}}

    def close(self, drain_s: float = 5.0) -> None:
        """Store what waits, and delete what was removed, for so long at most; then every open request is answered no.
        Idempotent."""
        if self._is_forked():
            return
        with self._wakeup:
            if self._close_by is None:
                self._close_by = time.monotonic() + drain_s
                self._inbox.append(self.tier.hurry)
                self._wake()
        if self._thread is not None and self._thread is not threading.current_thread():  # else from a host's callback
            self._thread.join(drain_s + _GRACE_S)

    def _move(
        self,
        objects: Sequence[HostObject],
        on_done: Callable[[Sequence[bool]], None] | None,
        begin: Callable[[Sequence[HostObject], Request], None],
        allowed_s: float,
    ) -> Request:
        memory = [LentMemory(each.view) for each in objects]
        request = Request(len(objects), on_done, memory, allowed_s + _GRACE_S)
        return self._ask(request, lambda request: begin(objects, request))

    def _ask(self, request: Request, begin: Callable[[Request], object], *, though_late: bool = False) -> Request:
        """`though_late`: it is done even if the host waits for it no more."""

        def failed(error: BaseException) -> None:
            _logged(error)
            request.refuse()

        def work() -> None:
            if request.answered and not though_late:
                return  # its memory is the host's again: nobody may join it
            self._open[request] = None
            guarded(failed, begin, request)

        if self._is_forked() or not self._put(work):
            request.refuse()
        return request

    def _is_forked(self) -> bool:
        """A child has not our thread, and the lock as it was: asked before the lock is taken."""
        return os.getpid() != self._pid

    def _put(self, work: Callable[[], None]) -> bool:
        """Whether the loop takes it."""
        with self._wakeup:
            open_ = not self._ended and self._close_by is None
            if open_:
                self._inbox.append(work)
                self._wake()
        return open_

    # --- the loop -----------------------------------------------------------------------------------------
    def _post(self, posted: Posted) -> None:
        with self._wakeup:
            self._posted.append(posted)
            self._wake()

    def _wake(self) -> None:
        """With the lock held. The loop takes another turn, also if it does not wait yet."""
        self._woken = True
        self._wakeup.notify()

    def _run(self) -> None:
        while not self._is_over():
            with self._wakeup:
                if not self._woken:
                    self._wakeup.wait(self._pause_s())
                self._woken = False
            self._clock.turn()
            for work in self._taken(self._inbox):
                guarded(_logged, work)
            for posted in self._taken(self._posted):
                guarded(_logged, posted.tell_end)
            guarded(_logged, self.tier.step)
            guarded(_logged, self._submit_stores)
            for request in [each for each in self._open if each.answered]:
                del self._open[request]
        self._end()

    def _taken(self, box: deque[Any]) -> list[Any]:
        with self._wakeup:
            taken = list(box)
            box.clear()
        return taken

    def _pause_s(self) -> float:
        times = [self._clock.now + _IDLE_TURN_S]
        if (soonest := self.tier.next_deadline()) is not None:
            times.append(soonest)
        if self._queue:
            times += [self._queue[0].deadline]
            if self.tier.stores_rest_until > self._clock.now:
                times.append(self.tier.stores_rest_until)
        if self._close_by is not None:
            times.append(self._close_by)
        return max(0.0, min(times) - self._clock.read())

    def _is_over(self) -> bool:
        if self._close_by is None:
            return False
        waits = (self._arrivals and self.tier.takes_stores) or self.tier.owes_deletes
        return not (self._inbox or self._posted or waits) or self._clock.read() >= self._close_by

    def _end(self) -> None:
        with self._wakeup:
            self._ended = True
            begun, self._inbox = self._inbox, deque()
        for work in begun:  # so that their requests are among the open ones
            guarded(_logged, work)
        guarded(_logged, self.tier.abandon)
        for arrival in list(self._arrivals.values()):
            arrival.answer(False)
        for request in list(self._open):
            request.refuse()
        guarded(_logged, self.tier.close)

    # --- lookups ------------------------------------------------------------------------------------------
    def _tier_key(self, namespace_id: int, key: bytes) -> bytes:
        return tier_key(key, namespace_id, self._epochs.of(namespace_id))

    def _begin_find(self, keys: Sequence[HostKey], request: Request) -> None:
        names = [self._tier_key(each.namespace.id, each.key) for each in keys]
        deadline = self._clock.now + self.deadlines.lookup_s
        call = _Find(self, names, request, deadline)
        if call.begin() is not None:
            self.counts["lookup_refused"] += len(keys)
            request.refuse()

    def found(self, names: Sequence[bytes], request: Request, there: Sequence[bool] | None) -> None:
        """A lookup has its answer, or has none."""
        if there is None:
            self.counts["lookup_failed"] += len(names)
            return request.refuse()
        tier = self.tier
        served = [yes and name not in tier.verdicts for yes, name in zip(there, names, strict=True)]
        tier.accounting.touch([name for name, yes in zip(names, served, strict=True) if yes])
        self.counts["found"] += sum(served)
        self.counts["not_found"] += len(served) - sum(served)
        for position, yes in enumerate(served):
            request.answer(position, yes)
        return None

    # --- loads --------------------------------------------------------------------------------------------
    def _begin_load(self, objects: Sequence[HostObject], request: Request) -> None:
        fresh: list[_Flight] = []
        mine: dict[bytes, _Flight] = {}  # nobody else may join them before they are on their way
        names = [self._tier_key(each.namespace.id, each.key) for each in objects]
        dropped = self.tier.accounting.drops_of(names)
        for position, (each, name) in enumerate(zip(objects, names, strict=True)):
            target = _Target(request, position)
            kind = self._kind(each.namespace, target.memory)
            flight = mine.get(name) or self._flights.get(name)
            if kind is None or name in dropped:
                request.answer(position, False)
            elif flight is not None and flight.transfer.kind is kind and flight.join(target):
                self.counts["joined"] += 1
            else:
                transfer = Transfer(each.key, each.namespace.id, self._epochs.of(each.namespace.id), kind, _NOTHING)
                flight = mine[name] = _Flight(transfer, target)
                fresh.append(flight)
        for batch in _batches(fresh, lambda flight: flight.transfer.kind):
            call = _Load(self, batch, self._clock.now + self.deadlines.load_s)
            if call.begin() is None:
                self._flights.update((flight.transfer.tier_key, flight) for flight in batch)
            else:
                self.counts["load_refused"] += len(batch)
                self.landed(batch)

    def landed(self, flights: Sequence[_Flight]) -> None:
        """Loads have ended, or nobody waits for them any more."""
        for flight in flights:
            if not flight.ended:  # else it was late, and everybody has an answer
                if self._flights.get(flight.transfer.tier_key) is flight:
                    del self._flights[flight.transfer.tier_key]
                self.counts["loaded" if flight.end() else "not_loaded"] += 1

    # --- stores -------------------------------------------------------------------------------------------
    def _begin_store(self, objects: Sequence[HostObject], request: Request) -> None:
        deadline = self._clock.now + self.deadlines.store_s
        names = [self._tier_key(each.namespace.id, each.key) for each in objects]
        for position, (each, name) in enumerate(zip(objects, names, strict=True)):
            target = _Target(request, position)
            kind = self._kind(each.namespace, target.memory)
            if kind is None or not self.tier.gets_stores:
                request.answer(position, False)
            elif self.tier.accounting.knows(name):
                self.tier.accounting.touch([name])
                self.counts["there_already"] += 1
                request.answer(position, True)
            elif name in self._arrivals:
                request.memory[position].take_back()  # equal keys have equal bytes: the first is stored, or none
                self._arrivals[name].join(target)
                self.counts["joined"] += 1
            elif len(self._queue) >= QUEUED_OBJECTS_MAX:
                self.counts["store_refused"] += 1
                request.answer(position, False)
            else:
                transfer = Transfer(each.key, each.namespace.id, self._epochs.of(each.namespace.id), kind, _NOTHING)
                arrival = _Arrival(transfer, target.memory, target, deadline)
                self._arrivals[name] = arrival
                self._queue.append(arrival)

    def _submit_stores(self) -> None:
        """Give the lanes what they take now; the rest waits for room, for their share of the processor, or its end."""
        while self._queue:
            batch = [self._queue.popleft()]  # from here on it is in a call, or has an answer
            what = guarded(self._not_submitted, self._submit, batch)
            if what == _WAITS:
                self._queue.appendleft(batch[0])
                return
            if what:
                self.stored(batch, what)
        self.tier.room_is_not_wanted()

    def _submit(self, batch: list[_Arrival]) -> str:
        """Store this one, and what can go with it. Returns why it ends here, or that it waits; empty if it is on its
        way."""
        tier, (head,) = self.tier, batch
        if head.deadline <= self._clock.now or tier.order.hung((head.transfer.tier_key,)):
            return "store_late"
        sized = guarded(_logged, tier.bytes_to_reserve, head.transfer.kind.layout)
        if sized is None:
            return "store_refused"
        room = tier.make_room(sized[0], head.transfer.namespace)
        if room in (TierReason.NO_ROOM, TierReason.TIER_ERROR):
            return "store_full"
        if room is not None or not tier.stores_allowed():
            return _WAITS if tier.takes_stores else "store_refused"  # its breaker is open: nobody waits for it
        reserved = [sized[0]]
        if sized[1] and tier.takes_stores:  # else it is the probe, or of unknown size
            self._take_more(batch, reserved)
        if _Store(self, batch, reserved).begin() is None:
            return ""
        tier.health.stores.not_used()
        return "store_refused"

    def _not_submitted(self, error: BaseException) -> str:
        _logged(error)
        self.tier.health.stores.not_used()
        return "store_failed"

    def _take_more(self, batch: list[_Arrival], reserved: list[int]) -> None:
        tier, first = self.tier, batch[0].transfer
        most = max(1, min(tier.batch_keys_max, CALL_BYTES_MAX // max(1, first.kind.layout.nbytes)))
        while self._queue and len(batch) < most:
            each = self._queue[0]
            if (each.transfer.namespace, each.transfer.kind) != (first.namespace, first.kind):
                return
            nbytes, _ = tier.bytes_to_reserve(first.kind.layout)
            total = sum(reserved) + nbytes
            late = each.deadline <= self._clock.now or tier.order.hung((each.transfer.tier_key,))
            if late or not tier.accounting.fits(total) or tier.accounting.over_limit(first.namespace, total):
                return
            batch.append(self._queue.popleft())
            reserved.append(nbytes)

    def stored(self, arrivals: Sequence[_Arrival], what: str) -> None:
        """Stores have ended so, or nobody waits for them any more. `what`: "stored", or why not."""
        self.counts[what] += len(arrivals)
        for arrival in arrivals:
            name = arrival.transfer.tier_key
            if self._arrivals.get(name) is arrival:
                del self._arrivals[name]
            arrival.answer(what == "stored")

    # --- removals -----------------------------------------------------------------------------------------
    def _remove(self, keys: Sequence[HostKey], request: Request) -> None:
        names = [self._tier_key(each.namespace.id, each.key) for each in keys]
        had = self.tier.remove(names)
        for position, name in enumerate(names):
            request.answer(position, name in had)

    def _clear(self, namespaces: Sequence[Namespace], request: Request) -> None:
        chosen = {each.id for each in namespaces}
        for shard in self.tier.accounting.shards():
            names = [each.tier_key for each in shard if each.namespace in chosen]
            if names:
                self.tier.remove(names)
        request.answer(0, self.tier.is_listed)

    def _kind(self, namespace: Namespace, memory: LentMemory) -> ObjectKind | None:
        """None: the tier cannot have such objects, or the buffer has another size than the namespace says."""
        if memory.nbytes != namespace.layout.nbytes:
            self.counts["wrong_size"] += 1
            return None
        return guarded(self._no_kind, self.tier.kind, namespace.layout)

    def _no_kind(self, error: BaseException) -> None:
        self.counts["wrong_layout"] += 1
        _logged(error)

    def staging(self, batch: Sequence[Transfer]) -> AbstractContextManager[list[memoryview]]:
        """Room for each of these, for a call of a lane."""
        return self._staging.lend([each.kind.layout.nbytes for each in batch])


class _Find(ExistsCall):
    def __init__(self, owner: TierObjects, names: Sequence[bytes], request: Request, deadline: float) -> None:
        super().__init__(owner.tier, names, deadline, WAITED_FOR)
        self._owner = owner
        self._request = request

    def answered(self, found: Sequence[bool] | None, reason: TierReason | None) -> None:
        self._owner.found(self.keys, self._request, found)


class _Load(LoadCall):
    """Loads into buffers of its thread, and hands out what is whole to those who still wait."""

    def __init__(self, owner: TierObjects, flights: Sequence[_Flight], deadline: float) -> None:
        super().__init__(owner.tier, [flight.transfer for flight in flights], deadline, WAITED_FOR)
        self._owner = owner
        self._flights = flights

    def work(self) -> list[Loaded]:
        with self._owner.staging(self.batch) as parts:
            staged = [each._replace(view=part) for each, part in zip(self.batch, parts, strict=True)]
            results = self.tier.carrier.load(staged, self.deadline)
            for flight, part, result in zip(self._flights, parts, results, strict=True):
                if result.reason is None:
                    flight.land(part)
        return results

    def loaded(self, results: Sequence[Loaded]) -> None:
        self._owner.landed(self._flights)

    def given_up(self, *, running: bool) -> None:
        self._owner.landed(self._flights)


class _Store(StoreCall):
    """Copies the host's bytes first: what is slow or hangs has only the copy."""

    def __init__(self, owner: TierObjects, arrivals: Sequence[_Arrival], reserved: Sequence[int]) -> None:
        super().__init__(owner.tier, [arrival.transfer for arrival in arrivals], reserved)
        self._owner = owner
        self._arrivals = arrivals
        self._copied = arrivals  # without those whose hosts had their memory back when a thread was free

    def work(self) -> list[Outcome]:
        with self._owner.staging(self.batch) as parts:
            copied = [arrival.memory.copy_to(part) for arrival, part in zip(self._arrivals, parts, strict=True)]
            for arrival in self._arrivals:
                arrival.memory.take_back()
            staged = [
                each._replace(view=part, checksum=arrival.memory.checksum)
                for each, arrival, part in zip(self.batch, self._arrivals, parts, strict=True)
            ]
            self.batch, self.keys = list(compress(staged, copied)), list(compress(self.keys, copied))
            self.reserved, self._copied = list(compress(self.reserved, copied)), list(compress(self._arrivals, copied))
            return super().work() if self.batch else []

    def stored(self, outcomes: Sequence[Outcome]) -> None:
        if self.state is not CallState.EXPIRED and not self.was_late:
            for arrival, outcome in zip(self._copied, outcomes, strict=True):
                done = outcome.result is Result.DONE
                self._owner.stored([arrival], "stored" if done else f"store_{outcome.result}")
            self._owner.stored([arrival for arrival in self._arrivals if arrival not in self._copied], "store_late")
        else:
            self._owner.stored(self._arrivals, "store_late")

    def late(self) -> None:
        running = self.state is not CallState.EXPIRED
        super().late()
        if running:  # its end follows some day, for the tier's accounts: the host has its answer now
            self._owner.stored(self._arrivals, "store_late")


class _Staging:
    """Buffers on pages, as many as calls run at once, and as large as those calls. The last one that was given back is
    the next one lent: it is the likeliest to be in the processor's cache. A call that hangs keeps its own."""

    def __init__(self) -> None:
        self._free: list[memoryview] = []  # lists are thread-safe at their end

    @contextlib.contextmanager
    def lend(self, sizes: Sequence[int]) -> Iterator[list[memoryview]]:
        total = sum(_on_pages(size) for size in sizes)
        buffer = self._last() or memoryview(b"")
        if buffer.nbytes < total:
            room = mmap.mmap(-1, total, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            with contextlib.suppress(OSError):  # of a kernel without huge pages
                room.madvise(mmap.MADV_HUGEPAGE)
            buffer = memoryview(room)
        at, parts = 0, []
        for size in sizes:
            parts.append(buffer[at : at + size])
            at += _on_pages(size)
        try:
            yield parts
        finally:
            self._free.append(buffer)

    def _last(self) -> memoryview | None:
        try:
            return self._free.pop()
        except IndexError:
            return None


def _on_pages(nbytes: int) -> int:
    return -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE


_NOTHING = memoryview(b"")


def _batches(flights: Sequence[_Flight], kind: Callable[[_Flight], ObjectKind]) -> list[list[_Flight]]:
    """In the order of the host, as many of one kind as a lane takes at once."""
    batches: list[list[_Flight]] = []
    for each, group in groupby(flights, key=kind):
        some = list(group)
        most = max(1, min(TIER_BATCH_KEYS_MAX, CALL_BYTES_MAX // max(1, each.layout.nbytes)))
        batches += [some[at : at + most] for at in range(0, len(some), most)]
    return batches


def _logged(error: BaseException) -> None:
    known = isinstance(error, CacheError)
    log.error("a request of the host was not served: %s", error, exc_info=None if known else error)
