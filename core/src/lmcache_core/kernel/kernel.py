"""The kernel: who may read and write which bytes of the pool. A pure state machine.

One thread calls it; it does no I/O and reads no clock: `now` (seconds, monotonic) is an argument, and what must
happen outside is appended to `effects`. The caller takes the effects after every call, also after one that
raised, and applies them before it replies.
"""

from __future__ import annotations

from collections.abc import Sequence

from lmcache_core.errors import UsageError
from lmcache_core.kernel.allocator import Allocator, slab_bytes_for
from lmcache_core.kernel.answers import Cleared, Grants, LeaseKind, LeaseStatus, Lookup, Reason, Usage
from lmcache_core.kernel.config import KernelConfig
from lmcache_core.kernel.contracts import EvictionPolicy
from lmcache_core.kernel.effects import Effect, SlotsMarked
from lmcache_core.kernel.eviction import Trimmer
from lmcache_core.kernel.leases import LeaseBook
from lmcache_core.kernel.objects import check_keys
from lmcache_core.kernel.pins import Pins
from lmcache_core.kernel.quota import Quarantine
from lmcache_core.kernel.reading import Reading
from lmcache_core.kernel.residents import Residents
from lmcache_core.kernel.sessions import SERVER_SESSION, Session, SessionBook
from lmcache_core.kernel.states import NO_ROW, State
from lmcache_core.kernel.usage import usage_of
from lmcache_core.kernel.writing import Writing, check_batch


