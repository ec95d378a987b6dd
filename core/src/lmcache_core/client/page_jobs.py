"""Page jobs: copies by threads of the extension, which advance whenever somebody asks for their progress.

A client has no thread of its own (decision 0001), and no job has one that runs Python: its threads only copy. The calls
that start a job, wait for it or poll it exchange messages with the server (decision 0018). The occupancy tracks every
lease of a job and knows the job's threads, so whatever ends the client, its session or the server can find them.
"""

from __future__ import annotations

import logging
import threading
import time
from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from lmcache_core.client.channel import Pending, expect
from lmcache_core.client.devices import DeviceEvent
from lmcache_core.client.hits import CHANGED, DAMAGED, READ, VERIFY, Hits
from lmcache_core.client.leases import Lease, ReadLease, WriteLease
from lmcache_core.client.link import Link
from lmcache_core.client.links import Links
from lmcache_core.client.page_states import (
    FRAME_TRANSITIONS,
    LEASED_READ_TRANSITIONS,
    FrameEvent,
    FrameState,
    LeasedReadEvent,
    LeasedReadState,
)
from lmcache_core.client.presence import Presence
from lmcache_core.client.promises import Promise, frames_of
from lmcache_core.client.regions import RegionTables
from lmcache_core.client.results import Status, settled_statuses
from lmcache_core.client.retrieving import over_share
from lmcache_core.errors import CacheError, ClearedError, DisconnectedError, LeaseExpiredError, UnknownNamespaceError
from lmcache_core.kernel.answers import Reason
from lmcache_core.limits import BATCH_KEYS_MAX, STORE_PAGE_KEYS
from lmcache_core.protocol import messages as m
from lmcache_core.protocol.codec import join_keys
from lmcache_core.tokens.namespace import Namespace

log = logging.getLogger("lmcache_core.client")

_WRITTEN = 16  # added to a job's result for an object: some of its pages were written to
_LOOK_S = 0.0005
_SLICE_S = 0.05  # a wait in C cannot be interrupted
_Outcome = tuple[Status, Reason]


@dataclass(frozen=True)
class PagesResult:
    """The outcome of each key, by entry and then by key, and of the pages.

    `untrusted`: for each entry the ids of pages that were, or may have been, written to and do not hold their keys'
    data: the object left the pool meanwhile, proved damaged, or the job was cancelled. Pages of hits are right, and all
    other pages are unchanged. For a store it is always empty. `incarnations`: which incarnation of each key was read,
    or tried, for `Client.drop`; 0 if none was, or it is unknown.
    """

    statuses: Sequence[Sequence[Status]]
    reasons: Sequence[Sequence[Reason]]
    untrusted: Sequence[Sequence[int]]
    incarnations: Sequence[Sequence[int]]

    @property
    def hits(self) -> int:
        """How many keys were read."""
        return sum(list(statuses).count(Status.HIT) for statuses in self.statuses)

    @property
    def stored(self) -> int:
        """How many keys can be read now: stored by this call, or already there."""
        return sum(status in (Status.STORED, Status.EXISTS) for each in self.statuses for status in each)


class GroupKeys(NamedTuple):
    """Keys of one group. `traceparent`: the trace of their store."""

    namespace: Namespace
    keys: list[bytes]
    traceparent: str = ""


class Ground(NamedTuple):
    """What the jobs of one registration share."""

    links: Links
    hits: Hits
    threads: int
    tables: RegionTables  # their owners keep the memory of the pages alive
    engine: Any  # `_native`, or `pages_plain`
    has_index: bool


