"""Faults that peers of this system have had, each as a claim that this kernel does not."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from kernel_words import LAYOUT, MIB, NS, OTHER, WORKER, found, keys, load, names, offer, read, reasons, store, used

from lmcache_core.errors import LeaseExpiredError
from lmcache_core.kernel import Grant, Kernel, Reason, Settled
from lmcache_core.kernel.contracts import Entry
from lmcache_core.kernel.effects import PolicyFailed, PolicyNoted
from lmcache_core.policies.lru import LruEviction


@pytest.mark.parametrize("end", ["session_dead", "session_lost", "silence"])
def test_a_writer_that_dies_or_is_silent_before_commit_publishes_nothing(end: str, kernel: Kernel) -> None:
    offer(kernel, 1, 2)
    if end != "silence":
        getattr(kernel, end)(WORKER, 1.0)
    kernel.expire(100.0)
    assert found(kernel, 1, 2, now=100.0) == [False, False]
    reason = Reason.WRITER_DIED if end == "session_dead" else Reason.EXPIRED
    assert reasons(kernel, 1, now=100.0) == [reason]
    assert used(kernel) == (0 if end == "session_dead" else 2)


def test_an_expired_writers_memory_is_not_given_to_a_second_one(make_kernel: Callable[..., Kernel]) -> None:
    kernel = make_kernel(slots=2)
    first = offer(kernel, 1)
    second = offer(kernel, 1, 2, session=OTHER, now=10.0)
    assert names(second.statuses) == ["GRANTED", "FULL"]
    assert second.offsets[0] != first.offsets[0]
    with pytest.raises(LeaseExpiredError):
        kernel.commit_store(WORKER, first.lease_id, 10.0)
    assert found(kernel, 1, now=10.0) == [False], "the late commit publishes nobody's half-written bytes"
    assert list(kernel.commit_store(OTHER, second.lease_id, 10.0, [0])) == [Settled.COMMITTED]


def test_a_late_finish_does_not_release_another_readers_hold(make_kernel: Callable[..., Kernel]) -> None:
    kernel = make_kernel(slots=1)
    store(kernel, 1)
    first, second = read(kernel, 1).lease_id, read(kernel, 1, session=OTHER).lease_id
    for _ in range(3):
        kernel.finish_read(WORKER, first, 20.0)
    with pytest.raises(LeaseExpiredError):
        kernel.finish_read(WORKER, second, 20.0)
    assert names(offer(kernel, 2, now=20.0).statuses) == ["FULL"]
    third = read(kernel, 1, now=20.0).lease_id
    kernel.finish_read(OTHER, second, 20.0)
    assert names(offer(kernel, 2, now=20.0).statuses) == ["FULL"], "nor does a new hold forget the others"
    kernel.finish_read(WORKER, third, 20.0)
    assert names(offer(kernel, 2, now=20.0).statuses) == ["GRANTED"]


def test_a_load_past_its_deadline_writes_into_nobodys_memory_and_is_no_hit(make_kernel: Callable[..., Kernel]) -> None:
    kernel = make_kernel(slots=1)
    late = load(kernel, 1, ttl_s=1.0)
    assert names(offer(kernel, 2, now=1.0).statuses) == ["FULL"], "its slot waits until the lane has answered"
    with pytest.raises(LeaseExpiredError):
        kernel.commit_store(0, late.lease_id, 2.0)
    assert found(kernel, 1, now=2.0) == [False]
    assert names(offer(kernel, 2, now=2.0).statuses) == ["GRANTED"]


def test_clear_does_not_free_memory_under_a_reader_or_a_writer(make_kernel: Callable[..., Kernel]) -> None:
    kernel = make_kernel(slots=2)
    store(kernel, 1)
    read(kernel, 1)
    offer(kernel, 2)
    kernel.clear(0.0)
    assert names(offer(kernel, 3, session=OTHER).statuses) == ["FULL"]


def test_out_of_memory_is_partial_and_looks_like_nothing_else(make_kernel: Callable[..., Kernel]) -> None:
    kernel = make_kernel(slots=16)
    grants = offer(kernel, *range(17))
    assert names(grants.statuses) == ["GRANTED"] * 16 + ["FULL"]
    kernel.commit_store(WORKER, grants.lease_id, 0.0)
    again = offer(kernel, 0, 16)
    assert names(again.statuses) == ["EXISTS", "GRANTED"]


def test_sustained_writes_over_capacity_keep_the_pool_full_of_the_newest(make_kernel: Callable[..., Kernel]) -> None:
    kernel = make_kernel(slots=16)
    for number in range(160):
        store(kernel, number)
    assert found(kernel, *range(144, 160)) == [True] * 16
    assert used(kernel) == 16


def test_eviction_counts_bytes_not_keys(make_kernel: Callable[..., Kernel]) -> None:
    kernel = make_kernel(slots=4)
    kernel.register_layout(5, MIB // 4)
    store(kernel, *range(8), layout=5)
    store(kernel, 20, 21)
    store(kernel, 30, 31, 32)
    assert kernel.usage().used_bytes == 4 * MIB


def test_one_exception_of_a_policy_does_not_end_eviction(make_kernel: Callable[..., Kernel]) -> None:
    class Stumbling(LruEviction):
        stumbles = False

        def victims(self, nbytes: int) -> list[Entry]:
            if self.stumbles:
                self.stumbles = False
                raise ZeroDivisionError
            return super().victims(nbytes)

    policy = Stumbling()
    kernel = make_kernel(slots=2, policy=policy)
    store(kernel, 1, 2)
    policy.stumbles = True
    kernel.take_effects()
    assert names(offer(kernel, 1, 3).statuses) == ["EXISTS", "GRANTED"]
    assert [effect.method for effect in kernel.take_effects() if isinstance(effect, PolicyFailed)] == ["victims"]
    assert kernel.usage().counters["policy_faults"] == 1
    assert "ZeroDivisionError" in kernel.usage().policy_error
    assert found(kernel, 1, 3) == [True, False]
    assert names(kernel.prepare_store(OTHER, NS, LAYOUT, keys(4), 0.0).statuses) == ["GRANTED"]


class Panic(BaseException):
    """As pyo3's is: no `Exception`."""