class Kernel:
    """Objects, leases, slots. Columns of answers are positional with the keys or positions of the call."""

    def __init__(self, config: KernelConfig, policy: EvictionPolicy, epoch: int) -> None:
        """`epoch`: 24 bits that no earlier server of this pool had; lease ids start with it."""
        if not 0 <= epoch < 1 << 24:
            raise UsageError(f"epoch {epoch} must have at most 24 bits")
        unit_bytes = config.slab_bytes or slab_bytes_for(config.pool_bytes)
        policy.resize(config.pool_bytes)
        self._allocator = Allocator(config.pool_bytes, config.data_offset, unit_bytes)
        self._residents = Residents(self._allocator, policy, config.lost_keys_remembered)
        self._leases = LeaseBook(epoch, config.settled_leases_remembered)
        self._sessions = SessionBook()
        self._quarantine = Quarantine(
            int(config.quarantine_fraction_max * config.pool_bytes),
            int(config.quarantine_fraction_per_uid_max * config.pool_bytes),
        )
        self._pins = Pins(self._residents, int(config.pinned_fraction_max * config.pool_bytes))
        self._writing = Writing(config, self._residents, self._leases, self._quarantine)
        self._reading = Reading(config, self._residents, self._leases)
        self._trimmer = Trimmer(self._residents, config.watermark, config.evict_ratio)

    @property
    def effects(self) -> list[Effect]:
        """What is to be done, oldest first."""
        return self._residents.effects

    def take_effects(self) -> list[Effect]:
        """The effects so far; the kernel forgets them."""
        self._residents.flush_slabs()
        taken = self._residents.effects
        self._residents.effects = []
        return taken

    # --- memory, layouts, sessions --------------------------------------------------------------------------

    def add_memory(self, nbytes_total: int) -> None:
        """The first `nbytes_total` bytes of the slab area are populated now."""
        self._allocator.populate(nbytes_total)

    def register_layout(self, layout_id: int, nbytes: int) -> None:
        """Objects of `layout_id` have `nbytes` bytes. Repeating it is no error; changing it is a `UsageError`."""
        self._writing.register_layout(layout_id, nbytes)

    def open_session(self, session_id: int, uid: int, row: int = NO_ROW) -> None:
        """A client said hello. `row`: its row in the pool's worker table, which marks the slots it writes."""
        self._sessions.open(session_id, uid, row)

    def attach_session(self, session_id: int, row: int) -> None:
        """The session has shown that it maps the pool: it may be given slots."""
        session = self._sessions.get(session_id)
        session.attached = True
        session.row = row

    # --- write ----------------------------------------------------------------------------------------------

    def prepare_store(
        self,
        session_id: int,
        namespace: int,
        layout_id: int,
        keys: Sequence[bytes],
        now: float,
        *,
        lease_id: int = 0,
        loading: bool = False,
        ttl_s: float | None = None,
    ) -> Grants:
        """Slots for the keys that are not there, in part if need be, evicting what the policy names.

        `lease_id` adds a page to that lease: its positions continue, its deadline is renewed. `loading`: a lane
        fills them from a tier. The lease of a page that granted nothing has nothing to settle.
        """
        self._expire_due(now)
        session = self._sessions.attached(session_id)
        return self._writing.prepare(session, namespace, layout_id, keys, now, lease_id, loading, ttl_s)

    def commit_store(
        self,
        session_id: int,
        lease_id: int,
        now: float,
        positions: Sequence[int] | None = None,
        *,
        retain: bool = True,
    ) -> bytearray:
        """Make positions (None: all of the lease) visible; the `Settled` of each position asked for.

        The caller has written every byte of them. Without `retain` they go with their first reader. A lease that
        has expired raises `LeaseExpiredError`, nothing becomes visible, and the slots are free.
        """
        self._expire_due(now)
        return self._writing.commit(self._sessions.get(session_id), lease_id, positions, retain)

    def abort_store(
        self,
        session_id: int,
        lease_id: int,
        now: float,
        positions: Sequence[int] | None = None,
        *,
        reason: Reason = Reason.NONE,
    ) -> bytearray:
        """Give positions (None: all) back; the caller writes to them no more. Also answers an expired lease.

        `reason` is what later lookups of these keys are told.
        """
        self._expire_due(now)
        return self._writing.abort(self._sessions.get(session_id), lease_id, positions, reason)

    # --- read -----------------------------------------------------------------------------------------------

    def prepare_retrieve(
        self,
        session_id: int,
        namespace: int,
        keys: Sequence[bytes],
        now: float,
        *,
        promise_id: int = 0,
        lease_id: int = 0,
        prefix: bool = False,
        layout_id: int = 0,
        ttl_s: float | None = None,
    ) -> Grants:
        """Pin what is ready of the keys. `prefix`: only up to the first that is not; nothing is held behind it.

        `promise_id` redeems a promise for these keys; one that is gone changes nothing but its count.
        `layout_id` (0: any): objects of another layout are a MISS.
        """
        self._expire_due(now)
        session = self._sessions.attached(session_id)
        return self._reading.prepare(session, namespace, keys, now, promise_id, lease_id, prefix, layout_id, ttl_s)

    def finish_read(
        self, session_id: int, lease_id: int, now: float, positions: Sequence[int] | None = None
    ) -> bytearray:
        """Unpin positions (None: all); the `Settled` of each position asked for. Also answers an expired lease."""
        self._expire_due(now)
        return self._reading.finish(self._sessions.get(session_id), lease_id, positions)

    def lookup(
        self,
        session_id: int,
        namespace: int,
        keys: Sequence[bytes],
        now: float,
        *,
        hold: bool = False,
        prefix: bool = False,
    ) -> Lookup:
        """What is ready. `hold`: a promise keeps what was found until it is redeemed, freed, or too old."""
        self._expire_due(now)
        return self._reading.lookup(self._sessions.get(session_id), namespace, keys, now, hold, prefix)

    def free_lookup_locks(self, session_id: int, promise_ids: Sequence[int], now: float) -> int:
        """End the session's promises; how many were still open."""
        self._expire_due(now)
        return self._reading.free_promises(self._sessions.get(session_id), promise_ids)

    # --- any lease ------------------------------------------------------------------------------------------

    def renew_lease(self, session_id: int, lease_id: int, now: float) -> float:
        """Start the lease's time anew; its deadline. An expired one raises `LeaseExpiredError`."""
        self._expire_due(now)
        lease = self._leases.find(self._sessions.get(session_id), lease_id, None)
        if lease.expired or not lease.pending:
            state = "has expired" if lease.expired else "is settled"
            raise self._leases.refusal(f"lease {lease_id:#x} {state} and cannot be renewed: prepare anew")
        self._leases.renew(lease, now)
        return lease.deadline

    def lease_status(self, session_id: int, lease_id: int, now: float) -> LeaseStatus:
        """What became of each position so far; also of a lease that was settled a while ago."""
        self._expire_due(now)
        return self._leases.find(self._sessions.get(session_id), lease_id, None).status()

    # --- pins, clear, drop ----------------------------------------------------------------------------------

    def pin(self, session_id: int, namespace: int, keys: Sequence[bytes], ttl_s: float, now: float) -> bytearray:
        """Keep ready objects from eviction for `ttl_s`: GRANTED, MISS or QUOTA. The pin is the server's."""
        self._expire_due(now)
        self._sessions.get(session_id)
        check_batch(keys, None)
        if not ttl_s > 0:
            raise UsageError(f"a pin for {ttl_s} seconds is none: give a positive ttl_s, or unpin")
        return self._pins.pin(namespace, keys, now + ttl_s)

    def unpin(self, session_id: int, namespace: int, keys: Sequence[bytes], now: float) -> bytearray:
        """End pins: GRANTED where there was one, else MISS."""
        self._expire_due(now)
        self._sessions.get(session_id)
        check_batch(keys, None)
        return self._pins.unpin(namespace, keys)

    def clear(self, now: float, namespace: int | None = None) -> Cleared:
        """Empty a namespace, or all. What is being written or loaded will not appear; held objects leave the
        index at once and their memory with the last hold. Costs what it removes."""
        self._expire_due(now)
        doomed = 0
        for lease in list(self._leases.all()):
            if lease.kind is LeaseKind.WRITE and namespace in (None, lease.namespace):
                doomed += self._writing.doom(lease)
        table = self._residents.table
        cleared = Cleared(0, 0, doomed)
        for scope in list(table.namespaces) if namespace is None else [namespace]:
            ready = list(table.of(scope))
            table.drop(scope)
            if ready:
                self._residents.forget(ready, Reason.CLEARED)
                self._pins.let_go(ready)
                cleared.objects += len(ready)
                cleared.nbytes += sum(item.nbytes for item in ready)
        return cleared

    def drop(self, namespace: int, keys: Sequence[bytes], now: float, reason: Reason) -> None:
        """Delete those of the keys that are ready; slots that are held follow with the last hold."""
        self._expire_due(now)
        check_keys(keys)
        table = self._residents.table.of(namespace)
        found = dict.fromkeys(item for key in keys if (item := table.get(key)) is not None)
        ready = [item for item in found if item.state is State.READY]
        self._residents.remove(ready, reason)
        self._pins.let_go(ready)

    # --- the end of sessions --------------------------------------------------------------------------------

    def end_session(self, session_id: int, now: float) -> None:
        """Settle all that the session holds, as it says itself; the session stays open."""
        self._expire_due(now)
        self._settle_all(self._sessions.get(session_id), Reason.ABORTED)

    def session_closed(self, session_id: int, now: float) -> None:
        """An orderly goodbye: it has answered for everything. An unknown session is no error."""
        self._end(session_id, now, Reason.ABORTED)

    def session_dead(self, session_id: int, now: float) -> None:
        """Its death is proven: nobody touches what it held. An unknown session is no error."""
        self._end(session_id, now, Reason.WRITER_DIED)

    def session_lost(self, session_id: int, now: float) -> None:
        """Its connection ended and nothing is proven: leases go on to their deadlines, write slots then wait in
        quarantine, pins stay, until `session_dead` or `reclaim`."""
        self._expire_due(now)
        session = self._sessions.by_id.get(session_id)
        if session is not None and not session.lost and session_id != SERVER_SESSION:
            self._quarantine.lost(session)
            self._forget_if_done(session)

    def reclaim(self, old_session_id: int, new_session_id: int, lease_ids: Sequence[int], now: float) -> list[int]:
        """The same client instance is back: these leases of its old session move to the new one, all others are
        settled, for it has said that it does not hold them. The ids that moved, also of settled leases."""
        self._expire_due(now)
        new = self._sessions.get(new_session_id)
        old = self._sessions.by_id.get(old_session_id)
        if old is None or old is new or old_session_id == SERVER_SESSION:
            return []
        if old.uid != new.uid:
            raise UsageError(f"session {new_session_id} is of uid {new.uid} and cannot take over one of uid {old.uid}")
        moved = [lease_id for lease_id in lease_ids if self._move(lease_id, old, new)]
        self._end(old_session_id, now, Reason.ABORTED)
        return moved

    def _move(self, lease_id: int, old: Session, new: Session) -> bool:
        lease = self._leases.of_session(old, lease_id)
        if lease is None:
            return False
        self._quarantine.move(lease, new)
        if old.leases.pop(lease_id, None) is not None:
            new.leases[lease_id] = lease
        if lease.kind is LeaseKind.WRITE:
            held = lease.held()
            for state in (lease.live, State.QUARANTINED):
                offsets = [item.offset for item in held if item.state is state]
                if offsets:
                    self.effects.append(SlotsMarked(offsets, state, new.row))
        return True

    def _end(self, session_id: int, now: float, reason: Reason) -> None:
        self._expire_due(now)
        session = self._sessions.by_id.get(session_id)
        if session is not None and session_id != SERVER_SESSION:
            self._settle_all(session, reason)
            del self._sessions.by_id[session_id]

    def _settle_all(self, session: Session, reason: Reason) -> None:
        for lease in list(session.leases.values()):
            if lease.kind is LeaseKind.WRITE:
                self._writing.give_up(lease, reason)
            else:
                self._reading.let_go(lease)

    # --- time and room --------------------------------------------------------------------------------------

    def expire(self, now: float) -> None:
        """End what is due. Every other call does so too, so a late timer changes nothing that anyone sees."""
        for lease in self._leases.due(now):
            if lease.kind is LeaseKind.WRITE:
                self._writing.expire(lease)
            else:
                self._reading.expire(lease)
                self._forget_if_done(lease.session)
        self._pins.expire(now)

    def next_deadline(self) -> float | None:
        """When `expire` may have something to do; perhaps too early, never too late."""
        leases, pins = self._leases.next_deadline(), self._pins.next_deadline()
        if leases is None or (pins is not None and pins < leases):
            return pins
        return leases

    def trim(self, now: float) -> int:
        """One bounded step towards headroom; the objects it evicted. Call again while it is not 0."""
        self._expire_due(now)
        return self._trimmer.step()

    def _expire_due(self, now: float) -> None:
        leases, pins = self._leases.next_deadline(), self._pins.next_deadline()
        if (leases is not None and leases <= now) or (pins is not None and pins <= now):
            self.expire(now)

    def _forget_if_done(self, session: Session) -> None:
        if session.lost and not session.leases:
            self._sessions.by_id.pop(session.id, None)

    # --- telling --------------------------------------------------------------------------------------------

    def usage(self) -> Usage:
        """What is held now."""
        expiries = self._writing.expiries + self._reading.expiries
        return usage_of(self._residents, self._leases, self._sessions, self._quarantine, self._pins, expiries)
