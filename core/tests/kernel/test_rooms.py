"""A grant in whose way many objects stand is prepared in steps, and what comes between two of them is in order."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import pytest
from kernel_words import BIG, LAYOUT, MIB, NS, NS2, OTHER, WORKER, found, keys, names, offer, read, store

from lmcache_core.kernel import Grants, Kernel
from lmcache_core.kernel.contracts import Entry
from lmcache_core.kernel.effects import Evicted
from lmcache_core.kernel.eviction import LOOK_OBJECTS_MAX
from lmcache_core.kernel.fence import STEP_OBJECTS
from lmcache_core.kernel.objects import Incarnation
from lmcache_core.kernel.rooms import Preparation
from lmcache_core.kernel.sessions import SERVER_SESSION
from lmcache_core.kernel.writing import Writing
from lmcache_core.limits import CALL_OBJECTS_MAX, STORES_WAITING_MAX
from lmcache_core.policies.lru import LruEviction

TINY, HUGE = 3, 4  # layouts of 4 KiB and of 4 MiB
TINY_COUNT = 8 * MIB // 4096


@pytest.fixture
def full(make_kernel: Callable[..., Kernel]) -> Kernel:
    """Eight units of 1 MiB, full of objects of 4 KiB; the first stored is the coldest."""
    return filled(make_kernel(slots=8))


def filled(kernel: Kernel, count: int = TINY_COUNT) -> Kernel:
    kernel.register_layout(TINY, 4096)
    kernel.register_layout(HUGE, 4 * MIB)
    for first in range(0, count, 512):
        store(kernel, *range(first, first + 512), layout=TINY)
    kernel.take_effects()
    return kernel


def begin(kernel: Kernel, *numbers: int, layout: int, session: int = WORKER, now: float = 0.0) -> Preparation:
    answer = kernel.begin_store(session, NS, layout, keys(*numbers), now, wait_s=5.0)
    assert isinstance(answer, Preparation)
    return answer


def finish(kernel: Kernel, preparation: Preparation, now: float = 0.0) -> Grants:
    while not preparation.done:
        kernel.step(now)
    assert preparation.grants is not None
    return preparation.grants


def evicted(kernel: Kernel) -> int:
    return sum(len(effect.objects) for effect in kernel.take_effects() if isinstance(effect, Evicted))


def test_a_grant_in_whose_way_many_objects_stand_evicts_a_bounded_number_in_each_step(full: Kernel) -> None:
    waiting = begin(full, 9000, layout=HUGE)
    steps = [evicted(full)]
    while not waiting.done:
        full.step(0.0)
        steps.append(evicted(full))
    assert waiting.grants is not None
    assert names(waiting.grants.statuses) == ["GRANTED"]
    assert max(steps) <= STEP_OBJECTS
    assert sum(steps) == TINY_COUNT // 2, "four units were in its way, and no more had to go"
    assert not full.working


def test_what_is_being_emptied_is_given_to_nobody_else(make_kernel: Callable[..., Kernel]) -> None:
    full = filled(make_kernel(slots=16), 2 * TINY_COUNT)
    waiting = begin(full, 9000, layout=HUGE)
    spans: list[tuple[int, int]] = []
    number = 10_000
    while not waiting.done:
        full.step(0.0)
        grants = full.begin_store(OTHER, NS, TINY, keys(*range(number, number + 8)), 0.0)
        assert isinstance(grants, Grants)
        assert set(names(grants.statuses)) == {"GRANTED"}
        spans += [(offset, offset + 4096) for offset in grants.offsets]
        number += 8
    assert waiting.grants is not None
    assert names(waiting.grants.statuses) == ["GRANTED"]
    start = waiting.grants.offsets[0]
    assert all(end <= start or begin >= start + 4 * MIB for begin, end in spans)


@pytest.mark.parametrize("how", ["session_dead", "session_closed", "session_lost", "end_session", "cancel"])
def test_who_goes_while_its_grant_is_prepared_leaves_nothing(full: Kernel, how: str) -> None:
    waiting = begin(full, 9000, layout=HUGE)
    while not full.usage().emptying_bytes or not evicted(full):
        full.step(0.0)
    if how == "cancel":
        full.cancel_store(waiting)
    else:
        getattr(full, how)(WORKER, 1.0)
    assert waiting.done
    assert waiting.grants is None
    usage = full.usage()
    assert not full.working
    assert usage.emptying_bytes == 0
    assert usage.objects_by_state["writing"] == 0
    assert sum(each.slots_used * each.slot_bytes for each in usage.classes) == usage.used_bytes
    free = (usage.pool_bytes - usage.used_bytes) // 4096
    assert free
    grants = offer(full, *range(20_000, 20_000 + min(free, 512)), session=OTHER, layout=TINY)
    assert set(names(grants.statuses)) == {"GRANTED"}, "the room that was made is anybody's"
    assert not evicted(full)


def test_a_drain_answers_who_waits(full: Kernel) -> None:
    waiting = begin(full, 9000, layout=HUGE)
    full.step(0.0)
    full.begin_drain()
    full.step(0.0)
    assert waiting.grants is not None
    assert names(waiting.grants.statuses) == ["DRAINING"]
    assert full.usage().emptying_bytes == 0


def test_slabs_that_others_give_back_meanwhile_are_taken_before_more_goes(make_kernel: Callable[..., Kernel]) -> None:
    kernel = make_kernel(slots=16)
    written = offer(kernel, *range(9100, 9108), session=OTHER)
    filled(kernel)
    waiting = begin(kernel, 9000, layout=HUGE)
    kernel.step(0.0)
    kernel.abort_store(OTHER, written.lease_id, 0.0)
    kernel.take_effects()
    assert names(finish(kernel, waiting).statuses) == ["GRANTED"]
    assert not evicted(kernel)
    assert kernel.usage().emptying_bytes == 0


@pytest.mark.parametrize("scope", [NS, None])
def test_what_was_offered_before_a_clear_does_not_appear_after_it(full: Kernel, scope: int | None) -> None:
    waiting = begin(full, 9000, layout=HUGE)
    full.step(0.0)
    full.clear(1.0, scope)
    assert names(finish(full, waiting, 1.0).statuses) == ["FULL"]
    assert full.usage().used_bytes == full.usage().emptying_bytes == 0
    assert names(offer(full, 9000, layout=HUGE, now=1.0).statuses) == ["GRANTED"], "what comes after it has the room"


def test_a_clear_of_another_namespace_gives_a_waiting_grant_its_room(full: Kernel) -> None:
    waiting = begin(full, 9000, layout=HUGE)
    full.step(0.0)
    full.clear(1.0, NS2)
    assert names(finish(full, waiting, 1.0).statuses) == ["GRANTED"]


def test_slabs_that_are_emptied_count_with_all_their_units(make_kernel: Callable[..., Kernel]) -> None:
    """Slots of 608 KiB stand by three in slabs of two units: ten units are five of them."""
    kernel = make_kernel(slots=64)
    kernel.register_layout(TINY, 608 << 10)
    store(kernel, *range(96), layout=TINY)
    kernel.take_effects()
    assert names(finish(kernel, begin(kernel, *range(1000, 1010), layout=LAYOUT)).statuses) == ["GRANTED"] * 10
    assert evicted(kernel) == 15


def test_a_reader_that_comes_between_two_steps_keeps_its_bytes(full: Kernel) -> None:
    waiting = begin(full, 9000, layout=HUGE)
    for _ in range(4):
        full.step(0.0)
    there = [number for number in range(0, TINY_COUNT, 64) if found(full, number)[0]]
    held = read(full, *there, session=OTHER)
    assert names(held.statuses) == ["GRANTED"] * len(there)
    assert names(finish(full, waiting).statuses) == ["FULL"], "every unit has a reader"
    assert found(full, *there) == [True] * len(there)
    full.finish_read(OTHER, held.lease_id, 0.0)
    assert names(offer(full, 9000, layout=HUGE).statuses) == ["GRANTED"]


def test_a_key_that_another_stores_meanwhile_is_stored_once(full: Kernel) -> None:
    waiting = begin(full, 9000, 9001, layout=BIG)
    full.step(0.0)
    meanwhile = full.begin_store(OTHER, NS, TINY, keys(9000), 0.0)
    assert isinstance(meanwhile, Grants)
    full.commit_store(OTHER, meanwhile.lease_id, 0.0)
    read(full, 9000, session=OTHER)
    assert names(finish(full, waiting).statuses) == ["EXISTS", "GRANTED"]


def test_a_store_waits_no_longer_than_it_was_to(full: Kernel) -> None:
    waiting = begin(full, 9000, layout=HUGE)
    full.step(4.0)
    assert not waiting.done
    full.step(5.0)
    assert waiting.grants is not None
    assert names(waiting.grants.statuses) == ["FULL"]
    assert full.usage().emptying_bytes == 0


def test_stores_that_wait_are_carried_out_in_their_order(full: Kernel) -> None:
    first, second = begin(full, 9000, layout=HUGE), begin(full, 9001, layout=LAYOUT, session=OTHER)
    while not first.done:
        full.step(0.0)
        assert first.done or not second.done
    assert names(finish(full, second).statuses) == ["GRANTED"]


@pytest.fixture
def deep(make_kernel: Callable[..., Kernel]) -> Kernel:
    """Four slabs of 8,192 objects each, full: more stand in the coldest than are looked at."""
    kernel = make_kernel(slots=128, slab_bytes=32 * MIB)
    kernel.register_layout(TINY, 4096)
    kernel.register_layout(HUGE, 4 * MIB)
    for first in range(0, 4 * 8192, 512):
        store(kernel, *range(first, first + 512), layout=TINY)
    kernel.take_effects()
    return kernel


def test_where_the_coldest_slab_has_a_pinned_object_the_next_one_goes(deep: Kernel) -> None:
    deep.pin(WORKER, NS, keys(8191), 60.0, 0.0)  # the last of the first slab: that comes to light late
    assert names(finish(deep, begin(deep, 90_000, layout=HUGE)).statuses) == ["GRANTED"]
    assert found(deep, 0, 8191, 8192, 2 * 8192) == [True, True, False, True], (
        "that behind it, which is the next coldest"
    )
    assert evicted(deep) == 8192
    assert deep.usage().emptying_bytes == 0


def test_all_slabs_but_those_with_something_pinned_can_be_had(deep: Kernel) -> None:
    for number in (0, 8192, 3 * 8192):
        deep.pin(WORKER, NS, keys(number), 60.0, 0.0)
    grants = finish(deep, begin(deep, *range(90_000, 90_008), layout=HUGE))
    assert names(grants.statuses) == ["GRANTED"] * 8
    assert evicted(deep) == 8192


def test_a_pool_with_a_pin_in_every_slab_is_full_after_one_look_around(deep: Kernel) -> None:
    deep.pin(WORKER, NS, keys(*range(8191, 4 * 8192, 8192)), 60.0, 0.0)
    waiting = begin(deep, 90_000, layout=HUGE)
    deep.take_touched()
    steps = 0
    while not waiting.done:
        deep.step(0.0)
        assert deep.take_touched() <= CALL_OBJECTS_MAX // 2
        steps += 1
    assert steps < 100
    assert waiting.grants is not None
    assert names(waiting.grants.statuses) == ["FULL"]
    assert not evicted(deep)
    assert deep.usage().emptying_bytes == 0


def test_a_clear_makes_the_room_that_a_store_of_another_namespace_waits_for(full: Kernel) -> None:
    waiting = full.begin_store(WORKER, NS2, HUGE, keys(9000), 0.0, wait_s=5.0)
    assert isinstance(waiting, Preparation)
    full.step(0.0)
    full.begin_clear(0.0, NS)
    assert names(finish(full, waiting).statuses) == ["GRANTED"]
    assert evicted(full) <= STEP_OBJECTS, "what was cleared goes before anything is evicted"
    while full.clearing:
        full.free_cleared(0.0)
    assert full.usage().used_bytes == 4 * MIB


def test_one_that_does_not_wait_is_answered_at_once(full: Kernel) -> None:
    grants = full.begin_store(WORKER, NS, HUGE, keys(9000), 0.0)
    assert isinstance(grants, Grants)
    assert names(grants.statuses) == ["FULL"]
    assert not full.working


def test_a_load_from_a_tier_waits_for_room_as_a_store_does_and_keeps_its_deadline(full: Kernel) -> None:
    waiting = full.begin_store(
        SERVER_SESSION, NS, HUGE, keys(9000), 1.0, loading=True, ttl_s=5.0, wait_s=5.0
    )  # until 6.0
    assert isinstance(waiting, Preparation)
    grants = finish(full, waiting, 3.0)
    assert names(grants.statuses) == ["GRANTED"]
    assert grants.deadline == 6.0, "its lane has as long as it was given, however long it has waited for its slot"
    assert full.usage().objects_by_state["loading"] == 1


def test_no_load_waits_beyond_its_deadline(full: Kernel) -> None:
    waiting = full.begin_store(SERVER_SESSION, NS, HUGE, keys(9000), 1.0, loading=True, ttl_s=2.0, wait_s=5.0)
    assert isinstance(waiting, Preparation)
    full.step(3.0)
    assert waiting.grants is not None
    assert names(waiting.grants.statuses) == ["FULL"]
    assert full.usage().emptying_bytes == 0


def test_a_policy_that_says_nothing_but_its_victims_is_asked_for_them_in_steps(
    make_kernel: Callable[..., Kernel],
) -> None:
    """As an heir of a policy of ours that changes their order, and as anybody's."""

    class Newest(LruEviction):
        named = 0

        def victims(self, nbytes: int) -> list[Entry]:
            chosen: list[Entry] = []
            for entry in super().victims(1 << 60)[::-1]:
                if nbytes <= 0:
                    break
                chosen.append(entry)
                nbytes -= entry.nbytes
            self.named = max(self.named, len(chosen))
            return chosen

    policy = Newest()
    kernel = filled(make_kernel(slots=8, policy=policy))
    policy.named = 0
    assert names(finish(kernel, begin(kernel, 9000, layout=HUGE)).statuses) == ["GRANTED"]
    assert policy.named <= LOOK_OBJECTS_MAX, "it is asked for no more bytes than the objects that may be named have"
    assert found(kernel, 0, TINY_COUNT - 512) == [True, False], "its order was kept: the last used went"


