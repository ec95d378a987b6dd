"""Quarantine is capped, and the cap hits whoever is to blame."""

from __future__ import annotations

from collections.abc import Callable

from kernel_words import MIB, NS, OTHER, WORKER, keys, load, names, offer, read, store, used

from lmcache_core.kernel import Kernel, Reason


def test_at_its_cap_the_silent_session_gets_no_slots_and_everyone_else_does(make_kernel: Callable[..., Kernel]) -> None:
    kernel = make_kernel(slots=16, quarantine_fraction_per_uid_max=0.125)
    kernel.open_session(3, uid=1001, row=13)  # of the same user, and innocent
    kernel.attach_session(3, 13)
    lease = offer(kernel, 1, 2).lease_id
    store(kernel, 7, session=OTHER)
    kernel.expire(10.0)
    assert names(offer(kernel, 3, 7, now=10.0).statuses) == ["QUOTA", "EXISTS"]
    assert kernel.lookup(OTHER, NS, keys(3), 10.0).reasons[0] == Reason.QUOTA
    assert names(offer(kernel, 4, session=3, now=10.0).statuses) == ["GRANTED"]
    assert names(offer(kernel, 5, session=OTHER, now=10.0).statuses) == ["GRANTED"]
    assert names(read(kernel, 7, now=10.0).statuses) == ["GRANTED"], "reading hurts nobody"
    assert kernel.usage().quarantine_by_holder == {"uid 1001": 2 * MIB}, "the culprit is named"
    kernel.abort_store(WORKER, lease, 10.0, [0])
    assert names(offer(kernel, 3, now=10.0).statuses) == ["GRANTED"], "below the cap again"


def test_the_pools_cap_counts_all_users_together(make_kernel: Callable[..., Kernel]) -> None:
    kernel = make_kernel(slots=16, quarantine_fraction_max=0.125, quarantine_fraction_per_uid_max=0.125)
    kernel.open_session(3, uid=1003, row=13)
    kernel.attach_session(3, 13)
    offer(kernel, 1)
    offer(kernel, 2, session=OTHER)
    kernel.expire(10.0)
    assert names(offer(kernel, 3, now=10.0).statuses) == ["QUOTA"]
    assert names(offer(kernel, 3, session=OTHER, now=10.0).statuses) == ["QUOTA"]
    assert names(offer(kernel, 3, session=3, now=10.0).statuses) == ["GRANTED"]


def test_what_lost_sessions_leave_behind_is_their_users(make_kernel: Callable[..., Kernel]) -> None:
    kernel = make_kernel(slots=16, quarantine_fraction_per_uid_max=0.125)
    offer(kernel, 1, 2)
    kernel.session_lost(WORKER, 1.0)
    kernel.expire(10.0)
    kernel.open_session(3, uid=1001, row=13)
    kernel.attach_session(3, 13)
    assert names(offer(kernel, 3, session=3, now=10.0).statuses) == ["QUOTA"], "reconnecting is no way around"
    assert names(offer(kernel, 3, session=OTHER, now=10.0).statuses) == ["GRANTED"]
    kernel.session_dead(WORKER, 11.0)
    assert names(offer(kernel, 4, session=3, now=11.0).statuses) == ["GRANTED"]


def test_the_silence_of_one_key_over_zmq_is_not_held_against_another(make_kernel: Callable[..., Kernel]) -> None:
    kernel = make_kernel(slots=16, quarantine_fraction_per_uid_max=0.125)
    for session, key in ((3, "key A"), (4, "key B")):  # of both the server knows no uid
        kernel.open_session(session, uid=2**32 - 1, row=session, holder=key)
        kernel.attach_session(session, session)
    offer(kernel, 1, 2, session=3)
    offer(kernel, 7, session=4)
    kernel.session_lost(3, 1.0)
    kernel.expire(10.0)
    assert names(offer(kernel, 3, session=4, now=10.0).statuses) == ["GRANTED"]
    assert kernel.usage().quarantine_by_holder == {"key A": 2 * MIB, "key B": MIB}
    kernel.open_session(5, uid=2**32 - 1, row=5, holder="key A")
    kernel.attach_session(5, 5)
    assert names(offer(kernel, 4, session=5, now=10.0).statuses) == ["QUOTA"], "they are its user's"


def test_overdue_loads_count_against_the_lanes_only(make_kernel: Callable[..., Kernel]) -> None:
    kernel = make_kernel(slots=16, quarantine_fraction_per_uid_max=0.125)
    late = load(kernel, 1, 2, ttl_s=1.0).lease_id
    kernel.expire(1.0)
    assert used(kernel) == 2
    assert names(load(kernel, 3, now=1.0).statuses) == ["QUOTA"]
    assert names(offer(kernel, 3, now=1.0).statuses) == ["GRANTED"]
    kernel.abort_store(0, late, 2.0)
    assert names(load(kernel, 4, now=2.0).statuses) == ["GRANTED"]


def test_a_lease_that_moves_to_a_new_session_takes_its_blame_along(make_kernel: Callable[..., Kernel]) -> None:
    kernel = make_kernel(slots=16)
    lease = offer(kernel, 1).lease_id
    kernel.session_lost(WORKER, 1.0)
    kernel.expire(10.0)
    kernel.open_session(3, uid=1001, row=13)
    kernel.attach_session(3, 13)
    assert kernel.reclaim(WORKER, 3, [lease], 11.0) == [lease]
    assert kernel.usage().quarantine_by_session == {3: MIB}
    kernel.abort_store(3, lease, 11.0)
    assert kernel.usage().quarantine_by_holder == {}
