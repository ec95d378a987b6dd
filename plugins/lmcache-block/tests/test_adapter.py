"""What the kit does not ask: buffers, space, syncs, damage under a running adapter."""

from __future__ import annotations

import errno
import mmap
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lmcache_block.medium import file
from lmcache_block.medium import store as medium_store
from lmcache_block.medium.file import FileMedium
from lmcache_block.medium.format import new_superblock
from lmcache_block.medium.space import Extent, Space
from lmcache_core.errors import TierError
from lmcache_core.tiers.contract import LoadItem, Result, StoreItem

from .conftest import Tier
from .door import BlockDoor


def pages(content: bytes) -> memoryview:
    memory = memoryview(mmap.mmap(-1, max(1, len(content))))[: len(content)]
    memory[:] = content
    return memory


@pytest.mark.parametrize("io_mode", ["direct", "buffered"])
@pytest.mark.parametrize("sizes", [(4096, 65_536), (4096, 70_001), (4096,), (100, 70_000), (4096, 500, 4096, 3 << 19)])
@pytest.mark.parametrize("shift", [0, 1])
def test_buffers_of_any_address_and_length_come_back(
    tier: Callable[..., Tier], io_mode: str, sizes: tuple[int, ...], shift: int
) -> None:
    one = tier(io_mode=io_mode, extent_bytes=4 << 20, size_bytes=32 << 20)
    parts = [pages(os.urandom(size + shift))[shift:] for size in sizes]
    assert one.adapter.store([StoreItem(b"k", parts)], one.deadline)[0].result is Result.DONE
    back = [pages(bytes(size + shift))[shift:] for size in sizes]
    loaded = one.adapter.load([LoadItem(b"k", back)], one.deadline)[0]
    assert (loaded.result, loaded.nbytes) == (Result.DONE, sum(sizes)), loaded.error
    assert back == parts


