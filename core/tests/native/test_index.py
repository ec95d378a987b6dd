"""The pool's index in C, from Python: held against a dict, across processes, and over damaged memory."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import random
import struct
import subprocess
import sys
import threading
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import xxhash
from hypothesis import given as hypothesis_given
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from lmcache_core.native import native
from lmcache_core.pool.segment import Segment

if native is None:
    pytest.skip("the C extension is not in use", allow_module_level=True)

EPOCH, NAMESPACE, LAYOUT, NBYTES = 7, 5, 2, 6000
PAGE, SLOT, SERVING, INDEX = 4096, 8192, 8, 4096
MISS, HIT, CHANGED, DAMAGED = range(4)
NEVER, FIRST, ALWAYS = range(3)
EVICTED = 2


@dataclass
class Placed:
    """What the kernel's objects look like to the index."""

    key: bytes
    offset: int
    namespace: int = NAMESPACE
    layout_id: int = LAYOUT
    checksum: int | None = None


def key_of(number: int) -> bytes:
    return number.to_bytes(32, "little")


@dataclass
class Pool:
    """A region like a pool's: a page with the serving word, the index, and slots."""

    entries: int = 64
    slots: int = 16
    memory: mmap.mmap = field(init=False)
    index: Any = field(init=False)

    def __post_init__(self) -> None:
        marks = -(-2 * self.entries // PAGE) * PAGE
        self.entries_at = INDEX + marks
        self.data_offset = -(-(self.entries_at + 128 * self.entries) // PAGE) * PAGE
        self.memory = mmap.mmap(-1, self.data_offset + self.slots * SLOT)
        self.index = self.opened()
        self.serve(EPOCH)

    def opened(self, **changes: int) -> Any:
        numbers = {
            "index_offset": INDEX,
            "entries": self.entries,
            "data_offset": self.data_offset,
            "segment_bytes": len(self.memory),
            "serving_offset": SERVING,
        }
        return native.Index(self.memory, **(numbers | changes))

    def serve(self, epoch: int) -> None:
        struct.pack_into("<Q", self.memory, SERVING, epoch)

    def offset(self, slot: int) -> int:
        return self.data_offset + slot * SLOT

    def store(self, number: int, slot: int, *, known: bool = True) -> Placed:
        """Fill the slot with bytes that belong to this key, and publish it."""
        payload = random.Random(number).randbytes(NBYTES)
        self.memory[self.offset(slot) : self.offset(slot) + NBYTES] = payload
        checksum = xxhash.xxh3_64_intdigest(payload) if known else None
        placed = Placed(key_of(number), self.offset(slot), checksum=checksum)
        assert self.index.publish([placed], {LAYOUT: NBYTES}, 1000) == 1
        return placed

    def find(self, keys: Sequence[bytes], prefix: bool = False, **options: object) -> bytes | None:
        found: bytes | None = self.index.find(EPOCH, NAMESPACE, LAYOUT, keys, prefix, **options)
        return found

    def read(self, keys: list[bytes], *, prefix: bool = False, verify: int = NEVER, threads: int = 1) -> Targets:
        targets = Targets(len(keys))
        targets.statuses = self.index.read(
            EPOCH, NAMESPACE, LAYOUT, NBYTES, keys, targets.addresses, prefix, verify, threads
        )
        return targets


class Targets:
    """Private memory to read into, with bytes between the targets that nobody may touch."""

    GAP = 64

    def __init__(self, count: int) -> None:
        step = NBYTES + self.GAP
        self.memory = bytearray(b"\xee" * (count * step + self.GAP))
        start = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))
        self.addresses = array("Q", [start + self.GAP + i * step for i in range(count)])
        self.statuses: bytes | None = None

    def __getitem__(self, at: int) -> bytes:
        start = self.GAP + at * (NBYTES + self.GAP)
        return bytes(self.memory[start : start + NBYTES])

    def gaps_are_whole(self) -> bool:
        step = NBYTES + self.GAP
        return all(
            set(self.memory[at : at + self.GAP]) == {0xEE} for at in range(0, len(self.memory) - self.GAP + 1, step)
        )


def payload_of(number: int) -> bytes:
    return random.Random(number).randbytes(NBYTES)


@pytest.fixture
def pool() -> Pool:
    return Pool()


# --- what is found ------------------------------------------------------------------------------------------


def test_what_is_published_is_found_under_its_namespace_and_layout_alone(pool: Pool) -> None:
    pool.store(1, 0)
    keys = [key_of(1), key_of(2)]
    assert pool.find(keys) == bytes([HIT, MISS])
    assert pool.index.find(EPOCH, NAMESPACE + 1, LAYOUT, keys, False) == bytes(2)
    assert pool.index.find(EPOCH, NAMESPACE, LAYOUT + 1, keys, False) == bytes(2)


