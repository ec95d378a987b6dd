"""What an engine has registered: where its pages are, checked against what it has given."""

from __future__ import annotations

import logging
import mmap
import os
import stat
from abc import ABC, abstractmethod
from array import array
from collections.abc import Sequence
from typing import Any

from lmcache_copier.budget import Charges, Shares
from lmcache_copier.channel import PassedFile
from lmcache_copier.copying import Copies, CopyThreads, JobCopies, PlannedTables, rows_of
from lmcache_copier.gpu import DeviceCopies, OpenedAllocations
from lmcache_copier.limits import REGIONS_MAX
from lmcache_copier.messages import GroupOf, MemoryPiece, RegionOf, RegisterMemory
from lmcache_copier.vm import EngineReach, MappedReach, Reach
from lmcache_core import Client, Layout, PageGroup, Region
from lmcache_core.buffers import address_of
from lmcache_core.client import Pages, RegionTables, page_engine, pages_by
from lmcache_core.devices.cuda import allocation_at, device_named
from lmcache_core.errors import CacheError, LimitError, UsageError
from lmcache_core.native import native
from lmcache_core.tokens.namespace import namespace_of_id

log = logging.getLogger("lmcache_copier")

UNTOUCHED = -1  # the id of pages that engines leave out


class MappedFile:
    """Pieces of one file of an engine's, in one mapping, which has one descriptor, for as long as this lives."""

    def __init__(self, fd: int, pieces: Sequence[MemoryPiece]) -> None:
        """The pieces are alike but for their place. Raises `UsageError` for what is no memory, or not that long."""
        found, number = os.fstat(fd), pieces[0].descriptor
        for piece in pieces:
            end = piece.address + piece.nbytes
            if not stat.S_ISREG(found.st_mode) or end > found.st_size or not piece.nbytes:
                raise UsageError(
                    f"descriptor {number} has no bytes {piece.address:,} to {end:,}: give a memfd or a file of "
                    f"/dev/shm of that length"
                )
        access = mmap.PROT_READ | (0 if pieces[0].readonly else mmap.PROT_WRITE)
        first, end = min(each.address for each in pieces), max(each.address + each.nbytes for each in pieces)
        first -= first % mmap.ALLOCATIONGRANULARITY
        try:
            self._mapping = mmap.mmap(fd, end - first, mmap.MAP_SHARED, access, offset=first)
        except (OSError, ValueError) as error:
            raise UsageError(f"descriptor {number} cannot be mapped: {error}") from error
        self._zero = address_of(memoryview(self._mapping)) - first

    def address(self, piece: MemoryPiece) -> int:
        """Where this piece is."""
        return self._zero + piece.address


class Registration(ABC):
    """Memory of one engine, and how its pages lie there."""

    groups: Sequence[PageGroup]

    def __init__(self) -> None:
        self.charges = Charges()  # what it has of the engine's shares, until it is closed

    @abstractmethod
    def copies(self, helpers: CopyThreads, until: float | None, event: bytes | None) -> Copies:
        """For one job, behind an event of the engine's, if it names one. Raises `UsageError`."""

    @abstractmethod
    def pages(self, copies: Any) -> Pages:
        """The pages, copied by these."""

    def close(self) -> None:
        """Let go of the memory, when the jobs have ended."""
        self.charges.free()


class HostRegistration(Registration):
    """Of memory that the processor copies."""

    def __init__(
        self,
        client: Client,
        engine: EngineReach,
        message: RegisterMemory,
        files: Sequence[PassedFile],
        shares: Shares,
    ) -> None:
        """Raises `UsageError` for what does not fit together, `LimitError`, and `UnreachableMemoryError`."""
        super().__init__()
        self._client = client
        try:
            self._open(engine, message, files, shares)
        except BaseException:
            self.close()
            raise

    def _open(self, engine: EngineReach, message: RegisterMemory, files: Sequence[PassedFile], shares: Shares) -> None:
        pieces = message.pieces
        mapped = {piece.descriptor >= 0 for piece in pieces}
        if len(mapped) != 1:
            raise UsageError("memory is given by address or by descriptor, and not both ways in one registration")
        self.reach: Reach
        if mapped.pop():
            alike = _alike(pieces, len(files))
            self._kept = {which: MappedFile(files[which[0]].fileno(), each) for which, each in alike.items()}
            for file in files:  # they do not count twice: each mapping has a descriptor of its own
                file.close()
            self.charges.take(shares.files, len(alike))
            starts = [self._kept[piece.descriptor, piece.readonly].address(piece) for piece in pieces]
            self.reach = MappedReach(engine)
        else:
            engine.check()
            starts = [piece.address for piece in pieces]
            self.reach = engine
        self._tables = _tables(pieces, starts, message.groups)
        self.groups = self._tables.groups
        words = self._tables.words()
        self.charges.take(shares.rows, rows_of(words))
        self.planned = PlannedTables(words)

    def close(self) -> None:
        """What is mapped goes with this object."""
        self._kept = {}
        super().close()

    def copies(self, helpers: CopyThreads, until: float | None, event: bytes | None = None) -> JobCopies:
        """For one job."""
        if event is not None:
            raise UsageError("this memory is not of a GPU: there is no event to wait for")
        return JobCopies(self.planned, self.reach, helpers, until)

    def pages(self, copies: JobCopies) -> Pages:
        """The pages, copied by these."""
        return pages_by(self._client.links, self._tables, copies)


