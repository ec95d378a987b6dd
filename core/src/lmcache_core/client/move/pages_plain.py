"""`_native.PageTables`, `PageBatch` and `PageJob` without the extension: the same results, with all copies made one
after another within `start`. Without the extension there is no index, so slots are always given."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import xxhash

UNTOUCHED = -1


class _Group(NamedTuple):
    regions: list[tuple[int, int, int]]  # base, page_bytes, page_stride
    pages: int
    per_object: int
    null_page: int | None
    alias: int
    exact: bool

    @property
    def object_bytes(self) -> int:
        return self.per_object * sum(page_bytes for _, page_bytes, _ in self.regions)


class PageTables:
    """Regions of pages, in groups."""

    def __init__(self, groups: Sequence[tuple[Any, ...]]) -> None:
        self.groups = []
        for words, *rest in groups:
            self.groups.append(_Group([tuple(words[at : at + 3]) for at in range(0, len(words), 3)], *rest))
        self.regions = sum(len(group.regions) for group in self.groups)


class PageBatch:
    """The pages of one call, checked."""

    def __init__(self, tables: PageTables, entries: Sequence[tuple[int, int, Any, int, int]], writes: bool) -> None:
        self.tables = tables
        self.entries = [self._entry(number, *entry) for number, entry in enumerate(entries)]
        if writes:
            self._check_ids()
            self._check_places()

    def _entry(
        self, number: int, group_number: int, keys: int, given: Any, skip: int, valid: int
    ) -> tuple[_Group, array[int]]:
        if not 0 <= group_number < len(self.tables.groups):
            raise ValueError(f"entry {number}: no group {group_number}; {len(self.tables.groups)} are registered")
        group = self.tables.groups[group_number]
        count = keys * group.per_object
        if not (0 <= valid <= count and 0 <= skip <= group.per_object) or (skip and not keys):
            raise ValueError(
                f"entry {number}: skip_pages {skip} and valid_pages {valid} do not fit {keys} keys of "
                f"{group.per_object} pages each"
            )
        view = memoryview(given).cast("B").cast("q")
        if len(view) not in (valid, count):
            raise ValueError(
                f"entry {number}: page_ids has {len(view)} ids: give {count}, one for each page of the keys, or "
                f"{valid}, one for each valid page"
            )
        ids = array("q", [UNTOUCHED]) * count
        for at in range(skip, valid):
            if view[at] == group.null_page:
                continue
            if not 0 <= view[at] < group.pages:
                raise ValueError(
                    f"entry {number}: page_ids[{at}] is {view[at]}, and the group has pages 0 to {group.pages - 1}"
                )
            ids[at] = view[at]
        return group, ids

    def _check_ids(self) -> None:
        seen: set[tuple[int, int]] = set()
        for number, (group, ids) in enumerate(self.entries):
            for each in ids:
                if each != UNTOUCHED and (group.alias, each) in seen:
                    raise ValueError(
                        f"entry {number}: page {each} is to be written twice in this call: a page belongs to one object"
                    )
                seen.add((group.alias, each))

    def _check_places(self) -> None:
        spans = sorted(
            (base + each * stride, base + each * stride + nbytes)
            for group, ids in self.entries
            if group.exact
            for each in ids
            if each != UNTOUCHED
            for base, nbytes, stride in group.regions
        )
        if any(after[0] < before[1] for before, after in pairwise(spans)):
            raise ValueError(
                "two pages of this call overlap, because groups share memory: use a page in one group at a time"
            )

    def ids(self, entry: int) -> bytes:
        """The page ids of an entry, as i64; -1 for those that are skipped."""
        return self.entries[entry][1].tobytes()


class PageJob:
    """Objects in transit between slots and pages."""

    running = False

    def __init__(
        self, batch: PageBatch, parts: Sequence[tuple[Any, ...]], gather: bool, by_region: bool, keep: object
    ) -> None:
        del by_region  # everything is done at once
        self._batch, self._parts, self._gather, self._keep = batch, parts, gather, keep
        self._sums = [array("Q", [0] * len(part[1])) for part in parts]
        self._statuses = [bytearray([4]) * len(part[1]) for part in parts]
        self._stopped = False
        self._done = not any(len(part[1]) for part in parts)

    @property
    def nbytes(self) -> int:
        """Bytes to copy."""
        return sum(len(part[1]) * self._batch.entries[part[0]][0].object_bytes for part in self._parts)

    def start(self, threads: int, waits: bool) -> None:
        """Copy everything."""
        del threads, waits
        if self._stopped:
            return
        for number, (entry, positions, slots, wanted) in enumerate(self._parts):
            group, ids = self._batch.entries[entry]
            for at, (position, slot) in enumerate(zip(positions, slots, strict=True)):
                pages = ids[position * group.per_object : (position + 1) * group.per_object]
                self._statuses[number][at] = 16 | 4
                self._copy(group, pages, slot)
                found = self._checksum(slot, group) if self._gather or (wanted is not None and wanted[at]) else 0
                damaged = not self._gather and wanted is not None and wanted[at] and found != wanted[at]
                self._sums[number][at] = found
                self._statuses[number][at] = 16 | (3 if damaged else 1)
        self._done = True

    def _copy(self, group: _Group, pages: array[int], slot: int) -> None:
        at = slot
        for base, nbytes, stride in group.regions:
            for page in pages:
                if page == UNTOUCHED:
                    if self._gather:
                        ctypes.memset(at, 0, nbytes)
                elif self._gather:
                    ctypes.memmove(at, base + page * stride, nbytes)
                else:
                    ctypes.memmove(base + page * stride, at, nbytes)
                at += nbytes

    @staticmethod
    def _checksum(slot: int, group: _Group) -> int:
        return xxhash.xxh3_64_intdigest((ctypes.c_char * group.object_bytes).from_address(slot))

    def wait(self, seconds: float, region: int = -1) -> bool:
        """Whether it is done."""
        del seconds
        if not -1 <= region < self._batch.tables.regions:
            raise IndexError(f"no region {region}; {self._batch.tables.regions} are registered")
        return self._done

    def ask_to_stop(self, dropped: object = None, /) -> None:
        """Begin nothing."""
        del dropped
        self._stopped = True

    def stop(self) -> None:
        """Do nothing more."""
        self._stopped = True

    def statuses(self, part: int) -> bytes:
        """The status of each object of a part, one byte each."""
        return bytes(self._statuses[part])

    def incarnations(self, part: int) -> bytes:
        """Unknown here: the leases have them."""
        return bytes(8 * len(self._parts[part][1]))

    def checksums(self, part: int) -> bytes:
        """The checksums of the objects of a part, as u64."""
        return self._sums[part].tobytes()
