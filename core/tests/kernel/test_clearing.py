"""A clear detaches at once and frees in steps: what everybody else sees in between."""

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
    marks,
    names,
    offer,
    read,
    reasons,
    store,
    used,
)

from lmcache_core.kernel import Kernel, Reason, Settled
from lmcache_core.kernel.effects import Committed, Evicted, Removed
from lmcache_core.kernel.fence import STEP_OBJECTS
from lmcache_core.kernel.objects import NamespaceTable
from lmcache_core.kernel.states import State


def removed(kernel: Kernel) -> list[bytes]:
    return [item.key for effect in kernel.take_effects() if isinstance(effect, Removed) for item in effect.objects]


def test_nothing_of_it_is_found_at_once_and_each_step_frees_so_many(kernel: Kernel) -> None:
    store(kernel, 1, 2, 3, 4, 5)
    clearing = kernel.begin_clear(7.0, NS)
    assert found(kernel, 1, 2, 3, 4, 5, now=7.0) == [False] * 5
    assert names(read(kernel, 1, now=7.0).statuses) == ["MISS"]
    assert reasons(kernel, 1, 5, now=7.0) == [Reason.CLEARED] * 2, "though no step has noted it yet"
    assert used(kernel) == 5
    kernel.take_effects()
    for left, gone in ((3, 2), (1, 2), (0, 1)):
        assert not clearing.done
        assert kernel.free_cleared(8.0, 2) == gone
        assert used(kernel) == left
        assert len(removed(kernel)) == gone
    assert clearing.done
    assert clearing.cleared.objects == 5
    told = kernel.explain(WORKER, NS, LAYOUT, keys(1), 9.0)
    assert (told.reasons[0], told.at_s[0]) == (Reason.CLEARED, 7.0), "the time is that of the clear, not of its step"


