"""Lookups: from the index as far as possible, paged ones that wait, and handles for callers that must not wait."""

from __future__ import annotations

import contextlib
import operator
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from msgspec import structs

from lmcache_core.client.find.hits import COUNT_HITS, Hits
from lmcache_core.client.link.channel import Pending, expect
from lmcache_core.client.link.link import Link
from lmcache_core.client.link.reconnecting import Links
from lmcache_core.client.promises import Promise
from lmcache_core.client.results import LookupResult, Status, grant_statuses, miss_reasons, numbers_of
from lmcache_core.errors import (
    CacheError,
    DisconnectedError,
    ForgottenError,
    LimitError,
    UnknownNamespaceError,
    UsageError,
)
from lmcache_core.kernel.answers import Grant, Reason
from lmcache_core.limits import BATCH_KEYS_MAX, JOBS_REMEMBERED, SECONDS_MAX
from lmcache_core.protocol import messages as m
from lmcache_core.protocol.codec import join_keys
from lmcache_core.protocol.messages import Reply
from lmcache_core.tokens.namespace import Namespace

__all__ = ["LookupHandle"]  # what callers hold

UNPROMISED = frozenset((Status.UNREACHABLE, Status.QUOTA))  # no server, or one that has no room for us
_GRANTED, _NO_REASON = Status.GRANTED, Reason.NONE  # in Python 3.11 looking up an enum member takes 0.15 µs


class ClientLookupOptions(m.LookupOptions, frozen=True):
    """A lookup's options, including those that never travel. `if_possible`, with `hold`: if the server makes no
    promise, the index answers without one. `traceparent`: the trace that the lookup belongs to."""

    if_possible: bool = False
    traceparent: str = ""


def unserved(count: int, status: Status = Status.UNREACHABLE, reason: Reason = Reason.NONE) -> LookupResult:
    """The answer to a lookup that could not reach a server, or that one refused."""
    return LookupResult([status] * count, [reason] * count, 0)


def result_of(reply: Reply, keys: Sequence[bytes], now: float) -> LookupResult:
    """The result that a reply to a lookup of these keys means."""
    found, count = expect(reply, m.LookupReply), len(keys)
    promise = None
    if found.promise:  # also for what is still being loaded: it will be held, too
        promise = Promise((found.promise,) * count, tuple(map(bytes, keys)), now + found.deadline_s)
    return LookupResult(
        grant_statuses(found.statuses, count),
        miss_reasons(found.reasons, count),
        found.hits,
        found.done,
        promise,
        found.job,
        numbers_of(found.incarnations, count) if found.incarnations else (),
    )


class PromiseOwner:
    """The owner-to-be of promises. Answers that came before they were `taken` are undone when this is dropped.

    `taken` is set in one assignment for all pages, and the code that sets it returns at once. The interpreter checks
    for interrupts where a function begins, a loop jumps back and a call into C ends, so there is no such point between
    that assignment and the caller's own: either the promises are freed, or the caller has them.
    """

    __slots__ = ("taken",)

    def __init__(self) -> None:
        self.taken = False

    def undo(self, reply: Reply) -> m.Message | None:
        """The message that undoes an answer: it frees the promise that the answer made. An answer that only names an
        earlier promise, such as the answer to a query, gives it no time, and needs no undoing."""
        made = isinstance(reply, m.LookupReply) and reply.deadline_s > 0 and not self.taken
        promise = reply.promise if made and isinstance(reply, m.LookupReply) else 0
        return (m.FreeLookupLocks(0, [promise])) if promise else None


class Answers:
    """The answers to the pages of one lookup. Their promises are freed if this is dropped before they are taken."""

    def __init__(self) -> None:
        self.owner = PromiseOwner()
        self._pages: list[Pending] = []  # no owner may reference these, or they would never be dropped

    def add(self, pending: Pending) -> None:
        """One more page."""
        self._pages.append(pending)

    def drop(self) -> None:
        """Discard the answers so far."""
        self.owner = PromiseOwner()
        self._pages = []


