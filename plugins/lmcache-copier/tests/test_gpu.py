"""Memory of a GPU, opened by the copier: what is ordered before what. Runs over CUDA's driver in host memory, and on a
GPU where there is one."""

from __future__ import annotations

import gc
import os
import random
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

import lmcache_copier
from lmcache_copier import messages as m
from lmcache_copier import register_pages
from lmcache_copier.pages import SharedFile, access_of
from lmcache_core import Status
from lmcache_core.errors import UsageError
from lmcache_testing.waiting import until

from .gpu_nodes import (
    BLOCKS,
    SPACE,
    STRIDE,
    Gpu,
    HostDevice,
    Stage,
    group_on,
    object_of,
    registered,
    staged,
    why_no_gpu,
)

IDS = [1, 2, 5, 3]
SCHEDULES = int(os.environ.get("LMCACHE_COPIER_SCHEDULES", "60"))


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> HostDevice:
    return HostDevice(tmp_path_factory.mktemp("driver"))


@pytest.fixture(
    scope="module",
    params=["host", pytest.param("cuda", marks=pytest.mark.skipif(bool(why_no_gpu()), reason=why_no_gpu()))],
)
def stage(request: pytest.FixtureRequest) -> Iterator[Stage]:
    yield from staged(Gpu() if request.param == "cuda" else request.getfixturevalue("host"))


@pytest.fixture
def memory(stage: Stage) -> Iterator[Any]:
    made = stage.device.memory()
    yield made
    assert made.faults == 0


def random_bytes(memory: Any) -> Any:
    return np.random.default_rng().integers(0, 256, memory.nbytes, np.uint8)


def keys(count: int = 2) -> list[bytes]:
    return [os.urandom(32) for _ in range(count)]


def test_it_stores_and_retrieves_the_bytes_that_the_engine_itself_would(stage: Stage, memory: Any) -> None:
    before, names, own_names = random_bytes(memory), keys(), keys()
    memory.write(before)
    pages = registered(stage.client, memory)
    assert pages.store([(0, names, IDS)]).stored == 2
    own = stage.client.register_pages([group_on(memory)])
    assert own.store([(0, own_names, IDS)]).stored == 2
    for name, own_name, blocks in zip(names, own_names, (IDS[:2], IDS[2:]), strict=True):
        assert stage.get(name) == stage.get(own_name) == object_of(before, blocks)
    memory.write(np.zeros_like(before))
    assert pages.retrieve([(0, names, [4, 0, 7, 6])], verify="always").hits == 2
    after = memory.read()
    assert object_of(after, [4, 0]) == object_of(before, IDS[:2])
    assert object_of(after, [7, 6]) == object_of(before, IDS[2:])
    assert not after[1 * STRIDE : 4 * STRIDE].any(), "blocks that nobody named"
    pages.close()


def test_no_page_is_read_or_written_before_what_the_engine_had_queued(stage: Stage, host: HostDevice) -> None:
    if stage.device is not host:
        pytest.skip("a real GPU's work ends when it likes")
    memory = host.memory()
    pages, names, computed = registered(stage.client, memory), keys(), random_bytes(memory)
    host.engine_begins()
    job = pages.store_start([(0, names, IDS)])
    assert not job.wait_read(0.05)
    memory.write(computed)
    host.engine_ends()
    assert job.wait_read(60)
    assert job.wait(60)
    assert stage.get(names[0]) == object_of(computed, IDS[:2])
    host.engine_begins()
    load = pages.retrieve_start([(0, names, [0, 1, 2, 3])])
    assert not load.wait(0.05)
    memory.write(np.zeros_like(computed))  # the end of what still ran
    host.engine_ends()
    assert load.wait(60)
    assert object_of(memory.read(), [0, 1]) == object_of(computed, IDS[:2])
    pages.close()
    memory.free()
    assert memory.faults == 0


def test_unregistering_is_answered_once_it_is_closed(stage: Stage, memory: Any) -> None:
    pages = registered(stage.client, memory)
    assert pages.store([(0, keys(), IDS)]).stored == 2
    if isinstance(stage.device, HostDevice):
        assert memory.opened_by == stage.copier.pid
    stage.device.engine_begins()
    job = pages.store_start([(0, keys(), IDS)])
    ended = stage.device.engine_ends  # what a cancel waits for, beside this thread
    threading.Timer(0.05, ended).start()
    pages.close()
    assert memory.opened_by == 0
    assert job.wait(60)
    memory.free()


def test_memory_that_nobody_unregisters_is_kept_until_it_is_closed(stage: Stage, host: HostDevice) -> None:
    if stage.device is not host:
        pytest.skip("torch frees its memory by itself")
    freed: list[int] = []

    class Owner(type(host.memory())):  # type: ignore[misc]  # of the driver's
        def __del__(self) -> None:
            freed.append(self.opened_by)
            self.free()

    owner = Owner(host.driver)
    pages = registered(stage.client, owner)
    assert pages.store([(0, keys(), IDS)]).stored == 2
    del pages, owner
    gc.collect()
    other = registered(stage.client, memory := host.memory())

    def closed() -> bool:
        other.store([(0, keys(1), IDS[:2])])  # somebody has to hear the answer
        return bool(freed)

    until(closed, "it is freed")
    assert freed == [0], "it was open still"
    other.close()
    memory.free()