class DeviceRegistration(Registration):
    """Of allocations on a GPU, open until it is closed."""

    def __init__(self, client: Client, message: RegisterMemory, shares: Shares) -> None:
        """Raises `UsageError`, and `LimitError`."""
        super().__init__()
        self._client = client
        try:
            regions = sum(len(group.regions) for group in message.groups)
            self.charges.take(shares.rows, regions + len(message.pieces) + len(message.allocations))
            self._open(message)
        except BaseException:
            super().close()
            raise

    def _open(self, message: RegisterMemory) -> None:
        if native is None:
            raise UsageError("pages of a GPU are copied by the C extension, which the copier does not have")
        self._device = device_named(message.gpu)
        self._opened = OpenedAllocations(self._device, message.allocations)
        try:
            pieces = message.pieces
            starts = [self._opened.address(each.descriptor, each.address, each.nbytes) for each in pieces]
            tables = _tables(pieces, starts, message.groups)
            flat = [place for own in tables.places for place in own]
            allocations = array("Q", [allocation_at(place.base) % 2**64 for place in flat])
            self._tables = tables._replace(allocations=allocations)
            self._made = page_engine().PageTables(tables.words(), self._device.words, allocations)
        except BaseException:
            self._opened.close()
            raise
        self.groups = tables.groups

    def close(self) -> None:
        """The engine may free the memory then. What the driver does not close is closed by the end of this process."""
        try:
            self._opened.close()
        except CacheError as error:
            log.critical("memory of an engine cannot be closed (%s): this process ends", error)
            os._exit(1)
        super().close()

    def copies(self, helpers: CopyThreads, until: float | None, event: bytes | None) -> DeviceCopies:
        """For one job."""
        del helpers, until  # threads of the extension copy, and end with the job
        if event is None:
            raise UsageError("this memory is of a GPU: name the event that its pages are ready behind")
        return DeviceCopies(self._made, self._device, self._device.event_named(event))

    def pages(self, copies: DeviceCopies) -> Pages:
        """The pages, copied by these."""
        return pages_by(self._client.links, self._tables._replace(device=copies), copies)


def _alike(pieces: Sequence[MemoryPiece], descriptors: int) -> dict[tuple[int, bool], list[MemoryPiece]]:
    """Those of one mapping together: of one file, with one access."""
    alike: dict[tuple[int, bool], list[MemoryPiece]] = {}
    for piece in pieces:
        if piece.descriptor >= descriptors:
            raise UsageError(f"descriptor {piece.descriptor} did not come along: {descriptors} did")
        alike.setdefault((piece.descriptor, piece.readonly), []).append(piece)
    return alike


def _tables(pieces: Sequence[MemoryPiece], starts: Sequence[int], groups: Sequence[GroupOf]) -> RegionTables:
    regions = sum(len(group.regions) for group in groups)
    if regions > REGIONS_MAX:
        raise LimitError(
            f"{regions:,} regions, and one registration has {REGIONS_MAX:,} at most: register fewer at once"
        )

    def memory(name: str, number: Any) -> tuple[int, int, bool, Any]:
        if not 0 <= number < len(pieces):
            raise UsageError(f"{name}: there is no piece {number} of memory; {len(pieces)} were given")
        return starts[number], pieces[number].nbytes, pieces[number].readonly, None

    return RegionTables.of([_group(each) for each in groups], memory)


def _group(given: GroupOf) -> PageGroup:
    try:
        layout = Layout(given.dtype, tuple(given.shape), given.memory_format)
    except (TypeError, ValueError) as error:
        raise UsageError(f"a layout makes no sense: {error}") from error
    namespace = namespace_of_id(given.namespace, layout)
    return PageGroup(namespace, [_region(each) for each in given.regions], given.pages_per_object, UNTOUCHED)


def _region(given: RegionOf) -> Region:
    return Region(given.piece, given.offset, given.page_bytes, given.page_stride, given.pages)
