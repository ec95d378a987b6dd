"""The lanes' side of a tier: objects to bytes on the medium and back. Runs on lane threads; touches no kernel."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from threading import Event
from typing import NamedTuple

from lmcache_core.errors import CacheError, DamagedObjectError, MismatchedObjectError, excerpt
from lmcache_core.guard import guarded
from lmcache_core.limits import SCRATCH_BYTES_MAX
from lmcache_core.serde.chain import CodecChain
from lmcache_core.serde.scratch import Scratch
from lmcache_core.tiers.answers import LOAD_RESULTS, STORE_RESULTS
from lmcache_core.tiers.contract import L2Adapter, LoadItem, Outcome, Result, StoreItem
from lmcache_core.tiers.l1 import TierReason
from lmcache_core.tiers.object.format import (
    HEADER_BYTES,
    ObjectKind,
    build_header,
    check_header,
    payload_checksum,
    serde_key,
    split_tier_key,
    tier_key,
)
from lmcache_core.tiers.object.inspect import Evidence, evidence_of
from lmcache_core.tiers.retry import call_batch


class Transfer(NamedTuple):
    """One object to store or to load. `view` is its memory in the pool, `kind.layout.nbytes` long; `checksum` is the
    xxh3_64 of its bytes if known (None or 0: unknown). `suspect`: they may be other bytes, so a store compares them."""

    key: bytes
    namespace: int
    epoch: int
    kind: ObjectKind
    view: memoryview
    checksum: int | None = None
    replaces: bool = False  # the medium may have a damaged one under this key
    suspect: bool = False

    @property
    def tier_key(self) -> bytes:
        return tier_key(self.key, self.namespace, self.epoch)

    @property
    def serde_key(self) -> bytes:
        return serde_key(self.kind, self.key, self.namespace, self.epoch)


class NoRoom(Outcome):
    """Encoded to `nbytes`, but not stored: that is more than was reserved. The medium was not called."""

    __slots__ = ()


class Loaded(NamedTuple):
    """The outcome of one load. `reason` None: the object is in its view, whole and checked."""

    reason: TierReason | None
    nbytes: int = 0  # on the medium, header included
    error: str = ""
    mismatched: bool = False  # intact, but not for us: another layout, codec chain or key of a serde
    evidence: Evidence | None = None  # of one that looked damaged
    checksum: int | None = None  # xxh3_64 of the object in its view


class Carrier:
    """Stores and loads batches through one adapter and one codec chain. All lanes of a tier share it.

    Each thread has its own Scratch and reuses it, so that a batch allocates nothing large.
    """

    def __init__(self, adapter: L2Adapter, chain: CodecChain, stop: Event) -> None:
        self._adapter = adapter
        self._chain = chain
        self._stop = stop
        self._of_thread = threading.local()

    def store(
        self,
        batch: Sequence[Transfer],
        deadline: float,
        reserved: Sequence[int] | None = None,
        encoded: Callable[[Sequence[int], int, int], None] | None = None,
    ) -> list[Outcome]:
        """Encode, checksum and store each object. `Outcome.nbytes` is its size on the medium.

        `reserved`: bytes reserved for each object, as far as known; their sum is never exceeded, and an object that
        does not fit is `NoRoom`. `encoded(sizes, room, guessed)` is called before each call of the adapter, with the
        sizes known since, the total that the batch reserves from now on, and how much of it is for objects not encoded
        yet.
        """
        scratch = self._scratch()
        outcomes: list[Outcome] = []
        room, used = sum(reserved or ()), 0
        for part in self._parts(batch):
            scratch.reset()
            items: list[StoreItem | Outcome] = [self._packed(transfer, scratch) for transfer in part]
            if reserved is not None:
                sizes = [item.nbytes for item in items if isinstance(item, StoreItem)]
                for at, item in enumerate(items):
                    if not isinstance(item, StoreItem):
                        continue
                    if used + item.nbytes <= room:
                        used += item.nbytes
                    else:
                        items[at] = NoRoom(Result.THROTTLED, item.nbytes)
                room = min(room, used + sum(reserved[len(outcomes) + len(part) :]))
                if encoded is not None:
                    encoded(sizes, room, room - used)
            good = [item for item in items if isinstance(item, StoreItem)]
            stored = iter(call_batch(self._adapter.store, good, deadline, self._stop, STORE_RESULTS) if good else [])
            for item in items:
                if isinstance(item, StoreItem):
                    outcome = next(stored)
                    outcomes.append(outcome._replace(nbytes=item.nbytes))
                else:
                    outcomes.append(item)
        return outcomes

    def load(self, batch: Sequence[Transfer], deadline: float) -> list[Loaded]:
        """Load, verify and decode each object into its view."""
        scratch = self._scratch()
        loaded: list[Loaded] = []
        for part in self._parts(batch):
            scratch.reset()
            items = []
            for transfer in part:
                page = scratch.take(HEADER_BYTES)
                payload = transfer.view
                if not self._chain.is_identity:
                    payload = scratch.take(self._chain.encoded_bytes_max(transfer.kind.layout))
                items.append(LoadItem(transfer.tier_key, [page, payload]))
            outcomes = call_batch(self._adapter.load, items, deadline, self._stop, LOAD_RESULTS)
            for transfer, item, outcome in zip(part, items, outcomes, strict=True):
                loaded.append(self._unpacked(transfer, item, outcome, scratch))
        return loaded

    # --- one object ---------------------------------------------------------------------------------------
    def _packed(self, transfer: Transfer, scratch: Scratch) -> StoreItem | Outcome:
        """The item to store, or the outcome that says why there is none."""
        # Encoded, damaged bytes would get a checksum of their own, and nobody could tell any more.
        if transfer.suspect and payload_checksum([transfer.view]) != transfer.checksum:
            return Outcome(Result.FAILED, error=f"object {transfer.key.hex()[:16]}… of the adopted pool is damaged")
        page = scratch.take(HEADER_BYTES)
        layout = transfer.kind.layout
        encoded = guarded(
            _not_encoded, self._chain.encode, transfer.view.toreadonly(), layout, transfer.serde_key, scratch
        )
        if isinstance(encoded, Outcome):
            return encoded
        payload = [memoryview(part) for part in encoded.buffers]
        # A checksum that the writer computed while copying is not computed again; encoded bytes have their own.
        checksum = transfer.checksum if self._chain.is_identity else None
        build_header(
            page,
            transfer.kind,
            key=transfer.key,
            namespace=transfer.namespace,
            epoch=transfer.epoch,
            encoded_bytes=sum(part.nbytes for part in payload),
            checksum=checksum or payload_checksum(payload),
            lengths=encoded.lengths,
        )
        return StoreItem(transfer.tier_key, [page, *payload], transfer.replaces)

    def _unpacked(self, transfer: Transfer, item: LoadItem, outcome: Outcome, scratch: Scratch) -> Loaded:
        if outcome.result is Result.MISS:
            return Loaded(TierReason.GONE)
        if outcome.result is Result.DAMAGED:
            return Loaded(TierReason.DAMAGED, error=outcome.error, evidence=evidence_of(outcome, item.buffers))
        if outcome.result is Result.THROTTLED:
            return Loaded(TierReason.THROTTLED, error=outcome.error)
        if outcome.result is not Result.DONE:
            return Loaded(TierReason.TIER_ERROR, error=outcome.error or f"load answered {outcome.result}")
        page, payload = item.buffers
        try:
            if outcome.nbytes < HEADER_BYTES:
                raise DamagedObjectError(f"object ends after {outcome.nbytes} bytes, inside its header")
            header = check_header(
                page, transfer.kind, key=transfer.key, namespace=transfer.namespace, epoch=transfer.epoch
            )
            if outcome.nbytes != HEADER_BYTES + header.encoded_bytes or header.encoded_bytes > payload.nbytes:
                raise DamagedObjectError(
                    f"object {transfer.key.hex()[:16]}… came with {outcome.nbytes - HEADER_BYTES:,} bytes of "
                    f"payload and its header says {header.encoded_bytes:,}"
                )
            payload = payload[: header.encoded_bytes]
            if payload_checksum([payload]) != header.checksum:
                raise DamagedObjectError(f"payload of object {transfer.key.hex()[:16]}… fails its checksum")
            if self._chain.is_identity and payload.nbytes != transfer.view.nbytes:
                raise DamagedObjectError(
                    f"object {transfer.key.hex()[:16]}… has {payload.nbytes:,} bytes for a slot of "
                    f"{transfer.view.nbytes:,}"
                )
        except MismatchedObjectError as error:
            return Loaded(TierReason.DAMAGED, outcome.nbytes, str(error), mismatched=True)
        except DamagedObjectError as error:
            seen = evidence_of(outcome, item.buffers)
            return Loaded(TierReason.DAMAGED, outcome.nbytes, str(error), evidence=seen)
        if not self._chain.is_identity:
            # What was stored has come back: if it does not decode, another key or version of a serde has encoded it.
            undecoded = guarded(
                _not_decoded,
                self._chain.decode,
                payload,
                transfer.view,
                transfer.kind.layout,
                transfer.serde_key,
                header.lengths,
                scratch,
            )
            if undecoded is not None:
                return Loaded(TierReason.DAMAGED, outcome.nbytes, undecoded, mismatched=True)
        return Loaded(
            None,
            outcome.nbytes,
            checksum=header.checksum if self._chain.is_identity else payload_checksum([transfer.view]),
        )

    # --- bounds -------------------------------------------------------------------------------------------
    def _scratch(self) -> Scratch:
        scratch = getattr(self._of_thread, "scratch", None)
        if scratch is None:
            scratch = self._of_thread.scratch = Scratch()
        assert isinstance(scratch, Scratch)
        return scratch

    def _parts(self, batch: Sequence[Transfer]) -> Iterator[Sequence[Transfer]]:
        """The batch in pieces that the adapter takes at once and whose scratch stays within its limit."""
        keys_max = max(1, self._adapter.capabilities.batch_keys_max)
        bytes_max = self._adapter.capabilities.batch_bytes_max or SCRATCH_BYTES_MAX
        part: list[Transfer] = []
        scratch_bytes = nbytes = 0
        for transfer in batch:
            needs = HEADER_BYTES
            if not self._chain.is_identity:
                # An intermediate and a result for each serde, each no larger than the largest stage.
                needs += 2 * self._chain.encoded_bytes_max(transfer.kind.layout)
            size = transfer.view.nbytes
            full = len(part) >= keys_max or scratch_bytes + needs > SCRATCH_BYTES_MAX or nbytes + size > bytes_max
            if part and full:
                yield part
                part, scratch_bytes, nbytes = [], 0, 0
            part.append(transfer)
            scratch_bytes += needs
            nbytes += size
        if part:
            yield part


def _not_encoded(error: BaseException) -> Outcome:
    text = str(error) if isinstance(error, CacheError) else f"{type(error).__name__}: {error}"
    return Outcome(Result.FAILED, error=excerpt(f"encoding failed: {text}"))


def _not_decoded(error: BaseException) -> str:
    known = isinstance(error, DamagedObjectError)
    return excerpt(str(error) if known else f"decoding failed: {type(error).__name__}: {error}")


def transfer_of(raw_key: bytes, kind: ObjectKind, view: memoryview) -> Transfer:
    """The transfer for a tier key, for tools that walk a tier."""
    key, namespace, epoch = split_tier_key(raw_key)
    return Transfer(key, namespace, epoch, kind, view)
