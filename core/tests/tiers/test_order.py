"""What happens to a key of a tier happens in one order: whatever overlaps, the accounts say what the medium has."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from lmcache_core.policies.lru import LruEviction
from lmcache_core.tiers.contract import Outcome, Result
from lmcache_core.tiers.l1 import TierReason
from lmcache_core.tiers.object.format import HEADER_BYTES, tier_key
from lmcache_core.tiers.tier.call_states import CallState
from lmcache_core.tiers.tier.lanes import Call
from lmcache_core.tiers.tier.order import KeyAccess, KeyOrder

from .conftest import Doubles, FunctionCall, Loop

OBJECT_BYTES = HEADER_BYTES + 5000
KEYS = 6


class PaperLane:
    """A lane without threads: whoever holds it runs its calls, and delivers their ends, in any order."""

    made: list[PaperLane]

    def __init__(self, name: str, threads: int, post: Callable[[Call], None], **how: bool) -> None:
        self.name, self._post = name, post
        self.queue: list[Call] = []
        self.ran: list[Call] = []
        self.running = self.hung = 0
        self.stuck = self.used_up = False
        self.closed = False
        PaperLane.made.append(self)

    @property
    def backlog(self) -> int:
        return 0

    @property
    def has_spare(self) -> bool:
        return True

    @property
    def queued(self) -> int:
        return len(self.queue)

    @property
    def next_deadline(self) -> float:
        return float("inf")

    def submit(self, call: Call) -> bool:
        self.queue.append(call)
        return not self.closed

    def cancel(self, call: Call) -> bool:
        if call not in self.queue:
            return False
        self.queue.remove(call)
        call.state = CallState.CANCELLED
        return True

    def expire(self, now: float) -> list[Call]:
        late = [call for call in (*self.queue, *self.ran) if call.deadline <= now and not call.was_late]
        for call in late:
            call.was_late = True
            call.state = CallState.EXPIRED if call in self.queue else CallState.LATE
        self.queue = [call for call in self.queue if call not in late]
        return late

    def run(self, call: Call) -> None:
        """Its effect on the medium happens now."""
        self.queue.remove(call)
        call.state = CallState.RUNNING
        try:
            call.result = call.work()
        except Exception as error:  # noqa: BLE001 - as a lane does
            call.error = error
        self.ran.append(call)

    def deliver(self, call: Call) -> None:
        self.ran.remove(call)
        call.state = CallState.ENDED
        self._post(call)

    def close(self) -> bool:
        self.closed = True
        return True

    def wait_idle(self) -> None:
        pass


@pytest.fixture
def paper(monkeypatch: pytest.MonkeyPatch) -> None:
    PaperLane.made = []
    monkeypatch.setattr("lmcache_core.tiers.tier.medium.Lane", PaperLane)


def make_machine(doubles: Doubles) -> type[RuleBasedStateMachine]:
    class Keys(RuleBasedStateMachine):
        """One tier with room for four objects, over a medium that anyone may look at."""

        def __init__(self) -> None:
            super().__init__()
            PaperLane.made = []
            self.rng = random.Random(0)
            self.adapter = doubles.adapter()
            self.tier = doubles.tier(
                "mem", self.adapter, capacity_bytes=4 * OBJECT_BYTES, watermark=1.0, evict_ratio=0.25,
                deadline_s=1e6, eviction=LruEviction(None),
            )  # fmt: skip
            self.loop = doubles.loop(doubles.l1(64), self.tier)
            self.version = 0
            self.time = 1e9  # of its own: how much a turn does must not depend on the machine
            self.loop.clock.read = lambda: self.time
            self.settle()

        # --- what happens ---------------------------------------------------------------------------------
        @rule(number=st.integers(0, KEYS - 1))
        def store(self, number: int) -> None:
            key, l1 = doubles.key(number), self.loop.l1
            if (doubles.namespace, key) in l1.ready:
                l1.evict(key)
            if l1.free and (doubles.namespace, key) not in l1.loading:
                self.version += 1
                self.loop.tiering.on_committed([l1.put(key, doubles.content(100 + self.version))])
            self.turn()

        @rule(number=st.integers(0, KEYS - 1))
        def load(self, number: int) -> None:
            key, l1 = doubles.key(number), self.loop.l1
            if (doubles.namespace, key) in l1.ready:
                l1.evict(key)
            self.loop.ask([key], seconds=1e10)
            self.turn()

        @rule(number=st.integers(0, KEYS - 1))
        def damage(self, number: int) -> None:
            name = tier_key(doubles.key(number), doubles.namespace, 0)
            if name in self.adapter.objects:
                self.adapter.corrupt(name)

        @rule(number=st.integers(0, KEYS - 1))
        def delete(self, number: int) -> None:
            self.tier.reclaim.delete([tier_key(doubles.key(number), doubles.namespace, 0)])
            self.turn()

        @rule(result=st.sampled_from([None, Outcome(Result.FAILED, error="so"), Outcome(Result.FULL)]))
        def fail_stores(self, result: Outcome | None) -> None:
            self.adapter.answers.pop("store", None)
            if result is not None:
                self.adapter.answers["store"] = result

        @rule()
        def lose_an_answer(self) -> None:
            """A call that does its work, and of which only an error is heard."""
            for lane in PaperLane.made:
                for call in lane.ran:
                    if isinstance(call.result, list) and call.result and isinstance(call.result[0], Outcome):
                        call.result = [each._replace(result=Result.FAILED, error="lost") for each in call.result]

        # --- who is quicker -------------------------------------------------------------------------------
        @precondition(lambda self: any(lane.queue for lane in PaperLane.made))
        @rule(data=st.data())
        def run(self, data: st.DataObject) -> None:
            lane, call = data.draw(st.sampled_from([(ln, c) for ln in PaperLane.made for c in ln.queue]))
            lane.run(call)

        @precondition(lambda self: any(lane.ran for lane in PaperLane.made))
        @rule(data=st.data())
        def deliver(self, data: st.DataObject) -> None:
            lane, call = data.draw(st.sampled_from([(ln, c) for ln in PaperLane.made for c in ln.ran]))
            lane.deliver(call)
            self.turn()

        def turn(self) -> None:
            for _ in range(12):
                self.loop.turn()

        def settle(self) -> None:
            for _ in range(300):
                for lane in PaperLane.made:
                    for call in list(lane.queue):
                        lane.run(call)
                    for call in list(lane.ran):
                        lane.deliver(call)
                self.time += 0.5
                self.turn()
                busy = len(self.tier.doubts) or any(lane.queue or lane.ran for lane in PaperLane.made)
                if not busy and self.loop.tiering.drained and self.loop.scanned():
                    return
            raise AssertionError(self.loop.tiering.status())

        # --- what holds -----------------------------------------------------------------------------------
        @invariant()
        def the_medium_never_holds_more_than_its_capacity(self) -> None:
            assert sum(map(len, self.adapter.objects.values())) <= 4 * OBJECT_BYTES

        def teardown(self) -> None:
            self.adapter.answers.clear()
            self.settle()
            accounting = self.tier.accounting
            accounted = {entry.tier_key: entry.nbytes for shard in accounting.shards() for entry in shard}
            assert accounted == {name: len(value) for name, value in self.adapter.objects.items()}
            assert accounting.bytes_used == sum(accounted.values())
            assert accounting.bytes_reserved == accounting.bytes_leaving == 0
            assert self.loop.l1.held == 0
            assert not self.tier.order.kept

    return Keys


def test_the_books_say_what_the_medium_has_in_whatever_order_calls_run_and_end(doubles: Doubles, paper: None) -> None:
    machine = make_machine(doubles)
    machine.TestCase.settings = settings(
        max_examples=150, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
    )
    machine.TestCase("runTest").runTest()


def one_tier(doubles: Doubles, **options: object) -> tuple[Any, Any, Any]:
    adapter = doubles.adapter()
    tier = doubles.tier("mem", adapter, **{"deadline_s": 1e6, **options})
    loop = doubles.loop(doubles.l1(), tier, stands=True)
    finish(loop)
    return adapter, tier, loop


def finish(loop: Loop) -> None:
    for _ in range(50):
        for lane in PaperLane.made:
            for call in list(lane.queue):
                lane.run(call)
            for call in list(lane.ran):
                lane.deliver(call)
        loop.turn()


def calls(of: str) -> Sequence[tuple[PaperLane, Call]]:
    return [(lane, call) for lane in PaperLane.made if of in lane.name for call in lane.queue]


def test_a_load_that_expired_while_it_was_held_back_is_told_so_once_though_its_job_takes_it_back_meanwhile(
    doubles: Doubles, paper: None
) -> None:
    _, tier, loop = one_tier(doubles, connections=1)
    tier.batch_keys_max = 1  # a call for each key
    keys = [doubles.key(1), doubles.key(2)]
    loop.store(doubles.contents(2, first=1))
    finish(loop)
    for key in keys:
        loop.l1.evict(key)
    job = loop.ask(keys, seconds=10.0)
    loop.turn()
    ((lookups, exists),) = calls("lookup")
    lookups.run(exists)
    tier.reclaim.delete([tier_key(key, doubles.namespace, 0) for key in keys])
    lookups.deliver(exists)
    loop.turn()
    assert calls("load") == [], "both loads wait for the deletes to return"
    loop.jump(20.0)
    loop.turn()  # the first load ends the job; the job takes the second back, which has expired in the same moment
    finish(loop)
    assert job.reasons == {0: TierReason.LATE, 1: TierReason.CUT}
    assert loop.l1.aborted == {TierReason.LATE: 2}
    assert loop.l1.held == 0
    assert loop.tiering.status()["faults"] == 0
    assert not tier.order.kept


@pytest.mark.parametrize("held", [True, False], ids=["held back", "in its lane"])
def test_what_has_expired_cannot_be_taken_back_and_what_has_not_is_never_called_back(paper: None, held: bool) -> None:
    order, lane, told = KeyOrder(), PaperLane("mem-load", 1, lambda call: None), list[str]()

    def call(deadline: float) -> Call:
        return FunctionCall(deadline=deadline, told=told.append)

    if held:
        assert order.submit(lane, call(100.0), [b"k"], KeyAccess.STORE)
    late, early = call(1.0), call(50.0)
    for each in (late, early):
        assert order.submit(lane, each, [b"k"], KeyAccess.LOAD)
    assert order.held(lane) == (2 if held else 0)
    expired = order.expire(1.0) + lane.expire(1.0)
    assert expired == [late]
    assert not order.cancel(late), "it is about to be told"
    assert order.cancel(early)
    late.tell_late()
    assert told == ["late"]
    assert order.held(lane) == 0
    assert not order.cancel(late)
    assert order.expire(60.0) == []
    assert early.state is CallState.CANCELLED


def test_a_store_that_is_asked_for_during_a_delete_of_its_key_is_on_the_medium_and_accounted(
    doubles: Doubles, paper: None
) -> None:
    adapter, tier, loop = one_tier(doubles)
    name = tier_key(doubles.key(1), doubles.namespace, 0)
    tier.reclaim.delete([name])
    ((lane, delete),) = calls("delete")
    lane.run(delete)
    loop.store(doubles.contents(1, first=1))
    loop.turn()
    loop.turn()
    assert calls("store") == [], "the store waits for the delete to return"
    lane.deliver(delete)
    finish(loop)
    assert name in adapter.objects
    assert tier.accounting.bytes_used == OBJECT_BYTES


def test_a_load_that_a_delete_overtakes_leaves_no_ghost_in_the_books(doubles: Doubles, paper: None) -> None:
    adapter, tier, loop = one_tier(doubles)
    name = tier_key(doubles.key(1), doubles.namespace, 0)
    loop.store(doubles.contents(1, first=1))
    finish(loop)
    loop.l1.evict(doubles.key(1))
    loop.ask([doubles.key(1)])
    loop.turn()
    ((lookups, exists),) = calls("lookup")
    lookups.run(exists)
    lookups.deliver(exists)
    loop.turn()
    ((loads, load),) = calls("load")
    loads.run(load)
    tier.reclaim.delete([name])
    ((deletes, delete),) = calls("delete")
    deletes.run(delete)
    deletes.deliver(delete)
    loop.turn()
    loads.deliver(load)
    finish(loop)
    assert name not in adapter.objects
    assert tier.accounting.bytes_used == tier.accounting.objects == 0
    assert tier.accounting.known([name]) == set(), "and so it is stored again"


def test_what_a_load_found_damaged_is_not_set_aside_once_its_successor_is_on_its_way(
    doubles: Doubles, paper: None
) -> None:
    adapter, tier, loop = one_tier(doubles)
    name = tier_key(doubles.key(1), doubles.namespace, 0)
    loop.store(doubles.contents(1, first=1))
    finish(loop)
    adapter.corrupt(name)
    loop.l1.evict(doubles.key(1))
    job = loop.ask([doubles.key(1)])
    loop.turn()
    ((lookups, exists),) = calls("lookup")
    lookups.run(exists)
    lookups.deliver(exists)
    loop.turn()
    ((loads, load),) = calls("load")
    loads.run(load)
    tier.accounting.remove([name])  # as if it had been forgotten: the key is stored anew
    loop.clear(doubles.namespace)
    loop.l1.loading.clear()
    loop.tiering.on_committed([loop.l1.put(doubles.key(1), doubles.content(2))])
    loop.until(lambda: calls("store"))
    ((stores, store),) = calls("store")
    stores.run(store)
    loads.deliver(load)
    finish(loop)
    assert job.ended
    assert adapter.objects[name][HEADER_BYTES:] == doubles.content(2)
    assert tier.accounting.bytes_used == OBJECT_BYTES


def test_a_call_that_is_over_is_gone_without_the_collector(doubles: Doubles) -> None:
    # The server's collector looks at what is young only, and a call to a slow medium is old when it ends.
    def left() -> list[Call]:
        return [each for each in gc.get_objects() if isinstance(each, Call)]

    adapter = doubles.adapter()
    loop = doubles.loop(doubles.l1(), doubles.tier("mem", adapter, connections=1, deadline_s=30.0))
    loop.idle()
    gc.collect()
    gc.disable()
    try:
        before = len(left())
        contents = doubles.contents(5)
        loop.store(contents)
        loop.idle()
        loop.until(lambda: len(left()) == before)  # stores: their thread lets go of a call just after its end
        for key in contents:
            loop.l1.evict(key)
        loop.fetch(list(contents)[:2])
        loop.until(lambda: len(left()) == before)  # loads
        adapter.hang("load")
        running = loop.ask(list(contents)[2:3])
        loop.until(lambda: adapter.entered.acquire(blocking=False))
        taken_back = loop.ask(list(contents)[3:4])
        loop.until(lambda: len(loop.l1.loading) == 2)
        loop.tiering.cancel(taken_back)
        expired = loop.ask(list(contents)[4:], seconds=5.0)
        loop.until(lambda: len(loop.l1.loading) == 2)
        loop.jump(6.0)
        loop.until(lambda: expired in loop.done)
        adapter.release("load")
        loop.until(lambda: running in loop.done)
        loop.until(lambda: len(left()) == before)  # loads that were taken back or expired
        loop.clear(doubles.namespace, tiers=True)
        loop.until(lambda: not adapter.objects and loop.tiering.drained)
        loop.until(lambda: len(left()) == before)  # deletes
    finally:
        gc.enable()


# --- by itself ------------------------------------------------------------------------------------------------


def a_call(told: list[str] | None = None, name: str = "") -> Call:
    told = [] if told is None else told
    return FunctionCall(deadline=1e9, told=lambda how: told.append(f"{name} {how}"))


def a_lane() -> PaperLane:
    return PaperLane("lane", 1, lambda call: call.tell_end())


def test_a_watch_over_all_keys_sees_what_is_under_way_and_what_comes(paper: None) -> None:
    order, lane = KeyOrder(), a_lane()
    order.submit(lane, a_call(), [b"stored"], KeyAccess.STORE)  # type: ignore[arg-type]
    order.submit(lane, a_call(), [b"deleted"], KeyAccess.DELETE)  # type: ignore[arg-type]
    every, deletes = order.watch_all(of_stores=True), order.watch_all(of_stores=False)
    assert [every.saw(b"stored"), every.saw(b"deleted")] == [True, True]
    assert [deletes.saw(b"stored"), deletes.saw(b"deleted")] == [False, True]
    order.unwatch(every)
    order.submit(lane, a_call(), [b"later"], KeyAccess.DELETE)  # type: ignore[arg-type]
    order.submit(lane, a_call(), [b"new"], KeyAccess.STORE)  # type: ignore[arg-type]
    assert [deletes.saw(b"later"), deletes.saw(b"new")] == [True, False]
    assert not every.saw(b"later"), "it takes no notes any more"


def test_a_watch_over_some_keys_sees_what_changes_them_until_it_ends(paper: None) -> None:
    order, lane = KeyOrder(), a_lane()
    order.submit(lane, a_call(), [b"under way"], KeyAccess.STORE)  # type: ignore[arg-type]
    keys = [b"under way", b"a", b"b", b"c"]
    watch = order.watch(keys)
    order.submit(lane, a_call(), [b"a"], KeyAccess.DELETE)  # type: ignore[arg-type]
    order.submit(lane, a_call(), [b"b"], KeyAccess.LOAD)  # type: ignore[arg-type]
    assert [watch.saw(key) for key in keys] == [True, True, False, False]
    order.unwatch(watch, keys)
    order.submit(lane, a_call(), [b"c"], KeyAccess.STORE)  # type: ignore[arg-type]
    assert not watch.saw(b"c")


def test_a_change_that_was_given_up_before_it_began_makes_nothing_out_of_date(paper: None) -> None:
    order, told, lane = KeyOrder(), list[str](), a_lane()
    first, second = a_call(told, "first"), a_call(told, "second")
    order.submit(lane, first, [b"k"], KeyAccess.STORE)  # type: ignore[arg-type]
    order.submit(lane, second, [b"k"], KeyAccess.DELETE)  # type: ignore[arg-type]
    watch, every = order.watch([b"k"]), order.watch_all(of_stores=True)
    for each in (watch, every):
        assert each.saw(b"k")
        assert each.undecided(b"k"), "either may still be given up"
    for call in order.expire(2e9):
        call.tell_late()
    assert watch.saw(b"k"), "the first may have been made since"
    first.state = CallState.EXPIRED
    first.tell_late()
    assert told == ["second late", "first late"]
    for each in (watch, every):
        assert not each.saw(b"k")
    third = a_call(told, "third")
    order.submit(lane, third, [b"k"], KeyAccess.STORE)  # type: ignore[arg-type]
    third.state = CallState.ENDED
    third.tell_end()
    assert watch.saw(b"k")
    assert not watch.undecided(b"k"), "who made it has told what became of the key"


def test_a_call_whose_lane_is_full_by_its_turn_is_late_and_so_is_who_waits_for_it(paper: None) -> None:
    order, lane, told = KeyOrder(), a_lane(), list[str]()
    first, second, third = (a_call(told, name) for name in ("first", "second", "third"))
    for each in (first, second, third):
        assert order.submit(lane, each, [b"key"], KeyAccess.STORE)  # type: ignore[arg-type]
    lane.run(first)
    lane.closed = True  # from here on it takes nothing
    lane.deliver(first)
    assert told == ["first ended", "second late", "third late"]
    assert [second.state, third.state] == [CallState.EXPIRED] * 2
    assert not order.busy(b"key")
    assert order.held(lane) == 0  # type: ignore[arg-type]


def test_a_key_that_only_a_call_had_that_expired_before_its_turn_is_free_again(paper: None) -> None:
    order, lane, told = KeyOrder(), a_lane(), list[str]()
    first, second, third = (a_call(told, name) for name in ("first", "second", "third"))
    order.submit(lane, first, [b"a"], KeyAccess.STORE)  # type: ignore[arg-type]
    order.submit(lane, second, [b"a", b"b"], KeyAccess.STORE)  # type: ignore[arg-type]
    (late,) = order.expire(second.deadline)
    late.tell_late()
    assert told == ["second late"]
    assert order.busy(b"a")
    assert not order.busy(b"b")
    order.submit(lane, third, [b"b"], KeyAccess.STORE)  # type: ignore[arg-type]
    assert lane.queue == [first, third], "there is nothing left that it would wait for"


def test_a_watch_sees_what_goes_on_behind_a_call_that_was_given_up(paper: None) -> None:
    """A store hangs, a delete behind it is given up, and so is the store behind that, which a watch has seen."""
    order, lane = KeyOrder(), a_lane()
    hung, deleted, again = a_call(), a_call(), a_call()
    for call, access in ((hung, KeyAccess.STORE), (deleted, KeyAccess.DELETE), (again, KeyAccess.STORE)):
        order.submit(lane, call, [b"k"], access)  # type: ignore[arg-type]
    lane.run(hung)
    deleted.state = CallState.EXPIRED
    deleted.tell_late()
    watches = order.watch([b"k"]), order.watch_all(of_stores=True)
    again.state = CallState.EXPIRED
    again.tell_late()
    lane.deliver(hung)
    for each in watches:
        assert each.saw(b"k"), "the first one was under way all the while, and is on the medium now"
