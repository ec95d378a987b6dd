"""What a dead server left in the pool, taken over: objects are made on first touch, slots wait for former workers.

A million objects take seconds to make. So they are counted at once and made when somebody asks for them: by key (any
call that names keys), by slab (before it is judged), as victims (untouched, they are the coldest there is), and
for the rest in the background, the oldest first, a bounded step at a time.

The kernel's caller has read and checked the pool; `AdoptedPool` is what it hands over. It gives each object once, and
says with key None that one was damaged since: then only its slot can be had back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from typing import TYPE_CHECKING, Any, Protocol

from lmcache_core.kernel.allocator import Slab
from lmcache_core.kernel.answers import Reason
from lmcache_core.kernel.contracts import Entry, EvictionPolicy
from lmcache_core.kernel.leases import COUNTER_BITS
from lmcache_core.kernel.objects import Incarnation, UnverifiedIncarnation
from lmcache_core.kernel.states import Event, State

if TYPE_CHECKING:
    from lmcache_core.kernel.clearing import Clearing
    from lmcache_core.kernel.releases import Releases
    from lmcache_core.kernel.residents import Residents

STEP_OBJECTS = 256  # made in one background step: well below a millisecond
VICTIMS_STEP_OBJECTS = 512  # made at once when room is needed

_THROUGH = object()

# key, namespace, offset, layout id, checksum, incarnation
Found = tuple[bytes | None, int, int, int, int | None, int]


class AdoptedPool(Protocol):
    """The objects of a former server, each given once."""

    @property
    def objects(self) -> int:
        """All of them, given or not."""
        ...

    @property
    def nbytes(self) -> int:
        """Bytes of their slots."""
        ...

    @property
    def pending(self) -> int:
        """Not given yet."""
        ...

    def touch(self, namespace: int, keys: Sequence[bytes], /) -> list[Found]:
        """Those of the keys that are pending."""
        ...

    def take(self, most: int, /) -> list[Found]:
        """The oldest."""
        ...

    def slab(self, offset: int, most: int, /) -> list[Found]:
        """Up to `most` of those that are pending in the slab at `offset`."""
        ...

    def slabs(self) -> list[tuple[int, int, int, int, int, int, list[int]]]:
        """(start, nbytes, slot bytes, slots used, objects, end of what is used, free slots before that end)."""
        ...

    def waiting(self) -> list[tuple[int, int, int]]:
        """(offset, state, worker row) of slots that a former worker may still touch."""
        ...

    def layout_of(self, namespace: int, /) -> int:
        """The one layout that the namespace's pending objects have, 0 where none is pending."""
        ...


class _Ring:
    """Entries in the order of use, threaded through the entries themselves: whatever is in it, a step costs its own."""

    __slots__ = ("newer", "older", "policy_data")

    def __init__(self) -> None:
        self.newer: Any = self
        self.older: Any = self

    def append(self, entry: Entry) -> None:
        last = self.older
        last.newer = self.older = entry
        entry.older, entry.newer, entry.policy_data = last, self, self

    def take_out(self, entry: Entry) -> None:
        older, newer = entry.older, entry.newer
        older.newer, newer.older = newer, older
        entry.older = entry.newer = entry.policy_data = None


