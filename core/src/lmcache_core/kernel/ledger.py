"""The ledger: what each session and each holder keeps from everybody else, and how much it may keep.

A *holder* owns sessions: it is a uid, or over ZMQ a CURVE key. The ledger counts three sorts of bytes that cannot be
evicted: promised, held by read leases, and pinned. An object counts once per account, however many promises or leases
of the account name it; redeeming a promise moves it from one sort to the other. The account is asked before it is
charged: only the session that is over its cap is refused. Slots that are being written count apart, by holder: they
have no holds, and only their number is bounded.

An object remembers who holds it (`Incarnation.kept_by`): nobody, one account once, or a table. Nearly all objects have
one holder, so nearly all cost one assignment.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence, Sized
from dataclasses import dataclass
from enum import IntEnum
from operator import attrgetter
from typing import cast

from lmcache_core.kernel.memory import Memory, MemoryAccount, MemorySort
from lmcache_core.kernel.objects import Incarnation

_nbytes = attrgetter("nbytes")


class Sort(IntEnum):
    """Why something cannot be evicted."""

    PROMISED = 0
    READ = 1
    PINNED = 2


class _Holders(dict["Account", int]):
    """Who holds an object that was held twice: how often, by account. Its memory is charged to who made it; until it
    is empty it does not shrink."""

    __slots__ = ("memory", "nbytes")

    memory: MemoryAccount
    nbytes: int

    def grow(self) -> None:
        """Charge what it costs now. The caller has charged the first `_TABLE_BYTES`."""
        nbytes = _COLLECTOR_BYTES + self.__sizeof__()
        self.memory.charge(nbytes - self.nbytes)
        self.nbytes = nbytes


_COLLECTOR_BYTES = 16  # that Python's garbage collector keeps with each
# Of one with few holders; what they are does not matter.
_TABLE_BYTES = _COLLECTOR_BYTES + _Holders(cast("dict[Account, int]", {0: 1})).__sizeof__()
_FEW = 5  # holders, for which it does not grow


class Account:
    """Bytes of one sort. A session's account is part of its holder's, `whole`."""

    __slots__ = ("memory", "nbytes", "nbytes_max", "whole")

    def __init__(self, nbytes_max: int, memory: MemoryAccount, whole: Account | None = None) -> None:
        self.memory = memory  # of what its holds cost beside the objects
        self.nbytes = 0
        self.nbytes_max = nbytes_max
        self.whole = whole

    @property
    def room(self) -> int:
        """Bytes left until its own cap or its holder's is reached."""
        own = self.nbytes_max - self.nbytes
        return own if self.whole is None else min(own, self.whole.nbytes_max - self.whole.nbytes)

    def take_first(self, objects: Sequence[Incarnation]) -> int:
        """Add one hold to as many of these, from the first on, as the caps allow. Returns how many."""
        fits = len(objects) if sum(map(_nbytes, objects)) <= self.room else self._first_that_fit(objects)
        self.take(objects if fits == len(objects) else objects[:fits])
        return fits

    def take(self, objects: Iterable[Incarnation]) -> None:
        """Add one hold to each of these, whatever the caps."""
        mine = shared = made = 0  # `shared`: the part of these bytes that another session of its holder has, too
        for item in objects:
            known = item.kept_by
            if known is None:
                item.kept_by = self
                mine += item.nbytes
                continue
            if known.__class__ is not _Holders:
                first, known = known, _Holders()
                known[first] = 1
                known.memory, known.nbytes = self.memory, _TABLE_BYTES
                item.kept_by = known
                made += 1
            times = known.get(self, 0)
            if not times:
                mine += item.nbytes
                if any(each.whole is self.whole for each in known):
                    shared += item.nbytes
            known[self] = times + 1
            if not times and len(known) > _FEW:
                known.grow()
        self._add(mine, mine - shared)
        if made:
            self.memory.charge(_TABLE_BYTES * made)

    def free(self, objects: Iterable[Incarnation]) -> None:
        """Take one hold from each of these."""
        mine = shared = kept = 0
        for item in objects:
            known = item.kept_by
            if known is self:
                item.kept_by = None
                mine += item.nbytes
                continue
            known[self] -= 1
            if not known[self]:
                del known[self]
                mine += item.nbytes
                if any(each.whole is self.whole for each in known):
                    shared += item.nbytes
                if not known:
                    item.kept_by = None
                    if known.memory is self.memory:
                        kept += known.nbytes
                    else:
                        known.memory.charge(-known.nbytes)
        self._add(-mine, shared - mine)
        if kept:
            self.memory.charge(-kept)

    def _first_that_fit(self, objects: Sequence[Incarnation]) -> int:
        """How many of the objects, from the first on, it may take. Objects that it holds already cost nothing, and
        those that another session of its holder holds cost the holder nothing."""
        whole = self.whole
        own_room = self.nbytes_max - self.nbytes
        whole_room = own_room if whole is None else whole.nbytes_max - whole.nbytes
        counted: set[Incarnation] = set()
        for at, item in enumerate(objects):
            known = item.kept_by
            holding = known if known.__class__ is _Holders else () if known is None else (known,)
            if self in holding or item in counted:
                continue
            counted.add(item)
            own_room -= item.nbytes
            if not any(each.whole is whole for each in holding):
                whole_room -= item.nbytes
            if own_room < 0 or whole_room < 0:
                return at
        return len(objects)

    def _add(self, mine: int, whole: int) -> None:
        self.nbytes += mine
        if self.whole is not None:
            self.whole.nbytes += whole