def lookup_pages(
    link: Link, keys: Sequence[bytes], namespace: Namespace, options: ClientLookupOptions, answers: Answers
) -> LookupResult:
    """Look up any number of keys, a frame at a time. A prefix ends with its first short page."""
    if options.window:
        return _lookup_window(link, keys, namespace, options, answers)
    pages: list[LookupResult] = []
    for first in range(0, len(keys), BATCH_KEYS_MAX):
        page = keys[first : first + BATCH_KEYS_MAX]
        pages.append(_page(link, page, namespace, options, answers))
        if options.prefix and pages[-1].hits < len(page):
            break
    return _joined(pages, keys, prefix=options.prefix)


def _lookup_window(
    link: Link, keys: Sequence[bytes], namespace: Namespace, options: ClientLookupOptions, answers: Answers
) -> LookupResult:
    """The last end counts: pages are requested from the last to the first, and each overlaps the next by so many keys
    that every window lies within one of them."""
    window, end = _whole("window", options.window), len(keys)
    if not 0 < window <= BATCH_KEYS_MAX:
        raise UsageError(f"a window of {window} keys: give 1 to {BATCH_KEYS_MAX}")
    while True:
        first = max(0, end - BATCH_KEYS_MAX)
        page = _page(link, keys[first:end], namespace, options, answers)
        if first == 0 or page.hits >= window:
            break
        answers.drop()  # of keys in no window
        end = first + window - 1
    before, after = first, len(keys) - end
    return LookupResult(
        [Status.MISS] * before + list(page.statuses) + [Status.MISS] * after,
        [Reason.NONE] * before + list(page.reasons) + [Reason.NONE] * after,
        first + page.hits if page.hits else 0,
        page.done,
        page.promise,
        page.job,
        [0] * before + list(page.incarnations) + [0] * after if page.incarnations else (),
    )


def _page(
    link: Link, page: Sequence[bytes], namespace: Namespace, options: ClientLookupOptions, answers: Answers
) -> LookupResult:
    request, undo = request_of(namespace, join_keys(page), options), answers.owner.undo if options.hold else None

    def ask() -> Reply:
        pending = link.channel.start(link.traced(request, options.traceparent), undo, options.wait_s)
        answers.add(pending)
        return link.channel.wait(pending)

    return result_of(link.in_namespace(namespace, ask), page, time.monotonic())


def request_of(namespace: Namespace, blob: bytes, options: m.LookupOptions) -> m.LookupRequest:
    """The request. Raises `UsageError` for values of the wrong type."""
    sent = m.LookupOptions(
        hold=options.hold,
        prefix=bool(options.prefix),
        wait_s=min(_seconds("wait_s", options.wait_s), SECONDS_MAX),
        tiers=None if options.tiers is None else list(options.tiers),
        window=_whole("window", options.window),
        deadline_s=min(_seconds("deadline_s", options.deadline_s), SECONDS_MAX),
        pin_s=_seconds("pin_s", options.pin_s),
        policy=_text("policy", options.policy),
        warm_up=options.warm_up,
        identify=bool(options.identify),
    )
    return m.LookupRequest(0, namespace.id, blob, sent)


def _seconds(name: str, given: Any) -> float:
    """Any kind of number."""
    if hasattr(given, "__float__"):
        return float(given)
    raise UsageError(f"{name} is {given!r}: give a number of seconds")


def _whole(name: str, given: Any) -> int:
    if hasattr(given, "__index__"):
        return operator.index(given)
    raise UsageError(f"{name} is {given!r}: give a whole number, 0 for none")


def _text(name: str, given: object) -> str:
    if isinstance(given, str):
        return given
    raise UsageError(f"{name} is {given!r}: give its name")


