"""Cut power and killed processes, at every call to the medium."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lmcache_block.errors import Errors
from lmcache_block.medium.format import BLOCK_BYTES, EDGE_BYTES, Superblock
from lmcache_block.medium.opening import superblock_of
from lmcache_block.medium.store import SHARDS, BlockStore, Written
from lmcache_block.settings import BlockSettings

from .cut_medium import CutMedium, PowerCutError

EXTENT_BYTES = 256 << 10
MEDIUM_BYTES = 2 * EDGE_BYTES + 3 * EXTENT_BYTES
SETTINGS = BlockSettings(path="/dev/never", extent_bytes=EXTENT_BYTES)  # type: ignore[arg-type]
ERRORS = Errors("cut", SETTINGS)
KEYS = [b"key %d" % number for number in range(5)]
SIZES = (0, 100, 4096, 5000, 40_000, 70_000)
NOTHING = b""


def soon() -> float:
    return time.monotonic() + 60


def opened(medium: CutMedium, **options: bool) -> BlockStore:
    store = BlockStore(medium, superblock_of(medium, SETTINGS, ERRORS), bounce_buffers=1, **options)
    store.recover()
    return store


def content(number: int, nbytes: int) -> bytes:
    """Another in each place, and never empty of meaning: a wrong one is seen."""
    return random.Random(number).randbytes(nbytes)


def store_all(store: BlockStore, objects: dict[bytes, bytes]) -> bool:
    """As one batch. False: the medium is full for one of them, and none is stored."""
    batch: list[tuple[bytes, Written]] = []
    for key, each in objects.items():
        place = store.reserve(len(each), soon())
        if place is None:
            for _, written in batch:
                store.give_back(written.place)
            return False
        (wrote,) = store.write([(place, [memoryview(each)])], soon())
        batch.append((key, wrote))
    assert store.publish(batch, soon()) == [None] * len(batch)
    return True


def loaded(store: BlockStore, key: bytes) -> bytes | None:
    """None: it is not there. An object whose bytes are another's is a fault here: nothing has damaged the medium."""
    with store.reading([key]) as (pinned,):
        if pinned is None:
            return None
        into = bytearray(pinned.record.nbytes)
        parts = [memoryview(into)] if into else []
        whole = store.read([(pinned.place, parts)], soon()) and store.is_whole(pinned, parts)
        assert whole, f"{key!r} names bytes that are not its own"
        return bytes(into)


class Model:
    """What may be there. `certain`: before the call that was interrupted; `possible`: what it may have made of it."""

    def __init__(self) -> None:
        self.certain: dict[bytes, bytes | None] = dict.fromkeys(KEYS)
        self.unsynced: dict[bytes, list[bytes | None]] = {}

    def expect(self, store: BlockStore, what: str) -> None:
        """The store has, for each key, the last object, or one that a call in flight may have put in its place."""
        for key in KEYS:
            possible = [self.certain[key], *self.unsynced.get(key, [])]
            found = loaded(store, key)
            assert found in possible, f"{what}: {key!r} has {found and len(found)} bytes that it cannot have"
        listed = {entry.key: entry.nbytes for shard in range(SHARDS) for entry in store.entries(shard)}
        there = {key: loaded(store, key) for key in KEYS}
        assert listed == {key: len(each) for key, each in there.items() if each is not None}
        assert store.counts().objects == len(listed)
        assert store.counts().bytes_used == sum(listed.values())
        assert store.counts().damaged_slots == store.counts().damaged_extents == 0, f"{what}: damage without damage"


class Work:
    """Random batches of stores and deletes on a medium, with a model beside it."""

    def __init__(self, medium: CutMedium, seed: int) -> None:
        self.medium = medium
        self.model = Model()
        self.random = random.Random(seed)
        self.numbers = 0

    def steps(self, store: BlockStore, count: int) -> None:
        for _ in range(count):
            self._step(store)

    def _step(self, store: BlockStore) -> None:
        keys = self.random.sample(KEYS, self.random.randint(1, 3))
        objects: dict[bytes, bytes | None] = dict.fromkeys(keys)
        if self.random.random() < 0.7:
            for key in keys:
                self.numbers += 1
                objects[key] = content(self.numbers, self.random.choice(SIZES))
            # Until the next sync a power cut may take these back; those before are durable once their payloads are.
            former = dict(self.model.certain)
            for key in keys:
                self.model.unsynced.setdefault(key, []).append(objects[key])
            if store_all(store, objects):  # type: ignore[arg-type]
                self.model.unsynced = {key: [former[key]] for key in keys}
                self.model.certain |= objects
        else:
            there = any(store.has(key) for key in keys)
            for key in keys:
                self.model.unsynced.setdefault(key, []).append(None)
            assert store.delete(keys, soon()) == [None] * len(keys)
            if there:  # to delete nothing needs no sync
                self.model.unsynced = {}
            self.model.certain |= objects


