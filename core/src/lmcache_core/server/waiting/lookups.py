"""Lookups: the L1 answers at once, tiers answer later, and a reply may wait for them."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from lmcache_core.errors import CacheError, LimitError, UsageError
from lmcache_core.kernel.answers import Grant, KernelLookup, Reason
from lmcache_core.kernel.kernel import Kernel
from lmcache_core.kernel.memory import MemoryAccount, MemorySort
from lmcache_core.limits import (
    BATCH_KEYS_MAX,
    JOB_KEYS_REMEMBERED,
    JOBS_REMEMBERED,
    LOOKUPS_PER_SESSION_MAX,
    SEND_QUEUE_FRAMES_MAX,
    TIER_DEADLINE_S,
)
from lmcache_core.policies.contracts import PrefetchPolicy
from lmcache_core.protocol.codec import error_reply, pack_u64
from lmcache_core.protocol.messages import LookupOptions, LookupReply, LookupRequest, Message
from lmcache_core.server.peers.session import Session
from lmcache_core.server.peers.shares import Share
from lmcache_core.server.pool.l1 import L1, REASONS
from lmcache_core.server.pool.traffic import missed
from lmcache_core.tiers.flow.jobs import Job, TierLookup, Wanted, wanted_by, window_end

if TYPE_CHECKING:
    from lmcache_core.tiers.tiering import Tiering

_ABSENT = (Grant.MISS, Grant.LOADING)
_WAIT_BYTES, _KEY_BYTES = 4096, 160  # of a lookup under way, and of each of its keys, with the tiers' own tables


@dataclass(eq=False)
class Wait:
    """One lookup that the tiers are working on."""

    session: Session
    rid: int
    request: LookupRequest
    keys: Sequence[bytes]
    promise: int
    holds_reply: bool
    reply_at_s: float  # the reply waits at most until then
    began_at_s: float
    first: KernelLookup  # what the L1 had at the beginning
    memory: MemoryAccount  # is charged for as long as it is under way
    trace: Hashable | None = None  # if it is traced
    job: Job | None = None
    cancelled: bool = False  # by its client, which would not take a promise
    hits_queries: tuple[tuple[Session, int], ...] = ()  # session and request: answered once the hits are known


class Lookups:
    """Answers lookups and the queries about them. Lives on the loop's thread."""

    def __init__(self, kernel: Kernel, l1: L1, policy_named: Callable[[str], PrefetchPolicy], share: Share) -> None:
        self._kernel = kernel
        self._l1 = l1
        self._policy_named = policy_named
        self._share = share
        self.timed: dict[Wait, None] = {}  # replies that are sent before their loads may have ended
        self._open: dict[Wait, None] = {}  # under way
        self.waits: dict[int, Wait] = {}  # by job id: the open ones, and the last that ended …
        self._remembered: deque[Wait] = deque()  # … in this order
        self._keys_remembered = 0  # of the latter
        self._made_late: dict[int, Wait] = {}  # by the promise that a query after its loads made
        self._queried: dict[Wait, None] = {}  # those with queries to answer once the hits are known
        self._by_session: Counter[int] = Counter()  # of open ones
        self._accounts: dict[int, MemoryAccount] = {}  # by session: of those that have asked a tier
        self.throttled = 0

    def lookup(self, session: Session, request: LookupRequest, keys: Sequence[bytes]) -> LookupReply | None:
        """The answer, or None if the reply waits until the tiers have loaded what is missing."""
        now, options = self._l1.clock.now, request.options
        _check(options)
        policy = self._policy_named(options.policy) if options.policy else None
        found = self._kernel.lookup(
            session.id,
            request.namespace,
            keys,
            now,
            hold=options.hold,
            prefix=wanted_by(options) is Wanted.PREFIX,
            identify=options.identify,
        )
        missing = [at for at, status in enumerate(found.statuses) if status in _ABSENT]
        tiering = self._l1.tiering
        served = not missing or (options.window > 0 and missing[-1] < len(keys) - options.window)
        served = served or tiering is None or options.tiers == []
        if not served and self._throttles(session, len(keys)):
            served = True  # with what the L1 has; the rest counts as missing for now
            for at in missing:
                found.reasons[at] = Reason.LATE
        if served or tiering is None:
            self._pin(session, request.namespace, options, keys, found.statuses)
            self._l1.observer.lookup(session, request, found, len(missing))
            return self._promised(session, self._found(options, request.rid, found))
        wait = Wait(
            session,
            request.rid,
            request,
            keys,
            found.promise_id,
            options.wait_s > 0,
            reply_at_s=now + options.wait_s,
            began_at_s=now,
            first=found,
            memory=self._account_of(session),
            trace=self._l1.observer.trace_of(request),
        )
        return self._ask_tiers(tiering, wait, missing, policy)

    def _ask_tiers(
        self, tiering: Tiering, wait: Wait, missing: Sequence[int], policy: PrefetchPolicy | None
    ) -> LookupReply | None:
        """Have them load what is missing. The answer, or None where it is held back."""
        session, request, options = wait.session, wait.request, wait.request.options
        allowed_s = options.deadline_s or (options.wait_s if options.wait_s > 0 else TIER_DEADLINE_S)
        tier_lookup = TierLookup(
            request.namespace,
            session.namespaces[request.namespace],
            wait.keys,
            missing,
            wait.began_at_s + allowed_s,
            options,
            wait.trace,
        )
        self._take_place(wait)  # an unknown tier or a failing policy raises: then it is taken back, with the promise
        wait.job = job = tiering.lookup(tier_lookup, partial(self._ended, wait), policy)
        self.waits[job.id] = wait
        if wait.holds_reply:
            if options.wait_s < allowed_s:
                self.timed[wait] = None
            return None
        return self._promised(session, self._found(options, request.rid, wait.first, job=job, done=False))

    def _take_place(self, wait: Wait) -> None:
        self._open[wait] = None
        self._by_session[wait.session.id] += 1
        self._share.take(wait.session.origin)
        wait.memory.charge(_cost(len(wait.keys)))
        self._kernel.undo.add((self._withdraw, (wait,)))

    def _leave_place(self, wait: Wait) -> None:
        del self._open[wait]
        session_id = wait.session.id
        self._by_session[session_id] -= 1
        self._share.free(wait.session.origin)
        wait.memory.charge(-_cost(len(wait.keys)))
        if not self._by_session[session_id]:  # sessions come and go
            del self._by_session[session_id]

    def _withdraw(self, wait: Wait) -> None:
        """Its request has failed: nobody will ask for it."""
        self._leave_place(wait)
        self.timed.pop(wait, None)
        if wait.job is not None:
            self.waits.pop(wait.job.id, None)
            self._cancel([wait])

    def status_of(self, session: Session, rid: int, job_id: int) -> LookupReply:
        """The progress of a lookup. For one with `hold` that found nothing at first, this makes the promise once its
        loads have ended, because this caller gets the answer."""
        wait = self._wait_of(session, job_id)
        assert wait.job is not None
        hold = wait.request.options.hold and wait.job.ended and not wait.promise
        found = self._look_again(session, wait, rid, hold=hold)
        if hold and wait.promise:
            self._made_late[wait.promise] = wait
            self._promised(session, found)
        return found

    def freed(self, session: Session, promises: Sequence[int]) -> None:
        """The client has given these promises back. If an answer to `status_of` made one of them, and the client never
        saw it, the next question makes another."""
        for promise in promises if self._made_late else ():
            wait = self._made_late.get(promise)
            if wait is not None and wait.session.client_id == session.client_id:
                del self._made_late[promise]
                wait.promise = 0

    def hits_of(self, session: Session, rid: int, job_id: int) -> LookupReply | None:
        """What will be a hit, or None: the reply follows once the tiers have answered."""
        wait = self._wait_of(session, job_id)
        assert wait.job is not None
        if wait.job.ended or wait.job.hits is not None:
            return self._look_again(session, wait, rid, hold=False)
        if len(wait.hits_queries) >= SEND_QUEUE_FRAMES_MAX:
            raise LimitError(f"{SEND_QUEUE_FRAMES_MAX} queries wait for the hits of job {job_id} already: wait for one")
        self._queried[wait] = None
        self._kernel.undo.add((setattr, (wait, "hits_queries", wait.hits_queries)))
        wait.hits_queries += ((session, rid),)
        return None

    def cancel(self, session: Session, rid: int) -> int:
        """Cancel the session's lookup with this request id. Returns how many there were."""
        mine = [wait for wait in self._open if wait.session is session and wait.rid == rid]
        for wait in mine:
            wait.cancelled = True
        self._cancel(mine)
        return len(mine)

    def session_ended(self, session: Session) -> None:
        """Nobody waits for its lookups any more."""
        self._accounts.pop(session.id, None)
        self._cancel([wait for wait in self._open if wait.session is session])

    def after_step(self) -> None:
        """Answer queries about hits that are known now, and lookups whose wait is over."""
        now = self._l1.clock.now
        for wait in [wait for wait in self.timed if wait.reply_at_s <= now]:
            self._reply(wait)
        if self._queried:
            for wait in [wait for wait in self._queried if wait.job is not None and wait.job.hits is not None]:
                self._answer_hits(wait)

    @property
    def next_reply_s(self) -> float | None:
        """When `after_step` has a reply to send even if nothing else happens."""
        return min([wait.reply_at_s for wait in self.timed]) if self.timed else None

    @property
    def under_way(self) -> int:
        """Lookups that the tiers are working on."""
        return len(self._open)

    def _account_of(self, session: Session) -> MemoryAccount:
        account = self._accounts.get(session.id)
        if account is None:
            account = self._accounts[session.id] = self._kernel.memory.open(MemorySort.REQUESTS, session.origin)
        return account

    def _throttles(self, session: Session, keys: int) -> bool:
        """Whether too many lookups wait already, of this session, of its user or in total, or with too many keys, to
        ask a tier for one more."""
        full = self._by_session[session.id] >= LOOKUPS_PER_SESSION_MAX or self._share.full_for(session.origin)
        full = full or self._account_of(session).full_for(_cost(keys)) is not None
        self.throttled += full
        return full

    def _cancel(self, waits: Sequence[Wait]) -> None:
        for wait in waits:
            if wait.job is not None and self._l1.tiering is not None:
                self._l1.tiering.cancel(wait.job)

    def _ended(self, wait: Wait, job: Job) -> None:
        if wait not in self._open:
            return  # its request has failed meanwhile
        self._leave_place(wait)
        self._remember(wait)
        self._count_ended(wait, job)
        self._answer_hits(wait)
        if wait.holds_reply:
            self._reply(wait)
            return
        if wait.promise:  # the promise that its holder knows holds what was loaded, too
            request, now = wait.request, self._l1.clock.now
            prefix = wanted_by(request.options) is Wanted.PREFIX
            self._kernel.promise_more(wait.promise, request.namespace, wait.keys, now, prefix=prefix)
        if wait.request.options.pin_s > 0 and wait.session.peer is not None:
            self._look_again(wait.session, wait, 0, hold=False, pin=True)

    def _count_ended(self, wait: Wait, job: Job) -> None:
        """Count keys that were missing at first: loaded, or missed for the reason that the tiers gave."""
        found, namespace, observer = wait.first, wait.request.namespace, self._l1.observer
        first = found.reasons or bytes(len(found.statuses))
        why = {at: REASONS[reason] for at, reason in job.reasons.items()}
        left = [at for at in job.request.missing if at not in job.loaded]
        reasons = missed(bytes([Grant.MISS]) * len(left), bytes([why.get(at) or first[at] for at in left]))
        keys, loaded, took_s = len(found.statuses), len(job.loaded), self._l1.clock.now - wait.began_at_s
        hits, came_from = keys - len(left), job.came_from.values()
        observer.lookup_ended(wait.session, wait.trace, namespace, keys, hits, loaded, reasons, took_s, came_from)

    def _reply(self, wait: Wait) -> None:
        """Send the delayed reply: the loads have ended, or it has waited long enough."""
        self.timed.pop(wait, None)
        wait.holds_reply = False
        if wait.promise:  # the reply has one for everything, and nobody knows this one
            self._kernel.take_promise_back(wait.promise, self._l1.clock.now)
            wait.promise = 0
        if wait.session.peer is None:
            return
        try:
            hold = wait.request.options.hold and not wait.cancelled
            found = self._look_again(wait.session, wait, wait.rid, hold=hold, pin=True)
            reply: Message = self._promised(wait.session, found)
        except CacheError as error:  # for example, the session has reached its limit of leases meanwhile
            reply = error_reply(wait.rid, error)
        self._l1.answer(wait.session, reply)

    def _promised(self, session: Session, reply: LookupReply) -> LookupReply:
        """The reply, which is the first to name its promise, if it has one: a cancel that crosses it frees that."""
        if reply.promise:
            session.note_promise(reply.rid, reply.promise)
        return reply

    def _answer_hits(self, wait: Wait) -> None:
        queries, wait.hits_queries = wait.hits_queries, ()
        self._queried.pop(wait, None)
        for session, rid in queries:
            if session.peer is not None:  # nobody listens to a lost or ended one, and the kernel does not know it
                self._l1.answer(session, self._look_again(session, wait, rid, hold=False))

    def _look_again(self, session: Session, wait: Wait, rid: int, *, hold: bool, pin: bool = False) -> LookupReply:
        """`session`: the one that asks now, maybe a later one of the same client."""
        request, options, job = wait.request, wait.request.options, wait.job
        found = self._kernel.lookup(
            session.id,
            request.namespace,
            wait.keys,
            self._l1.clock.now,
            hold=hold,
            prefix=wanted_by(options) is Wanted.PREFIX,
            identify=options.identify,
        )
        self._kernel.undo.add((setattr, (wait, "promise", wait.promise)))
        wait.promise = found.promise_id = found.promise_id or wait.promise
        if pin:
            self._pin(session, request.namespace, options, wait.keys, found.statuses)
        return self._found(options, rid, found, job=job)

    def _pin(
        self, session: Session, namespace: int, options: LookupOptions, keys: Sequence[bytes], statuses: bytearray
    ) -> None:
        """Pin the keys of this lookup, if the request says so."""
        if not options.pin_s > 0:
            return
        end = len(keys) if wanted_by(options) is Wanted.SPARSE else _hits(options, statuses)
        first = max(0, end - options.window) if options.window else 0
        chosen = [keys[at] for at in range(first, end) if statuses[at] == Grant.GRANTED]
        if chosen:
            self._kernel.pin(session.id, namespace, chosen, options.pin_s, self._l1.clock.now)

    def _found(
        self,
        options: LookupOptions,
        rid: int,
        found: KernelLookup,
        job: Job | None = None,
        done: bool = True,
    ) -> LookupReply:
        statuses, reasons, promise = found.statuses, found.reasons, found.promise_id
        hits = _hits(options, statuses)
        if job is not None:
            done = job.ended
            if not done and job.hits is not None:
                hits = max(hits, job.hits)
            for at, reason in job.reasons.items():
                if statuses[at] == Grant.MISS and REASONS[reason] is not Reason.NONE:
                    reasons[at] = REASONS[reason]
        return LookupReply(
            rid,
            bytes(statuses),
            bytes(reasons),
            hits,
            done,
            promise,
            max(0.0, found.deadline - self._l1.clock.now) if promise else 0.0,
            0 if job is None else job.id,
            b"" if found.incarnations is None else pack_u64(found.incarnations),
        )

    def _wait_of(self, session: Session, job_id: int) -> Wait:
        wait = self.waits.get(job_id)
        if wait is None or wait.session.client_id != session.client_id:
            raise UsageError(f"job {job_id} is not a lookup of this client, or ended long ago")
        return wait

    def _remember(self, wait: Wait) -> None:
        """It has ended, and can be asked about for a while. One that has not ended is never forgotten."""
        self._remembered.append(wait)
        self._keys_remembered += len(wait.keys)
        while len(self._remembered) > JOBS_REMEMBERED or self._keys_remembered > JOB_KEYS_REMEMBERED:
            oldest = self._remembered.popleft()
            self._keys_remembered -= len(oldest.keys)
            self._made_late.pop(oldest.promise, None)
            if oldest.job is not None:
                del self.waits[oldest.job.id]


def _check(options: LookupOptions) -> None:
    """Raise `UsageError` for meaningless figures."""
    if not 0 <= options.window <= BATCH_KEYS_MAX:
        raise UsageError(f"a window of {options.window} keys: give 1 to {BATCH_KEYS_MAX}, or 0 for none")
    for name in ("wait_s", "deadline_s", "pin_s"):
        if not getattr(options, name) >= 0:
            raise UsageError(f"{name} is {getattr(options, name)}: give seconds, or 0")
    if options.pin_s == math.inf:
        raise UsageError("pin_s must be finite: give seconds")


def _hits(options: LookupOptions, statuses: bytearray) -> int:
    """See `Found`."""
    wanted = wanted_by(options)
    if wanted is Wanted.SPARSE:
        return statuses.count(Grant.GRANTED)
    if wanted is Wanted.PREFIX:
        return next((at for at, status in enumerate(statuses) if status != Grant.GRANTED), len(statuses))
    absent = [at for at, status in enumerate(statuses) if status != Grant.GRANTED]
    return window_end(len(statuses), options.window, absent)


def _cost(keys: int) -> int:
    """Bytes of memory of a lookup under way, about."""
    return _WAIT_BYTES + _KEY_BYTES * keys
