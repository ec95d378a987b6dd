"""Page jobs: copies by threads of the extension, which advance whenever somebody asks for their progress.

A client has no thread of its own (decision 0001), and no job has one that runs Python: its threads only copy. The calls
that start a job, wait for it or poll it exchange messages with the server (decision 0018). The occupancy tracks every
lease of a job and knows the job's threads, so whatever ends the client, its session or the server can find them.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from lmcache_core.client.find.hits import CHANGED, DAMAGED, READ, Hits
from lmcache_core.client.link.channel import Pending, expect
from lmcache_core.client.link.link import Link
from lmcache_core.client.link.presence import Presence
from lmcache_core.client.link.reconnecting import Links
from lmcache_core.client.move.leases import Lease, ReadLease, Request, WriteLease, read_request
from lmcache_core.client.move.page_states import (
    FRAME_TRANSITIONS,
    LEASED_READ_TRANSITIONS,
    FrameEvent,
    FrameState,
    LeasedReadEvent,
    LeasedReadState,
)
from lmcache_core.client.move.regions import GroupPages, RegionTables
from lmcache_core.client.move.retrieving import over_share
from lmcache_core.client.promises import Promise, frames_of
from lmcache_core.client.results import Status, settled_statuses
from lmcache_core.devices.contract import DeviceEvent
from lmcache_core.errors import (
    CacheError,
    DisconnectedError,
    LeaseExpiredError,
    StaleRegionError,
    UnknownNamespaceError,
)
from lmcache_core.kernel.answers import Reason
from lmcache_core.limits import BATCH_KEYS_MAX, STORE_PAGE_KEYS
from lmcache_core.pool.mapping import Mapping
from lmcache_core.protocol import messages as m
from lmcache_core.protocol.codec import join_keys, split_keys
from lmcache_core.tokens.namespace import Namespace

__all__ = ["PagesCall", "PagesResult", "RetrieveJob", "StoreJob"]  # what callers hold

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
    """Keys of one group, and the ids of their pages. `traceparent`: the trace of their store."""

    namespace: Namespace
    keys: list[bytes]
    traceparent: str
    pages: GroupPages


class Ground(NamedTuple):
    """What the jobs of one registration share."""

    links: Links
    hits: Hits
    threads: int
    tables: RegionTables  # their owners keep the memory of the pages alive
    engine: Any  # `_native`, or `pages_plain`


class PagesCall(NamedTuple):
    """What is to be stored or retrieved."""

    batch: Any  # the pages, as the engine knows them
    entries: Sequence[GroupKeys]
    deadline_s: float | None
    event: DeviceEvent | None  # of a device: no page is touched before it


class Frame:
    """Keys of one entry that are requested from the server in one message, and the lease that results."""

    def __init__(self, links: Links, entry: int, positions: Sequence[int], lease: Lease, request: Request) -> None:
        self.entry = entry
        self.positions = positions  # of its keys within the entry
        self.lease = lease
        self.state = FrameState.WANTED
        self._links = links
        self._request = request
        self._call: tuple[Link, Pending] | None = None  # once it is sent
        self._again = True  # whether it may re-register a namespace that the server has forgotten

    def move(self, event: FrameEvent) -> None:
        """The only way to change the state. A step that is not in the table is a bug of the caller: `KeyError`."""
        self.state = FRAME_TRANSITIONS[self.state, event]

    @property
    def answered(self) -> bool:
        """The outcome of each key is known, as far as it will ever be."""
        return self.state is FrameState.HEARD

    def get_on(self, patient: bool = False) -> bool:
        """Send the request, or take the answer if it has arrived; returns whether it has. `patient`: wait for a link as
        any call does."""
        if self.answered:
            return True
        try:
            if self.state is FrameState.WANTED:
                if self._call is None:
                    link = self._links.current() if patient else self._links.step()
                    if link is not None:  # a tuple, as no interrupt comes between the sending and this assignment
                        self._call = link, self.lease.start(link, self._request)
                if self._call is not None:  # also after an interrupt before this line: it is already sent
                    self.move(FrameEvent.ASK)
            if self._call is not None and self.lease.poll(*self._call):
                if isinstance(self.lease, ReadLease):
                    self.lease.watch(split_keys(self._request.keys))
                self.move(FrameEvent.ANSWER)
        except UnknownNamespaceError as error:
            assert self._call is not None
            self._call[0].remove_binding(self.lease.namespace)
            if not self._again:
                self._refuse(error)
                return True
            # The state first: after a later interrupt this handles the same answer again.
            self.move(FrameEvent.REPEAT)
            self._call, self._again = None, False
        except CacheError as error:
            self._refuse(error)
        return self.answered

    def _refuse(self, error: CacheError) -> None:
        self.move(FrameEvent.REFUSE)
        self.lease.refuse(error, len(self.positions))

    def part(self, mapping: Mapping, slots: Sequence[tuple[int, int]], checksums: array[int] | None) -> tuple[Any, ...]:
        """What is to be copied to or from these slots, (position, offset) each, as the engine takes it."""
        positions = array("Q", [self.positions[at] for at, _ in slots])
        return self.entry, positions, array("Q", [mapping.address + offset for _, offset in slots]), checksums

    def cancel(self, outcome: _Outcome) -> None:
        """Give up the answer: if it arrives, what it grants is given back."""
        if not self.answered:
            self.move(FrameEvent.CANCEL)
            self.lease.leave()
            self.lease.add_ungranted(*outcome, len(self.positions))

    def wait(self, timeout_s: float) -> None:
        """Until something has arrived, at most for that long."""
        if self._call is None:
            self._links.wait(timeout_s)
        else:
            _wait_for(*self._call, timeout_s)


def _wait_for(link: Link, pending: Pending, timeout_s: float) -> None:
    try:
        link.channel.wait_for(pending, timeout_s)
    except CacheError:
        return  # the next poll reports it


class _Answer:
    """The server's answer to the end of a lease, for positions whose outcome cannot be known otherwise."""

    def __init__(self, frame: Frame, link: Link, pending: Pending, named: Sequence[int], unproven: set[int]) -> None:
        self.frame = frame
        self.link = link
        self.pending = pending
        self._named = named
        self._unproven = unproven

    def hear(self) -> list[tuple[int, Status]] | None:
        """(Position in the entry, status); None: it has not arrived."""
        try:
            reply = self.link.channel.poll(self.pending)
            if reply is None:
                return None
            settled = settled_statuses(expect(reply, m.SettledReply).outcomes, len(self._named))
        except CacheError as error:
            settled = [_status_of(error)] * len(self._named)
        return [
            (self.frame.positions[at], status)
            for at, status in zip(self._named, settled, strict=True)
            if at in self._unproven
        ]


