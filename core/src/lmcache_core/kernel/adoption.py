"""Takes over what a dead server left in the pool. Objects are made on first touch; slots wait for former workers.

Making a million objects takes seconds. So they are counted at once, and each is made when somebody asks for it: by key
(any call that names keys), by slab (before the slab is judged), or as a victim (untouched objects are the coldest). The
rest are made in the background, the oldest first, in bounded steps.

The kernel's caller has read and checked the pool, and hands it over as an `AdoptedPool`. That gives each object once. A
key of None means that the object was damaged since the check: only its slot can be recovered.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
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
    """The objects of a former server. Each is given once."""

    @property
    def objects(self) -> int:
        """The number of all objects, given or not."""
        ...

    @property
    def nbytes(self) -> int:
        """Bytes of their slots."""
        ...

    @property
    def pending(self) -> int:
        """The number of objects not given yet."""
        ...

    def touch(self, namespace: int, keys: Sequence[bytes], /) -> list[Found]:
        """The pending objects among these keys."""
        ...

    def take(self, most: int, /) -> list[Found]:
        """The oldest pending objects, up to `most`."""
        ...

    def slab(self, offset: int, most: int, /) -> list[Found]:
        """Up to `most` pending objects of the slab at `offset`."""
        ...

    def slabs(self) -> list[tuple[int, int, int, int, int, int, list[int]]]:
        """(start, nbytes, slot bytes, slots used, objects, end of the used part, free slots before that end)."""
        ...

    def waiting(self) -> list[tuple[int, int, int]]:
        """(offset, state, worker row) of slots that a former worker may still touch."""
        ...

    def layout_of(self, namespace: int, /) -> int:
        """The one layout that the namespace's pending objects have; 0 if none is pending."""
        ...