class Frame:
    """Keys of one entry that are requested from the server in one message, and the lease that results."""

    def __init__(
        self,
        ground: Ground,
        entry: int,
        positions: Sequence[int],
        namespace: Namespace,
        keys: Sequence[bytes],
        make_lease: Callable[[], Lease],
        message: Callable[[int, int], m.Message],
    ) -> None:
        self.entry = entry
        self.positions = positions  # of its keys within the entry
        self.keys = keys
        self.lease = make_lease()
        self.state = FrameState.WANTED
        self._links = ground.links
        self._namespace = namespace
        self._make_lease = make_lease
        self._message = message
        self._link: Link | None = None
        self._binding: Pending | None = None
        self._pending: Pending | None = None
        self._again = True  # whether it may re-register a namespace that the server has forgotten

    def move(self, event: FrameEvent) -> None:
        """The only way to change the state. A step that is not in the table is a bug of the caller: `KeyError`."""
        self.state = FRAME_TRANSITIONS[self.state, event]

    @property
    def heard(self) -> bool:
        """The outcome of each key is known, as far as it will ever be."""
        return self.state is FrameState.HEARD

    def get_on(self, patient: bool = False) -> bool:
        """Send the request, or take the answer if it has arrived; returns whether it has. `patient`: wait for a link as
        any call does."""
        if self.heard:
            return True
        try:
            if self.state is FrameState.WANTED:
                if self._pending is None:
                    self._send(self._links.current() if patient else self._links.step())
                if self._pending is not None:  # also after an interrupt before this line: it is already sent
                    self.move(FrameEvent.ASK if self._binding is None else FrameEvent.BIND)
            self._hear()
        except UnknownNamespaceError as error:
            assert self._link is not None
            self._link.remove_binding(self._namespace)
            if not self._again:
                self._refuse(error)
                return True
            self.lease.leave()
            lease = self._make_lease()
            # The state first: after a later interrupt this handles the same answer again.
            self.move(FrameEvent.REPEAT)
            self.lease, self._pending, self._binding, self._again = lease, None, None, False
        except CacheError as error:
            self._refuse(error)
        return self.heard

    def _send(self, link: Link | None) -> None:
        if link is None:
            return
        link.mapped()
        self._link = link
        # The server answers in order: the namespace is registered before it gets to the request.
        self._binding = link.start_binding(self._namespace)
        self._pending = self.lease.start(link, self._message, len(self.keys))

    def _hear(self) -> None:
        link, binding, pending = self._link, self._binding, self._pending
        if link is None or pending is None:
            return
        if self.state is FrameState.BINDING and binding is not None:
            bound = link.channel.poll(binding)
            if bound is None:
                return
            link.note_bound(self._namespace.id, self._namespace.layout, bound)
            self.move(FrameEvent.BOUND)
        reply = link.channel.poll(pending)
        if reply is None:
            return
        self.lease.hear(link, reply, len(self.keys))
        if isinstance(self.lease, ReadLease):
            self.lease.watch(self.keys)
        self.move(FrameEvent.ANSWER)

    def _refuse(self, error: CacheError) -> None:
        self.move(FrameEvent.REFUSE)
        self.lease.refuse(error, len(self.keys))

    def cancel(self, outcome: _Outcome) -> None:
        """Give up the answer: if it arrives, what it grants is given back."""
        if not self.heard:
            self.move(FrameEvent.CANCEL)
            self.lease.leave()
            self.lease.add_ungranted(*outcome, len(self.keys))

    def wait(self, timeout_s: float) -> None:
        """Until something has arrived, at most for that long."""
        waits_for = self._binding if self.state is FrameState.BINDING else self._pending
        if self._link is None or waits_for is None:
            self._links.wait(timeout_s)
        else:
            _wait_for(self._link, waits_for, timeout_s)


def _wait_for(link: Link, pending: Pending, timeout_s: float) -> None:
    try:
        link.channel.wait_for(pending, timeout_s)
    except CacheError:
        return  # the next poll reports it


def _frames_of(
    ground: Ground,
    number: int,
    entry: GroupKeys,
    positions: Sequence[int],
    size: int,
    make_lease: Callable[[], Lease],
    message: Callable[[bytes, int], Callable[[int, int], m.Message]],
    promise: Promise | None = None,
) -> list[Frame]:
    """`message`: builds one from the keys and the id of the promise that holds them (0: none)."""
    frames = []
    wanted = [entry.keys[at] for at in positions]
    for first, end, kept_by in frames_of(wanted, promise, size):
        some, keys = positions[first:end], wanted[first:end]
        frames.append(Frame(ground, number, some, entry.namespace, keys, make_lease, message(join_keys(keys), kept_by)))
    return frames


