"""Leases as context managers: views on the pool for as long as the lease lives."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Iterable, Sequence
from types import TracebackType
from typing import Any, ClassVar, Self

import xxhash

from lmcache_core.client.channel import expect
from lmcache_core.client.copying import tensor_of
from lmcache_core.client.link import Link
from lmcache_core.client.links import Links
from lmcache_core.client.results import Status, grant_statuses, miss_reasons, settled_statuses
from lmcache_core.errors import CacheError, ClearedError, DisconnectedError, LeaseExpiredError, UsageError
from lmcache_core.kernel.answers import Reason
from lmcache_core.limits import BATCH_KEYS_MAX
from lmcache_core.pool.mapping import Mapping
from lmcache_core.protocol import messages as m
from lmcache_core.protocol.codec import join_keys, pack_positions, unpack_u64
from lmcache_core.tokens.namespace import Namespace

_ZERO = array("Q", [0])
_LOST: dict[type[CacheError], Status] = {
    DisconnectedError: Status.UNREACHABLE,
    LeaseExpiredError: Status.EXPIRED,
    ClearedError: Status.CLEARED,
}


class Lease(ABC):
    """A batch of slots. Positions count the keys that were asked for; those not granted have no view.

    Views and tensors die with the lease: a view raises `ValueError` afterwards, a tensor is empty.
    """

    _let_go: ClassVar[type[m.Settle]]  # what ends a position that nothing else has ended

    def __init__(self, links: Links, namespace: Namespace) -> None:
        self._links = links
        self._namespace = namespace
        self._link: Link | None = None
        self.id = 0
        self.statuses: list[Status] = []
        self.reasons: list[Reason] = []
        self.expired = False  # the server said so; it waits for our answer, which is the next settling call
        self._offsets: array[int] = array("Q")
        self._checksums: array[int] = array("Q")  # of what is in the slots, 0 where it is not known
        self._unsettled: dict[int, None] = {}  # an ordered set of positions
        self._views: list[memoryview] = []
        self._tensors: list[Any] = []
        self._ended = False

    @property
    def granted(self) -> list[int]:
        """The positions that have a slot and are not settled."""
        return list(self._unsettled)

    def extend(self, make: Callable[[int, int], m.Message], count: int) -> None:
        """One more page: send `make(rid, lease id)`. A server that is gone grants nothing."""
        try:
            if self._link is None:
                self._link = self._links.current()
            self._link.bind(self._namespace)
            self._link.mapped()
            self._link.lease_opens(self)
            reply = expect(self._link.channel.call(lambda rid: make(rid, self.id)), m.Granted)
            if reply.lease:
                self.id = reply.lease
                if not self._link.lease_granted(self, self._links.open_leases):
                    raise DisconnectedError("the link was lost while this was granted")
        except DisconnectedError:
            self.add_ungranted(Status.UNREACHABLE, count)
            if self._link is not None and not self._unsettled:
                self._link.lease_ended(self)
            return
        first = len(self.statuses)
        self.statuses += grant_statuses(reply.statuses)
        self.reasons += miss_reasons(reply.reasons, count)
        self._offsets.extend(unpack_u64(reply.offsets))
        self._checksums.extend(unpack_u64(reply.checksums) if reply.checksums else _ZERO * count)
        for position in range(first, first + count):
            if self.statuses[position] is Status.GRANTED:
                self._unsettled[position] = None
        if not self._unsettled:
            self._link.lease_ended(self)

    def add_ungranted(self, status: Status, count: int) -> None:
        """Positions that nobody was asked for, or that nobody answered."""
        self.statuses += [status] * count
        self.reasons += [Reason.NONE] * count
        self._offsets.extend(_ZERO * count)
        self._checksums.extend(_ZERO * count)

    def slots(self, first: int) -> tuple[Mapping, list[tuple[int, int]]]:
        """The mapping (hold it while its address is used), and (position, offset) of every slot from `first` on."""
        assert self._link is not None
        offsets = self._offsets
        chosen = [(position, offsets[position]) for position in self._unsettled if position >= first]
        return self._link.mapped().mapping, chosen

    @abstractmethod
    def view(self, position: int) -> memoryview:
        """The bytes of the slot at this position, without a copy."""

    def tensor(self, position: int) -> Any:
        """The slot as a torch tensor of the layout, without a copy. Needs the extra `torch`; it knows no
        read-only tensors: do not write to one of a read lease."""
        whole = self._slot(position)
        tensor = tensor_of(whole, self._namespace.layout)
        self._tensors.append(tensor)
        self._views.append(whole)
        return tensor

    def _slot(self, position: int) -> memoryview:
        if self._ended:
            raise LeaseExpiredError(f"lease {self.id:x} has ended: its memory may belong to another object")
        if not 0 <= position < len(self.statuses):
            raise UsageError(f"position {position} is not in this lease of {len(self.statuses)} keys")
        if position not in self._unsettled or self._link is None:
            raise UsageError(f"position {position} has no slot: it is {self.statuses[position]}")
        return self._link.view(self._offsets[position], self._namespace.layout)

    def renew(self) -> float:
        """Ask for more time. Returns the seconds that are left now. Raises `LeaseExpiredError`."""
        reply = self._link_now().channel.call(lambda rid: m.RenewLease(rid, self.id))
        return expect(reply, m.Renewed).ttl_s

    def _link_now(self) -> Link:
        """The link to speak over: the lease's own, or a later one to the same server."""
        link = self._links.current()
        if self._link is None or link.epoch != self._link.epoch:
            raise LeaseExpiredError(f"lease {self.id:x} ended with the server that gave it")
        return link

    def _settle(self, kind: type[m.Settle], positions: Iterable[int] | None, checksums: bytes = b"") -> None:
        """Tell the server what became of positions (None: of all), and note what it answers. `checksums`: a u64 for
        each, where they are known."""
        chosen = list(self._unsettled) if positions is None else self._checked(positions)
        try:
            for first in range(0, len(chosen), BATCH_KEYS_MAX):
                page = chosen[first : first + BATCH_KEYS_MAX]
                reply = self._link_now().channel.call(
                    _settling(kind, self.id, page, checksums[8 * first : 8 * (first + len(page))])
                )
                for position, status in zip(
                    page, settled_statuses(expect(reply, m.SettledReply).outcomes), strict=True
                ):
                    self.statuses[position] = status
                    self._unsettled.pop(position, None)
        except CacheError as error:
            self.give_up(_LOST.get(type(error), Status.EXPIRED))
            raise
        if not self._unsettled:
            self.end()

    def settle_quietly(self, kind: type[m.Settle], first: int = 0, checksums: bytes = b"") -> None:
        """Settle what is left from `first` on. What came between becomes the positions' status."""
        with contextlib.suppress(CacheError):  # the positions are ours, so nothing here is the caller's mistake
            self._settle(kind, [position for position in self._unsettled if position >= first], checksums)

    def _checked(self, positions: Iterable[int]) -> list[int]:
        chosen = list(dict.fromkeys(positions))
        for position in chosen:
            if position not in self._unsettled:
                raise UsageError(f"position {position} is not open in this lease: it was not granted, or was settled")
        return chosen

    def give_up(self, status: Status) -> None:
        """Our copies have ended and the server cannot be told: a reconnect will not declare this lease."""
        for position in self._unsettled:
            self.statuses[position] = status
        self._unsettled.clear()
        self.end()

    def end(self) -> None:
        """Nothing of it is ours any more: views and tensors die."""
        self._ended = True
        self._links.open_leases.pop(self.id, None)
        if self._link is not None:
            self._link.lease_ended(self)
        for tensor in self._tensors:
            tensor.set_()
        self._tensors.clear()
        for view in self._views:
            # Somebody may still hold a slice of it: the mapping stays for that slice, the slot does not.
            with contextlib.suppress(BufferError):
                view.release()
        self._views.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._ended:
            self.settle_quietly(self._let_go)
            self.end()


