"""Put the tables right after an error in one of them, by counting anew what they say of each other.

`Undo` takes back what a failed request had reserved. It cannot help if the error came out of a table itself, between
two of its lines. Then these facts are believed, and everything else is derived from them: which object stands in which
slot, what each open lease names, and what is pinned, on its way to tiers, or waits for its release. What nobody owns
is freed.

It looks at everything that is resident: about a second for a million objects. Only a bug of ours, or no memory left,
comes here; a plugin's error does not, for `GuardedPolicy` is between.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING

from lmcache_core.kernel.answers import LeaseKind, Reason, Settled
from lmcache_core.kernel.effects import Removed, SlotsMarked
from lmcache_core.kernel.leases import KernelLease
from lmcache_core.kernel.ledger import Account, Sort
from lmcache_core.kernel.memory import MemorySort
from lmcache_core.kernel.objects import Incarnation
from lmcache_core.kernel.pins import PIN_BYTES
from lmcache_core.kernel.states import NO_ROW, State

if TYPE_CHECKING:
    from lmcache_core.kernel.kernel import Kernel

_LIVE = (State.WRITING, State.LOADING)


def recount(kernel: Kernel) -> None:
    """Make the tables of the kernel agree again."""
    _Recount(kernel).run()


class _Recount:
    def __init__(self, kernel: Kernel) -> None:
        self._residents = kernel._residents
        self._allocator = kernel._allocator
        self._book = kernel._leases
        self._sessions = kernel._sessions
        self._ledger = kernel._ledger
        self._memory = kernel.memory
        self._pins = kernel._pins
        self._rooms = kernel._rooms
        self._releases = kernel._releases
        self._quarantine = kernel._quarantine
        self._slabs = list(dict.fromkeys(slab for slab in self._allocator.owners if slab is not None))
        self._standing: dict[Incarnation, None] = {}
        self._written: dict[Incarnation, KernelLease] = {}  # what a write lease names
        self._leaving: set[Incarnation] = set()  # what waits to be freed in steps

    def run(self) -> None:
        for slab in self._slabs:
            for item in slab.residents:
                if item is not None and item.state is not State.FREE:
                    self._standing[item] = None
        self._leases()
        self._holds()
        self._states()
        self._sums()
        self._slots()

    # --- leases -------------------------------------------------------------------------------------------
    def _leases(self) -> None:
        book, sessions = self._book, self._sessions.by_id
        leases = {**book.by_id}
        for session in sessions.values():
            leases.update(session.leases)
        book.by_kind[:] = [0] * len(LeaseKind)
        for session in sessions.values():
            session.leases.clear()
            session.quarantined_bytes = 0
        self._memory.restart(MemorySort.LEASES, [session.memory for session in sessions.values()])
        book.by_id.clear()
        book.settled_bytes = sum(len(each.answers) for each in book.settled.values())
        for lease in leases.values():
            self._lease(lease)
        queued = [each[2] for each in book._deadlines]
        book._stale_deadlines = sum(lease.id not in book.by_id for lease in queued)
        for lease in {*leases.values(), *queued}:
            lease.queued = lease in queued
        for lease in book.by_id.values():
            if not lease.queued:
                book._push(lease)

    def _lease(self, lease: KernelLease) -> None:
        book = self._book
        missing = len(lease.answers) - len(lease.entries)
        if missing > 0:
            lease.entries += [None] * missing
        ended = Settled.ABORTED if lease.kind is LeaseKind.WRITE else Settled.FINISHED
        del lease.entries[len(lease.answers) :]
        for at, item in enumerate(lease.entries):
            if item is not None and item.state is State.FREE and item.slab.residents[_slot(item)] is item:
                item.state = lease.live if lease.kind is LeaseKind.WRITE else State.READY
                self._standing[item] = None
            if item is not None and item not in self._standing:
                item = lease.entries[at] = None
            if item is not None:
                lease.answers[at] = Settled.OPEN
                if lease.kind is LeaseKind.WRITE:
                    self._written[item] = lease
            elif lease.answers[at] == Settled.OPEN:
                lease.answers[at] = ended
        lease.positions = max(lease.positions, len(lease.answers))
        lease.pending = sum(item is not None for item in lease.entries)
        lease.kept_bytes = 0
        if lease.pending:
            book.by_id[lease.id] = lease
            lease.session.leases[lease.id] = lease
            book.by_kind[lease.kind] += 1
            book._charge(lease)
        elif lease.id not in book.settled:
            book.remember(lease)

    # --- who holds what -----------------------------------------------------------------------------------
    def _holds(self) -> None:
        holds: Counter[Incarnation] = Counter()
        for item in self._standing:
            item.kept_by = None
        accounts = [account for each in self._ledger.holders.values() for account in each.accounts]
        for session in self._sessions.by_id.values():
            accounts += session.accounts
        accounts += self._pins._by.values()  # of sessions that have ended, too
        for account in accounts:
            account.nbytes = 0
        self._memory.restart(MemorySort.HOLDS, [account.memory for account in accounts])
        for name, holder in self._ledger.holders.items():
            holder.sessions = sum(each.holder == name for each in self._sessions.by_id.values())

        def keep(items: Iterable[Incarnation | None], account: Account | None) -> None:
            held = [item for item in items if item is not None and item in self._standing]
            holds.update(held)
            if account is not None:
                account.take(held)

        for lease in self._book.by_id.values():
            if lease.account is not None:
                keep(lease.entries, lease.account)
        for work in self._releases.work:
            owned, charged = work.owned()
            if charged is None:
                self._leaving.update(item for item in owned if item is not None)
            else:
                keep(owned, charged)
        for preparation in self._rooms.waiting:
            keep(preparation.existing, preparation.session.accounts[Sort.PROMISED])
        pins = self._pins
        for item in [item for item in pins._until if item not in pins._by or item not in self._standing]:
            del pins._until[item]
        for item in [item for item in pins._by if item not in pins._until]:
            del pins._by[item]
        for item, account in pins._by.items():
            keep([item], account)
            account.memory.charge(PIN_BYTES)
        pins.nbytes = sum(item.nbytes for item in pins._until)
        listed = {item for _, _, batch in pins._batches for item in batch}
        pins._listed = sum(len(batch) for _, _, batch in pins._batches)
        for item, until in pins._until.items():
            if item not in listed:
                pins._list(until, [item])
        shield = self._residents.shield
        for item in [item for item in shield._covered if item not in self._standing]:
            del shield._covered[item]
        keep(shield._covered, None)
        self._held = holds

    # --- states -------------------------------------------------------------------------------------------
    def _states(self) -> None:
        residents, table, policy = self._residents, self._residents.table, self._residents.policy
        doubtful = residents.doubtful
        residents.doubtful = ()
        in_table = {item for each in table.namespaces.values() for item in each}
        cleared = {item for each in residents.clearings for own in each.tables.values() for item in own}
        for item in in_table - self._standing.keys():
            self._take_from_table(item)
        marks: dict[State, list[int]] = {}
        removed: list[Incarnation] = []
        uncertain = [item for item in doubtful if hasattr(item, "slab") and item.slab.residents[_slot(item)] is item]
        if uncertain:
            policy.remove(uncertain)
        for item in [*self._standing]:
            before, found = item.state, item in in_table or item in cleared
            lease = self._written.get(item)
            item.holds = self._held[item]
            if lease is not None:
                if not found and before is not State.QUARANTINED and not lease.expired:
                    own = table.made(item.namespace, 1)
                    if own.get(item.key) is None:
                        own.shards[(item.key[0] ^ item.key[31]) & own.mask][item.key] = item
                        found = True
                item.state = lease.live if found else State.QUARANTINED
            elif item in self._leaving:
                pass
            elif before is State.READY and not found:
                item.state = State.DOOMED if item.holds else State.FREE
                removed.append(item)
            elif before is State.DOOMED and found:
                item.state = State.READY
            elif before in (*_LIVE, State.QUARANTINED) or (before is State.DOOMED and not item.holds):
                item.state = State.FREE  # nobody will settle it
                if item in in_table:
                    self._take_from_table(item)
            if item.state is not before or item in doubtful:
                marks.setdefault(item.state, []).append(item.offset)
            if item.state is State.FREE:
                del self._standing[item]
        for item in uncertain:
            if item.state is State.READY:
                policy.insert([item])
            elif item.state is State.FREE:
                marks.setdefault(State.FREE, []).append(item.offset)
        gone = [item for item in uncertain if item.state is not State.READY]
        if removed or gone:
            residents.effects.append(Removed(list(dict.fromkeys([*removed, *gone])), Reason.DROPPED))
        residents.effects += [SlotsMarked(offsets, state, NO_ROW) for state, offsets in marks.items()]

    def _take_from_table(self, item: Incarnation) -> None:
        namespace = getattr(item, "namespace", None)
        for number, own in [*self._residents.table.namespaces.items()]:
            if namespace is not None and number != namespace:
                continue
            for shard in own.shards:
                for key in [key for key, each in shard.items() if each is item]:
                    del shard[key]
            self._residents.table._remove_if_empty(number)

    # --- sums ---------------------------------------------------------------------------------------------
    def _sums(self) -> None:
        residents = self._residents
        residents.objects_by_state[:] = [0] * len(State)
        residents.bytes_by_state[:] = [0] * len(State)
        residents.objects_by_layout.clear()
        if residents.untouched is not None:
            residents.count(State.READY, residents.untouched.pending, residents.untouched.unmade_bytes)
        for item in self._standing:
            residents.count(item.state, 1, item.nbytes)
            residents.objects_by_layout[item.layout_id] += 1
        charged: Counter[int] = Counter()
        for item in self._standing:
            if item.state is not State.READY:
                charged[item.namespace] += item.nbytes
        for preparation in self._rooms.waiting:
            charged[preparation.namespace] += preparation.slots * preparation.size_class.slot_bytes
        for namespace in {*charged, *residents.charged}:
            residents.charge_bytes(namespace, charged[namespace] - residents.charged.get(namespace, 0))
        quarantine = self._quarantine
        quarantine.nbytes = 0
        quarantine.by_holder.clear()
        quarantine._lost_by_holder.clear()
        for lease in self._book.by_id.values():
            if lease.kind is LeaseKind.WRITE:
                lease.charged_bytes = 0
                overdue = lease.entries[: lease.overdue_to]
                quarantine.charge(lease, sum(item.nbytes for item in overdue if item is not None))

    # --- slots --------------------------------------------------------------------------------------------
    def _slots(self) -> None:
        allocator = self._allocator
        for each in (*allocator.classes.values(), allocator.emptying):
            each.slots_used = each.slots = each.slabs = 0
            each.open.clear()
        allocator._empty.clear()
        allocator.used_bytes = 0
        for slab in self._slabs:
            size_class = slab.size_class
            slab.home.slabs += 1
            if not slab.unmade:
                taken = [
                    at for at, item in enumerate(slab.residents) if item is not None and item.state is not State.FREE
                ]
                slab.used = len(taken)
                first_fresh = taken[-1] + 1 if taken else 0
                slab.fresh = slab.start + first_fresh * slab.slot_bytes
                used = set(taken)
                slab.free = [slab.start + at * slab.slot_bytes for at in range(first_fresh) if at not in used]
            if size_class is not allocator.emptying:
                size_class.slots += slab.slots
                if not slab.used:
                    allocator._empty[slab] = None
                if slab.used < slab.slots:
                    size_class.open[slab] = None
            size_class.slots_used += slab.used
            allocator.used_bytes += slab.used * slab.slot_bytes
        in_use = [each.slot_bytes for each in allocator.classes.values() if each.slabs]
        allocator.slot_bytes_least = min(in_use, default=allocator.unit_bytes)


def _slot(item: Incarnation) -> int:
    return (item.offset - item.slab.start) // item.slab.slot_bytes