class _Answer:
    """The server's answer to the end of a lease, for positions whose outcome cannot be known otherwise."""

    def __init__(self, frame: Frame, link: Link, pending: Pending, told: list[int], unproven: set[int]) -> None:
        self.frame = frame
        self.link = link
        self.pending = pending
        self._told = told
        self._unproven = unproven

    def hear(self) -> list[tuple[int, Status]] | None:
        """(Position in the entry, status); None: it has not arrived."""
        try:
            reply = self.link.channel.poll(self.pending)
            if reply is None:
                return None
            settled = settled_statuses(expect(reply, m.SettledReply).outcomes)
        except CacheError as error:
            settled = [_status_of(error)] * len(self._told)
        return [
            (self.frame.positions[at], status)
            for at, status in zip(self._told, settled, strict=True)
            if at in self._unproven
        ]


def _status_of(error: CacheError) -> Status:
    if isinstance(error, ClearedError):
        return Status.CLEARED
    return Status.UNREACHABLE if isinstance(error, DisconnectedError) else Status.EXPIRED


class PagesJob(ABC):
    """Keys of several groups in progress. `done`, `done_region`, `result` and `cancel` do not wait for the server.
    Dropping a job cancels it; its threads finish soon after."""

    _gather: bool

    def __init__(
        self,
        ground: Ground,
        batch: Any,
        entries: Sequence[GroupKeys],
        deadline_s: float | None,
        event: DeviceEvent | None,
    ) -> None:
        self._ground = ground
        self._event = event  # of a device: no page is touched before it
        self._occupancy = ground.links.occupancy
        self._batch = batch
        self._entries = entries
        self._statuses = [[Status.MISS] * len(entry.keys) for entry in entries]
        self._reasons = [[Reason.NONE] * len(entry.keys) for entry in entries]
        self._seen = [array("Q", bytes(8 * len(entry.keys))) for entry in entries]  # which incarnations were read
        self._dirty: list[set[int]] = [set() for _ in entries]  # positions of keys whose pages were written to
        self._works: list[Any] = []
        self._lock = threading.Lock()
        self._inside: Presence | None = None  # the call that advances the job
        self._given_up = False
        self._answers: list[_Answer] = []
        self._result: PagesResult | None = None
        self._until = None if deadline_s is None else time.monotonic() + deadline_s

    def __del__(self) -> None:
        # An interrupt may come at any of these lines; the occupancy, which learns of the threads in C, then stops the
        # rest.
        for work in getattr(self, "_works", ()):
            work.ask_to_stop()
            self._occupancy.has_ended(work)

    def done(self) -> bool:
        """Whether `result` is available. Asking also does everything that can be done without waiting."""
        if self._result is None and self._enter():
            try:
                if self._given_up:
                    self._end(Status.ABORTED, Reason.NONE)
                elif self._until is not None and time.monotonic() >= self._until:
                    self._end(Status.MISS, Reason.LATE)
                elif self._get_on():
                    self._finish()
            finally:
                self._inside = None
        return self._result is not None

    def _enter(self) -> bool:
        """Let this call advance the job; it sets `_inside` to None at its end. False: another call is doing so. A call
        that was interrupted before its end counts as over."""
        with self._lock:
            inside = self._inside
            if self._result is not None or (inside is not None and inside.lasts):
                return False
            self._inside = Presence(1)
            return True

    @property
    def result(self) -> PagesResult | None:
        """None until it is done."""
        return self._result if self.done() else None

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until it is done, at most that long (None: without a limit). The caller's thread helps to copy."""
        until = None if timeout_s is None else time.monotonic() + timeout_s
        return self._wait(self.done, -1, until)

    def _wait(self, done: Callable[[], bool], region: int, until: float | None) -> bool:
        while not done():
            now = time.monotonic()
            if until is not None and now >= until:
                return False
            left = _SLICE_S if until is None else min(_SLICE_S, until - now)
            if self._until is not None:  # past its deadline it is over as soon as the call that ends it returns
                left = min(left, max(_LOOK_S, self._until - now))
            self._wait_a_while(left, region)
        return True

    def cancel(self) -> None:
        """Cancel the job. When this returns, no thread reads or writes the pages any more; the result says what was
        done by then, and is `ABORTED` for the rest."""
        self._given_up = True
        self._stop_works()  # and what another call is about to begin will not begin
        while not self.done():
            time.sleep(_LOOK_S)

    def leave(self) -> None:
        """Stop all access to the pages and do nothing else: for callers that may be inside any lock. What the job held
        is settled by the client's next call once the job is dropped."""
        self._given_up = True
        self._stop_works()

    def _begin(self, parts: Sequence[tuple[Any, ...]], by_region: bool, frames: Sequence[Frame], waits: bool) -> Any:
        """Start copying these. Raises like `Occupancy.begin`."""
        ground = self._ground
        leases = [frame.lease for frame in frames if frame.lease.granted]
        # The threads' resources, and our life locks: closed when the threads are done.
        keep = (ground.tables, self._event, [(lease.slots(0)[0], lease.holding.life_locks) for lease in leases])
        behind = () if self._event is None else (self._event.handle,)
        work = ground.engine.PageJob(self._batch, tuple(parts), self._gather, by_region, keep, *behind)
        self._works.append(work)
        try:
            self._occupancy.begin(work, [lease.holding for lease in leases], self)
            if self._given_up:  # checked only now: whoever gives the job up checks `_works` after that
                work.stop()
            work.start(ground.threads, waits)
        except BaseException:
            work.stop()
            self._occupancy.has_ended(work)
            raise
        return work

    def _stop_works(self) -> None:
        for work in self._works:
            work.stop()
            self._occupancy.has_ended(work)

    def _note(self, entry: int, position: int, status: Status, reason: Reason = Reason.NONE) -> None:
        self._statuses[entry][position], self._reasons[entry][position] = status, reason
        if status is Status.HIT:
            self._dirty[entry].discard(position)

    def _note_ungranted(self, frame: Frame) -> None:
        for at, position in enumerate(frame.positions):
            status = frame.lease.statuses[at]
            if status is not Status.GRANTED:
                self._note(frame.entry, position, status, frame.lease.reasons[at])

    def _hear_answers(self) -> bool:
        for answer in list(self._answers):
            heard = answer.hear()
            if heard is None:
                return False
            for position, status in heard:
                self._note(answer.frame.entry, position, status)
            self._answers.remove(answer)
        return True

    def _wait_for_answer(self, timeout_s: float) -> None:
        for answer in list(self._answers):
            _wait_for(answer.link, answer.pending, timeout_s)
            return
        time.sleep(min(timeout_s, _LOOK_S))  # another thread is advancing it

    def _finish(self) -> None:
        untrusted = []
        for number, positions in enumerate(self._dirty):
            pages: list[int] = []
            if positions:
                ids = memoryview(self._batch.ids(number)).cast("q")
                per_object = len(ids) // len(self._entries[number].keys)
                for position in sorted(positions):
                    pages += [each for each in ids[position * per_object : (position + 1) * per_object] if each >= 0]
            untrusted.append(pages)
        for work in self._works:
            self._occupancy.has_ended(work)
            if (device := self._ground.tables.device) and work.fault:
                log.warning("CUDA has refused to copy pages, and the job was given up: %s", device.words_of(work.fault))
        self._result = PagesResult(self._statuses, self._reasons, untrusted, self._seen)

    @abstractmethod
    def _get_on(self) -> bool:
        """Do everything that can be done without waiting; returns whether nothing is left."""

    @abstractmethod
    def _wait_a_while(self, timeout_s: float, region: int) -> None:
        """Wait for the next event."""

    @abstractmethod
    def _end(self, status: Status, reason: Reason) -> None:
        """Stop, and set this status for everything not done yet."""


