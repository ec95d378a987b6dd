"""Concurrent calls over one connection, without a thread of its own.

The first waiter reads the connection for everybody and hands over when its own reply is there, so a single caller pays
for no wake-up beyond the carrier's.

An answer belongs to its request, and a request to the owner of its `Pending`. A request whose `Pending` is gone (its
thread was interrupted, its handle dropped or cancelled) is an *orphan*: when its answer comes, the thread that reads it
undoes what the server did, unnoticed by everybody else. So no code needs to run in an interrupted thread.

A server that does not answer in time has not ended the connection: it may be stopped, and continue later. The channel
is then silent: a call on it first reads what has arrived, and ends at once if nothing has. Messages that only end
something (a commit, an abort, the end of a promise) are sent anyway, and nobody waits for their answers.
"""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from itertools import count
from sys import _getframe
from types import FrameType
from typing import TypeVar

import msgspec

from lmcache_core.client.link.connection import Connection
from lmcache_core.client.link.link_states import LINK_TRANSITIONS, LinkEvent, LinkState
from lmcache_core.client.link.presence import runs_elsewhere, runs_here
from lmcache_core.errors import CacheError, DisconnectedError, ForgottenError, by_code
from lmcache_core.limits import CALL_TIMEOUT_S, OWED_FRAMES_MAX
from lmcache_core.protocol.codec import decode_reply, encode_request
from lmcache_core.protocol.messages import (
    Cancel,
    Done,
    EndSession,
    Error,
    FreeLookupLocks,
    LeaseExpiredNotice,
    Message,
    Noop,
    Reply,
    Settle,
)

_M = TypeVar("_M", bound=Message)
_E = TypeVar("_E", bound=CacheError)
_LOOK_AFTER_S = 0.01  # a check costs 2 µs, a tenth of a call: skip it within a series of calls
_SEND_SLICE_S = 0.05  # of a send that waits, between two looks at what has come
_PROBE_S = 1.0  # a silent server is probed this often: the answer that would show it alive may have been lost
_OWED_POLL_S = 0.01
_SPOKEN_OVER = (LinkState.OPEN, LinkState.SILENT)
_ENDINGS = (Settle, FreeLookupLocks, Cancel, EndSession)
_LEADER_CHECK_S = 0.1  # how often a waiter makes sure that somebody reads: an interrupt can swallow a wake-up
_SILENT = LinkState.SILENT  # in Python 3.11 looking up an enum member takes 0.15 µs, and each call needs it twice

Undo = Callable[[Reply], Message | None]
"""Makes the message that undoes what an answer granted, or None."""


class Pending(msgspec.Struct, weakref=True, eq=False):
    """A call whose reply has not been taken. Its owner waits for the reply; dropping it abandons the call.

    It is a struct because one is made for every call: in C that takes a third of the time.
    """

    rid: int
    due_s: float  # when it times out
    frames_before: int  # frames that had arrived when it was sent
    reply: Reply | None = None
    error: CacheError | None = None
    late: Reply | None = None  # a reply that came after the error
    waiters: tuple[threading.Lock, ...] = ()  # of threads that wait for it while another thread reads
    record: _Undoable | None = None  # set if the answer must be undone when nobody takes it

    @property
    def settled(self) -> bool:
        """Whether it was answered or has failed."""
        return self.reply is not None or self.error is not None

    @property
    def undoes(self) -> bool:
        """Whether dropping this undoes its answer."""
        return self.record is not None and self.record.undo is not None

    def tell(self) -> None:
        """The receiver has taken the reply: dropping this no longer undoes anything."""
        if self.record is not None:
            self.record.undo = None


class _Undoable(weakref.ref[Pending]):
    """The channel's record of a call that may have to be undone: its `Pending`, weakly, and how to undo its answer. For
    any other call the channel keeps the `Pending` itself until the answer has come."""

    __slots__ = ("over", "reply", "rid", "undo")

    reply: Reply | None
    rid: int
    undo: Undo | None
    over: object  # the channel over which the undoing request was sent


