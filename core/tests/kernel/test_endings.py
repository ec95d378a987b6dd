"""How leases, sessions and objects end: each sentence of the design on that, as a claim."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from kernel_words import (
    BIG,
    LAYOUT,
    MIB,
    NS,
    NS2,
    OTHER,
    WORKER,
    found,
    keys,
    load,
    marks,
    names,
    offer,
    read,
    reasons,
    store,
    used,
)

from lmcache_core.errors import LeaseExpiredError, UsageError
from lmcache_core.kernel import Grant, Kernel, LeaseKind, Reason, Settled
from lmcache_core.kernel.effects import LeaseExpired, Removed
from lmcache_core.kernel.states import State

# --- deadlines ------------------------------------------------------------------------------------------------


def test_an_expired_read_lease_keeps_its_pins_and_its_object_is_served(
    make_kernel: Callable[..., Kernel],
) -> None:
    kernel = make_kernel(slots=1)
    store(kernel, 1)
    lease = read(kernel, 1).lease_id
    kernel.expire(10.0)
    assert [e.lease_id for e in kernel.take_effects() if isinstance(e, LeaseExpired)] == [lease]
    assert found(kernel, 1, now=10.0) == [True]
    assert names(offer(kernel, 2, now=10.0).statuses) == ["FULL"]
    with pytest.raises(LeaseExpiredError, match="renewed"):
        kernel.renew_lease(WORKER, lease, 10.0)
    assert list(kernel.finish_read(WORKER, lease, 11.0)) == [Settled.FINISHED]
    assert names(offer(kernel, 2, now=11.0).statuses) == ["GRANTED"]


def test_an_expired_write_lease_frees_the_key_at_once_and_quarantines_the_slot(kernel: Kernel) -> None:
    first = offer(kernel, 1)
    kernel.take_effects()
    kernel.expire(10.0)
    assert marks(kernel) == {first.offsets[0]: (State.QUARANTINED, 11)}
    assert reasons(kernel, 1, now=10.0) == [Reason.EXPIRED]
    second = offer(kernel, 1, session=OTHER, now=10.0)
    assert second.statuses[0] == Grant.GRANTED
    assert second.offsets[0] != first.offsets[0]
    assert kernel.usage().quarantine_by_session == {WORKER: MIB}


def test_a_late_commit_is_refused_and_counted_and_frees_the_slots(kernel: Kernel) -> None:
    lease = offer(kernel, 1, 2).lease_id
    with pytest.raises(LeaseExpiredError, match="not stored"):
        kernel.commit_store(WORKER, lease, 10.0, [0])
    assert used(kernel) == 1
    with pytest.raises(LeaseExpiredError):
        kernel.commit_store(WORKER, lease, 10.0)
    assert used(kernel) == 0
    assert kernel.usage().quarantine_by_holder == {}
    with pytest.raises(LeaseExpiredError):
        kernel.commit_store(WORKER, lease, 10.0)
    assert kernel.usage().counters["stale_leases"] == 3
    assert found(kernel, 1, 2, now=10.0) == [False, False]


def test_an_abort_is_a_good_answer_to_an_expiry(kernel: Kernel) -> None:
    lease = offer(kernel, 1).lease_id
    kernel.expire(10.0)
    assert list(kernel.abort_store(WORKER, lease, 12.0)) == [Settled.ABORTED]
    assert used(kernel) == 0


def test_renewal_moves_the_deadline_of_that_lease_only(kernel: Kernel) -> None:
    renewed, left = offer(kernel, 1).lease_id, offer(kernel, 2).lease_id
    assert kernel.renew_lease(WORKER, renewed, 6.0) == 16.0
    kernel.expire(10.0)
    assert list(kernel.commit_store(WORKER, renewed, 15.0)) == [Settled.COMMITTED]
    with pytest.raises(LeaseExpiredError):
        kernel.commit_store(WORKER, left, 15.0)


def test_the_next_deadline_is_never_too_late(kernel: Kernel) -> None:
    assert kernel.next_deadline() is None
    offer(kernel, 1, now=3.0)
    store(kernel, 2, now=4.0)
    kernel.pin(WORKER, NS, keys(2), 1.0, 4.0)
    assert kernel.next_deadline() == 5.0
    kernel.expire(5.0)
    assert kernel.next_deadline() == 13.0


# --- clear ----------------------------------------------------------------------------------------------------


def test_clear_dooms_what_is_written_and_loaded_and_their_commit_says_so(kernel: Kernel) -> None:
    writing, loading = offer(kernel, 1).lease_id, load(kernel, 2).lease_id
    store(kernel, 3)
    cleared = kernel.clear(0.0)
    assert (cleared.objects, cleared.nbytes, cleared.doomed) == (1, MIB, 2)
    assert used(kernel) == 2, "their slots wait for their owners"
    assert offer(kernel, 1, session=OTHER).statuses[0] == Grant.GRANTED
    assert list(kernel.commit_store(WORKER, writing, 0.0)) == [Settled.CLEARED]
    assert list(kernel.commit_store(0, loading, 0.0)) == [Settled.CLEARED]
    assert used(kernel) == 1
    assert found(kernel, 1, 2, 3) == [False, False, False]
    assert reasons(kernel, 2, 3) == [Reason.CLEARED, Reason.CLEARED]


def test_clear_is_no_fault_of_the_writer_and_charges_nobody(kernel: Kernel) -> None:
    offer(kernel, 1)
    kernel.clear(0.0)
    assert kernel.usage().quarantine_by_holder == {}
    kernel.expire(10.0)
    assert kernel.usage().quarantine_by_holder == {"uid 1001": MIB}, "being late is"


def test_clear_under_a_reader_frees_memory_with_the_last_pin_only(kernel: Kernel) -> None:
    offset = store(kernel, 1)[0]
    first, second = read(kernel, 1).lease_id, read(kernel, 1, session=OTHER).lease_id
    kernel.take_effects()
    kernel.clear(0.0, NS)
    assert marks(kernel)[offset][0] is State.DOOMED
    assert found(kernel, 1) == [False]
    kernel.finish_read(WORKER, first, 0.0)
    assert used(kernel) == 1
    kernel.finish_read(OTHER, second, 0.0)
    assert used(kernel) == 0


def test_clear_of_one_namespace_leaves_the_others(kernel: Kernel) -> None:
    store(kernel, 1)
    other = kernel.prepare_store(WORKER, NS2, LAYOUT, keys(1), 0.0).lease_id
    kernel.clear(0.0, NS)
    assert list(kernel.commit_store(WORKER, other, 0.0)) == [Settled.COMMITTED]
    assert found(kernel, 1) == [False]
    assert found(kernel, 1, namespace=NS2) == [True]


def test_clear_ends_the_pins_of_what_it_clears(kernel: Kernel) -> None:
    store(kernel, 1)
    kernel.pin(WORKER, NS, keys(1), 100.0, 0.0)
    kernel.clear(0.0)
    assert used(kernel) == 0
    assert kernel.usage().pinned_bytes == 0


# --- the end of sessions --------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["session_dead", "session_closed", "end_session"])
def test_the_end_of_a_session_frees_all_it_held_at_once(how: str, kernel: Kernel) -> None:
    store(kernel, 1)
    read(kernel, 1)
    kernel.lookup(WORKER, NS, keys(1), 0.0, hold=True)
    offer(kernel, 2)
    overdue = offer(kernel, 3).lease_id
    assert overdue
    kernel.expire(10.0)
    offer(kernel, 4, now=10.0)
    getattr(kernel, how)(WORKER, 11.0)
    usage = kernel.usage()
    assert usage.used_bytes == MIB
    assert set(usage.leases_by_kind.values()) == {0}
    assert usage.quarantine_by_holder == {}
    assert found(kernel, 1, 2, 3, 4, now=11.0) == [True, False, False, False]
    kernel.clear(11.0)
    assert used(kernel) == 0, "no pin was left behind"


def test_a_lost_session_is_not_a_dead_one(kernel: Kernel) -> None:
    store(kernel, 1)
    read(kernel, 1)
    writing = offer(kernel, 2)
    kernel.session_lost(WORKER, 1.0)
    assert names(offer(kernel, 2, session=OTHER, now=1.0).statuses) == ["BUSY"], "its lease goes on"
    kernel.take_effects()
    kernel.expire(10.0)
    assert marks(kernel)[writing.offsets[0]] == (State.QUARANTINED, 11)
    kernel.clear(10.0)
    assert used(kernel) == 2, "pin and quarantine wait"
    kernel.session_dead(WORKER, 50.0)
    assert used(kernel) == 0
    assert kernel.usage().sessions_lost == 0


def test_the_same_client_takes_over_what_it_still_holds_and_the_rest_is_settled(kernel: Kernel) -> None:
    store(kernel, 1)
    reading = read(kernel, 1).lease_id
    kept, dropped = offer(kernel, 2), offer(kernel, 3).lease_id
    done = offer(kernel, 4).lease_id
    kernel.commit_store(WORKER, done, 0.0)
    kernel.session_lost(WORKER, 1.0)
    kernel.open_session(5, uid=1001, row=15)
    kernel.attach_session(5, 15)
    kernel.take_effects()
    assert kernel.reclaim(WORKER, 5, [kept.lease_id, reading, done, 12345], 2.0) == [kept.lease_id, reading, done]
    assert marks(kernel)[kept.offsets[0]] == (State.WRITING, 15)
    assert list(kernel.commit_store(5, kept.lease_id, 2.0)) == [Settled.COMMITTED]
    assert list(kernel.commit_store(5, done, 2.0)) == [Settled.COMMITTED], "the first answer, whose reply was lost"
    assert list(kernel.finish_read(5, reading, 2.0)) == [Settled.FINISHED]
    with pytest.raises(LeaseExpiredError):
        kernel.commit_store(5, dropped, 2.0)
    assert used(kernel) == 3
    with pytest.raises(UsageError, match="session 1 "):
        offer(kernel, 9, now=2.0)


def test_another_users_session_takes_over_nothing(kernel: Kernel) -> None:
    lease = offer(kernel, 1).lease_id
    with pytest.raises(UsageError, match="uid"):
        kernel.reclaim(WORKER, OTHER, [lease], 0.0)
    assert list(kernel.commit_store(WORKER, lease, 0.0)) == [Settled.COMMITTED]


# --- pins, drops, temporary loads -----------------------------------------------------------------------------


def test_a_pin_keeps_from_eviction_until_its_time_and_is_capped(make_kernel: Callable[..., Kernel]) -> None:
    kernel = make_kernel(slots=4, pinned_fraction_max=0.5)
    store(kernel, 1, 2, 3, 4)
    assert names(kernel.pin(WORKER, NS, keys(1, 2, 3, 9), 5.0, 0.0)) == ["GRANTED", "GRANTED", "QUOTA", "MISS"]
    kernel.session_dead(WORKER, 0.0)  # pins are the server's
    offer(kernel, 5, 6, session=OTHER)
    assert found(kernel, 1, 2, 3, 4) == [True, True, False, False]
    assert names(kernel.unpin(OTHER, NS, keys(1, 3), 0.0)) == ["GRANTED", "MISS"]
    assert kernel.usage().pinned_bytes == MIB
    kernel.expire(5.0)
    assert kernel.usage().pinned_objects == 0


def test_a_drop_takes_ready_objects_only_and_waits_for_readers(kernel: Kernel) -> None:
    store(kernel, 1, 2)
    writing = offer(kernel, 3).lease_id
    lease = read(kernel, 1).lease_id
    kernel.take_effects()
    kernel.drop(NS, keys(1, 2, 2, 3, 4), 0.0, Reason.DROPPED)
    assert [len(e.objects) for e in kernel.take_effects() if isinstance(e, Removed)] == [2]
    assert found(kernel, 1, 2) == [False, False]
    assert reasons(kernel, 1) == [Reason.DROPPED]
    assert used(kernel) == 2
    kernel.finish_read(WORKER, lease, 0.0)
    kernel.commit_store(WORKER, writing, 0.0)
    assert used(kernel) == 1


def test_a_temporary_load_goes_with_its_last_reader_and_not_with_a_lane(kernel: Kernel) -> None:
    lease = load(kernel, 1).lease_id
    kernel.commit_store(0, lease, 0.0, retain=False)
    lane = kernel.prepare_retrieve(0, NS, keys(1), 0.0).lease_id
    kernel.finish_read(0, lane, 0.0)
    assert found(kernel, 1) == [True]
    first, second = read(kernel, 1).lease_id, read(kernel, 1, session=OTHER).lease_id
    kernel.finish_read(WORKER, first, 0.0)
    assert found(kernel, 1) == [True]
    kernel.finish_read(OTHER, second, 0.0)
    assert found(kernel, 1) == [False]
    assert used(kernel) == 0


def test_a_read_can_insist_on_its_layout(kernel: Kernel) -> None:
    store(kernel, 1)
    store(kernel, 2, layout=BIG)
    grants = kernel.prepare_retrieve(WORKER, NS, keys(1, 2), 0.0, layout_id=LAYOUT)
    assert names(grants.statuses) == ["GRANTED", "MISS"]
    assert list(grants.reasons) == [Reason.NONE, Reason.OTHER_LAYOUT]
    assert kernel.usage().leases_by_kind[LeaseKind.READ.name.lower()] == 1


def test_a_missing_batch_holds_nothing(kernel: Kernel) -> None:
    store(kernel, 2)
    grants = kernel.prepare_retrieve(WORKER, NS, keys(1, 2), 0.0, prefix=True)
    assert names(grants.statuses) == ["MISS", "MISS"]
    assert kernel.usage().leases_by_kind["read"] == 0
    assert list(kernel.finish_read(WORKER, grants.lease_id, 0.0)) == [Settled.NOT_HELD] * 2
