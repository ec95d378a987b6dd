"""The write side: prepare, commit, abort, and what happens to writers that are late, cleared or dead."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from lmcache_core.errors import LimitError, UsageError
from lmcache_core.kernel.allocator import SizeClass, slot_bytes_for
from lmcache_core.kernel.answers import Grant, Grants, LeaseKind, Reason, Settled
from lmcache_core.kernel.config import KernelConfig
from lmcache_core.kernel.effects import Committed, LeaseExpired
from lmcache_core.kernel.eviction import TRIM_STEP_OBJECTS, make_room
from lmcache_core.kernel.fence import Fence
from lmcache_core.kernel.leases import KernelLease, LeaseBook
from lmcache_core.kernel.objects import Incarnation, NamespaceTable, check_keys
from lmcache_core.kernel.quota import Quarantine
from lmcache_core.kernel.releases import Releases
from lmcache_core.kernel.residents import Residents
from lmcache_core.kernel.rooms import Preparation
from lmcache_core.kernel.sessions import KernelSession
from lmcache_core.kernel.states import Event, State
from lmcache_core.limits import BATCH_KEYS_MAX, LEASE_KEYS_MAX, OBJECT_BYTES_MAX

READY, QUARANTINED = State.READY, State.QUARANTINED
_EXISTS, _BUSY = int(Grant.EXISTS), int(Grant.BUSY)


def check_batch(keys: Sequence[bytes], lease: KernelLease | None) -> None:
    """Raise `LimitError` or `UsageError` before anything changes."""
    if len(keys) > BATCH_KEYS_MAX:
        raise LimitError(f"a batch of {len(keys)} keys is over the limit of {BATCH_KEYS_MAX}: send it in pages")
    if lease is not None and lease.positions + len(keys) > LEASE_KEYS_MAX:
        raise LimitError(f"lease {lease.id:#x} would have over {LEASE_KEYS_MAX} positions: open another")
    check_keys(keys)


class _MustWaitError(Exception):
    """Room can be made, but only in more than one step."""


class Writing:
    """Write leases, of workers and of lanes."""

    def __init__(
        self,
        config: KernelConfig,
        residents: Residents,
        fence: Fence,
        leases: LeaseBook,
        quarantine: Quarantine,
        releases: Releases,
    ) -> None:
        self._residents = residents
        self._fence = fence
        self._leases = leases
        self._quarantine = quarantine
        self._releases = releases
        self._ttl_s = config.write_ttl_s
        self._layouts: dict[int, SizeClass] = {}
        self._generation = leases.first_id - 1  # numbered by this server alone, like lease ids
        self.expiries = 0
        self.draining = False  # nothing new is granted

    def register_layout(self, layout_id: int, nbytes: int) -> None:
        if not 0 < nbytes <= OBJECT_BYTES_MAX:
            raise UsageError(
                f"layout {layout_id}: objects of {nbytes:,} bytes; at least 1, at most {OBJECT_BYTES_MAX:,}"
            )
        known = self._layouts.get(layout_id)
        if known is not None and known.slot_bytes != slot_bytes_for(nbytes):
            raise UsageError(
                f"layout {layout_id} has slots of {known.slot_bytes:,} bytes, not for objects of {nbytes:,}: "
                "register another id"
            )
        self._layouts[layout_id] = self._residents.allocator.size_class(nbytes)

    def remove_layout(self, layout_id: int) -> None:
        self._layouts.pop(layout_id, None)
        self._residents.objects_by_layout.pop(layout_id, None)

    def may_evict(self, layout_id: int, keys: int) -> bool:
        size_class = self._layouts.get(layout_id)
        if size_class is None:
            return False
        allocator = self._residents.allocator
        missing = keys - size_class.slots_free
        return missing > 0 and missing * size_class.slot_bytes > allocator.units_free * allocator.unit_bytes

    def room_for(self, layout_id: int, watermark_bytes: int) -> int:
        size_class = self._layouts.get(layout_id)
        if size_class is None:
            return 0
        allocator, slot_bytes = self._residents.allocator, size_class.slot_bytes
        a_unit = allocator.unit_bytes // slot_bytes
        in_units = allocator.units_free * a_unit if a_unit else allocator.units_free // size_class.units_least
        below = max(0, watermark_bytes - allocator.used_bytes) // slot_bytes
        return min(below, size_class.slots_free + in_units)

    # --- prepare --------------------------------------------------------------------------------------------

    def prepare(
        self,
        session: KernelSession,
        namespace: int,
        layout_id: int,
        keys: Sequence[bytes],
        now: float,
        lease_id: int,
        live: State,
        ttl_s: float | None,
        wait_s: float = 0.0,
        cleared: bool = False,
    ) -> Grants | Preparation:
        """`wait_s`: if making room takes more than one step, the answer is a `Preparation` that waits for it this long;
        with 0, the keys without room are FULL. `cleared`: the keys were offered before a clear, so none is granted."""
        lease = self._lease_to_extend(session, lease_id, namespace, live)
        check_batch(keys, lease)
        size_class = self._layouts.get(layout_id)
        if size_class is None:
            raise UsageError(f"layout {layout_id} is not registered: call register_layout first")
        if lease is None or not lease.pending:
            session.may_lease()
        self._leases.room_for(session, lease, len(keys))

        residents = self._residents
        residents.touched += len(keys)
        if residents.clearings:
            self._fence.make_way(namespace, keys)
        table = residents.table.made(namespace, len(keys)) if keys else residents.table.of(namespace)
        statuses = bytearray(len(keys))
        mark = residents.undo.mark()
        entries, created, existing = self._claim(table, namespace, layout_id, size_class, keys, live, statuses)
        if existing:
            residents.policy.access(existing[::-1])
        try:
            placed = 0
            refusal = Grant.FULL if cleared or not created else self._refusal(session, size_class)
            if refusal is None:
                if residents.tenancy.policy is not None:
                    self._keep_limit(namespace, size_class, created, existing, entries, statuses)
                refusal, placed = self._place_allowed(session, size_class, created, existing, live, wait_s > 0)
        except _MustWaitError:
            needed = len(created)
            residents.undo.back(mark)
            deadline = None if ttl_s is None else now + ttl_s
            until_s = now + wait_s if deadline is None else min(now + wait_s, deadline)
            return Preparation(
                session, namespace, layout_id, size_class, keys, lease_id, live, deadline, needed, existing,
                until_s,
            )  # fmt: skip
        except BaseException:  # a policy is a plugin: its failure ends this call, and must not block these keys
            residents.undo.back(mark)
            raise
        residents.flush_slabs()
        if placed < len(created):
            self._deny(created, placed, entries, statuses, refusal)
        offsets = array("Q", [0 if item is None else item.offset for item in entries])
        if created:
            nbytes = len(created) * size_class.slot_bytes
            residents.granted(created, live, nbytes, session.row)
        lease = self._page(session, namespace, live, now, ttl_s, lease, entries, len(created))
        first = lease.positions - len(keys)
        return Grants(lease.id, lease.deadline, statuses, bytearray(), offsets, None, self._generation, first)

    def grant_more(
        self,
        session: KernelSession,
        namespace: int,
        layout_id: int,
        keys: Sequence[bytes],
        grants: Grants,
        now: float,
        wait_s: float,
    ) -> Preparation | None:
        """Slots for the keys of a page that were answered FULL, at their own positions; `grants` gets the new answers.
        If it must wait: a `Preparation` for `take_more`. Raises `LeaseExpiredError`: the page keeps what it had."""
        self._lease_to_extend(session, grants.lease_id, namespace, State.WRITING)
        again = [keys[at] for at, status in enumerate(grants.statuses) if status == Grant.FULL]
        more = self.prepare(session, namespace, layout_id, again, now, 0, State.WRITING, None, wait_s)
        if isinstance(more, Preparation):
            return more
        self.take_more(session, namespace, grants, more, now)
        return None

    def take_more(self, session: KernelSession, namespace: int, grants: Grants, more: Grants, now: float) -> None:
        """Give the page what was granted for its FULL keys, at their own positions."""
        lease = self._lease_to_extend(session, grants.lease_id, namespace, State.WRITING)
        assert lease is not None
        again = [at for at, status in enumerate(grants.statuses) if status == Grant.FULL]
        for at, status, offset in zip(again, more.statuses, more.offsets, strict=True):
            grants.statuses[at], grants.offsets[at] = status, offset
        self._leases.take_over(lease, more.lease_id, [grants.first + at for at in again])
        self._leases.renew(lease, now)
        grants.deadline = lease.deadline

    def carry_out(self, waited: Preparation, now: float) -> Grants:
        """What a preparation that has waited is granted, with the room that there is now."""
        ttl_s = None if waited.deadline is None else max(0.0, waited.deadline - now)
        grants = self.prepare(
            waited.session, waited.namespace, waited.layout_id, waited.keys, now, waited.lease_id, waited.live, ttl_s,
            cleared=waited.cleared,
        )  # fmt: skip
        assert isinstance(grants, Grants)  # it does not wait twice
        return grants

    def _lease_to_extend(
        self, session: KernelSession, lease_id: int, namespace: int, live: State
    ) -> KernelLease | None:
        if not lease_id:
            return None
        lease = self._leases.find(session, lease_id, LeaseKind.WRITE)
        if lease.expired:
            raise self._leases.refusal(f"write lease {lease_id:#x} has expired and gets no more pages: prepare anew")
        if lease.namespace != namespace or lease.live is not live:
            raise UsageError(f"lease {lease_id:#x} is for {lease.live.name} in namespace {lease.namespace:#x} only")
        return lease

    def _claim(
        self,
        table: NamespaceTable,
        namespace: int,
        layout_id: int,
        size_class: SizeClass,
        keys: Sequence[bytes],
        live: State,
        statuses: bytearray,
    ) -> tuple[list[Incarnation | None], list[Incarnation], list[Incarnation]]:
        """Make an incarnation for each key that is free, in the table at once. A key that comes twice in a batch is
        BUSY."""
        self._generation = generation = self._generation + 1  # one per page: no slot is granted twice in a page
        nbytes = size_class.slot_bytes
        shards, mask, new = table.shards, table.mask, Incarnation.__new__
        entries: list[Incarnation | None] = []
        created: list[Incarnation] = []
        existing: list[Incarnation] = []
        for at, key in enumerate(keys):
            shard = shards[(key[0] ^ key[31]) & mask]
            found = shard.get(key)
            if found is None:
                shard[key] = item = new(Incarnation)
                item.key = key
                item.namespace = namespace
                item.nbytes = nbytes
                item.holds = 0
                item.older = item.newer = item.policy_data = None
                item.layout_id = layout_id
                item.generation = generation
                item.state = live
                item.temporary = False
                item.checksum = item.kept_by = None
                entries.append(item)
                created.append(item)
            else:
                entries.append(None)
                if found.state is READY:
                    statuses[at] = _EXISTS
                    existing.append(found)
                else:
                    statuses[at] = _BUSY
        if created:
            # Charged before room is made: the bytes belong to the tenant from the first one.
            self._residents.charge_bytes(namespace, len(created) * nbytes)
            self._residents.undo.add((self._residents.cancel_claim, (created,)))
        return entries, created, existing

    def _refusal(self, session: KernelSession, size_class: SizeClass) -> Grant | None:
        """Why the session gets nothing of this size, however much room could be made. Nothing is evicted for a refused
        request."""
        if self.draining:
            return Grant.DRAINING
        if not self._residents.allocator.fits(size_class):
            return Grant.TOO_LARGE
        return Grant.QUOTA if self._quarantine.refuses(session) else None

    def _place_allowed(
        self,
        session: KernelSession,
        size_class: SizeClass,
        created: list[Incarnation],
        existing: list[Incarnation],
        live: State,
        may_wait: bool,
    ) -> tuple[Grant, int]:
        """As `_place`, for as many as the session's holder may have open to write."""
        room = session.written.room if live is State.WRITING else len(created) * size_class.slot_bytes
        allowed = max(0, room // size_class.slot_bytes)
        if allowed >= len(created):
            return self._place(size_class, created, existing, may_wait=may_wait)
        if not allowed:
            return Grant.QUOTA, 0
        refusal, placed = self._place(size_class, created[:allowed], existing, may_wait=may_wait)
        return Grant.QUOTA if placed == allowed else refusal, placed

    def _place(
        self,
        size_class: SizeClass,
        created: list[Incarnation],
        existing: list[Incarnation],
        *,
        may_wait: bool,
    ) -> tuple[Grant, int]:
        """Place as many as there is room for, first to last. Returns the answer for the others. With `may_wait` it
        raises `_MustWaitError` if more room can be made."""
        allocator = self._residents.allocator
        if not created:  # all of it is over its tenant's limit
            return Grant.FULL, 0
        # Placed before any eviction: a slab that is being emptied must know everything in it.
        placed = allocator.place(size_class, created)
        if placed < len(created):
            if allocator.warming:
                return Grant.WARMING, placed
            # Keys that this call reports as existing must not be evicted for the rest of their own prefix.
            self._residents.hold(existing)
            try:
                missing, namespace = len(created) - placed, created[0].namespace
                # A clear leaves more room than any eviction, and costs no hit: wait for it.
                enough = not (may_wait and self._residents.clearings) and make_room(
                    self._residents, size_class, missing, namespace, may_wait=may_wait
                )
            finally:
                self._residents.release(existing)
            if may_wait and not enough and self._residents.may_make_room:
                raise _MustWaitError
            placed += allocator.place(size_class, created[placed:])
        return Grant.FULL, placed

    def _keep_limit(
        self,
        namespace: int,
        size_class: SizeClass,
        created: list[Incarnation],
        existing: list[Incarnation],
        entries: list[Incarnation | None],
        statuses: bytearray,
    ) -> None:
        """What is over its tenant's limit replaces the tenant's own objects, or is refused."""
        residents = self._residents
        if not residents.tenancy.over_limit(namespace):
            return
        # As in `_place`: keys that this call reports as existing may be the tenant's coldest.
        residents.hold(existing)
        try:
            fit = residents.keep_limit(
                namespace, size_class.slot_bytes, len(created), max(TRIM_STEP_OBJECTS, len(created))
            )
        finally:
            residents.release(existing)
        if fit < len(created):
            self._deny(created, fit, entries, statuses, Grant.QUOTA)

    def _deny(
        self,
        created: list[Incarnation],
        first: int,
        entries: list[Incarnation | None],
        statuses: bytearray,
        refusal: Grant,
    ) -> None:
        """Those of the claim from `first` on get nothing."""
        residents, denied = self._residents, created[first:]
        del created[first:]
        residents.table.remove(denied)
        residents.charge(denied, -1)
        if refusal not in (Grant.WARMING, Grant.DRAINING):
            residents.reasons.note(denied, Reason.QUOTA if refusal is Grant.QUOTA else Reason.NO_ROOM)
        unseated = set(denied)
        for at, item in enumerate(entries):
            if item is not None and item in unseated:
                entries[at] = None
                statuses[at] = refusal

    def _page(
        self,
        session: KernelSession,
        namespace: int,
        live: State,
        now: float,
        ttl_s: float | None,
        lease: KernelLease | None,
        entries: list[Incarnation | None],
        granted: int,
    ) -> KernelLease:
        """Add the page to its lease, even if it grants nothing: positions count through all pages."""
        leases = self._leases
        if lease is None:
            ttl_s = self._ttl_s if ttl_s is None else ttl_s
            lease = KernelLease(leases.new_id(), LeaseKind.WRITE, session, namespace, live, ttl_s, now)
            lease.add_page(entries, granted)
            if granted:
                leases.open(lease)
            else:
                leases.remember(lease)
        else:
            leases.renew(lease, now)  # a page shows that the writer lives
            leases.extend(lease, entries, granted)
        return lease

    # --- commit and abort -----------------------------------------------------------------------------------

    def commit(
        self,
        session: KernelSession,
        lease_id: int,
        positions: Sequence[int] | None,
        retain: bool,
        checksums: Sequence[int | None] | None,
    ) -> bytearray:
        lease = self._leases.find(session, lease_id, LeaseKind.WRITE)
        if lease.expired:
            # The owner has answered, so the slots are free; nobody gets what it wrote.
            self._abort(lease, positions, Reason.NONE)
            raise self._leases.refusal(
                f"write lease {lease_id:#x} expired before its commit; its keys were not stored: store them again"
            )
        if checksums is not None and len(checksums) != (lease.positions if positions is None else len(positions)):
            raise UsageError(f"{len(checksums)} checksums in a commit: give one for each position, or none")
        mark = self._residents.undo.mark()
        written, where = self._leases.settle(lease, positions, Settled.COMMITTED)
        if written:
            if self._residents.clearings:
                self._residents.doom_cleared(written)
            if checksums is not None:
                _note_checksums(written, where, positions, checksums)
            self._publish(lease, written, where, retain, mark)
        return lease.answered(positions)

    def _publish(
        self, lease: KernelLease, written: list[Incarnation], where: Sequence[int], retain: bool, mark: int
    ) -> None:
        """The last step: it cannot be taken back."""
        residents, live = self._residents, lease.live
        doomed = [at for at, item in zip(where, written, strict=True) if item.state is not live]
        if doomed:
            for at in doomed:
                lease.answers[at] = Settled.CLEARED
            residents.move([item for item in written if item.state is not live], QUARANTINED, Event.ANSWER)
            written = [item for item in written if item.state is live]
        if written:
            if not retain:
                for item in written:
                    item.temporary = True
            residents.publish(written, live)
            residents.effects.append(Committed(written, live is State.LOADING))
        residents.undo.keep(mark)

    def abort(
        self, session: KernelSession, lease_id: int, positions: Sequence[int] | None, reason: Reason
    ) -> bytearray:
        lease = self._leases.find(session, lease_id, LeaseKind.WRITE)
        self._abort(lease, positions, reason)
        return lease.answered(positions)

    def abort_lease(self, lease: KernelLease, reason: Reason) -> None:
        """The owner has answered for all of it, or is dead. It is settled now; `Releases` takes the slots back."""
        if lease.pending:
            self._quarantine.charge(lease, -lease.charged_bytes)
            self._releases.written(self._leases.settle_all(lease, Settled.ABORTED), lease, reason)

    def _abort(self, lease: KernelLease, positions: Sequence[int] | None, reason: Reason) -> None:
        mark = self._residents.undo.mark()
        settled, where = self._leases.settle(lease, positions, Settled.ABORTED)
        if settled:
            if self._residents.clearings:
                self._residents.doom_cleared(settled)
            self._give_back(lease, settled, where, reason, mark)

    def _give_back(
        self, lease: KernelLease, settled: list[Incarnation], where: Sequence[int], reason: Reason, mark: int
    ) -> None:
        """The last step: it cannot be taken back."""
        live = [item for item in settled if item.state is lease.live]
        waiting = [item for item in settled if item.state is QUARANTINED]
        if live:
            self._residents.remove_unfinished(
                live, lease.live, Event.ABORT, reason, lease.session.row, lease.session.id
            )
        if waiting:
            self._residents.move(waiting, QUARANTINED, Event.ANSWER)
            if lease.expired:
                charged = zip(settled, where, strict=True)
                nbytes = sum(o.nbytes for o, at in charged if at < lease.overdue_to and o.state is State.FREE)
                self._quarantine.charge(lease, -nbytes)
        self._residents.undo.keep(mark)

    # --- late, and cleared ----------------------------------------------------------------------------------

    def expire(self, lease: KernelLease) -> None:
        """Time is up: the keys are free at once, the slots wait for the owner's answer."""
        self.expiries += 1
        self._releases.overdue(lease)
        self._residents.effects.append(LeaseExpired(lease.session.id, lease.id, lease.kind))


def _note_checksums(
    written: Sequence[Incarnation],
    where: Sequence[int],
    positions: Sequence[int] | None,
    checksums: Sequence[int | None],
) -> None:
    """`written` stood at `where` in the lease; `checksums` belong to `positions`. Some of these were settled before."""
    if len(where) < len(checksums):
        of_position = dict(zip(range(len(checksums)) if positions is None else positions, checksums, strict=True))
        checksums = [of_position[at] for at in where]
    for item, checksum in zip(written, checksums, strict=True):
        item.checksum = checksum or None  # on the wire, 0 means unknown
