"""What one process sees: keys, values, batches, iteration."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from lmcache_l0 import SharedCache
from lmcache_l0.errors import TableFullError, TableLoadWarning, UsageError, ValueTooLargeError


def test_a_value_is_read_as_it_was_written(make):
    cache = make()
    for n in range(257):
        cache.set("k", bytes(range(256))[:n])
        assert cache.get("k") == bytes(range(256))[:n]


def test_values_come_from_anything_with_bytes(make):
    cache = make()
    for value in (b"abc", bytearray(b"abc"), memoryview(b"xabcx")[1:4], np.frombuffer(b"abc", np.uint8)):
        cache.set("k", value)
        assert cache.get("k") == b"abc"
    with pytest.raises(TypeError):
        cache.set("k", "text")


def test_str_and_bytes_of_one_spelling_are_one_key(make):
    cache = make()
    cache.set("naïve", b"1")
    assert cache.get("naïve".encode()) == b"1"
    assert list(cache) == ["naïve".encode()]


def test_keys_of_every_allowed_length_are_told_apart(make):
    cache = make(hash_slots=1024)
    keys = [b"a" * n for n in range(1, 257)] + [b"a" * n + b"b" for n in range(256)]
    cache.set_many([(key, key[-8:] + str(len(key)).encode()) for key in keys])
    assert [cache.get(key) for key in keys] == [key[-8:] + str(len(key)).encode() for key in keys]


@pytest.mark.parametrize("key", [b"", "", b"x" * 257, "ü" * 129])
def test_a_key_of_a_wrong_length_is_refused_everywhere(make, key):
    cache = make()
    for call in (
        lambda: cache.get(key),
        lambda: cache.set(key, b""),
        lambda: cache.delete(key),
        lambda: cache.get_many([key]),
        lambda: cache.set_many([(key, b"")]),
        lambda: key in cache,
        lambda: cache.view(key),
    ):
        with pytest.raises(UsageError, match="1 to 256"):
            call()


def test_a_key_that_is_no_string_is_refused(make):
    with pytest.raises(UsageError, match="str or bytes, not int"):
        make().get(7)


def test_a_miss_is_a_value(make):
    cache = make()
    assert cache.get("k") is None
    assert cache.get("k", 5) == 5
    assert cache.get_numpy("k", 3, "f4") is None
    assert cache.view("k") is None
    assert cache.delete("k") is False
    assert "k" not in cache
    with pytest.raises(KeyError):
        cache["k"]
    with pytest.raises(KeyError):
        del cache["k"]


def test_a_value_that_is_too_large_is_refused_and_changes_nothing(make):
    cache = make()
    cache.set("k", b"old")
    with pytest.raises(ValueTooLargeError, match="a value of 257 bytes, and this table takes 256"):
        cache.set("k", b"x" * 257)
    with pytest.raises(ValueTooLargeError):
        cache.set_many({"k": b"x" * 257})
    assert cache.get("k") == b"old"


def test_batches_answer_what_single_calls_answer(make):
    cache = make(hash_slots=8192, max_value_size=64)
    items = {f"key {i}": bytes([i % 251]) * (i % 65) for i in range(5000)}
    assert cache.set_many(items) == 5000
    keys = [*items, "absent", *items]
    assert cache.get_many(keys) == [cache.get(key) for key in keys]
    assert cache.get_many(iter(["key 7", "absent"])) == [items["key 7"], None]
    assert cache.get_many([]) == []
    assert dict(cache.items()) == {key.encode(): value for key, value in items.items()}


def test_a_batch_larger_than_a_release_of_the_gil_is_whole(make):
    cache = make(hash_slots=64, max_value_size=64 << 10)
    items = {f"key {i}": bytes([i]) * (60000 + i) for i in range(40)}
    cache.set_many(items)
    assert cache.get_many(list(items)) == list(items.values())
    assert cache.get("key 3") == items["key 3"]


def test_rows_are_filled_where_the_key_is_there_and_left_alone_where_not(make):
    cache = make()
    out = np.full((3, 4), -1, np.float32)
    cache.set_numpy("a", np.arange(4, dtype=np.float32))
    cache.set_numpy("c", np.arange(4, 8, dtype=np.float32))
    assert cache.get_many_into(["a", "b", "c"], out) == b"\1\0\1"
    assert out.tolist() == [[0, 1, 2, 3], [-1] * 4, [4, 5, 6, 7]]
    with pytest.raises(UsageError, match="row of out has 8"):
        cache.get_many_into(["a"], np.empty(8, np.uint8))
    with pytest.raises(UsageError, match="one row"):
        cache.get_many_into(["a", "b"], np.empty(9, np.uint8))


def test_a_full_table_says_how_to_size_it(make):
    cache = make(hash_slots=4)
    with pytest.warns(TableLoadWarning):
        cache.set_many({f"{i}": b"x" for i in range(4)})
    with pytest.raises(TableFullError, match=r"4 of 4 slots are taken\. Create it anew with hash_slots=8"):
        cache.set("one more", b"x")
    cache.set("2", b"still writable")
    cache.delete("1")
    cache.set("one more", b"y")
    assert cache.get_many(["0", "1", "2", "3", "one more"]) == [b"x", None, b"still writable", b"x", b"y"]


def test_the_warning_comes_once_at_seventy_percent(make):
    cache = make(hash_slots=10)
    for i in range(6):
        cache.set(f"{i}", b"")
    with pytest.warns(TableLoadWarning, match="70% full"):
        cache.set("6", b"")
    cache.set("7", b"")  # would raise: warnings are errors here


def test_deletes_leave_probes_as_short_as_in_a_new_table(make):
    cache = make(hash_slots=1000, max_value_size=16)
    for generation in range(30):
        for i in range(600):
            cache.set(f"{generation}/{i}", b"v")
        for i in range(600):
            assert cache.delete(f"{generation}/{i}")
    found = cache.stats
    assert found.keys == 0
    assert found.miss_probes_mean == 1.0


def test_stats_count_what_is_there(make):
    cache = make(hash_slots=100)
    cache.set_many({f"key{i:02}": b"x" * i for i in range(50)})
    cache.get_many(["key01", "absent"])
    found = cache.stats
    assert (found.keys, found.load, found.key_bytes, found.value_bytes) == (50, 0.5, 250, sum(range(50)))
    assert found.file_bytes == Path(cache.path).stat().st_size
    assert 1 <= found.found_probes_mean <= found.found_probes_max
    assert found.found_probes_p99 <= found.found_probes_max
    assert (found.hits, found.misses, found.writers, found.claimed, found.locked) == (1, 1, 1, 0, 0)


def test_often_read_keys_are_counted_higher(make):
    cache = make()
    cache.set_many({"hot": b"", "cold": b""})
    for _ in range(20000):
        cache.get("hot")
    counted = {key: hits for key, _, hits in cache.residents()}
    assert 10000 < counted[b"hot"] < 40000
    assert counted[b"cold"] == 0
    cache.cool()
    assert {k: h for k, _, h in cache.residents()}[b"hot"] == counted[b"hot"] // 128 * 64


def test_an_insert_loses_to_whoever_came_in_between(make):
    cache = make()
    ticket = cache.ticket("k")
    assert cache.insert("k", b"1", ticket)
    assert not cache.insert("k", b"2", cache.ticket("k"))  # it is there
    cache.delete("k")
    stale = cache.ticket("k")
    cache.set("k", b"3")
    cache.delete("k")
    assert not cache.insert("k", b"old", stale)
    ticket = cache.ticket("k")
    cache.delete("k")  # of a key that is not there: still somebody's word that what was read before is old
    assert not cache.insert("k", b"old", ticket)
    assert cache.get("k") is None


def test_a_closed_table_says_so(make):
    cache = make()
    cache.close()
    cache.close()
    for call in (lambda: cache.get("k"), lambda: cache.set("k", b""), lambda: len(cache), lambda: cache.stats):
        with pytest.raises(UsageError, match="closed"):
            call()
    assert "closed" in repr(cache)


def test_clear_deletes_everything(make):
    cache = make()
    cache.set_many({f"{i}": b"" for i in range(40)})
    cache.clear()
    assert list(cache) == []
    assert len(cache) == 0


def test_the_package_offers_its_names_late():
    import lmcache_l0

    assert lmcache_l0.SharedCache is SharedCache
    with pytest.raises(AttributeError, match="has no attribute"):
        lmcache_l0.Nothing  # noqa: B018
