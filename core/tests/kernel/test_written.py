"""What one holder has open to write is bounded, so that the others can store."""

from __future__ import annotations

from collections.abc import Callable

from kernel_words import OTHER, WORKER, names, offer

from lmcache_core.kernel.kernel import Kernel

SLOTS = 16


def test_others_can_store_while_one_holder_writes_as_much_as_it_may(make_kernel: Callable[..., Kernel]) -> None:
    kernel = make_kernel(slots=SLOTS, written_fraction_max=0.875)
    mine = offer(kernel, *range(SLOTS))
    assert names(mine.statuses) == ["GRANTED"] * 14 + ["QUOTA"] * 2
    assert names(offer(kernel, 100).statuses) == ["QUOTA"]
    assert names(offer(kernel, 200, 201, session=OTHER).statuses) == ["GRANTED"] * 2


def test_what_is_settled_is_no_longer_open(make_kernel: Callable[..., Kernel]) -> None:
    kernel = make_kernel(slots=SLOTS, written_fraction_max=0.875)
    lease = offer(kernel, *range(14)).lease_id
    kernel.commit_store(WORKER, lease, 0.0, range(7))
    assert names(offer(kernel, *range(100, 109)).statuses) == ["GRANTED"] * 7 + ["QUOTA"] * 2
    kernel.abort_store(WORKER, lease, 0.0)
    assert {each.written_bytes for each in kernel.usage().holders.values()} == {
        7 * kernel.usage().pool_bytes // SLOTS,
        0,
    }


def test_who_is_alone_may_write_all_and_keeps_it_no_longer_than_a_term_once_others_come(
    make_kernel: Callable[..., Kernel],
) -> None:
    kernel = make_kernel(slots=SLOTS, written_fraction_max=0.875)
    kernel.session_dead(OTHER, 0.0)
    mine = offer(kernel, *range(SLOTS))
    assert names(mine.statuses) == ["GRANTED"] * SLOTS
    kernel.open_session(7, 7)
    kernel.attach_session(7, 0)
    kernel.renew_lease(WORKER, mine.lease_id, mine.deadline - 1)
    assert names(offer(kernel, 300, session=7, now=mine.deadline).statuses) == ["FULL"], "its slots are in quarantine"
    assert kernel.lease_status(WORKER, mine.lease_id, mine.deadline).expired
