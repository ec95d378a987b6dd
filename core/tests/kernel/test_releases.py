"""What a lease lets go of is taken back in bounded steps, however much it is, and nothing is in two hands then."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import pytest
from kernel_words import NS, OTHER, WORKER, found, keys, names, offer, read, reasons, store

from lmcache_core.errors import LeaseExpiredError
from lmcache_core.kernel import Kernel, LeaseKind, Reason
from lmcache_core.kernel.effects import RowLeft, SlotsMarked
from lmcache_core.kernel.fence import STEP_OBJECTS
from lmcache_core.kernel.states import State

TINY = 3
MANY = 4 * STEP_OBJECTS


@pytest.fixture
def small(make_kernel: Callable[..., Kernel]) -> Kernel:
    kernel = make_kernel(slots=8)
    kernel.register_layout(TINY, 4096)
    return kernel


def granted(kernel: Kernel, count: int = MANY, *, first: int = 0) -> int:
    """One write lease with so many slots."""
    lease_id = 0
    for page in range(first, first + count, 512):
        numbers = keys(*range(page, min(page + 512, first + count)))
        lease_id = kernel.prepare_store(WORKER, NS, TINY, numbers, 0.0, lease_id=lease_id).lease_id
    kernel.take_effects()
    return lease_id


def freed(kernel: Kernel, state: State = State.FREE) -> int:
    marks = [effect for effect in kernel.take_effects() if isinstance(effect, SlotsMarked)]
    return sum(len(mark.offsets) for mark in marks if mark.state is state)


def steps(kernel: Kernel, state: State = State.FREE, now: float = 1.0) -> list[int]:
    """What each step freed, the first of which was within the call."""
    done = [freed(kernel, state)]
    while kernel.working:
        kernel.step(now)
        done.append(freed(kernel, state))
    return done


@pytest.mark.parametrize("how", ["session_dead", "session_closed", "end_session"])
def test_the_end_of_who_holds_much_takes_many_bounded_steps(small: Kernel, how: str) -> None:
    granted(small)
    getattr(small, how)(WORKER, 1.0)
    assert small.usage().leases_by_kind["write"] == 0, "it is settled at once"
    done = steps(small)
    assert max(done) <= STEP_OBJECTS
    assert sum(done) == MANY
    assert small.usage().used_bytes == 0
    reason = Reason.WRITER_DIED if how == "session_dead" else Reason.ABORTED
    assert reasons(small, MANY - 1) == [reason]


def test_a_dead_writers_keys_are_busy_and_its_slots_its_own_until_their_step(small: Kernel) -> None:
    granted(small)
    small.session_dead(WORKER, 1.0)
    assert names(offer(small, 0, session=OTHER, layout=TINY).statuses) == ["BUSY"], "the end of a lease goes first"
    assert names(offer(small, MANY - 1, session=OTHER, layout=TINY).statuses) == ["GRANTED"]
    steps(small)
    assert names(offer(small, 0, session=OTHER, layout=TINY).statuses) == ["GRANTED"]


def test_a_clear_between_two_steps_takes_nothing_twice(small: Kernel) -> None:
    granted(small)
    store(small, *range(5000, 5000 + 512), layout=TINY)
    small.session_dead(WORKER, 1.0)
    small.begin_clear(1.0)
    again = small.begin_store(OTHER, NS, TINY, keys(0, 1), 1.0)
    assert names(again.statuses) == ["GRANTED", "GRANTED"]
    while small.clearing:
        small.free_cleared(1.0)
    steps(small)
    small.commit_store(OTHER, again.lease_id, 1.0)
    assert found(small, 0, 1, 2) == [True, True, False]
    assert small.usage().used_bytes == 2 * 4096


def test_a_late_writers_slots_go_to_quarantine_in_steps_and_its_answer_may_come_in_between(small: Kernel) -> None:
    lease_id = granted(small)
    small.expire(10.0)
    assert freed(small, State.QUARANTINED) == STEP_OBJECTS
    assert small.usage().quarantine_by_session == {WORKER: STEP_OBJECTS * 4096}
    small.abort_store(WORKER, lease_id, 10.0, range(128, 2 * STEP_OBJECTS + 128))
    assert small.usage().quarantine_by_session == {WORKER: 128 * 4096}
    assert max(steps(small, State.QUARANTINED, now=10.0)) <= STEP_OBJECTS
    left = MANY - 2 * STEP_OBJECTS
    assert small.usage().objects_by_state["quarantined"] == left
    assert small.usage().quarantine_by_session == {WORKER: left * 4096}
    with pytest.raises(LeaseExpiredError):
        small.commit_store(WORKER, lease_id, 10.0)
    assert small.usage().quarantine_by_session == {}
    assert small.usage().used_bytes == 0


def test_promises_that_end_at_once_end_in_steps(small: Kernel) -> None:
    for first in range(0, MANY, 512):
        store(small, *range(first, first + 512), layout=TINY)
        small.lookup(OTHER, NS, keys(*range(first, first + 512)), 0.0, hold=True)
    small.expire(10.0)
    assert small.usage().leases_by_kind["promise"] == 0
    held = [len(small.residents.policy.victims(1 << 40))]
    while small.working:
        small.step(10.0)
        held.append(len(small.residents.policy.victims(1 << 40)))
    assert held[-1] == MANY
    assert all(after - before <= STEP_OBJECTS for before, after in pairwise(held))


def test_many_leases_that_are_due_at_once_are_ended_a_bounded_number_at_a_time(small: Kernel) -> None:
    store(small, 1, layout=TINY)
    for _ in range(2 * STEP_OBJECTS):
        small.lookup(OTHER, NS, keys(1), 0.0, hold=True)
    small.expire(10.0)
    left = small.usage().leases_by_kind[LeaseKind.PROMISE.name.lower()]
    assert STEP_OBJECTS <= left <= STEP_OBJECTS + 1, "that of the store is looked at, too"
    due = small.next_deadline()
    assert due is not None
    assert due <= 10.0, "there is more to do at once"
    small.expire(10.0)
    small.expire(10.0)
    assert small.usage().leases_by_kind[LeaseKind.PROMISE.name.lower()] == 0


def test_what_was_read_by_who_is_gone_is_released_in_steps(small: Kernel) -> None:
    for first in range(0, MANY, 512):
        store(small, *range(first, first + 512), layout=TINY)
        read(small, *range(first, first + 512))
    small.clear(0.0)
    small.take_effects()
    assert small.usage().objects_by_state["doomed"] == MANY
    small.session_dead(WORKER, 1.0)
    done = steps(small)
    assert max(done) <= STEP_OBJECTS
    assert sum(done) == MANY


def test_what_a_client_takes_over_names_its_new_row_in_steps_and_its_old_row_is_free_after_that(small: Kernel) -> None:
    lease_id = granted(small)
    small.session_lost(WORKER, 1.0)
    small.open_session(3, 1000 + WORKER, 13)
    small.attach_session(3, 13)
    assert small.reclaim(WORKER, 3, [lease_id], 1.0) == [lease_id]
    small.leave_row(11)
    marked: list[int] = []
    for _ in range(MANY):
        effects = small.take_effects()
        rows = [effect.row for effect in effects if isinstance(effect, SlotsMarked) for _ in effect.offsets]
        assert len(rows) <= 2 * STEP_OBJECTS
        assert set(rows) <= {13}
        marked += rows
        left = [effect.row for effect in effects if isinstance(effect, RowLeft)]
        assert not left or len(marked) == MANY, "the old row is nobody's before the last slot names the new one"
        if left:
            break
        small.step(1.0)
    assert left == [11]
    assert set(small.commit_store(3, lease_id, 1.0)) == {0}
