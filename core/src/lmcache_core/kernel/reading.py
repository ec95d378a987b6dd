"""The read side: lookup, promises, read leases. Nothing here changes what is stored."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence

from lmcache_core.errors import UsageError
from lmcache_core.kernel.answers import Grant, Grants, KernelLookup, LeaseKind, Reason, Settled
from lmcache_core.kernel.config import KernelConfig
from lmcache_core.kernel.effects import LeaseExpired, Read
from lmcache_core.kernel.leases import KernelLease, LeaseBook
from lmcache_core.kernel.ledger import Account, Sort
from lmcache_core.kernel.objects import Incarnation, Named
from lmcache_core.kernel.pins import Pins
from lmcache_core.kernel.releases import Releases
from lmcache_core.kernel.residents import Residents
from lmcache_core.kernel.sessions import SERVER_SESSION, KernelSession
from lmcache_core.kernel.states import State
from lmcache_core.kernel.writing import check_batch

READY = State.READY
_MISS = int(Grant.MISS)


class Reading:
    """Read leases, and promises of them."""

    def __init__(
        self, config: KernelConfig, residents: Residents, leases: LeaseBook, pins: Pins, releases: Releases
    ) -> None:
        self._residents = residents
        self._leases = leases
        self._pins = pins
        self._releases = releases
        self._read_ttl_s = config.read_ttl_s
        self._promise_ttl_s = config.promise_ttl_s
        self.expiries = 0

    # --- finding --------------------------------------------------------------------------------------------

    def _find(
        self, namespace: int, layout_id: int, keys: Sequence[bytes], prefix: bool
    ) -> tuple[list[Incarnation | None], list[Incarnation], bytearray, bytearray]:
        """For each key the ready object or None; those found; statuses; reasons (empty if nothing missed)."""
        self._residents.touched += len(keys)
        table = self._residents.table.of(namespace)
        shards, mask = table.shards, table.mask
        entries: list[Incarnation | None]
        found: list[Incarnation] = []
        if prefix:
            for key in keys:
                item = shards[(key[0] ^ key[31]) & mask].get(key)
                if item is None or item.state is not READY:
                    break
                found.append(item)
            entries = [*found]
        else:
            any_of = [shards[(key[0] ^ key[31]) & mask].get(key) for key in keys]
            entries = [item if item is not None and item.state is READY else None for item in any_of]
            found = [item for item in entries if item is not None]
        if layout_id and found:
            self._sort_out(layout_id, entries, found, prefix)
        if len(found) == len(keys):
            return entries, found, bytearray(len(keys)), bytearray()
        entries += [None] * (len(keys) - len(entries))
        statuses, reasons = self._explain(namespace, layout_id, keys, entries, prefix)
        return entries, found, statuses, reasons

    def _sort_out(
        self, layout_id: int, entries: list[Incarnation | None], found: list[Incarnation], prefix: bool
    ) -> None:
        """Turn objects of another layout into misses."""
        for at, item in enumerate(entries):
            if item is not None and item.layout_id != layout_id:
                if prefix:
                    del entries[at:]
                    break
                entries[at] = None
        found[:] = [item for item in entries if item is not None]

    def _explain(
        self,
        namespace: int,
        layout_id: int,
        keys: Sequence[bytes],
        entries: list[Incarnation | None],
        prefix: bool,
    ) -> tuple[bytearray, bytearray]:
        """Statuses, and the reason for each miss; misses behind the end of a prefix have none."""
        residents = self._residents
        table = residents.table.of(namespace)
        statuses, reasons = bytearray(len(keys)), bytearray(len(keys))
        for at, item in enumerate(entries):
            if item is not None:
                continue
            other = table.get(keys[at])
            statuses[at] = _MISS
            if other is None:
                loss = residents.lost(namespace, keys[at])
                reasons[at] = Reason.NEVER_STORED if loss is None else loss.reason
            elif other.state is State.LOADING:
                statuses[at] = Grant.LOADING
            elif other.state is State.WRITING:
                reasons[at] = Reason.BEING_WRITTEN
            else:
                reasons[at] = Reason.OTHER_LAYOUT
            if prefix:
                statuses[at + 1 :] = bytes((_MISS,)) * (len(keys) - at - 1)
                break
        return statuses, reasons

    # --- prepare and finish ---------------------------------------------------------------------------------

    def prepare(
        self,
        session: KernelSession,
        namespace: int,
        keys: Sequence[bytes],
        now: float,
        promise_id: int,
        lease_id: int,
        prefix: bool,
        layout_id: int,
        ttl_s: float | None,
        verify: bool,
        identify: bool,
    ) -> Grants:
        lease = None
        if lease_id:
            lease = self._leases.find(session, lease_id, LeaseKind.READ)
            if lease.expired:
                raise self._leases.refusal(f"read lease {lease_id:#x} has expired and gets no more pages: prepare anew")
            if lease.namespace != namespace:
                raise UsageError(f"lease {lease_id:#x} is for namespace {lease.namespace:#x} only")
        check_batch(keys, lease)
        if lease is None or not lease.pending:
            session.may_lease()
        self._leases.room_for(session, lease, len(keys))
        entries, found, statuses, reasons = self._find(namespace, layout_id, keys, prefix)
        if len(found) == len(entries):
            offsets = array("Q", [item.offset for item in found])
        else:
            offsets = array("Q", [0 if item is None else item.offset for item in entries])
        account = session.accounts[Sort.READ] if lease is None or lease.account is None else lease.account
        if found:
            fits = self._hold(account, found)
            if fits < len(found):
                self._refuse(entries, found, statuses, fits)
                reasons = reasons or bytearray(len(keys))
                offsets = array("Q", [0 if item is None else item.offset for item in entries])
            self._residents.policy.access(found[::-1])
        if lease is None:
            lease = self._new(LeaseKind.READ, session, namespace, now, ttl_s or self._read_ttl_s, entries, len(found))
        else:
            self._leases.renew(lease, now)
            self._leases.extend(lease, entries, len(found))
        checksums = None
        if verify:
            checksums = array("Q", [0 if item is None else item.checksum or 0 for item in entries])
        elif self._residents.unverified and any(item.unverified for item in found):
            checksums = array(
                "Q", [item.checksum or 0 if item is not None and item.unverified else 0 for item in entries]
            )
        seen = _generations(entries) if identify else None
        if promise_id:  # what its reader may not hold yet stays promised, until it asks again
            kept = keys
            if Grant.QUOTA in statuses:
                kept = [key for key, status in zip(keys, statuses, strict=True) if status != Grant.QUOTA]
            self.redeem(promise_id, namespace, kept)
        return Grants(lease.id, lease.deadline, statuses, reasons, offsets, checksums, incarnations=seen)

    def _hold(self, account: Account, found: Sequence[Incarnation]) -> int:
        """Hold as many of these, from the first on, as the account allows. Returns how many."""
        fits = account.take_first(found)
        held = found[:fits]
        self._residents.hold(held)
        self._residents.undo.add((self._unhold, (account, held)))
        return fits

    def _unhold(self, account: Account, held: Sequence[Incarnation]) -> None:
        account.free(held)
        self._residents.release(held)

    @staticmethod
    def _refuse(entries: list[Incarnation | None], found: list[Incarnation], statuses: bytearray, fits: int) -> None:
        """Over the reader's cap, grant only the first of what was found."""
        granted = 0
        for at, item in enumerate(entries):
            if item is not None:
                granted += 1
                if granted > fits:
                    entries[at] = None
                    statuses[at] = Grant.QUOTA
        del found[fits:]

    def _new(
        self,
        kind: LeaseKind,
        session: KernelSession,
        namespace: int,
        now: float,
        ttl_s: float,
        entries: list[Incarnation | None],
        granted: int,
    ) -> KernelLease:
        lease = KernelLease(self._leases.new_id(), kind, session, namespace, READY, ttl_s, now)
        lease.add_page(entries, granted)
        if granted:
            self._leases.open(lease)
        else:
            self._leases.remember(lease)
        return lease

    def redeem(self, promise_id: int, namespace: int, keys: Sequence[bytes]) -> int:
        """Redeem the promise for these keys: its holds on them end, because a lease has its own, or because they were
        read without one. Returns on how many it had a hold."""
        promise = self._leases.find_promise(promise_id, namespace)
        if promise is None:
            return 0
        wanted = set(keys)
        kept = [at for at, item in enumerate(promise.entries) if item is not None and item.key in wanted]
        self._settle(promise, kept)
        return len(kept)

    def finish(self, session: KernelSession, lease_id: int, positions: Sequence[int] | None) -> bytearray:
        lease = self._leases.find(session, lease_id, LeaseKind.READ)
        self._settle(lease, positions, read=session.id != SERVER_SESSION)
        return lease.answered(positions)

    def settle(self, lease: KernelLease) -> None:
        """The owner of a read lease or promise has answered for all of it, or is dead, or its time is up. It is settled
        now; `Releases` ends its holds."""
        if lease.pending:
            assert lease.account is not None
            self._releases.held(self._leases.settle_all(lease, Settled.FINISHED), lease.account)

    def _settle(self, lease: KernelLease, positions: Sequence[int] | None, *, read: bool = False) -> None:
        mark = self._residents.undo.mark()
        settled, _ = self._leases.settle(lease, positions, Settled.FINISHED)
        if settled:
            self._let_go(lease, settled, mark, read=read)

    def _let_go(self, lease: KernelLease, settled: list[Incarnation], mark: int, *, read: bool) -> None:
        """The last step: it cannot be taken back."""
        assert lease.account is not None
        lease.account.free(settled)
        self._residents.release(settled, read=read)
        if read:
            self._residents.effects.append(Read(settled))
        self._residents.undo.keep(mark)

    def used(self, keys: Sequence[tuple[int, bytes]]) -> int:
        """Objects were read in place, without a lease: like `finish`, but there is no lease to settle."""
        residents = self._residents
        found: list[Incarnation] = []
        for namespace, key in keys:
            item = residents.table.of(namespace).get(key)
            if item is not None and item.state is READY:
                found.append(item)
        if found:
            residents.policy.access(found)
            spent = [item for item in dict.fromkeys(found) if item.temporary and not item.holds]
            residents.remove(spent, Reason.DROPPED)
            residents.effects.append(Read(found))
        return len(found)

    # --- for the tiers --------------------------------------------------------------------------------------

    def leading_gone(self, namespace: int, wanted: Iterable[Named]) -> int:
        """How many of the incarnations come before the first one that is still ready."""
        table = self._residents.table.of(namespace)
        shards, mask = table.shards, table.mask
        gone = 0
        for key, generation in wanted:
            item = shards[(key[0] ^ key[31]) & mask].get(key)
            if item is not None and item.state is READY and item.generation == generation:
                break
            gone += 1
        return gone

    def hold_incarnations(
        self, session: KernelSession, namespace: int, wanted: Sequence[Named], now: float
    ) -> tuple[int, list[Incarnation | None]]:
        """Take a read lease on those that are still ready. Also returns what it holds, by position."""
        check_batch([key for key, _ in wanted], None)
        entries = self._residents.standing_as(namespace, wanted)
        held = [item for item in entries if item is not None]
        if held:
            session.accounts[Sort.READ].take(held)
            self._residents.hold(held)
        lease = self._new(LeaseKind.READ, session, namespace, now, self._read_ttl_s, list(entries), len(held))
        return lease.id, entries

    def report_damaged(self, session: KernelSession, lease_id: int, positions: Sequence[int]) -> bytearray:
        """The reader found that these positions do not hold what was stored: nobody else gets it."""
        lease = self._leases.find(session, lease_id, LeaseKind.READ)
        lease.check_positions(positions)
        held = dict.fromkeys(lease.entries[at] for at in positions) if lease.entries else {}
        damaged = [item for item in held if item is not None and item.state is READY]
        self._pins.remove(damaged)
        self._residents.remove(damaged, Reason.DAMAGED)
        self._settle(lease, positions)
        return lease.answered(positions)

    # --- lookup and promises --------------------------------------------------------------------------------

    def lookup(
        self,
        session: KernelSession,
        namespace: int,
        keys: Sequence[bytes],
        now: float,
        hold: bool,
        prefix: bool,
        identify: bool,
    ) -> KernelLookup:
        check_batch(keys, None)
        if hold:
            session.may_lease()
            self._leases.room_for(session, None, len(keys))
        entries, found, statuses, reasons = self._find(namespace, 0, keys, prefix)
        seen = _generations(entries) if identify else None
        if not hold or not found:
            return KernelLookup(statuses, reasons, incarnations=seen)
        account = session.accounts[Sort.PROMISED]
        fits = self._hold(account, found)
        if fits < len(found):  # they still count as hits
            self._refuse(entries, found, bytearray(len(entries)), fits)
            if not found:
                return KernelLookup(statuses, reasons, incarnations=seen)
        promise = self._new(LeaseKind.PROMISE, session, namespace, now, self._promise_ttl_s, entries, len(found))
        return KernelLookup(statuses, reasons, promise.id, promise.deadline, seen)

    def promise_more(
        self, promise_id: int, namespace: int, keys: Sequence[bytes], now: float, prefix: bool
    ) -> float | None:
        """Extend a promise for these keys to those that have arrived since, and restart its time. Returns its deadline;
        None if it is gone: redeemed, freed, or too old."""
        promise = self._leases.find_open(promise_id)
        if promise is None or promise.kind is not LeaseKind.PROMISE:
            return None
        entries, _, _, _ = self._find(namespace, 0, keys, prefix)
        new = [
            (at, item)
            for at, item in enumerate(entries)
            if item is not None and promise.answers[at] == Settled.NOT_HELD
        ]
        assert promise.account is not None
        del new[promise.account.take_first([item for _, item in new]) :]
        self._residents.hold([item for _, item in new])
        for at, item in new:
            promise.hold_at(at, item)
        self._leases.renew(promise, now)
        return promise.deadline

    def take_promise_back(self, promise_id: int) -> None:
        """End a promise that was never answered, whoever holds it by now."""
        promise = self._leases.find_open(promise_id)
        if promise is not None and promise.kind is LeaseKind.PROMISE:
            self.settle(promise)

    def free_promises(self, session: KernelSession, promise_ids: Sequence[int]) -> int:
        """End the session's promises. Returns how many were still open. Promises that are gone already are no error."""
        freed = 0
        for promise_id in promise_ids:
            promise = session.leases.get(promise_id)
            if promise is None or promise.kind is not LeaseKind.PROMISE:
                self._leases.stale += 1
                continue
            self.settle(promise)
            freed += 1
        return freed

    def expire(self, lease: KernelLease) -> None:
        """A promise ends. A read lease can no longer be renewed, but its pins wait for the reader's answer."""
        self.expiries += 1
        self._residents.effects.append(LeaseExpired(lease.session.id, lease.id, lease.kind))
        if lease.kind is LeaseKind.PROMISE:
            self.settle(lease)


def _generations(entries: Sequence[Incarnation | None]) -> array[int]:
    """The generations of these incarnations, 0 for None."""
    return array("Q", [0 if item is None else item.generation for item in entries])