def _joined(pages: Sequence[LookupResult], keys: Sequence[bytes], *, prefix: bool) -> LookupResult:
    statuses = [status for page in pages for status in page.statuses]
    reasons = [reason for page in pages for reason in page.reasons]
    hits = 0
    for page in pages:
        hits += page.hits
        if prefix and page.hits < len(page.statuses):
            break
    seen = [number for page in pages for number in page.incarnations]
    rest = len(keys) - len(statuses)
    return LookupResult(
        statuses + [Status.MISS] * rest,
        reasons + [Reason.NONE] * rest,
        hits,
        all(page.done for page in pages),
        _joined_promise(pages, keys),
        pages[-1].job if pages else 0,
        seen + [0] * rest if seen else (),
    )


def _joined_promise(pages: Sequence[LookupResult], keys: Sequence[bytes]) -> Promise | None:
    """One promise for all pages; beyond its share a session gets no more, so some pages may have none."""
    parts, first = [], 0
    if any(page.promise for page in pages):
        for page in pages:
            end = first + len(page.statuses)
            unkept = Promise((0,) * (end - first), tuple(map(bytes, keys[first:end])), 0.0)
            parts.append(page.promise or unkept)
            first = end
    return Promise.joined(parts)


def _check_tiers(tiers: object) -> None:
    if not isinstance(tiers, list | tuple) or not all(isinstance(name, str) for name in tiers):
        raise UsageError(f"tiers is {tiers!r}: give a list of names, or None for all of them")


class _Part(NamedTuple):
    """A lookup of which the server was asked for a part: the keys at `rest`; the index had the others."""

    keys: Sequence[bytes]
    rest: Sequence[int]
    namespace: Namespace
    prefix: bool


