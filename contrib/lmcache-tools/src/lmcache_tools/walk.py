"""Tools that walk a tier: every object is read whole, checked, and passed on. They use an adapter of their own, beside
the servers that use the medium; nothing here touches a kernel.
"""

from __future__ import annotations

import mmap
import time
from collections.abc import Iterator, Sequence
from threading import Event
from typing import NamedTuple

from lmcache_core.errors import CacheError, DamagedObjectError, MismatchedObjectError, TierError
from lmcache_core.pool.layout import Layout
from lmcache_core.serde.chain import CodecChain
from lmcache_core.serde.scratch import Scratch
from lmcache_core.tiers.answers import LOAD_RESULTS, STORE_RESULTS, page_of
from lmcache_core.tiers.contract import L2Adapter, LoadItem, Outcome, Result, ScanEntry, ScanPage, StoreItem
from lmcache_core.tiers.object.format import (
    HEADER_BYTES,
    STORED_BYTES_MAX,
    TIER_KEY_BYTES,
    ObjectHeader,
    check_header,
    describe_header,
    object_kind,
    serde_key,
    split_tier_key,
)
from lmcache_core.tiers.object.inspect import Evidence, check_object, evidence_of
from lmcache_core.tiers.object.transfer import Carrier, transfer_of
from lmcache_core.tiers.retry import ask_batch, call_batch

UNREADABLE_IN_A_ROW_MAX = 16  # objects that `verify` and `copy` pass over before they call the medium broken


class WalkedObject(NamedTuple):
    """One object that was read. `problem` empty: it is whole. `damaged` False with a problem: we cannot judge it."""

    entry: ScanEntry
    header: ObjectHeader | None = None
    problem: str = ""
    damaged: bool = False
    unreadable: bool = False  # the medium gave an error for it
    evidence: Evidence | None = None  # of a damaged one
    buffers: Sequence[memoryview] = ()  # header and payload, until the next object is read


def layout_of(header: ObjectHeader) -> Layout:
    """The layout that an object describes. Raises `DamagedObjectError` if the description is invalid."""
    described = describe_header(header)
    try:
        return Layout(described["dtype"], tuple(described["shape"]), described["memory_format"])
    except (KeyError, TypeError, CacheError) as error:
        raise DamagedObjectError(f"object {header.key.hex()[:16]}… describes no layout: {error}") from error


