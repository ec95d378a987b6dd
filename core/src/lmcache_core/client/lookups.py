"""Lookups: from the index as far as possible, paged ones that wait, and handles for callers that must not wait."""

from __future__ import annotations

import contextlib
import operator
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from msgspec import structs

from lmcache_core.client.channel import Pending, expect
from lmcache_core.client.hits import COUNT_HITS, Hits
from lmcache_core.client.link import Link
from lmcache_core.client.links import Links
from lmcache_core.client.promises import Promise
from lmcache_core.client.results import LookupResult, Status, grant_statuses, miss_reasons, numbers_of
from lmcache_core.client.tracing import current_traceparent
from lmcache_core.errors import (
    CacheError,
    DisconnectedError,
    ForgottenError,
    LimitError,
    UnknownNamespaceError,
    UsageError,
)
from lmcache_core.kernel.answers import Grant, Reason
from lmcache_core.limits import BATCH_KEYS_MAX, JOBS_REMEMBERED
from lmcache_core.protocol import messages as m
from lmcache_core.protocol.codec import join_keys
from lmcache_core.protocol.messages import Reply
from lmcache_core.tokens.namespace import Namespace

_UNPROMISED = frozenset((Status.UNREACHABLE, Status.QUOTA))  # no server, or one that has no room for us
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
        grant_statuses(found.statuses),
        miss_reasons(found.reasons, count),
        found.hits,
        found.done,
        promise,
        found.job,
        numbers_of(found.incarnations, count) if found.incarnations else (),
    )


class Hearer:
    """The owner-to-be of promises. Answers that came before they were `told` are undone when this is dropped.

    `told` is set in one assignment for all pages, and the code that sets it returns at once. The interpreter checks for
    interrupts where a function begins, a loop jumps back and a call into C ends, so there is no such point between that
    assignment and the caller's own: either the promises are freed, or the caller has them.
    """

    __slots__ = ("told",)

    def __init__(self) -> None:
        self.told = False

    def undo(self, reply: Reply) -> Callable[[int], m.Message] | None:
        """The message that undoes an answer: it frees the promise that the answer made. An answer that only names an
        earlier promise, such as the answer to a query, gives it no time, and needs no undoing."""
        made = isinstance(reply, m.LookupReply) and reply.deadline_s > 0 and not self.told
        promise = reply.promise if made and isinstance(reply, m.LookupReply) else 0
        return (lambda rid: m.FreeLookupLocks(rid, [promise])) if promise else None


class Answers:
    """The answers to the pages of one lookup. Their promises are freed if this is dropped before they were told."""

    def __init__(self) -> None:
        self.hearer = Hearer()
        self._pages: list[Pending] = []  # no hearer may reference these, or they would never be dropped

    def add(self, pending: Pending) -> None:
        """One more page."""
        self._pages.append(pending)

    def drop(self) -> None:
        """Discard the answers so far."""
        self.hearer = Hearer()
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
    make, undo = asking(namespace, join_keys(page), options), answers.hearer.undo if options.hold else None

    def ask() -> Reply:
        pending = link.channel.start(lambda rid: link.traced(make(rid), options.traceparent), undo, options.wait_s)
        answers.add(pending)
        return link.channel.wait(pending)

    return result_of(link.in_namespace(namespace, ask), page, time.monotonic())


