"""`Client.register_pages`: objects between an engine's own memory and the pool, whole batches over all groups."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

from lmcache_core.buffers import address_of, check_reachable, held, may_vanish
from lmcache_core.client.find.hits import Hits, verify_level
from lmcache_core.client.link.reconnecting import Links
from lmcache_core.client.move import pages_plain
from lmcache_core.client.move.page_jobs import Ground, GroupKeys, PagesCall, PagesResult, RetrieveJob, StoreJob
from lmcache_core.client.move.regions import GroupPages, PageGroup, RegionTables
from lmcache_core.client.promises import Promise
from lmcache_core.client.tracing import check_traceparent
from lmcache_core.errors import LimitError, UsageError
from lmcache_core.limits import OPERATION_KEYS_MAX
from lmcache_core.native import native
from lmcache_core.tensors import dense_memory, is_tensor
from lmcache_core.tokens.namespace import Namespace


class PageEntry(NamedTuple):
    """Keys of one group, and their pages. A plain tuple works, too.

    `page_ids`: a buffer of int64 (numpy, array("q"), a torch tensor on the CPU) or a list, `pages_per_object` ids for
    each key in order. `skip_pages`: this many pages at the front of the first object are not written to. `valid_pages`:
    the total number of pages, if the last objects are not full; `page_ids` then has that many ids, or one for each page
    of the keys, of which the ones after them are ignored. `traceparent`: the trace that a store of these belongs to, if
    it differs from the whole call's.
    """

    group: int
    keys: Sequence[bytes]
    page_ids: Any
    skip_pages: int = 0
    valid_pages: int | None = None
    traceparent: str = ""


class Pages:
    """Memory registered with `Client.register_pages`, as long as this object lives. Thread-safe, unless two concurrent
    jobs write to the same page.

    In the pool, an object consists of `pages_per_object` pages of `page_bytes` for each region of its group in order,
    without gaps. A page that cannot be read (the null page, or one after `valid_pages`) is stored as zeros.
    """

    def __init__(self, ground: Ground, verify: int) -> None:
        self._ground = ground
        self._tables = ground.engine.PageTables(ground.tables.words(), *_device_words(ground.tables))
        self._verify = verify

    def level(self, verify: str | None) -> int:
        """The number of a level of verification; None: of this client's default. Raises `UsageError`."""
        return self._verify if verify is None else verify_level(verify)

    @classmethod
    def of(cls, links: Links, hits: Hits, groups: Sequence[PageGroup], threads: int, verify: int) -> Pages:
        """In this process's own memory."""
        return cls(Ground(links, hits, threads, RegionTables.of(groups), page_engine()), verify)

    @property
    def groups(self) -> tuple[PageGroup, ...]:
        """The groups as registered."""
        return self._ground.tables.groups

    @property
    def tables(self) -> RegionTables:
        """Where the groups' pages are."""
        return self._ground.tables

    @property
    def first_regions(self) -> list[int]:
        """The number of each group's first region: `done_region` numbers regions through all groups."""
        return self._ground.tables.first_regions

    def store_start(
        self,
        entries: Sequence[PageEntry | tuple[Any, ...]],
        *,
        deadline_s: float | None = None,
        traceparent: str = "",
        stream: int | None = None,
    ) -> StoreJob:
        """Store one object for each key. When this returns, all pages have been read and may change; the job says what
        became of the commits. Of pages on a GPU it returns before they are read: they may change once the job's
        `has_read` says so, and somebody has to look at the job now and then. `skip_pages` has no meaning here.

        `deadline_s`: how long the server may take to give room; what it has not given by then is `UNREACHABLE`.
        `traceparent`: the trace that this belongs to; see `Client.connect`. `stream`: of pages on a GPU, the handle of
        the CUDA stream by which they are written: they are read behind what it has been given so far. None: torch's
        current stream, or without torch the default one. Raises `UsageError` before anything is touched, and
        `StaleRegionError` where the memory was given back since it was registered.
        """
        trace = check_traceparent(traceparent)
        return StoreJob(self._ground, self.checked(entries, deadline_s, stream, writes=False, traceparent=trace))

    def store(
        self,
        entries: Sequence[PageEntry | tuple[Any, ...]],
        *,
        deadline_s: float | None = None,
        traceparent: str = "",
        stream: int | None = None,
    ) -> PagesResult:
        """The same, and waits for the result."""
        return _result_of(self.store_start(entries, deadline_s=deadline_s, traceparent=traceparent, stream=stream))

    def retrieve_start(
        self,
        entries: Sequence[PageEntry | tuple[Any, ...]],
        *,
        promises: Sequence[Promise | None] = (),
        order: Literal["region", "object"] = "region",
        deadline_s: float | None = None,
        verify: str | None = None,
        stream: int | None = None,
    ) -> RetrieveJob:
        """Begin to copy objects into pages, and return while threads of the extension copy. Every key is independent.

        What the index has is read without a call; the server is asked for the rest, without waiting for its answer. So
        somebody has to look at the job now and then, by `done`, `done_region` or a wait. `promises`: for each entry
        that of a lookup of its keys, or a slice of it, whichever session it was made to; it is redeemed for the keys of
        the entry that are read, and keeps the others. `order`: "region" has the
        first region of all objects ready first, as layers are computed; "object" one object after another.
        `deadline_s`: what is not there by then is a miss with the reason `LATE`, as soon as somebody looks. `verify`:
        as for `Client.retrieve`; objects that are checked are not done before all of their regions are. `stream`: as
        for `store_start`: pages are written behind what it has been given so far.

        Raises `UsageError` before anything is touched: page ids that are not there, or twice, or lie over one another;
        memory that is read-only; `StaleRegionError` where it was given back; `LimitError` for too many jobs under way.
        """
        return self._retrieve(entries, promises, order, deadline_s, verify, stream, waits=False)

    def retrieve(
        self,
        entries: Sequence[PageEntry | tuple[Any, ...]],
        *,
        promises: Sequence[Promise | None] = (),
        order: Literal["region", "object"] = "object",
        deadline_s: float | None = None,
        verify: str | None = None,
        stream: int | None = None,
    ) -> PagesResult:
        """The same, and waits for the result."""
        return _result_of(self._retrieve(entries, promises, order, deadline_s, verify, stream, waits=True))

    def _retrieve(
        self,
        entries: Sequence[PageEntry | tuple[Any, ...]],
        promises: Sequence[Promise | None],
        order: str,
        deadline_s: float | None,
        verify: str | None,
        stream: int | None,
        *,
        waits: bool,
    ) -> RetrieveJob:
        if order not in ("region", "object"):
            raise UsageError(f'order is {order!r}: use "region" or "object"')
        call = self.checked(entries, deadline_s, stream, writes=True)
        held, count = list(promises) or [None] * len(call.entries), len(call.entries)
        if len(held) != count or not all(each is None or isinstance(each, Promise) for each in held):
            raise UsageError(f"promises are given by entry: {count} of them, a `Promise` or None each")
        return RetrieveJob(self._ground, call, held, order == "region", self.level(verify), waits)

    def checked(
        self,
        entries: Sequence[PageEntry | tuple[Any, ...]],
        deadline_s: float | None,
        stream: int | None,
        *,
        writes: bool,
        traceparent: str = "",
    ) -> PagesCall:
        """The entries, checked, and what the engine made of their pages."""
        given: list[GroupKeys] = []
        rows = []
        for number, each in enumerate(entries):
            entry = _entry_of(number, each)
            group = self._group(number, entry.group, writes)
            keys = _keys_of(number, entry.keys)
            all_pages = len(keys) * group.pages_per_object
            if not writes and entry.skip_pages:
                raise UsageError(f"entry {number}: skip_pages is {entry.skip_pages}: a store reads all valid pages")
            valid = all_pages if entry.valid_pages is None else entry.valid_pages
            ids = _ids_of(number, entry.page_ids)
            rows.append((entry.group, len(keys), ids, entry.skip_pages, valid))
            trace = check_traceparent(entry.traceparent) or traceparent
            given.append(GroupKeys(group.namespace, keys, trace, GroupPages(entry.group, ids)))
        # Now: making the entries may have run anything.
        self._ground.tables.check_there([each.pages for each in given], writes=writes)
        try:
            batch = self._ground.engine.PageBatch(self._tables, tuple(rows), writes)
        except (ValueError, OverflowError, TypeError) as error:
            raise UsageError(str(error)) from error
        device = self._ground.tables.device
        return PagesCall(batch, given, deadline_s, None if device is None else device.record(stream))

    def _group(self, number: int, at: int, writes: bool) -> PageGroup:
        groups = self.groups
        if type(at) is not int or not 0 <= at < len(groups):
            raise UsageError(f"entry {number}: no group {at!r}; {len(groups)} are registered")
        if writes:
            for region, place in enumerate(self._ground.tables.places[at]):
                if place.readonly:
                    raise UsageError(
                        f"entry {number}: region {region} of group {at} is read-only: retrieve needs writable memory"
                    )
        return groups[at]