class Walker:
    """Reads the objects of one medium one by one. `stop`: ends waits between retries."""

    def __init__(self, adapter: L2Adapter, chain: CodecChain, deadline_s: float) -> None:
        self.adapter = adapter
        self.chain = chain
        self._deadline_s = deadline_s
        self._stop = Event()
        self._unread = 0  # objects in a row
        self._buffer = memoryview(b"")
        self._decoded = memoryview(b"")
        self._scratch = Scratch()
        self._carrier = Carrier(adapter, chain, self._stop)

    @property
    def deadline(self) -> float:
        """For one call, from now."""
        return time.monotonic() + self._deadline_s

    def pages(self, cursor: str | None = None) -> Iterator[ScanPage]:
        """The pages of a scan, starting at `cursor`. Raises `TierError`."""
        if not self.adapter.capabilities.scan:
            raise TierError("the adapter of this tier cannot list what it has", retryable=False)
        while True:
            page = page_of(self.adapter.scan, self.adapter.scan(cursor, self.deadline))
            yield page
            cursor = page.cursor
            if cursor is None:
                return

    def exists(self, keys: Sequence[bytes]) -> list[bool]:
        """Whether each key is there. Raises `TierError`."""
        return ask_batch(self.adapter.exists, keys, self.deadline, self._stop)

    def read(self, entry: ScanEntry) -> WalkedObject:
        """Load one object and check all that can be checked without knowing its layout: its key, its checksum and, if
        it has our codec chain, that it decodes. Raises `TierError` if many in a row cannot be read: then it is the
        medium."""
        if len(entry.key) != TIER_KEY_BYTES:
            return WalkedObject(entry, problem="its key is none of ours")
        if entry.nbytes > STORED_BYTES_MAX:  # a sparse file, which nobody reads into memory
            return WalkedObject(entry, problem=f"its {entry.nbytes:,} bytes are more than an object of ours can have")
        if entry.nbytes < HEADER_BYTES:
            problem = f"it ends after {entry.nbytes} bytes, inside its header"
            return WalkedObject(entry, problem=problem, damaged=True, evidence=Evidence())
        self._buffer = _at_least(self._buffer, entry.nbytes)
        page, payload = self._buffer[:HEADER_BYTES], self._buffer[HEADER_BYTES : entry.nbytes]
        items = [LoadItem(entry.key, [page, payload])]
        (outcome,) = call_batch(self.adapter.load, items, self.deadline, self._stop, LOAD_RESULTS)
        if outcome.result is Result.MISS:
            return WalkedObject(entry, problem="gone")
        if outcome.result is Result.DAMAGED:
            problem = outcome.error or "its length is not what was stored"
            return WalkedObject(entry, problem=problem, damaged=True, evidence=evidence_of(outcome, [page, payload]))
        if outcome.result is not Result.DONE:
            problem = outcome.error or f"a load answered {outcome.result}"
            self._unread += 1
            if self._unread > UNREADABLE_IN_A_ROW_MAX:
                raise TierError(problem, retryable=True)
            return WalkedObject(entry, problem=problem, unreadable=True)
        self._unread = 0
        try:
            header = self._checked(entry, page, payload, outcome)
        except MismatchedObjectError as error:
            return WalkedObject(entry, problem=str(error))
        except DamagedObjectError as error:
            seen = evidence_of(outcome, [page, payload])
            return WalkedObject(entry, problem=str(error), damaged=True, evidence=seen)
        return WalkedObject(entry, header, buffers=[page, payload[: header.encoded_bytes]])

    def _checked(self, entry: ScanEntry, page: memoryview, payload: memoryview, outcome: Outcome) -> ObjectHeader:
        header = check_object(entry.key, page, payload, outcome.nbytes)
        payload = payload[: header.encoded_bytes]
        kind = object_kind(layout_of(header), self.chain)
        if header.description != kind.description:
            raise MismatchedObjectError(f"it is {header.description.decode(errors='replace')}: not our codec chain")
        key, namespace, epoch = split_tier_key(entry.key)
        check_header(page, kind, key=key, namespace=namespace, epoch=epoch)
        if not self.chain.is_identity:
            try:
                self.decode(header, payload)
            except DamagedObjectError as error:  # it is what was stored: another key of a serde has encoded it
                raise MismatchedObjectError(str(error)) from error
        return header

    def decode(self, header: ObjectHeader, payload: memoryview) -> memoryview:
        """The object as a slot holds it, valid until the next call. Raises `DamagedObjectError`."""
        if self.chain.is_identity:
            return payload
        kind = object_kind(layout_of(header), self.chain)
        name = serde_key(kind, header.key, header.namespace, header.epoch)
        self._scratch.reset()
        try:
            self._decoded = _at_least(self._decoded, header.decoded_bytes)
            view = self._decoded[: header.decoded_bytes]
            self.chain.decode(payload, view, kind.layout, name, header.lengths, self._scratch)
        except DamagedObjectError:
            raise
        except Exception as error:  # a serde is someone else's code: its bugs end here, in words
            raise DamagedObjectError(f"it does not decode: {type(error).__name__}: {error}") from error
        return view

    def store(self, found: WalkedObject, source: Walker) -> Outcome:
        """Store here what `source` has just read: unchanged, or encoded with our codec chain if that differs."""
        assert found.header is not None
        if source.chain.describe() == self.chain.describe():
            item = StoreItem(found.entry.key, found.buffers)
            return call_batch(self.adapter.store, [item], self.deadline, self._stop, STORE_RESULTS)[0]
        view = source.decode(found.header, found.buffers[1])
        kind = object_kind(layout_of(found.header), self.chain)
        return self._carrier.store([transfer_of(found.entry.key, kind, view)], self.deadline)[0]


def _at_least(buffer: memoryview, nbytes: int) -> memoryview:
    """Page-aligned memory. Grows by doubling."""
    if buffer.nbytes >= nbytes:
        return buffer
    return memoryview(mmap.mmap(-1, max(nbytes, 2 * buffer.nbytes, 1 << 20)))