class _LeasedRead:
    """Objects that are read under leases: requested at once, copied, and settled."""

    def __init__(self, frames: list[Frame]) -> None:
        self.frames = frames
        self.work: Any = None
        self.parts: list[tuple[Frame, array[int]]] = []  # with the lease's positions
        self.state = LeasedReadState.ASKING
        self.asked_again = False  # for what the session could not hold at the same time

    def move(self, event: LeasedReadEvent) -> None:
        """The only way to change the state. A step that is not in the table is a bug of the caller: `KeyError`."""
        self.state = LEASED_READ_TRANSITIONS[self.state, event]

    def over_share(self) -> list[tuple[int, Sequence[int]]]:
        """(Entry, positions) to request again once these reads are settled."""
        if self.asked_again:
            return []
        any_read = bool(self.parts)
        over = [(frame, over_share(frame.lease.statuses, any_read=any_read)) for frame in self.frames]
        return [(frame.entry, [frame.positions[at] for at in some]) for frame, some in over if some]

    def blocking(self) -> Frame | None:
        """The first frame that waits for an answer."""
        return next((frame for frame in self.frames if not frame.heard), None)


class RetrieveJob(PagesJob):
    """From slots to pages: through the index if it has an object, otherwise under leases from the server."""

    _gather = False

    def __init__(
        self,
        ground: Ground,
        batch: Any,
        entries: Sequence[GroupKeys],
        promises: Sequence[Promise | None],
        by_region: bool,
        deadline_s: float | None,
        verify: int,
        waits: bool,
        event: DeviceEvent | None = None,
    ) -> None:
        super().__init__(ground, batch, entries, deadline_s, event)
        self._promises = promises
        self._by_region = by_region
        self._verify = verify
        self._waits = waits
        self._told = False  # a region was reported as done: no thread may write to it again
        self._found: list[tuple[int, array[int]]] = []  # entry and positions, one for each part
        self._indexed: Any = None
        self._leased: list[_LeasedRead] = []
        parts, rest = self._look()
        if rest:
            self._ask(rest)
        if parts:
            self._indexed = self._begin(parts, by_region, (), waits)

    def _look(self) -> tuple[list[tuple[Any, ...]], list[tuple[int, Sequence[int]]]]:
        """Parts for what the index has, and the positions of the rest, by entry."""
        ground = self._ground
        parts: list[tuple[Any, ...]] = []
        rest: list[tuple[int, Sequence[int]]] = []
        for number, (namespace, keys, _) in enumerate(self._entries):
            found = ground.hits.find(keys, namespace, False, mark=True) if ground.has_index else None
            link = ground.links.look()
            layout = None if link is None else link.layout_of(namespace)
            there = [] if found is None else [at for at, byte in enumerate(found) if byte]
            # Requests to the server redeem a promise; if there is nothing to request, tell the server what was read.
            if self._promises[number] and len(there) < len(keys):
                there = []
            if link is None or link.index is None or layout is None:
                there = []
            if there:
                assert link is not None
                positions = array("Q", there)
                wanted = [bytes(keys[at]) for at in there]
                parts.append((number, positions, wanted, link.index, namespace.id, layout, self._verify))
                self._found.append((number, positions))
            if len(there) < len(keys):
                had = set(there)
                rest.append((number, [at for at in range(len(keys)) if at not in had]))
        return parts, rest

    def _ask(self, rest: Sequence[tuple[int, Sequence[int]]]) -> None:
        ground, verify = self._ground, self._verify > 0
        frames: list[Frame] = []
        for number, positions in rest:
            entry = self._entries[number]
            promise = self._promises[number]

            def message(blob: bytes, kept_by: int, entry: GroupKeys = entry) -> Callable[[int, int], m.Message]:
                space = entry.namespace.id
                return lambda rid, lease: m.PrepareRetrieve(
                    rid, space, blob, lease, kept_by, False, verify, identify=True
                )

            def lease(entry: GroupKeys = entry) -> Lease:
                return ReadLease(ground.links, entry.namespace)

            frames += _frames_of(ground, number, entry, positions, BATCH_KEYS_MAX, lease, message, promise)
        self._leased.append(_LeasedRead(frames))
        for frame in frames:
            frame.get_on(self._waits and self._until is None)

    # --- on the way -----------------------------------------------------------------------------------------

    def done_region(self, region: int) -> bool:
        """Whether all pages of this region that will be written have been. Regions are numbered across all groups in
        order. Objects that are verified are done as a whole. A key whose region is done may still fail in a later one;
        the result says so."""
        self._check_region(region)
        if not self.done() and self._enter():
            try:
                if all(self._has_region(each, region) for each in self._under_way()):
                    self._told = True
                    return True
            finally:
                self._inside = None
        return self._result is not None

    def _under_way(self) -> list[Any]:
        """What is copying or will copy; None for what has not begun yet."""
        indexed = [] if self._indexed is None else [self._indexed]
        to_come = [None for leased in self._leased if leased.over_share()]
        leased = [each.work for each in self._leased if each.work is not None or each.state is not LeasedReadState.OVER]
        return indexed + to_come + leased

    @staticmethod
    def _has_region(work: Any, region: int) -> bool:
        return work is not None and work.wait(0.0, region)

    def wait_region(self, region: int, timeout_s: float | None = None) -> bool:
        """Wait until that region is done, at most that long. The caller's thread helps to copy."""
        until = None if timeout_s is None else time.monotonic() + timeout_s
        return self._wait(lambda: self.done_region(region), region, until)

    def _check_region(self, region: int) -> None:
        count = sum(len(group.regions) for group in self._ground.tables.groups)
        if not 0 <= region < count:
            raise IndexError(f"no region {region}: {count} are registered")

    def _get_on(self) -> bool:
        finished = [self._get_leased_on(leased) for leased in self._leased]
        if not all(finished) or (self._indexed is not None and not _over(self._indexed)):
            return False
        again = self._note_found() if self._found else []
        over = [each for leased in self._leased for each in leased.over_share()]
        for leased in self._leased:
            leased.asked_again = True
        if self._told or not (again or over):
            return self._hear_answers()
        if again:
            self._ask(again)
        if over:
            self._ask(over)
        return self._get_on()

    def _note_found(self) -> list[tuple[int, Sequence[int]]]:
        """Record the outcome of the index's hits; returns what must be requested from the server instead."""
        again: list[tuple[int, Sequence[int]]] = []
        for part, (number, positions) in enumerate(self._found):
            failed, read = [], []
            for position, number_seen in zip(positions, array("Q", self._indexed.incarnations(part)), strict=True):
                self._seen[number][position] = number_seen
            for position, byte in zip(positions, self._indexed.statuses(part), strict=True):
                if byte & _WRITTEN:
                    self._dirty[number].add(position)
                status = byte & ~_WRITTEN
                if status == READ:
                    read.append(position)
                    self._note(number, position, Status.HIT)
                elif status in (0, CHANGED, DAMAGED):
                    self._note(number, position, Status.MISS, Reason.DAMAGED if status == DAMAGED else Reason.NONE)
                    failed.append(position)
                else:
                    self._note(number, position, Status.ABORTED)
            self._count(number, len(read))
            if failed and not self._told:
                again.append((number, failed))
            if promise := self._promises[number]:
                self._redeem(self._entries[number], read, promise)
        self._found = []
        return again

    def _count(self, number: int, hits: int) -> None:
        """Count these hits in this process's row, where the server reads them."""
        link = self._ground.links.look()
        if link is not None and link.index is not None:
            link.index.count_read(hits, self._entries[number].namespace.layout.nbytes)

    def _redeem(self, entry: GroupKeys, read: Sequence[int], promise: Promise) -> None:
        """Redeem what was read through the index, without an answer. The promise may be a slice of one to another
        session: what it holds for others stays held, and so does what a cancelled job did not read."""
        link = self._ground.links.look()
        keys = [entry.keys[at] for at in read]
        for first, end, number in frames_of(keys, promise, BATCH_KEYS_MAX):
            if link is not None and number:
                link.channel.post(partial(_redemption, number, entry.namespace.id, join_keys(keys[first:end])))

    def _get_leased_on(self, leased: _LeasedRead) -> bool:
        if leased.state is LeasedReadState.ASKING:
            if leased.work is None:
                heard = [frame.get_on() for frame in leased.frames]
                if not all(heard):
                    return False
                self._copy_leased(leased)
            if leased.work is not None:  # also after an interrupt before this line: it is already copying
                leased.move(LeasedReadEvent.COPY)
        if leased.state is LeasedReadState.COPYING:
            if not _over(leased.work):
                return False
            self._settle(leased)
        if leased.state is not LeasedReadState.OVER:
            leased.move(LeasedReadEvent.END)
        return True

    def _copy_leased(self, leased: _LeasedRead) -> None:
        parts, copied = [], []
        for frame in leased.frames:
            self._note_ungranted(frame)
            lease = frame.lease
            assert isinstance(lease, ReadLease)
            unknown = set(lease.unverifiable(0)) if self._verify == VERIFY["always"] else set()
            for at in unknown:
                self._note(frame.entry, frame.positions[at], Status.MISS, Reason.UNVERIFIABLE)
            if not lease.granted:
                lease.leave()
                continue
            mapping, slots = lease.slots(0)
            chosen = [(at, offset) for at, offset in slots if at not in unknown]
            own = array("Q", [at for at, _ in chosen])
            positions = array("Q", [frame.positions[at] for at in own])
            addresses = array("Q", [mapping.address + offset for _, offset in chosen])
            parts.append((frame.entry, positions, addresses, lease.checksums_at(own)))
            copied.append((frame, own))
        leased.parts = copied  # all at once: after an interrupt below, all of this is repeated
        if parts:
            try:
                leased.work = self._begin(parts, self._by_region, [frame for frame, _ in copied], self._waits)
            except LeaseExpiredError:
                for frame, own in copied:
                    for at in own:
                        self._note(frame.entry, frame.positions[at], Status.ABORTED)
                    frame.lease.leave()

    def _settle(self, leased: _LeasedRead) -> None:
        for part, (frame, own) in enumerate(leased.parts):
            lease, damaged, read = frame.lease, [], []
            assert isinstance(lease, ReadLease)
            for at, byte in zip(own, leased.work.statuses(part), strict=True):
                self._seen[frame.entry][frame.positions[at]] = lease.incarnations[at]
                if byte & _WRITTEN:
                    self._dirty[frame.entry].add(frame.positions[at])
                if byte & ~_WRITTEN == DAMAGED:
                    self._note(frame.entry, frame.positions[at], Status.MISS, Reason.DAMAGED)
                    damaged.append(at)
                elif byte & ~_WRITTEN == READ:
                    read.append(at)
                else:
                    self._note(frame.entry, frame.positions[at], Status.ABORTED)
            proven = [at for at, same in zip(read, lease.untouched(read), strict=True) if same]
            for at in proven:
                self._note(frame.entry, frame.positions[at], Status.HIT)
            self._settle_frame(frame, damaged, set(read) - set(proven))

    def _settle_frame(self, frame: Frame, damaged: list[int], unproven: set[int]) -> None:
        """Tell the server; wait for its answer only if nothing else proves that we held the slots all the time."""
        lease = frame.lease
        left = [at for at in lease.granted if at not in damaged]
        link = lease.holding.link
        try:
            if damaged:
                lease.tell(m.ReportDamaged, damaged)
            if left:
                pending = lease.tell(m.FinishRead, left)
                if unproven and link is not None:
                    self._answers.append(_Answer(frame, link, pending, left, unproven))
                    unproven = set()
        except CacheError as error:
            for at in unproven:
                self._note(frame.entry, frame.positions[at], _status_of(error))
        else:
            for at in unproven:
                self._note(frame.entry, frame.positions[at], Status.ABORTED)
        lease.leave()

    def _wait_a_while(self, timeout_s: float, region: int) -> None:
        works = [work for work in self._under_way() if work is not None and not _over(work)]
        for work in works:
            if not work.wait(0.0, region):
                work.wait(timeout_s, region)
                return
        for leased in self._leased:
            frame = leased.blocking()
            if frame is not None:
                frame.wait(timeout_s)
                return
        for work in works:
            work.wait(timeout_s)
            return
        self._wait_for_answer(timeout_s)

    def _end(self, status: Status, reason: Reason) -> None:
        self._stop_works()
        self._told = True  # nothing is requested again
        for leased in self._leased:
            for frame in leased.frames:
                frame.cancel((status, reason))
            if leased.state is LeasedReadState.ASKING and leased.work is None:
                for frame in leased.frames:
                    self._note_ungranted(frame)
                    for at in frame.lease.granted:
                        self._note(frame.entry, frame.positions[at], status, reason)
                    frame.lease.leave()
                leased.move(LeasedReadEvent.END)
        self._get_on()
        for answer in self._answers:  # what nobody can confirm now is not trusted
            for position in answer.frame.positions:
                if self._statuses[answer.frame.entry][position] is not Status.HIT:
                    self._note(answer.frame.entry, position, status, reason)
        self._answers.clear()
        for number, statuses in enumerate(self._statuses):
            for position, each in enumerate(statuses):
                if each is Status.ABORTED:
                    self._note(number, position, status, reason)
        self._finish()