@dataclass(slots=True, frozen=True)
class Caps:
    """Caps on the bytes of each sort, by `Sort`: for one session, and for one holder. `written`: on the bytes that one
    holder's write leases have open."""

    session: tuple[int, int, int]
    holder: tuple[int, int, int]
    written: int


class Written:
    """Bytes of the slots that one holder's write leases have open: they can be neither read nor evicted. `holders`: all
    there are; whoever is alone may have everything open."""

    __slots__ = ("_holders", "nbytes", "nbytes_max")

    def __init__(self, nbytes_max: int, holders: Sized) -> None:
        self.nbytes = 0
        self.nbytes_max = nbytes_max
        self._holders = holders

    @property
    def room(self) -> int:
        """Bytes left until the cap; negative once others have come."""
        return (self.nbytes_max if len(self._holders) > 1 else sys.maxsize) - self.nbytes


class Holder:
    """All sessions of one uid or key."""

    __slots__ = ("accounts", "name", "sessions", "written")

    def __init__(self, name: str, caps: Caps, memory: MemoryAccount, holders: Sized) -> None:
        self.name = name
        self.sessions = 0
        self.accounts = [Account(nbytes_max, memory) for nbytes_max in caps.holder]
        self.written = Written(caps.written, holders)


class Ledger:
    """All holders that have a session or still hold something."""

    def __init__(self, caps: Caps, memory: Memory) -> None:
        self._caps = caps
        self._memory = memory
        self.holders: dict[str, Holder] = {}

    def opened(self, name: str) -> tuple[list[Account], Written]:
        """A session of this holder begins. Returns its accounts, by `Sort`, and what its holder has open to write."""
        holder = self.holders.get(name)
        if holder is None:
            for idle in [each for each in self.holders.values() if not each.sessions]:
                self._remove_idle(idle)
            holder = self.holders[name] = Holder(
                name, self._caps, self._memory.open(MemorySort.HOLDS, name), self.holders
            )
        holder.sessions += 1
        accounts = [
            Account(most, whole.memory, whole) for most, whole in zip(self._caps.session, holder.accounts, strict=True)
        ]
        return accounts, holder.written

    def closed(self, name: str) -> None:
        """A session of this holder has ended."""
        holder = self.holders[name]
        holder.sessions -= 1
        self._remove_idle(holder)

    def _remove_idle(self, holder: Holder) -> None:
        """Forget a holder that has no session and holds nothing."""
        if not holder.sessions and not holder.written.nbytes and not any(each.nbytes for each in holder.accounts):
            self.holders.pop(holder.name, None)