def test_a_detached_table_is_never_walked_as_a_whole(
    make_kernel: Callable[..., Kernel], monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = make_kernel(slots=8)
    kernel.register_layout(9, 4096)
    for first in range(0, 2048, 512):
        lease = kernel.prepare_store(WORKER, NS, 9, keys(*range(first, first + 512)), 0.0).lease_id
        kernel.commit_store(WORKER, lease, 0.0)

    def walked(_: object) -> None:
        raise AssertionError("the clear looked at every object at once")

    monkeypatch.setattr(NamespaceTable, "__iter__", walked)
    monkeypatch.setattr(NamespaceTable, "__len__", walked)
    clearing = kernel.begin_clear(0.0)
    assert clearing.cleared.objects == 0
    steps = 0
    while not clearing.done:
        assert kernel.free_cleared(0.0) <= STEP_OBJECTS
        steps += 1
    assert steps >= 2048 // STEP_OBJECTS
    assert clearing.cleared.objects == 2048


def test_a_key_is_stored_anew_while_its_former_object_waits_and_that_leaves_first(kernel: Kernel) -> None:
    store(kernel, 1, 2)
    clearing = kernel.begin_clear(0.0, NS)
    kernel.take_effects()
    store(kernel, 1)
    kinds = [type(effect) for effect in kernel.take_effects() if isinstance(effect, Removed | Committed)]
    assert kinds == [Removed, Committed], "whoever keeps an index never has two of one key"
    while not clearing.done:
        kernel.free_cleared(0.0, 1)
    assert found(kernel, 1, 2) == [True, False]
    assert clearing.cleared.objects == 2
    assert used(kernel) == 1


def test_room_is_made_of_what_was_cleared_before_anything_is_evicted(make_kernel: Callable[..., Kernel]) -> None:
    kernel = make_kernel(slots=8)
    store(kernel, 20, 21)  # the coldest, and not of the namespace that is cleared
    for number in range(6):
        lease = kernel.prepare_store(WORKER, NS2, LAYOUT, keys(number), 0.0).lease_id
        kernel.commit_store(WORKER, lease, 0.0)
    clearing = kernel.begin_clear(0.0, NS2)
    kernel.take_effects()
    assert names(offer(kernel, 30, 31).statuses) == ["GRANTED"] * 2
    assert names(offer(kernel, 40, layout=BIG).statuses) == ["GRANTED"], "slabs of another class, too"
    assert not [effect for effect in kernel.take_effects() if isinstance(effect, Evicted)]
    assert found(kernel, 20, 21) == [True, True]
    while not clearing.done:
        kernel.free_cleared(0.0)
    assert clearing.cleared.objects == 6
    assert kernel.usage().counters["evictions"] == 0


def test_headroom_is_not_kept_by_evicting_while_a_clear_gives_room(make_kernel: Callable[..., Kernel]) -> None:
    kernel = make_kernel(slots=8, watermark=0.5, evict_ratio=0.25)
    store(kernel, 1, 2)
    lease = kernel.prepare_store(WORKER, NS2, LAYOUT, keys(*range(6)), 0.0).lease_id
    kernel.commit_store(WORKER, lease, 0.0)
    kernel.begin_clear(0.0, NS2)
    assert kernel.trim(0.0) == 0
    while kernel.clearing:
        kernel.free_cleared(0.0)
    assert kernel.trim(0.0) == 0
    assert found(kernel, 1, 2) == [True, True]


def test_clears_are_done_in_their_order_and_an_empty_one_waits_for_those_before_it(kernel: Kernel) -> None:
    store(kernel, 1, 2, 3)
    first, second = kernel.begin_clear(0.0, NS), kernel.begin_clear(0.0)
    store(kernel, 1)
    third = kernel.begin_clear(0.0, NS)
    done = []
    while kernel.clearing:
        kernel.free_cleared(0.0, 1)
        done.append((first.done, second.done, third.done))
    assert done == sorted(done), "no clear is done before an earlier one"
    assert [each.cleared.objects for each in (first, second, third)] == [3, 0, 1]
    assert found(kernel, 1, 2, 3) == [False] * 3
    assert used(kernel) == 0


def test_what_is_held_or_pinned_follows_with_its_last_hold(kernel: Kernel) -> None:
    offsets = store(kernel, 1, 2, 3)
    lease = read(kernel, 1).lease_id
    kernel.pin(WORKER, NS, keys(2), 100.0, 0.0)
    clearing = kernel.begin_clear(0.0, NS)
    kernel.take_effects()
    while not clearing.done:
        kernel.free_cleared(0.0, 1)
    after = {offset: state for offset, (state, _) in marks(kernel).items()}
    assert after == {offsets[0]: State.DOOMED, offsets[1]: State.FREE, offsets[2]: State.FREE}
    assert kernel.usage().pinned_bytes == 0
    assert set(kernel.finish_read(WORKER, lease, 0.0)) == {Settled.FINISHED}
    assert used(kernel) == 0


def test_a_temporary_object_goes_with_its_reader_though_its_step_has_not_come(kernel: Kernel) -> None:
    lease = kernel.prepare_store(0, NS, LAYOUT, keys(1), 0.0, loading=True).lease_id
    kernel.commit_store(0, lease, 0.0, retain=False)
    reading = read(kernel, 1).lease_id
    clearing = kernel.begin_clear(0.0)
    kernel.finish_read(WORKER, reading, 0.0)
    assert used(kernel) == 0
    kernel.free_cleared(0.0)
    assert (clearing.done, clearing.cleared.objects) == (True, 1)


def test_the_death_of_a_session_meanwhile_changes_nothing(kernel: Kernel) -> None:
    store(kernel, 1, 2, 3)
    read(kernel, 2, session=OTHER)
    clearing = kernel.begin_clear(0.0, session_id=OTHER)
    kernel.free_cleared(0.0, 1)
    kernel.session_dead(OTHER, 0.0)
    while not clearing.done:
        kernel.free_cleared(0.0, 1)
    assert used(kernel) == 0


def test_what_is_being_written_is_doomed_in_steps_and_nothing_of_it_appears_before(
    make_kernel: Callable[..., Kernel],
) -> None:
    kernel = make_kernel(slots=16)
    kernel.register_layout(9, 4096)
    leases = [
        kernel.prepare_store(WORKER, NS, 9, keys(*range(first, first + 512)), 0.0).lease_id
        for first in range(0, 2048, 512)
    ]
    kernel.take_touched()
    clearing = kernel.begin_clear(1.0)
    assert kernel.take_touched() == 0, "the clear looks at none of it at once"
    assert reasons(kernel, 0, 2047, now=1.0) == [Reason.CLEARED] * 2
    assert names(offer(kernel, 0, session=OTHER, now=1.0).statuses) == ["GRANTED"], "the keys are free at once"
    kernel.take_effects()
    assert set(kernel.commit_store(WORKER, leases[0], 1.0)) == {Settled.CLEARED}
    assert not [effect for effect in kernel.take_effects() if isinstance(effect, Committed)]
    assert set(kernel.abort_store(WORKER, leases[1], 1.0)) == {Settled.ABORTED}
    assert used(kernel) == 1 + 4, "what was answered for is free, the rest waits for its writer"
    steps = 0
    while not clearing.done:
        assert kernel.free_cleared(1.0) <= STEP_OBJECTS
        steps += 1
    assert steps >= 1024 // STEP_OBJECTS
    assert (clearing.cleared.objects, clearing.cleared.doomed) == (0, 2048)
    assert kernel.usage().objects_by_state["quarantined"] == 1024
    states = {state for state, row in marks(kernel).values() if row is None}
    assert states == {State.QUARANTINED}, "the rows of their writers stay as they are noted"
    assert set(kernel.commit_store(WORKER, leases[2], 1.0)) == {Settled.CLEARED}
    kernel.session_dead(WORKER, 1.0)
    while kernel.working:
        kernel.step(1.0)
    assert used(kernel) == 1


def test_a_writer_that_expires_before_a_clear_has_come_to_it_waits_in_quarantine_once(kernel: Kernel) -> None:
    lease = offer(kernel, 1, 2).lease_id
    clearing = kernel.begin_clear(1.0)
    kernel.expire(10.0)
    assert kernel.usage().objects_by_state["quarantined"] == 2
    assert kernel.usage().quarantine_by_session == {WORKER: 2 * MIB}
    kernel.free_cleared(10.0)
    assert (clearing.done, clearing.cleared.doomed) == (True, 2)
    kernel.abort_store(WORKER, lease, 10.0)
    assert used(kernel) == 0
    assert kernel.usage().quarantine_by_session == {}


# --- the memory of lost keys -----------------------------------------------------------------------------------


def test_the_loss_of_a_key_has_its_time_and_who_brought_it_about(make_kernel: Callable[..., Kernel]) -> None:
    kernel = make_kernel(slots=2)
    store(kernel, 1, now=1.0)
    store(kernel, 2, now=2.0)
    offer(kernel, 3, session=OTHER, now=3.0)
    kernel.clear(4.0)
    told = kernel.explain(WORKER, NS, LAYOUT, keys(1, 2, 3, 4), 5.0)
    assert list(told.reasons) == [Reason.EVICTED, Reason.CLEARED, Reason.CLEARED, Reason.NEVER_STORED]
    assert list(told.at_s) == [3.0, 4.0, 4.0, 0.0]
    assert list(told.session_ids) == [OTHER, 0, 0, 0]
    assert told.since_s is None, "nothing is forgotten yet"


def test_the_memory_of_lost_keys_is_bounded_and_says_since_when_it_is_whole(make_kernel: Callable[..., Kernel]) -> None:
    kernel = make_kernel(slots=2, lost_keys_remembered=100)
    for number in range(1000):
        store(kernel, number, now=float(number))
        assert len(kernel.residents.reasons) <= 100
    told = kernel.explain(WORKER, NS, LAYOUT, keys(*range(1000)), 1000.0)
    assert told.since_s is not None
    lost = {number: at_s for number, at_s in enumerate(told.at_s) if at_s}
    assert lost[997] == 999.0
    for number in range(998):  # evicted two steps later
        assert (number in lost) == (number + 2 > told.since_s)
    assert len(lost) <= 100
