"""Every delete on a tier's medium, and the proof that each needs. Blocks: lanes call it.

Two things are proven here for every adapter. *Whose it is*: this server has stored the object or loaded it whole, or
its header says so, or nobody else stores in that place. *That it is damaged*: a second look sees the same damage as the
first, and an object at least as large is read well on the same way. Where others store, too, that proves nothing of the
medium: tiers never delete for damage there, and `verify --delete` only what begins with the object's own sealed header.
"""

from __future__ import annotations

import mmap
from collections.abc import Collection, Mapping, Sequence
from threading import Event
from typing import NamedTuple

from lmcache_core.errors import DamagedObjectError
from lmcache_core.tiers.answers import DELETE_RESULTS, LOAD_RESULTS
from lmcache_core.tiers.contract import L2Adapter, LoadItem, Outcome, Result
from lmcache_core.tiers.object.format import HEADER_BYTES, is_header_of
from lmcache_core.tiers.object.inspect import Evidence, check_object, evidence_of
from lmcache_core.tiers.retry import call_batch

_UNKNOWN_BYTES = 64 << 20  # room for an object of unknown size; nothing touches it unless the object is as large
_DONE = Outcome(Result.DONE)


class NotOurs(Outcome):
    """Not deleted, because nothing proves that a server stored it."""

    __slots__ = ()


class Suspicion(NamedTuple):
    """An object whose load looked damaged."""

    key: bytes
    room_bytes: int  # it has no more than this
    evidence: Evidence
    ours: bool  # proven by other means than its header


class Look(NamedTuple):
    """What the second look at one object saw. `deleted` None: nothing was deleted."""

    sound: bool = False
    gone: bool = False
    evidence: Evidence | None = None  # of what looked damaged again
    ours: bool = False
    error: str = ""
    deleted: Outcome | None = None


