"""A raw block device: a loop device, where one can be had."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lmcache_core.errors import TierError
from lmcache_core.tiers.contract import Result

from .conftest import Tier

PAYLOAD = os.urandom(70_000)
BYTES = 16 << 20


@pytest.fixture
def device(tmp_path: Path) -> Iterator[Path]:
    if os.geteuid() != 0 or shutil.which("losetup") is None:
        pytest.skip("a loop device needs root and losetup")
    image = tmp_path / "image"
    with image.open("wb") as file:
        file.truncate(BYTES)
    command = ["losetup", "--find", "--show", "--sector-size", "4096", image]
    made = subprocess.run(command, capture_output=True, text=True)
    if made.returncode:
        pytest.skip(f"no loop device here: {made.stderr.strip()}")
    device = Path(made.stdout.strip())
    try:
        yield device
    finally:
        subprocess.run(["losetup", "--detach", device], check=True)


def test_device_keeps_its_objects(tier: Callable[..., Tier], device: Path) -> None:
    one = tier(device, size_bytes=None)
    assert one.store(b"k", PAYLOAD[:4096], PAYLOAD[4096:]).result is Result.DONE
    assert 13 << 20 < (one.adapter.usage().bytes_free or 0) < 14 << 20
    one.adapter.close()
    outcome, (back,) = tier(device, size_bytes=None).load(b"k", len(PAYLOAD))
    assert (outcome.result, bytes(back)) == (Result.DONE, PAYLOAD)


def test_device_that_something_else_has_open_exclusively_is_refused(tier: Callable[..., Tier], device: Path) -> None:
    """As one that is mounted, or part of an array."""
    handle = os.open(device, os.O_RDWR | os.O_EXCL)
    try:
        refused = tier(device, size_bytes=None).store(b"k", PAYLOAD)
        assert (refused.result, refused.retryable) == (Result.FAILED, False)
        assert "is in use" in refused.error
        assert "that nothing else uses" in refused.cure
    finally:
        os.close(handle)


def test_device_with_a_file_system_is_refused(tier: Callable[..., Tier], device: Path) -> None:
    if shutil.which("mkfs.ext4") is None:
        pytest.skip("needs mkfs.ext4")
    subprocess.run(["mkfs.ext4", "-q", device], check=True)
    with pytest.raises(TierError, match="not ours"):
        tier(device, size_bytes=None).exists(b"k")
    subprocess.run(["e2fsck", "-fn", device], check=True, capture_output=True)


def test_empty_extents_of_a_device_are_discarded(tier: Callable[..., Tier], device: Path, tmp_path: Path) -> None:
    one = tier(device, size_bytes=None, trim=True)
    keys = [b"%d" % number for number in range(100)]
    for key in keys:
        assert one.store(key, os.urandom(100_000)).result is Result.DONE
    before = (tmp_path / "image").stat().st_blocks
    one.adapter.delete(keys, one.deadline)
    one.store(b"k", PAYLOAD)
    assert (tmp_path / "image").stat().st_blocks < before - (4 << 20) // 512
    one.adapter.close()
    assert tier(device, size_bytes=None).exists(b"k", b"1") == [True, False]