def test_a_killed_copier_costs_a_failed_job_and_memory_can_be_freed(stage: Stage, memory: Any) -> None:
    pages = registered(stage.client, memory)
    names = keys()
    assert pages.store([(0, names, IDS)]).stored == 2
    stage.device.engine_begins()
    job = pages.retrieve_start([(0, names, IDS)])
    stage.copier.kill()
    assert job.wait(60)
    stage.device.engine_ends()
    assert job.result is not None
    assert list(job.result.statuses[0]) == [Status.UNREACHABLE] * 2
    assert sorted(job.result.untrusted[0]) == sorted(IDS)
    stage.copier.start()
    until(lambda: pages.retrieve([(0, names, IDS)]).hits == 2, "another copier")
    pages.close()
    memory.free()


ENGINE = """
import sys
sys.path.insert(0, {here!r})
from tests.gpu_nodes import CDLL, HostMemory, registered, cuda
from tests import gpu_nodes
import ctypes
from lmcache_core import Client
cuda.LIBRARY = {library!r}
driver = CDLL({library!r})
for name in ("host_allocate", "host_bytes", "host_header"):
    getattr(driver, name).restype = ctypes.c_void_p
driver.host_allocate.argtypes = [ctypes.c_size_t, ctypes.c_void_p]
driver.host_bytes.argtypes = driver.host_header.argtypes = [ctypes.c_void_p]
client = Client.connect({name!r}, runtime_dir={run!r})
pages = registered(client, HostMemory(driver))
assert pages.store([(0, [bytes(32)], [1, 2])]).stored == 1
driver.host_engine_begins()
job = pages.store_start([(0, [bytes([1]) * 32], [1, 2])])
print("under way", flush=True)
sys.stdin.read()
"""


def test_what_a_dead_engine_had_is_closed(stage: Stage, host: HostDevice) -> None:
    if stage.device is not host:
        pytest.skip("nobody sees what a GPU's driver has open")
    until(lambda: stage.copier.open_allocations == 0, "earlier ones")
    run, name = str(stage.server.runtime_dir), stage.server.name
    here = str(Path(__file__).parents[1])
    script = ENGINE.format(here=here, library=str(host.library), name=name, run=run)
    with subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as engine:
        assert engine.stdout is not None
        assert engine.stdout.readline() == b"under way\n"
        assert stage.copier.open_allocations > 0
        engine.kill()
    until(lambda: stage.copier.open_allocations == 0, "they are closed")
    assert stage.get(bytes([1]) * 32) in (None, stage.get(bytes(32))), "of equal pages: the whole object, or none"


def test_what_does_not_fit_is_refused_in_words(stage: Stage, memory: Any) -> None:
    pages = registered(stage.client, memory)
    link, number = pages.registration()
    uuid, handle = stage.client.register_pages([group_on(memory)]).tables.device.uuid, bytes(64)
    piece = m.MemoryPiece(0, memory.nbytes, 0, False)
    group = m.GroupOf(7, "uint8", [4096], "", [m.RegionOf(0, 0, 4096, 4096, 1)], 1)
    mark = access_of(stage.client).mark

    def refused(**changes: Any) -> str:
        message = m.RegisterMemory(0, mark.at, mark.value, [piece], [group], 0, uuid, [handle])
        with pytest.raises(UsageError) as caught:
            link.call(lambda rid: msgspec.structs.replace(message, rid=rid, **changes), (m.MemoryRegistered,))
        return str(caught.value)

    assert "not the one that has the memory" in refused(gpu=b"x" * 16)
    assert "CUDA refuses cuIpcOpenMemHandle" in refused()
    assert "allocation 0 was not named" in refused(allocations=[])
    entry = m.JobEntry(0, bytes(32), np.array([1, 2]).tobytes())
    with pytest.raises(UsageError, match="name the event"):
        link.call(lambda rid: m.StorePages(rid, number, [entry], None, False), (m.JobFinished,))
    with pytest.raises(UsageError, match="no file"):
        register_pages(stage.client, [group_on(memory)], "server", [SharedFile(0, bytearray(8))])
    said: list[str] = []
    own = register_pages(stage.client, [group_on(memory)], "auto", say=said.append)
    assert not isinstance(own, lmcache_copier.ServerPages)
    pages.close()


# --- schedules --------------------------------------------------------------------------------------------------


class Broken(AssertionError):
    """What a schedule has broken."""


