"""Memory of an engine that the copier reaches: the calls of `Pages`, and nobody here copies."""

from __future__ import annotations

import os
import threading
import time
import weakref
from array import array
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast

import msgspec

from lmcache_copier import messages as m
from lmcache_copier.door import SOCKET_NAME
from lmcache_copier.jobs import ServerRetrieve, ServerStore, waited
from lmcache_copier.limits import DESCRIPTORS_MAX, ENTRIES_MAX, GROUPS_MAX, REGIONS_MAX
from lmcache_copier.link import CopierLink, Mark
from lmcache_core import Client, PageEntry, PageGroup, Promise
from lmcache_core.buffers import address_of
from lmcache_core.client import Pages, PagesCall, PagesResult, RegionTables
from lmcache_core.descriptors import Descriptor
from lmcache_core.devices.contract import Device, SharedAllocation, SharedEvent, SharingDevice
from lmcache_core.errors import CacheError, DisconnectedError, LimitError, UsageError
from lmcache_core.limits import SECONDS_MAX
from lmcache_core.protocol.address import server_directory
from lmcache_core.protocol.codec import join_keys
from lmcache_core.trust import Trust

_RETRY_S = 0.02  # between two attempts to reach a copier that is away


class CopierAccess:
    """A client's way to the copier of its server: one link at a time, shared by all that is registered."""

    def __init__(self, name: str, root: Path | None, trust: Trust) -> None:
        self._path = server_directory(name, root) / SOCKET_NAME
        self._trust = trust
        self._lock = threading.Lock()
        self._link: CopierLink | None = None
        self._tried_at = 0.0
        self._why = ""
        self.mark = Mark()

    def link(self) -> CopierLink:
        """The link, made anew if the copier was. Raises `DisconnectedError`, and `UntrustedError`."""
        with self._lock:
            if self._link is not None and self._link.usable:
                return self._link
            if time.monotonic() - self._tried_at < _RETRY_S:
                raise DisconnectedError(self._why)
            try:
                self._link = CopierLink(self._path, self._trust)
            except CacheError as error:
                self._tried_at, self._why = time.monotonic(), str(error)
                raise
            return self._link


_known: weakref.WeakKeyDictionary[Client, CopierAccess] = weakref.WeakKeyDictionary()
_known_lock = threading.Lock()


def access_of(client: Client) -> CopierAccess:
    """Of this client. Raises `UsageError` for one that is connected by ZMQ: it may be on another node."""
    with _known_lock:
        found = _known.get(client)
        if found is None:
            target = client.links.target
            if target.address is not None:
                raise UsageError("the copier is found beside the server's lifeline: connect by name, not by address")
            found = _known[client] = CopierAccess(target.name, target.runtime_dir, target.trust)
        return found


class SharedFile(NamedTuple):
    """A file of memory that this process has mapped: a memfd, or one of /dev/shm. `buffer`: the mapping, which begins
    `offset` bytes into the file."""

    fd: int
    buffer: Any
    offset: int = 0


class _Memory:
    """Where the pages are, in the words of the copier."""

    def __init__(self, tables: RegionTables, files: Sequence[SharedFile]) -> None:
        """Raises `UsageError` for memory that the copier cannot reach in this way, and `LimitError` for more of it than
        a message may name: the copier would hang up."""
        self._files = [Descriptor(os.dup, each.fd) for each in files]
        self._device = None if tables.device is None else _sharing(tables.device, files)
        self._allocations: list[SharedAllocation] = []
        if self._device is not None:
            self._allocations, self._pieces = _shared(self._device, tables)
        else:
            spans = [_span(each) for each in files]
            self._pieces = [
                _piece(place.base, place.end, place.readonly, files, spans) for own in tables.places for place in own
            ]
        self._groups: list[m.GroupOf] = []
        first = 0
        for group in tables.groups:
            layout = group.namespace.layout
            regions = [
                m.RegionOf(first + at, 0, each.page_bytes, each.page_stride, each.pages)
                for at, each in enumerate(group.regions)
            ]
            self._groups.append(
                m.GroupOf(
                    group.namespace.id, layout.dtype, list(layout.shape), layout.memory_format, regions,
                    group.pages_per_object,
                )
            )  # fmt: skip
            first += len(regions)
        try:
            msgspec.convert(msgspec.to_builtins(self.message(Mark(), 1)), m.RegisterMemory)
        except msgspec.ValidationError as error:
            raise LimitError(
                f"the copier takes {REGIONS_MAX:,} regions, {GROUPS_MAX} groups and {DESCRIPTORS_MAX} files in one "
                f"registration ({error}): register fewer at once, or let the engine copy"
            ) from error

    @property
    def fds(self) -> list[int]:
        """To send with `message`."""
        return [each.fileno() for each in self._files]

    def message(self, mark: Mark, rid: int) -> m.RegisterMemory:
        """Registers all of it."""
        gpu = b"" if self._device is None else self._device.uuid
        handles = [each.handle for each in self._allocations]
        return m.RegisterMemory(rid, mark.at, mark.value, self._pieces, self._groups, len(self._files), gpu, handles)

    @property
    def is_on_device(self) -> bool:
        """Whether it is of a GPU."""
        return self._device is not None

    def event(self, stream: int | None) -> SharedEvent | None:
        """Where the engine's stream stands now; None: of host memory."""
        return None if self._device is None else self._device.record_shared(stream)