class ClientLookups:
    """Lookups of one client. Thread-safe."""

    def __init__(self, links: Links, hits: Hits, *, trace: Callable[[], str] | None = None) -> None:
        """`trace`: see `Target`."""
        self.links = links
        self._hits = hits
        self._trace = trace
        self._parts: OrderedDict[tuple[int, int], _Part] = OrderedDict()  # by the server's epoch and the job

    def lookup(self, keys: Sequence[bytes], namespace: Namespace, options: ClientLookupOptions) -> LookupResult:
        """Ask the index first, then the server for missing keys that may be elsewhere."""
        if options.hold and options.if_possible:
            held = self._ask(keys, namespace, options)
            if UNPROMISED.isdisjoint(held.statuses):
                return held
            options = structs.replace(options, hold=False)
        found = self._find(keys, namespace, options)
        if not found:
            return self._ask(keys, namespace, options)
        count, hits = len(keys), len(found) if options.prefix else found.count(1)  # a prefix ends with its last hit
        if not hits:
            return self._ask(keys, namespace, options)
        if hits == count:
            return _all_there(count)
        if options.prefix:
            rest: Sequence[int] = range(hits, count)
        else:
            rest = [at for at, byte in enumerate(found) if not byte]
        return self._ask_rest(keys, rest, namespace, options)

    def identified(self, keys: Sequence[bytes], namespace: Namespace, options: ClientLookupOptions) -> LookupResult:
        """Like `lookup`, with the incarnations that were found."""
        if self._find(keys, namespace, options) is None:
            return self._ask(keys, namespace, options)
        seen = self._identify(keys, namespace, options.prefix)
        rest = [at for at, number in enumerate(seen) if not number]
        if not rest:
            return structs.replace(_all_there(len(keys)), incarnations=seen)
        found = self._ask_rest(keys, rest, namespace, options)
        seen = [ours or theirs for ours, theirs in zip(seen, found.incarnations or seen, strict=True)]
        return structs.replace(found, incarnations=seen)

    def by_index(self, keys: Sequence[bytes], namespace: Namespace, options: ClientLookupOptions) -> LookupResult:
        """What the index has, and, if it should be held, one call to hold it. All other keys are misses."""
        for name in ("window", "pin_s", "policy"):
            if getattr(options, name):
                raise UsageError(f"{name} needs the server: leave it out, or do not pass ask=False")
        found = self._find(keys, namespace, structs.replace(options, hold=False), 0 if options.hold else COUNT_HITS)
        if not found or not (there := found.count(1)):
            return unserved(len(keys), Status.MISS)
        if options.hold:
            if options.prefix:
                keys_there: Sequence[int] = range(there)
            else:
                keys_there = [at for at, byte in enumerate(found) if byte]
            return self._hold(keys, keys_there, namespace, options)
        if options.identify:
            seen = self._identify(keys, namespace, options.prefix)
            return structs.replace(_found_by_index(bytes(map(bool, seen)), len(keys)), incarnations=seen)
        return _found_by_index(found, len(keys))

    def hold(self, keys: Sequence[bytes], namespace: Namespace) -> LookupResult:
        """Hold the keys that the pool has, each independently; tiers are not asked."""
        return self._ask(keys, namespace, ClientLookupOptions(hold=True, prefix=False, tiers=[]))

    def free(self, promise: Promise) -> None:
        """Free a promise that is not wanted. Never waits."""
        link = self.links.look()
        if link is not None:
            link.channel.post(m.FreeLookupLocks(0, promise.numbers))

    def _hold(
        self, keys: Sequence[bytes], there: Sequence[int], namespace: Namespace, options: ClientLookupOptions
    ) -> LookupResult:
        """Hold these if they are still there; tiers are not asked."""
        held = self._ask([keys[at] for at in there], namespace, structs.replace(options, tiers=[], wait_s=0.0))
        if options.hold and options.if_possible and not UNPROMISED.isdisjoint(held.statuses):
            return self.by_index(keys, namespace, structs.replace(options, hold=False))
        return _placed(held, there, len(keys), Status.MISS)

    def _identify(self, keys: Sequence[bytes], namespace: Namespace, prefix: bool) -> list[int]:
        """For each key the incarnation that the index has, 0 for none."""
        seen = list(self._hits.identify(keys, namespace, prefix) or ())
        return seen + [0] * (len(keys) - len(seen))

    def _ask_rest(
        self, keys: Sequence[bytes], rest: Sequence[int], namespace: Namespace, options: ClientLookupOptions
    ) -> LookupResult:
        """Ask the server for the keys at `rest`; the index has the others."""
        answer = self._ask([keys[at] for at in rest], namespace, options)
        return self._with_index(keys, rest, namespace, options.prefix, answer)

    def _with_index(
        self, keys: Sequence[bytes], rest: Sequence[int], namespace: Namespace, prefix: bool, answer: LookupResult
    ) -> LookupResult:
        """The answer for the keys at `rest`, combined with what the index had."""
        count = len(keys)
        if answer.job and count <= BATCH_KEYS_MAX:
            self._remember(answer.job, _Part(keys, rest, namespace, prefix))
        whole = _placed(answer, rest, count, Status.GRANTED)
        return structs.replace(whole, hits=count - len(rest) + answer.hits)

    def start(self, keys: Sequence[bytes], namespace: Namespace, options: ClientLookupOptions) -> LookupHandle:
        """A handle, which has its result already if everything is in the index. At most one frame of keys. Never
        waits."""
        count = len(keys)
        rest: Sequence[int] = range(count)
        asks_for_all = options.hold or options.identify  # the answer must describe all of them at one moment
        found = self._find(keys, namespace, structs.replace(options, hold=False), 0 if asks_for_all else COUNT_HITS)
        so_far = _found_by_index(found or b"", count)
        if options.identify and so_far.hits:
            so_far = structs.replace(so_far, incarnations=self._identify(keys, namespace, options.prefix))
            if count and not options.hold and all(so_far.incarnations):
                rest = ()
        if found is not None and not asks_for_all:
            there = len(found) if options.prefix else found.count(1)
            rest = range(there, count) if options.prefix else [at for at, byte in enumerate(found) if not byte]
        blob = join_keys(keys if len(rest) == count else [keys[at] for at in rest])
        if (
            rest and self._trace is not None and not options.traceparent
        ):  # it may be sent later, when another trace is current
            options = structs.replace(options, traceparent=self._trace())
        handle = LookupHandle(self, _Wanted(keys, rest, namespace, options, blob), so_far)
        if not rest and count:
            handle.found_all()
            return handle
        handle.get_on()
        if not handle.sent:
            self.links.wait_unsent(handle)
        return handle

    def ask_without_waiting(self, link: Link, wanted: _Wanted) -> _Sent:
        """Send a lookup. Raises the channel's errors."""
        link.start_binding(wanted.namespace)
        options = wanted.options
        request = link.traced(request_of(wanted.namespace, wanted.blob, options), options.traceparent)
        undo = PromiseOwner().undo if options.hold else None  # the handle tells with `Pending.tell`
        return _Sent(link, link.channel.start(request, undo, options.wait_s, blocks=False))

    def refused(self, wanted: _Wanted, error: CacheError) -> LookupResult:
        """The answer if the server could not be asked or refused."""
        if wanted.options.hold and wanted.options.if_possible and isinstance(error, DisconnectedError | LimitError):
            return self._without_promise(wanted, self.links.refused(error)[0])
        return self.whole_of(wanted, unserved(len(wanted.rest), *self.links.refused(error)))

    def whole_of(self, wanted: _Wanted, answer: LookupResult) -> LookupResult:
        """The answer for the requested keys, combined with what the index had."""
        if len(wanted.rest) == len(wanted.keys):
            return answer
        return self._with_index(wanted.keys, wanted.rest, wanted.namespace, wanted.options.prefix, answer)

    def _without_promise(self, wanted: _Wanted, otherwise: Status) -> LookupResult:
        """The index's answer alone, without a promise."""
        keys, options = wanted.keys, structs.replace(wanted.options, hold=False)
        found = self._find(keys, wanted.namespace, options) or b""
        statuses = [Status.GRANTED if byte else otherwise for byte in found.ljust(len(keys), b"\0")]
        hits = len(found) if options.prefix else found.count(1)
        return LookupResult(statuses, [Reason.NONE] * len(keys), hits)

    def status_of(self, job: int) -> m.LookupReply:
        """The progress of a lookup. A promise that this question may have made is freed unless its answer is
        returned."""
        answers = Answers()

        def ask(link: Link) -> Reply:
            pending = link.channel.start(m.QueryPrefetchStatus(0, job), answers.owner.undo)
            answers.add(pending)
            return link.channel.wait(pending)

        found = self.whole(expect(self.links.call(ask, patient=True), m.LookupReply))
        answers.owner.taken = True
        return found

    def whole(self, found: m.LookupReply) -> m.LookupReply:
        """The server's answer about a job, combined with the keys that it was not asked for."""
        part = self._parts.get((self.links.current(patient=True).epoch, found.job))
        if part is None:
            return found
        count, rest = len(part.keys), set(part.rest)
        had = [at for at in range(count) if at not in rest]
        options = m.LookupOptions(prefix=part.prefix, tiers=[])
        # Looked up again, as the server does, because they may have been evicted since.
        blob = join_keys([part.keys[at] for at in had])
        request, space = request_of(part.namespace, blob, options), part.namespace
        still = expect(self.links.call_in(space, request), m.LookupReply)
        statuses, reasons = bytearray([Grant.MISS]) * count, bytearray(count)
        _scatter(still, had, statuses, reasons)
        hits = still.hits
        if not part.prefix or still.hits == len(had):
            _scatter(found, part.rest, statuses, reasons)
            hits += found.hits
        return structs.replace(found, statuses=bytes(statuses), reasons=bytes(reasons), hits=hits)

    def _find(
        self, keys: Sequence[bytes], namespace: Namespace, options: ClientLookupOptions, counts: int = COUNT_HITS
    ) -> bytes | None:
        """The index's answer, if it may give one: only the server makes promises and pins, knows policies, and reports
        invalid options."""
        if options.tiers is not None:
            _check_tiers(options.tiers)
        if options.hold or options.window or options.policy or options.pin_s != 0:
            return None
        try:
            if not (options.wait_s >= 0 and options.deadline_s >= 0):
                return None
        except TypeError:  # not numbers: `request_of` raises the error
            return None
        return self._hits.find(keys, namespace, options.prefix, False, counts)

    def _ask(self, keys: Sequence[bytes], namespace: Namespace, options: ClientLookupOptions) -> LookupResult:
        answers = Answers()

        def ask(link: Link) -> LookupResult:
            answers.drop()
            return lookup_pages(link, keys, namespace, options, answers)

        try:
            result = self.links.call(ask)
        except CacheError as error:
            return unserved(len(keys), *self.links.refused(error))
        answers.owner.taken = True
        return result

    def _remember(self, job: int, part: _Part) -> None:
        with contextlib.suppress(CacheError):
            self._parts[self.links.current().epoch, job] = part
            while len(self._parts) > JOBS_REMEMBERED:
                self._parts.popitem(last=False)


