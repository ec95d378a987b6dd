"""L0 above the L1 of a real server in this process."""

from __future__ import annotations

import hashlib
import threading
from array import array

import pytest
from lmcache_l0 import SharedCache, TieredCache
from lmcache_l0.errors import ValueTooLargeError

from lmcache_core.client.results import Status
from lmcache_core.errors import UsageError


@pytest.fixture
def l0(make):
    return make(hash_slots=40, max_value_size=8192)


def test_what_is_read_twice_goes_up_and_is_served_without_the_server(server, client, l0):
    cache = TieredCache(l0, client)
    assert cache.get("k") is None
    assert cache.set("k", b"value") is Status.STORED
    assert len(l0) == 0
    assert [cache.get("k"), len(l0)] == [b"value", 0]
    assert [cache.get("k"), len(l0)] == [b"value", 1]
    assert l0.get("k") == b"value"
    server.stop()
    assert cache.get("k") == b"value"
    assert cache.get("another") is None


@pytest.mark.parametrize("n", [0, 1, 4096, 4097, 65536, 1 << 20])
def test_values_of_every_class_come_back_whole(client, l0, n):
    cache = TieredCache(l0, client, promote_after=1)
    value = bytes(i % 251 for i in range(n))
    assert cache.set(b"k", value) is Status.STORED
    assert cache.get("k") == value
    assert ("k" in l0) == (n <= 8192)
    assert cache.get("k") == value


def test_a_key_names_one_value_for_as_long_as_l1_has_it(client, l0):
    cache = TieredCache(l0, client, promote_after=1)
    cache.set("k", b"first")
    assert cache.get("k") == b"first"
    assert cache.set("k", b"second") is Status.EXISTS
    assert cache.set("k", b"x" * 5000) is Status.EXISTS  # of another class too
    assert cache.get("k") == b"first"


def test_a_value_that_l1_has_forgotten_is_replaced_in_l0_too(client, l0):
    cache = TieredCache(l0, client, promote_after=1)
    cache.set("k", b"old")
    assert cache.get("k") == b"old"
    client.clear()
    assert cache.set("k", b"new") is Status.STORED
    assert [cache.get("k"), l0.get("k")] == [b"new", b"new"]


def test_the_switch_turns_l0_off_for_every_process_and_never_leaves_it_wrong(client, l0):
    cache = TieredCache(l0, client, promote_after=1)
    other = TieredCache(SharedCache(l0.path), client, promote_after=1)
    cache.set("k", b"old")
    cache.get("k")
    other.enabled = False
    assert not cache.enabled
    client.clear()
    assert cache.get("k") is None
    cache.set("k", b"new")
    assert cache.get("k") == b"new"
    assert len(l0) == 0
    cache.enabled = True
    assert other.get("k") == b"new"
    assert l0.get("k") == b"new"
    other.l0.close()


def test_the_least_read_go_when_l0_fills_and_stay_in_l1(client, l0):
    cache = TieredCache(l0, client, promote_after=1, demote_at=0.5, demote_to=0.25)
    cache.set("hot", b"hot")
    cache.get("hot")
    for _ in range(5000):
        cache.get("hot")
    for i in range(60):
        cache.set(f"{i}", b"%d" % i)
        assert cache.get(f"{i}") == b"%d" % i
        assert len(l0) <= 20
    assert "hot" in l0
    assert [cache.get(f"{i}") for i in range(60)] == [b"%d" % i for i in range(60)]


def test_what_makes_no_sense_is_refused(client, l0):
    for wrong in (
        {"classes_bytes": ()},
        {"classes_bytes": (10, 5)},
        {"promote_after": 0},
        {"demote_at": 0.3, "demote_to": 0.4},
    ):
        with pytest.raises(UsageError):
            TieredCache(l0, client, **wrong)
    with pytest.raises(ValueTooLargeError, match="the largest class has 100"):
        TieredCache(l0, client, classes_bytes=(100,)).set("k", bytes(101))


def test_values_of_larger_items_are_stored_whole(client, l0):
    cache = TieredCache(l0, client, classes_bytes=(64, 1024))
    for key, items in (("small", 20), ("large", 200)):
        value = array("I", range(items))
        assert cache.set(key, value) is Status.STORED
        assert cache.get(key) == value.tobytes()
    with pytest.raises(ValueTooLargeError, match="a value of 1,028 bytes"):
        cache.set("larger", array("I", range(257)))