def asking(namespace: Namespace, blob: bytes, options: m.LookupOptions) -> Callable[[int], m.LookupRequest]:
    """The request, for a channel to number. Raises `UsageError` for values of the wrong type."""
    sent = m.LookupOptions(
        hold=options.hold,
        prefix=bool(options.prefix),
        wait_s=_seconds("wait_s", options.wait_s),
        tiers=None if options.tiers is None else list(options.tiers),
        window=_whole("window", options.window),
        deadline_s=_seconds("deadline_s", options.deadline_s),
        pin_s=_seconds("pin_s", options.pin_s),
        policy=_text("policy", options.policy),
        warm_up=options.warm_up,
        identify=bool(options.identify),
    )
    return lambda rid: m.LookupRequest(rid, namespace.id, blob, sent)


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

    def __init__(self, links: Links, hits: Hits, *, trace: bool = False) -> None:
        """`trace`: see `Target`."""
        self._links = links
        self._hits = hits
        self._trace = trace
        self._parts: OrderedDict[tuple[int, int], _Part] = OrderedDict()  # by the server's epoch and the job

    def lookup(self, keys: Sequence[bytes], namespace: Namespace, options: ClientLookupOptions) -> LookupResult:
        """Ask the index first, then the server for missing keys that may be elsewhere."""
        if options.hold and options.if_possible:
            held = self._ask(keys, namespace, options)
            if _UNPROMISED.isdisjoint(held.statuses):
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
        seen = list(self._hits.identify(keys, namespace, options.prefix) or ())
        seen += [0] * (len(keys) - len(seen))
        rest = [at for at, number in enumerate(seen) if not number]
        if not rest:
            return structs.replace(_all_there(len(keys)), incarnations=seen)
        found = self._ask_rest(keys, rest, namespace, options)
        for at, number in zip(rest, found.incarnations, strict=False):
            seen[at] = number
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
            seen = list(self._hits.identify(keys, namespace, options.prefix) or ())
            seen += [0] * (len(keys) - len(seen))
            return structs.replace(_found_by_index(bytes(map(bool, seen)), len(keys)), incarnations=seen)
        return _found_by_index(found, len(keys))

    @property
    def unreachable(self) -> bool:
        """Whether no server is reachable, as far as is known."""
        return bool(self._links.why_unreachable)

    def hold(self, keys: Sequence[bytes], namespace: Namespace) -> LookupResult:
        """Hold the keys that the pool has, each independently; tiers are not asked."""
        return self._ask(keys, namespace, ClientLookupOptions(hold=True, prefix=False, tiers=[]))

    def free(self, promise: Promise) -> None:
        """Free a promise that is not wanted. Never waits."""
        link = self._links.look()
        if link is not None:
            link.channel.post(lambda rid: m.FreeLookupLocks(rid, promise.numbers))

    def _hold(
        self, keys: Sequence[bytes], there: Sequence[int], namespace: Namespace, options: ClientLookupOptions
    ) -> LookupResult:
        """Hold these if they are still there; tiers are not asked."""
        held = self._ask([keys[at] for at in there], namespace, structs.replace(options, tiers=[], wait_s=0.0))
        if options.hold and options.if_possible and not _UNPROMISED.isdisjoint(held.statuses):
            return self.by_index(keys, namespace, structs.replace(options, hold=False))
        if len(there) == len(keys):
            return held
        whole = unserved(len(keys), Status.MISS)
        statuses, reasons, seen = list(whole.statuses), list(whole.reasons), [0] * len(keys)
        for number, at in enumerate(there):
            statuses[at], reasons[at] = held.statuses[number], held.reasons[number]
            seen[at] = held.incarnations[number] if held.incarnations else 0
        return structs.replace(held, statuses=statuses, reasons=reasons, incarnations=seen if held.incarnations else ())

    def _ask_rest(
        self, keys: Sequence[bytes], rest: Sequence[int], namespace: Namespace, options: ClientLookupOptions
    ) -> LookupResult:
        """Ask the server for the keys at `rest`; the index has the others."""
        asked = self._ask([keys[at] for at in rest], namespace, options)
        return self._with_index(keys, rest, namespace, options.prefix, asked)

    def _with_index(
        self, keys: Sequence[bytes], rest: Sequence[int], namespace: Namespace, prefix: bool, asked: LookupResult
    ) -> LookupResult:
        """The answer for the keys at `rest`, combined with what the index had."""
        count = len(keys)
        statuses, reasons = [Status.GRANTED] * count, [Reason.NONE] * count
        for at, status, reason in zip(rest, asked.statuses, asked.reasons, strict=True):
            statuses[at], reasons[at] = status, reason
        if asked.job and count <= BATCH_KEYS_MAX:
            self._remember(asked.job, _Part(keys, rest, namespace, prefix))
        hits = count - len(rest) + asked.hits
        return LookupResult(statuses, reasons, hits, asked.done, asked.promise, asked.job, asked.incarnations)

    def start(self, keys: Sequence[bytes], namespace: Namespace, options: ClientLookupOptions) -> LookupHandle:
        """A handle, which has its result already if everything is in the index. At most one frame of keys. Never
        waits."""
        count = len(keys)
        rest: Sequence[int] = range(count)
        asks_for_all = options.hold or options.identify  # the answer must describe all of them at one moment
        found = self._find(keys, namespace, structs.replace(options, hold=False), 0 if asks_for_all else COUNT_HITS)
        so_far = _found_by_index(found or b"", count)
        if options.identify and so_far.hits:
            seen = list(self._hits.identify(keys, namespace, options.prefix) or ())
            so_far = structs.replace(so_far, incarnations=seen + [0] * (count - len(seen)))
            if count and not options.hold and all(so_far.incarnations):
                rest = ()
        if found is not None and not asks_for_all:
            there = len(found) if options.prefix else found.count(1)
            rest = range(there, count) if options.prefix else [at for at, byte in enumerate(found) if not byte]
        blob = join_keys(keys if len(rest) == count else [keys[at] for at in rest])
        if rest and self._trace and not options.traceparent:  # it may be sent later, when another trace is current
            options = structs.replace(options, traceparent=current_traceparent())
        handle = LookupHandle(self, _Asking(keys, rest, namespace, options, blob), so_far)
        if not rest and count:
            handle.found_all()
            return handle
        handle.get_on()
        if not handle.sent:
            self._links.wait_unsent(handle)
        return handle

    def step(self) -> Link | None:
        """See `Links.step`. Within this call, handles are sent in the order in which they began to wait."""
        return self._links.step()

    def ask_without_waiting(self, link: Link, wanted: _Asking) -> _Asked:
        """Send a lookup. Raises the channel's errors."""
        # The server answers in order: the namespace is registered before it gets to the lookup.
        binding = link.start_binding(wanted.namespace)
        options = wanted.options
        make = asking(wanted.namespace, wanted.blob, options)
        undo = Hearer().undo if options.hold else None  # the handle tells with `Pending.tell`

        def lookup(rid: int) -> m.Message:
            return link.traced(make(rid), options.traceparent)

        return _Asked(link, binding, link.channel.start(lookup, undo, options.wait_s, blocks=False))

    def refused(self, wanted: _Asking, error: CacheError) -> LookupResult:
        """The answer if the server could not be asked or refused."""
        if wanted.options.hold and wanted.options.if_possible and isinstance(error, DisconnectedError | LimitError):
            return self._without_promise(wanted, self._links.refused(error)[0])
        return self.whole_of(wanted, unserved(len(wanted.rest), *self._links.refused(error)))

    def whole_of(self, wanted: _Asking, asked: LookupResult) -> LookupResult:
        """The answer for the requested keys, combined with what the index had."""
        if len(wanted.rest) == len(wanted.keys):
            return asked
        return self._with_index(wanted.keys, wanted.rest, wanted.namespace, wanted.options.prefix, asked)

    def _without_promise(self, wanted: _Asking, otherwise: Status) -> LookupResult:
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
            pending = link.channel.start(lambda rid: m.QueryPrefetchStatus(rid, job), answers.hearer.undo)
            answers.add(pending)
            return link.channel.wait(pending)

        found = self.whole(expect(self._links.asked(ask, patient=True), m.LookupReply))
        answers.hearer.told = True
        return found

    def whole(self, found: m.LookupReply) -> m.LookupReply:
        """The server's answer about a job, combined with the keys that it was not asked for."""
        part = self._parts.get((self._links.current(patient=True).epoch, found.job))
        if part is None:
            return found
        count, rest = len(part.keys), set(part.rest)
        had = [at for at in range(count) if at not in rest]
        options = m.LookupOptions(prefix=part.prefix, tiers=[])
        # Looked up again, as the server does, because they may have been evicted since.
        blob = join_keys([part.keys[at] for at in had])
        make, space = asking(part.namespace, blob, options), part.namespace
        still = expect(self._links.asked(lambda link: link.ask(space, make), patient=True), m.LookupReply)
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
        except TypeError:  # not numbers: `asking` raises the error
            return None
        return self._hits.find(keys, namespace, options.prefix, False, counts)

    def _ask(self, keys: Sequence[bytes], namespace: Namespace, options: ClientLookupOptions) -> LookupResult:
        answers = Answers()

        def ask(link: Link) -> LookupResult:
            answers.drop()
            return lookup_pages(link, keys, namespace, options, answers)

        try:
            result = self._links.asked(ask)
        except CacheError as error:
            return unserved(len(keys), *self._links.refused(error))
        answers.hearer.told = True
        return result

    def now(self) -> float:
        """The time on the client's clock."""
        return self._links.now()

    def wait_for_link(self, timeout_s: float) -> None:
        """Wait at most that long until the link that is being made can advance."""
        self._links.wait(timeout_s)

    def _remember(self, job: int, part: _Part) -> None:
        with contextlib.suppress(CacheError):
            self._parts[self._links.current().epoch, job] = part
            while len(self._parts) > JOBS_REMEMBERED:
                self._parts.popitem(last=False)


