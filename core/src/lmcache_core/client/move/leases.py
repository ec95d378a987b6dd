"""Leases as context managers: views of the pool that are valid while the lease lives."""

from __future__ import annotations

import contextlib
import operator
from abc import ABC, abstractmethod
from array import array
from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Self

import xxhash

from lmcache_core.client.find.hits import VERIFY, Hits
from lmcache_core.client.link.channel import Pending, expect
from lmcache_core.client.link.link import Link
from lmcache_core.client.link.occupancy import PARENTS, Holding, Page, settle_page
from lmcache_core.client.link.presence import Presence
from lmcache_core.client.link.reconnecting import Links
from lmcache_core.client.move.copying import Span, checksums_of, copy_in, tensor_of
from lmcache_core.client.results import Status, grant_statuses, miss_reasons, numbers_of, settled_statuses
from lmcache_core.errors import (
    CacheError,
    DisconnectedError,
    ForgottenError,
    LeaseExpiredError,
    LimitError,
    ProtocolError,
    UsageError,
)
from lmcache_core.kernel.answers import Reason
from lmcache_core.limits import BATCH_KEYS_MAX, KEY_BYTES
from lmcache_core.pool.mapping import Mapping
from lmcache_core.protocol import messages as m
from lmcache_core.protocol.codec import join_keys
from lmcache_core.tokens.namespace import Namespace

if TYPE_CHECKING:
    from lmcache_core._native import Index

_ZERO = array("Q", [0])
Request = m.PrepareStore | m.PrepareRetrieve


def read_request(
    namespace: Namespace, keys: Sequence[bytes], promise: int, prefix: bool, verify: bool
) -> m.PrepareRetrieve:
    """Asks for slots that hold these keys. `promise`: the server's id of one that holds them, 0 for none. `verify`:
    with the checksums that are known."""
    return m.PrepareRetrieve(0, namespace.id, join_keys(keys), 0, promise, prefix, verify, identify=True)


def _position(given: Any) -> int:
    """A whole number of any numeric type. bool is refused: in a mask, `True` would be position 1."""
    if not isinstance(given, bool) and "bool" not in str(getattr(given, "dtype", "")):
        with contextlib.suppress(TypeError):
            return operator.index(given)
    raise UsageError(f"{given!r} is not a position: give whole numbers from 0 up; for a mask, the indexes of True")