def test_a_large_object_among_many_small_ones_is_found_by_its_policy(make_kernel: Callable[..., Kernel]) -> None:
    """The bytes asked for are those of the smallest objects; for larger ones it is asked again."""
    kernel = make_kernel(slots=64)
    kernel.register_layout(TINY, 4096)
    store(kernel, *range(56))
    store(kernel, *range(1000, 1512), layout=TINY)
    kernel.take_effects()
    grants = offer(kernel, *range(2000, 2040))
    assert set(names(grants.statuses)) == {"GRANTED"}
    assert evicted(kernel) == 40 - 6, "of its own class, and as many as were needed"


def test_thousands_of_stores_that_wait_are_carried_out_or_withdrawn_and_no_call_looks_at_them_all(
    make_kernel: Callable[..., Kernel],
) -> None:
    kernel = filled(make_kernel(slots=8))
    count = 2 * STORES_WAITING_MAX
    sessions = range(10, 26)
    for session in sessions:
        kernel.open_session(session, 1000, session)
        kernel.attach_session(session, session)
    there = keys(*range(TINY_COUNT - 64, TINY_COUNT))
    waiting: list[Preparation] = []
    for number in range(count):
        named = [*keys(10_000 + number), *there]
        answer = kernel.begin_store(sessions[number % len(sessions)], NS, HUGE, named, 0.0, wait_s=5.0)
        assert isinstance(answer, Preparation)
        waiting.append(answer)
    before = kernel.take_touched()
    assert before
    for session in sessions[::2]:
        kernel.session_dead(session, 1.0)
        assert kernel.take_touched() <= CALL_OBJECTS_MAX // 16, "its holds end in steps"
    assert sum(each.cancelled for each in waiting) == count // 2
    done: list[Preparation] = []
    left = [each for each in waiting if not each.cancelled]
    steps = 0
    while kernel.working:
        kernel.step(1.0 if steps < 200 else 5.0)
        assert kernel.take_touched() <= CALL_OBJECTS_MAX
        kernel.take_effects()
        steps += 1
        while len(done) < len(left) and left[len(done)].done:
            done.append(left[len(done)])
    assert len(done) == len(left), "each is answered, in their order"
    assert all(each.grants is not None for each in done)
    assert kernel.usage().emptying_bytes == 0
    held = [item for item in kernel.residents.table.of(NS) if isinstance(item, Incarnation) and item.holds]
    assert not held, "what waiting stores have held is held no more"
    assert not any(each.promised_bytes for each in kernel.usage().holders.values())