class Orphans:
    """Answers that granted something but were not taken yet, of all channels of one client: an answer may come over one
    channel and be undone over the next. Dropping a `Pending` runs `append`, in C, in any thread and inside any lock."""

    def __init__(self) -> None:
        self.answered: dict[int, _Undoable] = {}  # by address
        self.dropped: deque[weakref.ref[Pending]] = deque()

    def free_later(self, promises: Sequence[int]) -> None:
        """Free promises over the next channel, because their holder could not reach a server. If there are too many,
        the last ones simply expire."""
        if len(self.dropped) < OWED_FRAMES_MAX:
            record = _Undoable(Pending(0, 0.0, 0))  # of a call that no longer exists
            record.rid, record.reply, record.over = 0, Done(0), None
            record.undo = lambda _: FreeLookupLocks(0, list(promises))
            self.dropped.append(record)


class Channel:
    """Sends requests and matches replies by id. Thread-safe; an interrupt in one thread does not affect others."""

    def __init__(
        self,
        connection: Connection,
        on_notice: Callable[[LeaseExpiredNotice], None],
        orphans: Orphans | None = None,
        *,
        timeout_s: float = CALL_TIMEOUT_S,
        on_silence: Callable[[str], None] = lambda why: None,
        clock: Callable[[], float] = time.monotonic,
        state: LinkState = LinkState.OPEN,
    ) -> None:
        """`orphans`: shared with the client's former channels. `timeout_s`: how long a call waits for its reply.
        `on_silence` is called with the reason when the server seems to hang, and with "" when it answers again."""
        self.connection = connection
        self.timeout_s = timeout_s
        self.state = state
        self._on_notice = on_notice
        self._on_silence = on_silence
        self._clock = clock
        self._rids = count(1)
        self._calls: dict[int, Pending | _Undoable] = {}  # until the answer has come
        self._orphans = orphans or Orphans()
        self._dropped = self._orphans.dropped
        self._undoing: dict[int, _Undoable] = {}  # by the id of the undoing request, until that is answered
        self._itself = object()  # identifies this channel in records that move to the next one
        self._waiting: dict[threading.Lock, None] = {}  # taken locks: releasing one wakes its thread
        self._lock = threading.Lock()
        self._leader: FrameType | None = None  # of the call that reads for everybody
        self._called_at_s = 0.0  # when the last call began
        self._frames_read = 0  # frames
        self._owed: deque[bytes] = deque()  # frames that nobody waits for and that are not sent yet
        self._probe_at_s = 0.0
        self._lost: DisconnectedError | None = None
        self.forgotten = False  # whether it ended because the server, which answers, no longer knows this session

    @property
    def lost(self) -> bool:
        """The connection has ended; every further call raises."""
        return self._lost is not None

    @property
    def silent(self) -> bool:
        """Whether a call timed out and nothing has arrived since."""
        return self.state is _SILENT

    @property
    def under_way(self) -> int:
        """Calls that were sent, and whose answer has not come."""
        return len(self._calls)

    @property
    def waiting(self) -> int:
        """Threads that wait for an answer, the one that reads for them all included."""
        return len(self._waiting) + (self._leader is not None)

    def move(self, event: LinkEvent) -> None:
        """Record what happened to the link. This is the only place where its state changes."""
        self.state = LINK_TRANSITIONS[self.state, event]

    # --- calls ------------------------------------------------------------------------------------------------

    def call(self, request: Message, extra_s: float = 0.0) -> Reply:
        """Send a request, which gets its number here, and wait for its reply.

        Raises the server's error, or `DisconnectedError` if the connection ends or no reply comes within the channel's
        `timeout_s` plus `extra_s`.
        """
        pending = self.expecting(None, extra_s)
        self.send(pending, request)
        return self.wait(pending)

    def call_held_back(self, request: Message, extra_s: float = 0.0) -> Reply:
        """As `call`, for an answer that the server holds back while it waits for others, and has few places for: where
        the caller is interrupted, the server learns that nobody wants it any more."""
        pending = self.expecting(None, extra_s)
        try:
            self.send(pending, request)
            return self.wait(pending)
        finally:
            if pending.rid in self._calls and not pending.settled:  # it was sent, or may have been
                self.post(Cancel(0, pending.rid))

    def start(
        self, request: Message, undo: Undo | None = None, extra_s: float = 0.0, *, blocks: bool = True
    ) -> Pending:
        """Send a request; get its reply with `wait`, `wait_for`, `poll`, or give it up with `abandon`. `undo` makes the
        message to send if the returned `Pending` is dropped before it was taken; it must not reference the `Pending`.
        Without `blocks` the request is sent later if the server has not read earlier ones."""
        pending = self.expecting(undo, extra_s)
        self.send(pending, request, blocks=blocks)
        return pending

    def expecting(self, undo: Undo | None = None, extra_s: float = 0.0) -> Pending:
        """A call that is not sent yet, for a caller that must know of it before the server does. See `send`."""
        self._called_at_s = now = self._clock()
        pending = Pending(next(self._rids), now + self.timeout_s + extra_s, self._frames_read)
        if undo is not None:
            pending.record = self._undoable(pending, undo)
        return pending

    def _undoable(self, pending: Pending, undo: Undo) -> _Undoable:
        record = _Undoable(pending, self._dropped.append)
        record.rid, record.undo, record.reply, record.over = pending.rid, undo, None, None
        return record

    def send(self, pending: Pending, message: Message, *, blocks: bool = True) -> None:
        """Send the request, under the number of its `Pending`. Call this once for each."""
        rid = message.rid = pending.rid
        if self.state is _SILENT:
            self._check_voice(message)
        frame = encode_request(message)
        if self._dropped:
            self._undo_dropped()
        self._calls[rid] = pending.record or pending
        if self._lost is not None:  # checked after that: whoever notes the loss then looks for calls
            self._calls.pop(rid, None)
            raise _anew(self._lost)
        if self._owed:
            self._send_owed()
        try:
            sent = self._sent(frame, pending) if blocks else not self._owed and self.connection.send(frame, 0.0)
        except DisconnectedError as error:
            self._fail(error)
            raise _anew(self._lost or error) from error  # another thread may know more
        if not sent and not blocks and len(self._owed) < OWED_FRAMES_MAX // 2:  # keep room for what ends something
            self._owed.append(frame)
        elif not sent:
            self._calls.pop(rid, None)
            if blocks:
                self._time_out(pending, "the server does not read what it is sent")
            else:  # too many at once, which says nothing of the server
                with self._lock:
                    self._refuse(pending, DisconnectedError(f"{len(self._owed):,} requests wait to be sent already"))
            self._result(pending)

    def _sent(self, frame: bytes, pending: Pending) -> bool:
        """Send a frame within its call's time. Answers are read meanwhile: a server does not read from who does not."""
        while not self.connection.send(frame, min(pending.due_s, self._clock() + _SEND_SLICE_S)):
            if self._clock() >= pending.due_s:
                return False
            self._serve(pending, 0.0)
        return True

    def post(self, message: Message, takes_back: _Undoable | None = None) -> None:
        """Send a request whose answer nobody waits for. Never waits: what cannot be sent now is sent when the server is
        answers again. `takes_back`: if the connection ends before the answer, the next one repeats it."""
        if self._lost is not None:
            return
        if len(self._owed) >= OWED_FRAMES_MAX:
            # None of them may be lost: the next connection declares what is still held, which says the same at once.
            self._fail(DisconnectedError(f"the server has not read what {OWED_FRAMES_MAX} calls ended"))
            return
        rid = message.rid = next(self._rids)
        if takes_back is not None:
            self._undoing[rid] = takes_back
        self._owed.append(encode_request(message))
        self._send_owed()

    def wait(self, pending: Pending, timeout_s: float | None = None) -> Reply:
        """The reply. Raises `DisconnectedError` if none comes in time (None: within the call's own timeout)."""
        self._serve(pending, pending.due_s if timeout_s is None else self._clock() + timeout_s)
        reply = pending.reply
        if reply is None and pending.error is None:
            self._time_out(pending, "the server does not answer")
        return self._result(pending) if reply is None or isinstance(reply, Error) else reply

    def wait_for(self, pending: Pending, timeout_s: float) -> Reply | None:
        """The reply if it comes within that time, otherwise None; the call goes on."""
        if not pending.settled:
            self._serve(pending, self._clock() + timeout_s)
        return self.poll(pending)

    def poll(self, pending: Pending) -> Reply | None:
        """The reply if it has come. Reads what is there without waiting. Raises like `wait` after the timeout."""
        if not pending.settled:
            self._serve(pending, 0.0)
        if not pending.settled and pending.due_s <= self._clock():
            self._time_out(pending, "the server does not answer")
        return self._result(pending) if pending.settled else None

    def cancel(self, pending: Pending, undo: Undo | None = None) -> None:
        """Give the reply up, as if the `Pending` were dropped; its owner may keep it. A thread that waits for it gets a
        `DisconnectedError`. `undo` replaces the one that it was started with."""
        with self._lock:
            record = pending.record
            if record is None and undo is not None:
                record = pending.record = self._undoable(pending, undo)
            if record is not None:
                record.undo = undo or record.undo
                record.reply = record.reply or pending.reply or pending.late
                if pending.rid in self._calls:
                    self._calls[pending.rid] = record
            self._refuse(pending, DisconnectedError("this call was cancelled"))
        if record is not None and record.reply is not None:
            self._dropped.append(record)
            self._undo_dropped()

    def _refuse(self, pending: Pending, error: DisconnectedError) -> bool:
        """Its answer is no longer taken: if it comes, it is undone. Returns False if it has come already. The caller
        holds the lock."""
        if not pending.settled:
            pending.error = error
        for waiter in pending.waiters:
            self._wake(waiter)
        return pending.error is error

    def found_lost(self) -> bool:
        """Like `lost`, but after a pause it checks whether the connection has ended meanwhile. Never waits."""
        if self._lost is not None:
            return True
        if self._leader is not None or self._clock() - self._called_at_s < _LOOK_AFTER_S:
            return False
        if self.connection.ended():
            self._fail(DisconnectedError("the server closed the connection"))
        return self._lost is not None

    def close(self, why: str = "the client was closed") -> None:
        """End the connection and every call on it."""
        self._fail(DisconnectedError(why))

    def _result(self, pending: Pending) -> Reply:
        if pending.error is not None:
            raise _anew(pending.error)
        reply = pending.reply
        assert reply is not None
        if isinstance(reply, Error):
            raise self._refusal(reply)
        return reply

    def _refusal(self, reply: Error) -> CacheError:
        kind = by_code(reply.code)
        if kind is DisconnectedError:  # another server answers there now, or it has forgotten us
            kind = ForgottenError
        error = kind(reply.message)
        if isinstance(error, DisconnectedError):
            self._fail(error)
        return error

    # --- a server that hangs ----------------------------------------------------------------------------------

    def listen(self) -> None:
        """Read what has arrived, without waiting."""
        with self._lock:
            before = self._leader
            if self._lost is not None or (before is not None and runs_elsewhere(before)):
                return  # another thread reads for everybody
            self._leader = _getframe()
        self._lead(Pending(0, 0.0, 0), 0.0, before)

    def _check_voice(self, message: Message) -> None:
        """The server was silent: raise unless it has answered since."""
        self.listen()
        if self.state is not _SILENT:
            return
        now = self._clock()
        if isinstance(message, _ENDINGS):
            self.post(message)
        elif now >= self._probe_at_s and not self._owed:
            self._probe_at_s = now + _PROBE_S
            self.post(Noop(0))
        raise DisconnectedError(self._why_silent())

    def _why_silent(self) -> str:
        return f"the server did not answer within {self.timeout_s:g} s and is silent since; it may be stopped"

    def _time_out(self, pending: Pending, why: str) -> None:
        """The call has timed out, unless its answer has just come. If nothing at all arrived meanwhile, the server
        hangs."""
        quiet = False
        with self._lock:
            refused = self._refuse(pending, DisconnectedError(f"{why} within {self.timeout_s:g} s"))
            if refused and self.state is LinkState.OPEN and pending.frames_before == self._frames_read:
                self.move(LinkEvent.QUIET)
                self._probe_at_s = self._clock() + _PROBE_S
                quiet = True
        if quiet:
            self._on_silence(self._why_silent())

    def _answers_again(self) -> None:
        with self._lock:
            if self.state is not _SILENT:
                return
            self.move(LinkEvent.HEARD)
        self._send_owed()
        self._on_silence("")

    def _soon(self, deadline: float) -> float:
        """How long to wait for a frame while frames of ours wait for room: nothing signals when there is some."""
        self._send_owed()
        return min(deadline, self._clock() + _OWED_POLL_S) if self._owed else deadline

    def _send_owed(self) -> None:
        """Send the waiting frames: one thread at a time, and each frame once, even if interrupted. A lookup sent twice
        would be answered twice, and nobody would own the second promise."""
        try:
            with self._lock:
                self.connection.send_waiting(self._owed)
        except DisconnectedError as error:
            self._fail(error)

    # --- reading --------------------------------------------------------------------------------------------

    def _serve(self, pending: Pending, deadline: float) -> None:
        """Read for everybody, or wait for the thread that does, until the reply is there or the deadline has passed."""
        while True:
            waiter = None
            with self._lock:
                if pending.reply is not None or pending.error is not None:
                    return
                before = self._leader
                # The reading call of this thread was interrupted: it has ended, or continues after this one.
                if before is None or not runs_elsewhere(before):
                    self._leader = _getframe()
                else:
                    waiter = threading.Lock()
                    waiter.acquire()
                    pending.waiters += (waiter,)
                    self._waiting[waiter] = None
            if waiter is None:
                self._lead(pending, deadline, before)
                return
            if self._follow(pending, waiter, deadline):
                return

    def _lead(self, pending: Pending, deadline: float, before: FrameType | None) -> None:
        """Read for everybody until our reply is there or the deadline has passed."""
        connection = self.connection
        try:
            while pending.reply is None and pending.error is None:
                frame = connection.receive(self._soon(deadline) if self._owed else deadline)
                if frame is not None:
                    self._deliver(decode_reply(frame))
                    connection.received()
                elif deadline <= 0.0 or self._clock() >= deadline:
                    break
        except DisconnectedError as error:
            self._fail(error)
        except CacheError as error:  # the server speaks something else: this connection is useless
            self._fail(DisconnectedError(str(error)))
        finally:
            with self._lock:
                self._leader = None if before is None or not runs_here(before) else before
                if self._waiting:
                    self._wake_one()
        if self._dropped:
            self._undo_dropped()
        if self._owed:
            self._send_owed()

    def _follow(self, pending: Pending, waiter: threading.Lock, deadline: float) -> bool:
        """Wait to be woken, by the reply or because the reader has gone and we must continue. False: continue
        reading."""
        woken = False
        try:
            while not woken:
                left = deadline - self._clock()
                if left <= 0:
                    break
                woken = waiter.acquire(timeout=min(left, _LEADER_CHECK_S)) or self._leaderless()
        finally:
            with self._lock:
                self._waiting.pop(waiter, None)
                pending.waiters = tuple(each for each in pending.waiters if each is not waiter)
                if self._leader is None and (not woken or pending.settled):
                    self._wake_one()  # we may have been chosen to continue reading, but will not
        return self._clock() >= deadline if not woken else pending.settled

    def _leaderless(self) -> bool:
        """Whether nobody reads because the reader was interrupted while handing over."""
        leader = self._leader
        if leader is None:
            return True
        if runs_elsewhere(leader):
            return False
        with self._lock:
            if self._leader is leader:
                self._leader = None
        return True

    def _deliver(self, reply: Reply) -> None:
        """Give a reply to its call. After an interrupt it is delivered again: a second delivery changes nothing."""
        self._frames_read += 1
        if self.state is _SILENT:
            self._answers_again()
        rid = reply.rid
        with self._lock:
            call = self._calls.get(rid)
            if call is None:
                # A message to the whole connection: nobody listens there, or the server has forgotten us.
                if isinstance(reply, Error) and (rid == 0 or reply.code == DisconnectedError.code):
                    raise DisconnectedError(reply.message) if rid == 0 else ForgottenError(reply.message)
            else:
                undoable, pending = (None, call) if isinstance(call, Pending) else (call, call())
                if undoable is not None:
                    undoable.reply = reply
                    if undoable.undo is not None:  # until it is taken: it may still be dropped
                        self._orphans.answered[id(undoable)] = undoable
                if pending is not None and pending.error is None:
                    pending.reply = reply
                    for waiter in pending.waiters:
                        self._wake(waiter)
                elif undoable is None and pending is not None:
                    pending.late = reply  # whoever gave it up may still say how to undo it
                elif undoable is not None and undoable.undo is not None:
                    self._dropped.append(undoable)
                del self._calls[rid]
        if call is None:
            self._deliver_notice(reply)

    def _deliver_notice(self, reply: Reply) -> None:
        """Handle a notice, or an answer that nobody waits for."""
        if isinstance(reply, LeaseExpiredNotice):
            self._on_notice(reply)
            return
        undone = self._undoing.get(reply.rid)
        if undone is not None:
            self._settle_record(undone)
            self._undoing.pop(reply.rid, None)

    def _settle_record(self, record: _Undoable) -> None:
        record.undo = None
        self._orphans.answered.pop(id(record), None)

    def _undo_dropped(self) -> None:
        """Undo what answers granted but nobody took. Doing it twice is harmless, so after an interrupt the next caller
        does the rest. A channel that ends before the server has answered, or on which the server does not know us yet,
        leaves it to the next channel."""
        for record in list(self._dropped):
            if self.state not in _SPOKEN_OVER:
                return
            assert isinstance(record, _Undoable)
            reply, undo = record.reply, record.undo
            if reply is not None:  # otherwise `_deliver` will find its `Pending` gone
                if record.over is self._itself:
                    pass  # the undoing is under way and waits for its answer
                elif undo is not None and (message := undo(reply)) is not None:
                    self.post(message, record)
                    if self._lost is not None:
                        return
                    record.over = self._itself
                else:
                    self._settle_record(record)
            with contextlib.suppress(ValueError):  # another thread was here, too
                self._dropped.remove(record)

    def _wake(self, waiter: threading.Lock) -> None:
        if self._waiting.pop(waiter, self) is None:  # it was there: each is woken once
            waiter.release()

    def _wake_one(self) -> None:
        """Wake one waiter to continue reading for everybody. The caller holds the lock."""
        for waiter in self._waiting:
            self._wake(waiter)
            return

    def _fail(self, error: DisconnectedError) -> None:
        error = _anew(error)
        with self._lock:
            if self._lost is None:
                self._lost, self.forgotten = error, isinstance(error, ForgottenError)
                self.move(LinkEvent.END)
            self._dropped.extend(self._undoing.values())  # nobody knows whether the server has read that
            self._undoing.clear()
            failed = list(self._calls.values())
            self._calls.clear()
            for call in failed:
                pending = call if isinstance(call, Pending) else call()
                if pending is not None and not pending.settled:
                    pending.error = error
            for waiter in list(self._waiting):
                self._wake(waiter)
        self.connection.close()


def _anew(error: _E) -> _E:
    """A fresh copy of the error: a raised exception keeps the frames that it passed through, and with them their
    variables: buffers, leases, the client."""
    return type(error)(str(error))


def expect(reply: Reply, kind: type[_M]) -> _M:
    """The reply, checked to be of the expected kind."""
    if not isinstance(reply, kind):
        raise DisconnectedError(f"the server answered {type(reply).__name__} instead of {kind.__name__}")
    return reply
