"""Work that was decided at once and is done in steps: releasing slots and holds of settled or overdue leases.

One lease may have a million positions, and a dying worker may have thousands of leases. So a lease that ends is settled
in the book at once, with all its answers; nobody can ask for it any more. Its objects come here and are released in
bounded steps. Until then a slot that was being written belongs to nobody else, its key is busy, and holds stay.
Whatever fits one step is released at once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Protocol

from lmcache_core.kernel.answers import Reason
from lmcache_core.kernel.effects import RowLeft
from lmcache_core.kernel.fence import STEP_OBJECTS
from lmcache_core.kernel.leases import KernelLease
from lmcache_core.kernel.ledger import Account
from lmcache_core.kernel.objects import Incarnation
from lmcache_core.kernel.quota import Quarantine
from lmcache_core.kernel.residents import Residents
from lmcache_core.kernel.states import Event, State

Entries = list[Incarnation | None]


class _ReleaseWork(Protocol):
    def step(self, objects_max: int) -> int:
        """Do some. Returns how many positions that took; fewer than `objects_max` means that all is done."""
        ...

    def owned(self) -> tuple[Entries, Account | None]:
        """What it alone still has, and the account that its holds are charged to; None: these are to be freed."""
        ...


class Releases:
    """The pending work, oldest first."""

    def __init__(self, residents: Residents, quarantine: Quarantine) -> None:
        self._residents = residents
        self._quarantine = quarantine
        self.work: deque[_ReleaseWork] = deque()
        self.step_objects = STEP_OBJECTS  # tests set fewer, so that much can happen between two steps

    def written(self, entries: Entries, lease: KernelLease, reason: Reason) -> None:
        """These positions of a write lease were given up: its owner has answered for them, or is dead."""
        self.work.append(_Written(self._residents, entries, lease, reason))

    def held(self, entries: Entries, account: Account) -> None:
        """These holds of a promise or a read lease, charged to that account, have ended."""
        self.work.append(_Held(self._residents, entries, account))

    def overdue(self, lease: KernelLease) -> None:
        """A write lease has expired: its keys are free, its slots wait for the owner's answer."""
        self.work.append(_Overdue(self._residents, self._quarantine, lease))

    def answered(self, objects: Iterable[Incarnation], state: State, event: Event) -> None:
        """Nobody touches these any more. They are in `state`, and no lease has them."""
        self.work.append(_Answered(self._residents, list(objects), state, event))

    def moved(self, lease: KernelLease) -> None:
        """A write lease moved to another session: its slots must name that session's row."""
        self.work.append(_Moved(self._residents, lease))

    def row_left(self, row: int) -> None:
        """Everything that moves away from this row is queued by now: report when no slot names it any more."""
        self.work.append(_RowLeft(self._residents, row))

    def step(self) -> None:
        """Do one bounded part of the work."""
        work, objects_max = self.work, self.step_objects
        while work and objects_max > 0:
            taken = work[0].step(objects_max)
            if taken < objects_max:
                work.popleft()
            objects_max -= max(taken, 1)


def _take_last(entries: Entries, objects_max: int) -> Entries:
    """Take from the end: the cost is what is taken, and a suffix goes before its prefix."""
    some = entries[-objects_max:]
    del entries[-objects_max:]
    return some


class _Written:
    __slots__ = ("_entries", "_lease", "_reason", "_residents")

    def __init__(self, residents: Residents, entries: Entries, lease: KernelLease, reason: Reason) -> None:
        self._residents = residents
        self._entries = entries
        self._lease = lease
        self._reason = reason

    def step(self, objects_max: int) -> int:
        some, lease, residents = _take_last(self._entries, objects_max), self._lease, self._residents
        held = [item for item in some if item is not None]
        residents.doom_cleared(held)
        live = [item for item in held if item.state is lease.live]
        waiting = [item for item in held if item.state is State.QUARANTINED]
        session = lease.session
        residents.remove_unfinished(live, lease.live, Event.ABORT, self._reason, session.row, session.id)
        if waiting:
            residents.move(waiting, State.QUARANTINED, Event.ANSWER)
        return len(some)

    def owned(self) -> tuple[Entries, Account | None]:
        return self._entries, None


class _Held:
    __slots__ = ("_account", "_entries", "_residents")

    def __init__(self, residents: Residents, entries: Entries, account: Account) -> None:
        self._residents = residents
        self._entries = entries
        self._account = account

    def step(self, objects_max: int) -> int:
        some = _take_last(self._entries, objects_max)
        held = [item for item in some if item is not None]
        self._account.free(held)
        self._residents.release(held)
        return len(some)

    def owned(self) -> tuple[Entries, Account | None]:
        return self._entries, self._account


class _Overdue:
    __slots__ = ("_lease", "_quarantine", "_residents")

    def __init__(self, residents: Residents, quarantine: Quarantine, lease: KernelLease) -> None:
        self._residents = residents
        self._quarantine = quarantine
        self._lease = lease

    def step(self, objects_max: int) -> int:
        lease = self._lease
        some = lease.entries[lease.overdue_to : lease.overdue_to + objects_max]  # empty if it was settled meanwhile
        lease.overdue_to += len(some)
        held = [item for item in some if item is not None]
        self._residents.doom_cleared(held)
        live = [item for item in held if item.state is lease.live]
        self._residents.remove_unfinished(
            live, lease.live, Event.EXPIRE, Reason.EXPIRED, lease.session.row, lease.session.id
        )
        self._quarantine.charge(lease, sum(item.nbytes for item in held))
        return len(some)

    def owned(self) -> tuple[Entries, Account | None]:
        return [], None


class _Answered:
    __slots__ = ("_event", "_objects", "_residents", "_state")

    def __init__(self, residents: Residents, objects: list[Incarnation], state: State, event: Event) -> None:
        self._residents = residents
        self._objects = objects
        self._state = state
        self._event = event

    def step(self, objects_max: int) -> int:
        some = self._objects[-objects_max:]
        del self._objects[-objects_max:]
        if some:
            for item in some:
                item.holds = 0
            self._residents.move(some, self._state, self._event)
        return len(some)

    def owned(self) -> tuple[Entries, Account | None]:
        return [*self._objects], None


class _Moved:
    __slots__ = ("_lease", "_residents", "_to")

    def __init__(self, residents: Residents, lease: KernelLease) -> None:
        self._residents = residents
        self._lease = lease
        self._to = 0  # positions before this one name the new row

    def step(self, objects_max: int) -> int:
        lease = self._lease
        some = lease.entries[self._to : self._to + objects_max]  # empty if it was settled meanwhile
        self._to += len(some)
        for state in (lease.live, State.QUARANTINED):
            held = [item for item in some if item is not None and item.state is state]
            self._residents.change_owner(held, state, lease.session.row)
        return len(some)

    def owned(self) -> tuple[Entries, Account | None]:
        return [], None


class _RowLeft:
    __slots__ = ("_residents", "_row")

    def __init__(self, residents: Residents, row: int) -> None:
        self._residents = residents
        self._row = row

    def step(self, objects_max: int) -> int:
        self._residents.effects.append(RowLeft(self._row))
        return 0

    def owned(self) -> tuple[Entries, Account | None]:
        return [], None
