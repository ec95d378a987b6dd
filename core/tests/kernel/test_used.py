"""Reads that no lease covered, and checksums: what the server is told counts as if it had seen it."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from kernel_words import LAYOUT, NS, NS2, OTHER, WORKER, found, keys, load, offer, read, reasons, store

from lmcache_core.errors import UsageError
from lmcache_core.kernel import Kernel, Reason
from lmcache_core.kernel.effects import Committed, Evicted, Read, Removed
from lmcache_core.kernel.objects import Incarnation
from lmcache_core.kernel.sessions import SERVER_SESSION
from lmcache_core.policies.lru import LruEviction


def say_used(kernel: Kernel, *numbers: int, namespace: int = NS) -> int:
    """As the server says it: the end of a prompt first."""
    return kernel.used([(namespace, key) for key in keys(*numbers)][::-1], 0.0)


def victims(kernel: Kernel) -> list[bytes]:
    return [item.key for e in kernel.take_effects() if isinstance(e, Evicted) for item in e.objects]


def committed(kernel: Kernel) -> list[Incarnation]:
    return [item for e in kernel.take_effects() if isinstance(e, Committed) for item in e.objects]


# --- uses ---------------------------------------------------------------------------------------------------


def test_a_read_without_a_lease_counts_as_one_with_it(make_kernel: Callable[..., Kernel]) -> None:
    choose = random.Random(4)
    for _ in range(50):
        leased, marked = make_kernel(slots=6), make_kernel(slots=6)
        for kernel in (leased, marked):
            store(kernel, 1, 2, 3, 4, 5, 6)
        for _ in range(choose.randrange(4)):
            prompt = choose.sample(range(1, 7), choose.randrange(1, 7))
            leased.finish_read(WORKER, read(leased, *prompt).lease_id, 0.0)
            assert say_used(marked, *prompt) == len(prompt)
        order = []
        for kernel in (leased, marked):
            kernel.take_effects()
            for number in range(10, 16):
                store(kernel, number)
            order.append(victims(kernel))
        assert order[0] == order[1]


def test_a_use_of_what_is_gone_or_elsewhere_changes_nothing(kernel: Kernel) -> None:
    store(kernel, 1)
    offer(kernel, 2)
    kernel.take_effects()
    assert say_used(kernel, 2, 3) == 0
    assert say_used(kernel, 1, namespace=NS2) == 0
    assert kernel.take_effects() == []


def test_a_use_is_told_to_who_stores_what_is_read_again(kernel: Kernel) -> None:
    store(kernel, 1, 2)
    kernel.take_effects()
    say_used(kernel, 1)
    assert [item.key for e in kernel.take_effects() if isinstance(e, Read) for item in e.objects] == keys(1)


def test_what_was_loaded_for_one_reader_goes_with_a_reader_that_had_no_lease(kernel: Kernel) -> None:
    lease = load(kernel, 1, 2).lease_id
    kernel.commit_store(0, lease, 0.0, retain=False)
    held = read(kernel, 2, session=OTHER)
    kernel.take_effects()
    assert say_used(kernel, 1, 1, 2) == 3
    assert found(kernel, 1, 2) == [False, True], "somebody reads the second one"
    assert reasons(kernel, 1) == [Reason.DROPPED]
    assert [e.reason for e in kernel.take_effects() if isinstance(e, Removed)] == [Reason.DROPPED]
    kernel.finish_read(OTHER, held.lease_id, 0.0)
    assert found(kernel, 2) == [False]


class _Listening(LruEviction):
    def __init__(self) -> None:
        super().__init__()
        self.heard: list[bytes] = []

    def access(self, entries: object) -> None:
        self.heard += [entry.key for entry in entries]  # type: ignore[attr-defined]
        super().access(entries)  # type: ignore[arg-type]


def test_the_policy_hears_of_uses_in_the_order_in_which_they_are_told(make_kernel: Callable[..., Kernel]) -> None:
    policy = _Listening()
    kernel = make_kernel(policy=policy)
    store(kernel, 1, 2, 3)
    kernel.used([(NS, key) for key in keys(3, 1, 2)], 0.0)
    assert policy.heard == keys(3, 1, 2)


def test_room_for_new_objects_is_known_before_anything_is_evicted(make_kernel: Callable[..., Kernel]) -> None:
    kernel = make_kernel(slots=4)
    assert not kernel.may_evict(LAYOUT, 4)
    assert kernel.may_evict(LAYOUT, 5)
    store(kernel, 1, 2, 3)
    assert not kernel.may_evict(LAYOUT, 1)
    assert kernel.may_evict(LAYOUT, 2)
    assert not kernel.may_evict(99, 1), "a layout that nobody registered has its own error"


# --- checksums ----------------------------------------------------------------------------------------------


def test_checksums_stay_with_their_objects(kernel: Kernel) -> None:
    lease = offer(kernel, 1, 2, 3).lease_id
    kernel.commit_store(WORKER, lease, 0.0, checksums=[11, None, 0])
    assert [item.checksum for item in committed(kernel)] == [11, None, None]


def test_checksums_belong_to_positions_not_to_what_is_left_of_them(kernel: Kernel) -> None:
    store(kernel, 2)
    lease = offer(kernel, 1, 2, 3, 4).lease_id  # 2 is there already: its position holds nothing
    kernel.abort_store(WORKER, lease, 0.0, [2])
    kernel.commit_store(WORKER, lease, 0.0, [3, 1, 2, 0], checksums=[44, 22, 33, 11])
    assert {item.key: item.checksum for item in committed(kernel) if item.checksum} == dict(
        zip(keys(1, 4), (11, 44), strict=True)
    )


def test_a_commit_without_checksums_knows_none(kernel: Kernel) -> None:
    store(kernel, 1)
    assert [item.checksum for item in committed(kernel)] == [None]


@pytest.mark.parametrize("positions", [None, [0], range(2)])
def test_as_many_checksums_as_positions_or_nothing_happens(kernel: Kernel, positions: list[int] | None) -> None:
    lease = offer(kernel, 1, 2).lease_id
    count = 2 if positions is None else len(positions)
    with pytest.raises(UsageError, match="give one for each position"):
        kernel.commit_store(WORKER, lease, 0.0, positions, checksums=[1] * (count + 1))
    assert found(kernel, 1, 2) == [False, False]
    kernel.commit_store(WORKER, lease, 0.0)
    assert found(kernel, 1, 2) == [True, True]


# --- what is at the head of a queue -------------------------------------------------------------------------


def test_what_is_gone_ends_at_the_first_incarnation_that_is_ready_and_looks_no_further(kernel: Kernel) -> None:
    store(kernel, 1, 2)
    (first,) = {item.generation for item in kernel.take_effects()[-1].objects}
    offer(kernel, 3)
    asked: list[int] = []

    def ask(*numbers: int, generation: int = first) -> int:
        asked.clear()
        return kernel.leading_gone(NS, ((asked.append(number) or keys(number)[0], generation) for number in numbers))

    assert ask(3, 4, 1, 2) == 2
    assert asked == [3, 4, 1], "a key that is being written is not there, and 2 was not asked for"
    assert ask(1) == 0
    assert ask(4, 5) == 2
    assert ask(1, 2, generation=first + 1) == 2, "these keys are there as other incarnations"
    assert kernel.leading_gone(NS2, [(keys(1)[0], first)]) == 1
    assert kernel.leading_gone(NS, []) == 0


def test_the_server_holds_and_drops_the_incarnation_that_it_names_and_never_a_successor(kernel: Kernel) -> None:
    store(kernel, 1)
    (old,) = kernel.take_effects()[-1].objects
    kernel.drop(NS, keys(1), 0.0, Reason.DROPPED)
    store(kernel, 1)
    (new,) = kernel.take_effects()[-1].objects
    assert new.generation > old.generation
    kernel.drop_incarnations(NS, [(old.key, old.generation)], 0.0, Reason.DROPPED)
    assert found(kernel, 1) == [True]
    lease, held = kernel.hold_incarnations(NS, [(old.key, old.generation), (new.key, new.generation)], 0.0)
    assert held == [None, new]
    assert (old.holds, new.holds) == (0, 1)
    kernel.finish_read(SERVER_SESSION, lease, 0.0)
    kernel.drop_incarnations(NS, [(new.key, new.generation)], 0.0, Reason.DROPPED)
    assert found(kernel, 1) == [False]