def test_a_prefix_ends_at_its_first_miss(pool: Pool) -> None:
    for number in (1, 2, 4):
        pool.store(number, number)
    keys = [key_of(number) for number in (1, 2, 3, 4)]
    assert pool.find(keys, prefix=True) == bytes([HIT, HIT])
    assert pool.find(keys[2:], prefix=True) == b""
    assert pool.read(keys, prefix=True).statuses == bytes([HIT, HIT, MISS])
    assert pool.read(keys).statuses == bytes([HIT, HIT, MISS, HIT])


@pytest.mark.parametrize("count", [0, 1, 63, 64, 65, 200, 1024, 1025, 2049, 5000])
def test_keys_may_come_as_a_list_a_tuple_or_in_a_row(count: int) -> None:
    pool = Pool(entries=16384, slots=1)
    here = [Placed(key_of(number), pool.offset(0)) for number in range(0, count, 3)]
    assert pool.index.publish(here, {LAYOUT: NBYTES}, 1) == len(here)
    keys = [key_of(number) for number in range(count)]
    expected = bytes(number % 3 == 0 for number in range(count))
    row = b"".join(keys)
    for given in (keys, tuple(keys), row, bytearray(row), memoryview(row)):
        assert pool.find(given) == expected
        assert pool.find(given, mark=True) == expected


def test_nobody_is_answered_for_a_server_that_does_not_serve(pool: Pool) -> None:
    pool.store(1, 0)
    for serving in (0, EPOCH + 1):
        pool.serve(serving)
        assert pool.find([key_of(1)]) is None
        assert pool.read([key_of(1)]).statuses is None
    pool.serve(0)
    assert pool.index.find(0, NAMESPACE, LAYOUT, [key_of(1)], False) is None


# --- what is read -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("threads", [1, 4])
def test_a_read_brings_each_object_to_its_own_target_and_no_byte_beyond(threads: int) -> None:
    pool = Pool(entries=1024, slots=400)  # enough bytes that several threads are worth it
    for number in range(400):
        pool.store(number, number)
    numbers = random.Random(1).sample(range(500), 450)
    targets = pool.read([key_of(number) for number in numbers], threads=threads)
    assert targets.statuses == bytes(HIT if number < 400 else MISS for number in numbers)
    for at, number in enumerate(numbers):
        if number < 400:
            assert targets[at] == payload_of(number)
    assert targets.gaps_are_whole()


def test_damage_is_found_always_or_the_first_time_or_never(pool: Pool) -> None:
    placed = pool.store(1, 0)
    assert pool.read([placed.key], verify=FIRST).statuses == bytes([HIT])
    pool.memory[placed.offset + NBYTES - 1] ^= 1
    assert pool.read([placed.key], verify=NEVER).statuses == bytes([HIT])
    assert pool.read([placed.key], verify=FIRST).statuses == bytes([HIT])  # this incarnation was seen whole
    assert pool.read([placed.key], verify=ALWAYS).statuses == bytes([DAMAGED])
    # A new incarnation, and another process (another Index), have seen nothing yet.
    assert pool.opened().read(
        EPOCH, NAMESPACE, LAYOUT, NBYTES, [placed.key], Targets(1).addresses, False, FIRST, 1
    ) == bytes([DAMAGED])
    assert pool.index.publish([placed], {LAYOUT: NBYTES}, 1001) == 1
    assert pool.read([placed.key], verify=FIRST).statuses == bytes([DAMAGED])


def test_an_object_without_a_checksum_is_no_hit_for_who_checks_always(pool: Pool) -> None:
    placed = pool.store(1, 0, known=False)
    assert pool.read([placed.key], verify=ALWAYS).statuses == bytes([MISS])
    assert pool.read([placed.key], verify=NEVER).statuses == bytes([HIT])


def test_an_object_of_another_size_is_a_miss(pool: Pool) -> None:
    placed = pool.store(1, 0)
    targets = Targets(1)
    for nbytes in (1, NBYTES - 1, NBYTES + 1, 1 << 40, (1 << 64) - 1):
        assert pool.index.read(
            EPOCH, NAMESPACE, LAYOUT, nbytes, [placed.key], targets.addresses, False, NEVER, 1
        ) == bytes([MISS])
    assert set(targets.memory) == {0xEE}


# --- what leaves --------------------------------------------------------------------------------------------