class AdoptingPolicy(EvictionPolicy):
    """Stands before the policy while objects are made: in use is warm, what was not asked for is cold.

    The policy itself orders the cold ones, as they are made, the oldest first. What came or was used since the start
    waits here, in the order of use, and follows when the last cold one is in. So no order of making shows in the
    order of eviction.
    """

    wants_charges = True  # the inner one may come to want them meanwhile: with the first quota

    def __init__(
        self, inner: EvictionPolicy, make_more: Callable[[], int], charge: Callable[[Sequence[Any], int], None]
    ) -> None:
        """`charge` puts entries that wait here (+1), or leave (-1), into the account of the store."""
        self.inner = inner
        self.evicts = inner.evicts
        self.warm_bytes = 0  # that wait here
        self._make_more = make_more
        self._charge_store = charge
        self._warm = _Ring()  # `policy_data` says whether an entry is in it
        self._leaving = False

    def insert(self, entries: Sequence[Entry]) -> None:
        if self._leaving:
            self.inner.insert(entries)
        else:
            self._charge(entries, +1)
            for entry in entries:
                self._warm.append(entry)

    def insert_cold(self, entries: Sequence[Entry]) -> None:
        """Adopted, and not asked for."""
        self.inner.insert(entries)

    def access(self, entries: Sequence[Entry]) -> None:
        ring = self._warm
        cold = [entry for entry in dict.fromkeys(entries) if entry.policy_data is not ring]
        if self._leaving:
            if cold:
                self.inner.access([entry for entry in entries if entry.policy_data is not ring])
            warm: Sequence[Entry] = [entry for entry in entries if entry.policy_data is ring]
        else:
            if cold:
                self.inner.remove(cold)
                self._charge(cold, +1)
            warm = entries
        for entry in warm:
            if entry.policy_data is ring:
                ring.take_out(entry)
            ring.append(entry)

    def remove(self, entries: Sequence[Entry]) -> None:
        ring = self._warm
        cold = [entry for entry in entries if entry.policy_data is not ring]
        warm = [entry for entry in entries if entry.policy_data is ring]
        self._charge(warm, -1)
        for entry in warm:
            ring.take_out(entry)
        if cold:
            self.inner.remove(cold)

    def held(self, entries: Sequence[Entry]) -> None:
        cold = [entry for entry in entries if entry.policy_data is not self._warm]
        if cold:
            self.inner.held(cold)

    def released(self, entries: Sequence[Entry]) -> None:
        cold = [entry for entry in entries if entry.policy_data is not self._warm]
        if cold:
            self.inner.released(cold)

    def resize(self, capacity_bytes: int) -> None:
        self.inner.resize(capacity_bytes)

    def victims(self, nbytes: int) -> list[Entry]:
        """What is known to be cold, and where that is too little, what a step adds to it: who asks again gets more."""
        named = self.inner.victims(nbytes)
        if sum(entry.nbytes for entry in named) < nbytes and (self._make_more() or self.settle(STEP_OBJECTS)):
            named = self.inner.victims(nbytes)
        return named

    def charge(self, namespace: int, nbytes: int) -> None:
        if self.inner.wants_charges:
            self.inner.charge(namespace, nbytes)

    def surplus(self, nbytes: int) -> list[Entry]:
        return self.inner.surplus(nbytes)

    def spares(self, entries: Sequence[Entry], namespace: int) -> bool:
        return self.inner.spares(entries, namespace)

    def _charge(self, entries: Sequence[Entry], sign: int) -> None:
        """What waits here takes room, too."""
        self.warm_bytes += sign * sum(entry.nbytes for entry in entries)
        self._charge_store(entries, sign)

    def settle(self, most: int) -> int:
        """Hand up to `most` warm ones over, the coldest first; new ones go to the policy at once from here on. 0: there
        are no more."""
        self._leaving = True
        ring = self._warm
        going: list[Entry] = []
        while ring.newer is not ring and len(going) < most:
            entry = ring.newer
            ring.take_out(entry)
            going.append(entry)
        if going:
            self._charge(going, -1)
            self.inner.insert(going)
            held = [entry for entry in going if entry.holds]
            if held:
                self.inner.held(held)
        return len(going)


