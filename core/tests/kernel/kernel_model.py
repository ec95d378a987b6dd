"""Calls into a kernel and its model at once: each compares the answers, and then all invariants."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kernel_paper import PROMISE_TTL, READ_TTL, SIZES, WRITE_TTL, Paper, Permit, Thing, key

from lmcache_core.errors import LeaseExpiredError
from lmcache_core.kernel import Grant, Grants, LeaseKind, Reason, Settled, State


class World(Paper):
    """A kernel and its model, driven together."""

    def join(self) -> int:
        session = self.next_session
        self.next_session += 1
        self.kernel.open_session(session, self.uid(session), session % 100)
        self.kernel.attach_session(session, session % 100)
        self.sessions[session] = "open"
        return session

    # --- calls ----------------------------------------------------------------------------------------------

    def store(
        self, session: int, namespace: int, layout: int, keys: list[int], lease_id: int = 0, *, loading: bool = False
    ) -> int:
        self.due()
        before = {where: thing.state for where, thing in self.index.items()}
        blamed = self.is_refused(session)
        named = [key(number) for number in keys]
        if lease_id and self.permits[lease_id].expired:
            try:
                self.kernel.prepare_store(session, namespace, layout, named, self.now, lease_id=lease_id)
            except LeaseExpiredError:
                return lease_id
            raise AssertionError("an expired lease got another page")
        waits = bool(self.preparations)  # then `prepare_store` would carry these out first
        call = self.kernel.begin_store if waits else self.kernel.prepare_store
        grants = call(session, namespace, layout, named, self.now, lease_id=lease_id, loading=loading)
        assert isinstance(grants, Grants)
        self.drain()
        self.granted(
            session,
            namespace,
            layout,
            keys,
            lease_id,
            grants,
            before,
            blamed=blamed,
            loading=loading,
            may_be_short=waits,
        )
        self.check()
        return grants.lease_id

    def begin_store(self, session: int, namespace: int, layout: int, keys: list[int], wait_s: float) -> None:
        """A store that may be answered later."""
        self.due()
        before = {where: thing.state for where, thing in self.index.items()}
        blamed = self.is_refused(session)
        named = [key(number) for number in keys]
        answer = self.kernel.begin_store(session, namespace, layout, named, self.now, wait_s=wait_s)
        self.drain()
        if isinstance(answer, Grants):
            self.granted(session, namespace, layout, keys, 0, answer, before, blamed=blamed, may_be_short=not wait_s)
        else:
            assert wait_s
            held = [self.index[item.namespace, item.key] for item in answer.existing]
            for thing in held:
                thing.holds += 1
            self.preparations.append((answer, session, namespace, layout, keys, held))
        self.check()

    def step(self) -> None:
        """One step for the stores that wait."""
        self.due()
        self.say_who_waits_no_longer()
        before = {where: thing.state for where, thing in self.index.items()}
        blamed = bool(self.preparations) and self.is_refused(self.preparations[0][1])
        self.kernel.step(self.now)
        self.drain()
        if self.preparations and self.preparations[0][0].done:
            answer, session, namespace, layout, keys, held = self.preparations.pop(0)
            assert answer.grants is not None
            self.granted(session, namespace, layout, keys, 0, answer.grants, before, blamed=blamed)
            for thing in held:
                self.release(thing)
        self.check()

    def cancel_store(self, pick: int) -> None:
        self.kernel.cancel_store(self.preparations[pick % len(self.preparations)][0])
        self.drain()
        self.check()

    def granted(
        self,
        session: int,
        namespace: int,
        layout: int,
        keys: list[int],
        lease_id: int,
        grants: Grants,
        before: dict[tuple[int, bytes], State],
        *,
        blamed: bool,
        loading: bool = False,
        may_be_short: bool = False,
    ) -> None:
        """Compare what a store was granted with the paper. `may_be_short`: it did not wait for room."""
        named = [key(number) for number in keys]
        permit = self.permits.get(grants.lease_id)
        if permit is None:
            assert not lease_id
            permit = Permit(LeaseKind.WRITE, session, namespace, 0.0, WRITE_TTL)
            self.permits[grants.lease_id] = permit
        permit.deadline = self.now + WRITE_TTL
        assert grants.deadline == permit.deadline
        claimed: set[bytes] = set()
        full = False
        for name, status, offset in zip(named, grants.statuses, grants.offsets, strict=True):
            there = before.get((namespace, name))
            thing = None
            if there is not None:
                assert status == (Grant.EXISTS if there is State.READY else Grant.BUSY)
                assert (namespace, name) in self.index, "what is said to exist was not evicted for its neighbours"
            elif name in claimed:
                assert status == Grant.BUSY, "a key twice in a batch"
            elif blamed:
                assert status == Grant.QUOTA
            elif status == Grant.GRANTED:
                assert not full, "room goes to the first keys first"
                assert offset not in self.slots, f"slot {offset:#x} is in two hands"
                state = State.LOADING if loading else State.WRITING
                thing = Thing((namespace, name), offset, -(-SIZES[layout] // 4096) * 4096, layout, state)
                self.slots[offset] = self.index[namespace, name] = thing
            else:
                assert status == Grant.FULL
                full = True
            claimed.add(name)
            assert (offset != 0) == (status == Grant.GRANTED)
            permit.things.append(thing)
            permit.answers.append(Settled.NOT_HELD if thing is None else Settled.OPEN)
        if full:
            may_go = [t for t in self.slots.values() if t.state is State.READY and not t.holds]
            others = [t for t in may_go if t.layout == layout and (t.where[0] != namespace or t.where[1] not in named)]
            assert may_be_short or not others, "FULL, and yet something of that size could have gone"

    def settle(
        self, session: int, lease_id: int, positions: Sequence[int] | None, verb: str, *, retain: bool = True
    ) -> None:
        """commit, abort or finish, by the owner or by a stranger."""
        self.due()
        permit = self.permits[lease_id]
        call: dict[str, Any] = {
            "commit": lambda: self.kernel.commit_store(session, lease_id, self.now, positions, retain=retain),
            "abort": lambda: self.kernel.abort_store(session, lease_id, self.now, positions),
            "finish": lambda: self.kernel.finish_read(session, lease_id, self.now, positions),
        }
        stale = self.kernel.usage().counters["stale_leases"]
        refused = permit.owner != session or (verb == "commit" and permit.expired)
        try:
            answers = call[verb]()
        except LeaseExpiredError:
            assert refused, "only a stranger or a late commit is refused"
            assert self.kernel.usage().counters["stale_leases"] == stale + 1
            answers = None
        else:
            assert not refused, "a stale id was taken"
        self.drain()
        if permit.owner == session:
            at = list(range(len(permit.things))) if positions is None else positions
            said = {"commit": Settled.COMMITTED, "abort": Settled.ABORTED, "finish": Settled.FINISHED}[verb]
            if verb == "commit" and permit.expired:
                said = Settled.ABORTED
            if verb == "commit" and not permit.expired:
                for position in at:
                    thing = permit.things[position]
                    if thing is not None and thing.state is not State.QUARANTINED:
                        thing.temporary = not retain
            self.let_go(permit, at, said, read=verb == "finish" and session != 0)
            if answers is not None:
                assert list(answers) == [permit.answers[position] for position in at]
        self.check()

    def retrieve(
        self,
        session: int,
        namespace: int,
        keys: list[int],
        promise: int = 0,
        lease_id: int = 0,
        *,
        prefix: bool = False,
    ) -> int:
        self.due()
        named = [key(number) for number in keys]
        if lease_id and self.permits[lease_id].expired:
            try:
                self.kernel.prepare_retrieve(session, namespace, named, self.now, lease_id=lease_id)
            except LeaseExpiredError:
                return lease_id
            raise AssertionError("an expired lease got another page")
        grants = self.kernel.prepare_retrieve(
            session, namespace, named, self.now, promise_id=promise, lease_id=lease_id, prefix=prefix
        )
        self.drain()
        permit = self.permits.setdefault(
            grants.lease_id, Permit(LeaseKind.READ, session, namespace, self.now + READ_TTL, READ_TTL)
        )
        permit.deadline = self.now + READ_TTL
        things = self.expected(namespace, named, grants.statuses, grants.reasons, prefix=prefix)
        for thing, offset in zip(things, grants.offsets, strict=True):
            assert offset == (thing.offset if thing else 0)
            if thing:
                thing.holds += 1
            permit.things.append(thing)
            permit.answers.append(Settled.OPEN if thing else Settled.NOT_HELD)
        promised = self.permits.get(promise)
        if promised is not None and promised.namespace == namespace:
            at = [i for i, thing in enumerate(promised.things) if thing is not None and thing.where[1] in named]
            self.let_go(promised, at, Settled.FINISHED)
        self.check()
        return grants.lease_id

    def expected(
        self, namespace: int, named: list[bytes], statuses: bytearray, reasons: bytearray, *, prefix: bool
    ) -> list[Thing | None]:
        """Compare statuses with the paper; the things that are granted."""
        things: list[Thing | None] = []
        ended = False
        for at, name in enumerate(named):
            there = self.index.get((namespace, name))
            if ended:
                assert statuses[at] == Grant.MISS
                assert reasons[at] == Reason.NONE
                things.append(None)
            elif there is not None and there.state is State.READY:
                assert statuses[at] == Grant.GRANTED
                things.append(there)
            else:
                loading = there is not None and there.state is State.LOADING
                assert statuses[at] == (Grant.LOADING if loading else Grant.MISS), "nothing uncommitted is seen"
                if there is not None and there.state is State.WRITING:
                    assert reasons[at] == Reason.BEING_WRITTEN
                elif not loading:
                    assert reasons[at] not in (Reason.NONE, Reason.BEING_WRITTEN), "every miss has its reason"
                things.append(None)
                ended = prefix
        return things

    def lookup(self, session: int, namespace: int, keys: list[int], *, hold: bool, prefix: bool) -> int:
        self.due()
        named = [key(number) for number in keys]
        found = self.kernel.lookup(session, namespace, named, self.now, hold=hold, prefix=prefix)
        self.drain()
        reasons = found.reasons or bytearray(len(keys))
        things = self.expected(namespace, named, found.statuses, reasons, prefix=prefix)
        assert (found.promise_id != 0) == (hold and any(things))
        if found.promise_id:
            permit = Permit(LeaseKind.PROMISE, session, namespace, self.now + PROMISE_TTL, PROMISE_TTL, things)
            permit.answers = [Settled.OPEN if thing else Settled.NOT_HELD for thing in things]
            self.permits[found.promise_id] = permit
            for thing in things:
                if thing:
                    thing.holds += 1
        self.check()
        return found.promise_id

    def free_promise(self, session: int, promise: int) -> None:
        self.due()
        permit = self.permits[promise]
        mine = permit.kind is LeaseKind.PROMISE and permit.owner == session and bool(permit.open_at())
        assert self.kernel.free_lookup_locks(session, [promise], self.now) == int(mine)
        if mine:
            self.let_go(permit, permit.open_at(), Settled.FINISHED)
        self.drain()
        self.check()

    def renew(self, session: int, lease_id: int) -> None:
        self.due()
        permit = self.permits[lease_id]
        allowed = permit.owner == session and not permit.expired and bool(permit.open_at())
        try:
            permit.deadline = self.kernel.renew_lease(session, lease_id, self.now)
            assert allowed
            assert permit.deadline == self.now + permit.ttl
        except LeaseExpiredError:
            assert not allowed
        self.drain()
        self.check()

    def pin(self, session: int, namespace: int, keys: list[int], ttl: float) -> None:
        self.due()
        for name, status in zip(
            (key(n) for n in keys),
            self.kernel.pin(session, namespace, [key(n) for n in keys], ttl, self.now),
            strict=True,
        ):
            thing = self.index.get((namespace, name))
            if thing is None or thing.state is not State.READY:
                assert status == Grant.MISS
            elif status == Grant.QUOTA:
                assert thing not in self.pins
            else:
                thing.holds += thing not in self.pins
                self.pins[thing] = max(self.pins.get(thing, 0.0), self.now + ttl)
        self.drain()
        self.check()

    def unpin(self, session: int, namespace: int, keys: list[int]) -> None:
        self.due()
        answers = self.kernel.unpin(session, namespace, [key(n) for n in keys], self.now)
        things = [self.index.get((namespace, key(n))) for n in keys]
        assert list(answers) == [Grant.GRANTED if t in self.pins else Grant.MISS for t in things]
        for thing in dict.fromkeys(things):
            if thing in self.pins:
                self.unpin_thing(thing)
        self.drain()
        self.check()

    def clear(self, namespace: int | None) -> None:
        """Begin one and take all the steps."""
        self.begin_clear(namespace)
        while self.kernel.clearing:
            self.free_cleared()

    def begin_clear(self, namespace: int | None) -> None:
        self.due()
        scope = [thing for where, thing in self.index.items() if namespace in (None, where[0])]
        ready = {thing for thing in scope if thing.state is State.READY}
        answer = self.kernel.begin_clear(self.now, namespace)
        for thing in scope:
            del self.index[thing.where]
        expected = (sum(thing.nbytes for thing in ready), len(scope) - len(ready))
        self.clears.append((answer, set(scope), len(ready), expected))
        self.drain()
        self.check()

    def free_cleared(self) -> None:
        """One step, of a few objects only: the next call comes in between."""
        self.due()
        self.kernel.expire(self.now)  # by itself: what expires in the step leaves the cleared ones, too
        self.drain()
        before = len(self.cleared())
        freed = self.kernel.free_cleared(self.now, 3)
        self.drain()
        assert freed <= 3
        assert freed == before - len(self.cleared())
        assert freed == 3 or not self.kernel.clearing, "a step does what it may"
        self.check()

    def drop(self, namespace: int, keys: list[int]) -> None:
        self.due()
        self.kernel.drop(namespace, [key(number) for number in keys], self.now, Reason.DROPPED)
        self.drain()
        for number in keys:
            thing = self.index.get((namespace, key(number)))
            if thing is not None and thing.state is State.READY:
                self.take_out(thing)
        self.check()

    def use(self, namespace: int, keys: list[int]) -> None:
        """Read without a lease."""
        self.due()
        told = self.kernel.used([(namespace, key(number)) for number in keys], self.now)
        self.drain()
        found = [self.index.get((namespace, key(number))) for number in keys]
        ready = [thing for thing in found if thing is not None and thing.state is State.READY]
        assert told == len(ready)
        for thing in dict.fromkeys(ready):
            if thing.temporary and not thing.holds:
                self.take_out(thing)
        self.check()

    def trim(self) -> None:
        self.due()
        evicted = self.kernel.trim(self.now)
        assert len(self.drain()[0]) == evicted
        self.check()

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        self.due()
        self.kernel.expire(self.now)
        self.drain()
        self.check()

    # --- the end of sessions --------------------------------------------------------------------------------

    def settle_all(self, session: int, *, but: tuple[int, ...] = ()) -> None:
        for lease_id, permit in self.permits.items():
            if permit.owner == session and lease_id not in but:
                answer = Settled.ABORTED if permit.kind is LeaseKind.WRITE else Settled.FINISHED
                self.let_go(permit, permit.open_at(), answer)

    def end(self, session: int, how: str) -> None:
        """`how`: end_session, session_closed, session_dead or session_lost."""
        self.due()
        getattr(self.kernel, how)(session, self.now)
        self.drain()
        if how == "session_lost":
            self.sessions[session] = "lost"
        else:
            self.settle_all(session)
            if how != "end_session":
                del self.sessions[session]
        self.check()

    def reclaim(self, old: int, new: int, lease_ids: list[int]) -> None:
        self.due()
        moved = self.kernel.reclaim(old, new, lease_ids, self.now)
        self.drain()
        open_ids = [i for i in lease_ids if self.permits[i].owner == old and self.permits[i].open_at()]
        assert set(open_ids) <= set(moved), "what the client still holds moves with it"
        assert all(self.permits[i].owner == old for i in moved)
        self.settle_all(old, but=tuple(moved))
        for lease_id in moved:
            self.permits[lease_id].owner = new
        self.sessions.pop(old, None)
        self.check()