def test_what_is_removed_is_a_miss_and_its_tombstone_says_why(pool: Pool) -> None:
    placed = pool.store(1, 0)
    before = pool.index.entry(NAMESPACE, placed.key)
    assert pool.index.remove([placed], EVICTED, 1234) == 1
    assert pool.find([placed.key]) == bytes([MISS])
    tombstone = pool.index.entry(NAMESPACE, placed.key)
    assert (tombstone["state"], tombstone["reason"], tombstone["gone_s"]) == ("gone", EVICTED, 1234)
    assert tombstone["generation"] > before["generation"]
    assert pool.index.remove([placed], EVICTED, 1235) == 0
    assert (pool.index.ready, pool.index.gone) == (0, 1)


def test_removing_an_old_incarnation_leaves_the_new_one(pool: Pool) -> None:
    old = pool.store(1, 0)
    new = pool.store(1, 1)
    assert pool.index.remove([old], EVICTED, 1) == 0
    assert pool.read([new.key]).statuses == bytes([HIT])
    assert pool.index.entry(NAMESPACE, new.key)["offset"] == new.offset
    assert pool.index.ready == 1


def test_objects_beyond_a_full_window_are_left_out_and_counted(pool: Pool) -> None:
    objects = [Placed(key_of(number), pool.offset(0)) for number in range(100)]
    assert pool.index.publish(objects, {LAYOUT: NBYTES}, 1) == 64
    found = pool.find([item.key for item in objects])
    assert found is not None
    assert found.count(HIT) == 64
    assert pool.index.remove(objects, EVICTED, 2) == 64
    assert pool.index.publish(objects[36:], {LAYOUT: NBYTES}, 3) == 64


def test_tombstones_stay_few_though_nobody_tidies() -> None:
    pool = Pool(entries=1024, slots=1)
    objects = [Placed(key_of(number), pool.offset(0)) for number in range(40 * 512)]
    pool.index.publish(objects[:512], {LAYOUT: NBYTES}, 1)
    for at in range(512, len(objects), 64):
        assert pool.index.remove(objects[at - 512 : at - 448], EVICTED, 1) == 64
        assert pool.index.publish(objects[at : at + 64], {LAYOUT: NBYTES}, 1) == 64
        assert pool.index.gone <= 1024 / 4
    assert pool.find([item.key for item in objects[-512:]]) == bytes([HIT]) * 512


def test_no_entry_is_moved_while_places_are_kept() -> None:
    pool = Pool(entries=1024, slots=1)
    objects = [Placed(key_of(number), pool.offset(0)) for number in range(512)]
    pool.index.publish(objects, {LAYOUT: NBYTES}, 1)
    pool.index.keeps_places = True
    stay, go = objects[:64], objects[64:]
    places = [pool.index.entry(NAMESPACE, item.key)["place"] for item in stay]
    assert pool.index.remove(go, EVICTED, 1) == len(go)  # far more than an eighth: it would tidy by itself
    assert pool.index.tidy(1024) == 0
    assert pool.index.gone == len(go)
    assert [pool.index.entry(NAMESPACE, item.key)["place"] for item in stay] == places
    pool.index.keeps_places = False
    assert pool.index.tidy(1024) > 0
    assert pool.index.gone < len(go)
    assert pool.find([item.key for item in stay]) == bytes([HIT]) * len(stay)


# --- marks --------------------------------------------------------------------------------------------------


def test_marks_name_what_was_used_ends_of_prompts_first_and_once() -> None:
    pool = Pool(entries=1024, slots=1)
    keys = [key_of(number) for number in range(300)]
    pool.index.publish([Placed(key, pool.offset(0)) for key in keys], {LAYOUT: NBYTES}, 1)
    assert pool.find(keys[:100]) == bytes([HIT]) * 100
    assert pool.index.take_marks(1024) == []  # a look alone is no use
    pool.find(keys[:200], mark=True)
    pool.read([keys[250]])
    taken = pool.index.take_marks(1024)
    assert taken[:-2] == [(NAMESPACE, key) for key in reversed(keys[1:200])]
    assert sorted(taken[-2:]) == sorted((NAMESPACE, key) for key in (keys[0], keys[250]))
    assert pool.index.take_marks(1024) == []


def test_marks_are_found_by_a_walk_in_steps() -> None:
    pool = Pool(entries=1024, slots=1)
    keys = [key_of(number) for number in range(300)]
    pool.index.publish([Placed(key, pool.offset(0)) for key in keys], {LAYOUT: NBYTES}, 1)
    pool.find(keys, mark=True)
    taken: list[tuple[int, bytes]] = []
    for _ in range(0, 1024, 10):
        taken += pool.index.take_marks(10)
    assert sorted(taken) == sorted((NAMESPACE, key) for key in keys)


