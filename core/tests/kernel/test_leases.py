"""Each sentence of the design on leases, as a claim."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from kernel_model import World
from kernel_words import (
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
from lmcache_core.kernel import Kernel, KernelConfig, Reason, Settled
from lmcache_core.kernel.effects import Committed
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


def test_pages_that_grant_nothing_are_counted_with_what_is_remembered(kernel: Kernel) -> None:
    store(kernel, 1, 2)
    first = kernel.prepare_store(WORKER, NS, LAYOUT, keys(1), 0.0)
    kernel.prepare_store(WORKER, NS, LAYOUT, keys(2), 0.0, lease_id=first.lease_id)
    book = kernel.leases
    assert book.settled_bytes == sum(len(lease.answers) for lease in book.settled.values()) == 2


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


def test_a_promise_is_not_redeemed_from_another_namespace(make_kernel: Callable[..., Kernel]) -> None:
    kernel = make_kernel(slots=1)
    store(kernel, 1)
    promise = kernel.lookup(OTHER, NS, keys(1), 0.0, hold=True)
    # The same keys, all of them: whose namespace it is must decide, not what is asked for.
    grants = kernel.prepare_retrieve(WORKER, NS2, keys(1), 0.0, promise_id=promise.promise_id)
    assert names(grants.statuses) == ["MISS"]
    assert kernel.usage().leases_by_kind["promise"] == 1
    assert kernel.usage().counters["stale_leases"] == 1
    assert names(offer(kernel, 2).statuses) == ["FULL"], "what is promised was evicted"
    assert found(kernel, 1) == [True]


@pytest.mark.parametrize("how", ["free", "end_session", "expiry", "dead"])
def test_the_slot_of_an_ended_promise_goes_to_another_object(how: str, make_kernel: Callable[..., Kernel]) -> None:
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
