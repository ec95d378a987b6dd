"""Whose a medium is, and what damage does to it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from lmcache_block.check import findings
from lmcache_block.errors import Errors
from lmcache_block.medium import file, opening
from lmcache_block.medium.file import FileMedium
from lmcache_block.medium.format import BLOCK_BYTES, EDGE_BYTES, SECTOR_BYTES, Geometry
from lmcache_block.medium.opening import Shared
from lmcache_core.errors import TierError
from lmcache_core.tiers.contract import Result
from lmcache_testing import waiting

from .conftest import Tier
from .door import BlockDoor

PAYLOAD = os.urandom(70_000)


def sparse(path: Path, nbytes: int, at: int = 0, content: bytes = b"") -> bytes:
    """A file of somebody else's; what its ends are."""
    with path.open("wb") as file:
        file.truncate(nbytes)
        file.seek(at)
        file.write(content)
    return ends(path)


def ends(path: Path) -> bytes:
    content = path.read_bytes()
    return content[:EDGE_BYTES] + content[-EDGE_BYTES:]


# --- whose it is ----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("at", [0, 1, 510, 1024, 4086, 65_600, EDGE_BYTES - 1, (16 << 20) - 500])
def test_data_of_somebody_else_are_refused_and_left_alone(tier: Callable[..., Tier], tmp_path: Path, at: int) -> None:
    before = sparse(tmp_path / "medium", 16 << 20, at, b"filesystem"[: (16 << 20) - at])
    refused = tier().store(b"k", PAYLOAD)
    assert (refused.result, refused.retryable) == (Result.FAILED, False)
    assert "not ours" in refused.error
    assert "write zeros over its first and last MiB" in refused.cure
    with pytest.raises(TierError, match="not ours"):
        tier().exists(b"k")
    assert ends(tmp_path / "medium") == before


@pytest.mark.parametrize(("nbytes", "at"), [(8 << 20, (8 << 20) - 9), (8 << 20, 65_600), (1 << 20, 70_000)])
def test_smaller_file_of_somebody_else_is_not_made_larger(
    tier: Callable[..., Tier], tmp_path: Path, nbytes: int, at: int
) -> None:
    """Once it is, its last MiB is not where its owner's data are, and it looks empty."""
    sparse(tmp_path / "medium", nbytes, at, b"theirs")
    before = (tmp_path / "medium").read_bytes()
    tier().store(b"k", PAYLOAD)
    assert (tmp_path / "medium").read_bytes() == before


@pytest.mark.parametrize("nbytes", [0, 4096, 5 << 20])
def test_file_whose_making_was_interrupted_is_made(tier: Callable[..., Tier], tmp_path: Path, nbytes: int) -> None:
    sparse(tmp_path / "medium", nbytes)
    assert tier().store(b"k", PAYLOAD).result is Result.DONE
    assert (tmp_path / "medium").stat().st_size == 16 << 20


