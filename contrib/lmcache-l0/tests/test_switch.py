"""The switch in the header: off is off for every process at once, and nothing is stale when it is on again."""

from __future__ import annotations

import os
import threading

import numpy as np
from lmcache_l0 import SharedCache


def test_off_every_read_misses_and_every_write_stores_nothing_in_every_process(make):
    cache = make()
    cache.set_many({"a": b"1", "b": b"2"})
    other = make(cache.path)
    child_done, parent_done = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            os.read(parent_done[0], 1)
            if cache.get("a") is None and "a" not in cache:
                cache.set("from the child", b"x")
                status = 0
        finally:
            os._exit(status)
    other.enabled = False
    os.write(parent_done[1], b"!")
    assert os.waitpid(child, 0)[1] == 0
    for fd in (*child_done, *parent_done):
        os.close(fd)
    out = np.full((2, 1), 9, np.uint8)
    assert cache.get("a") is None
    assert cache.get("a", b"default") == b"default"
    assert cache.get_many(["a", "b"]) == [None, None]
    assert cache.get_many_into(["a", "b"], out) == b"\0\0"
    assert out.tolist() == [[9], [9]]
    assert cache.view("a") is None
    assert cache.get_numpy("a", 1, "u1") is None
    assert cache.get_numpy("a", 1, "u1", snapshot=True) is None
    assert "a" not in cache
    assert list(cache.items()) == []
    cache.set("c", b"3")
    cache.set_many({"d": b"4"})
    cache.set_numpy("e", np.zeros(3))
    assert not cache.insert("f", b"5", cache.ticket("f"))
    assert sorted(cache) == [b"a", b"b"]
    cache.enabled = True
    assert other.get_many(["a", "b", "c", "d", "e", "f", "from the child"]) == [
        b"1",
        b"2",
        None,
        None,
        None,
        None,
        None,
    ]


def test_a_value_that_was_set_while_it_was_off_is_not_hidden_by_the_older_one(make):
    cache = make()
    cache.set_many({"a": b"old", "b": b"kept"})
    cache.enabled = False
    cache.set("a", b"new")
    cache.enabled = True
    assert cache.get_many(["a", "b"]) == [None, b"kept"]


def test_a_table_starts_on_unless_told_otherwise(make, folder):
    assert make().enabled
    cache = make(folder / "off", hash_slots=8, max_value_size=8, enabled=False)
    assert not cache.enabled
    assert not make(folder / "off").enabled  # who attaches changes nothing
    cache.enabled = True
    assert make(folder / "off").enabled


def test_the_switch_raced_against_readers_and_writers_tears_nothing(make):
    """Values are read whole or missed; once the switch is off for good, nothing is found by anybody."""
    cache = make(max_value_size=4096, hash_slots=64)
    over = threading.Event()
    failed: list[BaseException] = []

    def work(number: int) -> None:
        handle = SharedCache(cache.path)
        try:
            n = 0
            while not over.is_set():
                n += 1
                handle.set("k", bytes([n % 256]) * 4096)
                for value in (handle.get("k"), handle.get_many(["k"])[0]):
                    assert value is None or value == value[:1] * 4096
        except BaseException as error:  # noqa: BLE001 - told to the test below
            failed.append(error)
        finally:
            handle.close()

    threads = [threading.Thread(target=work, args=(i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    for _ in range(300):
        cache.enabled = not cache.enabled
        if not cache.enabled:
            assert cache.get("k") is None
    cache.enabled = False
    assert cache.get("k") is None
    over.set()
    for thread in threads:
        thread.join()
    assert not failed