def _status_of(error: CacheError) -> Status:
    return Status.UNREACHABLE if isinstance(error, DisconnectedError) else Status.EXPIRED


class PagesJob(ABC):
    """Keys of several groups in progress. `done`, `done_region`, `result` and `cancel` do not wait for the server.
    Dropping a job cancels it; its threads finish soon after."""

    _gather: bool

    def __init__(self, ground: Ground, call: PagesCall) -> None:
        self._ground = ground
        self._occupancy = ground.links.occupancy
        self._batch, self._entries, deadline_s, self._event = call
        entries = self._entries
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
        """Start copying these. Raises like `Occupancy.begin`, and like `RegionTables.check_there`."""
        ground = self._ground
        if frames:  # the server was asked meanwhile
            ground.tables.check_there([entry.pages for entry in self._entries], writes=not self._gather)
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

    def _settle_frame(
        self,
        frame: Frame,
        kind: type[m.Settle],
        positions: Sequence[int],
        unproven: Collection[int],
        checksums: bytes = b"",
    ) -> None:
        """Tell the server what became of these positions. Its answer says what became of the `unproven` ones."""
        status = Status.ABORTED
        try:
            if positions:
                link, pending = frame.lease.tell(kind, positions, checksums)
                if unproven:
                    self._answers.append(_Answer(frame, link, pending, positions, set(unproven)))
                    unproven = ()
        except CacheError as error:
            status = _status_of(error)
        for at in unproven:
            self._note(frame.entry, frame.positions[at], status)
        frame.lease.leave()

    def _hear_answers(self) -> bool:
        for answer in list(self._answers):
            outcomes = answer.hear()
            if outcomes is None:
                return False
            for position, status in outcomes:
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
                log.warning(
                    "CUDA has refused to copy pages, and the job was given up: %s", device.message_of(work.fault)
                )
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
        self.requested_again = False  # for what the session could not hold at the same time

    def move(self, event: LeasedReadEvent) -> None:
        """The only way to change the state. A step that is not in the table is a bug of the caller: `KeyError`."""
        self.state = LEASED_READ_TRANSITIONS[self.state, event]

    def over_share(self) -> list[tuple[int, Sequence[int]]]:
        """(Entry, positions) to request again once these reads are settled."""
        if self.requested_again:
            return []
        any_read = bool(self.parts)
        over = [(frame, over_share(frame.lease.statuses, any_read=any_read)) for frame in self.frames]
        return [(frame.entry, [frame.positions[at] for at in some]) for frame, some in over if some]

    def blocking(self) -> Frame | None:
        """The first frame that waits for an answer."""
        return next((frame for frame in self.frames if not frame.answered), None)