def _redemption(number: int, space: int, keys: bytes, rid: int) -> m.Message:
    return m.RedeemPromise(rid, number, space, keys)


def _over(work: Any) -> bool:
    """Whether none of its threads is copying any more, because it is done or was stopped."""
    return bool(work.wait(0.0)) or not work.running


class StoreJob(PagesJob):
    """From pages to slots. Everything is copied when this is built; the commits are pending."""

    _gather = True

    def __init__(
        self,
        ground: Ground,
        batch: Any,
        entries: Sequence[GroupKeys],
        deadline_s: float | None,
        event: DeviceEvent | None = None,
    ) -> None:
        super().__init__(ground, batch, entries, deadline_s, event)
        self._frames: list[Frame] = []
        try:
            self._ask()
            self._hear(deadline_s)
            self._copy()
        except BaseException:
            self._stop_works()
            for frame in self._frames:
                frame.lease.leave()
            raise

    def _ask(self) -> None:
        ground = self._ground
        for number, entry in enumerate(self._entries):

            def message(blob: bytes, kept_by: int, entry: GroupKeys = entry) -> Callable[[int, int], m.Message]:
                del kept_by
                space = entry.namespace.id
                return lambda rid, lease: m.PrepareStore(rid, space, blob, lease)

            def lease(entry: GroupKeys = entry) -> Lease:
                made = WriteLease(ground.links, entry.namespace)
                made.traceparent = entry.traceparent
                return made

            positions = range(len(entry.keys))
            self._frames += _frames_of(ground, number, entry, positions, STORE_PAGE_KEYS, lease, message)
        for frame in self._frames:
            frame.get_on(patient=self._until is None)

    def _hear(self, deadline_s: float | None) -> None:
        """Take all answers, or those that arrive in time."""
        del deadline_s
        for frame in self._frames:
            while not frame.get_on(patient=self._until is None):
                left = _SLICE_S if self._until is None else self._until - time.monotonic()
                if left <= 0:
                    frame.cancel((Status.UNREACHABLE, Reason.LATE))
                else:
                    frame.wait(min(left, _SLICE_S))
            self._note_ungranted(frame)
        self._until = None  # what is copied is stored, however long the confirmation takes

    def _copy(self) -> None:
        granted = [frame for frame in self._frames if frame.lease.granted]
        parts = []
        for frame in granted:
            mapping, slots = frame.lease.slots(0)
            positions = array("Q", [frame.positions[at] for at, _ in slots])
            parts.append((frame.entry, positions, array("Q", [mapping.address + at for _, at in slots]), None))
        for frame in self._frames:
            if not frame.lease.granted:
                frame.lease.leave()
        if not parts:
            return
        try:
            work = self._begin(parts, False, granted, waits=True)
        except LeaseExpiredError:
            for frame in granted:
                self._abort(frame, range(len(frame.positions)))
            return
        work.stop()  # if a device has refused, other threads may still be inside
        for part, frame in enumerate(granted):
            self._commit(frame, work.statuses(part), work.checksums(part))
        self._occupancy.has_ended(work)

    def _commit(self, frame: Frame, statuses: bytes, checksums: bytes) -> None:
        lease = frame.lease
        positions, link = lease.granted, lease.holding.link
        if link is None or len(positions) != len(statuses) or statuses.count(READ | _WRITTEN) != len(statuses):
            self._abort(frame, range(len(frame.positions)))  # its lease was ended elsewhere meanwhile
            return
        try:
            pending = lease.tell(m.CommitStore, positions, checksums)
            self._answers.append(_Answer(frame, link, pending, positions, set(positions)))
        except CacheError as error:
            for at in positions:
                self._note(frame.entry, frame.positions[at], _status_of(error))
        lease.leave()

    def _abort(self, frame: Frame, positions: Sequence[int]) -> None:
        for at in positions:
            if self._statuses[frame.entry][frame.positions[at]] is Status.MISS:
                self._note(frame.entry, frame.positions[at], Status.ABORTED)
        frame.lease.leave()

    def _get_on(self) -> bool:
        return self._hear_answers()

    def _wait_a_while(self, timeout_s: float, region: int) -> None:
        del region
        self._wait_for_answer(timeout_s)

    def _end(self, status: Status, reason: Reason) -> None:
        """What was sent is stored anyway; nobody reads the answer."""
        self._hear_answers()
        for answer in self._answers:
            for at in answer.frame.positions:
                if self._statuses[answer.frame.entry][at] is Status.MISS:
                    self._note(answer.frame.entry, at, status, reason)
        self._answers.clear()
        self._finish()