def _all_there(count: int) -> LookupResult:
    return LookupResult([_GRANTED] * count, [_NO_REASON] * count, count)


def _found_by_index(found: bytes, count: int) -> LookupResult:
    """`found` has a byte for each key, 1 if it is there; keys behind its end are missing."""
    if found.count(1) == count:
        return _all_there(count)
    statuses = [Status.GRANTED if byte else Status.MISS for byte in found.ljust(count, b"\0")]
    return LookupResult(statuses, [Reason.NONE] * count, found.count(1))


def _scatter(found: m.LookupReply, positions: Sequence[int], statuses: bytearray, reasons: bytearray) -> None:
    for at, status in zip(positions, found.statuses, strict=True):
        statuses[at] = status
    for at, reason in zip(positions, found.reasons, strict=False):  # none if nothing missed
        reasons[at] = reason


class _Asking(NamedTuple):
    """A lookup to be sent, for the keys at `rest`: the index had the others."""

    keys: Sequence[bytes]
    rest: Sequence[int]
    namespace: Namespace
    options: ClientLookupOptions
    blob: bytes


class _Asked:
    """A lookup that was sent, and the registration of its namespace that preceded it, until that is answered."""

    def __init__(self, link: Link, binding: Pending | None, pending: Pending) -> None:
        self.link = link
        self.binding = binding
        self.pending = pending


