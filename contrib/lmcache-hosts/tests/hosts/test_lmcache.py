"""Our adapter in LMCache's own storage manager: `nox -s "host(lmcache)"`."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("lmcache.lmcache_native", reason="LMCache is not installed here")
import torch
from lmcache.v1.distributed.api import MemoryLayoutDesc, ObjectKey
from lmcache.v1.distributed.l2_adapters.base import L2AdapterInterface
from lmcache_host import DESC, NBYTES, SHAPE, Manager, adapter_config, content, lmcache_over, object_key

from lmcache_core.errors import SettingsError
from lmcache_hosts.lmcache_l2 import INTERFACE, HostedL2Adapter
from lmcache_mock.control import write_rules
from lmcache_mock.drills.faults import FaultRule
from lmcache_testing.waiting import until

if TYPE_CHECKING:
    from lmcache_core.server.server import Server

HASTY = {"lookup_s": 0.3, "load_s": 0.3, "store_s": 0.3}


def disk(path: Path, **more: Any) -> Any:
    return adapter_config({"tier": {"type": "fs", "path": str(path)}, **more})


def mock(path: Path) -> Any:
    return adapter_config({"tier": {"type": "mock", "control": str(path / "faults")}, **HASTY})


def faults(path: Path, *rules: str) -> None:
    write_rules(path / "faults", [FaultRule.parse(rule) for rule in rules])


def equal(read: list[torch.Tensor], numbers: range) -> bool:
    return len(read) == len(numbers) and all(
        torch.equal(each, content(number)) for each, number in zip(read, numbers, strict=True)
    )


def test_what_lmcache_evicted_comes_back_from_our_tier(tmp_path: Path) -> None:
    with lmcache_over(disk(tmp_path)) as host:
        host.store(range(8))
        assert equal(host.read(range(8)), range(8))
        assert host.manager.memcheck()


def test_the_next_process_of_lmcache_finds_it(tmp_path: Path) -> None:
    with lmcache_over(disk(tmp_path)) as host:
        host.store(range(4))
    with lmcache_over(disk(tmp_path)) as host:
        assert equal(host.read(range(6)), range(4))


def test_the_same_bytes_of_another_dtype_or_tenant_are_not_found(tmp_path: Path) -> None:
    half = MemoryLayoutDesc([torch.Size(SHAPE)], [torch.float16])
    with lmcache_over(disk(tmp_path)) as host:
        host.store(range(2))
        assert host.read(range(2), half) == []
        assert host.read(range(2), salt="tenant") == []
        assert host.read(range(2), model="other") == []
        assert equal(host.read(range(2)), range(2))


@pytest.mark.parametrize("fault", ["flipped_bits", "short_read", "neighbour", "error", "gone", "hang"])
def test_a_failed_load_is_a_miss_and_lmcache_goes_on(tmp_path: Path, fault: str) -> None:
    with lmcache_over(mock(tmp_path)) as host:
        host.store(range(4))
        faults(tmp_path, f"load {fault}")
        assert host.read(range(1, 4)) == []
        faults(tmp_path)
        until(lambda: equal(host.read(range(1)), range(1)), "the tier to be used again")
        assert host.manager.memcheck()


def test_a_medium_that_hangs_does_not_hang_lmcache(tmp_path: Path) -> None:
    with lmcache_over(mock(tmp_path)) as host:
        host.store(range(2))
        faults(tmp_path, "any hang")
        host.write(range(2, 6))
        assert host.read(range(2)) == []
        host.forget(range(2, 6))  # nothing of the L1 stays locked for a store that hangs
        faults(tmp_path)
        until(lambda: equal(host.read(range(2)), range(2)), "the tier to be used again")


def test_deletes_reach_the_tier_and_the_accounts_of_lmcache(tmp_path: Path) -> None:
    with lmcache_over(disk(tmp_path)) as host:
        host.store(range(4))
        assert host.adapter.get_usage().total_bytes_used == 4 * NBYTES
        host.adapter.delete([object_key(0), object_key(99)])
        until(lambda: host.adapter.get_usage().total_bytes_used == 3 * NBYTES, "the delete to be counted")
        assert host.read(range(1)) == []


def test_a_delete_knows_the_size_of_each_ranks_objects(tmp_path: Path) -> None:
    """Two engines of one model, with one rank and with two."""
    half = ObjectKey(object_key(0).chunk_hash, "model", ObjectKey.ComputeKVRank(2, 0, 2, 0))
    with lmcache_over(disk(tmp_path)) as host:
        host.store(range(1))
        host.manager.reserve_write([half], MemoryLayoutDesc([torch.Size((2, 4, 64, 64))], [torch.bfloat16]))
        host.manager.finish_write([half])
        until(lambda: host.adapter.get_usage().total_bytes_used == NBYTES + NBYTES // 2, "the half to be stored")
        host.adapter.delete([object_key(0)])
        until(lambda: host.adapter.get_usage().total_bytes_used == NBYTES // 2, "the delete to be counted")


def test_the_tier_stays_below_its_capacity(tmp_path: Path) -> None:
    capacity = 8 * (NBYTES + 4096)
    config = adapter_config({"tier": {"type": "fs", "path": str(tmp_path), "capacity_bytes": capacity}})
    with lmcache_over(config) as host:
        for first in range(0, 32, 4):
            host.store(range(first, first + 4))
        assert host.adapter.report_status()["tier"]["bytes_used"] <= capacity
        assert equal(host.read(range(31, 32)), range(31, 32))


def test_a_task_is_answered_once_and_its_descriptor_signals(tmp_path: Path) -> None:
    adapter = HostedL2Adapter({"tier": {"type": "fs", "path": str(tmp_path)}})
    try:
        lookup = adapter.get_lookup_and_lock_event_fd()
        assert len({adapter.get_store_event_fd(), lookup, adapter.get_load_event_fd()}) == 3
        task = adapter.submit_lookup_and_lock_task([object_key(1)], {0: DESC})
        until(lambda: _signalled(lookup), "the event")
        assert adapter.query_lookup_and_lock_result(task).popcount() == 0
        assert adapter.query_lookup_and_lock_result(task) is None
        adapter.submit_unlock([object_key(1)])
    finally:
        adapter.close()
        adapter.close()


def _signalled(descriptor: int) -> bool:
    try:
        return os.eventfd_read(descriptor) > 0
    except BlockingIOError:
        return False


def test_a_killed_lmcache_leaves_whole_objects_alone(tmp_path: Path) -> None:
    script = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from lmcache_host import *\n"
        "host = Manager(adapter_config({'tier': {'type': 'fs', 'path': sys.argv[2]}}))\n"
        "number = 0\n"
        "while True:\n"
        "    host.store([number])\n"
        "    number += 1\n"
        "    print(number, flush=True)\n"
    )
    command = [sys.executable, "-c", script, str(Path(__file__).parent), str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        stored = 0
        for line in child.stdout:
            stored = int(line) if line.strip().isdigit() else stored
            if stored == 3:
                break
        child.send_signal(signal.SIGKILL)
        child.wait()
    with lmcache_over(disk(tmp_path)) as host:
        assert equal(host.read(range(3)), range(3))
        for number in range(3, 20):
            read = host.read([number])
            assert not read or torch.equal(read[0], content(number))


def test_two_lmcaches_share_the_pool_of_our_server(start: Callable[..., Server], tmp_path: Path) -> None:
    server = start(l1={"size_bytes": "64MiB"})
    settings = server.parts.settings
    config = adapter_config({"server": {"name": settings.name, "runtime_dir": str(settings.runtime_dir)}})
    with lmcache_over(config) as one, lmcache_over(config) as other:
        one.store(range(4))
        until(lambda: equal(other.read(range(4)), range(4)), "the other to be connected")
        assert other.adapter.report_status()["is_healthy"]


def test_without_its_server_lmcache_misses(tmp_path: Path) -> None:
    config = adapter_config({"server": {"name": "nobody", "runtime_dir": str(tmp_path)}, **HASTY})
    with lmcache_over(config) as host:
        host.write(range(2))
        assert host.read(range(2, 4)) == []
        host.forget(range(2))


def test_another_interface_is_refused_with_a_cure() -> None:
    class Changed(L2AdapterInterface):
        def submit_load_task(self, keys: Any, objects: Any, priority: int) -> int:
            return priority

        def submit_more(self) -> None:
            """What no version has."""

    with pytest.raises(
        SettingsError, match=r"submit_load_task\(\) takes keys, objects, priority.*install LMCache 0\.5"
    ):
        INTERFACE.check(Changed, HostedL2Adapter)


@pytest.mark.parametrize(
    ("params", "says"),
    [
        ({}, "give either"),
        ({"tier": {"type": "fs", "path": "/tmp"}, "server": {}}, "give either"),
        ({"tier": {"type": "fs", "path": "/tmp"}, "load": 1}, "known settings"),
        ({"tier": {"type": "fs", "pth": "/tmp"}}, "pth"),
    ],
)
def test_wrong_settings_are_refused(params: dict[str, Any], says: str) -> None:
    with pytest.raises(SettingsError, match=says):
        HostedL2Adapter(params)


def test_managers_end(tmp_path: Path) -> None:
    """Also with a medium that hangs."""
    with lmcache_over(mock(tmp_path)) as host:
        faults(tmp_path, "any hang")
        host.write(range(4))
    assert isinstance(host, Manager)