class Untouched:
    """Adopted objects, until the last is made."""

    def __init__(self, residents: Residents, pool: AdoptedPool, kind: type[Incarnation], epoch: int) -> None:
        self._residents = residents
        self._pool = pool
        self._kind = kind
        self._epoch = epoch
        self._clears: list[tuple[int | None, Clearing]] = []
        self.lost = 0  # damaged between the check and the making
        for slab in pool.slabs():
            residents.allocator.adopt(*slab)
        residents.count(State.READY, pool.objects, pool.nbytes)
        self._unmade_bytes = pool.nbytes
        self._policy = AdoptingPolicy(residents.policy, self._make_more, residents.charge)
        residents.policy = self._policy
        residents.untouched = self

    @property
    def pending(self) -> int:
        """Objects that are not made yet."""
        return self._pool.pending

    @property
    def ungiven_bytes(self) -> int:
        """Of what is ready: what the policy has not been given yet."""
        return self._unmade_bytes + self._policy.warm_bytes

    def layout_of(self, namespace: int) -> int:
        """The layout of the namespace's pending objects, 0 where there are none."""
        return self._pool.layout_of(namespace)

    def touch(self, namespace: int, keys: Sequence[bytes]) -> None:
        """Make what there is of these keys: the caller is about to look for them."""
        if self._pool.pending:
            self._policy.insert(self._made(self._pool.touch(namespace, keys)))

    def reveal(self, slab: Slab) -> None:
        """Make some of a slab, which the caller is about to judge; all is made once it has none `unmade`."""
        self._policy.insert_cold(self._made(self._pool.slab(slab.start, STEP_OBJECTS)))

    def cleared(self, namespace: int | None, clearing: Clearing) -> None:
        """A clear began: what is of its scope and not made yet goes as soon as it is made. The clear may be done
        when nothing is pending."""
        if self._pool.pending:
            self._clears.append((namespace, clearing))

    def step(self, most: int = STEP_OBJECTS) -> int:
        """Make some of the rest; 0 when there is no more to do, and this object is out of use."""
        done = self._make(most)
        if not done:
            done = self._policy.settle(most)
        if not done:
            residents = self._residents
            residents.policy, residents.untouched = self._policy.inner, None
        return done

    def _make_more(self) -> int:
        return self._make(VICTIMS_STEP_OBJECTS)

    def _make(self, most: int) -> int:
        found = self._pool.take(most)
        self._policy.insert_cold(self._made(found))
        return len(found)

    def _made(self, found: Sequence[Found]) -> list[Incarnation]:
        """Ready objects in their slots and in the table."""
        residents, allocator = self._residents, self._residents.allocator
        residents.touched += len(found)
        made: list[Incarnation] = []
        lost: list[Incarnation] = []
        gone: list[Incarnation] = []
        for key, namespace, offset, layout_id, checksum, generation in found:
            slab = allocator.slab_at(offset)
            item = seated(slab, offset, State.READY, key or b"", namespace, layout_id, checksum, self._kind)
            if generation >> COUNTER_BITS != self._epoch:  # what the pool says is a claim: this server's are its own
                item.generation = generation
            slab.unmade -= 1
            self._unmade_bytes -= item.nbytes
            residents.objects_by_layout[layout_id] += 1
            if self._clears and any(scope in (None, namespace) for scope, _ in self._clears):
                (gone if key is not None else lost).append(item)
                continue
            table = residents.table.made(namespace, 1) if key is not None else None
            if table is None or table.get(item.key) is not None:
                lost.append(item)
                continue
            table.shards[(item.key[0] ^ item.key[31]) & table.mask][item.key] = item
            made.append(item)
        if gone:
            self._free_cleared(gone)
        if lost:
            self.lost += len(lost)
            residents.move(lost, State.READY, Event.REMOVE)
        return made

    def _free_cleared(self, gone: list[Incarnation]) -> None:
        for scope, clearing in self._clears:
            mine = [item for item in gone if scope in (None, item.namespace)]
            gone = [item for item in gone if scope not in (None, item.namespace)]
            if mine:
                self._policy.insert_cold(mine)
                clearing.cleared.objects += len(mine)
                clearing.cleared.nbytes += sum(item.nbytes for item in mine)
                self._residents.free_removed(mine, Reason.CLEARED, session_id=clearing.session_id, at_s=clearing.at_s)


