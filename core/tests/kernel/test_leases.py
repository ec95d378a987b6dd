"""Each sentence of the design on leases, as a claim."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from kernel_model import World
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

from lmcache_core.errors import LeaseExpiredError, LimitError, NotAttachedError, UsageError
from lmcache_core.kernel import Grant, Kernel, KernelConfig, LeaseKind, Reason, Settled
from lmcache_core.kernel.effects import Committed, LeaseExpired, LoadDoomed, Removed
from lmcache_core.kernel.states import State
from lmcache_core.limits import BATCH_KEYS_MAX, LEASES_PER_SESSION_MAX
from lmcache_core.policies.lru import LruEviction

# --- grants ---------------------------------------------------------------------------------------------------


def test_a_batch_is_granted_in_part_first_keys_first(make_kernel: Callable[..., Kernel]) -> None:
    kernel = make_kernel(slots=4, data_offset=MIB)  # so that no slot stands at 0
    store(kernel, 1)
    grants = offer(kernel, 1, 2, 2, 3, 4, 5)
    assert names(grants.statuses) == ["EXISTS", "GRANTED", "BUSY", "GRANTED", "GRANTED", "FULL"]
    assert [offset != 0 for offset in grants.offsets] == [False, True, False, True, True, False]
    assert reasons(kernel, 5) == [Reason.NO_ROOM]


def test_what_someone_else_or_the_same_session_is_writing_is_busy(kernel: Kernel) -> None:
    offer(kernel, 1)
    assert names(offer(kernel, 1, session=OTHER).statuses) == ["BUSY"]
    assert names(offer(kernel, 1).statuses) == ["BUSY"]


def test_an_object_that_no_pool_of_this_size_holds_is_too_large(kernel: Kernel) -> None:
    kernel.register_layout(9, 9 * MIB)
    assert names(offer(kernel, 1, 2, layout=9).statuses) == ["TOO_LARGE", "TOO_LARGE"]
    assert used(kernel) == 0


def test_slots_are_handed_out_only_where_memory_is_populated() -> None:
    kernel = Kernel(KernelConfig(pool_bytes=4 * MIB, data_offset=MIB, slab_bytes=MIB), LruEviction(), epoch=1)
    kernel.register_layout(LAYOUT, MIB)
    kernel.open_session(WORKER, uid=1, row=1)
    kernel.attach_session(WORKER, 1)
    assert names(offer(kernel, 1).statuses) == ["WARMING"]
    kernel.add_memory(2 * MIB + MIB // 2)
    grants = offer(kernel, 1, 2, 3)
    assert names(grants.statuses) == ["GRANTED", "GRANTED", "WARMING"]
    assert list(grants.offsets) == [MIB, 2 * MIB, 0]
    kernel.add_memory(4 * MIB)
    assert names(offer(kernel, 3, 4, 5).statuses) == ["GRANTED", "GRANTED", "FULL"]


def test_only_a_session_that_maps_the_pool_is_given_slots(kernel: Kernel) -> None:
    kernel.open_session(7, uid=1)
    with pytest.raises(NotAttachedError, match="session 7"):
        offer(kernel, 1, session=7)
    with pytest.raises(NotAttachedError, match="session 7"):
        read(kernel, 1, session=7)
    assert names(kernel.lookup(7, NS, keys(1), 0.0).statuses) == ["MISS"]


def test_misuse_names_the_thing_and_changes_nothing(kernel: Kernel) -> None:
    with pytest.raises(UsageError, match="key 1 is 31 bytes long"):
        kernel.prepare_store(WORKER, NS, LAYOUT, [bytes(32), bytes(31)], 0.0)
    with pytest.raises(LimitError, match=str(BATCH_KEYS_MAX)):
        kernel.prepare_store(WORKER, NS, LAYOUT, [bytes(32)] * (BATCH_KEYS_MAX + 1), 0.0)
    with pytest.raises(UsageError, match="layout 77"):
        offer(kernel, 1, layout=77)
    with pytest.raises(UsageError, match="session 99"):
        offer(kernel, 1, session=99)
    with pytest.raises(UsageError, match="layout 1 has slots"):
        kernel.register_layout(LAYOUT, 3 * MIB)
    lease = offer(kernel, 1).lease_id
    with pytest.raises(UsageError, match="position 1 "):
        kernel.commit_store(WORKER, lease, 0.0, [0, 1])
    with pytest.raises(UsageError, match="READ"):
        kernel.finish_read(WORKER, lease, 0.0)
    assert used(kernel) == 1
    assert found(kernel, 1) == [False]


def test_a_worker_that_leaks_leases_is_stopped_at_the_limit() -> None:
    world = World()
    world.join()
    world.store(1, NS, 1, [1])
    world.settle(1, next(iter(world.permits)), None, "commit")
    for _ in range(LEASES_PER_SESSION_MAX):
        world.kernel.prepare_retrieve(1, NS, keys(1), world.now)
    with pytest.raises(LimitError, match="session 1"):
        world.kernel.prepare_retrieve(1, NS, keys(1), world.now)


# --- visibility -----------------------------------------------------------------------------------------------


def test_objects_become_visible_in_one_step_at_commit(kernel: Kernel) -> None:
    lease = offer(kernel, 1, 2).lease_id
    assert found(kernel, 1, 2) == [False, False]
    assert reasons(kernel, 1) == [Reason.BEING_WRITTEN]
    kernel.commit_store(WORKER, lease, 0.0)
    assert found(kernel, 1, 2) == [True, True]


def test_slots_are_marked_by_the_time_the_call_returns_with_their_owner(kernel: Kernel) -> None:
    grants = offer(kernel, 1, 2)
    assert marks(kernel) == dict.fromkeys(grants.offsets, (State.WRITING, 11))
    kernel.commit_store(WORKER, grants.lease_id, 0.0, [0])
    assert {state for state, _ in marks(kernel).values()} == {State.READY}
    kernel.abort_store(WORKER, grants.lease_id, 0.0)
    assert list(marks(kernel).items()) == [(grants.offsets[1], (State.FREE, 11))]


def test_what_is_loading_is_told_apart_from_a_miss(kernel: Kernel) -> None:
    lease = load(kernel, 1).lease_id
    assert names(kernel.lookup(WORKER, NS, keys(1), 0.0).statuses) == ["LOADING"]
    assert names(read(kernel, 1).statuses) == ["LOADING"]
    kernel.commit_store(0, lease, 0.0)
    assert found(kernel, 1) == [True]
    assert [e.loaded for e in kernel.take_effects() if isinstance(e, Committed)] == [True]


def test_namespaces_never_share(kernel: Kernel) -> None:
    store(kernel, 1)
    assert found(kernel, 1, namespace=NS2) == [False]
    assert names(kernel.prepare_store(WORKER, NS2, LAYOUT, keys(1), 0.0).statuses) == ["GRANTED"]


# --- settling -------------------------------------------------------------------------------------------------


def test_a_lease_is_settled_by_positions_and_lives_until_all_are(kernel: Kernel) -> None:
    lease = offer(kernel, 1, 2, 3).lease_id
    assert list(kernel.commit_store(WORKER, lease, 0.0, [2, 0])) == [Settled.COMMITTED, Settled.COMMITTED]
    assert found(kernel, 1, 2, 3) == [True, False, True]
    status = kernel.lease_status(WORKER, lease, 0.0)
    assert (status.open, list(status.answers)) == (True, [Settled.COMMITTED, Settled.OPEN, Settled.COMMITTED])
    assert list(kernel.abort_store(WORKER, lease, 0.0, [1])) == [Settled.ABORTED]
    assert not kernel.lease_status(WORKER, lease, 0.0).open
    assert kernel.usage().leases_by_kind["write"] == 0


def test_a_repeated_call_gets_the_first_answer(kernel: Kernel) -> None:
    grants = offer(kernel, 1, 1, 2)
    first = kernel.commit_store(WORKER, grants.lease_id, 0.0)
    assert list(first) == [Settled.COMMITTED, Settled.NOT_HELD, Settled.COMMITTED]
    assert kernel.commit_store(WORKER, grants.lease_id, 0.0) == first
    assert kernel.abort_store(WORKER, grants.lease_id, 0.0) == first
    assert found(kernel, 1, 2) == [True, True]


def test_answers_are_remembered_for_a_bounded_while(make_kernel: Callable[..., Kernel]) -> None:
    kernel = make_kernel(settled_leases_remembered=2)
    leases = [offer(kernel, number).lease_id for number in (1, 2, 3)]
    for lease in leases:
        kernel.commit_store(WORKER, lease, 0.0)
    with pytest.raises(LeaseExpiredError):
        kernel.commit_store(WORKER, leases[0], 0.0)
    assert list(kernel.commit_store(WORKER, leases[2], 0.0)) == [Settled.COMMITTED]


def test_pages_continue_under_one_lease(kernel: Kernel) -> None:
    lease = offer(kernel, 1, 2).lease_id
    second = kernel.prepare_store(WORKER, NS, LAYOUT, keys(3, 3, 4), 1.0, lease_id=lease)
    assert second.lease_id == lease
    assert second.deadline == 11.0
    answers = kernel.commit_store(WORKER, lease, 1.0)
    assert list(answers) == [Settled.COMMITTED] * 3 + [Settled.NOT_HELD, Settled.COMMITTED]


def test_positions_count_through_pages_that_grant_nothing_and_pages_that_are_settled(kernel: Kernel) -> None:
    store(kernel, 1, 2)
    lease = offer(kernel, 1, 2).lease_id
    assert lease
    assert kernel.usage().leases_by_kind["write"] == 0
    assert kernel.prepare_store(WORKER, NS, LAYOUT, keys(3), 0.0, lease_id=lease).lease_id == lease
    assert list(kernel.commit_store(WORKER, lease, 0.0, [2])) == [Settled.COMMITTED]
    assert kernel.prepare_store(WORKER, NS, LAYOUT, keys(4), 0.0, lease_id=lease).lease_id == lease
    assert list(kernel.commit_store(WORKER, lease, 0.0, [3])) == [Settled.COMMITTED]
    assert found(kernel, 3, 4) == [True, True]


def test_only_the_lease_of_the_own_session_settles_and_a_stale_id_is_counted(kernel: Kernel) -> None:
    lease = offer(kernel, 1).lease_id
    for call in (kernel.commit_store, kernel.abort_store, kernel.renew_lease, kernel.lease_status):
        with pytest.raises(LeaseExpiredError, match="session 2"):
            call(OTHER, lease, 0.0)
    with pytest.raises(LeaseExpiredError):
        kernel.commit_store(WORKER, lease + 1, 0.0)
    assert kernel.usage().counters["stale_leases"] == 5
    assert list(kernel.commit_store(WORKER, lease, 0.0)) == [Settled.COMMITTED]


def test_lease_ids_carry_the_boot_epoch(kernel: Kernel) -> None:
    assert offer(kernel, 1).lease_id >> 40 == 1


# --- promises -------------------------------------------------------------------------------------------------


def test_a_promise_is_redeemed_by_any_session_of_its_namespace(make_kernel: Callable[..., Kernel]) -> None:
    kernel = make_kernel(slots=2)
    store(kernel, 1, 2)
    promise = kernel.lookup(OTHER, NS, keys(1, 2, 3), 0.0, hold=True)
    assert names(offer(kernel, 4).statuses) == ["FULL"]  # nothing promised is evicted
    kernel.prepare_retrieve(WORKER, NS2, keys(1), 0.0, promise_id=promise.promise_id)
    assert kernel.usage().leases_by_kind["promise"] == 1
    grants = kernel.prepare_retrieve(WORKER, NS, keys(1, 2), 0.0, promise_id=promise.promise_id)
    assert names(grants.statuses) == ["GRANTED", "GRANTED"]
    assert kernel.usage().leases_by_kind["promise"] == 0
    kernel.finish_read(WORKER, grants.lease_id, 0.0)
    assert names(offer(kernel, 4).statuses) == ["GRANTED"]


@pytest.mark.parametrize("how", ["free", "end_session", "expiry", "dead"])
def test_a_promise_ends_by(how: str, make_kernel: Callable[..., Kernel]) -> None:
    kernel = make_kernel(slots=1)
    store(kernel, 1)
    promise = kernel.lookup(WORKER, NS, keys(1), 0.0, hold=True).promise_id
    now = 0.0
    if how == "free":
        assert kernel.free_lookup_locks(OTHER, [promise], now) == 0, "another session's"
        assert kernel.free_lookup_locks(WORKER, [promise, promise], now) == 1
    elif how == "end_session":
        kernel.end_session(WORKER, now)
    elif how == "expiry":
        now = 10.0
    else:
        kernel.session_dead(WORKER, now)
    assert names(offer(kernel, 2, session=OTHER, now=now).statuses) == ["GRANTED"]


def test_a_prefix_lookup_holds_nothing_behind_the_first_miss(make_kernel: Callable[..., Kernel]) -> None:
    kernel = make_kernel(slots=3)
    store(kernel, 1, 2, 4)
    held = kernel.lookup(WORKER, NS, keys(1, 2, 3, 4), 0.0, hold=True, prefix=True)
    assert names(held.statuses) == ["GRANTED", "GRANTED", "MISS", "MISS"]
    assert list(held.reasons[2:]) == [Reason.NEVER_STORED, Reason.NONE]
    assert names(offer(kernel, 5, 6, session=OTHER).statuses) == ["GRANTED", "FULL"]
    assert found(kernel, 1, 2, 4) == [True, True, False]


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
    assert kernel.usage().quarantine_by_uid == {}
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
    assert [e.lease_id for e in kernel.take_effects() if isinstance(e, LoadDoomed)] == [loading]
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
    assert kernel.usage().quarantine_by_uid == {}
    kernel.expire(10.0)
    assert kernel.usage().quarantine_by_uid == {1001: MIB}, "being late is"


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
    assert usage.quarantine_by_uid == {}
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
