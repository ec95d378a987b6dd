"""The block tier: objects in slots of one file or device."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import ClassVar, NamedTuple, TypeVar

from lmcache_block.check import findings, probe_beside
from lmcache_block.errors import Errors
from lmcache_block.medium.buffers import cut
from lmcache_block.medium.format import BLOCK_BYTES, size_classes
from lmcache_block.medium.opening import Shared
from lmcache_block.medium.store import SHARDS, BlockStore, Pinned, Written
from lmcache_block.settings import BlockSettings
from lmcache_core.errors import TierError
from lmcache_core.plugins.components import Finding
from lmcache_core.tiers.blocking import BatchAdapter
from lmcache_core.tiers.contract import (
    AdapterContext,
    Capabilities,
    LoadItem,
    Outcome,
    Result,
    ScanEntry,
    ScanPage,
    StoreItem,
    Usage,
)

T = TypeVar("T")
_SCAN_PAGE_ENTRIES = 1000
_DONE = Outcome(Result.DONE)
_MISS = Outcome(Result.MISS)


class _Read(NamedTuple):
    """An object to be read, and the buffers that hold exactly its bytes."""

    at: int  # in its batch
    pinned: Pinned
    parts: list[memoryview]


class BlockAdapter(BatchAdapter):
    """Objects on the medium at `settings.path`, which one process uses at a time. Thread-safe; adapters of a process
    share the medium. It is opened, and if it is empty formatted, when it is first needed."""

    # Objects of a batch share a sync: batches are larger than for a page cache.
    capabilities: ClassVar[Capabilities] = Capabilities(durable=True, private=True, batch_bytes_max=32 << 20)
    errors = (OSError,)

    def __init__(self, settings: BlockSettings, context: AdapterContext) -> None:
        self._settings = settings
        self._errors = Errors(context.tier, settings)
        self.shared = Shared(settings, self._errors)
        if (extent_bytes := settings.new_extent_bytes) is not None:
            most = size_classes(extent_bytes)[-1] * BLOCK_BYTES
            self.capabilities = replace(  # type: ignore[misc]  # the largest object depends on the settings
                self.capabilities, object_bytes_max=most
            )
        super().__init__(context, self.shared)

    # --- contract -----------------------------------------------------------------------------------------
    def store(self, items: Sequence[StoreItem], deadline: float) -> Sequence[Outcome]:
        """Payloads first, at once; then a sync, and the records."""
        return self._batch("store", len(items), lambda store: self._store(store, items, deadline), deadline)

    def exists(self, keys: Sequence[bytes], deadline: float) -> Sequence[bool]:
        return self._of_medium("look up", lambda store: [store.has(key) for key in keys], deadline)

    def load(self, items: Sequence[LoadItem], deadline: float) -> Sequence[Outcome]:
        return self._batch("load", len(items), lambda store: self._load(store, items, deadline), deadline)

    def delete(self, keys: Sequence[bytes], deadline: float) -> Sequence[Outcome]:
        def delete(store: BlockStore) -> list[Outcome]:
            found = store.delete(keys, deadline)
            return [_DONE if error is None else self.refused("delete", error) for error in found]

        return self._batch("delete", len(keys), delete, deadline)

    def set_aside(self, keys: Sequence[bytes], deadline: float, versions: Sequence[str] = ()) -> Sequence[Outcome]:
        """Deletes them: a slot is all there is, and the next object in it is written anew."""

        def set_aside(store: BlockStore) -> list[Outcome]:
            found = store.delete(keys, deadline, versions)
            return [_DONE if error is None else self.refused("set aside", error) for error in found]

        return self._batch("set aside", len(keys), set_aside, deadline)

    def usage(self) -> Usage:
        """Without I/O: not known before the first use."""
        self.check_open()
        store = self.shared.opened()
        if store is None or not store.medium.is_at(self.shared.path):
            return Usage(None, None)
        counts = store.counts()
        return Usage(counts.bytes_used, counts.objects, counts.bytes_free)

    def scan(self, cursor: str | None, deadline: float) -> ScanPage:
        """Shard by shard of the index; the cursor is the next shard."""

        def scan(store: BlockStore) -> ScanPage:
            entries: list[ScanEntry] = []
            for shard in range(int(cursor or 0), SHARDS):
                entries += [ScanEntry(*each) for each in store.entries(shard)]
                if len(entries) >= _SCAN_PAGE_ENTRIES and shard + 1 < SHARDS:
                    return ScanPage(entries, str(shard + 1))
            return ScanPage(entries, None)

        return self._of_medium("scan", scan, deadline)

    def medium(self) -> str:
        return f"the block medium {self.shared.path}"

    def try_to_lead(self) -> bool:
        """The medium is this process's alone."""
        self.check_open()
        return True

    def check(self, deadline: float) -> Iterator[Finding]:
        """Of a medium that is there, or of a small one beside where a file will be made. Formats nothing."""
        beside = probe_beside(self._settings, self._errors)
        if beside is not None:
            with beside as probe, BlockAdapter(probe, self._context) as adapter:
                yield from BatchAdapter.check(adapter, deadline)
        elif self.whole("open its medium", lambda: self.shared.is_empty(deadline)):
            yield Finding(True, "", f"{self._settings.path} is empty, and ours to write to: a server will format it")
            return
        else:
            yield from super().check(deadline)
        yield from findings(self._settings, self._errors.tier, self.shared.opened())

    # --- parts ----------------------------------------------------------------------------------------------
    def _store(self, store: BlockStore, items: Sequence[StoreItem], deadline: float) -> list[Outcome]:
        reserved = [self._reserve(store, item, deadline) for item in items]
        outcomes = {at: each for at, each in enumerate(reserved) if isinstance(each, Outcome)}
        at_place = {each: at for at, each in enumerate(reserved) if not isinstance(each, Outcome)}
        runs = store.runs(list(at_place), [items[at].buffers for at in at_place.values()], self._context.connections)
        written: list[Written] = []
        answers = self._context.parallel([partial(self._write, store, run, deadline) for run in runs])
        for run, wrote in zip(runs, answers, strict=True):
            if isinstance(wrote, Outcome):
                outcomes |= {at_place[place]: wrote for place, _ in run}
            else:
                written += wrote
        written.sort(key=lambda each: at_place[each.place])  # of a key that is named twice, the last one stays
        try:
            batch = [(items[at_place[each.place]].key, each) for each in written]
            published = store.publish(batch, deadline) if batch else []
        except BaseException:
            for each in written:
                store.give_back(each.place)
            raise
        for each, error in zip(written, published, strict=True):
            done = Outcome(Result.DONE, each.nbytes) if error is None else self.refused("store", error)
            outcomes[at_place[each.place]] = done
        return [outcomes[at] for at in range(len(items))]

    def _reserve(self, store: BlockStore, item: StoreItem, deadline: float) -> int | Outcome:
        if not 0 < len(item.key) <= self.capabilities.key_bytes_max:
            return Outcome(Result.FAILED, error=f"a key of {len(item.key)} bytes: it has 1 to 64")
        most = store.block.object_bytes_max
        if item.nbytes > most:
            cure = f"format the medium with a larger l2.{self._tier}.extent_bytes, or store smaller chunks"
            said = f"tier {self._tier!r}: {item.nbytes:,} bytes, and an object has {most:,} at most on this medium"
            return Outcome.of(TierError(said, cure=cure, retryable=False))
        try:
            place = store.reserve(item.nbytes, deadline)
        except OSError as error:
            return self.refused("store", error)
        if place is not None:
            return place
        said = f"tier {self._tier!r}: no slot is free for {item.nbytes:,} bytes, and no extent"
        cure = f"set l2.{self._tier}.capacity_bytes to 85 % of the medium"
        return Outcome.of(TierError(said, cure=cure, retryable=False), Result.FULL)

    def _write(
        self, store: BlockStore, run: Sequence[tuple[int, Sequence[memoryview]]], deadline: float
    ) -> list[Written] | Outcome:
        try:
            return store.write(run, self._in_time(deadline))
        except OSError as error:
            outcome = self.refused("store", error)
            bad = outcome.result is not Result.FULL and not isinstance(error, TimeoutError)
            for place, _ in run:
                store.give_back(place, bad=bad)
            return outcome

    def _load(self, store: BlockStore, items: Sequence[LoadItem], deadline: float) -> list[Outcome]:
        outcomes: dict[int, Outcome] = {}
        with store.reading([item.key for item in items]) as found:
            wanted: dict[int, list[memoryview]] = {}
            for at, (item, pinned) in enumerate(zip(items, found, strict=True)):
                if pinned is None:
                    outcomes[at] = _MISS
                elif (room := sum(part.nbytes for part in item.buffers)) < (nbytes := pinned.record.nbytes):
                    said = f"it has {nbytes:,} bytes, and {room:,} were expected at most"
                    outcomes[at] = Outcome(Result.DAMAGED, error=said, version=_version(pinned))
                else:
                    wanted[at] = cut(item.buffers, nbytes)
            reads = [_Read(at, pinned, wanted[at]) for at, pinned in enumerate(found) if pinned and at in wanted]
            calls = [partial(self._read, store, run, deadline) for run in self._read_runs(store, reads)]
            for answers in self._context.parallel(calls):
                outcomes |= answers
        return [outcomes[at] for at in range(len(items))]

    def _read_runs(self, store: BlockStore, reads: Sequence[_Read]) -> list[list[_Read]]:
        """Those that one call reads. A key that is named twice is read twice."""
        first = {each.pinned.place: each for each in reversed(reads)}
        runs = store.runs(list(first), [each.parts for each in first.values()], self._context.connections)
        again = [[each] for each in reads if first[each.pinned.place] is not each]
        return [[first[place] for place, _ in run] for run in runs] + again

    def _read(self, store: BlockStore, run: Sequence[_Read], deadline: float) -> dict[int, Outcome]:
        try:
            zeros = store.read([(each.pinned.place, each.parts) for each in run], self._in_time(deadline))
        except TimeoutError as error:
            return dict.fromkeys((each.at for each in run), self.refused("load", error))
        except OSError as error:
            if len(run) > 1:  # which of them is it?
                return {each.at: self._read(store, [each], deadline)[each.at] for each in run}
            version = _version(run[0].pinned)
            return {run[0].at: self._errors.unreadable(error, version) or self.refused("load", error)}
        return {each.at: self._read_back(store, each, zeros) for each in run}

    def _read_back(self, store: BlockStore, read: _Read, zeros: bool) -> Outcome:
        nbytes, version = read.pinned.record.nbytes, _version(read.pinned)
        if zeros and store.is_whole(read.pinned, read.parts):
            return Outcome(Result.DONE, nbytes, version=version)
        said = f"the {nbytes:,} bytes in its slot at {self.shared.path} are not those that were stored"
        return Outcome(Result.DAMAGED, error=said, version=version)

    # --- all of them ------------------------------------------------------------------------------------------
    def refused(self, what: str, error: Exception) -> Outcome:
        assert isinstance(error, OSError)
        if isinstance(error, TimeoutError):
            return Outcome.of(TierError(f"tier {self._tier!r} cannot {what}: not done by its deadline"))
        return self._errors.outcome(what, error)

    def _batch(
        self, what: str, count: int, call: Callable[[BlockStore], list[Outcome]], deadline: float
    ) -> list[Outcome]:
        def opened() -> list[Outcome]:
            try:
                with self.shared.using(self._in_time(deadline)) as store:
                    return call(store)
            except TierError as error:
                return [Outcome.of(error)] * count

        return self.together(what, count, opened)

    def _of_medium(self, what: str, call: Callable[[BlockStore], T], deadline: float) -> T:
        def opened() -> T:
            with self.shared.using(self._in_time(deadline)) as store:
                return call(store)

        return self.whole(what, opened)

    def _in_time(self, deadline: float) -> float:
        if time.monotonic() >= deadline:
            raise TimeoutError
        return deadline


def _version(pinned: Pinned) -> str:
    return str(pinned.record.sequence)