def run_until(calls: int, seed: int, steps: int = 6) -> tuple[Work, bool]:
    """Work whose power is cut within this call. False: it ended before."""
    medium = CutMedium(MEDIUM_BYTES, seed)
    work = Work(medium, seed)
    store = opened(medium)
    medium.calls, medium.calls_left = 0, calls
    try:
        work.steps(store, steps)
    except PowerCutError:
        return work, True
    return work, False


@pytest.mark.parametrize("seed", range(2))
def test_power_cut_at_any_call_leaves_the_objects_or_those_before_the_last_batch(seed: int) -> None:
    calls, cut = 0, True
    while cut:
        work, cut = run_until(calls, seed)
        for _ in range(3):  # what the sectors come to is drawn anew
            found = work.medium.cut()
            work.model.expect(opened(found), f"the power was cut in call {calls}")
        calls += 1
    assert calls > 20


@pytest.mark.parametrize("seed", range(2))
def test_kill_at_any_call_loses_nothing_that_was_done(seed: int) -> None:
    calls, cut = 0, True
    while cut:
        work, cut = run_until(calls, seed)
        store = opened(work.medium.killed())
        work.model.expect(store, f"killed in call {calls}")
        calls += 1


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 1 << 30), cuts=st.lists(st.integers(0, 60), min_size=1, max_size=5), kill=st.booleans())
def test_medium_survives_one_power_cut_after_another(seed: int, cuts: list[int], kill: bool) -> None:
    medium = CutMedium(MEDIUM_BYTES, seed)
    work = Work(medium, seed)
    for calls in cuts:
        work.medium = medium
        medium.calls_left = None
        store = opened(medium)
        work.model.expect(store, "opened again")
        settle(work, store)
        medium.calls_left = calls
        try:
            work.steps(store, 8)
        except PowerCutError:
            medium = medium.killed() if kill else medium.cut()
        else:
            medium.calls_left = None
            medium = medium.killed() if kill else medium.cut()
    work.model.expect(opened(medium), "at the end")


def settle(work: Work, store: BlockStore) -> None:
    """What is there now is what counts from here on."""
    work.model.certain = {key: loaded(store, key) for key in KEYS}
    work.model.unsynced = {}


@pytest.mark.parametrize("seed", range(3))
def test_power_cut_while_a_medium_is_made_leaves_one_that_can_be_made(seed: int) -> None:
    calls, cut = 0, True
    while cut:
        medium = CutMedium(MEDIUM_BYTES, seed)
        medium.calls_left = calls
        try:
            opened(medium)
            cut = False
        except PowerCutError:
            pass
        store = opened(medium.cut())
        assert store_all(store, {b"k": b"object"})
        assert loaded(store, b"k") == b"object"
        calls += 1
    assert calls > 6


def test_objects_that_were_replaced_and_deleted_never_come_back() -> None:
    """Also where the record of a former object was still waiting for its removal."""
    medium = CutMedium(MEDIUM_BYTES, 1)
    store = opened(medium)
    for number in range(3):
        assert store_all(store, {b"k": content(number, 5000)})
    store.delete([b"k"], soon())
    for _ in range(20):
        assert loaded(opened(medium.cut()), b"k") is None


@pytest.mark.parametrize("replaced", [False, True])
def test_slot_is_not_used_again_before_the_removal_of_its_record_is_durable(replaced: bool) -> None:
    """By another thread, while a sync is under way."""
    medium = CutMedium(MEDIUM_BYTES, 1)
    store = opened(medium)
    store_all(store, {b"k": content(1, 5000)})
    with store.reading([b"k"]) as (pinned,):
        assert pinned is not None
    if replaced:
        store_all(store, {b"k": content(2, 5000)})
    taken: list[int | None] = []
    medium.in_sync = lambda: taken.append(store.reserve(5000, soon()))
    if replaced:
        store.sync(soon())  # the successor is durable, and the record is removed after it
        store.sync(soon())
    else:
        store.delete([b"k"], soon())
    assert taken
    assert pinned.place not in taken
    medium.in_sync = lambda: None
    assert store.reserve(5000, soon()) == pinned.place, "and then it is"