class _UnsearchedHits(Hits):
    """Nothing is searched in the index, so every object is read under a lease."""

    def find(
        self, keys: Sequence[bytes], namespace: Namespace, prefix: bool, mark: bool = False, counts: int = 0
    ) -> bytes | None:
        del keys, namespace, prefix, mark, counts
        return None


def page_engine() -> Any:
    """What copies pages within this process: the extension, or the same in Python."""
    return pages_plain if native is None else native


def pages_by(links: Links, tables: RegionTables, engine: Any) -> Pages:
    """Pages in memory that is not this process's own (`RegionTables.of(memory=…)`), copied by the caller's `engine`: it
    has `PageTables`, `PageBatch` and `PageJob` like those of `page_engine`. Objects are read under leases, as the index
    can tell only the extension that one has changed while it was copied."""
    return Pages(Ground(links, _UnsearchedHits(links, 1), 1, tables, engine), 0)


def _device_words(tables: RegionTables) -> list[array[int]]:
    if tables.device is None:
        return []
    if native is None:
        raise UsageError(
            "pages of a GPU are copied by the C extension, which is not in use: lmcache-core check says why"
        )
    return [tables.device.words, tables.allocations]


def _entry_of(number: int, given: PageEntry | tuple[Any, ...]) -> PageEntry:
    try:
        return given if isinstance(given, PageEntry) else PageEntry(*given)
    except TypeError as error:
        raise UsageError(f"entry {number} is {given!r}: give (group, keys, page_ids, …)") from error