class _Ring:
    """Entries in the order of use, linked through the entries themselves. A step costs the same at any length."""

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
    """Wraps the policy while objects are made: used entries are warm, entries that nobody asked for are cold.

    The policy itself orders the cold ones, as they are made, the oldest first. Entries that came or were used since the
    start wait here, in the order of use, and follow once the last cold one is in. So the order of making does not show
    in the order of eviction.
    """

    wants_charges = True  # the inner policy may want them later, with the first quota

    def __init__(
        self, inner: EvictionPolicy, make_more: Callable[[], int], charge: Callable[[Sequence[Any], int], None]
    ) -> None:
        """`charge` adds entries that wait here to the store's account (+1), or takes them off it (-1)."""
        self.inner = inner
        self.evicts = inner.evicts
        self.warm_bytes = 0  # bytes that wait here
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
        """Insert adopted entries that nobody has asked for."""
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
        """The known cold entries; if they are too few, also those that one step adds. Asking again gives more."""
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
        """Charge what waits here: it takes room, too."""
        self.warm_bytes += sign * sum(entry.nbytes for entry in entries)
        self._charge_store(entries, sign)

    def settle(self, most: int) -> int:
        """Hand over up to `most` warm entries, the coldest first. New ones go straight to the policy from here on. 0:
        none are left."""
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
    """Adopted objects, until the last one is made."""

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
        self.unmade_bytes = pool.nbytes
        self._policy = AdoptingPolicy(residents.policy, self._make_more, residents.charge)
        residents.policy = self._policy
        residents.untouched = self

    @property
    def pending(self) -> int:
        """Objects that are not made yet."""
        return self._pool.pending

    @property
    def ungiven_bytes(self) -> int:
        """Bytes of ready objects that the policy does not have yet."""
        return self.unmade_bytes + self._policy.warm_bytes

    def layout_of(self, namespace: int) -> int:
        """The layout of the namespace's pending objects; 0 if there are none."""
        return self._pool.layout_of(namespace)

    def touch(self, namespace: int, keys: Sequence[bytes]) -> None:
        """Make those of these keys that are pending. The caller is about to look for them."""
        if self._pool.pending:
            self._policy.insert(self._made(self._pool.touch(namespace, keys)))

    def reveal(self, slab: Slab) -> None:
        """Make some objects of a slab that the caller is about to judge. All are made once it has none `unmade`."""
        self._policy.insert_cold(self._made(self._pool.slab(slab.start, STEP_OBJECTS)))

    def cleared(self, namespace: int | None, clearing: Clearing) -> None:
        """A clear began: objects in its scope that are not made yet are removed as soon as they are made. The clear may
        be done when nothing is pending."""
        if self._pool.pending:
            self._clears.append((namespace, clearing))

    def step(self, most: int = STEP_OBJECTS) -> int:
        """Make some of the rest. 0: there is nothing left to do, and this object is out of use."""
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
        """Put ready objects into their slots and the table."""
        residents, allocator = self._residents, self._residents.allocator
        residents.touched += len(found)
        made: list[Incarnation] = []
        lost: list[Incarnation] = []
        gone: list[Incarnation] = []
        for key, namespace, offset, layout_id, checksum, generation in found:
            slab = allocator.slab_at(offset)
            item = seated(slab, offset, State.READY, key or b"", namespace, layout_id, checksum, self._kind)
            if generation >> COUNTER_BITS != self._epoch:  # not trusted if it claims to be of this server
                item.generation = generation
            slab.unmade -= 1
            self.unmade_bytes -= item.nbytes
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
    """What the kernel offers for an adopted pool. Without one, its methods do nothing."""

    def __init__(self, residents: Residents, releases: Releases, epoch: int) -> None:
        self._residents = residents
        self._releases = releases
        self._epoch = epoch
        self._walk: Iterator[Incarnation | None] | None = None  # over all slots
        self._former: FormerSlots | None = None
        self._untouched: Untouched | None = None
        self._lost = 0

    def begin(self, pool: AdoptedPool, rows: Iterable[int], *, unverified: bool = False) -> None:
        """Take over what a dead server left. Only `register_layout` may be called before. `rows`: those of its workers
        that are alive. `unverified`: readers get the checksums of adopted objects, even if they did not ask. Everything
        is served at once; call `step` until it answers 0."""
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
        """The next ready objects, in slot order, that nobody is known to have checked: up to `objects_max` of up to
        `nbytes_max` bytes (the last one may exceed that), after up to `looks_max` slots. Empty: none so far. None:
        there are no more. Call it only once all are made."""
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
        """The kernel will not be called again: forget the pool."""
        self._untouched = self._residents.untouched = None

    def touch(self, namespace: int, keys: Sequence[bytes]) -> None:
        """These keys are about to be looked for."""
        if self._residents.untouched is not None:
            self._residents.untouched.touch(namespace, keys)

    def layout_of(self, namespace: int) -> int | None:
        """The layout of the namespace's objects that are not made yet; None if there are none."""
        untouched = self._residents.untouched
        return (untouched.layout_of(namespace) or None) if untouched is not None else None

    def cleared(self, namespace: int | None, clearing: Clearing) -> None:
        """A clear of that scope began."""
        if self._residents.untouched is not None:
            self._residents.untouched.cleared(namespace, clearing)

    def former_gone(self, row: int) -> None:
        """The former worker of that row is dead, or has settled what it held: free its slots."""
        if self._former is not None:
            self._former.gone(row)


class FormerSlots:
    """Slots that former workers may still write to or read from, until those workers answer or die."""

    def __init__(
        self,
        residents: Residents,
        releases: Releases,
        waiting: Iterable[tuple[int, int, int]],
        rows: Iterable[int],
    ) -> None:
        """`rows`: those of the workers that are alive. They answer, or end, by releasing their life lock."""
        self._releases = releases
        self.rows = set(rows)
        self._written: dict[int, list[Incarnation]] = {}  # by the row of the writer
        self._read: list[Incarnation] = []  # the pool does not say by whom
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
    """An incarnation in a slot that the allocator already counts as used."""
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