def test_marks_beyond_what_was_asked_for_are_kept_for_the_next_look() -> None:
    pool = Pool(entries=1024, slots=1)
    keys = [key_of(number) for number in range(300)]
    pool.index.publish([Placed(key, pool.offset(0)) for key in keys], {LAYOUT: NBYTES}, 1)
    pool.find(keys, mark=True)
    steps = [pool.index.take_marks(1024, 70) for _ in range(6)]
    assert [len(step) for step in steps] == [70, 70, 70, 70, 20, 0]
    assert sorted(pair for step in steps for pair in step) == sorted((NAMESPACE, key) for key in keys)
    with pytest.raises(ValueError, match="keys_max"):
        pool.index.take_marks(1024, -1)


def test_the_mark_of_an_object_that_left_is_not_its_successors(pool: Pool) -> None:
    placed = pool.store(1, 0)
    pool.find([placed.key], mark=True)
    pool.index.remove([placed], EVICTED, 1)
    pool.store(2, 0)
    assert pool.index.take_marks(64) == []


# --- misuse -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ([key_of(1), b"short"], "key 1 is 5 bytes long, not 32"),
        ([key_of(1), "text"], "key 1 is a str, not 32 bytes"),
        ((key_of(1), bytearray(32)), "key 1 is a bytearray"),
        (bytes(33), "33 bytes, and 32 bytes make a key"),
    ],
)
def test_wrong_keys_are_named_by_their_place(pool: Pool, keys: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        pool.find(keys)
    with pytest.raises(ValueError, match=words):
        pool.read(keys)


def test_wrong_numbers_and_targets_are_refused(pool: Pool) -> None:
    index, key = pool.index, key_of(1)
    targets = Targets(1).addresses
    with pytest.raises(ValueError, match="give one 8-byte address for each"):
        index.read(EPOCH, NAMESPACE, LAYOUT, NBYTES, [key, key], targets, False, 0, 1)
    with pytest.raises(ValueError, match="target 0 is address 0"):
        index.read(EPOCH, NAMESPACE, LAYOUT, NBYTES, [key], array("Q", [0]), False, 0, 1)
    with pytest.raises(ValueError, match="nbytes is 0"):
        index.read(EPOCH, NAMESPACE, LAYOUT, 0, [key], targets, False, 0, 1)
    with pytest.raises(ValueError, match="verify must be"):
        index.read(EPOCH, NAMESPACE, LAYOUT, NBYTES, [key], targets, False, 3, 1)
    with pytest.raises(ValueError, match="epoch is -1 and must be an int from 0"):
        index.find(-1, NAMESPACE, LAYOUT, [key], False)
    with pytest.raises(TypeError, match="namespace is 'x'"):
        index.find(EPOCH, "x", LAYOUT, [key], False)
    with pytest.raises(TypeError, match="find has no argument 'keyz'"):
        index.find(EPOCH, NAMESPACE, LAYOUT, keyz=[key])
    with pytest.raises(TypeError, match="find needs its argument 'prefix'"):
        index.find(EPOCH, NAMESPACE, LAYOUT, [key])
    with pytest.raises(TypeError, match="give a list or tuple of bytes, or one buffer"):
        index.find(EPOCH, NAMESPACE, LAYOUT, 3, False)


def test_the_writer_refuses_places_outside_the_data(pool: Pool) -> None:
    end = len(pool.memory)
    for offset in (0, pool.data_offset - SLOT, pool.data_offset + 8, end, end - PAGE, (1 << 64) - PAGE):
        with pytest.raises(ValueError, match="is not inside the pool's data"):
            pool.index.publish([Placed(key_of(1), offset)], {LAYOUT: NBYTES}, 1)
    with pytest.raises(ValueError, match="layout 2 is not in nbytes_by_layout"):
        pool.index.publish([Placed(key_of(1), pool.data_offset)], {3: NBYTES}, 1)
    assert pool.index.ready == 0


@pytest.mark.parametrize(
    "changes",
    [
        {"entries": 63},
        {"entries": 96},
        {"entries": 1 << 62},
        {"entries": 4096},
        {"index_offset": 4097},
        {"data_offset": 1 << 40},
        {"segment_bytes": 4096},
        {"serving_offset": 4090},
        {"serving_offset": 4096},
        {"serving_offset": (1 << 64) - 8},
        {"index_offset": (1 << 64) - 4096},
    ],
)
def test_a_geometry_that_does_not_fit_the_memory_is_refused(pool: Pool, changes: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="index_offset"):
        pool.opened(**changes)


def test_a_closed_index_answers_nobody_and_lets_the_memory_go(pool: Pool) -> None:
    pool.index.close()
    pool.index.close()
    for call in (lambda: pool.find([key_of(1)]), lambda: pool.index.tidy(1), lambda: pool.store(1, 0)):
        with pytest.raises(ValueError, match="the index is closed"):
            call()
    pool.memory.close()  # BufferError while anybody holds it


def test_closing_under_a_reader_waits_for_it() -> None:
    pool = Pool(entries=1024, slots=512)
    for number in range(512):
        pool.store(number, number)
    keys = [key_of(number) for number in range(512)]
    started = threading.Event()
    seen: list[Targets] = []

    def reads() -> None:
        with contextlib.suppress(ValueError):  # closed between two reads
            while True:
                started.set()
                seen.append(pool.read(keys))

    thread = threading.Thread(target=reads)
    thread.start()
    started.wait(60)
    while not seen:
        pass
    pool.index.close()
    thread.join(60)
    assert not thread.is_alive()
    assert all(targets.statuses == bytes([HIT]) * 512 for targets in seen)
    pool.memory.close()


# --- against a dict -----------------------------------------------------------------------------------------


def test_an_object_stored_again_in_its_slot_is_told_from_the_one_before_wherever_its_entry_stands() -> None:
    pool = Pool()
    first, second, ours = _of_one_home(pool, 3)
    one = pool.store(first, 0)
    pool.index.remove([pool.store(second, 1)], EVICTED, 1000)
    was = pool.store(ours, 2)
    place = pool.index.entry(NAMESPACE, was.key)["place"]
    before = _seen(pool, was)
    assert before != 0
    assert _seen(pool, was) == before
    pool.index.remove([one, was], EVICTED, 1000)
    again = pool.store(ours, 2)  # nearer to its home, in an entry that has been changed as often
    assert again.offset == was.offset
    assert pool.index.entry(NAMESPACE, again.key)["place"] != place
    assert _seen(pool, again) not in (0, before)


def _of_one_home(pool: Pool, count: int) -> list[int]:
    """Numbers of keys that a probe begins to look for at the same entry."""
    by_home: dict[int, list[int]] = {}
    for number in range(10_000):
        placed = pool.store(number, 0)
        home = pool.index.entry(NAMESPACE, placed.key)["home"]
        pool.index.remove([placed], 0, 0)
        same = by_home.setdefault(home, [])
        same.append(number)
        if len(same) == count:
            pool.__post_init__()  # as new
            return same
    raise AssertionError("no keys share a home")


def _seen(pool: Pool, placed: Placed) -> int:
    """What a reader in place notes of an object."""
    (number,) = array("Q", pool.index.generations(NAMESPACE, LAYOUT, [placed.key], array("Q", [placed.offset])))
    return number


class IndexMachine(RuleBasedStateMachine):
    """Any order of changes, in a table that gets overfull, against a dict. A second mapping of the same memory, with
    the reader's half only, must agree at every step."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = Pool(entries=64, slots=8)
        self.reader = self.pool.opened()
        self.there: dict[bytes, Placed] = {}
        self.generations: dict[int, int] = {}

    numbers = st.integers(0, 90)

    @rule(numbers=st.lists(numbers, max_size=40, unique=True), slot=st.integers(0, 7))
    def publish(self, numbers: list[int], slot: int) -> None:
        objects = [Placed(key_of(number), self.pool.offset(slot)) for number in numbers]
        published = self.pool.index.publish(objects, {LAYOUT: NBYTES}, 1)
        found = self.pool.find([item.key for item in objects])
        assert found is not None
        assert found.count(HIT) == published
        for item, hit in zip(objects, found, strict=True):
            # Only what had no entry before may be left without one.
            assert hit or item.key not in self.there
            if hit:
                self.there[item.key] = item
        assert len(self.there) <= 64

    @rule(numbers=st.lists(numbers, max_size=40, unique=True), reason=st.integers(1, 14))
    def remove(self, numbers: list[int], reason: int) -> None:
        keys = [key_of(number) for number in numbers]
        objects = [self.there.get(key) or Placed(key, self.pool.offset(0)) for key in keys]
        expected = sum(key in self.there for key in keys)
        assert self.pool.index.remove(objects, reason, 2) == expected
        for key in keys:
            self.there.pop(key, None)

    @rule(entries=st.integers(0, 200))
    def tidy(self, entries: int) -> None:
        self.pool.index.tidy(entries)

    @rule(numbers=st.lists(numbers, max_size=20, unique=True))
    def use(self, numbers: list[int]) -> None:
        self.pool.index.take_marks(64)
        keys = [key_of(number) for number in numbers]
        self.pool.find(keys, mark=True)
        assert sorted(self.pool.index.take_marks(64)) == sorted((NAMESPACE, key) for key in keys if key in self.there)

    @precondition(lambda self: self.there)
    @rule()
    def succeed(self) -> None:
        """Another writer goes on where this one stopped."""
        self.pool.index = self.pool.opened()
        self.pool.index.recount()

    @invariant()
    def all_agree(self) -> None:
        keys = [key_of(number) for number in range(91)]
        expected = bytes(key in self.there for key in keys)
        assert self.pool.find(keys) == expected
        assert self.reader.find(EPOCH, NAMESPACE, LAYOUT, b"".join(keys), False) == expected
        assert self.pool.index.ready == len(self.there)
        for key, placed in self.there.items():
            assert self.pool.index.entry(NAMESPACE, key)["offset"] == placed.offset

    @invariant()
    def generations_only_grow(self) -> None:
        for at in range(64):
            (sequence,) = struct.unpack_from("<Q", self.pool.memory, self.pool.entries_at + 128 * at)
            assert sequence >> 2 >= self.generations.get(at, 0)
            self.generations[at] = sequence >> 2


TestIndexMachine = IndexMachine.TestCase
TestIndexMachine.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)


# --- other processes ----------------------------------------------------------------------------------------


def in_a_child(check: Any) -> int:
    """Run `check` after a fork; the exit status says whether it held."""
    child = os.fork()
    if child == 0:
        try:
            os._exit(0 if check() else 1)
        finally:
            os._exit(2)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_a_forked_process_reads_what_its_parent_publishes_later(pool: Pool) -> None:
    receiver, sender = os.pipe()
    keys = [key_of(number) for number in range(10)]

    def check() -> bool:
        os.read(receiver, 1)
        targets = pool.read(keys, verify=ALWAYS)
        return targets.statuses == bytes([HIT]) * 10 and all(targets[i] == payload_of(i) for i in range(10))

    child = os.fork()
    if child == 0:
        try:
            os._exit(0 if check() else 1)
        finally:
            os._exit(2)
    for number in range(10):
        pool.store(number, number)
    os.write(sender, b"!")
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    os.close(receiver)
    os.close(sender)


def test_marks_of_another_process_reach_the_writer(pool: Pool) -> None:
    placed = [pool.store(number, number) for number in range(3)]
    keys = [item.key for item in placed]
    assert in_a_child(lambda: pool.read(keys).statuses == bytes([HIT]) * 3) == 0
    assert pool.index.take_marks(64) == [(NAMESPACE, key) for key in reversed(keys)]


ATTACHER = """
import ctypes, sys
from array import array
from pathlib import Path
from lmcache_core._native import Index
from lmcache_core.pool.segment import Segment

segment = Segment.attach_name(sys.argv[1], shm_dir=Path(sys.argv[2]))
index = Index(segment.buffer, **segment.index_numbers)
memory = bytearray(4 * 4096)
start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
targets = array("Q", [start + 4096 * i for i in range(4)])
keys = [number.to_bytes(32, "little") for number in range(4)]
sys.stdout.write(index.read(3, 5, 2, 4096, keys, targets, False, 2, 1).hex() + " " + bytes(memory[::4096]).hex())
"""


def test_a_process_that_attaches_to_the_pool_reads_what_the_owner_published(tmp_path: Path) -> None:
    name = f"index-{os.getpid()}"
    segment = Segment.create(name, 16 << 20, "shm", runtime_dir=tmp_path / "run", shm_dir=tmp_path)
    try:
        index = native.Index(segment.buffer, **segment.index_numbers)
        data = segment.info.data_offset
        objects = []
        for number in (0, 1, 3):
            segment.buffer[data + PAGE * number : data + PAGE * (number + 1)] = bytes([0x10 + number]) * PAGE
            objects.append(
                Placed(
                    key_of(number),
                    data + PAGE * number,
                    checksum=xxhash.xxh3_64_intdigest(bytes([0x10 + number]) * PAGE),
                )
            )
        assert index.publish(objects, {LAYOUT: PAGE}, 1) == 3
        segment.serve(3)
        done = subprocess.run(
            [sys.executable, "-c", ATTACHER, name, str(tmp_path)], capture_output=True, text=True, timeout=120
        )
        assert done.stdout == "01010001 10110013", done.stderr
        assert len(index.take_marks(index.entries)) == 3
        index.close()
    finally:
        segment.close()


# --- damaged memory -----------------------------------------------------------------------------------------

ENTRY = struct.Struct("<16Q")


def spoil_with_noise(pool: Pool, chance: random.Random) -> None:
    pool.memory[INDEX : pool.data_offset] = chance.randbytes(pool.data_offset - INDEX)


def spoil_bits(pool: Pool, chance: random.Random) -> None:
    for number in range(16):
        pool.store(number, number)
    for _ in range(chance.randrange(300)):
        pool.memory[chance.randrange(INDEX, pool.data_offset)] ^= 1 << chance.randrange(8)


def spoil_by_design(pool: Pool, chance: random.Random) -> None:
    """Entries that nearly make sense, with places at the borders of the data."""
    end = len(pool.memory)
    borders = [0, PAGE, pool.data_offset - PAGE, pool.data_offset, end - NBYTES, end - PAGE, end, (1 << 64) - PAGE]
    borders += [pool.data_offset + 8, end - SLOT, (1 << 63)]
    lengths = [0, 1, NBYTES, NBYTES, NBYTES + 1, end, (1 << 64) - 1]
    one_key, one_state = chance.random() < 0.3, chance.choice([None, None, 1, 2, 3])
    for at in range(pool.entries):
        words = struct.unpack("<4Q", key_of(3 if one_key else chance.randrange(100)))
        state = chance.randrange(4) if one_state is None else one_state
        sequence = chance.choice([0, 1, 5, (1 << 62) - 1]) << 2 | state
        entry = ENTRY.pack(
            *(sequence, *words, NAMESPACE, chance.choice(borders), LAYOUT, chance.choice(lengths)),
            *(chance.getrandbits(64), chance.getrandbits(1), 1, 2, 3, 0, 0),
        )
        pool.memory[pool.entries_at + ENTRY.size * at : pool.entries_at + ENTRY.size * (at + 1)] = entry


@pytest.mark.parametrize("spoil", [spoil_with_noise, spoil_bits, spoil_by_design])
def test_whatever_stands_in_the_index_nobody_crashes_or_leaves_the_data(
    spoil: Callable[[Any, random.Random], object],
) -> None:
    keys = [key_of(number) for number in range(100)]
    for seed in range(40):
        chance = random.Random(seed)
        pool = Pool()
        spoil(pool, chance)
        before = pool.memory[pool.data_offset :]
        allowed = {before[at : at + NBYTES] for at in range(0, len(before), PAGE)}
        for _ in range(2):
            targets = pool.read(keys, prefix=chance.random() < 0.3, verify=chance.randrange(3), threads=2)
            assert targets.statuses is not None
            assert len(targets.statuses) <= len(keys)
            assert targets.gaps_are_whole()
            for at, status in enumerate(targets.statuses):
                assert status != HIT or targets[at] in allowed
            assert len(pool.find(keys) or b"") == len(keys)
            pool.index.recount()
            pool.index.take_marks(pool.entries)
            objects = [Placed(key, pool.offset(chance.randrange(16))) for key in chance.sample(keys, 50)]
            pool.index.publish(objects, {LAYOUT: NBYTES}, 1)
            pool.index.remove(objects[::2], EVICTED, 2)
            pool.index.tidy(chance.randrange(200))
            for key in keys:
                pool.index.entry(NAMESPACE, key)
        assert pool.memory[pool.data_offset :] == before
        # The serving word and what else stands before the index is nobody's to change.
        assert pool.memory[:INDEX] == struct.pack("<QQ", 0, EPOCH) + bytes(INDEX - 16)


# --- what a reader counts -------------------------------------------------------------------------------------


def _counts(pool: Pool, offset: int = 256) -> tuple[int, ...]:
    return struct.unpack_from("7Q", pool.memory, offset)


def test_what_is_found_and_read_is_counted_where_it_is_to_be(pool: Pool) -> None:
    for number in range(3):
        pool.store(number, number)
    keys = [key_of(number) for number in range(3)]
    find = pool.index.find
    find(EPOCH, NAMESPACE, LAYOUT, keys, True, False, 1)  # nobody has said where
    assert _counts(pool) == (0,) * 7
    pool.index.count_in(256)
    find(EPOCH, NAMESPACE, LAYOUT, keys, True)
    find(EPOCH, NAMESPACE, LAYOUT, keys, True, True)
    assert _counts(pool)[:2] == (0, 0)
    find(EPOCH, NAMESPACE, LAYOUT, keys, True, False, 1)
    find(EPOCH, NAMESPACE, LAYOUT, [*keys, key_of(9)], True, False, 1)  # the server is asked for the last
    find(EPOCH, NAMESPACE, LAYOUT, [*keys, key_of(9)], False, counts=2)  # and for all of these
    find(EPOCH, NAMESPACE, LAYOUT, keys, False, counts=2)
    find(EPOCH, NAMESPACE, LAYOUT, [key_of(9)], False, counts=1)
    assert _counts(pool)[:2] == (2, 9)
    assert _counts(pool)[3:] == (0, 0, 0, 0)
    targets = (ctypes.c_ubyte * (4 * NBYTES))()
    addresses = array("Q", [ctypes.addressof(targets) + at * NBYTES for at in range(4)])
    pool.index.read(EPOCH, NAMESPACE, LAYOUT, NBYTES, [*keys, key_of(9)], addresses, True, NEVER, 1)
    pool.index.count_read(2, 10)
    reads, hits, nbytes, ns = _counts(pool)[3:]
    assert (reads, hits, nbytes) == (2, 5, 3 * NBYTES + 20)
    assert ns > 0
    pool.index.count_in(None)
    find(EPOCH, NAMESPACE, LAYOUT, keys, True, False, 1)
    assert _counts(pool)[1] == 9


def test_amounts_are_added_all_or_none(pool: Pool) -> None:
    pool.index.count({1: 5})  # nobody has said where
    pool.index.count_in(256)
    pool.index.count({1: 5, 6: 2**40, 2: 0})
    pool.index.count({1: 2})
    for wrong in ({1: 1, 16: 1}, {1: 1, 2: -1}, {-1: 1}, {1: 1, 2: 2**64}, {1: 1, "calls": 1}, [(1, 1)]):
        with pytest.raises((ValueError, TypeError, OverflowError)):
            pool.index.count(wrong)
    assert _counts(pool) == (0, 7, 0, 0, 0, 0, 2**40)


def test_of_small_lookups_one_in_sixteen_is_timed_for_all(pool: Pool) -> None:
    pool.store(0, 0)
    pool.index.count_in(256)
    spent = []
    for _ in range(32):
        pool.index.find(EPOCH, NAMESPACE, LAYOUT, [key_of(0)], True, False, 1)
        spent.append(_counts(pool)[2])
    assert spent[0] > 0
    assert len(set(spent)) == 2  # the first and the seventeenth
    assert all(each % 16 == 0 for each in spent)


@pytest.mark.parametrize("offset", [1, INDEX - 120, INDEX, 1 << 63])
def test_a_line_of_counts_stands_in_front_of_the_index(pool: Pool, offset: int) -> None:
    with pytest.raises(ValueError, match="no place for a line of counts"):
        pool.index.count_in(offset)
    with pytest.raises(ValueError, match="counts must be"):
        pool.index.find(EPOCH, NAMESPACE, LAYOUT, [key_of(0)], True, False, 3)
    pool.index.count_in(INDEX - 128)
    pool.index.close()
    with pytest.raises(ValueError, match="closed"):
        pool.index.count_in(INDEX - 128)


# --- a filter of what is there ------------------------------------------------------------------------------

_STEPS = st.lists(st.tuples(st.integers(0, 40), st.booleans()), max_size=60)


def _in_digest(bits: bytes, key: bytes, namespace: int = NAMESPACE) -> bool:
    """As the contract of `Index.digest` says it, for whoever has the bits alone."""
    digest = xxhash.xxh3_64_intdigest(key + struct.pack("<Q", namespace))
    block = (digest >> 45) % (len(bits) // 64) * 64
    places = [digest >> 9 * i & 511 for i in range(5)]
    return all(bits[block + (place >> 3)] >> (place & 7) & 1 for place in places)


@hypothesis_given(_STEPS, st.sampled_from([64, 256, 4096]))
def test_a_digest_has_every_ready_object_whatever_was_stored_and_removed(
    steps: list[tuple[int, bool]], nbytes: int
) -> None:
    pool, there = Pool(slots=41), {}
    for number, stored in steps:
        if stored and number not in there:
            there[number] = pool.store(number, number)
        elif not stored and number in there:
            assert pool.index.remove([there.pop(number)], EVICTED, 1000) == 1
    bits = bytearray(b"\xff" * nbytes)
    assert pool.index.digest(bits) == len(there)
    assert all(_in_digest(bits, key_of(number)) for number in there)
    assert bool(there) == any(bits), "what was removed leaves nothing behind"


def test_a_digest_with_sixteen_bits_an_object_is_wrong_for_fewer_than_one_key_in_fifty() -> None:
    pool = Pool(entries=1024, slots=256)
    for number in range(256):
        pool.store(number, number)
    bits = bytearray(512)
    pool.index.digest(bits)
    assert sum(_in_digest(bits, key_of(number)) for number in range(10_000, 15_000)) < 100


@pytest.mark.parametrize("nbytes", [0, 1, 63, 65, 192])
def test_a_digest_takes_blocks_to_a_power_of_two(pool: Pool, nbytes: int) -> None:
    with pytest.raises(ValueError, match="power of two"):
        pool.index.digest(bytearray(nbytes))
    with pytest.raises(BufferError):
        pool.index.digest(bytes(64))
    pool.index.close()
    with pytest.raises(ValueError, match="closed"):
        pool.index.digest(bytearray(64))