def test_what_waiting_stores_hold_is_charged_as_promised(make_kernel: Callable[..., Kernel]) -> None:
    kernel = filled(make_kernel(slots=8, promised_fraction_per_session_max=3 * 4096 / (8 * MIB)))
    waiting = kernel.begin_store(WORKER, NS, HUGE, keys(9000, 0, 1, 2, 3, 4), 0.0, wait_s=5.0)
    assert isinstance(waiting, Preparation)
    assert kernel.usage().held_by_session[WORKER].promised_bytes == 3 * 4096
    kernel.cancel_store(waiting)
    assert kernel.usage().held_by_session == {}


def test_a_look_past_what_tiers_do_not_have_yet_is_bounded(make_kernel: Callable[..., Kernel]) -> None:
    """Where nearly all that is coldest is on its way to tiers, some is uncovered, and the policy is asked anew."""
    kernel = make_kernel(slots=64)
    middle = 5
    for layout, nbytes in ((TINY, 4096), (HUGE, 4 * MIB), (middle, 12_288)):
        kernel.register_layout(layout, nbytes)
    numbers = range(63 * 85)
    for first in range(0, len(numbers), 512):
        some = numbers[first : first + 512]
        grants = offer(kernel, *some, layout=middle)
        kernel.commit_store(WORKER, grants.lease_id, 0.0)
        kernel.shield(NS, [(key, grants.generation) for key in keys(*some) if first >= 512])
    store(kernel, 50_000, layout=TINY)  # for all the policy is asked, objects may be as small as this
    kernel.take_touched()
    waiting = begin(kernel, *range(90_000, 90_008), layout=HUGE)
    longest = kernel.take_touched()
    while not waiting.done:
        kernel.step(0.0)
        longest = max(longest, kernel.take_touched())
    assert longest <= 4 * LOOK_OBJECTS_MAX
    assert waiting.grants is not None
    assert names(waiting.grants.statuses)[:3] == ["GRANTED"] * 3, "the others: in the way of all else something is held"


