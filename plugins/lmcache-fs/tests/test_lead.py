"""One of the adapters on a directory leads, for as long as it lives."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from .conftest import Disk

LEADER = """
import sys
from pathlib import Path
from lmcache_core.tiers.contract import AdapterContext
from lmcache_fs.adapter import FsAdapter
from lmcache_fs.settings import FsSettings
adapter = FsAdapter(FsSettings(path=Path(sys.argv[1])), AdapterContext(tier="disk"))
print(adapter.try_to_lead(), flush=True)
sys.stdin.read()
"""


def test_one_adapter_leads_and_the_next_does_once_it_is_closed(disk: Callable[..., Disk]) -> None:
    one, two = disk().adapter, disk().adapter
    assert one.try_to_lead()
    assert not two.try_to_lead()
    assert one.try_to_lead(), "it leads on"
    one.close()
    assert two.try_to_lead()


def test_a_leader_that_was_killed_leads_no_longer(disk: Callable[..., Disk]) -> None:
    tier = disk()
    other = subprocess.Popen(
        [sys.executable, "-c", LEADER, str(tier.path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert other.stdout is not None
        assert other.stdout.readline().strip() == "True"
        assert not tier.adapter.try_to_lead()
    finally:
        other.kill()
        other.wait()
        for pipe in (other.stdin, other.stdout):
            assert pipe is not None
            pipe.close()
    assert tier.adapter.try_to_lead()


def test_a_leader_whose_directory_was_deleted_stands_for_election_again(disk: Callable[..., Disk]) -> None:
    one = disk()
    assert one.adapter.try_to_lead()
    shutil.rmtree(one.path)
    two = disk()
    assert two.adapter.try_to_lead()
    assert not one.adapter.try_to_lead()


def test_where_nothing_can_be_locked_everyone_leads(disk: Callable[..., Disk], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no directory")
    tier = disk(tmp_path / "file" / "below")
    descriptors = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    for _ in range(3):
        assert tier.adapter.try_to_lead()
    assert len(os.listdir("/proc/self/fd")) == descriptors  # noqa: PTH208
