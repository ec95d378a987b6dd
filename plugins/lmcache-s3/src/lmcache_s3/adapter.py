"""The S3 tier: one object in the bucket for each object."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from functools import partial
from typing import ClassVar

from lmcache_core.plugins.components import Finding
from lmcache_core.tiers.blocking import BlockingAdapter
from lmcache_core.tiers.contract import (
    AdapterContext,
    Capabilities,
    LoadItem,
    Outcome,
    Result,
    ScanEntry,
    ScanPage,
    StoreItem,
)
from lmcache_s3.client import S3Client
from lmcache_s3.errors import Answer, Errors, LinkError, skew_s
from lmcache_s3.kind import kind_of
from lmcache_s3.listing import next_page
from lmcache_s3.names import Names
from lmcache_s3.settings import S3Settings
from lmcache_s3.transport.payloads import KIND_HEADER, Condition, Span
from lmcache_s3.transport.ranges import join_ranges, plan_ranges, views_of

_LIST_PAGE = 1000  # S3's own limit
_DONE = Outcome(Result.DONE)
_log = logging.getLogger(__name__)
VERSIONED = "keeps former versions: what is deleted or replaced still takes its room"
VERSIONED_CURE = "add a lifecycle rule that expires noncurrent versions and delete markers, or suspend versioning"
_SKEW_S_MAX = 60.0  # S3 refuses signatures from 900 s on; a clock that is a minute off will get there
_REFUSES_CONDITIONS = ("NotImplemented", "InvalidArgument", "InvalidRequest", "UnsupportedHeader")


class S3Adapter(BlockingAdapter):
    """Objects under `settings.prefix` in `settings.bucket`. Thread-safe; servers on many nodes may share a bucket.

    A PUT makes an object visible as a whole or not at all. An existing object of the same key and layout is not
    uploaded again (`skip_existing`): its payload may differ in the last bits of floats that two nodes computed, and
    either is valid. Anything else of that name is replaced.
    """

    # One call fills every connection; the server's own limit bounds the bytes.
    capabilities: ClassVar[Capabilities] = Capabilities(
        durable=True,
        shared=True,
        batch_bytes_max=256 << 20,
        object_bytes_max=5 << 30,  # of one PUT
    )
    errors = (LinkError,)
    parallel = True

    def __init__(self, settings: S3Settings, context: AdapterContext) -> None:
        self._settings = settings
        self._names = Names(settings.prefix)
        self._errors = Errors(context.tier, settings.bucket)
        self.client = S3Client(settings, context.connections, context.tier)
        self._conditions = True  # whether the service knows If-None-Match
        self._ranges = True  # whether the service knows Range
        self.versioned = False  # whether deletes leave former versions behind
        super().__init__(context, self.client)

    # --- contract -----------------------------------------------------------------------------------------
    def load(self, items: Sequence[LoadItem], deadline: float) -> Sequence[Outcome]:
        ways = max(1, self._context.connections // max(1, len(items))) if self._ranges else 1
        return self.each("load", partial(self._load_ways, ways), items, deadline)

    def load_headers(self, items: Sequence[LoadItem], deadline: float) -> Sequence[Outcome]:
        """One small range of each. Of a service without ranges the rest of the object is not read."""
        return self.each("load", self._load_header, items, deadline)

    def delete(self, keys: Sequence[bytes], deadline: float) -> Sequence[Outcome]:
        names = [self._names.of(key) for key in keys]

        def remove() -> list[Outcome]:
            failed = self.client.delete(names, deadline)
            return [self._errors.outcome("delete", failed[name]) if name in failed else _DONE for name in names]

        return self.together("delete", len(names), remove)

    def set_aside(self, keys: Sequence[bytes], deadline: float, versions: Sequence[str] = ()) -> Sequence[Outcome]:
        """Deletes the objects, unless they have another ETag by now."""
        if not versions:
            return self.delete(keys, deadline)
        return self.each("delete", self._set_aside_one, list(zip(keys, versions, strict=True)), deadline)

    def scan(self, cursor: str | None, deadline: float) -> ScanPage:
        page = self.whole(
            "scan",
            lambda: next_page(
                lambda place: self.client.list(self._names.prefix, place, _LIST_PAGE, deadline),
                cursor,
                self._tier,
                ordered=not self._settings.is_directory_bucket,
            ),
        )
        if not page.answer.ok:
            raise self._errors.refused("scan", page.answer)
        found = [(self._names.key(one.name), one) for one in page.found]
        entries = [ScanEntry(key, one.nbytes, one.modified_at_s) for key, one in found if key is not None]
        return ScanPage(entries, page.cursor)

    def medium(self) -> str:
        settings = self._settings
        place = f"bucket {settings.bucket} with prefix {settings.prefix!r}"
        return place if settings.endpoint_url is None else f"{place} at {settings.endpoint_url.rstrip('/')}"

    def check(self, deadline: float) -> Iterator[Finding]:
        yield from super().check(deadline)
        yield Finding(True, "", f"payloads move by the {self.client.transport} transport")
        answer = self.whole("look up", lambda: self.client.head(self._names.of(b"lmcache-check"), deadline))
        skew = skew_s(answer.headers)
        if skew is not None:
            cure = "" if abs(skew) <= _SKEW_S_MAX else "correct this machine's clock (chrony, systemd-timesyncd)"
            yield Finding(not cure, "", f"the clocks differ by {skew:+.0f} s", cure)
        if self.versioned:
            yield Finding(False, "", f"the bucket {VERSIONED}", VERSIONED_CURE)

    def refused(self, what: str, error: Exception) -> Outcome:
        assert isinstance(error, LinkError)
        return Outcome.of(self._errors.unanswered(what, error))

    # --- one object ---------------------------------------------------------------------------------------
    def store_one(self, item: StoreItem, deadline: float) -> Outcome:
        name, nbytes, kind = self._names.of(item.key), item.nbytes, kind_of(item.buffers)
        ask = self._settings.skip_existing and bool(kind) and not item.replaces
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
        if not answer.names_object:
            return self._errors.outcome("store", answer)
        if not self.versioned and answer.headers.get("x-amz-version-id", "null") != "null":
            self.versioned = True
            bucket = self._settings.bucket
            _log.warning("tier %r: bucket %r %s: %s", self._tier, bucket, VERSIONED, VERSIONED_CURE)
        return Outcome(Result.DONE, nbytes)

    def load_one(self, item: LoadItem, deadline: float) -> Outcome:
        return self._load_ways(1, item, deadline)

    def exists_one(self, key: bytes, deadline: float) -> bool:
        answer = self.client.head(self._names.of(key), deadline)
        if not answer.names_object and not answer.absent:
            raise self._errors.refused("look up", answer)
        return answer.ok

    def _load_ways(self, ways: int, item: LoadItem, deadline: float) -> Outcome:
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

    def _load_header(self, item: LoadItem, deadline: float) -> Outcome:
        name, page = self._names.of(item.key), item.buffers[:1]
        wanted = sum(view.nbytes for view in page)
        answer = self.client.get(name, page, Span(0, wanted) if self._ranges and wanted else None, deadline)
        if answer.status == 416:  # it has no byte
            return Outcome(Result.DONE, 0)
        if answer.status == 200 and answer.nbytes > wanted:
            self._ranges = False  # the service sends whole objects, whatever is requested
            return self.load_one(item, deadline)
        return self._loaded(name, answer, wanted)

    def _set_aside_one(self, one: tuple[bytes, str], deadline: float) -> Outcome:
        key, version = one
        there = self.client.head(self._names.of(key), deadline)
        if there.absent or (there.ok and there.headers.get("etag", "") != version):
            return _DONE  # gone, or somebody has replaced it
        if not there.ok:
            return self._errors.outcome("delete", there)
        return self.delete([key], deadline)[0]

    def _loaded(self, name: str, answer: Answer, room: int) -> Outcome:
        if answer.ok:
            version = answer.headers.get("etag", "")
            if answer.nbytes > room:
                error = f"object {name} is larger than the {room:,} bytes that it should have at most"
                return Outcome(Result.DAMAGED, error=error, version=version)
            return Outcome(Result.DONE, answer.nbytes, version=version)
        return Outcome(Result.MISS) if answer.absent else self._errors.outcome("load", answer)


def _holds(answer: Answer, kind: str) -> bool:
    return answer.ok and answer.headers.get(KIND_HEADER) == kind