class WriteLease(Lease):
    """Slots to write. What is not committed when the block ends is aborted."""

    _let_go = m.AbortStore

    def ask(self, keys: Sequence[bytes]) -> None:
        """Ask for slots for these keys: the next positions. At most one frame of them."""
        blob, namespace = join_keys(keys), self._namespace.id
        self.extend(lambda rid, lease: m.PrepareStore(rid, namespace, blob, lease), len(keys))

    def view(self, position: int) -> memoryview:
        """Writable bytes of the slot."""
        view = self._slot(position)
        self._views.append(view)
        return view

    def commit(self, positions: Sequence[int] | None = None) -> list[Status]:
        """Publish these positions (None: all that are left). The caller has written every byte of them.

        Returns the statuses of all positions of the lease. Raises `LeaseExpiredError` where the lease did not
        live until now, and `ClearedError`; then nothing of what is left was published.
        """
        self._settle(m.CommitStore, positions)
        return self.statuses

    def abort(self, positions: Sequence[int] | None = None) -> None:
        """Give these positions back unwritten (None: all that are left)."""
        self._settle(m.AbortStore, positions)


class ReadLease(Lease):
    """Slots to read. They stay as they are until the lease is finished, whatever is evicted meanwhile."""

    _let_go = m.FinishRead

    def __init__(self, links: Links, namespace: Namespace) -> None:
        super().__init__(links, namespace)
        self._keys: list[bytes] = []
        self._generations: array[int] = array("Q")  # of each key as it was granted, 0 where that cannot be told

    def ask(self, keys: Sequence[bytes], promise: int = 0, prefix: bool = True, verify: bool = False) -> None:
        """Ask to read these keys: the next positions. At most one frame of them. `verify`: for `damaged`."""
        blob, namespace = join_keys(keys), self._namespace.id
        self.extend(
            lambda rid, lease: m.PrepareRetrieve(rid, namespace, blob, lease, promise, prefix, verify), len(keys)
        )

    def watch(self, keys: Sequence[bytes]) -> None:
        """Note what stands in the slots of the page just asked for, for `finish`. Asks nobody."""
        self._keys += keys
        self._generations.extend(self._generations_of(keys, self._offsets[-len(keys) :]) if keys else ())

    def _generations_of(self, keys: Sequence[bytes], offsets: array[int]) -> array[int]:
        index = None if self._link is None else self._link.index
        layout = None if self._link is None else self._link.layout_of(self._namespace)
        if index is None or layout is None:
            return _ZERO * len(keys)
        return array("Q", index.generations(self._namespace.id, layout, list(keys), offsets))

    def _untouched(self, positions: Sequence[int]) -> bool:
        """Whether the slots at these positions hold what they held when they were granted, and did all the while."""
        if not all(position < len(self._generations) and self._generations[position] for position in positions):
            return False
        offsets = array("Q", [self._offsets[position] for position in positions])
        now = self._generations_of([self._keys[position] for position in positions], offsets)
        return now == array("Q", [self._generations[position] for position in positions])

    def damaged(self, first: int = 0) -> list[int]:
        """Positions from `first` on whose bytes do not have the checksum that they were stored with. Only what was
        asked for with `verify`, and stored with one, can be told."""
        wanted = self._checksums
        return [
            position
            for position in self._unsettled
            if position >= first
            and wanted[position]
            and xxhash.xxh3_64_intdigest(self._slot(position)) != wanted[position]
        ]

    def view(self, position: int) -> memoryview:
        """Read-only bytes of the slot."""
        whole = self._slot(position)
        view = whole.toreadonly()
        self._views += (view, whole)
        return view

    @property
    def hits(self) -> int:
        """Length of the prefix that can be read."""
        for position, status in enumerate(self.statuses):
            if status not in (Status.GRANTED, Status.HIT):
                return position
        return len(self.statuses)

    def finish(self, positions: Sequence[int] | None = None) -> None:
        """Release these positions (None: all that are left).

        Raises `DisconnectedError` or `LeaseExpiredError` where the server that kept these slots is gone and it cannot
        be shown that they still hold what they held: its successor may have emptied them while they were read, so
        nothing read under the lease can be trusted. Where the index shows it, what was read is right.
        """
        chosen = list(self._unsettled) if positions is None else self._checked(positions)
        try:
            self._settle(m.FinishRead, chosen)
        except (DisconnectedError, LeaseExpiredError):
            if not self._untouched(chosen):
                raise
            for position in chosen:
                self.statuses[position] = Status.HIT

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Finish what is left. Raises as `finish` does, unless the block raised already."""
        if not self._ended and error is None:
            self.finish()
        super().__exit__(kind, error, trace)


def _settling(kind: type[m.Settle], lease_id: int, page: Sequence[int], checksums: bytes) -> Callable[[int], m.Settle]:
    """A run of positions is said as a range: eight bytes for any number of them."""
    more = (checksums,) if checksums else ()
    if page and page[-1] - page[0] == len(page) - 1:
        return lambda rid: kind(rid, lease_id, page[0], len(page), b"", *more)
    blob = pack_positions(page)
    return lambda rid: kind(rid, lease_id, 0, 0, blob, *more)
