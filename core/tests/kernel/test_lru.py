"""The order of the built-in policies, against a plain list."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from lmcache_core.kernel import Incarnation
from lmcache_core.policies.lru import LruEviction
from lmcache_core.policies.noop import NoopEviction


def entry(nbytes: int = 1) -> Incarnation:
    item = Incarnation()
    item.nbytes, item.holds = nbytes, 0
    item.older = item.newer = item.policy_data = None
    return item


def test_victims_are_named_by_bytes_oldest_first_and_again_the_same() -> None:
    policy, items = LruEviction(), [entry(3), entry(3), entry(3)]
    policy.insert(items)
    assert policy.victims(1) == items[:1]
    assert policy.victims(4) == items[:2] == policy.victims(6)
    assert policy.victims(100) == items
    assert policy.victims(0) == []


def test_a_held_entry_comes_back_as_the_most_recently_used() -> None:
    policy, items = LruEviction(), [entry() for _ in range(3)]
    policy.insert(items)
    items[0].holds = 1
    policy.held(items[:1])
    policy.access(items[:1])
    assert policy.victims(9) == items[1:]
    items[0].holds = 0
    policy.released(items[:1])
    assert policy.victims(9) == [items[1], items[2], items[0]]


def test_a_caller_that_never_says_held_gets_no_held_victim_either() -> None:
    policy, items = LruEviction(), [entry(), entry()]
    policy.insert(items)
    items[0].holds = 1
    assert policy.victims(9) == items[1:]


def test_an_entry_used_twice_in_a_batch_stands_where_its_last_use_puts_it() -> None:
    policy, items = LruEviction(), [entry() for _ in range(3)]
    policy.insert(items)
    policy.access([items[0], items[1], items[0]])
    assert policy.victims(9) == [items[2], items[1], items[0]]


def test_noop_names_nobody() -> None:
    policy, items = NoopEviction(), [entry()]
    policy.insert(items)
    policy.access(items)
    policy.held(items)
    policy.released(items)
    assert policy.victims(100) == []
    policy.remove(items)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(st.lists(st.tuples(st.sampled_from(["access", "hold", "release", "remove", "add"]), st.integers(0, 20))))
def test_lru_is_a_list_that_is_moved_to_its_end(steps: list[tuple[str, int]]) -> None:
    policy, items = LruEviction(), [entry() for _ in range(5)]
    order = list(items)
    policy.insert(items)
    for verb, pick in steps:
        if verb == "add":
            item = entry()
            items.append(item)
            order.append(item)
            policy.insert([item])
            continue
        if not items:
            continue
        item = items[pick % len(items)]
        if verb == "access":
            policy.access([item])
            if item in order:
                order.remove(item)
                order.append(item)
        elif verb == "hold":
            item.holds += 1
            if item.holds == 1:
                policy.held([item])
                order.remove(item)
        elif verb == "release" and item.holds:
            item.holds -= 1
            if not item.holds:
                policy.released([item])
                order.append(item)
        elif verb == "remove":
            policy.remove([item])
            items.remove(item)
            if item in order:
                order.remove(item)
        assert policy.victims(1000) == order
