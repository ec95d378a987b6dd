"""What one session, and one holder, keeps from eviction is counted once and capped, and only it hears of its cap."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from kernel_words import LAYOUT, MIB, NS, OTHER, WORKER, keys, names, offer, read, store

from lmcache_core.errors import LimitError
from lmcache_core.kernel import Grant, Kernel, Settled
from lmcache_core.kernel.answers import KernelLookup
from lmcache_core.kernel.leases import LEASE_BYTES, POSITION_BYTES

THIRD = 3


@pytest.fixture
def kernel(make_kernel: Callable[..., Kernel]) -> Kernel:
    """Eight slots: a session may have two promised and two pinned, a holder four promised and three pinned."""
    return make_kernel(
        promised_fraction_per_session_max=0.25,
        promised_fraction_max=0.5,
        pinned_fraction_per_session_max=0.25,
        pinned_fraction_per_holder_max=0.375,
        pinned_fraction_max=1.0,
    )


def promise(kernel: Kernel, *numbers: int, session: int = WORKER, now: float = 0.0) -> KernelLookup:
    return kernel.lookup(session, NS, keys(*numbers), now, hold=True)


def join(kernel: Kernel, session: int, uid: int) -> None:
    kernel.open_session(session, uid, session)
    kernel.attach_session(session, session)


def test_the_promises_of_one_session_leave_room_for_the_stores_of_others(kernel: Kernel) -> None:
    store(kernel, *range(8))
    for number in range(8):
        assert names(promise(kernel, number).statuses) == ["GRANTED"], "a hit is a hit, promised or not"
    assert kernel.usage().held_by_session[WORKER].promised_bytes == 2 * MIB
    grants = offer(kernel, *range(10, 18), session=OTHER)
    assert names(grants.statuses) == ["GRANTED"] * 6 + ["FULL"] * 2


def test_over_its_cap_a_lookup_promises_the_first_of_what_it_finds(kernel: Kernel) -> None:
    store(kernel, *range(4))
    answer = promise(kernel, 0, 1, 2, 3)
    assert names(answer.statuses) == ["GRANTED"] * 4
    assert answer.promise_id
    assert kernel.usage().held_by_session[WORKER].promised_bytes == 2 * MIB
    grants = offer(kernel, *range(10, 18), session=OTHER)
    assert names(grants.statuses) == ["GRANTED"] * 6 + ["FULL"] * 2
    assert names(kernel.lookup(OTHER, NS, keys(0, 1, 2, 3), 0.0).statuses) == ["GRANTED"] * 2 + ["MISS"] * 2


def test_an_object_counts_once_however_many_promises_it_has(kernel: Kernel) -> None:
    store(kernel, 1, 2, 3)
    promises = [promise(kernel, 1).promise_id for _ in range(5)]
    assert all(promises)
    usage = kernel.usage()
    assert usage.held_by_session[WORKER].promised_bytes == MIB
    assert usage.holders[f"uid {1000 + WORKER}"].promised_bytes == MIB
    kernel.free_lookup_locks(WORKER, promises[:4], 0.0)
    assert kernel.usage().held_by_session[WORKER].promised_bytes == MIB
    kernel.free_lookup_locks(WORKER, promises[4:], 0.0)
    assert kernel.usage().held_by_session == {}


def test_sessions_of_one_holder_count_an_object_once_for_it(kernel: Kernel) -> None:
    join(kernel, THIRD, 1000 + WORKER)
    store(kernel, 1, 2)
    first = promise(kernel, 1).promise_id
    promise(kernel, 1, 2, session=THIRD)
    holder = f"uid {1000 + WORKER}"
    assert kernel.usage().holders[holder].promised_bytes == 2 * MIB
    assert kernel.usage().holders[holder].sessions == 2
    kernel.free_lookup_locks(WORKER, [first], 0.0)
    assert kernel.usage().holders[holder].promised_bytes == 2 * MIB


def test_a_holder_is_capped_however_many_sessions_it_opens(kernel: Kernel) -> None:
    store(kernel, *range(8))
    for session in range(THIRD, THIRD + 4):
        join(kernel, session, 1000 + WORKER)
        promise(kernel, *range(8), session=session)
        promise(kernel, *range(4, 8), session=session)
    assert kernel.usage().holders[f"uid {1000 + WORKER}"].promised_bytes <= 4 * MIB
    promise(kernel, 7, session=OTHER)
    assert kernel.usage().held_by_session[OTHER].promised_bytes == MIB, "another holder has its own cap"


def test_redeeming_a_promise_moves_what_it_keeps(kernel: Kernel) -> None:
    store(kernel, 1, 2)
    promised = promise(kernel, 1, 2).promise_id
    lease = kernel.prepare_retrieve(OTHER, NS, keys(1), 0.0, promise_id=promised)
    held = kernel.usage().held_by_session
    assert (held[WORKER].promised_bytes, held[OTHER].read_bytes) == (MIB, MIB)
    kernel.finish_read(OTHER, lease.lease_id, 0.0)
    assert OTHER not in kernel.usage().held_by_session


def test_a_promise_counts_for_the_session_that_takes_it_over(kernel: Kernel) -> None:
    join(kernel, THIRD, 1000 + WORKER)
    store(kernel, 1, 2, 3)
    promise(kernel, 1, 2)
    kernel.keep_promises(WORKER, THIRD, 0.0)
    assert kernel.usage().held_by_session[THIRD].promised_bytes == 2 * MIB
    kernel.expire(10.0)
    assert kernel.usage().held_by_session == {}


def test_only_who_is_over_its_cap_of_pins_hears_quota_also_once_it_has_closed(kernel: Kernel) -> None:
    store(kernel, *range(8))
    assert names(kernel.pin(WORKER, NS, keys(0, 1, 2), 9.0, 0.0)) == ["GRANTED", "GRANTED", "QUOTA"]
    kernel.session_closed(WORKER, 0.0)
    assert kernel.usage().holders[f"uid {1000 + WORKER}"].pinned_bytes == 2 * MIB
    join(kernel, THIRD, 1000 + WORKER)
    assert names(kernel.pin(THIRD, NS, keys(3, 4), 9.0, 0.0)) == ["GRANTED", "QUOTA"]
    assert names(kernel.pin(OTHER, NS, keys(5, 6), 9.0, 0.0)) == ["GRANTED", "GRANTED"]
    kernel.expire(9.0)
    kernel.session_closed(THIRD, 9.0)
    join(kernel, 77, 7)
    assert f"uid {1000 + WORKER}" not in kernel.usage().holders


def test_a_reader_over_its_cap_is_granted_the_first_of_what_it_asks_for(make_kernel: Callable[..., Kernel]) -> None:
    kernel = make_kernel(read_fraction_per_session_max=0.25)
    store(kernel, *range(4))
    lease = kernel.prepare_retrieve(WORKER, NS, keys(0, 9, 1, 2), 0.0)
    assert names(lease.statuses) == ["GRANTED", "MISS", "GRANTED", "QUOTA"]
    assert lease.offsets[3] == 0
    again = kernel.prepare_retrieve(WORKER, NS, keys(0, 1, 2), 0.0)
    assert names(again.statuses) == ["GRANTED", "GRANTED", "QUOTA"], "what it holds already costs nothing"
    assert names(kernel.prepare_retrieve(OTHER, NS, keys(2, 3), 0.0).statuses) == ["GRANTED", "GRANTED"]
    for each in (lease, again):
        kernel.finish_read(WORKER, each.lease_id, 0.0)
    assert Grant.QUOTA not in kernel.prepare_retrieve(WORKER, NS, keys(2, 3), 0.0).statuses


def test_what_dies_with_a_session_is_counted_no_more(kernel: Kernel) -> None:
    store(kernel, 1, 2, layout=LAYOUT)
    promise(kernel, 1)
    kernel.prepare_retrieve(WORKER, NS, keys(1, 2), 0.0)
    kernel.session_dead(WORKER, 0.0)
    assert f"uid {1000 + WORKER}" not in kernel.usage().holders


def test_what_one_session_of_a_holder_reads_costs_another_of_it_nothing_of_their_common_share(
    make_kernel: Callable[..., Kernel],
) -> None:
    kernel = make_kernel(read_fraction_max=0.5, read_fraction_per_session_max=0.5)
    store(kernel, *range(8))
    join(kernel, THIRD, 1000 + WORKER)
    assert names(read(kernel, 0, 1, 2).statuses) == ["GRANTED"] * 3
    again = read(kernel, 0, 1, 2, 3, 4, session=THIRD)
    assert names(again.statuses) == ["GRANTED"] * 4 + ["QUOTA"]
    assert kernel.usage().holders[f"uid {1000 + WORKER}"].read_bytes == 4 * MIB


def test_a_key_that_stands_twice_in_a_batch_costs_a_session_once(make_kernel: Callable[..., Kernel]) -> None:
    kernel = make_kernel(read_fraction_per_session_max=0.25)
    store(kernel, *range(8))
    assert names(read(kernel, 0, 0, 1, 2).statuses) == ["GRANTED"] * 3 + ["QUOTA"]


def test_what_a_reader_may_not_hold_yet_stays_promised_until_it_asks_again(make_kernel: Callable[..., Kernel]) -> None:
    kernel = make_kernel(read_fraction_per_session_max=0.25)
    store(kernel, *range(8))
    promised = promise(kernel, 0, 1, 2, 3, session=OTHER).promise_id
    lease = kernel.prepare_retrieve(WORKER, NS, keys(0, 1, 2, 3), 0.0, promise_id=promised)
    assert names(lease.statuses) == ["GRANTED"] * 2 + ["QUOTA"] * 2
    assert names(offer(kernel, *range(10, 16), session=OTHER).statuses) == ["GRANTED"] * 4 + ["FULL"] * 2
    kernel.finish_read(WORKER, lease.lease_id, 0.0)
    again = kernel.prepare_retrieve(WORKER, NS, keys(2, 3), 0.0, promise_id=promised)
    assert names(again.statuses) == ["GRANTED"] * 2
    assert OTHER not in kernel.usage().held_by_session, "all of it was redeemed"


# --- the server's own memory ----------------------------------------------------------------------------------


def test_positions_that_grant_nothing_cost_nothing(kernel: Kernel) -> None:
    store(kernel, 1)
    lease = read(kernel, 1).lease_id
    account = kernel.leases.by_id[lease].session.memory
    before = account.nbytes
    for first in range(10, 1_000, 10):
        kernel.prepare_retrieve(WORKER, NS, keys(*range(first, first + 10)), 0.0, lease_id=lease)
    assert account.nbytes == before
    assert list(kernel.finish_read(WORKER, lease, 0.0, [0, 990])) == [Settled.FINISHED, Settled.NOT_HELD]


def test_a_grant_behind_them_is_held_at_its_position_and_charges_for_them(kernel: Kernel) -> None:
    store(kernel, 1, 2)
    lease = read(kernel, 1).lease_id
    account = kernel.leases.by_id[lease].session.memory
    before = account.nbytes
    kernel.prepare_retrieve(WORKER, NS, keys(*range(10, 110)), 0.0, lease_id=lease)
    kernel.prepare_retrieve(WORKER, NS, keys(2), 0.0, lease_id=lease)
    assert account.nbytes == before + 101 * POSITION_BYTES
    assert list(kernel.finish_read(WORKER, lease, 0.0, range(100, 102))) == [Settled.NOT_HELD, Settled.FINISHED]
    assert list(kernel.finish_read(WORKER, lease, 0.0, None)).count(Settled.FINISHED) == 2
    assert account.nbytes == 0


def test_a_session_whose_leases_fill_its_memory_is_refused_and_another_holder_is_not(kernel: Kernel) -> None:
    store(kernel, 1)
    lease = read(kernel, 1).lease_id
    account = kernel.leases.by_id[lease].session.memory
    account.nbytes_max = account.nbytes + LEASE_BYTES
    with pytest.raises(LimitError, match=r"the leases of one connection of uid \d+ fill"):
        kernel.prepare_retrieve(WORKER, NS, keys(1), 0.0)
    with pytest.raises(LimitError, match="commit, abort or finish some"):
        offer(kernel, 2)
    assert names(offer(kernel, 2, session=OTHER).statuses) == ["GRANTED"]
    kernel.finish_read(WORKER, lease, 0.0, None)
    assert names(offer(kernel, 3).statuses) == ["GRANTED"]
