"""Store on commit and prefetch on lookup, without a server."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import pytest

from lmcache_core.limits import SECOND_LOOK_S
from lmcache_core.policies.prefetch import DefaultPrefetch, RetainPrefetch
from lmcache_core.policies.store import SkipL1Store
from lmcache_core.tiers.contract import Outcome, Result
from lmcache_core.tiers.flow.job_states import JobState
from lmcache_core.tiers.l1 import TierReason
from lmcache_core.tiers.object.format import tier_key

from .conftest import Doubles, Loop


def _evict_all(loop: Loop) -> None:
    for _, key in list(loop.l1.ready):
        loop.l1.evict(key)


def test_what_was_stored_comes_back_byte_for_byte(doubles: Doubles) -> None:
    loop = doubles.loop(doubles.l1(), doubles.tier("mem", doubles.adapter()))
    contents = doubles.contents(10)
    loop.store(contents)
    loop.idle()
    _evict_all(loop)
    job = loop.fetch(list(contents))
    assert (job.state, job.hits, job.loaded, job.reasons) == (JobState.DONE, 10, set(range(10)), {})
    assert {key: loop.l1.get(key) for key in contents} == contents
    assert loop.l1.held == 0


def test_a_default_prefetch_is_temporary_and_a_retaining_one_stays(doubles: Doubles) -> None:
    loop = doubles.loop(doubles.l1(), doubles.tier("mem", doubles.adapter()))
    contents = doubles.contents(2)
    loop.store(contents)
    loop.idle()
    _evict_all(loop)
    first, second = contents
    loop.fetch([first])
    assert loop.l1.temporary == {(doubles.namespace, first)}
    request = loop.ask([second])
    loop.tiering.cancel(request)
    loop.fetch([second], policy=RetainPrefetch())
    assert loop.l1.temporary == {(doubles.namespace, first)}


def test_what_is_loaded_a_second_time_stays(doubles: Doubles) -> None:
    loop = doubles.loop(doubles.l1(), doubles.tier("mem", doubles.adapter()))
    contents = doubles.contents(3)
    loop.store(contents)
    loop.idle()
    _evict_all(loop)
    hot, *cold = contents
    assert loop.l1.room == 0, "so that the first load is for one reader"
    loop.fetch([hot])
    assert loop.l1.temporary == {(doubles.namespace, hot)}
    loop.l1.evict(hot)  # as its reader does
    loop.fetch([hot, *cold])
    assert loop.l1.temporary == {(doubles.namespace, key) for key in cold}


def test_what_is_loaded_while_there_is_room_stays_as_far_as_that_goes(doubles: Doubles) -> None:
    loop = doubles.loop(doubles.l1(), doubles.tier("mem", doubles.adapter()))
    contents = doubles.contents(5)
    loop.store(contents)
    loop.idle()
    _evict_all(loop)
    loop.l1.room = 3
    loop.fetch(list(contents))
    assert loop.l1.temporary == {(doubles.namespace, key) for key in list(contents)[3:]}


def test_nothing_that_is_loaded_stays_where_nothing_is_ever_evicted(doubles: Doubles) -> None:
    loop = doubles.loop(doubles.l1(), doubles.tier("mem", doubles.adapter()))
    contents = doubles.contents(2)
    loop.store(contents)
    loop.idle()
    _evict_all(loop)
    loop.l1.room, loop.l1.evicts = 2, False
    loop.fetch(list(contents))
    assert loop.l1.temporary == {(doubles.namespace, key) for key in contents}


def test_a_policy_that_fails_to_say_what_stays_costs_no_load(doubles: Doubles) -> None:
    class Failing(DefaultPrefetch):
        def retains(self, keys: Sequence[bytes], room: int) -> NoReturn:
            raise RuntimeError("of its own")

    loop = doubles.loop(doubles.l1(), doubles.tier("mem", doubles.adapter()), prefetch_policy=Failing())
    contents = doubles.contents(2)
    loop.store(contents)
    loop.idle()
    _evict_all(loop)
    assert loop.fetch(list(contents)).hits == 2
    assert loop.l1.temporary == {(doubles.namespace, key) for key in contents}


def test_a_prefix_ends_at_the_first_key_that_is_nowhere(doubles: Doubles) -> None:
    adapter = doubles.adapter()
    loop = doubles.loop(doubles.l1(), doubles.tier("mem", adapter))
    contents = doubles.contents(6)
    loop.store(contents)
    loop.idle()
    _evict_all(loop)
    keys = list(contents)
    del adapter.objects[tier_key(keys[3], doubles.namespace, 0)]
    job = loop.fetch(keys)
    assert job.hits == 3
    assert job.loaded == {0, 1, 2}
    assert job.reasons == {3: TierReason.NOWHERE, 4: TierReason.CUT, 5: TierReason.CUT}


def test_a_first_key_that_is_nowhere_means_no_load_at_all(doubles: Doubles) -> None:
    adapter = doubles.adapter()
    loop = doubles.loop(doubles.l1(), doubles.tier("mem", adapter))
    contents = doubles.contents(3, first=1)
    loop.store(contents)
    loop.idle()
    _evict_all(loop)
    job = loop.fetch([doubles.key(0), *contents])
    assert (job.hits, job.loaded) == (0, set())
    assert adapter.calls["load"] == 0


def test_sparse_lookups_load_any_position(doubles: Doubles) -> None:
    adapter = doubles.adapter()
    loop = doubles.loop(doubles.l1(), doubles.tier("mem", adapter))
    contents = doubles.contents(3, first=1)
    loop.store(contents)
    loop.idle()
    _evict_all(loop)
    job = loop.fetch([doubles.key(0), *contents], prefix=False)
    assert (job.hits, job.loaded, job.reasons) == (3, {1, 2, 3}, {0: TierReason.NOWHERE})


def test_a_window_loads_only_the_last_keys_of_the_longest_run(doubles: Doubles) -> None:
    adapter = doubles.adapter()
    loop = doubles.loop(doubles.l1(), doubles.tier("mem", adapter))
    contents = doubles.contents(8)
    loop.store(contents)
    loop.idle()
    _evict_all(loop)
    keys = list(contents)
    for hole in (1, 7):
        del adapter.objects[tier_key(keys[hole], doubles.namespace, 0)]
    job = loop.fetch(keys, window=3)
    assert (job.hits, job.loaded) == (7, {4, 5, 6})


def test_parts_of_one_prefix_come_from_two_tiers(doubles: Doubles) -> None:
    near, far = doubles.adapter(), doubles.adapter()
    loop = doubles.loop(doubles.l1(), doubles.tier("near", near), doubles.tier("far", far))
    contents = doubles.contents(6)
    loop.store(contents)
    loop.idle()
    _evict_all(loop)
    keys = list(contents)
    for i in (1, 4):
        del near.objects[tier_key(keys[i], doubles.namespace, 0)]
    for i in (0, 5):
        del far.objects[tier_key(keys[i], doubles.namespace, 0)]
    job = loop.fetch(keys)
    assert (job.hits, job.loaded) == (6, set(range(6)))
    assert {key: loop.l1.get(key) for key in keys} == contents
    assert near.calls["load"]
    assert far.calls["load"]


def test_hits_are_known_before_the_loads_end(doubles: Doubles) -> None:
    adapter = doubles.adapter()
    loop = doubles.loop(doubles.l1(), doubles.tier("mem", adapter))
    contents = doubles.contents(3)
    loop.store(contents)
    loop.idle()
    _evict_all(loop)
    adapter.hang("load")
    job = loop.ask(list(contents))
    loop.until(lambda: job.hits is not None)
    assert (job.state, job.hits, job.loaded) == (JobState.LOADING, 3, set())
    adapter.release("load")
    loop.until(lambda: job.ended)
    assert job.loaded == {0, 1, 2}


def test_two_requests_for_one_key_load_it_once(doubles: Doubles) -> None:
    adapter = doubles.adapter()
    loop = doubles.loop(doubles.l1(), doubles.tier("mem", adapter))
    contents = doubles.contents(4)
    loop.store(contents)
    loop.idle()
    _evict_all(loop)
    adapter.hang("load")
    first = loop.ask(list(contents))
    loop.until(lambda: first.state is JobState.LOADING)
    second = loop.ask(list(contents))
    loop.until(lambda: second.state is JobState.LOADING)
    adapter.release("load")
    loop.until(lambda: first.ended and second.ended)
    assert first.loaded == second.loaded == {0, 1, 2, 3}
    assert adapter.calls["load"] == 1


def test_a_cancelled_request_holds_nothing_and_does_not_disturb_another(doubles: Doubles) -> None:
    adapter = doubles.adapter()
    loop = doubles.loop(doubles.l1(), doubles.tier("mem", adapter))
    contents = doubles.contents(4)
    loop.store(contents)
    loop.idle()
    _evict_all(loop)
    adapter.hang("load")
    first = loop.ask(list(contents))
    loop.until(lambda: first.state is JobState.LOADING)
    second = loop.ask(list(contents)[:2])
    loop.until(lambda: second.state is JobState.LOADING)
    loop.tiering.cancel(first)
    assert first.state is JobState.CANCELLED
    assert first in loop.done
    adapter.release("load")
    loop.until(lambda: second.ended and not loop.l1.held)
    assert second.loaded == {0, 1}
    assert {key for _, key in loop.l1.ready} == set(list(contents)[:2])


def _waiting_for_slots(doubles: Doubles, count: int = 4) -> tuple[Any, Any, list[bytes]]:
    """A loop whose loads wait for their slots, its adapter, and keys that are on its tier."""
    adapter = doubles.adapter()
    loop = doubles.loop(doubles.l1(), doubles.tier("mem", adapter))
    contents = doubles.contents(count)
    loop.store(contents)
    loop.idle()
    _evict_all(loop)
    loop.l1.makes_wait = True
    return loop, adapter, list(contents)


def test_loads_that_wait_for_their_slots_are_shared_and_start_once_they_have_them(doubles: Doubles) -> None:
    loop, adapter, keys = _waiting_for_slots(doubles)
    first = loop.ask(keys)
    loop.until(lambda: first.state is JobState.LOADING)
    second = loop.ask(keys[:2])
    loop.until(lambda: second.state is JobState.LOADING)
    assert len(loop.l1.waits) == 1, "the second one joins"
    assert not adapter.calls["load"]
    loop.l1.make_room()
    loop.until(lambda: first.ended and second.ended)
    assert (first.loaded, second.loaded) == ({0, 1, 2, 3}, {0, 1})
    assert adapter.calls["load"] == 1


def test_of_loads_that_have_waited_those_without_a_slot_are_misses(doubles: Doubles) -> None:
    loop, _, keys = _waiting_for_slots(doubles)
    job = loop.ask(keys)
    loop.until(lambda: job.state is JobState.LOADING)
    taken, loop.l1.free = loop.l1.free[2:], loop.l1.free[:2]
    loop.l1.make_room()
    loop.until(lambda: job.ended)
    assert job.loaded == {0, 1}
    assert job.reasons == {2: TierReason.NO_ROOM, 3: TierReason.CUT}
    loop.l1.free += taken
    assert not loop.l1.held


@pytest.mark.parametrize("how", ["cancel", "clear", "late"])
def test_no_room_is_made_for_loads_that_nobody_waits_for_any_more(doubles: Doubles, how: str) -> None:
    loop, adapter, keys = _waiting_for_slots(doubles)
    first, second = loop.ask(keys, seconds=50.0), loop.ask(keys[:2], seconds=50.0)
    loop.until(lambda: second.state is JobState.LOADING)
    wait = loop.l1.waits[0]
    if how == "cancel":
        loop.tiering.cancel(first)
        assert not wait.cancelled, "another one waits for some of them"
        loop.tiering.cancel(second)
    elif how == "clear":
        loop.clear(doubles.namespace)
    else:
        loop.jump(60.0)
        loop.until(lambda: second.ended)
    assert wait.cancelled
    assert first.ended
    assert second.ended
    loop.l1.make_room()
    loop.l1.makes_wait = False
    assert not adapter.calls["load"]
    assert loop.fetch(keys).loaded == {0, 1, 2, 3}


def test_a_failed_load_cuts_the_prefix_and_releases_the_rest(doubles: Doubles) -> None:
    adapter = doubles.adapter()
    loop = doubles.loop(doubles.l1(), doubles.tier("mem", adapter))
    contents = doubles.contents(5)
    loop.store(contents)
    loop.idle()
    _evict_all(loop)
    keys = list(contents)
    adapter.corrupt(tier_key(keys[2], doubles.namespace, 0))
    job = loop.fetch(keys)
    assert job.hits == 2
    assert job.loaded == {0, 1}
    assert job.reasons[2] is TierReason.DAMAGED
    loop.until(lambda: not loop.l1.held)
    assert {key for _, key in loop.l1.ready} == {keys[0], keys[1]}, "what nobody can use leaves the L1"


def test_a_damaged_object_comes_from_the_next_tier_and_leaves_its_own(doubles: Doubles) -> None:
    near, far = doubles.adapter(), doubles.adapter()
    loop = doubles.loop(doubles.l1(), doubles.tier("near", near), doubles.tier("far", far))
    contents = doubles.contents(2)  # the second shows that the way is well
    loop.store(contents)
    loop.idle()
    _evict_all(loop)
    key = next(iter(contents))
    name = tier_key(key, doubles.namespace, 0)
    near.corrupt(name)
    near.hang("load")
    far.hang("exists")  # so that near is chosen, and far is known only while near's load is under way
    job = loop.ask([key])
    loop.until(lambda: job.state is JobState.LOADING)
    before = loop.lookups_heard(far)
    far.release("exists")
    loop.until(lambda: loop.lookups_heard(far) > before)
    near.release("load")
    loop.until(lambda: job.ended)
    assert job.hits == 1
    assert loop.l1.get(key) == contents[key]
    loop.jump(SECOND_LOOK_S)
    loop.until(lambda: name not in near.objects)
    assert loop.tiering.status()["tiers"][0]["counts"]["load_damaged"] == 1


def test_the_neighbours_object_is_damage(doubles: Doubles) -> None:
    adapter = doubles.adapter()
    loop = doubles.loop(doubles.l1(), doubles.tier("mem", adapter))
    contents = doubles.contents(2)
    loop.store(contents)
    loop.idle()
    _evict_all(loop)
    one, other = (tier_key(key, doubles.namespace, 0) for key in contents)
    adapter.objects[one] = adapter.objects[other]
    job = loop.fetch(list(contents))
    assert (job.hits, job.reasons[0]) == (0, TierReason.DAMAGED)


def test_skip_l1_drops_only_what_every_tier_has(doubles: Doubles) -> None:
    good, bad = doubles.adapter(), doubles.adapter()
    loop = doubles.loop(doubles.l1(), doubles.tier("good", good), doubles.tier("bad", bad), store_policy=SkipL1Store())
    loop.store(doubles.contents(2))
    loop.idle()
    assert loop.l1.ready == {}
    bad.answers["store"] = Outcome(Result.FAILED, error="broken")
    loop.store(doubles.contents(2, first=2))
    loop.idle()
    assert {key for _, key in loop.l1.ready} == {doubles.key(2), doubles.key(3)}


def test_what_a_tier_has_is_not_stored_again(doubles: Doubles) -> None:
    adapter = doubles.adapter()
    loop = doubles.loop(doubles.l1(), doubles.tier("mem", adapter))
    contents = doubles.contents(3)
    loop.store(contents)
    loop.idle()
    _evict_all(loop)
    loop.store(contents)
    loop.idle()
    assert adapter.calls["store"] == 1


@pytest.mark.parametrize("dirty", ["drop", "keep"])
def test_an_object_evicted_before_its_store_is_lost_or_kept_as_dirty_says(doubles: Doubles, dirty: str) -> None:
    adapter = doubles.adapter()
    loop = doubles.loop(doubles.l1(), doubles.tier("mem", adapter, connections=1), config={"dirty": dirty})
    adapter.hang("store")
    loop.store(doubles.contents(1))
    loop.until(lambda: adapter.calls["store"])
    for i in range(1, 4):  # the lane is busy and its queue holds two batches: the others wait as metadata
        loop.store(doubles.contents(1, first=i))
        loop.until(lambda: loop.tiering.next_deadline() > loop.now())  # all is planned
    last = doubles.key(3)
    loop.l1.evict(last)
    adapter.release("store")
    loop.idle()
    lost = loop.tiering.status()["stores"]["counts"].get("lost_evicted", 0)
    assert lost == 1
    assert loop.l1.held == 0
    assert len(adapter.objects) == 3


def test_a_drain_flushes_what_is_dirty_and_refuses_lookups(doubles: Doubles) -> None:
    adapter = doubles.adapter()
    loop = doubles.loop(doubles.l1(), doubles.tier("mem", adapter))
    loop.store(doubles.contents(20))
    loop.tiering.begin_drain()
    assert not loop.tiering.drained
    job = loop.fetch([doubles.key(99)])
    assert job.hits == 0
    loop.until(lambda: loop.tiering.drained)
    assert len(adapter.objects) == 20
    assert loop.tiering.close()
    assert adapter.closed


def test_a_lookup_queries_only_the_tiers_it_names(doubles: Doubles) -> None:
    near, far = doubles.adapter(), doubles.adapter()
    loop = doubles.loop(doubles.l1(), doubles.tier("near", near), doubles.tier("far", far))
    loop.store(doubles.contents(1))
    loop.idle()
    _evict_all(loop)
    asked = near.calls["exists"]
    job = loop.fetch([doubles.key(0)], tiers=["far"])
    assert job.hits == 1
    assert near.calls["exists"] == asked
