"""Lookups: the L1 answers at once, tiers answer later, and a reply may wait for them."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from lmcache_core.errors import CacheError, LimitError, UsageError
from lmcache_core.kernel.answers import Grant, KernelLookup, Reason
from lmcache_core.kernel.kernel import Kernel
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
from lmcache_core.server.l1 import L1, REASONS
from lmcache_core.server.session import Session
from lmcache_core.server.shares import Share
from lmcache_core.server.traffic import missed
from lmcache_core.tiers.flow.jobs import Job, TierLookup, Wanted, wanted_by, window_end

if TYPE_CHECKING:
    from lmcache_core.server.tracing import Span
    from lmcache_core.tiers.tiering import Tiering

_ABSENT = (Grant.MISS, Grant.LOADING)


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
    asked_at_s: float
    first: KernelLookup  # what the L1 had at the beginning
    span: Span | None = None  # if its trace is recorded
    job: Job | None = None
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
        self._asking: dict[Wait, None] = {}  # those with queries to answer once the hits are known
        self._by_session: Counter[int] = Counter()  # of open ones
        self.throttled = 0

    def lookup(self, session: Session, request: LookupRequest, keys: Sequence[bytes]) -> LookupReply | None:
        """The answer, or None if the reply waits until the tiers have loaded what is missing."""
        now, options = self._l1.clock.now, request.options
        _check(options)
        policy = self._policy_named(options.policy) if options.policy else None
        span = None if self._l1.tracing is None else self._l1.tracing.begin(request)
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
        if not served and self._throttles(session):
            served = True  # with what the L1 has; the rest counts as missing for now
            for at in missing:
                found.reasons[at] = Reason.LATE
        if served or tiering is None:
            self._pin(session, request.namespace, options, keys, found.statuses)
            self._count(request.namespace, found, len(missing), span)
            return self._found(options, request.rid, found)
        wait = Wait(
            session,
            request.rid,
            request,
            keys,
            found.promise_id,
            options.wait_s > 0,
            reply_at_s=now + options.wait_s,
            asked_at_s=now,
            first=found,
            span=span,
        )
        return self._ask_tiers(tiering, wait, missing, policy)

    def _ask_tiers(
        self, tiering: Tiering, wait: Wait, missing: Sequence[int], policy: PrefetchPolicy | None
    ) -> LookupReply | None:
        """Have them load what is missing. The answer, or None where it is held back."""
        session, request, options = wait.session, wait.request, wait.request.options
        allowed_s = options.deadline_s or (options.wait_s if options.wait_s > 0 else TIER_DEADLINE_S)
        try:
            wait.job = job = tiering.lookup(
                TierLookup(
                    request.namespace,
                    session.namespaces[request.namespace],
                    wait.keys,
                    missing,
                    wait.asked_at_s + allowed_s,
                    options,
                    wait.span,
                ),
                partial(self._ended, wait),
                policy,
            )
        except BaseException:  # an unknown tier, a failing policy: the caller is not told of the promise
            if wait.promise:
                self._kernel.free_lookup_locks(session.id, [wait.promise], wait.asked_at_s)
            raise
        self._open[wait] = None
        self._by_session[session.id] += 1
        self._share.take(session.origin)
        self.waits[job.id] = wait
        if wait.holds_reply:
            if options.wait_s < allowed_s:
                self.timed[wait] = None
            return None
        return self._found(options, request.rid, wait.first, job=job, done=False)

    def status_of(self, session: Session, rid: int, job_id: int) -> LookupReply:
        """The progress of a lookup. For one with `hold` that found nothing at first, this makes the promise once its
        loads have ended, because this caller will be told."""
        wait = self._wait_of(session, job_id)
        assert wait.job is not None
        hold = wait.request.options.hold and wait.job.ended and not wait.promise
        found = self._look_again(session, wait, rid, hold=hold)
        if hold and wait.promise:
            self._made_late[wait.promise] = wait
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
        wait.hits_queries += ((session, rid),)
        self._asking[wait] = None
        return None

    def cancel(self, session: Session, rid: int) -> int:
        """Cancel the session's lookup with this request id. Returns how many there were."""
        mine = [wait for wait in self._open if wait.session is session and wait.rid == rid]
        self._cancel(mine)
        return len(mine)

    def session_ended(self, session: Session) -> None:
        """Nobody waits for its lookups any more."""
        self._cancel([wait for wait in self._open if wait.session is session])

    def after_step(self) -> None:
        """Answer queries about hits that are known now, and lookups whose wait is over."""
        now = self._l1.clock.now
        for wait in [wait for wait in self.timed if wait.reply_at_s <= now]:
            self._reply(wait)
        if self._asking:
            for wait in [wait for wait in self._asking if wait.job is not None and wait.job.hits is not None]:
                self._answer_hits(wait)

    @property
    def next_reply_s(self) -> float | None:
        """When `after_step` has a reply to send even if nothing else happens."""
        return min([wait.reply_at_s for wait in self.timed]) if self.timed else None

    @property
    def under_way(self) -> int:
        """Lookups that the tiers are working on."""
        return len(self._open)

    def _throttles(self, session: Session) -> bool:
        """Whether too many lookups wait already, of this session, of its user or in total, to ask a tier for one
        more."""
        full = self._by_session[session.id] >= LOOKUPS_PER_SESSION_MAX or self._share.full_for(session.origin)
        self.throttled += full
        return full

    def _cancel(self, waits: Sequence[Wait]) -> None:
        for wait in waits:
            if wait.job is not None and self._l1.tiering is not None:
                self._l1.tiering.cancel(wait.job)

    def _ended(self, wait: Wait, job: Job) -> None:
        self._open.pop(wait, None)
        self._remember(wait)
        self._count_ended(wait, job)
        session_id = wait.session.id
        self._by_session[session_id] -= 1
        self._share.free(wait.session.origin)
        if not self._by_session[session_id]:  # sessions come and go
            del self._by_session[session_id]
        self._answer_hits(wait)
        if wait.holds_reply:
            self._reply(wait)
            return
        if wait.promise:  # the promise that its holder was told about holds what was loaded, too
            request, now = wait.request, self._l1.clock.now
            prefix = wanted_by(request.options) is Wanted.PREFIX
            self._kernel.promise_more(wait.promise, request.namespace, wait.keys, now, prefix=prefix)
        if wait.request.options.pin_s > 0 and wait.session.peer is not None:
            self._look_again(wait.session, wait, 0, hold=False, pin=True)

    def _count(self, namespace: int, found: KernelLookup, absent: int, span: Span | None) -> None:
        """Count a lookup that the L1 answered; `absent` of its keys are missing."""
        keys, taps = len(found.statuses), self._l1.taps
        reasons = missed(found.statuses, found.reasons) if absent else {}
        self._l1.traffic.looked_up(namespace, keys, keys - absent, reasons)
        if taps is not None:
            taps.lookup(namespace, keys, keys - absent, 0, reasons, False, 0.0)
        if span is not None and self._l1.tracing is not None:
            self._l1.tracing.lookup_ended(span, namespace, keys, keys - absent, 0)

    def _count_ended(self, wait: Wait, job: Job) -> None:
        """Count keys that were missing at first: loaded, or missed for the reason that the tiers gave."""
        found, taps, namespace = wait.first, self._l1.taps, wait.request.namespace
        first = found.reasons or bytes(len(found.statuses))
        why = {at: REASONS[reason] for at, reason in job.reasons.items()}
        left = [at for at in job.request.missing if at not in job.loaded]
        reasons = missed(bytes([Grant.MISS]) * len(left), bytes([why.get(at) or first[at] for at in left]))
        keys, loaded, duration_s = len(found.statuses), len(job.loaded), self._l1.clock.now - wait.asked_at_s
        self._l1.traffic.loaded(namespace, keys, keys - len(left), loaded, reasons, duration_s, job.came_from.values())
        if taps is not None:
            taps.lookup(namespace, keys, keys - len(left), loaded, reasons, True, duration_s)
        if wait.span is not None and self._l1.tracing is not None:
            self._l1.tracing.lookup_ended(wait.span, namespace, keys, keys - len(left), loaded)

    def _reply(self, wait: Wait) -> None:
        """Send the delayed reply: the loads have ended, or it has waited long enough."""
        self.timed.pop(wait, None)
        wait.holds_reply = False
        if wait.promise:  # the reply has one for everything, and nobody was told about this one
            self._kernel.take_promise_back(wait.promise, self._l1.clock.now)
            wait.promise = 0
        if wait.session.peer is None:
            return
        try:
            reply: Message = self._look_again(wait.session, wait, wait.rid, hold=wait.request.options.hold, pin=True)
        except CacheError as error:  # for example, the session has reached its limit of leases meanwhile
            reply = error_reply(wait.rid, error)
        self._l1.answer(wait.session, reply)

    def _answer_hits(self, wait: Wait) -> None:
        queries, wait.hits_queries = wait.hits_queries, ()
        self._asking.pop(wait, None)
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