class Deletes:
    """Of one tier. `stopping` ends retries."""

    def __init__(self, adapter: L2Adapter, stopping: Event) -> None:
        self._adapter = adapter
        self._stopping = stopping
        #: Whether a name in our form is proof enough.
        self.names_prove = adapter.capabilities.private or not adapter.capabilities.shared

    def delete(self, sizes: Mapping[bytes, int | None], proven: Collection[bytes], deadline: float) -> list[Outcome]:
        """Delete those of the keys that are ours. `sizes`: their bytes as far as known; `proven`: known to be ours."""
        keys = list(sizes)
        doubtful = [] if self.names_prove else [key for key in keys if key not in proven]
        left = self._not_ours(doubtful, sizes, deadline) if doubtful else {}
        going = [key for key in keys if key not in left]
        deleted = iter(
            call_batch(self._adapter.delete, going, deadline, self._stopping, DELETE_RESULTS) if going else []
        )
        return [left[key] if key in left else next(deleted) for key in keys]

    def look_again(
        self,
        suspicions: Sequence[Suspicion],
        controls: Sequence[tuple[bytes, int]],
        deadline: float,
        *,
        may_delete: bool,
    ) -> list[Look]:
        """Read suspects again. With `may_delete` those that are damaged are set aside: it takes the same damage as
        before, an object of ours, and a control (key, bytes) that is as large and is read well after them."""
        looks = [self._look(each, deadline) for each in suspicions]
        damaged = [
            at
            for at, look in enumerate(looks)
            if look.ours and look.evidence is not None and look.evidence == suspicions[at].evidence
        ]
        if not (may_delete and damaged):
            return looks
        largest = max(suspicions[at].evidence.nbytes for at in damaged)
        if not self._way_is_well(controls, largest, deadline):
            return looks
        pairs = [(suspicions[at].key, suspicions[at].evidence.version) for at in damaged]
        outcomes = call_batch(self._set_aside, pairs, deadline, self._stopping, DELETE_RESULTS)
        for at, outcome in zip(damaged, outcomes, strict=True):
            looks[at] = looks[at]._replace(deleted=outcome)
        return looks

    # --- whose it is --------------------------------------------------------------------------------------
    def _not_ours(
        self, keys: Sequence[bytes], sizes: Mapping[bytes, int | None], deadline: float
    ) -> dict[bytes, Outcome]:
        """Those of the keys that may not be deleted, and why."""
        rests = {key: max(0, (sizes[key] or _UNKNOWN_BYTES) - HEADER_BYTES) for key in keys}
        rest = _memory(max(rests.values()))  # shared: nobody reads it
        pages = [memoryview(bytearray(HEADER_BYTES)) for _ in keys]
        items = [LoadItem(key, [page, rest[: rests[key]]]) for key, page in zip(keys, pages, strict=True)]
        outcomes = call_batch(self._adapter.load_headers, items, deadline, self._stopping, LOAD_RESULTS)
        left: dict[bytes, Outcome] = {}
        for key, page, outcome in zip(keys, pages, outcomes, strict=True):
            if outcome.result is Result.MISS:
                left[key] = _DONE
            elif outcome.result in (Result.DONE, Result.DAMAGED):
                if outcome.nbytes < HEADER_BYTES or not is_header_of(page, key):
                    left[key] = NotOurs(
                        Result.FAILED, error=f"object {key.hex()[:16]}… has no header of ours: it stays"
                    )
            else:
                left[key] = outcome
        return left

    # --- whether it is damaged ----------------------------------------------------------------------------
    def _look(self, suspicion: Suspicion, deadline: float) -> Look:
        outcome, page, payload = self._read(suspicion.key, suspicion.room_bytes, deadline)
        if outcome.result is Result.MISS:
            return Look(gone=True)
        if outcome.result not in (Result.DONE, Result.DAMAGED):
            return Look(error=outcome.error or f"a load answered {outcome.result}")
        try:
            if outcome.result is Result.DONE:
                check_object(suspicion.key, page, payload, outcome.nbytes)
                return Look(sound=True)
        except DamagedObjectError as error:
            outcome = outcome._replace(error=str(error))
        if self.names_prove:
            ours = True
        else:
            ours = outcome.result is Result.DONE and outcome.nbytes >= HEADER_BYTES
            ours = ours and is_header_of(page, suspicion.key)
        return Look(evidence=evidence_of(outcome, [page, payload]), ours=ours, error=outcome.error)

    def _way_is_well(self, controls: Sequence[tuple[bytes, int]], nbytes_least: int, deadline: float) -> bool:
        """Whether an object that nobody suspects, of at least so many bytes, can be read well now. A smaller one says
        nothing about a way that cuts what is large."""
        for key, nbytes in controls:
            if nbytes < nbytes_least:
                continue
            outcome, page, payload = self._read(key, nbytes, deadline)
            if outcome.result is Result.DONE:
                try:
                    check_object(key, page, payload, outcome.nbytes)
                except DamagedObjectError:
                    continue
                return True
        return False

    def _read(self, key: bytes, room_bytes: int, deadline: float) -> tuple[Outcome, memoryview, memoryview]:
        memory = _memory(max(HEADER_BYTES, room_bytes))
        page, payload = memory[:HEADER_BYTES], memory[HEADER_BYTES:]
        items = [LoadItem(key, [page, payload])]
        (outcome,) = call_batch(self._adapter.load, items, deadline, self._stopping, LOAD_RESULTS)
        return outcome, page, payload

    def _set_aside(self, pairs: Sequence[tuple[bytes, str]], deadline: float) -> Sequence[Outcome]:
        keys, versions = [key for key, _ in pairs], [version for _, version in pairs]
        return self._adapter.set_aside(keys, deadline, *((versions,) if all(versions) else ()))


def _memory(nbytes: int) -> memoryview:
    """Page-aligned, and not there until it is touched."""
    return memoryview(mmap.mmap(-1, max(1, nbytes)))[:nbytes]