class RetrieveJob(PagesJob):
    """From slots to pages: through the index if it has an object, otherwise under leases from the server."""

    _gather = False

    def __init__(
        self,
        ground: Ground,
        call: PagesCall,
        promises: Sequence[Promise | None],
        by_region: bool,
        verify: int,
        waits: bool,
    ) -> None:
        super().__init__(ground, call)
        self._promises = promises
        self._by_region = by_region
        self._verify = verify
        self._waits = waits
        self._reported = False  # a region was reported as done: no thread may write to it again
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
        for number, (namespace, keys, _, _) in enumerate(self._entries):
            found = ground.hits.find(keys, namespace, False, mark=True)
            link = ground.links.look()
            where = None if link is None else link.searched(namespace)
            there = [] if found is None or where is None else [at for at, byte in enumerate(found) if byte]
            # Requests to the server redeem a promise; if there is nothing to request, tell the server what was read.
            if self._promises[number] and len(there) < len(keys):
                there = []
            if there and where is not None:
                index, layout = where
                positions = array("Q", there)
                wanted = [bytes(keys[at]) for at in there]
                parts.append((number, positions, wanted, index, namespace.id, layout, self._verify))
                self._found.append((number, positions))
            if len(there) < len(keys):
                had = set(there)
                rest.append((number, [at for at in range(len(keys)) if at not in had]))
        return parts, rest

    def _ask(self, rest: Sequence[tuple[int, Sequence[int]]]) -> None:
        links, verify = self._ground.links, self._verify > 0
        frames: list[Frame] = []
        for number, positions in rest:
            space, wanted = self._entries[number].namespace, [self._entries[number].keys[at] for at in positions]
            for first, end, kept_by in frames_of(wanted, self._promises[number], BATCH_KEYS_MAX):
                request = read_request(space, wanted[first:end], kept_by, False, verify)
                frames.append(Frame(links, number, positions[first:end], ReadLease(links, space), request))
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
                    self._reported = True
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
            leased.requested_again = True
        if self._reported or not (again or over):
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
            if failed and not self._reported:
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
                link.channel.post(m.RedeemPromise(0, number, entry.namespace.id, join_keys(keys[first:end])))

    def _get_leased_on(self, leased: _LeasedRead) -> bool:
        if leased.state is LeasedReadState.ASKING:
            if leased.work is None:
                answered = [frame.get_on() for frame in leased.frames]
                if not all(answered):
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
            if not lease.granted:
                lease.leave()
                continue
            mapping, slots, checksums, unverifiable = lease.readable(0, self._verify)
            for at in unverifiable:
                self._note(frame.entry, frame.positions[at], Status.MISS, Reason.UNVERIFIABLE)
            parts.append(frame.part(mapping, slots, checksums))
            copied.append((frame, array("Q", [at for at, _ in slots])))
        leased.parts = copied  # all at once: after an interrupt below, all of this is repeated
        if parts:
            try:
                leased.work = self._begin(parts, self._by_region, [frame for frame, _ in copied], self._waits)
            except (LeaseExpiredError, StaleRegionError):
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
            left = [at for at in lease.granted if at not in damaged]
            if damaged:
                with contextlib.suppress(CacheError):  # the next reader finds them again
                    lease.tell(m.ReportDamaged, damaged)
            # Its answer is waited for only if nothing else proves that we held the slots all the time.
            self._settle_frame(frame, m.FinishRead, left, set(read) - set(proven))

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
        self._reported = True  # nothing is requested again
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


def _over(work: Any) -> bool:
    """Whether none of its threads is copying any more, because it is done or was stopped."""
    return bool(work.wait(0.0)) or not work.running