class Adoption:
    """What the kernel offers around an adopted pool. Without one, nothing of it does anything."""

    def __init__(self, residents: Residents, releases: Releases, epoch: int) -> None:
        self._residents = residents
        self._releases = releases
        self._epoch = epoch
        self._walk: Iterator[Incarnation | None] | None = None  # over all slots
        self._former: FormerSlots | None = None
        self._untouched: Untouched | None = None
        self._lost = 0

    def begin(self, pool: AdoptedPool, rows: Iterable[int], *, unverified: bool = False) -> None:
        """Take over what a dead server left, before any call into the kernel but `register_layout`. `rows`: of its
        workers that live. `unverified`: readers are told the checksums of what was adopted, asked for or not.
        Everything is served at once; `step` is to be called until it answers 0."""
        self._untouched = Untouched(
            self._residents, pool, UnverifiedIncarnation if unverified else Incarnation, self._epoch
        )
        self._residents.unverified = unverified
        self._former = FormerSlots(self._residents, self._releases, pool.waiting(), rows)

    @property
    def under_way(self) -> bool:
        """Whether `step` has something left to do."""
        return self._residents.untouched is not None

    @property
    def lost(self) -> int:
        """Objects that were damaged between the check and their making."""
        return self._lost if self._untouched is None else self._untouched.lost

    def step(self, objects_max: int = STEP_OBJECTS) -> int:
        """Make some more objects. 0: all are made."""
        done = 0 if self._residents.untouched is None else self._residents.untouched.step(objects_max)
        if not done and self._untouched is not None:
            self._lost, self._untouched = self._untouched.lost, None
        return done

    # --- checking what was adopted ------------------------------------------------------------------------

    def unverified(self, objects_max: int, nbytes_max: int, looks_max: int) -> list[Incarnation] | None:
        """The next ready objects, in the order of their slots, that nobody is known to have checked: so many of so many
        bytes (of the last one more), after so many looks at slots. Empty: none so far. None: there are no more. Only
        once all are made."""
        if self._walk is None:
            self._walk = self._residents.allocator.walk()
        found: list[Incarnation] = []
        nbytes = 0
        for _ in range(looks_max):
            item = next(self._walk, _THROUGH)
            if item is _THROUGH:
                self._residents.unverified = bool(found)
                return found or None
            if isinstance(item, Incarnation) and item.unverified and item.state is State.READY:
                found.append(item)
                nbytes += item.nbytes
                if len(found) == objects_max or nbytes >= nbytes_max:
                    break
        return found

    def close(self) -> None:
        """The kernel is not called any more: forget the pool."""
        self._untouched = self._residents.untouched = None

    def touch(self, namespace: int, keys: Sequence[bytes]) -> None:
        """These keys are about to be looked for."""
        if self._residents.untouched is not None:
            self._residents.untouched.touch(namespace, keys)

    def layout_of(self, namespace: int) -> int | None:
        """The layout of what the namespace has that is not made yet, None where there is nothing."""
        untouched = self._residents.untouched
        return (untouched.layout_of(namespace) or None) if untouched is not None else None

    def cleared(self, namespace: int | None, clearing: Clearing) -> None:
        """A clear of that scope began."""
        if self._residents.untouched is not None:
            self._residents.untouched.cleared(namespace, clearing)

    @property
    def former_rows(self) -> Set[int]:
        """Rows of former workers that are still waited for."""
        return frozenset() if self._former is None else self._former.rows

    def former_gone(self, row: int) -> None:
        """The former worker of that row is dead, or has settled what it held: its slots are free."""
        if self._former is not None:
            self._former.gone(row)


class FormerSlots:
    """Slots that former workers may still write to or read from, until these have answered or are dead."""

    def __init__(
        self,
        residents: Residents,
        releases: Releases,
        waiting: Iterable[tuple[int, int, int]],
        rows: Iterable[int],
    ) -> None:
        """`rows`: of the workers that live. They answer, or end, by giving their life lock up."""
        self._releases = releases
        self.rows = set(rows)
        self._written: dict[int, list[Incarnation]] = {}  # by the row of the writer
        self._read: list[Incarnation] = []  # nobody noted by whom
        for offset, state, row in waiting:
            slab = residents.allocator.slab_at(offset)
            item = seated(slab, offset, State(state), b"", 0, 0, None)
            residents.count(item.state, 1, item.nbytes)
            residents.objects_by_layout[item.layout_id] += 1
            residents.charge([item], +1)
            if item.state is State.DOOMED:
                item.holds = 1
                self._read.append(item)
            else:
                self._written.setdefault(row, []).append(item)

    def gone(self, row: int) -> None:
        """The worker of that row has settled everything, or is dead."""
        self.rows.discard(row)
        written = self._written.pop(row, [])
        if written:
            self._releases.answered(written, State.QUARANTINED, Event.ANSWER)
        if not self.rows and self._read:
            read, self._read = self._read, []
            self._releases.answered(read, State.DOOMED, Event.LAST_RELEASE)
        self._releases.step()


def seated(
    slab: Slab,
    offset: int,
    state: State,
    key: bytes,
    namespace: int,
    layout_id: int,
    checksum: int | None,
    kind: type[Incarnation] = Incarnation,
) -> Incarnation:
    """An incarnation in a slot that the allocator has counted as used."""
    item = kind.__new__(kind)
    item.key = key
    item.namespace = namespace
    item.nbytes = slab.slot_bytes
    item.holds = 0
    item.older = item.newer = item.policy_data = None
    item.offset = offset
    item.layout_id = layout_id
    item.generation = 0
    item.state = state
    item.slab = slab
    item.temporary = False
    item.checksum = checksum
    item.kept_by = None
    slab.residents[(offset - slab.start) // slab.slot_bytes] = item
    return item