def _span(file: SharedFile) -> tuple[int, int]:
    view = memoryview(file.buffer)
    start = address_of(view)
    return start, start + view.nbytes


def _piece(
    base: int, end: int, readonly: bool, files: Sequence[SharedFile], spans: Sequence[tuple[int, int]]
) -> m.MemoryPiece:
    if not files:
        return m.MemoryPiece(base, end - base, -1, readonly)
    for number, (first, last) in enumerate(spans):
        if first <= base and end <= last:
            return m.MemoryPiece(base - first + files[number].offset, end - base, number, readonly)
    raise UsageError("a region lies in none of these files: name those of all regions, or none")


def _sharing(device: Device, files: Sequence[SharedFile]) -> SharingDevice:
    if files:
        raise UsageError("memory of a GPU lies in no file: name none")
    if not hasattr(device, "record_shared"):
        raise UsageError(f"memory of a {type(device).__name__} cannot be opened by another process")
    return cast(SharingDevice, device)


def _shared(device: SharingDevice, tables: RegionTables) -> tuple[list[SharedAllocation], list[m.MemoryPiece]]:
    """The allocations that its places lie in, each once, and where."""
    found: dict[int, tuple[int, SharedAllocation]] = {}  # by start
    pieces = []
    for place in (place for own in tables.places for place in own):
        each = device.shared(place.base)
        if place.end > each.start + each.nbytes:
            raise UsageError("a region of a GPU lies in several allocations, which cannot be opened as one")
        number, _ = found.setdefault(each.start, (len(found), each))
        pieces.append(m.MemoryPiece(place.base - each.start, place.end - place.base, number, place.readonly))
    return [each for _, each in found.values()], pieces