class Lease(ABC):
    """A batch of slots. Positions count the requested keys; those not granted have no view.

    Views and tensors become invalid with the lease: a view raises `ValueError`, a tensor is empty. If another thread
    ends the client or its session, tensors that are still referenced, and views in use, keep their slots until they are
    dropped.
    """

    _settles_by: ClassVar[type[m.Settle]]  # ends the positions that nothing else has ended
    _traceparent = ""  # of the trace that its requests belong to

    def __init__(self, links: Links, namespace: Namespace, copying: Presence | None = None) -> None:
        """`copying`: the call that copies to or from the slots, if they are not lent to the caller."""
        self._links = links
        self._occupancy = links.occupancy
        self.namespace = namespace
        self._holding = holding = Holding(self._settles_by, copying)
        self.statuses = holding.statuses
        self._unsettled = holding.unsettled
        self.reasons: list[Reason] = []
        self._offsets: array[int] = array("Q")
        self._checksums: array[int] = array("Q")  # of the slots' content, 0 if unknown
        self.incarnations: array[int] = array("Q")  # of the readable objects, by position; 0 if there is none
        self._requested: Page | None = None  # set even if another thread has ended the holding meanwhile
        self._no_more: tuple[Status, Reason] | None = None  # the answer for further pages
        self._occupancy.open(self, holding)

    @property
    def id(self) -> int:
        """The lease's id, 0 before the server assigns one."""
        return self._holding.id

    @property
    def expired(self) -> bool:
        """Whether a notice of the server came; it waits for our answer, which is the next settling call."""
        return self._holding.expired

    @property
    def granted(self) -> list[int]:
        """Positions that have a slot and are not settled."""
        return list(self._unsettled)

    @property
    def _link(self) -> Link | None:
        return self._holding.link

    def extend(self, request: Request) -> None:
        """One more page. Without a server nothing is granted.

        Positions count through all pages, here and at the server. After a page that was refused or not answered, the
        two counts may differ, so no other page follows: it would settle the slots of other keys.
        """
        holding, count = self._holding, len(request.keys) // KEY_BYTES
        if holding.barred:
            self.add_ungranted(Status.ABORTED, Reason.NONE, count)
            return
        if self._no_more is None and holding.over:  # given up and no longer tracked: nothing may be granted
            self._no_more = Status.UNREACHABLE, Reason.NONE
        if self._no_more is not None:
            self.add_ungranted(*self._no_more, count)
            return
        self._requested = None
        try:
            link = holding.link or self._links.current()
            try:
                link.in_namespace(self.namespace, self._extend_over, link, request)
            except ForgottenError:
                if holding.id:  # only the session that owns a lease can extend it
                    raise
                link = self._links.current()  # see `Links.call`
                link.in_namespace(self.namespace, self._extend_over, link, request)
        except CacheError as error:
            self.refuse(error, count)

    def _extend_over(self, link: Link, request: Request) -> None:
        self._take(link, link.channel.wait(self.start(link, request, blocks=True)))

    def start(self, link: Link, request: Request, *, blocks: bool = False) -> Pending:
        """Request a page; returns the pending call, for `poll`. If it fails, now or later, call `refuse`. With `blocks`
        the namespace is registered."""
        holding, channel = self._holding, link.channel
        link.mapped()
        if not blocks:
            link.start_binding(self.namespace)
        self._occupancy.requesting(holding, link)
        request.lease = holding.id
        pending = channel.expecting()
        # Before the server knows of it, because an interrupt may come at any time.
        self._requested = holding.page = Page(len(self.statuses), len(request.keys) // KEY_BYTES, link, pending)
        channel.send(pending, link.traced(request, self._traceparent), blocks=blocks)
        return pending

    def poll(self, link: Link, pending: Pending) -> bool:
        """Whether the server has answered `start`; then `statuses` says what it granted."""
        reply = link.poll(self.namespace, pending)
        if reply is None:
            return False
        self._take(link, reply)
        return True

    def _take(self, link: Link, reply: m.Reply) -> None:
        """Record what the server grants. Once more after an interrupt, it changes nothing."""
        granted, page = expect(reply, m.Granted), self._requested
        if granted.lease and not self._occupancy.granted(self._holding, link, granted.lease):
            raise DisconnectedError("the link was lost while this was granted")
        if page is None:
            return
        first, count = page.first, page.count
        answered, reasons = grant_statuses(granted.statuses, count), miss_reasons(granted.reasons, count)
        offsets, checksums = numbers_of(granted.offsets, count), numbers_of(granted.checksums, count)
        incarnations = numbers_of(granted.incarnations, count)
        last = max(offsets, default=0)  # 0: none was granted
        # A copy to what is behind the mapping would end this process.
        if last and last + self.namespace.layout.nbytes > link.mapped().info.nbytes:
            raise ProtocolError(f"the server has granted a slot at {last:#x}, behind the end of its pool")
        self.statuses[first:] = answered
        self.reasons[first:] = reasons
        self._offsets[first:] = offsets
        self._checksums[first:] = checksums
        self.incarnations[first:] = incarnations
        yes = Status.GRANTED
        self._unsettled.update(dict.fromkeys([at for at, each in enumerate(answered, first) if each is yes]))
        self._holding.page = self._requested = None

    def refuse(self, error: CacheError, count: int) -> None:
        """Nothing of a page was granted, or it is given back. Raises the error if it is the caller's mistake."""
        self._occupancy.cancel_page(self._holding, self._requested)
        ended = isinstance(error, LeaseExpiredError)
        self._no_more = (Status.EXPIRED, Reason.NONE) if ended else self._links.refused(error)
        self.add_ungranted(*self._no_more, count)

    # --- for callers that must not wait ------------------------------------------------------------------------------

    @property
    def holding(self) -> Holding:
        """What the lease holds, for the occupancy."""
        return self._holding

    def tell(self, kind: type[m.Settle], positions: Sequence[int], checksums: bytes = b"") -> tuple[Link, Pending]:
        """Settle positions, at most one frame of them, without waiting for the answer. Their slots must no longer be in
        use. Raises `DisconnectedError`: then `leave` tells the server when it is reachable."""
        link = self._link
        assert link is not None
        pending = link.channel.start(settle_page(kind, self.id, positions, checksums), blocks=False)
        for position in positions:
            self._unsettled.pop(position, None)
        return link, pending

    def leave(self) -> None:
        """Give up the whole lease, and tell the server without waiting, as far as it does not know yet."""
        if self._unsettled or self._holding.page is not None:
            self._occupancy.settle(self._holding)
        else:
            self._occupancy.ended(self._holding)

    def add_ungranted(self, status: Status, reason: Reason, count: int) -> None:
        """Add positions that were not requested, or not answered."""
        self.statuses += [status] * count
        self.reasons += [reason] * count
        self._offsets.extend(_ZERO * count)
        self._checksums.extend(_ZERO * count)
        self.incarnations.extend(_ZERO * count)

    def slots(self, first: int) -> tuple[Mapping, list[tuple[int, int]]]:
        """The mapping (keep it while its address is in use), and (position, offset) of every slot from `first` on."""
        link = self._link
        assert link is not None
        offsets = self._offsets
        chosen = [(position, offsets[position]) for position in list(self._unsettled) if position >= first]
        return link.mapped().mapping, chosen

    @abstractmethod
    def view(self, position: int) -> memoryview:
        """The bytes of the slot at this position, without a copy."""

    def tensor(self, position: int) -> Any:
        """The slot as a torch tensor of the layout, without a copy. Needs the extra `torch`. Do not write to the tensor
        of a read lease: torch has no read-only tensors, so the write ends the process with SIGSEGV (after `pin_memory`,
        which registers only the writable mapping, nothing prevents it)."""
        lender = self._lent(position, fenced=self._settles_by is m.FinishRead)
        tensor = tensor_of(memoryview(lender).cast("B"), self.namespace.layout)
        self._holding.note_tensor(tensor)
        return tensor

    def _lent(self, position: int, *, fenced: bool = False) -> Any:
        """An object that lends the slot's memory. While it lives, the slot counts as occupied. `fenced`: a write to it
        faults."""
        offset = self._offset(position)
        link = self._link
        assert link is not None
        lender = link.mapped().slot(offset, self.namespace.layout.nbytes, fenced=fenced)
        return self._occupancy.lend(self._holding, lender)

    def _offset(self, position: int) -> int:
        self._holding.check_lent()
        position = _position(position)
        if not 0 <= position < len(self.statuses):
            raise UsageError(f"position {position} is not in this lease of {len(self.statuses)} keys")
        if position not in self._unsettled:
            raise UsageError(f"position {position} has no slot: it is {self.statuses[position]}")
        return self._offsets[position]

    def renew(self) -> float:
        """Ask for more time. Returns the seconds that are left now. Raises `LeaseExpiredError`, also for a lease that
        the server does not know: an optimistic one, or one without a server."""
        if not self.id:
            raise LeaseExpiredError("the server holds nothing for this lease: there is nothing to renew")
        reply = self._link_now().channel.call(m.RenewLease(0, self.id))
        return expect(reply, m.Renewed).ttl_s

    def _link_now(self) -> Link:
        """The link to use: the lease's own, or a later one to the same server."""
        holding = self._holding
        if holding.barred == PARENTS:
            raise LeaseExpiredError(f"lease {self.id:x} has ended: {PARENTS}")
        link = holding.link
        if link is None or link.channel.found_lost():
            try:
                before, link = link, self._links.current()
            except LimitError as error:  # meant for a call that asks for slots, not for one that gives some back
                raise DisconnectedError(str(error)) from error
            if before is None or link.epoch != before.epoch:
                raise LeaseExpiredError(f"lease {self.id:x} ended with the server that gave it")
        return link

    def _settle(self, kind: type[m.Settle], chosen: Sequence[int], checksums: bytes = b"") -> None:
        """Tell the server what became of these positions, which are open and ascending, and record its answers.
        `checksums`: a u64 for each, if known."""
        try:
            for first in range(0, len(chosen), BATCH_KEYS_MAX):
                page = chosen[first : first + BATCH_KEYS_MAX]
                reply = self._link_now().channel.call(
                    settle_page(kind, self.id, page, checksums[8 * first : 8 * (first + len(page))])
                )
                answers = settled_statuses(expect(reply, m.SettledReply).outcomes, len(page))
                if page[-1] - page[0] == len(page) - 1:
                    self.statuses[page[0] : page[-1] + 1] = answers
                else:
                    for position, status in zip(page, answers, strict=True):
                        self.statuses[position] = status
                forget = self._unsettled.pop
                for position in page:
                    forget(position, None)
        except CacheError as error:
            self.settle_after(error)
            raise
        # A call that copies page by page ends the holding itself, because its later pages are tracked, too.
        if not self._unsettled and self._holding.page is None and self._holding.copying is None:
            self.end()

    def settle_quietly(self, kind: type[m.Settle], first: int = 0, checksums: bytes = b"") -> None:
        """Settle what is left from `first` on. Errors become the positions' status."""
        with contextlib.suppress(CacheError):  # the positions are ours, so no error here is the caller's mistake
            self._settle(kind, [position for position in list(self._unsettled) if position >= first], checksums)

    def _chosen(self, positions: Iterable[int] | None) -> list[int]:
        """The open positions that the caller has named (None: all), ascending and unique, because runs of them are sent
        as ranges."""
        if positions is None:
            return list(self._unsettled)
        try:
            named = iter(positions)
        except TypeError:  # also for an array without dimensions, which claims to be iterable
            kind = type(positions).__name__
            raise UsageError(f"positions is a {kind}: give a list of positions, or None for all") from None
        chosen = {each if type(each) is int else _position(each) for each in named}
        for position in chosen:
            if position not in self._unsettled:
                if self._holding.barred and 0 <= position < len(self.statuses):  # another thread ended it
                    raise LeaseExpiredError(f"lease {self.id:x} has ended: {self._holding.barred}")
                raise UsageError(f"position {position} is not open in this lease: it was not granted, or was settled")
        return sorted(chosen)

    def settle_after(self, error: CacheError) -> None:
        """Our copies have ended, and reporting that failed. If the server has not ended the lease by itself, tell it
        what is left, without waiting; a reconnect will not declare the lease."""
        left = list(self._unsettled)
        status = Status.UNREACHABLE if isinstance(error, DisconnectedError) else Status.EXPIRED
        self._no_more = status, Reason.NONE
        if not isinstance(error, LeaseExpiredError):
            self._occupancy.settle(self._holding)
        self.end()
        for position in left:
            self.statuses[position] = status

    def end(self) -> None:
        """Give up the whole lease: views and tensors become invalid."""
        holding = self._holding
        self._occupancy.ended(holding)
        if holding.tensors:
            holding.empty_tensors()
        if holding.views:  # a slice may still be referenced: the mapping stays for it, the slot does not
            holding.release_views()

    def close(self) -> None:
        """End the lease: uncommitted positions are aborted, unfinished ones are finished. Idempotent."""
        if not self._holding.over:
            if self._holding.page is None:
                self.settle_quietly(self._settles_by)
            else:  # the lease does not know yet what it was granted
                self._occupancy.settle(self._holding)
            self.end()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class WriteLease(Lease):
    """Slots to write. Positions that are not committed when the block ends are aborted."""

    _settles_by = m.AbortStore

    def __init__(
        self,
        links: Links,
        namespace: Namespace,
        copying: Presence | None = None,
        *,
        threads: int = 1,
        traceparent: str = "",
    ) -> None:
        """`threads`: how many may copy, or compute checksums. `traceparent`: of the trace that `ask` belongs to."""
        super().__init__(links, namespace, copying)
        self._threads = threads
        self._traceparent = traceparent

    def ask(self, keys: Sequence[bytes]) -> None:
        """Ask for slots for these keys: the next positions. At most one frame of them."""
        self.extend(m.PrepareStore(0, self.namespace.id, join_keys(keys)))

    def fill(self, first: int, found: Sequence[Span]) -> None:
        """Copy the caller's objects into the slots from `first` on, and publish them. Errors become the positions'
        status."""
        if self._unsettled:
            mapping, slots = self.slots(first)
            checksums = copy_in(
                mapping.address, slots, found, self.namespace.layout, threads=self._threads, checksums=True
            )
            self.settle_quietly(m.CommitStore, first, checksums)

    def view(self, position: int) -> memoryview:
        """Writable bytes of the slot."""
        return self._holding.note_view(memoryview(self._lent(position)).cast("B"))

    def commit(self, positions: Sequence[int] | None = None, *, checksums: bool = True) -> list[Status]:
        """Publish these positions (None: all that are left). The caller has written every byte of them.

        Checksums are computed from the slots: one more pass over the bytes, at the speed of reading memory, by the
        client's `copy_threads`. Without `checksums` nobody can verify the objects: readers with `verify="always"` do
        not get them, and a later server does not adopt them.

        Returns the statuses of all positions of the lease. Raises `LeaseExpiredError` if the lease has ended before
        now; then nothing of the rest was published.
        """
        chosen = self._chosen(positions)
        self._settle(m.CommitStore, chosen, self._sums(chosen) if checksums and not self._holding.over else b"")
        return self.statuses

    def _sums(self, positions: Sequence[int]) -> bytes:
        if not positions:
            return b""
        self._holding.check_lent()
        offsets, link = self._offsets, self._link
        assert link is not None
        # Nothing is lent for this. If another thread ends the lease meanwhile, the bytes may become another object's,
        # but then the commit fails. The mapping stays as long as it is referenced here.
        mapping = link.mapped().mapping
        base = mapping.address
        addresses = array("Q", [base + offsets[position] for position in positions])
        return checksums_of(addresses, self.namespace.layout.nbytes, self._threads)

    def abort(self, positions: Sequence[int] | None = None) -> None:
        """Give these positions back without publishing them (None: all that are left)."""
        self._settle(m.AbortStore, self._chosen(positions))


class Readable(NamedTuple):
    """Slots to copy out, (position, offset) each. `checksums`: what each copy must have, 0 if it needs no check, or it
    is unknown. `unverifiable`: positions that are left out, because nobody can check them."""

    mapping: Mapping
    slots: list[tuple[int, int]]
    checksums: array[int]
    unverifiable: list[int]


class _Indexed(NamedTuple):
    """An object as the index has it; all 0: nowhere. `checksum`: what each reader has to find, 0 if nothing."""

    offset: int
    incarnation: int
    checksum: int


class ReadLease(Lease):
    """Slots to read. They do not change until the lease is finished, whatever is evicted meanwhile.

    An optimistic one (see `find`) holds nothing: its slots may get another object while they are read, and `finish`
    says which did.
    """

    _settles_by = m.FinishRead

    def __init__(self, links: Links, namespace: Namespace, copying: Presence | None = None) -> None:
        super().__init__(links, namespace, copying)
        self._keys: list[bytes] = []
        self._generations: array[int] = array("Q")  # of each key when it was granted, 0 if unknown
        self._optimistic = False

    def ask(self, keys: Sequence[bytes], promise: int = 0, prefix: bool = True, verify: bool = False) -> None:
        """Ask to read these keys: the next positions. At most one frame of them. `verify`: for `damaged`."""
        self.extend(read_request(self.namespace, keys, promise, prefix, verify))

    def find(self, hits: Hits, keys: Sequence[bytes], prefix: bool) -> bool:
        """Take the slots of these keys, all of the lease, from the index, without a call. False: there is no usable
        index, or some object is not what its store had, which the server has to hear."""
        found, link = hits.find(keys, self.namespace, prefix, mark=True), self._links.look()
        where = None if link is None else link.searched(self.namespace)
        if found is None or link is None or where is None:
            return False
        index, layout = where
        entries = [self._entry_in(index, key, layout) for key in keys[: len(found)]]
        if not all(self._is_whole(link, entry) for entry in entries):
            return False
        try:
            self._occupancy.requesting(self._holding, link)
        except DisconnectedError:  # another thread has just made the next link, so a server can be asked
            return False
        self._optimistic = True
        self._offsets = array("Q", [entry.offset for entry in entries])
        seen = [entry.incarnation for entry in entries] + [0] * (len(keys) - len(entries))
        self.watch(keys[: len(found)])
        there = [bool(generation) for generation in self._generations]
        if prefix and not all(there):  # it has left since it was found
            there = there[: there.index(False)]
        there += [False] * (len(keys) - len(there))
        self._offsets.extend(_ZERO * (len(keys) - len(self._offsets)))
        self.statuses += [Status.GRANTED if each else Status.MISS for each in there]
        self.reasons += [Reason.NONE] * len(keys)
        self._unsettled.update(dict.fromkeys(at for at, each in enumerate(there) if each))
        self.incarnations = array("Q", [number if each else 0 for number, each in zip(seen, there, strict=True)])
        index.count_read(sum(there), self.namespace.layout.nbytes)
        return True

    def _entry_in(self, index: Index, key: bytes, layout: int) -> _Indexed:
        """Where the object of a key is. It may be gone by now: `watch` checks again."""
        entry = index.entry(self.namespace.id, bytes(key))
        if entry is None or entry["layout"] != layout or entry["nbytes"] != self.namespace.layout.nbytes:
            return _Indexed(0, 0, 0)
        wanted = entry["checksum"] or 0 if entry["unverified"] else 0
        return _Indexed(int(entry["offset"]), int(entry["incarnation"]), int(wanted))

    def _is_whole(self, link: Link, entry: _Indexed) -> bool:
        """Whether its bytes are those of its store, if that is to be asked: of a pool that was adopted."""
        if not entry.checksum:
            return True
        slot = link.mapped().view(entry.offset, self.namespace.layout.nbytes)
        return xxhash.xxh3_64_intdigest(slot) == entry.checksum

    def watch(self, keys: Sequence[bytes]) -> None:
        """Note what the slots of the last page contain, for `finish`. Makes no call."""
        watched = list(map(bytes, keys))
        self._keys += watched
        self._generations.extend(self._generations_of(watched, self._offsets[-len(watched) :]) if watched else ())

    def _generations_of(self, keys: list[bytes], offsets: array[int]) -> array[int]:
        link = self._holding.link
        where = None if link is None else link.searched(self.namespace)
        if where is None or not keys:
            return _ZERO * len(keys)
        index, layout = where
        return array("Q", index.generations(self.namespace.id, layout, keys, offsets))

    def untouched(self, positions: Sequence[int]) -> list[bool]:
        """For each of these: whether its slot provably held the same object since it was granted. Makes no call."""
        granted = [self._generations[at] if at < len(self._generations) else 0 for at in positions]
        known = [at for at, generation in zip(positions, granted, strict=True) if generation]
        offsets = array("Q", [self._offsets[at] for at in known])
        now = dict(zip(known, self._generations_of([self._keys[at] for at in known], offsets), strict=True))
        return [bool(generation) and now[at] == generation for at, generation in zip(positions, granted, strict=True)]

    def _untouched(self, positions: Sequence[int]) -> bool:
        """Whether the slots at these positions held the same objects since they were granted."""
        if not all(position < len(self._generations) and self._generations[position] for position in positions):
            return False
        offsets = array("Q", [self._offsets[position] for position in positions])
        now = self._generations_of([self._keys[position] for position in positions], offsets)
        return now == array("Q", [self._generations[position] for position in positions])

    def damaged(self, first: int = 0) -> list[int]:
        """Positions from `first` on whose bytes do not have the checksum of the store. Only objects stored with a
        checksum can be judged, and requested with `verify` or adopted."""
        wanted, link, nbytes = self._checksums, self._link, self.namespace.layout.nbytes
        assert link is not None
        return [
            position
            for position in list(self._unsettled)
            if position >= first
            and wanted[position]
            and xxhash.xxh3_64_intdigest(link.mapped().view(self._offsets[position], nbytes)) != wanted[position]
        ]

    def drop_damaged(self, first: int) -> None:
        """Check the objects that the server wants checked, and turn damaged ones into misses."""
        if any(self._checksums[first:]) and (damaged := self.damaged(first)):
            self.report_damaged(damaged)

    def readable(self, first: int, verify: int) -> Readable:
        """What may be copied of the positions from `first` on. `verify`: see `hits.VERIFY`."""
        mapping, slots = self.slots(first)
        without = [at for at, _ in slots if not self._checksums[at]] if verify == VERIFY["always"] else []
        if without:
            slots = [slot for slot in slots if self._checksums[slot[0]]]
        return Readable(mapping, slots, array("Q", [self._checksums[at] for at, _ in slots]), without)

    def report_damaged(self, positions: Sequence[int]) -> None:
        """Release these as misses, and have the server delete the objects that they hold. Without a server, the next
        reader finds them again."""
        with contextlib.suppress(CacheError):
            self._settle(m.ReportDamaged, self._chosen(positions))
        self._miss(positions, Reason.DAMAGED)

    def release(self, first: int, damaged: Sequence[int], unverifiable: Sequence[int]) -> None:
        """Release everything from `first` on: these as misses. Errors become the positions' status."""
        if damaged:
            self.report_damaged(damaged)
        self.settle_quietly(m.FinishRead, first)
        self._miss(unverifiable, Reason.UNVERIFIABLE)

    def _miss(self, positions: Sequence[int], reason: Reason) -> None:
        for at in positions:
            self.statuses[at], self.reasons[at] = Status.MISS, reason

    def view(self, position: int) -> memoryview:
        """Read-only bytes of the slot."""
        return self._holding.note_view(memoryview(self._lent(position)).cast("B").toreadonly())

    @property
    def hits(self) -> int:
        """Length of the prefix that can be read."""
        granted, hit = Status.GRANTED, Status.HIT  # in Python 3.11 looking up an enum member takes 0.15 µs
        for position, status in enumerate(self.statuses):
            if status is not granted and status is not hit:
                return position
        return len(self.statuses)

    def _settle(self, kind: type[m.Settle], chosen: Sequence[int], checksums: bytes = b"") -> None:
        if not self._optimistic:
            super()._settle(kind, chosen, checksums)
            return
        for position in chosen:
            self.statuses[position] = Status.HIT if self._untouched([position]) else Status.MISS
            self._unsettled.pop(position, None)  # another thread may have finished it, too
        if not self._unsettled:
            self.end()

    def finish(self, positions: Sequence[int] | None = None) -> list[Status]:
        """Release these positions (None: all that are left). Returns the statuses of all positions of the lease; for an
        optimistic one `MISS` if the object left the pool while it was read, so that the bytes cannot be trusted.

        Raises `DisconnectedError` or `LeaseExpiredError` if the server that held these slots is gone and the index
        cannot prove that they are unchanged: its successor may have reused them while they were read, so nothing read
        under the lease can be trusted. If the index proves it, the bytes are right.
        """
        chosen = self._chosen(positions)
        try:
            self._settle(m.FinishRead, chosen)
        except (DisconnectedError, LeaseExpiredError):
            if not self._untouched(chosen):
                raise
            for position in chosen:
                self.statuses[position] = Status.HIT
        return self.statuses

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Finish what is left. Raises like `finish`, unless the block has already raised; for an optimistic lease also
        `LeaseExpiredError` if bytes that were read cannot be trusted."""
        if not self._holding.over and error is None:
            read = list(self._unsettled)
            self.finish()
            gone = [position for position in read if self.statuses[position] is not Status.HIT]
            if gone:
                raise LeaseExpiredError(
                    f"positions {gone[:8]} left the pool while they were read: do not use the bytes read there"
                )
        super().__exit__(kind, error, trace)
