"""Several processes on one directory, and processes that are killed in the middle."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from lmcache_core.tiers.contract import Result

from .conftest import Disk

# Stores objects under few keys for good. Every byte of an object is equal, and so is a length for each byte value:
# a torn file cannot look right.
WRITER = """
import sys, time
from pathlib import Path
from lmcache_core.tiers.contract import AdapterContext, StoreItem
from lmcache_fs.adapter import FsAdapter
from lmcache_fs.settings import FsSettings
adapter = FsAdapter(FsSettings(path=Path(sys.argv[1])), AdapterContext(tier="disk"))
number = 0
while True:
    number = (number + 1) % 200 + 1
    content = bytes([number]) * (300_000 + number)
    adapter.store([StoreItem(b"key %d" % (number % 5), [memoryview(content)])], time.monotonic() + 60)
    print("stored", flush=True)
"""


def _writer(path: Path) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE, text=True)


def _assert_whole(tier: Disk) -> int:
    whole = 0
    for number in range(5):
        outcome, (back,) = tier.load(b"key %d" % number, 301_000)
        if outcome.result is Result.MISS:
            continue
        assert outcome.result is Result.DONE, outcome.error
        assert outcome.nbytes == 300_000 + back[0]
        assert bytes(back[: outcome.nbytes]) == back[:1] * outcome.nbytes
        whole += 1
    return whole


def test_a_writer_killed_in_the_middle_leaves_no_torn_object_and_its_temporaries_are_swept(
    disk: Callable[..., Disk],
) -> None:
    tier = disk()
    for round_number in range(4):
        writer = _writer(tier.path)
        assert writer.stdout is not None
        for _ in range(3 + round_number * 5):
            assert writer.stdout.readline() == "stored\n"
        os.kill(writer.pid, signal.SIGKILL)
        writer.wait()
        writer.stdout.close()
        assert _assert_whole(tier) >= 3
        assert list((tier.path / "damaged").glob("*")) == []
    assert list((tier.path / "tmp").iterdir()), "the dead left their folders"
    successor = disk()
    successor.store(b"key 9", b"x")
    assert len(list((tier.path / "tmp").iterdir())) == 1, "only the folder of the living is left"


def test_readers_beside_writers_see_whole_objects_only(disk: Callable[..., Disk]) -> None:
    tier = disk()
    writers = [_writer(tier.path) for _ in range(2)]
    try:
        for writer in writers:
            assert writer.stdout is not None
            assert writer.stdout.readline() == "stored\n"
        for _ in range(100):
            _assert_whole(tier)
        assert _assert_whole(tier)
    finally:
        for writer in writers:
            writer.kill()
            writer.wait()
            assert writer.stdout is not None
            writer.stdout.close()


def test_the_living_are_not_swept(disk: Callable[..., Disk]) -> None:
    first = disk()
    first.store(b"a", b"x")
    folder = first.adapter.temporary.path
    second = disk()
    second.store(b"b", b"x")
    assert Path(folder).is_dir()
    assert first.store(b"c", b"x").result is Result.DONE