class ServerPages:
    """Memory registered with the copier, for as long as this object lives. The calls are those of `Pages`, with the
    same checks, results and statuses. Thread-safe in the same way."""

    def __init__(self, client: Client, own: Pages, files: Sequence[SharedFile] = ()) -> None:
        """`own`: the same memory as the engine itself would copy it. `files`: those that all of it lies in; none: the
        copier reaches it by its address. It is registered by the first call, or by `registration`."""
        self._own = own
        self._access = access_of(client)
        self._lock = threading.Lock()
        self._registered: tuple[CopierLink, int] | None = None
        self._memory = _Memory(own.tables, files)
        self._regions = sum(len(group.regions) for group in own.groups)
        self._end: Any = None

    @property
    def groups(self) -> tuple[PageGroup, ...]:
        """The groups as registered."""
        return self._own.groups

    @property
    def first_regions(self) -> list[int]:
        """As `Pages.first_regions`."""
        return self._own.first_regions

    def registration(self) -> tuple[CopierLink, int]:
        """The link, and what this memory's number is there: registered anew if the copier was started anew. Raises
        `DisconnectedError` where there is no copier, and `UsageError` with the cure where it cannot reach this
        memory."""
        with self._lock:
            link = self._access.link()
            if self._registered is None or self._registered[0] is not link:
                make = partial(self._memory.message, self._access.mark)
                owners = self._own.tables if self._memory.is_on_device else None

                def undo(reply: m.MemoryRegistered) -> None:
                    link.unregister(reply.registration, owners)

                reply = link.call(make, (m.MemoryRegistered,), self._memory.fds, undo)
                self._registered = link, reply.registration
                if self._end is not None:
                    self._end.detach()
                self._end = weakref.finalize(self, _unregister, link, reply.registration, owners)
                self._end.atexit = False
            return self._registered

    def close(self) -> None:
        """Unregister. When this returns, nothing of the copier touches this memory any more; jobs under way are
        cancelled."""
        with self._lock:
            registered, self._registered = self._registered, None
            if self._end is not None:
                self._end.detach()
        if registered is not None and registered[0].usable:
            link, number = registered
            try:
                link.call(lambda rid: m.UnregisterMemory(rid, number), (m.CopierDone,))
            except CacheError:
                return  # it is dead, or has forgotten it

    def store_start(
        self,
        entries: Sequence[PageEntry | tuple[Any, ...]],
        *,
        deadline_s: float | None = None,
        traceparent: str = "",
        reads: bool = True,
        stream: int | None = None,
    ) -> ServerStore:
        """As `Pages.store_start`: when this returns, all pages have been read, and may change. `reads=False`, and of a
        GPU always: return at once; the pages may change after `wait_read`."""
        job = self._store(entries, deadline_s, traceparent, stream, tell_read=True)
        if reads and not self._memory.is_on_device:
            try:
                job.wait_read()
            except BaseException:
                job.cancel()
                raise
        return job

    def store(
        self,
        entries: Sequence[PageEntry | tuple[Any, ...]],
        *,
        deadline_s: float | None = None,
        traceparent: str = "",
        stream: int | None = None,
    ) -> PagesResult:
        """The same, and waits for the result."""
        return waited(self._store(entries, deadline_s, traceparent, stream, tell_read=False))

    def _store(
        self,
        entries: Sequence[PageEntry | tuple[Any, ...]],
        deadline_s: float | None,
        traceparent: str,
        stream: int | None,
        *,
        tell_read: bool,
    ) -> ServerStore:
        call = self._own.checked(entries, deadline_s, stream, writes=False, traceparent=traceparent)
        event = self._memory.event(stream)
        link, number, why = self._reached()

        def make(rid: int) -> m.StorePages:
            name = None if event is None else event.name
            return m.StorePages(rid, number, _entries(call), _seconds(call.deadline_s), tell_read, name)

        return ServerStore(link, why, call, make, event)

    def retrieve_start(
        self,
        entries: Sequence[PageEntry | tuple[Any, ...]],
        *,
        promises: Sequence[Promise | None] = (),
        order: Literal["region", "object"] = "object",
        deadline_s: float | None = None,
        verify: str | None = None,
        stream: int | None = None,
    ) -> ServerRetrieve:
        """As `Pages.retrieve_start`. `order` has no meaning here: a region is done when the job is."""
        if order not in ("region", "object"):
            raise UsageError(f'order is {order!r}: use "region" or "object"')
        call = self._own.checked(entries, deadline_s, stream, writes=True)
        event = self._memory.event(stream)
        held = list(promises) or [None] * len(call.entries)
        if len(held) != len(call.entries) or not all(each is None or isinstance(each, Promise) for each in held):
            raise UsageError(f"promises are given by entry: {len(call.entries)} of them, a `Promise` or None each")
        level = self._own.level(verify)
        link, number, why = self._reached()

        def make(rid: int) -> m.RetrievePages:
            name = None if event is None else event.name
            return m.RetrievePages(rid, number, _entries(call, held), _seconds(call.deadline_s), level, name)

        return ServerRetrieve(link, why, call, make, event, self._regions)

    def retrieve(
        self,
        entries: Sequence[PageEntry | tuple[Any, ...]],
        *,
        promises: Sequence[Promise | None] = (),
        deadline_s: float | None = None,
        verify: str | None = None,
        stream: int | None = None,
    ) -> PagesResult:
        """The same, and waits for the result."""
        return waited(
            self.retrieve_start(entries, promises=promises, deadline_s=deadline_s, verify=verify, stream=stream)
        )

    def measure(self, group: int, ids: array[int]) -> float:
        """Seconds that the copier takes to read these pages, as objects, with their checksums."""
        link, number = self.registration()
        reply = link.call(lambda rid: m.MeasurePages(rid, number, group, ids.tobytes()), (m.PagesMeasured,))
        return float(reply.seconds)

    def _reached(self) -> tuple[CopierLink | None, int, str]:
        """The link and the registration, or why there is none: then nothing is stored, and everything is a miss."""
        try:
            link, number = self.registration()
        except DisconnectedError as error:
            return None, 0, str(error)
        return link, number, ""


def _unregister(link: CopierLink, number: int, owners: object) -> None:
    if link.usable:
        link.unregister(number, owners)


def _seconds(deadline_s: float | None) -> float | None:
    """As messages have it: one that has passed is 0. The copier hangs up on a number out of its range, and an engine
    whose copier hangs up ends it."""
    return None if deadline_s is None else min(max(0.0, deadline_s), SECONDS_MAX)


def _entries(call: PagesCall, promises: Sequence[Promise | None] = ()) -> list[m.JobEntry]:
    if len(call.entries) > ENTRIES_MAX:  # the copier would hang up
        raise LimitError(f"{len(call.entries):,} entries, and a job has {ENTRIES_MAX:,} at most: split the batch")
    entries = []
    for number, (_, keys, traceparent, pages) in enumerate(call.entries):
        promise = promises[number] if promises else None
        ids = b"" if promise is None else array("Q", promise.ids_of(keys)).tobytes()
        entries.append(m.JobEntry(pages.group, join_keys(keys), call.batch.ids(number), ids, traceparent))
    return entries