class StoreJob(PagesJob):
    """From pages to slots. In host memory everything is copied when this is built, and the commits are pending. Pages
    of a device are copied by threads that wait for its event: `has_read` says when. `waited_s`: how long the server's
    answers took."""

    _gather = True

    def __init__(self, ground: Ground, call: PagesCall) -> None:
        super().__init__(ground, call)
        self._frames: list[Frame] = []
        self._copies: Any = None  # the threads' work
        self._uncommitted: list[tuple[int, Frame]] = []  # its parts, until they are committed or given up
        try:
            self._ask()
            self._hear()
            self._copy()
        except BaseException:
            self._stop_works()
            for frame in self._frames:
                frame.lease.leave()
            raise

    def _ask(self) -> None:
        links = self._ground.links
        for number, entry in enumerate(self._entries):
            for first, end, _ in frames_of(entry.keys, None, STORE_PAGE_KEYS):
                lease = WriteLease(links, entry.namespace, traceparent=entry.traceparent)
                request = m.PrepareStore(0, entry.namespace.id, join_keys(entry.keys[first:end]))
                self._frames.append(Frame(links, number, range(first, end), lease, request))
        for frame in self._frames:
            frame.get_on(patient=self._until is None)

    def _hear(self) -> None:
        """Take all answers, or those that arrive in time."""
        began_s = time.monotonic()
        for frame in self._frames:
            while not frame.get_on(patient=self._until is None):
                left = _SLICE_S if self._until is None else self._until - time.monotonic()
                if left <= 0:
                    frame.cancel((Status.UNREACHABLE, Reason.LATE))
                else:
                    frame.wait(min(left, _SLICE_S))
            self._note_ungranted(frame)
        self._until = None  # what is copied is stored, however long the confirmation takes
        self.waited_s = time.monotonic() - began_s

    def _copy(self) -> None:
        granted = [frame for frame in self._frames if frame.lease.granted]
        parts = [frame.part(*frame.lease.slots(0), None) for frame in granted]
        for frame in self._frames:
            if not frame.lease.granted:
                frame.lease.leave()
        if not parts:
            return
        self._uncommitted = list(enumerate(granted))
        try:
            self._copies = self._begin(parts, False, granted, waits=self._event is None)
        except LeaseExpiredError:
            self._uncommitted = []
            for frame in granted:
                self._abort(frame)
            return
        if self._event is None:
            self._commit_copied()

    def _commit_copied(self) -> None:
        """Nothing is committed before its bytes have landed, and no lease ends while a thread may be inside."""
        work = self._copies
        if work is None or not self._uncommitted:
            return
        work.stop()  # if a device has refused, or the job was given up, threads may still be inside
        while self._uncommitted:
            part, frame = self._uncommitted.pop()
            try:
                self._commit(frame, work.statuses(part), work.checksums(part))
            except BaseException:
                frame.lease.leave()
                raise
        self._occupancy.has_ended(work)

    @property
    def has_read(self) -> bool:
        """Whether all pages have been read, or will never be: from then on they may change."""
        return self._copies is None or _over(self._copies)

    def wait_read(self, timeout_s: float) -> bool:
        """Wait for that, at most so long."""
        if not self.has_read:
            self._copies.wait(timeout_s)
        return self.has_read

    @property
    def device_s(self) -> float:
        """Seconds that threads have spent on copies of a device, and on their checksums, so far. 0.0: no device."""
        return float(self._copies.device_s) if self._event is not None and self._copies is not None else 0.0

    def _commit(self, frame: Frame, statuses: bytes, checksums: bytes) -> None:
        positions = frame.lease.granted
        if len(positions) != len(statuses) or statuses.count(READ | _WRITTEN) != len(statuses):
            self._abort(frame)  # its lease was ended elsewhere meanwhile
        else:
            self._settle_frame(frame, m.CommitStore, positions, positions, checksums)

    def _abort(self, frame: Frame) -> None:
        for position in frame.positions:
            if self._statuses[frame.entry][position] is Status.MISS:
                self._note(frame.entry, position, Status.ABORTED)
        frame.lease.leave()

    def _get_on(self) -> bool:
        if not self.has_read:
            return False
        self._commit_copied()
        return self._hear_answers()

    def _wait_a_while(self, timeout_s: float, region: int) -> None:
        del region
        if self.wait_read(timeout_s):
            self._wait_for_answer(timeout_s)

    def _end(self, status: Status, reason: Reason) -> None:
        """What has landed is stored anyway, as far as the server is there: nobody waits for its answer."""
        del status
        self._commit_copied()
        self._hear_answers()
        for answer in self._answers:
            for at in answer.frame.positions:
                if self._statuses[answer.frame.entry][at] is Status.MISS:
                    self._note(answer.frame.entry, at, Status.UNREACHABLE, reason)
        self._answers.clear()
        self._finish()