def test_without_fsync_a_kill_still_loses_nothing() -> None:
    medium = CutMedium(MEDIUM_BYTES, 1)
    work = Work(medium, 5)
    store = opened(medium, fsync=False)
    work.steps(store, 30)
    work.model.unsynced = {}
    work.model.expect(opened(medium.killed()), "killed")


def test_superblock_reads_back() -> None:
    block: Superblock = superblock_of(CutMedium(MEDIUM_BYTES), SETTINGS, ERRORS)
    assert (block.extents, block.extent_bytes, block.nbytes) == (3, EXTENT_BYTES, MEDIUM_BYTES)
    assert block.classes[0] * BLOCK_BYTES == BLOCK_BYTES


# --- one order at a time ------------------------------------------------------------------------------------------
def cut_everywhere(medium: CutMedium, work: Callable[[BlockStore], None]) -> Iterator[tuple[str, BlockStore]]:
    """What is found after a power cut in each call of the work, the sectors drawn several times."""
    calls, cut = 0, True
    while cut:
        now = medium.killed()
        store = opened(now)
        now.calls_left = calls
        try:
            work(store)
            cut = False
        except PowerCutError:
            pass
        for _ in range(8):
            yield f"the power was cut in call {calls}", opened(now.cut())
        calls += 1
    assert calls > 5


def expect_no_damage(store: BlockStore, when: str) -> None:
    """A record area with anything else than records would cost its slots, or, with their payloads, be believed."""
    assert store.counts().damaged_slots == store.counts().damaged_extents == 0, when


def test_extent_that_is_used_for_the_first_time_has_no_records_of_a_former_user() -> None:
    def grow(store: BlockStore) -> None:
        assert store_all(store, {b"k": content(1, 3000)})
        store.sync(soon())

    medium = CutMedium(MEDIUM_BYTES, 7)
    opened(medium)
    for number in range(3):  # their headers are zeros: a medium that was made
        medium.fill(EDGE_BYTES + number * EXTENT_BYTES + BLOCK_BYTES, EXTENT_BYTES - 2 * BLOCK_BYTES, number)
    for when, store in cut_everywhere(medium, grow):
        expect_no_damage(store, when)
        assert loaded(store, b"k") in (None, content(1, 3000)), when


@pytest.mark.parametrize(("former", "later"), [(240_000, 100), (100, 100_000)], ids=["to smaller", "to larger"])
def test_extent_that_another_class_uses_again_is_never_half_of_each(former: int, later: int) -> None:
    """Records lie where payloads were, and payloads where records were: the header has to be durable in between."""
    medium = CutMedium(MEDIUM_BYTES, 7)
    store = opened(medium)
    store.delete([b"%d" % number for number in range(fill(store, former))], soon())

    def use_again(store: BlockStore) -> None:
        for number in range(4):
            assert store_all(store, {b"%d" % number: content(number, later)})
        store.sync(soon())

    for when, found in cut_everywhere(medium, use_again):
        expect_no_damage(found, when)
        expect_own_bytes(found, when)


def expect_own_bytes(store: BlockStore, when: str) -> None:
    for shard in range(SHARDS):
        for entry in store.entries(shard):
            assert loaded(store, entry.key) == content(int(entry.key), entry.nbytes), when


def fill(store: BlockStore, nbytes: int) -> int:
    """How many objects of this size there are when it is full, in batches of 20."""
    count = 0
    while store_all(store, {b"%d" % number: content(number, nbytes) for number in range(count, count + 20)}):
        count += 20
    while store_all(store, {b"%d" % count: content(count, nbytes)}):
        count += 1
    return count


def test_object_that_is_moved_has_its_bytes_under_both_records() -> None:
    medium = CutMedium(MEDIUM_BYTES, 7)
    store = opened(medium)
    count = fill(store, 30_000)
    assert count == 21, "seven in each of three extents"
    # The last extent is emptied into those that are read before it: of two equal records theirs is taken.
    kept = [0, 1, 7, 8, 14]
    store.delete([b"%d" % number for number in range(count) if number not in kept], soon())

    def move(store: BlockStore) -> None:
        assert store_all(store, {b"100": content(100, 200_000)}), "a sparse extent is emptied for it"
        store.sync(soon())

    for when, found in cut_everywhere(medium, move):
        expect_no_damage(found, when)
        expect_own_bytes(found, when)
        assert all(found.has(b"%d" % number) for number in kept), when