class LookupHandle:
    """A pending lookup. `done`, `result` and `cancel` never wait; `result` is None until it is done. `so_far`: what the
    index had at the start; none of it is held."""

    def __init__(self, lookups: ClientLookups, wanted: _Asking, so_far: LookupResult) -> None:
        self._lookups = lookups
        self._wanted = wanted
        self.so_far = so_far
        self._asked: _Asked | None = None
        self._error: CacheError | None = None  # the caller's mistake
        self._again = True  # it may be sent once more, if the server has forgotten the namespace or our session
        self._result: LookupResult | None = None
        self._cancelled = False

    def found_all(self) -> None:
        """Nothing is left to ask for."""
        self._result = self.so_far

    @property
    def done(self) -> bool:
        """Whether `result` is available."""
        return self._fetch() is not None

    @property
    def result(self) -> LookupResult | None:
        """The result, if it has come. If the server goes away or does not answer in time, it is a miss. The caller owns
        its promise from now on; that of a handle that is dropped unread, or cancelled, is freed."""
        result, asked = self._fetch(), self._asked  # read once, because another thread may cancel
        if result is not None and asked is not None:  # an answer of the server: other results hold nothing
            asked.pending.tell()
        return result

    def _fetch(self) -> LookupResult | None:
        if self._result is None and self._error is None:
            self.get_on()
        if self._error is not None:
            raise self._error
        return self._result

    @property
    def sent(self) -> bool:
        """Whether the server was asked: the first calls of a client are sent once its link is made."""
        return self._asked is not None

    def wait(self, timeout_s: float) -> LookupResult | None:
        """Wait for the result, at most that long. None: it has not come yet."""
        deadline = self._lookups.now() + timeout_s
        while self._fetch() is None and (left := deadline - self._lookups.now()) > 0:
            asked = self._asked
            if asked is None:
                self._lookups.wait_for_link(left)
            else:
                with contextlib.suppress(CacheError):  # `result` reports it
                    asked.link.channel.wait_for(asked.pending, left)
        return self.result

    def cancel(self) -> None:
        """Give the lookup up: the server stops loads that nobody else waits for."""
        if self._result is None:
            count = len(self._wanted.keys)
            self._result, self._cancelled = LookupResult([Status.MISS] * count, [Reason.NONE] * count, 0), True
            self._cancel_call()

    def _cancel_call(self) -> None:
        """Refuse the answer: if one comes anyway, it is undone."""
        asked, self._asked = self._asked, None
        if asked is not None:
            channel, rid = asked.link.channel, asked.pending.rid
            channel.cancel(asked.pending)
            channel.post(lambda own: m.Cancel(own, rid))

    def get_on(self) -> None:
        """Do everything that can be done without waiting."""
        if self._result is not None or self._error is not None:
            return
        try:
            link = self._lookups.step() if self._asked is None else None
            if link is not None and self._asked is None:  # still None: that step may have sent it
                self._asked = self._lookups.ask_without_waiting(link, self._wanted)
                if self._cancelled:  # by another thread, before it was sent
                    self._cancel_call()
            if (asked := self._asked) is not None:
                self._hear(asked)
        except ForgottenError as error:
            self._asked = None  # the server did nothing: ask once more, over the next link
            if self._again:
                self._again = False
            else:
                self._result = self._lookups.refused(self._wanted, error)
        except UnknownNamespaceError as error:
            if self._again and (asked := self._asked) is not None:
                asked.link.remove_binding(self._wanted.namespace)
                self._again, self._asked = False, None
            else:
                self._error = error
        except CacheError as error:
            self._cancel_call()
            try:
                self._result = self._lookups.refused(self._wanted, error)
            except CacheError as misuse:  # raised to the caller that asks for the result
                self._error = misuse

    def _hear(self, asked: _Asked) -> None:
        channel, namespace = asked.link.channel, self._wanted.namespace
        if asked.binding is not None:
            bound = channel.poll(asked.binding)
            if bound is None:
                return
            asked.link.note_bound(namespace.id, namespace.layout, bound)
            asked.binding = None
        reply = channel.poll(asked.pending)
        if reply is not None and self._asked is asked:  # unless another thread has cancelled it
            keys = [self._wanted.keys[at] for at in self._wanted.rest]
            self._result = self._lookups.whole_of(self._wanted, result_of(reply, keys, time.monotonic()))