def test_file_that_another_server_makes_first_is_used(
    tier: Callable[..., Tier], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.open

    def overtaken(path: Any, flags: int, *more: Any, **named: Any) -> int:
        if flags & os.O_CREAT:
            os.close(real(path, flags, *more, **named))
        return real(path, flags, *more, **named)

    monkeypatch.setattr(opening.os, "open", overtaken)
    assert tier().store(b"k", PAYLOAD).result is Result.DONE


def test_file_system_made_over_a_medium_is_refused_although_the_superblock_is_there(tier: Callable[..., Tier]) -> None:
    """As mkfs.ext4 does, which leaves the first KiB as it is."""
    first = tier()
    first.store(b"k", PAYLOAD)
    first.adapter.close()
    BlockDoor(first.path).put(1024, b"ext4")
    assert "not ours" in tier().store(b"k", PAYLOAD).error


def test_empty_file_becomes_a_medium_of_its_size(tier: Callable[..., Tier], tmp_path: Path) -> None:
    sparse(tmp_path / "medium", 8 << 20)
    assert tier(size_bytes=None).store(b"k", PAYLOAD).result is Result.DONE
    about = (tmp_path / "medium").stat()
    assert about.st_size == 8 << 20
    assert about.st_blocks * 512 >= 8 << 20, "and has its blocks, although it was sparse"


def test_empty_file_without_room_for_its_blocks_is_refused_and_stays_empty(
    tier: Callable[..., Tier], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sparse(tmp_path / "medium", 8 << 20)

    def full(handle: int, mode: int, at: int, nbytes: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(file, "fallocate", full)
    refused = tier(size_bytes=None).store(b"k", PAYLOAD)
    assert "free some space" in refused.cure
    assert not (tmp_path / "medium").read_bytes().strip(b"\0")


def test_new_file_is_allocated_whole_and_for_its_owner_alone(tier: Callable[..., Tier], tmp_path: Path) -> None:
    assert tier(tmp_path / "a" / "b" / "medium").store(b"k", PAYLOAD).result is Result.DONE
    about = (tmp_path / "a" / "b" / "medium").stat()
    assert (about.st_size, about.st_mode & 0o777) == (16 << 20, 0o600)
    assert about.st_blocks * 512 >= 16 << 20


def test_missing_file_without_a_size_is_an_error_with_a_cure(tier: Callable[..., Tier], tmp_path: Path) -> None:
    refused = tier(size_bytes=None).store(b"k", PAYLOAD)
    assert "there is no" in refused.error
    assert "mount its disk, or set l2.nvme.size_bytes" in refused.cure
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("what", ["folder", "fifo"])
def test_neither_file_nor_device_is_refused(tier: Callable[..., Tier], tmp_path: Path, what: str) -> None:
    path = tmp_path / "medium"
    path.mkdir() if what == "folder" else os.mkfifo(path)
    refused = tier().store(b"k", PAYLOAD)
    assert (refused.result, bool(refused.cure)) == (Result.FAILED, True)


def test_shrunken_medium_is_refused(tier: Callable[..., Tier]) -> None:
    first = tier()
    first.store(b"k", PAYLOAD)
    first.adapter.close()
    os.truncate(first.path, 8 << 20)
    assert "give it back its size" in tier().store(b"k", PAYLOAD).cure


def test_full_file_system_leaves_no_file(tier: Callable[..., Tier], monkeypatch: pytest.MonkeyPatch) -> None:
    def full(handle: int, at: int, nbytes: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(opening.os, "posix_fallocate", full)
    one = tier()
    refused = one.store(b"k", PAYLOAD)
    assert refused.result is Result.FULL
    assert "l2.nvme.size_bytes" in refused.cure
    assert not one.path.exists()


def test_file_system_without_direct_io_is_said_with_its_cure(
    tier: Callable[..., Tier], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.open

    def refuses(path: Any, flags: int, *more: Any, **named: Any) -> int:
        if flags & os.O_DIRECT:
            raise OSError(22, "Invalid argument")
        return real(path, flags, *more, **named)

    monkeypatch.setattr(opening.os, "open", refuses)
    one = tier()
    refused = one.store(b"k", PAYLOAD)
    assert (refused.result, refused.retryable) == (Result.FAILED, False)
    assert 'l2.nvme.io_mode = "buffered"' in refused.cure
    assert not one.path.exists()
    assert tier(io_mode="buffered").store(b"k", PAYLOAD).result is Result.DONE


# --- who uses it ----------------------------------------------------------------------------------------------
HOLDER = """
import sys, time
from pathlib import Path
from lmcache_block.adapter import BlockAdapter
from lmcache_block.settings import BlockSettings
from lmcache_core.tiers.contract import AdapterContext
adapter = BlockAdapter(BlockSettings(path=Path(sys.argv[1])), AdapterContext(tier="nvme"))
print(adapter.exists([b"k"], time.monotonic() + 60), flush=True)
sys.stdin.read()
"""


def test_medium_of_a_living_server_is_refused_and_free_once_that_is_killed(tier: Callable[..., Tier]) -> None:
    first = tier()
    first.store(b"k", PAYLOAD)
    first.adapter.close()
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(first.path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "[True]\n"
        one = tier()
        refused = one.store(b"j", PAYLOAD)
        assert (refused.result, refused.retryable) == (Result.FAILED, True)
        assert "another process uses" in refused.error
        assert "one server at a time" in refused.cure
    finally:
        os.kill(holder.pid, signal.SIGKILL)
        holder.communicate()
    assert one.store(b"j", PAYLOAD).result is Result.DONE, "the lock ends with its process"
    assert one.exists(b"k") == [True]


def test_forked_child_has_neither_the_medium_nor_its_lock(tier: Callable[..., Tier]) -> None:
    first = tier()
    first.store(b"k", PAYLOAD)
    pid = os.fork()
    if pid == 0:
        refused = first.store(b"j", PAYLOAD)
        try:
            first.exists(b"k")
        except TierError as error:
            os._exit(0 if "another process uses" in refused.error and "another process uses" in str(error) else 1)
        os._exit(1)
    assert os.waitpid(pid, 0)[1] == 0
    assert first.exists(b"k", b"j") == [True, False]


def test_file_that_is_replaced_while_the_server_runs_is_not_taken_for_it(tier: Callable[..., Tier]) -> None:
    one = tier()
    one.store(b"k", PAYLOAD)
    one.path.rename(one.path.with_name("away"))
    assert "is not there any more" in one.store(b"j", PAYLOAD).error
    sparse(one.path, 16 << 20)
    with pytest.raises(TierError, match="or another"):
        one.exists(b"k")
    one.path.with_name("away").rename(one.path)
    assert one.exists(b"k", b"j") == [True, False]


@pytest.mark.parametrize("nbytes", [0, 12 << 20])
def test_file_that_is_cut_off_while_a_server_runs_is_not_used(tier: Callable[..., Tier], nbytes: int) -> None:
    """Neither are its objects set aside as damaged, nor is anything stored where no superblock is any more."""
    one = tier()
    one.store(b"k", PAYLOAD)
    content = one.path.read_bytes()
    os.truncate(one.path, nbytes)
    assert one.load(b"k", len(PAYLOAD))[0].result is Result.FAILED
    assert one.adapter.set_aside([b"k"], one.deadline)[0].result is Result.FAILED
    assert "or is shorter" in one.store(b"j", PAYLOAD).error
    assert one.path.stat().st_size == nbytes
    with one.path.open("r+b") as again:
        again.write(content)
    outcome, (back,) = one.load(b"k", len(PAYLOAD))
    assert (outcome.result, bytes(back)) == (Result.DONE, PAYLOAD)


def test_medium_that_needs_longer_than_a_call_to_be_read_is_open_for_the_next_one(
    tier: Callable[..., Tier], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = tier()
    first.store(b"k", PAYLOAD)
    first.adapter.close()
    one, real = tier(), FileMedium.read
    until = time.monotonic() + 0.05

    def slow(self: FileMedium, at: int, parts: Any) -> None:
        if at > EDGE_BYTES:  # of an extent
            waiting.until(lambda: time.monotonic() > until)
        real(self, at, parts)

    monkeypatch.setattr(FileMedium, "read", slow)
    with suppress(TierError):
        one.adapter.exists([b"k"], until)
    monkeypatch.setattr(FileMedium, "read", _not_again)
    assert one.exists(b"k") == [True]


def _not_again(self: FileMedium, at: int, parts: Any) -> None:
    raise AssertionError("it is read once")


# --- damage ---------------------------------------------------------------------------------------------------
def closed(tier: Callable[..., Tier], count: int = 3) -> BlockDoor:
    first = tier()
    for number in range(count):
        assert first.store(b"%d" % number, PAYLOAD).result is Result.DONE
    first.adapter.close()
    return BlockDoor(first.path)


@pytest.mark.parametrize("size_bytes", [16 << 20, 32 << 20], ids=["as it was", "raised"])
@pytest.mark.parametrize("damage", [bytes(SECTOR_BYTES), b"LMCBLK\r\n" + b"x" * 100])
def test_damaged_superblock_is_healed_from_its_copy(tier: Callable[..., Tier], damage: bytes, size_bytes: int) -> None:
    """Also where the settings want a larger file by now: with its copy in the middle it would look empty."""
    door = closed(tier)
    block = door.superblock()
    door.put(0, damage)
    assert door.superblock() is None
    assert tier(size_bytes=size_bytes).exists(b"0", b"1", b"2") == [True] * 3
    assert door.superblock() == block


@pytest.mark.parametrize("byte", [0, 7, 8, 20, 200, SECTOR_BYTES - 1])
def test_bit_that_has_flipped_in_a_superblock_is_healed(tier: Callable[..., Tier], byte: int) -> None:
    door = closed(tier)
    block, content = door.superblock(), door.path.read_bytes()[byte]
    door.put(byte, bytes([content ^ 16]))
    assert door.superblock() is None
    assert tier().exists(b"0", b"1", b"2") == [True] * 3
    assert door.superblock() == block


def test_damaged_superblock_without_a_copy_is_refused_and_not_overwritten(tier: Callable[..., Tier]) -> None:
    door = closed(tier)
    block = door.superblock()
    assert block is not None
    door.put(5, b"x")
    door.put(block.copy_at + 5, b"x")
    before = ends(door.path)
    assert tier().store(b"k", PAYLOAD).result is Result.FAILED
    assert ends(door.path) == before


def test_damaged_header_of_an_extent_is_read_from_its_copy(tier: Callable[..., Tier]) -> None:
    door = closed(tier)
    door.put(EDGE_BYTES, b"x" * BLOCK_BYTES)
    assert tier().exists(b"0", b"1", b"2") == [True] * 3


def test_extent_with_two_damaged_headers_is_left_alone(tier: Callable[..., Tier]) -> None:
    door = closed(tier)
    block = door.superblock()
    assert block is not None
    for at in (EDGE_BYTES, EDGE_BYTES + block.extent_bytes - BLOCK_BYTES):
        door.put(at, b"x" * BLOCK_BYTES)
    before = door.path.read_bytes()[EDGE_BYTES : EDGE_BYTES + block.extent_bytes]
    one = tier()
    assert one.exists(b"0", b"1", b"2") == [False] * 3
    for number in range(200):
        one.store(b"new %d" % number, PAYLOAD)
    refused = one.store(b"one more", PAYLOAD)
    assert (refused.result, "capacity_bytes" in refused.cure) == (Result.FULL, True)
    one.adapter.delete([b"new 1"], one.deadline)
    assert door.path.read_bytes()[EDGE_BYTES : EDGE_BYTES + block.extent_bytes] == before
    store = Shared(one.settings, Errors("nvme", one.settings)).opened()
    messages = [finding.message for finding in findings(one.settings, "nvme", store)]
    assert "1 extents and 0 slots cannot be read, and are not touched" in messages


def test_damaged_record_costs_its_object_and_no_other(tier: Callable[..., Tier]) -> None:
    door = closed(tier)
    slot = door.slot(b"1")
    assert slot is not None
    door.put(slot.record_at + 30, b"x")
    one = tier()
    assert one.exists(b"0", b"1", b"2") == [True, False, True]
    assert one.store(b"1", PAYLOAD).result is Result.DONE
    again = door.slot(b"1")
    assert again is not None
    assert again.offset != slot.offset, "what is in the slot may be somebody's: it is not touched"


def test_records_of_a_former_use_of_an_extent_are_none(tier: Callable[..., Tier], tmp_path: Path) -> None:
    """An extent goes to another class and back: nothing that was left in it becomes an object."""
    one = tier(tmp_path / "medium", size_bytes=4 << 20, extent_bytes=1 << 20)
    for size in (70_000, 4096, 200_000, 70_000, 100):
        count = 0
        while one.store(b"%d" % count, os.urandom(size)).result is Result.DONE:
            count += 1
        assert count
        for number in range(count):
            one.adapter.delete([b"%d" % number], one.deadline)
    one.adapter.close()
    again = tier(tmp_path / "medium")
    assert again.adapter.scan(None, again.deadline).entries == []
    counts = again.adapter.usage()
    assert counts.objects == 0
    assert counts.bytes_free == 2 << 20


def test_geometry_of_every_class_stays_within_its_extent() -> None:
    for extent_bytes in (256 << 10, 1 << 20, 17 << 20, 257 << 20):
        for slot_blocks in range(1, extent_bytes // BLOCK_BYTES - 2):
            slots, records = Geometry.of(extent_bytes, slot_blocks)
            assert slots >= 1
            assert 2 + records + slots * slot_blocks <= extent_bytes // BLOCK_BYTES
