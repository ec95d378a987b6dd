"""Any order of calls, expiries, deaths and clears, against the model in `kernel_model.py`."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from kernel_model import World

from lmcache_core.kernel import LeaseKind

NAMESPACES = st.integers(1, 2)
KEYS = st.lists(st.integers(0, 11), min_size=1, max_size=8)
LAYOUTS = st.sampled_from([1, 1, 2, 3])
PICK = st.integers(0, 1 << 16)


class KernelMachine(RuleBasedStateMachine):
    """Every rule does one call in both worlds; the world checks all invariants after each."""

    world_type: type[World] = World

    @initialize(caps=st.booleans())
    def begin(self, caps: bool) -> None:
        # With small caps the quotas bite; with large ones the machine gets into deeper trouble.
        small = {"quarantine_fraction_max": 0.3, "quarantine_fraction_per_uid_max": 0.15, "pinned_fraction_max": 0.2}
        self.world = self.world_type(
            **(small if caps else {"quarantine_fraction_max": 1.0, "quarantine_fraction_per_uid_max": 1.0})
        )
        self.world.join()
        self.world.join()

    # --- choices --------------------------------------------------------------------------------------------

    def session(self, pick: int, state: str = "open") -> int:
        there = [session for session, now in self.world.sessions.items() if now == state and session]
        return there[pick % len(there)] if there else self.world.join()

    def lease(self, pick: int, kinds: set[LeaseKind], *, settled: bool = False) -> int:
        there = [i for i, p in self.world.permits.items() if p.kind in kinds and (settled or p.open_at())]
        there = [i for i in there if self.world.sessions.get(self.world.permits[i].owner) == "open"]
        return there[pick % len(there)] if there else 0

    def positions(self, lease: int, data: st.DataObject) -> Sequence[int] | None:
        count = len(self.world.permits[lease].things)
        at = st.integers(0, count - 1)
        some, page = st.lists(at, max_size=6), st.builds(lambda a, b: range(min(a, b), max(a, b) + 1), at, at)
        return data.draw(st.one_of(st.none(), some, page))

    # --- writes ---------------------------------------------------------------------------------------------

    @rule(pick=PICK, namespace=NAMESPACES, layout=LAYOUTS, keys=KEYS, lane=st.sampled_from([False, False, True]))
    def store(self, pick: int, namespace: int, layout: int, keys: list[int], lane: bool) -> None:
        session = 0 if lane else self.session(pick)
        self.world.store(session, namespace, layout, keys, loading=lane)

    @rule(pick=PICK, namespace=NAMESPACES, layout=LAYOUTS, keys=KEYS, wait_s=st.sampled_from([0.0, 0.7, 20.0]))
    def begin_store(self, pick: int, namespace: int, layout: int, keys: list[int], wait_s: float) -> None:
        self.world.begin_store(self.session(pick), namespace, layout, keys, wait_s)

    @precondition(lambda self: self.world.preparations)
    @rule()
    def step(self) -> None:
        self.world.step()

    @precondition(lambda self: self.world.preparations)
    @rule(pick=PICK)
    def cancel_store(self, pick: int) -> None:
        self.world.cancel_store(pick)

    @rule(pick=PICK, namespace=NAMESPACES, keys=KEYS, retain=st.booleans())
    def store_whole(self, pick: int, namespace: int, keys: list[int], retain: bool) -> None:
        session = self.session(pick)
        lease = self.world.store(session, namespace, 1 + pick % 2, keys)
        self.world.settle(session, lease, None, "commit", retain=retain)

    @rule(pick=PICK, layout=LAYOUTS, keys=KEYS, settled=st.booleans())
    def another_page(self, pick: int, layout: int, keys: list[int], settled: bool) -> None:
        lease = self.lease(pick, {LeaseKind.WRITE}, settled=settled)
        permit = self.world.permits.get(lease)
        if permit is not None and permit.owner:
            self.world.store(permit.owner, permit.namespace, layout, keys, lease)

    @rule(pick=PICK, data=st.data(), verb=st.sampled_from(["commit", "commit", "abort"]), settled=st.booleans())
    def settle_write(self, pick: int, data: st.DataObject, verb: str, settled: bool) -> None:
        lease = self.lease(pick, {LeaseKind.WRITE}, settled=settled)
        if lease:
            retain = data.draw(st.booleans())
            self.world.settle(self.world.permits[lease].owner, lease, self.positions(lease, data), verb, retain=retain)

    @rule(pick=PICK, stranger=PICK, verb=st.sampled_from(["commit", "abort"]))
    def a_stranger_settles(self, pick: int, stranger: int, verb: str) -> None:
        lease = self.lease(pick, {LeaseKind.WRITE})
        session = self.session(stranger)
        if lease and self.world.permits[lease].owner != session:
            self.world.settle(session, lease, None, verb)

    # --- reads ----------------------------------------------------------------------------------------------

    @rule(pick=PICK, namespace=NAMESPACES, keys=KEYS, prefix=st.booleans(), promise=PICK, lane=st.booleans())
    def retrieve(self, pick: int, namespace: int, keys: list[int], prefix: bool, promise: int, lane: bool) -> None:
        promised = self.lease(promise, {LeaseKind.PROMISE}, settled=True)
        session = 0 if lane and pick % 3 == 0 else self.session(pick)
        self.world.retrieve(session, namespace, keys, promised, prefix=prefix)

    @rule(pick=PICK, keys=KEYS)
    def another_page_to_read(self, pick: int, keys: list[int]) -> None:
        lease = self.lease(pick, {LeaseKind.READ}, settled=True)
        if lease:
            permit = self.world.permits[lease]
            self.world.retrieve(permit.owner, permit.namespace, keys, 0, lease)

    @rule(pick=PICK, data=st.data(), settled=st.booleans())
    def finish(self, pick: int, data: st.DataObject, settled: bool) -> None:
        lease = self.lease(pick, {LeaseKind.READ}, settled=settled)
        if lease:
            self.world.settle(self.world.permits[lease].owner, lease, self.positions(lease, data), "finish")

    @rule(pick=PICK, namespace=NAMESPACES, keys=KEYS, hold=st.booleans(), prefix=st.booleans())
    def lookup(self, pick: int, namespace: int, keys: list[int], hold: bool, prefix: bool) -> None:
        self.world.lookup(self.session(pick), namespace, keys, hold=hold, prefix=prefix)

    @rule(pick=PICK, by=PICK)
    def free_promise(self, pick: int, by: int) -> None:
        promise = self.lease(pick, {LeaseKind.PROMISE}, settled=True)
        if promise:
            owner = self.world.permits[promise].owner
            self.world.free_promise(self.session(by) if by % 3 == 0 else owner, promise)

    # --- pins, clears, time ---------------------------------------------------------------------------------

    @rule(pick=PICK, namespace=NAMESPACES, keys=KEYS, ttl=st.integers(1, 20))
    def pin(self, pick: int, namespace: int, keys: list[int], ttl: int) -> None:
        self.world.pin(self.session(pick), namespace, keys, float(ttl))

    @rule(pick=PICK, namespace=NAMESPACES, keys=KEYS)
    def unpin(self, pick: int, namespace: int, keys: list[int]) -> None:
        self.world.unpin(self.session(pick), namespace, keys)

    @rule(namespace=st.one_of(st.none(), NAMESPACES))
    def clear(self, namespace: int | None) -> None:
        self.world.clear(namespace)

    @rule(namespace=st.one_of(st.none(), NAMESPACES))
    def begin_clear(self, namespace: int | None) -> None:
        self.world.begin_clear(namespace)

    @precondition(lambda self: self.world.kernel.clearing)
    @rule()
    def free_cleared(self) -> None:
        self.world.free_cleared()

    @rule(namespace=NAMESPACES, keys=KEYS)
    def drop(self, namespace: int, keys: list[int]) -> None:
        self.world.drop(namespace, keys)

    @rule(namespace=NAMESPACES, keys=KEYS)
    def use(self, namespace: int, keys: list[int]) -> None:
        self.world.use(namespace, keys)

    @rule(seconds=st.sampled_from([0.5, 1.0, 3.0, 6.0, 12.0]))
    def pass_time(self, seconds: float) -> None:
        self.world.pass_time(seconds)

    @rule(seconds=st.sampled_from([1.0, 5.0, 11.0]))
    def pass_time_with_a_late_timer(self, seconds: float) -> None:
        self.world.now += seconds  # the next call, whatever it is, has to notice

    @rule()
    def trim(self) -> None:
        self.world.trim()

    @rule(pick=PICK)
    def renew(self, pick: int) -> None:
        lease = self.lease(pick, set(LeaseKind), settled=pick % 4 == 0)
        if lease:
            self.world.renew(self.world.permits[lease].owner, lease)

    # --- the end of sessions --------------------------------------------------------------------------------

    @precondition(lambda self: len(self.world.sessions) < 6)
    @rule()
    def join(self) -> None:
        self.world.join()

    @rule(pick=PICK, how=st.sampled_from(["end_session", "session_closed", "session_dead", "session_lost"]))
    def end(self, pick: int, how: str) -> None:
        self.world.end(self.session(pick), how)

    @precondition(lambda self: "lost" in self.world.sessions.values())
    @rule(pick=PICK)
    def the_lost_one_is_proven_dead(self, pick: int) -> None:
        self.world.end(self.session(pick, "lost"), "session_dead")

    @precondition(lambda self: "lost" in self.world.sessions.values())
    @rule(pick=PICK, kept=st.integers(0, 255))
    def the_lost_one_is_back(self, pick: int, kept: int) -> None:
        old = self.session(pick, "lost")
        new = self.world.join()
        while self.world.uid(new) != self.world.uid(old):
            self.world.end(new, "session_closed")
            new = self.world.join()
        mine = [i for i, p in self.world.permits.items() if p.owner == old]
        self.world.reclaim(old, new, [i for at, i in enumerate(mine) if kept >> (at % 8) & 1])


TestKernelMachine = KernelMachine.TestCase
TestKernelMachine.settings = settings(
    max_examples=120,
    stateful_step_count=60,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)
