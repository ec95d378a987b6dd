"""Lookups: by the index as far as that goes, paged ones that wait, and handles for callers that must not."""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec

from lmcache_core.client.channel import Pending, expect
from lmcache_core.client.hits import Hits
from lmcache_core.client.link import Link
from lmcache_core.client.links import Links
from lmcache_core.client.results import LookupResult, Status, grant_statuses, miss_reasons
from lmcache_core.errors import DisconnectedError, UsageError
from lmcache_core.kernel.answers import Grant, Reason
from lmcache_core.limits import BATCH_KEYS_MAX, CALL_TIMEOUT_S, JOBS_REMEMBERED
from lmcache_core.protocol import messages as m
from lmcache_core.protocol.codec import join_keys
from lmcache_core.protocol.messages import Reply
from lmcache_core.tokens.namespace import Namespace


class LookupOptions(NamedTuple):
    """What a lookup asks for, beside its keys. See `protocol.messages.Lookup`."""

    hold: bool = False
    prefix: bool = True
    wait_s: float = 0.0
    tiers: Sequence[str] | None = None
    window: int = 0
    deadline_s: float = 0.0
    pin_s: float = 0.0
    policy: str = ""
    warm_up: bool = False


def unreachable(count: int) -> LookupResult:
    """What a lookup answers while there is no server."""
    return LookupResult([Status.UNREACHABLE] * count, [Reason.NONE] * count, 0)


def result_of(reply: Reply, count: int) -> LookupResult:
    """The result that a reply carries."""
    found = expect(reply, m.Found)
    return LookupResult(
        grant_statuses(found.statuses),
        miss_reasons(found.reasons, count),
        found.hits,
        found.done,
        (found.promise,) if found.promise else (),
        found.job,
    )


def lookup_pages(link: Link, keys: Sequence[bytes], namespace: Namespace, options: LookupOptions) -> LookupResult:
    """Look up any number of keys, a frame at a time. A prefix ends with its first short page."""
    link.bind(namespace)
    if options.window:
        return _lookup_window(link, keys, namespace, options)
    pages: list[LookupResult] = []
    for first in range(0, len(keys), BATCH_KEYS_MAX):
        page = keys[first : first + BATCH_KEYS_MAX]
        pages.append(_page(link, page, namespace, options))
        if options.prefix and pages[-1].hits < len(page):
            break
    return _joined(pages, len(keys), prefix=options.prefix)


def _lookup_window(link: Link, keys: Sequence[bytes], namespace: Namespace, options: LookupOptions) -> LookupResult:
    """The end that counts is the last one: pages are asked from the last to the first, and each shares so many
    keys with the next that every window is whole in one of them."""
    window, end = options.window, len(keys)
    if not 0 < window <= BATCH_KEYS_MAX:
        raise UsageError(f"a window of {window} keys: give 1 to {BATCH_KEYS_MAX}")
    while True:
        first = max(0, end - BATCH_KEYS_MAX)
        page = _page(link, keys[first:end], namespace, options)
        if first == 0 or page.hits >= window:
            break
        if page.promises:  # of keys in no window
            link.channel.call(lambda rid, held=page.promises: m.FreeLookupLocks(rid, list(held)))  # type: ignore[misc]
        end = first + window - 1
    before, after = first, len(keys) - end
    return LookupResult(
        [Status.MISS] * before + list(page.statuses) + [Status.MISS] * after,
        [Reason.NONE] * before + list(page.reasons) + [Reason.NONE] * after,
        first + page.hits if page.hits else 0,
        page.done,
        page.promises,
        page.job,
    )


def _page(link: Link, page: Sequence[bytes], namespace: Namespace, options: LookupOptions) -> LookupResult:
    reply = link.channel.call(asking(namespace, join_keys(page), options), CALL_TIMEOUT_S + options.wait_s)
    return result_of(reply, len(page))


def asking(namespace: Namespace, blob: bytes, options: LookupOptions) -> Callable[[int], m.Lookup]:
    """The request, for a channel to number."""
    tiers = None if options.tiers is None else list(options.tiers)
    return lambda rid: m.Lookup(rid, namespace.id, blob, **options._replace(tiers=tiers)._asdict())


def _joined(pages: Sequence[LookupResult], count: int, *, prefix: bool) -> LookupResult:
    statuses = [status for page in pages for status in page.statuses]
    reasons = [reason for page in pages for reason in page.reasons]
    hits = 0
    for page in pages:
        hits += page.hits
        if prefix and page.hits < len(page.statuses):
            break
    rest = count - len(statuses)
    held = any(page.promises for page in pages)
    return LookupResult(
        statuses + [Status.MISS] * rest,
        reasons + [Reason.NONE] * rest,
        hits,
        all(page.done for page in pages),
        tuple(promise for page in pages for promise in page.promises or (0,)) if held else (),
        pages[-1].job if pages else 0,
    )


def _check_tiers(tiers: object) -> None:
    if not isinstance(tiers, list | tuple) or not all(isinstance(name, str) for name in tiers):
        raise UsageError(f"tiers is {tiers!r}: give a list of names, or None for all of them")


class _Part(NamedTuple):
    """A lookup of which the server was asked for a part: the keys at `rest`; the index had the others."""

    keys: Sequence[bytes]
    rest: Sequence[int]
    namespace: Namespace
    prefix: bool


