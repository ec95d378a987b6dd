"""What the server believes of a disk is what is on it, whatever went wrong with unlinks, writes, syncs and folders.

The adapter is the real one; the faults come from below it: a library between Python and libc, in a process of its own.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("lmcache_fs")

HERE = Path(__file__).parent
DOUBLES = HERE.parents[1] / "core" / "tests" / "tiers" / "conftest.py"
COMPILER = shutil.which("gcc") or shutil.which("cc")

pytestmark = [
    pytest.mark.skipif(COMPILER is None, reason="there is no C compiler"),
    pytest.mark.skipif(not DOUBLES.exists(), reason="the core's tests are not part of this copy"),
]

SCRIPT = """
import ctypes, errno, importlib.util, pathlib, random, shutil, sys

from lmcache_core.policies.lru import LruEviction
from lmcache_core.tiers.contract import AdapterContext
from lmcache_core.tiers.tier.tier import Tier, TierConfig
from lmcache_fs.adapter import FsAdapter
from lmcache_fs.settings import FsSettings

root, fault, seed = pathlib.Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
spec = importlib.util.spec_from_file_location("doubles", sys.argv[4])
doubles = importlib.util.module_from_spec(spec)
sys.modules["doubles"] = doubles
spec.loader.exec_module(doubles)

UNLINK, RENAME, WRITE, FSYNC, OPEN, MKDIR = range(6)
FAULTS = {
    "unlink fails": [(UNLINK, errno.EIO)],
    "rename fails": [(RENAME, errno.EIO)],
    "a short write": [(WRITE, 0)],
    "no space": [(WRITE, errno.ENOSPC)],
    "no space at the sync": [(FSYNC, errno.ENOSPC)],
    "EIO at the sync": [(FSYNC, errno.EIO)],
    "no folder can be made": [(MKDIR, errno.EIO)],
    "the directory is removed": [],
    "all of it": [
        (UNLINK, errno.EIO), (RENAME, errno.EIO), (WRITE, errno.ENOSPC), (FSYNC, errno.EIO), (OPEN, errno.EIO)
    ],
}
rng = random.Random(seed)
shim = ctypes.CDLL(None)


def arm(percent):
    for operation, error in FAULTS[fault]:
        shim.fault_arm(str(root).encode(), operation, percent, error, rng.randrange(1 << 30))


context = AdapterContext(tier="disk")
adapter = FsAdapter(FsSettings(path=root, fsync=True), context)
config = TierConfig(capacity_bytes=20 * 9100, deadline_s=1e6)
tier = Tier("disk", adapter, config, eviction=LruEviction(None), context=context)
l1 = doubles.MemoryL1(200)
loop = doubles.Loop(l1, [tier])
loop.idle()


def quiet():
    # Every call that was begun has met its faults.
    return not any(lane.running or lane.queued for lane in tier.lanes) and loop.tiering.drained


def settled():
    loop.jump(1.0)
    books = tier.accounting
    return (
        loop.tiering.drained and not len(tier.doubts) and not books.bytes_leaving and not books.bytes_reserved
        and not any(lane.running or lane.queued for lane in tier.lanes)
        and not tier.order.kept
        and str(tier.rebuild.state) == "done" and tier.rebuild.next_at is None
    )


def compare(when):
    on_disk = {
        bytes.fromhex(path.name): path.stat().st_size - 16
        for path in (root / "objects").glob("*/*") if path.is_file()
    }
    books = {entry.tier_key: entry.nbytes for shard in tier.accounting.shards() for entry in shard}
    assert books == on_disk, f"{when}: {len(books)} in the accounts, {len(on_disk)} on the disk"
    assert tier.accounting.bytes_used == sum(on_disk.values()) <= config.capacity_bytes
    temporary = [path for path in (root / "tmp").glob("*/*") if path.name != "lock"]
    assert not temporary, f"{when}: {temporary} are in no account"


number = 0
for turn in range(3):
    arm(40)
    for _ in range(3):
        loop.store(doubles.Doubles().contents(rng.randint(1, 6), first=number))
        number += 10
        if fault in ("the directory is removed", "all of it") and rng.random() < 0.4:
            loop.until(quiet)  # a removal that meets a store halfway leaves folders, and nothing to notice it by
            shutil.rmtree(rng.choice([root / "objects", root / "tmp", root]), ignore_errors=True)
        for each in rng.sample(sorted(l1.ready), min(3, len(l1.ready))):
            l1.evict(each[1])
        loop.ask([doubles.key(rng.randrange(number)) for _ in range(4)], prefix=False)
        if rng.random() < 0.2:
            loop.clear(None, tiers=True)
        loop.until(quiet)
    arm(0)
    for each in sorted(l1.ready):
        l1.evict(each[1])
    loop.until(settled)
    loop.store(doubles.Doubles().contents(1, first=number))  # what could not be removed goes with the next store
    number += 10
    loop.until(settled)
    compare(f"after turn {turn}")
struck = sum(shim.fault_hits(operation) for operation, _ in FAULTS[fault])
assert struck or not FAULTS[fault], "no fault has struck"
assert tier.health.counts["store_done"]
loop.tiering.close()
"""

FAULTS = [
    "unlink fails", "rename fails", "a short write", "no space", "no space at the sync", "EIO at the sync",
    "no folder can be made", "the directory is removed", "all of it",
]  # fmt: skip


@pytest.fixture(scope="session")
def shim(tmp_path_factory: pytest.TempPathFactory) -> Path:
    library = tmp_path_factory.mktemp("shim") / "disk_faults.so"
    assert COMPILER is not None
    subprocess.run(
        [COMPILER, "-shared", "-fPIC", "-O1", "-Wall", "-o", library, HERE / "disk_faults.c", "-ldl"], check=True
    )
    return library


@pytest.mark.parametrize("fault", FAULTS)
def test_the_books_agree_with_the_disk_after_a_fault(shim: Path, tmp_path: Path, fault: str) -> None:
    seed = FAULTS.index(fault)
    ended = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path / "disk"), fault, str(seed), str(DOUBLES)],
        env={**os.environ, "LD_PRELOAD": str(shim)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
