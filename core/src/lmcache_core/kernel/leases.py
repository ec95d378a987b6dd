"""Leases: numbered permissions with a deadline, and the book of them.

A lease's id is its fencing token: boot epoch and counter, never used twice. Positions count through all pages of a
lease. The book has the open leases, remembers settled ones for a while, and knows the next deadline.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterable, Sequence

from lmcache_core.errors import LeaseExpiredError, UsageError
from lmcache_core.kernel.answers import LeaseKind, LeaseStatus, Settled
from lmcache_core.kernel.ledger import Account, Sort
from lmcache_core.kernel.objects import Incarnation
from lmcache_core.kernel.sessions import KernelSession
from lmcache_core.kernel.states import State
from lmcache_core.kernel.undo import Undo

COUNTER_BITS = 40  # a million leases a second for twelve days, below 24 bits of boot epoch
STALE_DEADLINES_KEPT = 64  # a heap this small is not worth cleaning
REMEMBERED_BYTES_MAX = 16 << 20  # answers of settled leases: one byte per position

_OPEN, _NOT_HELD = int(Settled.OPEN), int(Settled.NOT_HELD)
_NOT_HELD_BYTE = bytes((_NOT_HELD,))
# Measured; `core/tests/protocol/test_memory_ledger.py` holds them.
LEASE_BYTES = 550  # of an open lease, with its places in tables
POSITION_BYTES = 9  # a reference and a byte
SETTLED_BYTES = 430  # of a settled lease that is remembered, besides a byte for each position


class KernelLease:
    """A permission for a batch of slots: `entries[i]` is what position i holds, `answers[i]` its `Settled`.

    Both end at the last page that granted something. The positions behind it hold nothing, and cost nothing.
    """

    __slots__ = (
        "_pending",
        "account",
        "answers",
        "charged_bytes",
        "deadline",
        "entries",
        "expired",
        "id",
        "kept_bytes",
        "kind",
        "live",
        "namespace",
        "overdue_to",
        "positions",
        "queued",
        "session",
        "slot_bytes",
        "ttl_s",
        "written",
    )  # fmt: skip

    def __init__(
        self,
        lease_id: int,
        kind: LeaseKind,
        session: KernelSession,
        namespace: int,
        live: State,
        ttl_s: float,
        now: float,
    ) -> None:
        self.id = lease_id
        self.kind = kind
        self.session = session
        self.namespace = namespace
        self.live = live  # the state of what it writes: WRITING or LOADING; READY for reads and promises
        self.ttl_s = ttl_s
        self.deadline = now + ttl_s
        self.entries: list[Incarnation | None] = []
        self.answers = bytearray()
        self.positions = 0
        self.kept_bytes = 0  # of the server's memory, charged to its session
        self._pending = 0
        self.slot_bytes = 0  # of what it holds: a namespace has one layout
        self.written = session.written if kind is LeaseKind.WRITE else None
        self.expired = False
        self.charged_bytes = 0  # its share of the quarantine
        self.overdue_to = 0  # positions before this one are in quarantine, because the lease has expired
        self.account: Account | None = None  # the ledger's account that is charged with what it keeps from eviction
        if kind is not LeaseKind.WRITE:
            self.account = session.accounts[self.account_sort]
        self.queued = False  # its deadline is in the book's heap

    @property
    def pending(self) -> int:
        """Positions that it holds still. What a write lease holds is charged to its holder here, and nowhere else."""
        return self._pending

    @pending.setter
    def pending(self, count: int) -> None:
        if self.written is not None:
            self.written.nbytes += (count - self._pending) * self.slot_bytes
        self._pending = count

    @property
    def account_sort(self) -> Sort:
        return Sort.READ if self.kind is LeaseKind.READ else Sort.PROMISED

    def add_page(self, entries: list[Incarnation | None], granted: int) -> None:
        if not granted:
            self.positions += len(entries)
            return
        if len(self.answers) < self.positions:
            self._fill()
        self.positions += len(entries)
        self.entries += entries
        if not self.slot_bytes:
            self.slot_bytes = next(item.nbytes for item in entries if item is not None)
        self.pending += granted
        if granted == len(entries):
            self.answers += bytes((_OPEN,)) * granted
        else:
            self.answers += bytes([_NOT_HELD if item is None else _OPEN for item in entries])

    def hold_at(self, at: int, item: Incarnation) -> None:
        """Hold one more object, at a position that held nothing."""
        if at >= len(self.answers):
            self._fill()
        self.entries[at] = item
        self.answers[at] = _OPEN
        self.slot_bytes = item.nbytes
        self.pending += 1

    def _fill(self) -> None:
        """Keep an entry for every position."""
        missing = self.positions - len(self.answers)
        self.entries += [None] * missing
        self.answers += bytes((_NOT_HELD,)) * missing

    def settle(self, positions: Sequence[int] | None, answer: Settled) -> tuple[list[Incarnation], list[int]]:
        """Settle the positions (None: all). Returns the objects that they still held, and where those stood.

        They get `answer`; positions that were settled before keep their first answer.
        """
        count = len(self.answers)
        if positions is None:
            positions = range(count)
        self.check_positions(positions)
        entries, answers = self.entries or [None] * count, self.answers
        if isinstance(positions, range) and positions.step == 1:  # a page, or all of it: a slice is enough
            first, end = positions.start, positions.stop
            page = entries[first:end]
            settled = [item for item in page if item is not None]
            if len(settled) == len(page):
                where = list(range(first, first + len(page)))
            else:
                where = [at for at, item in enumerate(page, first) if item is not None]
            entries[first:end] = [None] * len(page)
            answers[first:end] = answers[first:end].replace(bytes((_OPEN,)), bytes((answer,)))
        else:
            settled, where = [], []
            for at in positions:
                item = entries[at] if at < count else None
                if item is not None:
                    entries[at] = None
                    answers[at] = answer
                    settled.append(item)
                    where.append(at)
        self.pending -= len(settled)
        return settled, where

    def settle_all(self, answer: Settled) -> list[Incarnation | None]:
        """Settle everything that it still holds, without looking at it. Returns it by position, to be released in
        steps."""
        entries, self.entries = self.entries, []
        self.answers = self.answers.replace(bytes((_OPEN,)), bytes((answer,)))
        self.pending = 0
        return entries

    def check_positions(self, positions: Sequence[int]) -> None:
        """Raise `UsageError` naming a position that the lease does not have."""
        if positions:
            ends = (positions[0], positions[-1]) if isinstance(positions, range) else positions
            lowest, highest, count = min(ends), max(ends), self.positions
            if lowest < 0 or highest >= count:
                at = lowest if lowest < 0 else highest
                raise UsageError(f"position {at} is not in lease {self.id:#x}, which has {count}: count from 0")

    def answered(self, positions: Sequence[int] | None) -> bytearray:
        """The answer of each position asked for; None: of every position."""
        answers = self.answers
        if positions is None:
            positions = range(self.positions)
        if isinstance(positions, range) and positions.step == 1:
            found = answers[positions.start : positions.stop]
            return found.ljust(len(positions), _NOT_HELD_BYTE)
        count = len(answers)
        return bytearray([answers[at] if at < count else _NOT_HELD for at in positions])

    def status(self) -> LeaseStatus:
        return LeaseStatus(self.id, self.kind, self.pending > 0, self.expired, self.deadline, self.answered(None))


class LeaseBook:
    """All leases: open ones by id, settled ones for a while, deadlines in order."""

    def __init__(self, epoch: int, remembered_max: int, undo: Undo) -> None:
        self._undo = undo
        self.first_id = self._next_id = (epoch << COUNTER_BITS) + 1
        self.by_id: dict[int, KernelLease] = {}
        self.settled: dict[int, KernelLease] = {}
        self._settled_order: deque[KernelLease] = deque()
        self.settled_bytes = 0
        self._settled_max = remembered_max
        self._deadlines: list[tuple[float, int, KernelLease]] = []
        self._stale_deadlines = 0
        self.by_kind = [0] * len(LeaseKind)
        self.stale = 0  # refused: of another session, or too late

    @property
    def remembered_bytes(self) -> int:
        """Bytes of memory of the settled leases."""
        return SETTLED_BYTES * len(self.settled) + self.settled_bytes

    def new_id(self) -> int:
        lease_id = self._next_id
        self._next_id += 1
        return lease_id

    def open(self, lease: KernelLease) -> None:
        self._undo.add((self._unopen, (lease,)))
        self._open(lease)

    def _open(self, lease: KernelLease) -> None:
        self.by_id[lease.id] = lease
        lease.session.leases[lease.id] = lease
        self.by_kind[lease.kind] += 1
        lease.kept_bytes = nbytes = LEASE_BYTES + POSITION_BYTES * len(lease.answers)
        lease.session.memory.charge(nbytes)
        self._push(lease)

    @staticmethod
    def room_for(session: KernelSession, lease: KernelLease | None, keys: int) -> None:
        """Raise `LimitError` if the session has no room for another page of its lease, or (None) for another lease."""
        if lease is None:
            session.may_keep(LEASE_BYTES + POSITION_BYTES * keys)
        else:
            nbytes = LEASE_BYTES + POSITION_BYTES * (lease.positions + keys)
            session.may_keep(nbytes - lease.kept_bytes)

    @staticmethod
    def _charge(lease: KernelLease) -> None:
        """Charge what the open lease costs now."""
        nbytes = LEASE_BYTES + POSITION_BYTES * len(lease.answers)
        lease.session.memory.charge(nbytes - lease.kept_bytes)
        lease.kept_bytes = nbytes

    @staticmethod
    def _uncharge(lease: KernelLease) -> None:
        """It is not open any more."""
        lease.session.memory.charge(-lease.kept_bytes)
        lease.kept_bytes = 0

    def move(self, lease: KernelLease, session: KernelSession) -> None:
        """Another session of its holder owns it from now on."""
        nbytes, former = lease.kept_bytes, lease.session
        former.memory.charge(-nbytes)
        session.memory.charge(nbytes)
        if former.leases.pop(lease.id, None) is not None:
            session.leases[lease.id] = lease
        lease.session = session

    def _unopen(self, lease: KernelLease) -> None:
        """It was never answered."""
        if self.by_id.pop(lease.id, None) is not None:
            lease.session.leases.pop(lease.id, None)
            self.by_kind[lease.kind] -= 1
            self._uncharge(lease)
            self._stale_deadlines += lease.queued
            lease.entries, lease.pending = [], 0

    def _reopen(self, lease: KernelLease) -> None:
        """A settled lease holds something again."""
        if self.settled.pop(lease.id, None) is not None:
            self.settled_bytes -= len(lease.answers)
        lease.entries = [None] * len(lease.answers)
        self._open(lease)

    def extend(self, lease: KernelLease, entries: list[Incarnation | None], granted: int) -> None:
        """Add a page. A lease whose earlier pages are all settled opens again if this one grants something."""
        self._undo.add((self._shrink, (lease, lease.positions, lease.pending)))
        if granted and not lease.pending:
            self._reopen(lease)
        lease.add_page(entries, granted)
        if granted:
            self._charge(lease)

    def _shrink(self, lease: KernelLease, positions: int, pending: int) -> None:
        """Without the page that was added and never answered."""
        lease.positions = positions
        del lease.entries[positions:], lease.answers[positions:]
        lease.pending = pending
        if lease.id in self.by_id:
            if pending:
                self._charge(lease)
            else:
                self.close(lease)

    def take_over(self, lease: KernelLease, lease_id: int, positions: Sequence[int]) -> None:
        """Move what the lease with that id holds (it was never answered) to this one, at `positions`, which held
        nothing. A settled lease opens again."""
        other = self.by_id.get(lease_id)
        if other is None:
            return  # nothing was granted
        held = [(at, item) for at, item in zip(positions, other.entries, strict=True) if item is not None]
        other.answers = bytearray((_NOT_HELD,)) * len(other.answers)
        other.pending = 0
        self.close(other)
        if not lease.pending:
            self._reopen(lease)
        for at, item in held:
            lease.hold_at(at, item)
        self._charge(lease)

    def settle(
        self, lease: KernelLease, positions: Sequence[int] | None, answer: Settled
    ) -> tuple[list[Incarnation], list[int]]:
        """As `KernelLease.settle`; a lease that holds nothing more is closed. The caller lets go of what it held, and
        then says `keep`."""
        settled, where = lease.settle(positions, answer)
        if settled:
            self._undo.add((self._unsettle, (lease, settled, where)))
            if not lease.pending:
                self.close(lease)
        return settled, where

    def _unsettle(self, lease: KernelLease, settled: list[Incarnation], where: list[int]) -> None:
        if lease.id not in self.by_id:
            self._reopen(lease)
        for at, item in zip(where, settled, strict=True):
            lease.hold_at(at, item)

    def settle_all(self, lease: KernelLease, answer: Settled) -> list[Incarnation | None]:
        """As `KernelLease.settle_all`, and close it."""
        entries = lease.settle_all(answer)
        self.close(lease)
        return entries

    def close(self, lease: KernelLease) -> None:
        """Everything is settled: remember the answers for a while."""
        del self.by_id[lease.id]
        del lease.session.leases[lease.id]
        self.by_kind[lease.kind] -= 1
        self._uncharge(lease)
        if lease.queued:
            self._stale_deadlines += 1
            self._sift()
        self.remember(lease)

    def remember(self, lease: KernelLease) -> None:
        lease.entries = []
        self.settled[lease.id] = lease
        self._settled_order.append(lease)
        self.settled_bytes += len(lease.answers)
        while len(self._settled_order) > self._settled_max or self.settled_bytes > REMEMBERED_BYTES_MAX:
            oldest = self._settled_order.popleft()
            if self.settled.pop(oldest.id, None) is not None:  # None: it was reopened meanwhile
                self.settled_bytes -= len(oldest.answers)

    def find(self, session: KernelSession, lease_id: int, kind: LeaseKind | None) -> KernelLease:
        """The session's lease with that id, open or remembered. Otherwise counts it and raises `LeaseExpiredError`."""
        lease = self.of_session(session, lease_id)
        if lease is None:
            raise self.refusal(
                f"lease {lease_id:#x} is not session {session.id}'s, or was settled long ago: prepare again"
            )
        if kind is not None and lease.kind is not kind:
            raise UsageError(
                f"lease {lease_id:#x} is a {lease.kind.name} lease and this call settles {kind.name} leases"
            )
        return lease

    def of_session(self, session: KernelSession, lease_id: int) -> KernelLease | None:
        """The session's lease with that id, open or remembered; None if there is none."""
        lease = self.by_id.get(lease_id) or self.settled.get(lease_id)
        return lease if lease is not None and lease.session is session else None

    def find_open(self, lease_id: int) -> KernelLease | None:
        """The open lease with that id, of any session."""
        return self.by_id.get(lease_id)

    def find_promise(self, promise_id: int, namespace: int) -> KernelLease | None:
        """A promise that any session of its namespace may redeem; None if it is gone, which is counted."""
        promise = self.by_id.get(promise_id)
        if promise is not None and promise.kind is LeaseKind.PROMISE and promise.namespace == namespace:
            return promise
        if promise_id not in self.settled:  # otherwise another rank of the same request redeemed it
            self.stale += 1
        return None

    def refusal(self, message: str) -> LeaseExpiredError:
        self.stale += 1
        return LeaseExpiredError(message)

    def renew(self, lease: KernelLease, now: float) -> None:
        if lease.written is not None and lease.written.room < 0:
            return  # its holder has more open than its share, now that others have come
        # The heap keeps the old deadline; `due` checks the lease and puts it back.
        lease.deadline = max(lease.deadline, now + lease.ttl_s)

    # --- deadlines ------------------------------------------------------------------------------------------

    def next_deadline(self) -> float | None:
        """When `due` may have something. It may be too early, never too late."""
        return self._deadlines[0][0] if self._deadlines else None

    def due(self, now: float, leases_max: int) -> Iterable[KernelLease]:
        """Open leases whose time is up, a few at a time. Each is given once and marked expired."""
        heap = self._deadlines
        while heap and heap[0][0] <= now and leases_max > 0:
            leases_max -= 1
            lease = heapq.heappop(heap)[2]
            lease.queued = False
            if lease.id not in self.by_id:
                self._stale_deadlines -= 1
            elif lease.deadline > now:
                self._push(lease)
            else:
                lease.expired = True
                yield lease

    def _push(self, lease: KernelLease) -> None:
        if lease.queued:  # it was settled, and reopened before its old deadline passed
            self._stale_deadlines -= 1
        else:
            lease.queued = True
            heapq.heappush(self._deadlines, (lease.deadline, lease.id, lease))

    def _sift(self) -> None:
        # Settled leases leave the heap once they outnumber the open ones: O(1) per lease over time.
        if self._stale_deadlines > STALE_DEADLINES_KEPT and self._stale_deadlines * 2 > len(self._deadlines):
            kept = []
            for entry in self._deadlines:
                lease = entry[2]
                lease.queued = lease.id in self.by_id
                if lease.queued:
                    kept.append(entry)
            heapq.heapify(kept)
            self._deadlines[:] = kept  # in place: `due` may be walking it
            self._stale_deadlines = 0