def _all_there(count: int) -> LookupResult:
    return LookupResult([_GRANTED] * count, [_NO_REASON] * count, count)


def _found_by_index(found: bytes, count: int) -> LookupResult:
    """`found` has a byte for each key, 1 if it is there; keys behind its end are missing."""
    there = found.count(1)
    if there == count:
        return _all_there(count)
    if there == len(found):  # a prefix, or nothing
        statuses = [_GRANTED] * there + [Status.MISS] * (count - there)
    else:
        statuses = [Status.GRANTED if byte else Status.MISS for byte in found.ljust(count, b"\0")]
    return LookupResult(statuses, [_NO_REASON] * count, there)


def _placed(found: LookupResult, positions: Sequence[int], count: int, others: Status) -> LookupResult:
    """A result for the keys at these positions as one for all `count` keys."""
    if len(positions) == count:
        return found
    statuses, reasons = [others] * count, [Reason.NONE] * count
    for at, status, reason in zip(positions, found.statuses, found.reasons, strict=True):
        statuses[at], reasons[at] = status, reason
    seen = [0] * count if found.incarnations else []
    for at, number in zip(positions, found.incarnations, strict=False):
        seen[at] = number
    return structs.replace(found, statuses=statuses, reasons=reasons, incarnations=seen or ())


