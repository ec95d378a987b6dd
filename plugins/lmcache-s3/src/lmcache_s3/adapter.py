"""The S3 tier: one object in the bucket for each object."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial
from typing import ClassVar

from lmcache_core.errors import TierError
from lmcache_core.tiers.contract import (
    AdapterContext,
    Capabilities,
    L2Adapter,
    LoadItem,
    Outcome,
    Result,
    ScanEntry,
    ScanPage,
    StoreItem,
    Usage,
)
from lmcache_s3.client import S3Client
from lmcache_s3.errors import Answer, Errors, LinkError
from lmcache_s3.kind import kind_of
from lmcache_s3.listing import next_page
from lmcache_s3.names import Names
from lmcache_s3.settings import S3Settings
from lmcache_s3.transport.payloads import KIND_HEADER, Condition, Span
from lmcache_s3.transport.ranges import join_ranges, plan_ranges, views_of

_LIST_PAGE = 1000  # S3's own limit, of a list and of a batch delete
_OBJECT_BYTES_MAX = 5 << 30  # of one PUT
_UNSOUND_NAMES_MAX = 4096  # some hundred bytes each
_DONE = Outcome(Result.DONE)
_REFUSES_CONDITIONS = ("NotImplemented", "InvalidArgument", "InvalidRequest", "UnsupportedHeader")


class S3Adapter(L2Adapter):
    """Objects under `settings.prefix` in `settings.bucket`. Thread-safe; servers on many nodes may share a bucket.

    A PUT makes an object visible as a whole or not at all. An existing object of the same key and layout is not
    uploaded again (`skip_existing`): its payload may differ in the last bits of floats that two nodes computed, and
    either is valid. Anything else of that name is replaced.
    """

    # One call fills every connection; the server's own limit bounds the bytes.
    capabilities: ClassVar[Capabilities] = Capabilities(
        durable=True, shared=True, batch_bytes_max=256 << 20, object_bytes_max=_OBJECT_BYTES_MAX
    )

    def __init__(self, settings: S3Settings, context: AdapterContext) -> None:
        self._settings = settings
        self._context = context
        self._names = Names(settings.prefix)
        self._errors = Errors(context.tier, settings.bucket)
        self.client = S3Client(settings, context.connections, context.tier)
        self._conditions = True  # whether the service knows If-None-Match
        self._ranges = True  # whether the service knows Range
        # Names of damaged objects that could not be deleted: to be replaced.
        self._unsound: OrderedDict[str, None] = OrderedDict()
        self._closed = False

    # --- contract -----------------------------------------------------------------------------------------
    def store(self, items: Sequence[StoreItem], deadline: float) -> Sequence[Outcome]:
        self._check_open()
        return self._each("store", [partial(self._store_one, item, deadline) for item in items])

    def exists(self, keys: Sequence[bytes], deadline: float) -> Sequence[bool]:
        self._check_open()
        try:
            answers = self._context.parallel([partial(self._head, key, deadline) for key in keys])
        except LinkError as error:
            raise TierError(self._errors.unanswered("look up", error), retryable=error.retryable) from error
        for answer in answers:
            self._check_answer("look up", answer)
        return [answer.ok for answer in answers]

    def load(self, items: Sequence[LoadItem], deadline: float) -> Sequence[Outcome]:
        self._check_open()
        ways = max(1, self._context.connections // max(1, len(items))) if self._ranges else 1
        return self._each("load", [partial(self._load_one, item, ways, deadline) for item in items])

    def delete(self, keys: Sequence[bytes], deadline: float) -> Sequence[Outcome]:
        self._check_open()
        outcomes: list[Outcome] = []
        for start in range(0, len(keys), _LIST_PAGE):
            names = [self._names.of(key) for key in keys[start : start + _LIST_PAGE]]
            try:
                failed = self.client.delete(names, deadline)
            except LinkError as error:
                outcomes += [self._errors.failure("delete", error)] * len(names)
                continue
            outcomes += [self._errors.outcome("delete", failed[name]) if name in failed else _DONE for name in names]
        return outcomes

    def set_aside(self, keys: Sequence[bytes], deadline: float) -> Sequence[Outcome]:
        """Deletes the object. If that is forbidden, the next store of the key replaces it instead of skipping the
        upload."""
        names = [self._names.of(key) for key in keys]
        self._unsound.update(dict.fromkeys(names))
        outcomes = self.delete(keys, deadline)
        for name, outcome in zip(names, outcomes, strict=True):
            if outcome.result is Result.DONE:
                self._unsound.pop(name, None)
        while len(self._unsound) > _UNSOUND_NAMES_MAX:
            self._unsound.popitem(last=False)
        return outcomes

    def usage(self) -> Usage:
        """Unknown: it would need a listing of the bucket. `scan` does that once, and accounting continues from
        there."""
        self._check_open()
        return Usage(None, None)

    def scan(self, cursor: str | None, deadline: float) -> ScanPage:
        self._check_open()
        try:
            page = next_page(
                lambda place: self.client.list(self._names.prefix, place, _LIST_PAGE, deadline),
                cursor,
                self._context.tier,
                ordered=not self._settings.is_directory_bucket,
            )
        except LinkError as error:
            raise TierError(self._errors.unanswered("scan", error), retryable=error.retryable) from error
        if not page.answer.ok:
            raise self._tier_error("scan", page.answer)
        found = [(self._names.key(one.name), one) for one in page.found]
        entries = [ScanEntry(key, one.nbytes, one.modified_at_s) for key, one in found if key is not None]
        return ScanPage(entries, page.cursor)

    def medium(self) -> str:
        settings = self._settings
        place = f"bucket {settings.bucket} with prefix {settings.prefix!r}"
        return place if settings.endpoint_url is None else f"{place} at {settings.endpoint_url.rstrip('/')}"

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self.client.close()

    # --- one object ---------------------------------------------------------------------------------------
    def _store_one(self, item: StoreItem, deadline: float) -> Outcome:
        name, nbytes, kind = self._names.of(item.key), item.nbytes, kind_of(item.buffers)
        if nbytes > _OBJECT_BYTES_MAX:
            return Outcome(
                Result.FAILED, error=f"{nbytes:,} bytes are more than one upload takes: store smaller chunks"
            )
        ask = self._settings.skip_existing and bool(kind) and name not in self._unsound
        occupied = False
        if ask and nbytes >= self._settings.ask_first_bytes:
            there = self.client.head(name, deadline)
            if _holds(there, kind):
                return Outcome(Result.DONE, nbytes)
            occupied = there.ok
        condition = Condition(kind, if_absent=ask and not occupied and self._conditions)
        answer = self.client.put(name, item.buffers, condition, deadline)
        if condition.if_absent and not answer.ok:
            if answer.status in (409, 412):  # another writer was first, just now or long ago
                if _holds(self.client.head(name, deadline), kind):
                    return Outcome(Result.DONE, nbytes)
                answer = self.client.put(name, item.buffers, Condition(kind), deadline)
            elif answer.status == 501 or (answer.status == 400 and answer.code in _REFUSES_CONDITIONS):
                answer = self.client.put(name, item.buffers, Condition(kind), deadline)
                # Only now do we know that the service refused the condition.
                self._conditions = self._conditions and not answer.ok
        if not answer.ok:
            return self._errors.outcome("store", answer)
        self._unsound.pop(name, None)
        return Outcome(Result.DONE, nbytes)

    def _load_one(self, item: LoadItem, ways: int, deadline: float) -> Outcome:
        room = sum(view.nbytes for view in item.buffers)
        name = self._names.of(item.key)
        spans = plan_ranges(room, ways, self._settings.range_bytes)
        if len(spans) > 1:
            joined = self._load_ranges(name, item.buffers, spans, deadline)
            if joined is not None:
                return self._loaded(name, joined, room)
        return self._loaded(name, self.client.get(name, item.buffers, None, deadline), room)

    def _load_ranges(
        self, name: str, buffers: Sequence[memoryview], spans: Sequence[Span], deadline: float
    ) -> Answer | None:
        calls = [partial(self.client.get, name, views_of(buffers, span), span, deadline) for span in spans]
        answers = self._context.parallel(calls)
        if answers[0].status == 200:
            self._ranges = False  # the service sends whole objects, whatever is requested
            return None
        return join_ranges(spans, answers)

    def _loaded(self, name: str, answer: Answer, room: int) -> Outcome:
        if answer.ok:
            if answer.nbytes > room:
                error = f"object {name} is larger than the {room:,} bytes that it should have at most"
                return Outcome(Result.DAMAGED, error=error)
            return Outcome(Result.DONE, answer.nbytes)
        return Outcome(Result.MISS) if answer.absent else self._errors.outcome("load", answer)

    def _head(self, key: bytes, deadline: float) -> Answer:
        return self.client.head(self._names.of(key), deadline)

    # --- all of them --------------------------------------------------------------------------------------
    def _each(self, what: str, calls: Sequence[Callable[[], Outcome]]) -> list[Outcome]:
        def one(call: Callable[[], Outcome]) -> Outcome:
            try:
                return call()
            except LinkError as error:
                return self._errors.failure(what, error)

        return self._context.parallel([partial(one, call) for call in calls])

    def _check_open(self) -> None:
        if self._closed:
            raise TierError(f"tier {self._context.tier!r} is closed", retryable=False)

    def _check_answer(self, what: str, answer: Answer) -> None:
        if not answer.ok and not answer.absent:
            raise self._tier_error(what, answer)

    def _tier_error(self, what: str, answer: Answer) -> TierError:
        outcome = self._errors.outcome(what, answer)
        return TierError(outcome.error, retryable=outcome.retryable or outcome.result is Result.THROTTLED)


def _holds(answer: Answer, kind: str) -> bool:
    return answer.ok and answer.headers.get(KIND_HEADER) == kind