def scattered(kernel: Kernel, *, clean: Sequence[int] = ()) -> list[bytes]:
    """What is still to get to tiers, the oldest first: all but these, in no order that the slabs know."""
    names = [(item.key, item.generation) for item in kernel.residents.table.of(NS) if item.key not in keys(*clean)]
    random.Random(5).shuffle(names)
    kernel.shield(NS, names)
    return [key for key, _ in names]


def resident(kernel: Kernel) -> set[bytes]:
    return {item.key for item in kernel.residents.table.of(NS)}


@pytest.mark.parametrize("clean", [0, 16, 400], ids=["none clean", "some clean", "more clean, in every slab"])
def test_for_a_large_object_what_tiers_lack_goes_where_nothing_else_can(full: Kernel, clean: int) -> None:
    dirty = scattered(full, clean=range(0, TINY_COUNT, TINY_COUNT // clean) if clean else ())
    waiting = begin(full, 9000, layout=HUGE)
    full.take_touched()
    longest = 0
    while not waiting.done:
        full.step(0.0)
        longest = max(longest, full.take_touched())
    assert waiting.grants is not None
    assert names(waiting.grants.statuses) == ["GRANTED"]
    assert evicted(full) == TINY_COUNT // 2, "its own room, and no more"
    assert longest <= 4 * LOOK_OBJECTS_MAX
    assert full.shielded == len(resident(full) & set(dirty)), "what stays is shielded as before"


def test_for_a_large_object_slabs_of_what_tiers_have_go_first(full: Kernel) -> None:
    there = TINY_COUNT // 2
    dirty = scattered(full, clean=range(there, TINY_COUNT))  # the younger half, which is four of the eight slabs
    assert names(finish(full, begin(full, 9000, layout=HUGE)).statuses) == ["GRANTED"]
    assert resident(full) >= set(dirty)
    assert names(finish(full, begin(full, 9001, layout=HUGE)).statuses) == ["GRANTED"]
    assert not resident(full) & set(dirty)
    assert full.shielded == 0


def test_what_a_lane_reads_goes_for_no_large_object(full: Kernel) -> None:
    scattered(full)
    for first in range(0, TINY_COUNT, 256):  # one in each slab
        read(full, first)
    assert names(finish(full, begin(full, 9000, layout=HUGE)).statuses) == ["FULL"]
    assert full.shielded == TINY_COUNT
    assert full.usage().emptying_bytes == 0


def test_what_must_be_kept_goes_for_no_large_object(make_kernel: Callable[..., Kernel]) -> None:
    full = filled(make_kernel(slots=8, keeps_dirty=True))
    scattered(full, clean=range(16))
    assert names(finish(full, begin(full, 9000, layout=HUGE)).statuses) == ["FULL"]
    assert len(resident(full)) == TINY_COUNT


def test_a_grant_that_fails_as_it_is_carried_out_is_answered_and_leaves_nothing(
    full: Kernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    waiting = begin(full, 0, 9000, layout=HUGE)  # the first of them is there
    assert full.usage().held_by_session[WORKER].promised_bytes

    def fails(*arguments: object, **options: object) -> Grants:
        raise RuntimeError("a bug")

    monkeypatch.setattr(Writing, "prepare", fails)
    with pytest.raises(RuntimeError, match="a bug"):
        finish(full, waiting)
    assert waiting.error is not None
    assert "log" in str(waiting.error)
    while full.working:
        full.step(0.0)
    assert full.usage().held_by_session == {}
    assert full.usage().emptying_bytes == 0
