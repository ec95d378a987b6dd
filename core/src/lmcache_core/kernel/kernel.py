"""The kernel: who may read and write which bytes of the pool. A pure state machine.

One thread calls it. It does no I/O and reads no clock: `now` (monotonic seconds) is an argument, and what must happen
outside is appended to `effects`. The caller takes the effects after every call, even one that raised, and applies them
before it replies.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import ClassVar

from lmcache_core.errors import CacheError, InvariantError, UsageError
from lmcache_core.kernel.adoption import Adoption
from lmcache_core.kernel.allocator import Allocator, slab_bytes_for
from lmcache_core.kernel.answers import ClearedCount, Grants, KernelLookup, KernelUsage, LeaseKind, LeaseStatus, Reason
from lmcache_core.kernel.clearing import Clearing
from lmcache_core.kernel.config import KernelConfig
from lmcache_core.kernel.contracts import EvictionPolicy
from lmcache_core.kernel.effects import Effect
from lmcache_core.kernel.endings import Endings
from lmcache_core.kernel.eviction import TRIM_STEP_OBJECTS, Trimmer
from lmcache_core.kernel.explain import Explanation, explain
from lmcache_core.kernel.fence import STEP_OBJECTS, Fence
from lmcache_core.kernel.leases import LeaseBook
from lmcache_core.kernel.ledger import Ledger, Sort
from lmcache_core.kernel.memory import Memory
from lmcache_core.kernel.objects import Incarnation, Named, check_keys
from lmcache_core.kernel.pins import Pins
from lmcache_core.kernel.quota import Quarantine
from lmcache_core.kernel.reading import Reading
from lmcache_core.kernel.recount import recount
from lmcache_core.kernel.releases import Releases
from lmcache_core.kernel.residents import Residents
from lmcache_core.kernel.rooms import Preparation, Rooms
from lmcache_core.kernel.sessions import SERVER_SESSION, SessionBook
from lmcache_core.kernel.states import NO_ROW, TRANSITIONS, Event, State
from lmcache_core.kernel.tenants import Quota
from lmcache_core.kernel.undo import Undo
from lmcache_core.kernel.usage import usage_of
from lmcache_core.kernel.writing import Writing, check_batch

_ROOM = __file__.removesuffix("kernel.py")  # where the code of all tables is


class Kernel:
    """Objects, leases, slots. Columns of answers are positional with the keys or positions of the call.

    No call costs more than its own batch and one bounded step; `prepare_store` and `clear` combine many calls.
    """

    call_objects_max: ClassVar[int | None] = None  # set by tests: longer calls are noted in `long_calls`
    long_calls: ClassVar[list[int]] = []  # objects touched by each call that touched more

    def __init__(
        self,
        config: KernelConfig,
        policy: EvictionPolicy,
        epoch: int,
        make_policy: Callable[[], EvictionPolicy] | None = None,
    ) -> None:
        """`epoch`: 24 bits that no earlier server of this pool used; lease ids start with it. `make_policy` makes a
        policy for each tenant."""
        if not 0 <= epoch < 1 << 24:
            raise UsageError(f"epoch {epoch} must have at most 24 bits")
        self.epoch = epoch
        self._touched_before = 0  # when the last call began
        unit_bytes = config.slab_bytes or slab_bytes_for(config.pool_bytes)
        policy.resize(config.pool_bytes)
        self._allocator = Allocator(config.pool_bytes, config.data_offset, unit_bytes)
        self.undo = Undo()
        self._residents = Residents(self._allocator, policy, config.lost_keys_remembered, self.undo)
        self.effects = self._residents.effects  # the same list for good, oldest effect first: every turn looks at it
        self._residents.shield.yields = not config.keeps_dirty
        self._residents.tenancy.make = make_policy
        self._leases = LeaseBook(epoch, config.settled_leases_remembered, self.undo)
        self.memory = Memory()  # of the whole process: the server's other parts charge theirs, too
        self._ledger = Ledger(config.caps, self.memory)
        self._sessions = SessionBook(self._ledger, self.memory)
        self._quarantine = Quarantine(
            int(config.quarantine_fraction_max * config.pool_bytes),
            int(config.quarantine_fraction_per_uid_max * config.pool_bytes),
        )
        self._pins = Pins(self._residents, int(config.pinned_fraction_max * config.pool_bytes))
        self._fence = Fence(self._residents, self._pins)
        self._releases = Releases(self._residents, self._quarantine)
        self._writing = Writing(config, self._residents, self._fence, self._leases, self._quarantine, self._releases)
        self._reading = Reading(config, self._residents, self._leases, self._pins, self._releases)
        self._rooms = Rooms(self._residents, self._fence, self._releases, self._writing.carry_out)
        self._endings = Endings(
            self._releases, self._sessions, self._leases, self._quarantine, self._writing, self._reading, self._rooms
        )
        self._trimmer = Trimmer(self._residents, config.watermark, config.evict_ratio)
        self.adoption = Adoption(self._residents, self._releases, epoch)  # of a dead server's pool

    @property
    def residents(self) -> Residents:
        """What is in the pool, and in what order it is evicted. Read-only: only the methods here change it."""
        return self._residents

    @property
    def allocator(self) -> Allocator:
        """Which slab belongs to which class. Read-only, like `residents`."""
        return self._allocator

    @property
    def leases(self) -> LeaseBook:
        """Open leases, and those that were settled lately. Read-only, like `residents`."""
        return self._leases

    def take_effects(self) -> list[Effect]:
        """Return the effects so far; the kernel forgets them."""
        if self.call_objects_max is not None:
            self._judge_call()
        self._residents.flush_slabs()
        taken = list(self.effects)
        self.effects.clear()
        return taken

    # --- memory, layouts, sessions --------------------------------------------------------------------------

    def add_memory(self, nbytes_total: int) -> None:
        """The first `nbytes_total` bytes of the slab area are now populated."""
        self._allocator.populate(nbytes_total)

    def memory_stalled(self) -> None:
        """No more memory comes for now: what there is must do, until the next `add_memory`."""
        self._allocator.stalled = True

    def register_layout(self, layout_id: int, nbytes: int) -> None:
        """Objects of `layout_id` have `nbytes` bytes. Repeating it is fine; changing it is a `UsageError`."""
        self._writing.register_layout(layout_id, nbytes)

    def remove_layout(self, layout_id: int) -> None:
        """Free the id, so that it may be registered for objects of another size. The caller has checked that it is not
        in use: with `uses_layout`, and with everyone who may still ask for slots of it."""
        self._writing.remove_layout(layout_id)

    def uses_layout(self, layout_id: int) -> bool:
        """Whether any slot holds an object of it: written, loaded, ready, or held by a lease after its end."""
        return self._residents.objects_by_layout.get(layout_id, 0) > 0

    def layout_of(self, namespace: int) -> int | None:
        """The layout of the namespace's objects; None if it has none. Makes no adopted object."""
        item = next(iter(self._residents.table.of(namespace)), None)
        return self.adoption.layout_of(namespace) if item is None else item.layout_id

    def open_session(self, session_id: int, uid: int, row: int = NO_ROW, *, holder: str = "") -> None:
        """A client said hello. `row`: its row in the pool's worker table, which marks the slots it writes. `holder`:
        the holder that the ledger counts its session with; by default its uid."""
        self._sessions.open(session_id, uid, row, holder or f"uid {uid}")

    def charge_namespaces(self, session_id: int, count: int, label_chars: int = 0) -> None:
        """The session uses so many namespaces more, with labels of so many characters; negative: fewer."""
        self._sessions.charge_namespaces(session_id, count, label_chars)

    @property
    def kept_memory_bytes(self) -> int:
        """Bytes of the process that are kept for everybody: what is charged, and the answers of settled leases."""
        return sum(account.nbytes for account in self.memory.all) + self._leases.remembered_bytes

    def attach_session(self, session_id: int, row: int) -> None:
        """The session has proved that it maps the pool: it may now get slots."""
        session = self._sessions.get(session_id)
        session.attached = True
        session.row = row

    def holds(self, session_id: int) -> bool:
        """Whether the session has a lease of any kind, or a slot in quarantine. False for an unknown session."""
        return self._sessions.holds(session_id)

    def begin_drain(self) -> None:
        """The server is shutting down: grant no more slots, so that the work for tiers can finish."""
        self._writing.draining = True
        self._rooms.hurry()

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
        """`begin_store` and all its steps in one call. It costs what it evicts: only for callers who block nobody."""
        answer = self.begin_store(
            session_id,
            namespace,
            layout_id,
            keys,
            now,
            lease_id=lease_id,
            loading=loading,
            ttl_s=ttl_s,
            wait_s=math.inf,
        )
        if isinstance(answer, Grants):
            return answer
        while not answer.done:
            self.step(now, session_id)
        if answer.error is not None:
            raise answer.error
        assert answer.grants is not None
        return answer.grants

    def begin_store(
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
        wait_s: float = 0.0,
    ) -> Grants | Preparation:
        """Reserve slots for the keys that are not there, perhaps only for some, and evict what the policy names.

        `lease_id` adds a page to that lease: its positions continue, its deadline is renewed. `loading`: a lane fills
        the slots from a tier. A page that was granted nothing leaves nothing to settle.

        If more must be evicted than one step may evict, the answer is a `Preparation`. It is done after some more
        `step`s, and no later than `now + wait_s` or the lease's deadline (`ttl_s`). With `wait_s` 0, keys without room
        now are FULL.
        """
        self._expire_due(now, session_id)
        self.adoption.touch(namespace, keys)
        session = self._sessions.attached(session_id)
        live = TRANSITIONS[State.FREE, Event.LOAD if loading else Event.GRANT]
        answer = self._writing.prepare(session, namespace, layout_id, keys, now, lease_id, live, ttl_s, wait_s)
        if isinstance(answer, Preparation):
            self._rooms.add(answer)
        return answer

    def cancel_store(self, preparation: Preparation) -> None:
        """Nobody waits for it any more. A finished one is not changed."""
        self._rooms.cancel(preparation)
        self._releases.step()

    def step(self, now: float, session_id: int = SERVER_SESSION) -> None:
        """Do one bounded step of the work under way: grants that wait for room, what leases have settled, and what
        tenants must give up. Call it while `working`."""
        self._expire_due(now, session_id)
        self._rooms.step(now)
        self._releases.step()
        if self._residents.tenants_wait:
            self._residents.step_tenants(TRIM_STEP_OBJECTS)

    @property
    def working(self) -> bool:
        """Whether `step` has something left to do."""
        return bool(self._rooms.waiting or self._releases.work or self._residents.tenants_wait)

    @property
    def preparing(self) -> int:
        """Number of grants that wait for room."""
        return len(self._rooms.waiting)

    def grant_more(
        self,
        session_id: int,
        namespace: int,
        layout_id: int,
        keys: Sequence[bytes],
        grants: Grants,
        now: float,
        *,
        wait_s: float = 0.0,
    ) -> Preparation | None:
        """Try again for the FULL keys of a page that is not answered yet; `grants` gets the new answers.

        If more must be evicted than one step may evict, and `wait_s` is given, the answer is a `Preparation` like that
        of `begin_store`; pass what it is granted to `take_more`. Raises `LeaseExpiredError` once the lease is gone; the
        page keeps what it had.
        """
        self._expire_due(now, session_id)
        self.adoption.touch(namespace, keys)
        session = self._sessions.attached(session_id)
        more = self._writing.grant_more(session, namespace, layout_id, keys, grants, now, wait_s)
        if more is not None:
            self._rooms.add(more)
        return more

    def take_more(self, session_id: int, namespace: int, grants: Grants, more: Grants, now: float) -> None:
        """Give the page whose FULL keys were granted `more` those slots, at their own positions and under its own
        lease. Raises `LeaseExpiredError` as `grant_more` does; then abort the lease of `more`."""
        self._expire_due(now, session_id)
        self._writing.take_more(self._sessions.attached(session_id), namespace, grants, more, now)

    def commit_store(
        self,
        session_id: int,
        lease_id: int,
        now: float,
        positions: Sequence[int] | None = None,
        *,
        retain: bool = True,
        checksums: Sequence[int | None] | None = None,
    ) -> bytearray:
        """Make positions (None: the whole lease) visible. Returns the `Settled` of each position asked for.

        The caller has written every byte of them. `checksums`, positional, are the xxh3_64 of these bytes where known.
        Without `retain` they are dropped after their first reader. A lease that has expired raises `LeaseExpiredError`:
        nothing becomes visible, and the slots are free.
        """
        self._expire_due(now)
        return self._writing.commit(self._sessions.get(session_id), lease_id, positions, retain, checksums)

    def abort_store(
        self,
        session_id: int,
        lease_id: int,
        now: float,
        positions: Sequence[int] | None = None,
        *,
        reason: Reason = Reason.NONE,
    ) -> bytearray:
        """Give positions (None: all) back; the caller no longer writes to them. Also answers for an expired lease.

        Later lookups of these keys are told `reason`.
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
        verify: bool = False,
        identify: bool = False,
    ) -> Grants:
        """Pin the ready ones of the keys. `prefix`: only up to the first that is not ready; nothing behind it is held.

        `promise_id` redeems a promise for these keys; a promise that is gone is only counted. `layout_id` (0: any):
        objects of another layout are a MISS. `verify`: also return their checksums. `identify`: also return their
        incarnations.
        """
        self._expire_due(now)
        self.adoption.touch(namespace, keys)
        session = self._sessions.attached(session_id)
        return self._reading.prepare(
            session, namespace, keys, now, promise_id, lease_id, prefix, layout_id, ttl_s, verify, identify
        )

    def finish_read(
        self, session_id: int, lease_id: int, now: float, positions: Sequence[int] | None = None
    ) -> bytearray:
        """Unpin positions (None: all). Returns the `Settled` of each position asked for. Also answers for an expired
        lease."""
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
        identify: bool = False,
    ) -> KernelLookup:
        """Find what is ready. `hold`: a promise keeps it until the promise is redeemed, freed, or too old. `identify`:
        say which incarnations were found."""
        self._expire_due(now)
        self.adoption.touch(namespace, keys)
        return self._reading.lookup(self._sessions.get(session_id), namespace, keys, now, hold, prefix, identify)

    def ready(self, namespace: int, wanted: Sequence[Named]) -> list[Incarnation | None]:
        """The incarnation that each (key, generation) names; None if it is not ready. Does not count as use."""
        return self._residents.standing_as(namespace, wanted)

    # --- what tiers hold, and say, of incarnations --------------------------------------------------------------

    def leading_gone(self, namespace: int, wanted: Iterable[Named]) -> int:
        """How many of these incarnations come before the first ready one. Makes no adopted object."""
        return self._reading.leading_gone(namespace, wanted)

    def hold_incarnations(
        self, namespace: int, wanted: Sequence[Named], now: float
    ) -> tuple[int, list[Incarnation | None]]:
        """Take a read lease for the server on exactly these incarnations. Returns its id, and what each position holds:
        None if that incarnation is gone, even if its key has a successor. Does not count as use."""
        self._expire_due(now)
        return self._reading.hold_incarnations(self._sessions.get(SERVER_SESSION), namespace, wanted, now)

    def shield(self, namespace: int, wanted: Sequence[Named]) -> None:
        """These incarnations are on their way to tiers: until `unshield` they are evicted last, or (`keeps_dirty`) not
        at all. Incarnations that are gone are ignored."""
        found = self._residents.standing_as(namespace, wanted)
        self._residents.shield.cover([item for item in found if item is not None])

    def unshield(self, namespace: int, wanted: Sequence[Named]) -> None:
        """These need no more work for tiers: they are evicted like all others again."""
        if self.shielded:
            found = self._residents.standing_as(namespace, wanted)
            self._residents.shield.uncover([item for item in found if item is not None])

    def unshield_some(self, objects_max: int) -> int:
        """As `unshield`, for the oldest. Returns how many."""
        return self._residents.shield.uncover_some(objects_max)

    @property
    def ready_objects(self) -> int:
        """Number of ready objects, including adopted ones that are not made yet."""
        return self._residents.objects_by_state[State.READY]

    def walk(self) -> Iterator[Incarnation | None]:
        """Each slot, in order, with the object that it serves; None for one that serves none, or only one reader."""
        table = self._residents.table
        for item in self._allocator.walk():
            served = item is not None and item.state is State.READY and not item.temporary
            yield item if item is not None and served and table.of(item.namespace).get(item.key) is item else None

    @property
    def shielded(self) -> int:
        """Number of objects on their way to tiers."""
        return len(self._residents.shield)

    @property
    def unshielded(self) -> int:
        """Running count of objects unshielded. While it stays the same, a refused store would be refused again."""
        return self._residents.shield.uncovered

    def drop_incarnations(self, namespace: int, wanted: Sequence[Named], now: float, reason: Reason) -> int:
        """As `drop`, for exactly these incarnations: a successor under the same key stays. Returns how many were
        there."""
        self._expire_due(now)
        keys = [key for key, _ in wanted]
        check_keys(keys)
        self.adoption.touch(namespace, keys)
        found = dict.fromkeys(item for item in self._residents.standing_as(namespace, wanted) if item is not None)
        self._drop(list(found), reason)
        return len(found)

    def kept(self, namespace: int, keys: Sequence[bytes]) -> list[Incarnation]:
        """The ready ones of these keys, without those that are dropped after their first reader. Does not count as
        use."""
        self.adoption.touch(namespace, keys)
        table = self._residents.table.of(namespace)
        found = dict.fromkeys(item for key in keys if (item := table.get(key)) is not None)
        return [item for item in found if item.state is State.READY and not item.temporary]

    def report_damaged(self, session_id: int, lease_id: int, now: float, positions: Sequence[int]) -> bytearray:
        """End a read lease's hold on these positions and delete their objects: their bytes are not what was stored.
        Returns the `Settled` of each."""
        self._expire_due(now)
        return self._reading.report_damaged(self._sessions.get(session_id), lease_id, positions)

    def settle_verified(
        self, sound: Sequence[Incarnation], damaged: Sequence[Incarnation], now: float
    ) -> tuple[list[Incarnation], list[Incarnation]]:
        """The bytes of adopted objects were compared with their checksums: nobody has to check the sound ones again,
        and the damaged ones are deleted. Returns both lists without objects that have left the pool meanwhile: the
        bytes that were checked may have been another object's."""
        self._expire_due(now)
        sound = [item for item in sound if item.state is State.READY]
        damaged = [item for item in damaged if item.state is State.READY]
        for item in sound:
            item.__class__ = Incarnation  # both classes have the same fields
        self._drop(damaged, Reason.DAMAGED)
        return sound, damaged

    def explain(
        self, session_id: int, namespace: int, layout_id: int, keys: Sequence[bytes], now: float
    ) -> Explanation:
        """Where the keys are, or how they were lost, if that is remembered."""
        self._expire_due(now)
        self.adoption.touch(namespace, keys)
        self._sessions.get(session_id)
        check_batch(keys, None)
        return explain(self._residents, namespace, layout_id, keys)

    def free_lookup_locks(self, session_id: int, promise_ids: Sequence[int], now: float) -> int:
        """End the session's promises. Returns how many were still open."""
        self._expire_due(now)
        freed = self._reading.free_promises(self._sessions.get(session_id), promise_ids)
        self._releases.step()
        return freed

    def redeem_promise(self, promise_id: int, namespace: int, keys: Sequence[bytes], now: float) -> int:
        """These keys of a promise were read without a lease. Returns for how many of them it kept something."""
        self._expire_due(now)
        redeemed = self._reading.redeem(promise_id, namespace, keys)
        self._releases.step()
        return redeemed

    def promise_more(
        self, promise_id: int, namespace: int, keys: Sequence[bytes], now: float, *, prefix: bool = False
    ) -> float | None:
        """Extend the promise of a lookup of these keys to those that have arrived since. Returns its new deadline.
        None: it is gone, and nothing is kept."""
        self._expire_due(now)
        self.adoption.touch(namespace, keys)
        return self._reading.promise_more(promise_id, namespace, keys, now, prefix)

    def take_promise_back(self, promise_id: int, now: float) -> None:
        """End a promise that was never answered."""
        self._expire_due(now)
        self._reading.take_promise_back(promise_id)
        self._releases.step()

    def used(self, keys: Sequence[tuple[int, bytes]], now: float) -> int:
        """Workers have read these, (namespace, key), without a call. Returns how many are still there.

        In the order of use, as the policy takes it: the end of a prompt before its beginning. Temporary objects are
        dropped after this reader, unless somebody holds them.
        """
        self._expire_due(now)
        if self._residents.untouched is not None:
            for namespace, key in keys:
                self.adoption.touch(namespace, [key])
        return self._reading.used(keys)

    # --- any lease ------------------------------------------------------------------------------------------

    def renew_lease(self, session_id: int, lease_id: int, now: float) -> float:
        """Restart the lease's time. Returns its deadline. An expired lease raises `LeaseExpiredError`."""
        self._expire_due(now)
        lease = self._leases.find(self._sessions.get(session_id), lease_id, None)
        if lease.expired or not lease.pending:
            state = "has expired" if lease.expired else "is settled"
            raise self._leases.refusal(f"lease {lease_id:#x} {state} and cannot be renewed: prepare anew")
        self._leases.renew(lease, now)
        return lease.deadline

    def lease_status(self, session_id: int, lease_id: int, now: float) -> LeaseStatus:
        """The outcome of each position so far; also for a lease that was settled a while ago."""
        self._expire_due(now)
        return self._leases.find(self._sessions.get(session_id), lease_id, None).status()

    # --- pins, clear, drop ----------------------------------------------------------------------------------

    def pin(self, session_id: int, namespace: int, keys: Sequence[bytes], ttl_s: float, now: float) -> bytearray:
        """Keep ready objects from eviction for `ttl_s`: GRANTED, MISS or QUOTA. The pin belongs to the server."""
        self._expire_due(now)
        self.adoption.touch(namespace, keys)
        session = self._sessions.get(session_id)
        check_batch(keys, None)
        if not 0 < ttl_s < math.inf:
            raise UsageError(f"a pin for {ttl_s} seconds: give a positive ttl_s, after which it ends, or unpin")
        return self._pins.pin(namespace, keys, now + ttl_s, session.accounts[Sort.PINNED])

    def unpin(self, session_id: int, namespace: int, keys: Sequence[bytes], now: float) -> bytearray:
        """End pins: GRANTED if there was one, else MISS."""
        self._expire_due(now)
        self.adoption.touch(namespace, keys)
        self._sessions.get(session_id)
        check_batch(keys, None)
        return self._pins.unpin(namespace, keys)

    def clear(self, now: float, namespace: int | None = None) -> ClearedCount:
        """`begin_clear` and all its steps in one call. It costs what it removes: only for callers who block nobody."""
        clearing = self.begin_clear(now, namespace)
        while not clearing.done:
            self.free_cleared(now)
        return clearing.cleared

    def begin_clear(self, now: float, namespace: int | None = None, *, session_id: int = SERVER_SESSION) -> Clearing:
        """Empty a namespace, or all: nothing in it is found from now on, and what is being written will not appear.
        `free_cleared` frees the slots in steps, with an effect for each. Held slots are freed with the last hold, and
        slots that are being written with their writer's answer. The count is complete once it is `done`; clears are
        done in the order in which they began."""
        self._expire_due(now)
        clearing = self._fence.begin(namespace, now, session_id)
        self._rooms.clear(namespace)
        self.adoption.cleared(namespace, clearing)
        return clearing

    def free_cleared(self, now: float, objects_max: int = STEP_OBJECTS) -> int:
        """Do one bounded step of the clears under way. Returns how many objects it freed or doomed."""
        self._expire_due(now)
        return self._fence.step(objects_max)

    @property
    def clearing(self) -> bool:
        """Whether a clear still has something to free."""
        return bool(self._residents.clearings)

    def drop(self, namespace: int, keys: Sequence[bytes], now: float, reason: Reason) -> None:
        """Delete the ready ones of the keys. Held slots are freed with the last hold."""
        self._expire_due(now)
        self.adoption.touch(namespace, keys)
        check_keys(keys)
        table = self._residents.table.of(namespace)
        found = dict.fromkeys(item for key in keys if (item := table.get(key)) is not None)
        self._drop([item for item in found if item.state is State.READY], reason)

    def _drop(self, ready: list[Incarnation], reason: Reason) -> None:
        self._pins.remove(ready)
        self._residents.remove(ready, reason)

    # --- the end of sessions --------------------------------------------------------------------------------

    def end_session(self, session_id: int, now: float, lease_ids: Sequence[int] | None = None) -> None:
        """Settle what the session holds, at its own request: its promises, and these leases (None: all). Its grants
        that wait for room are cancelled. The session stays open. As with every end, the leases are settled on return;
        what they held is released in steps."""
        self._expire_due(now)
        self._endings.settle_all(self._sessions.get(session_id), Reason.ABORTED, lease_ids)
        self._releases.step()

    def session_closed(self, session_id: int, now: float) -> None:
        """An orderly goodbye: the session has answered for everything. An unknown session is no error."""
        self._expire_due(now)
        self._endings.end(session_id, Reason.ABORTED)
        self._releases.step()

    def session_dead(self, session_id: int, now: float) -> None:
        """Its death is proven: nobody touches what it held. An unknown session is no error."""
        self._expire_due(now)
        self._endings.end(session_id, Reason.WRITER_DIED)
        self._releases.step()

    def session_lost(self, session_id: int, now: float) -> None:
        """Its connection ended, but its death is not proven. Its leases run to their deadlines, then its write slots
        wait in quarantine, and its pins stay, until `session_dead` or `reclaim`."""
        self._expire_due(now)
        self._endings.lost(session_id)
        self._releases.step()

    def reclaim(self, old_session_id: int, new_session_id: int, lease_ids: Sequence[int], now: float) -> list[int]:
        """The same client instance is back. These leases of its old session move to the new one; all others are
        settled, because the client does not claim to hold them. Returns the ids that moved, also of settled leases."""
        self._expire_due(now)
        moved = self._endings.reclaim(old_session_id, new_session_id, lease_ids)
        self._releases.step()
        return moved

    def leave_row(self, row: int) -> None:
        """No session has this row of the worker table any more; reclaimed slots may still name it for some steps. The
        effect `RowLeft` says when the row may be reused."""
        self._releases.row_left(row)
        self._releases.step()

    def keep_promises(self, old_session_id: int, new_session_id: int, now: float) -> None:
        """The same client instance is back: the promises of its old session move to the new one, and keep their
        deadlines."""
        self._expire_due(now)
        self._endings.keep_promises(old_session_id, new_session_id)

    # --- time and room --------------------------------------------------------------------------------------

    def expire(self, now: float) -> None:
        """End what is due, a bounded number at a time. Every other call does so too, so a late timer has no visible
        effect."""
        self._residents.reasons.now = now
        for lease in self._leases.due(now, STEP_OBJECTS):
            if lease.kind is LeaseKind.WRITE:
                self._writing.expire(lease)
            else:
                self._reading.expire(lease)
                self._sessions.remove_if_done(lease.session)
        self._pins.expire(now, STEP_OBJECTS)
        self._releases.step()

    def next_deadline(self) -> float | None:
        """When `expire` may have something to do. It may be too early, never too late."""
        leases, pins = self._leases.next_deadline(), self._pins.next_deadline()
        if leases is None or (pins is not None and pins < leases):
            return pins
        return leases

    def trim(self, now: float) -> int:
        """Do one bounded step towards headroom. Returns how many objects it evicted. Call again until it is 0."""
        self._expire_due(now)
        self._residents.tenancy.look()
        return self._trimmer.step()

    def set_tenant(self, name: str, namespaces: frozenset[int], quota: Quota, now: float) -> None:
        """Set a tenant with these namespaces, which no other tenant has. New figures hold from the next store on.
        Objects change owner, and those beyond the limit are evicted, in `step`s."""
        self._expire_due(now)
        self._residents.tenancy.change(name, namespaces, quota, self._allocator.pool_bytes)

    def remove_tenant(self, name: str, now: float) -> None:
        """Its namespaces belong to no tenant again. An unknown name is no error."""
        self._expire_due(now)
        self._residents.tenancy.remove(name)

    def tenant_of(self, namespace: int) -> str:
        """The name of the tenant that has the namespace; empty if no tenant lists it."""
        return self._residents.tenancy.tenant_of(namespace)

    def may_evict(self, layout_id: int, keys: int) -> bool:
        """Whether so many new objects of a layout might need an eviction. Costs next to nothing."""
        return self._writing.may_evict(layout_id, keys)

    @property
    def evicts(self) -> bool:
        """Whether the policy ever makes room."""
        return self._residents.policy.evicts

    def room_for(self, layout_id: int) -> int:
        """How many more objects of a layout fit below the watermark without an eviction. Costs next to nothing."""
        return self._writing.room_for(layout_id, self._trimmer.above_bytes)

    def _expire_due(self, now: float, session_id: int = SERVER_SESSION) -> None:
        """Every call begins with this. `session_id`: the session to name for what this call pushes out."""
        if self.call_objects_max is not None:
            self._judge_call()
        if not self.undo.in_request:
            self.undo.forget()
        reasons = self._residents.reasons
        reasons.now, reasons.session_id = now, session_id
        leases, pins = self._leases.next_deadline(), self._pins.next_deadline()
        if (leases is not None and leases <= now) or (pins is not None and pins <= now):
            self.expire(now)

    def _judge_call(self) -> None:
        """The call before this one has ended."""
        touched = self._residents.touched
        assert self.call_objects_max is not None
        if touched - self._touched_before > self.call_objects_max:
            self.long_calls.append(touched - self._touched_before)
        self._touched_before = touched

    def take_touched(self) -> int:
        """Objects and keys looked at or changed since the last time this was asked: the cost of a turn of the loop."""
        residents = self._residents
        touched, residents.touched, self._touched_before = residents.touched, 0, 0
        return touched

    def put_right(self, error: BaseException) -> None:
        """A call raised this, and what it had reserved has been taken back. If the error came out of the kernel itself,
        its tables may disagree: count them anew."""
        if not isinstance(error, CacheError) or isinstance(error, InvariantError):
            trace = error.__traceback__
            while trace is not None:
                if trace.tb_frame.f_code.co_filename.startswith(_ROOM):
                    recount(self)
                    return
                trace = trace.tb_next

    # --- telling --------------------------------------------------------------------------------------------

    def usage(self) -> KernelUsage:
        """What is held now."""
        expiries = self._writing.expiries + self._reading.expiries
        return usage_of(
            self._residents, self._leases, self._sessions, self._quarantine, self._pins, self._ledger, expiries
        )