class Lookups:
    """Lookups of one client. Thread-safe."""

    def __init__(self, links: Links, hits: Hits) -> None:
        self._links = links
        self._hits = hits
        self._parts: OrderedDict[tuple[int, int], _Part] = OrderedDict()  # by the server's epoch and the job

    def lookup(self, keys: Sequence[bytes], namespace: Namespace, options: LookupOptions) -> LookupResult:
        """The index first; the server is asked for what is not there and may be elsewhere."""
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
        asked = self._ask([keys[at] for at in rest], namespace, options)
        statuses, reasons = [Status.GRANTED] * count, [Reason.NONE] * count
        for at, status, reason in zip(rest, asked.statuses, asked.reasons, strict=True):
            statuses[at], reasons[at] = status, reason
        if asked.job and count <= BATCH_KEYS_MAX:
            self._remember(asked.job, _Part(keys, rest, namespace, options.prefix))
        return LookupResult(statuses, reasons, hits + asked.hits, asked.done, asked.promises, asked.job)

    def start(self, keys: Sequence[bytes], namespace: Namespace, options: LookupOptions) -> LookupHandle:
        """A handle, with its result where all is in the index. One frame of keys at most."""
        count, found = len(keys), self._find(keys, namespace, options)
        if found is not None and found.count(1) == count:
            return LookupHandle(None, None, count, _all_there(count))
        try:
            link = self._links.current()
            link.bind(namespace)
            pending = link.channel.start(asking(namespace, join_keys(keys), options))
        except DisconnectedError:
            return LookupHandle(None, None, count)
        return LookupHandle(link, pending, count)

    def whole(self, found: m.Found) -> m.Found:
        """What the server says of a job, with the keys that it was not asked for."""
        link = self._links.current()
        part = self._parts.get((link.epoch, found.job))
        if part is None:
            return found
        count, rest = len(part.keys), set(part.rest)
        had = [at for at in range(count) if at not in rest]
        options = LookupOptions(prefix=part.prefix, tiers=[])
        # Looked up again, as the server does: they may have been evicted since.
        still = expect(
            link.channel.call(asking(part.namespace, join_keys([part.keys[at] for at in had]), options)), m.Found
        )
        statuses, reasons = bytearray([Grant.MISS]) * count, bytearray(count)
        _scatter(still, had, statuses, reasons)
        hits = still.hits
        if not part.prefix or still.hits == len(had):
            _scatter(found, part.rest, statuses, reasons)
            hits += found.hits
        return msgspec.structs.replace(found, statuses=bytes(statuses), reasons=bytes(reasons), hits=hits)

    def _find(self, keys: Sequence[bytes], namespace: Namespace, options: LookupOptions) -> bytes | None:
        """What the index says, where it may answer: promises and pins are given by the server alone, and it alone
        knows policies, and what makes no sense."""
        if options.tiers is not None:
            _check_tiers(options.tiers)
        if options.hold or options.window or options.policy or options.pin_s != 0:
            return None
        if not (options.wait_s >= 0 and options.deadline_s >= 0):
            return None
        return self._hits.find(keys, namespace, options.prefix)

    def _ask(self, keys: Sequence[bytes], namespace: Namespace, options: LookupOptions) -> LookupResult:
        try:
            return lookup_pages(self._links.current(), keys, namespace, options)
        except DisconnectedError:
            return unreachable(len(keys))

    def _remember(self, job: int, part: _Part) -> None:
        with contextlib.suppress(DisconnectedError):
            self._parts[self._links.current().epoch, job] = part
            while len(self._parts) > JOBS_REMEMBERED:
                self._parts.popitem(last=False)


def _all_there(count: int) -> LookupResult:
    return LookupResult([Status.GRANTED] * count, [Reason.NONE] * count, count)


def _scatter(found: m.Found, positions: Sequence[int], statuses: bytearray, reasons: bytearray) -> None:
    for at, status in zip(positions, found.statuses, strict=True):
        statuses[at] = status
    for at, reason in zip(positions, found.reasons, strict=False):  # none where nothing missed
        reasons[at] = reason


class LookupHandle:
    """A lookup under way. `done` and `result` never wait; `result` is None until it is done."""

    def __init__(
        self, link: Link | None, pending: Pending | None, count: int, result: LookupResult | None = None
    ) -> None:
        self._link = link
        self._pending = pending
        self._count = count
        self._result = unreachable(count) if link is None and result is None else result

    @property
    def done(self) -> bool:
        """Whether `result` has it."""
        return self.result is not None

    @property
    def result(self) -> LookupResult | None:
        """The result, if it has come. A server that went away makes it a miss."""
        if self._result is None:
            assert self._link is not None
            assert self._pending is not None
            try:
                reply = self._link.channel.poll(self._pending)
                if reply is not None:
                    self._result = result_of(reply, self._count)
            except DisconnectedError:
                self._result = unreachable(self._count)
        return self._result

    def wait(self, timeout_s: float) -> LookupResult:
        """Wait for the result. A server that is silent for that long is treated as gone."""
        if self._result is None:
            assert self._link is not None
            assert self._pending is not None
            try:
                self._result = result_of(self._link.channel.wait(self._pending, timeout_s), self._count)
            except DisconnectedError:
                self._result = unreachable(self._count)
        return self._result

    def cancel(self) -> None:
        """It is not wanted any more: the server stops what nobody else waits for."""
        if self._result is None:
            assert self._link is not None
            assert self._pending is not None
            rid = self._pending.rid
            self._link.channel.abandon(self._pending)
            self._result = LookupResult([Status.MISS] * self._count, [Reason.NONE] * self._count, 0)
            with contextlib.suppress(DisconnectedError):  # with the server gone, nothing is left to stop
                self._link.channel.call(lambda own: m.Cancel(own, rid))