def test_bounce_buffers_are_bounded(tier: Callable[..., Tier]) -> None:
    """More threads than buffers wait for one another, and all are served."""
    one = tier(bounce_buffers=1)
    content = os.urandom(300_000)
    outcomes: list[Result] = []
    threads = [
        threading.Thread(target=lambda n=n: outcomes.append(one.store(b"%d" % n, b"x", content).result))
        for n in range(6)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert outcomes == [Result.DONE] * 6


def test_extents_move_to_the_size_that_needs_them(tier: Callable[..., Tier]) -> None:
    one = tier(size_bytes=6 << 20, extent_bytes=1 << 20)
    for size in (4000, 200_000, 30_000):
        stored = []
        while one.store(b"%d %d" % (size, len(stored)), bytes(size)).result is Result.DONE:
            stored.append(b"%d %d" % (size, len(stored)))
        assert len(stored) * size > 3 << 20, f"{len(stored)} objects of {size:,} bytes fit"
        one.adapter.delete(stored, one.deadline)


def test_sparse_extents_are_emptied_before_the_medium_is_full(tier: Callable[..., Tier]) -> None:
    one = tier(size_bytes=6 << 20, extent_bytes=1 << 20)
    contents: dict[bytes, bytes] = {}
    while True:
        key, content = b"%d" % len(contents), os.urandom(20_000)
        if one.store(key, content).result is not Result.DONE:
            break
        contents[key] = content
    for number in range(len(contents)):
        if number % 3:
            one.adapter.delete([b"%d" % number], one.deadline)
            del contents[b"%d" % number]
    assert one.store(b"large", bytes(500_000)).result is Result.DONE
    for key, content in contents.items():
        outcome, (back,) = one.load(key, 20_000)
        assert (outcome.result, bytes(back)) == (Result.DONE, content)
    usage = one.adapter.usage()
    assert usage.objects == len(contents) + 1
    one.adapter.close()
    assert tier(one.path).adapter.exists(list(contents), one.deadline) == [True] * len(contents)


def test_smaller_object_takes_a_larger_slot_rather_than_none(tier: Callable[..., Tier]) -> None:
    one = tier(size_bytes=4 << 20, extent_bytes=2 << 20)
    assert one.store(b"large", bytes(300_000)).result is Result.DONE
    assert one.store(b"small", b"x" * 100).result is Result.DONE
    outcome, (back,) = one.load(b"small", 100)
    assert (outcome.result, bytes(back)) == (Result.DONE, b"x" * 100)


def test_trim_gives_back_the_space_of_empty_extents(tier: Callable[..., Tier]) -> None:
    one = tier(trim=True)
    keys = [b"%d" % number for number in range(100)]
    for key in keys:
        one.store(key, os.urandom(100_000))
    before = one.path.stat().st_blocks
    one.adapter.delete(keys, one.deadline)
    one.store(b"k", b"x")
    assert one.path.stat().st_blocks < before - (4 << 20) // 512
    one.adapter.close()
    again = tier(one.path)
    assert again.exists(b"k", *keys) == [True] + [False] * 100
    assert again.store(b"again", os.urandom(100_000)).result is Result.DONE


def test_object_whose_slot_was_overwritten_is_damaged_and_set_aside_alone(tier: Callable[..., Tier]) -> None:
    one = tier()
    contents = [os.urandom(70_000) for _ in range(3)]
    for number, content in enumerate(contents):
        one.store(b"%d" % number, content)
    door = BlockDoor(one.path)
    door.write(b"1", contents[0][:4096] + contents[1][4096:])
    outcome, _ = one.load(b"1", 70_000)
    assert outcome.result is Result.DAMAGED
    assert one.exists(b"1") == [True]
    assert one.adapter.set_aside([b"1"], one.deadline, [outcome.version])[0].result is Result.DONE
    assert one.exists(b"0", b"1", b"2") == [True, False, True]


@pytest.mark.parametrize(
    ("number", "expected"),
    [(errno.EIO, Result.DAMAGED), (errno.ENODATA, Result.DAMAGED), (errno.ENOMEM, Result.FAILED)],
)
def test_bad_sector_is_one_damaged_object_and_other_errors_are_the_mediums(
    tier: Callable[..., Tier], monkeypatch: pytest.MonkeyPatch, number: int, expected: Result
) -> None:
    one = tier()
    one.store(b"k", bytes(5000))

    def fails(self: FileMedium, at: int, parts: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(FileMedium, "read", fails)
    outcome, _ = one.load(b"k", 5000)
    assert (outcome.result, bool(outcome.version)) == (expected, expected is Result.DAMAGED)


def test_payload_that_cannot_be_written_stores_nothing(
    tier: Callable[..., Tier], monkeypatch: pytest.MonkeyPatch
) -> None:
    one = tier()
    one.store(b"k", b"old")
    with monkeypatch.context() as patch:
        patch.setattr(FileMedium, "write", _raise(errno.ENOSPC))
        assert one.store(b"k", b"new").result is Result.FULL
        patch.setattr(FileMedium, "write", _raise(errno.EIO))
        refused = one.store(b"k", b"new")
        assert (refused.result, refused.retryable) == (Result.FAILED, True)
    outcome, (back,) = one.load(b"k", 3)
    assert (outcome.result, bytes(back)) == (Result.DONE, b"old")
    assert one.store(b"k", b"new").result is Result.DONE


def test_slots_that_failed_with_their_medium_are_used_again(
    tier: Callable[..., Tier], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An hour without the disk must not cost the slots of all stores that were tried meanwhile."""
    one = tier(size_bytes=4 << 20, extent_bytes=1 << 20)
    assert one.store(b"k", bytes(100_000)).result is Result.DONE
    real = FileMedium.write

    def fails(self: FileMedium, at: int, parts: Any) -> None:
        if sum(part.nbytes for part in parts) > 90_000:  # a payload
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        real(self, at, parts)

    with monkeypatch.context() as patch:
        patch.setattr(FileMedium, "write", fails)
        failed = 0
        while one.store(b"%d" % failed, bytes(100_000)).result is Result.FAILED:
            failed += 1
        assert failed > 10
    assert one.store(b"j", bytes(100_000)).result is Result.FULL, "not yet"
    monkeypatch.setattr(medium_store, "BAD_AGAIN_S", 0.0)
    assert [one.store(b"%d" % number, bytes(100_000)).result for number in range(failed)] == [Result.DONE] * failed
    assert one.store(b"j", bytes(100_000)).result is Result.FULL


def test_object_that_has_replaced_a_damaged_one_is_not_set_aside_for_it(tier: Callable[..., Tier]) -> None:
    """Also if it comes while the other is being set aside."""
    one = tier()
    one.store(b"k", b"old")
    former = one.load(b"k", 3)[0].version
    one.store(b"k", b"new")
    outcomes = one.adapter.set_aside([b"k", b"never"], one.deadline, [former, "7"])
    assert [outcome.result for outcome in outcomes] == [Result.DONE, Result.DONE]
    assert one.load(b"k", 3)[1][0] == b"new"


def test_full_class_in_steady_use_remembers_no_more_with_time() -> None:
    space = Space(new_superblock(4 << 20, 1 << 20, bytes(16), 0.0))
    space.add(Extent(0, 50, 1, new_superblock(4 << 20, 1 << 20, bytes(16), 0.0)))
    places = []
    while (place := space.take(50)) is not None:
        places.append(place)
    for _ in range(50):
        assert space.free(places[0]) is None
        assert space.take(50) == places[0]
    assert sum(map(len, space._open.values())) <= 1


def test_failed_sync_publishes_nothing_and_the_medium_is_read_again(
    tier: Callable[..., Tier], monkeypatch: pytest.MonkeyPatch
) -> None:
    one = tier()
    one.store(b"k", b"old")
    with monkeypatch.context() as patch:
        patch.setattr(FileMedium, "sync", _raise(errno.EIO))
        assert one.store(b"k", b"new").result is Result.FAILED
    outcome, (back,) = one.load(b"k", 3)
    assert (outcome.result, bytes(back)) == (Result.DONE, b"old")
    assert one.store(b"k", b"new").result is Result.DONE
    assert one.load(b"k", 3)[1][0] == b"new"


def test_page_cache_is_not_taken_for_the_medium_after_a_failed_sync(
    tier: Callable[..., Tier], monkeypatch: pytest.MonkeyPatch
) -> None:
    one = tier(io_mode="buffered")
    one.store(b"k", b"old")
    dropped: list[tuple[int, int, int]] = []
    monkeypatch.setattr(file.os, "posix_fadvise", lambda handle, *range_and_advice: dropped.append(range_and_advice))
    with monkeypatch.context() as patch:
        patch.setattr(file.os, "fdatasync", _raise(errno.EIO))
        assert one.store(b"k", b"new").result is Result.FAILED
    assert dropped == [(0, 0, os.POSIX_FADV_DONTNEED)], "all of it"
    assert one.load(b"k", 3)[1][0] == b"old"


def test_medium_is_not_read_again_while_a_call_is_still_in_it(
    tier: Callable[..., Tier], monkeypatch: pytest.MonkeyPatch
) -> None:
    one = tier()
    one.store(b"k", b"old")
    inside, go_on, real = threading.Event(), threading.Event(), FileMedium.read

    def slow(self: FileMedium, at: int, parts: Any) -> None:
        inside.set()
        assert go_on.wait(60)
        real(self, at, parts)

    with monkeypatch.context() as patch:
        patch.setattr(FileMedium, "read", slow)
        loaded: list[Result] = []
        reader = threading.Thread(target=lambda: loaded.append(one.load(b"k", 3)[0].result))
        reader.start()
        assert inside.wait(60)
        patch.setattr(FileMedium, "sync", _raise(errno.EIO))
        assert one.store(b"k", b"new").result is Result.FAILED
        refused = one.store(b"k", b"new")
        assert (refused.result, refused.retryable) == (Result.FAILED, True)
        assert "other calls have not ended" in refused.error
        go_on.set()
        reader.join()
    assert loaded == [Result.DONE]
    assert one.store(b"k", b"new").result is Result.DONE


def test_record_that_cannot_be_removed_keeps_its_object(
    tier: Callable[..., Tier], monkeypatch: pytest.MonkeyPatch
) -> None:
    one = tier()
    one.store(b"k", b"old")
    with monkeypatch.context() as patch:
        patch.setattr(FileMedium, "write", _raise(errno.EIO))
        assert one.adapter.delete([b"k"], one.deadline)[0].result is Result.FAILED
    assert one.load(b"k", 3)[1][0] == b"old"
    assert one.adapter.delete([b"k"], one.deadline)[0].result is Result.DONE
    assert one.exists(b"k") == [False]


def test_two_adapters_of_a_process_share_the_medium(tier: Callable[..., Tier], tmp_path: Path) -> None:
    one, two = tier(), tier()
    one.store(b"k", b"object")
    (tmp_path / "link").symlink_to(one.path)
    three = tier(tmp_path / "link")
    assert two.exists(b"k") == three.exists(b"k") == [True]
    one.adapter.close()
    assert two.load(b"k", 6)[1][0] == b"object"
    with pytest.raises(TierError, match="closed"):
        one.exists(b"k")


def test_building_an_adapter_touches_nothing(tier: Callable[..., Tier], tmp_path: Path) -> None:
    tier().adapter.close()
    assert list(tmp_path.iterdir()) == []


def _raise(number: int) -> Callable[..., None]:
    def fails(*arguments: object) -> None:
        raise OSError(number, os.strerror(number))

    return fails