def test_what_a_policy_notes_is_an_effect(make_kernel: Callable[..., Kernel]) -> None:
    class Noting(LruEviction):
        def victims(self, nbytes: int) -> list[Entry]:
            self.note("another order from now on")
            return super().victims(nbytes)

    policy = Noting()
    kernel = make_kernel(slots=2, policy=policy)
    policy.victims(1)
    assert PolicyNoted("another order from now on") in kernel.take_effects()


@pytest.mark.parametrize("error", [KeyError, Panic])
@pytest.mark.parametrize("method", ["insert", "access", "remove", "held", "released", "victims"])
def test_no_method_of_a_policy_can_end_a_call_of_a_worker(
    make_kernel: Callable[..., Kernel], method: str, error: type[BaseException]
) -> None:
    policy = LruEviction()
    kernel = make_kernel(slots=2, policy=policy)

    def fails(*_: object) -> list[Entry]:
        raise error(method)

    setattr(policy, method, fails)
    store(kernel, 1, 2)
    lease = read(kernel, 1, 2).lease_id
    assert set(kernel.finish_read(WORKER, lease, 0.0)) == {Settled.FINISHED}
    assert found(kernel, 1, 3) == [True, False]
    statuses = names(offer(kernel, 3).statuses)
    assert statuses in (["FULL"], ["GRANTED"])
    assert f"{method}: {error.__name__}" in kernel.usage().policy_error
    kernel.clear(0.0)
    kernel.end_session(WORKER, 0.0)
    assert used(kernel) == 0, "what a policy forgot can still be cleared"


def test_a_policy_that_names_what_is_no_object_costs_room_only(make_kernel: Callable[..., Kernel]) -> None:
    class Nonsense(LruEviction):
        def victims(self, nbytes: int) -> list[Entry]:
            return [None, "a key", 7]  # type: ignore[list-item]

    kernel = make_kernel(slots=1, policy=Nonsense())
    store(kernel, 1)
    assert names(offer(kernel, 2).statuses) == ["FULL"]
    assert found(kernel, 1) == [True]


def test_a_policy_that_names_the_wrong_victims_costs_room_but_frees_nobodys_memory(
    make_kernel: Callable[..., Kernel],
) -> None:
    class Wrong(LruEviction):
        def __init__(self) -> None:
            super().__init__()
            self.all: list[Entry] = []

        def insert(self, entries: Sequence[Entry]) -> None:
            super().insert(entries)
            self.all += entries

        def victims(self, nbytes: int) -> list[Entry]:
            return self.all + self.all

    kernel = make_kernel(slots=2, policy=Wrong())
    store(kernel, 1, 2)
    read(kernel, 1)
    assert names(offer(kernel, 3, 4).statuses) == ["GRANTED", "FULL"]
    assert found(kernel, 1, 2) == [True, False]


def test_no_hold_outlives_lookup_and_end_of_session_or_two_reads_at_once(make_kernel: Callable[..., Kernel]) -> None:
    kernel = make_kernel(slots=1)
    store(kernel, 1)
    promise = kernel.lookup(WORKER, NS, keys(1), 0.0, hold=True).promise_id
    first = kernel.prepare_retrieve(WORKER, NS, keys(1), 0.0, promise_id=promise)
    second = kernel.prepare_retrieve(OTHER, NS, keys(1), 0.0, promise_id=promise)
    assert first.statuses[0] == second.statuses[0] == Grant.GRANTED
    kernel.finish_read(WORKER, first.lease_id, 0.0)
    kernel.end_session(OTHER, 0.0)
    assert set(kernel.usage().leases_by_kind.values()) == {0}
    assert names(offer(kernel, 2).statuses) == ["GRANTED"]