def _keys_of(number: int, keys: Sequence[bytes]) -> list[bytes]:
    if isinstance(keys, bytes | bytearray | memoryview | str):
        raise UsageError(f"entry {number}: keys is one {type(keys).__name__} object: give a sequence of keys")
    if len(keys) > OPERATION_KEYS_MAX:
        raise LimitError(f"entry {number}: {len(keys):,} keys in one call, and the limit is {OPERATION_KEYS_MAX:,}")
    return list(keys)


def _ids_of(number: int, given: Any) -> bytes | array[int]:
    """The ids as int64: our own copy, whatever becomes of what was given."""
    if is_tensor(given):
        address, _, ids, _ = dense_memory(given, f"entry {number}: page_ids")
        if str(ids.dtype) != "torch.int64" or not ids.is_cpu:
            raise UsageError(
                f"entry {number}: page_ids is a tensor of {ids.dtype} on {ids.device}: give int64 on the CPU"
            )
        if not ids.nbytes:
            return b""
        check_reachable(f"entry {number}: page_ids", address, ids.nbytes)
        return ctypes.string_at(address, ids.nbytes)
    try:
        view = memoryview(given)
    except TypeError:
        try:
            return array("q", given)
        except (TypeError, OverflowError) as error:
            raise UsageError(f"entry {number}: page_ids must be whole numbers: {error}") from error
    except (ValueError, BufferError) as error:
        raise UsageError(f"entry {number}: page_ids has no buffer ({error}): give int64") from error
    if view.itemsize != 8 or view.format not in ("q", "l") or not view.c_contiguous:
        raise UsageError(f"entry {number}: page_ids has items of format {view.format!r}: give int64, without gaps")
    owner = held(view)
    if view.nbytes and may_vanish(owner):
        check_reachable(f"entry {number}: page_ids", address_of(view), view.nbytes)
    return view.tobytes()


def _result_of(job: RetrieveJob | StoreJob) -> PagesResult:
    try:
        job.wait()
    except BaseException:  # interrupted: nobody gets the job, so nobody may write for it
        job.cancel()
        raise
    result = job.result
    assert result is not None
    return result