def explored(stage: Stage, seed: int) -> None:
    """Registers, jobs, cancels, ends of the engine's work, unregistering, frees and kills, in an order of the seed's.
    Raises `Broken`."""
    rng = random.Random(seed)
    host: HostDevice = stage.device
    memory = host.memory()
    pages = registered(stage.client, memory)
    jobs: list[tuple[Any, list[bytes], list[int], bool]] = []
    stored: dict[bytes, bytes] = {}
    trace: list[str] = []
    later = threading.Timer(rng.random() * 0.01, host.engine_ends)  # beside the unregistering, or before it
    memory.write(np.frombuffer(rng.randbytes(memory.nbytes), np.uint8))
    try:
        for _ in range(rng.randrange(2, 7)):
            action = rng.choice(["store", "store", "retrieve", "engine", "cancel", "again"])
            trace.append(action)
            blocks = rng.sample(range(BLOCKS), 4)
            if action == "store" and not jobs:
                host.engine_begins()
                names = [rng.randbytes(32) for _ in range(2)]
                job = pages.store_start([(0, names, blocks)])
                jobs.append((job, names, blocks, True))
                memory.write(np.frombuffer(rng.randbytes(memory.nbytes), np.uint8))  # what the engine had queued
                data = memory.read()
                stored |= {names[at]: object_of(data, blocks[2 * at : 2 * at + 2]) for at in range(2)}
                if rng.random() < 0.5:
                    host.engine_ends()
            elif action == "retrieve" and not jobs and stored:
                host.engine_begins()
                names = rng.sample(sorted(stored), 2)
                jobs.append((pages.retrieve_start([(0, names, blocks)]), names, blocks, False))
                memory.write(0)
                if rng.random() < 0.5:
                    host.engine_ends()
            elif action == "engine":
                host.engine_ends()
            elif action == "cancel" and jobs:
                jobs[0][0].leave()
            elif action == "again" and jobs:
                host.engine_ends()
                _judge(stage, memory, *jobs.pop(), stored)
        if rng.random() < 0.08:
            trace.append("kill")
            stage.copier.kill()
        later.start()
        if rng.random() < 0.5:
            later.join()
        trace.append("unregister")
        pages.close()
        memory.free()
        if memory.faults:
            raise Broken(f"the driver saw fault {memory.faults}")
        for job, names, _, store in jobs:
            job.wait(60)
            for name, status in zip(names, job.result.statuses[0], strict=True):
                found = stage.get(name)
                if found not in (None, stored[name]):
                    raise Broken(f"{status}, and the pool has other bytes than were computed")
                if store and status is Status.STORED and found is None:
                    raise Broken("stored, and the pool does not have it")
        if memory.faults:
            raise Broken(f"the driver saw fault {memory.faults}, late")
    except Broken as broken:
        raise Broken(f"schedule {seed}: {broken}; {' '.join(trace)}") from broken
    finally:
        if later.ident is not None:
            later.join()
        host.engine_ends()
        if "kill" in trace:
            stage.copier.start()


def explore(stage: Stage, schedules: int) -> None:
    for seed in range(schedules):
        explored(stage, seed)
        stage.client.clear(SPACE)


def _judge(
    stage: Stage, memory: Any, job: Any, names: list[bytes], blocks: list[int], store: bool, stored: dict[bytes, bytes]
) -> None:
    if not job.wait(60):
        raise Broken("the job does not end")
    data = memory.read()
    for at, status in enumerate(job.result.statuses[0]):
        if store and stage.get(names[at]) not in (None, stored[names[at]]):
            raise Broken(f"{status}, and the pool has other bytes than were computed")
        if not store and status is Status.HIT and object_of(data, blocks[2 * at : 2 * at + 2]) != stored[names[at]]:
            raise Broken("a hit, and the pages have other bytes")


def test_no_schedule_breaks_anything(stage: Stage) -> None:
    """`LMCACHE_COPIER_SCHEDULES`: how many."""
    if not isinstance(stage.device, HostDevice):
        pytest.skip("a real GPU keeps to no schedule")
    explore(stage, SCHEDULES)


MUTANTS = {
    "unregistering is answered before it is closed": (
        "engine.py", "        registration.close()\n        self._send(m.CopierDone(rid))\n",
        "        self._send(m.CopierDone(rid))\n        time.sleep(0.05)\n        registration.close()\n",
    ),
    "what is unregistered is still copied, and stays open": (
        "engine.py",
        "                self._cancel(job)\n        registration.close()", "                pass",
    ),
    "the engine's event is not waited for": (
        "gpu.py", "        return self._event\n", "        return self._device.record(0)\n",
    ),
}  # fmt: skip


@contextmanager
def mutated(host: HostDevice, folder: Path, path: str, right: str, wrong: str) -> Iterator[Stage]:
    shutil.copytree(Path(lmcache_copier.__file__).parent, folder / "lmcache_copier")
    text = (folder / "lmcache_copier" / path).read_text()
    assert text.count(right) == 1
    (folder / "lmcache_copier" / path).write_text(text.replace(right, wrong))
    yield from staged(host, {"PYTHONPATH": str(folder)})


@pytest.mark.slow
@pytest.mark.parametrize("name", MUTANTS)
def test_a_wrong_order_is_noticed(host: HostDevice, tmp_path: Path, name: str) -> None:
    with mutated(host, tmp_path, *MUTANTS[name]) as stage, pytest.raises(Broken):
        explore(stage, 300)
