"""Keys that are moved nearer to their homes: probes get shorter, and nothing else changes."""

from __future__ import annotations

import os
import random
import signal
import time
import warnings
from collections import Counter

import numpy as np
import pytest
from lmcache_l0 import SharedCache
from lmcache_l0.errors import TableLoadWarning, UsageError

SLOTS, LOAD = 4000, 0.68


def churn(cache: SharedCache, keys: list[bytes], changes: int, chance: random.Random, number: int) -> int:
    """Replace keys by new ones, with their own bytes as values."""
    for _ in range(changes):
        at = chance.randrange(len(keys))
        cache.delete(keys[at])
        keys[at] = b"%d" % number
        cache.set(keys[at], keys[at])
        number += 1
    return number


def filled(make, **sizes) -> tuple[SharedCache, list[bytes]]:
    cache = make(hash_slots=SLOTS, max_value_size=32, max_key_size=16, **sizes)
    keys = [b"%d" % i for i in range(int(SLOTS * LOAD))]
    cache.set_many([(key, key) for key in keys])
    return cache, keys


@pytest.mark.parametrize("sizes", [{}, {"versions": 1}], ids=["stripes", "versions"])
def test_a_rehash_makes_probes_as_short_as_in_a_new_table(make, sizes):
    cache, keys = filled(make, **sizes)
    new = cache.stats
    churn(cache, keys, 20_000, random.Random(1), len(keys))
    churned = cache.stats
    assert churned.found_probes_mean > 1.5 * new.found_probes_mean
    assert cache.rehash() > SLOTS // 10
    after = cache.stats
    assert after.found_probes_mean < 1.15 * new.found_probes_mean
    assert after.miss_probes_mean < 1.15 * new.miss_probes_mean
    assert (after.keys, after.claimed, after.locked) == (len(keys), 0, 0)
    assert dict(cache.items()) == {key: key for key in keys}
    assert cache.rehash() <= SLOTS // 100


def test_a_rehash_in_steps_comes_to_the_same(make):
    cache, keys = filled(make)
    churn(cache, keys, 20_000, random.Random(2), len(keys))
    moved = [cache.rehash(slots=300) for _ in range(SLOTS // 300 + 1)]
    assert all(moved)
    assert sum(moved) > SLOTS // 10
    assert cache.rehash() <= SLOTS // 100
    with pytest.raises(UsageError, match="slots=0 must be 1 or more"):
        cache.rehash(slots=0)
    with pytest.raises(UsageError, match="read-only"):
        make(cache.path, read_only=True).rehash()


def test_what_is_known_of_a_key_moves_with_it(make):
    cache = make(hash_slots=8, max_value_size=64)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TableLoadWarning)
        cache.set_many({f"{i}": b"" for i in range(7)})
        cache.set_numpy("array", np.arange(8, dtype="f4"))
    for _ in range(20_000):
        cache.get("array")
    hits = {key: count for key, _, count in cache.residents()}[b"array"]
    view = cache.get_numpy("array", 8, "f4")
    for i in range(7):
        cache.delete(f"{i}")
    cache.rehash()
    assert cache.stats.found_probes_mean == 1.0
    assert cache.get_numpy("array", 8, "f4").tolist() == list(range(8))
    with pytest.raises(UsageError, match="stored as <f4"):
        cache.get_numpy("array", 8, "i4")
    assert {key: count for key, _, count in cache.residents()} == {b"array": hits}
    assert not view.valid() or view.tolist() == list(range(8))


def moving(path: str, seed: int, own: list[bytes]) -> None:
    """Take keys out, put them in again and rehash, for good, without a touch to others' keys."""
    cache, chance = SharedCache(path, create=False), random.Random(seed)
    while True:
        some = chance.sample(own, 64)
        for key in some:
            cache.delete(key)
        cache.rehash(slots=SLOTS // 8)
        for key in some:
            cache.set(key, key)


def forked(path: str, seed: int, own: list[bytes]) -> int:
    child = os.fork()
    if child == 0:
        try:
            moving(path, seed, own)
        finally:
            os._exit(3)
    return child


def end(child: int) -> None:
    os.kill(child, signal.SIGKILL)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL, "it had failed by itself"


def test_nobody_misses_a_key_or_meets_it_twice_while_it_is_moved(make):
    cache, keys = filled(make)
    churn(cache, keys, 10_000, random.Random(3), len(keys))
    ours, theirs = keys[::2], keys[1::2]
    children = [forked(cache.path, seed, theirs[seed::2]) for seed in range(2)]
    try:
        until = time.monotonic() + 1.5
        rounds = 0
        while time.monotonic() < until or rounds < 5:
            assert cache.get_many(ours) == ours
            assert [cache.get(key) for key in ours[:300]] == ours[:300]
            met = Counter(cache)
            assert [key for key in ours if met[key] != 1] == []
            for key in ours[:300]:
                cache.set(key, key)
            rounds += 1
    finally:
        for child in children:
            end(child)
    assert cache.get_many(ours) == ours


def test_movers_killed_at_any_moment_leave_one_copy_of_every_key(make):
    cache, keys = filled(make)
    churn(cache, keys, 10_000, random.Random(4), len(keys))
    ours, theirs, chance = keys[::2], keys[1::2], random.Random(5)
    for kill in range(25):
        child = forked(cache.path, kill, list(theirs))
        time.sleep(chance.random() * 0.02)
        end(child)
        assert cache.get_many(ours) == ours
    for key in ours:
        cache.set(key, b"new " + key)
        assert cache.get(key) == b"new " + key
    for key in ours[::2]:
        assert cache.delete(key)
        assert cache.get(key) is None
        assert not cache.delete(key)
    assert cache.get_many(ours[1::2]) == [b"new " + key for key in ours[1::2]]
    for key in list(cache):
        cache.delete(key)
    assert list(cache) == []