def test_without_a_server_everything_misses_and_nothing_is_stored(server, client, l0):
    server.stop()
    cache = TieredCache(l0, client)
    assert cache.set("k", b"v") is Status.UNREACHABLE
    assert cache.get("k") is None


def test_a_setter_that_dies_behind_the_store_leaves_nothing_old_above_it(client, l0, monkeypatch):
    """Whether it dies there or behind an EXISTS: what L0 gives is what L1 has."""

    class DiedError(Exception):
        pass

    cache = TieredCache(l0, client, promote_after=1)
    cache.set("k", b"old")
    assert cache.get("k") == b"old"
    assert l0.get("k") == b"old"
    client.clear()  # as an eviction would
    to_l1 = TieredCache._to_l1

    def and_die(self, *arguments):
        to_l1(self, *arguments)
        monkeypatch.setattr(TieredCache, "_take_out", lambda *_: None)
        raise DiedError

    with monkeypatch.context() as dying:
        dying.setattr(TieredCache, "_to_l1", and_die)
        with pytest.raises(DiedError):
            cache.set("k", b"new")
    monkeypatch.undo()
    assert l0.get("k") is None
    assert cache.get("k") == b"new"
    l0.set("k", b"old")  # left by a setter of an earlier version
    assert cache.set("k", b"third") is Status.EXISTS
    assert cache.get("k") == b"new"


def test_of_many_setters_of_one_key_in_two_classes_one_has_stored_it(server, l0):
    """Each with a client of its own, as processes have; in turns of 2."""
    for turn in range(60):
        gate = threading.Barrier(2)
        answers: dict[bytes, Status] = {}

        def run(value: bytes, turn: int = turn, gate: threading.Barrier = gate, answers=answers) -> None:
            with server.connect() as client:
                cache = TieredCache(l0, client)
                cache.get("connect first")
                gate.wait(60)
                answers[value] = cache.set(f"{turn}", value)

        values = (b"s" * 100, b"l" * 6000)
        threads = [threading.Thread(target=run, args=(value,)) for value in values]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        stored = [value for value, status in answers.items() if status is Status.STORED]
        assert len(stored) == 1, answers
        assert set(answers.values()) <= {Status.STORED, Status.BUSY, Status.EXISTS}
        with server.connect() as client:
            assert TieredCache(l0, client).get(f"{turn}") == stored[0]


def test_a_read_only_l0_is_read_and_never_promoted_into(client, l0):
    writer = TieredCache(l0, client, promote_after=1)
    writer.set("k", b"v")
    reader = TieredCache(SharedCache(l0.path, read_only=True), client, promote_after=1)
    assert reader.get("k") == b"v"
    assert "k" not in l0
    assert writer.get("k") == b"v"
    assert reader.get("k") == b"v"
    assert "k" in l0
    with pytest.raises(UsageError, match="attached read-only"):
        reader.set("k2", b"v")
    assert writer.get("k2") is None
    reader.l0.close()


def test_a_key_that_l0_cannot_hold_lives_in_l1(client, l0):
    cache = TieredCache(l0, client, promote_after=1)
    for key in ("x" * 257, b""):
        assert cache.set(key, b"v") is Status.STORED
        assert [cache.get(key), cache.get(key)] == [b"v", b"v"]
    assert len(l0) == 0


def test_an_object_that_was_evicted_from_under_its_record_can_be_set_again(client, l0):
    cache = TieredCache(l0, client, classes_bytes=(100, 1000, 10_000))
    cache.set("k", b"x" * 900)
    client.clear(cache.rooms[1])  # what eviction may do: the record stays, the object goes
    assert cache.get("k") is None
    assert cache.set("k", b"x" * 5000) is Status.FULL
    assert cache.set("k", b"y") is Status.STORED
    assert cache.get("k") == b"y"
    assert cache.set("k", b"z") is Status.EXISTS
    name = hashlib.sha256(b"k").digest()
    assert client.lookup([name], namespace=cache.rooms[0]).hits == 1