def _scatter(found: m.LookupReply, positions: Sequence[int], statuses: bytearray, reasons: bytearray) -> None:
    for at, status in zip(positions, found.statuses, strict=True):
        statuses[at] = status
    for at, reason in zip(positions, found.reasons, strict=False):  # none if nothing missed
        reasons[at] = reason


class _Wanted(NamedTuple):
    """A lookup to be sent, for the keys at `rest`: the index had the others."""

    keys: Sequence[bytes]
    rest: Sequence[int]
    namespace: Namespace
    options: ClientLookupOptions
    blob: bytes


class _Sent(NamedTuple):
    """A lookup that was sent."""

    link: Link
    pending: Pending


class LookupHandle:
    """A pending lookup. `done`, `result` and `cancel` never wait; `result` is None until it is done. `so_far`: what the
    index had at the start; none of it is held."""

    def __init__(self, lookups: ClientLookups, wanted: _Wanted, so_far: LookupResult) -> None:
        self._lookups = lookups
        self._wanted = wanted
        self.so_far = so_far
        self._call: _Sent | None = None
        self._error: CacheError | None = None  # the caller's mistake
        self._again = True  # it may be sent once more, if the server has forgotten the namespace or our session
        self._result: LookupResult | None = None
        self._cancelled = False
        self.sent = False  # whether the server was asked: the first calls of a client are sent once its link is made

    def found_all(self) -> None:
        """Nothing is left to ask for."""
        self._result = self.so_far

    @property
    def done(self) -> bool:
        """Whether `result` is available."""
        return self.answer is not None

    @property
    def keys(self) -> int:
        """How many keys it is about."""
        return len(self._wanted.keys)

    @property
    def result(self) -> LookupResult | None:
        """The result, if it has come. If the server goes away or does not answer in time, it is a miss. The caller owns
        its promise from now on; that of a handle that is dropped unread, or cancelled, is freed."""
        result = self.answer
        self.take()
        return result

    def take(self) -> None:
        """The caller owns the promise of `answer` from now on."""
        call = self._call  # read once, because another thread may cancel
        if self._result is not None and call is not None:  # an answer of the server: other results hold nothing
            call.pending.tell()

    @property
    def answer(self) -> LookupResult | None:
        """Like `result`, but its promise still belongs to the handle."""
        if self._result is None and self._error is None:
            self.get_on()
        if self._error is not None:
            raise self._error
        return self._result

    def wait(self, timeout_s: float) -> LookupResult | None:
        """Wait for the result, at most that long. None: it has not come yet."""
        self.wait_done(timeout_s)
        return self.result

    def wait_done(self, timeout_s: float) -> None:
        """Wait until it is done, at most that long. Its promise still belongs to the handle."""
        links = self._lookups.links
        deadline = links.now() + timeout_s
        while (left := deadline - links.now()) > 0:
            call = self._call
            if call is not None:
                with contextlib.suppress(CacheError):  # `result` reports it
                    call.link.channel.wait_for(call.pending, left)
            if self.answer is not None:
                return
            if self._call is None:
                links.wait(left)

    def cancel(self) -> None:
        """Give the lookup up: the server stops loads that nobody else waits for. Unless the caller has read `result`,
        the promise is freed at once, also one that came with an answer before this."""
        call = self._call
        if self._result is None or (call is not None and call.pending.undoes):
            if call is not None and not call.pending.settled:
                call.link.channel.listen()  # its answer may be here already
            count = len(self._wanted.keys)
            self._result, self._cancelled = LookupResult([Status.MISS] * count, [Reason.NONE] * count, 0), True
            self._cancel_call()

    def _cancel_call(self) -> None:
        """Refuse the answer: if one comes anyway, it is undone."""
        call, self._call = self._call, None
        if call is not None:
            channel, rid = call.link.channel, call.pending.rid
            channel.cancel(call.pending)
            channel.post(m.Cancel(0, rid))

    def get_on(self) -> None:
        """Do everything that can be done without waiting."""
        if self._result is not None or self._error is not None:
            return
        try:
            # Within this step, handles are sent in the order in which they began to wait.
            link = self._lookups.links.step() if self._call is None else None
            if link is not None and self._call is None:  # still None: that step may have sent it
                self._call = self._lookups.ask_without_waiting(link, self._wanted)
                self.sent = True
                if self._cancelled:  # by another thread, before it was sent
                    self._cancel_call()
            if (call := self._call) is not None:
                self._take_answer(call)
        except ForgottenError as error:
            self._call, self.sent = None, False  # the server did nothing: ask once more, over the next link
            if self._again:
                self._again = False
            else:
                self._result = self._lookups.refused(self._wanted, error)
        except UnknownNamespaceError as error:
            if self._again and (call := self._call) is not None:
                call.link.remove_binding(self._wanted.namespace)
                self._again, self._call, self.sent = False, None, False
            else:
                self._error = error
        except CacheError as error:
            self._cancel_call()
            try:
                self._result = self._lookups.refused(self._wanted, error)
            except CacheError as misuse:  # raised to the caller that asks for the result
                self._error = misuse

    def _take_answer(self, call: _Sent) -> None:
        reply = call.link.poll(self._wanted.namespace, call.pending)
        if reply is not None and self._call is call:  # unless another thread has cancelled it
            keys, rest = self._wanted.keys, self._wanted.rest
            rest_keys = keys if len(rest) == len(keys) else [keys[at] for at in rest]
            self._result = self._lookups.whole_of(self._wanted, result_of(reply, rest_keys, time.monotonic()))
