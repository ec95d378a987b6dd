"""The workers' side over a device that is none: saves are queued, and nobody writes to what they still read."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from lmcache_core import Region
from lmcache_core.client.client import Client
from lmcache_core.client.move import regions
from lmcache_core.errors import PoolError
from lmcache_core.native import native
from lmcache_core_vllm.config import ConnectorConfig
from lmcache_core_vllm.namespaces import GroupFacts, Hashing, RankFacts
from lmcache_core_vllm.pins import PoolPins
from lmcache_core_vllm.steps import Blocks, Load, Step
from lmcache_core_vllm.tensors import LayerRegions
from lmcache_core_vllm.worker import WorkerSide
from lmcache_testing.device import FakeDevice, FakeMemory
from lmcache_testing.processes import ServerProcess
from lmcache_testing.waiting import until

pytestmark = pytest.mark.skipif(native is None, reason="pages of a device are copied by the C extension")
BLOCKS, BYTES = 16, 4096
HASHING = Hashing("sha256", "0")


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with ServerProcess(64 << 20) as process:
        yield process


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDevice]:
    device = FakeDevice()
    monkeypatch.setattr(regions, "device_at", lambda address: device)
    monkeypatch.setattr(regions, "allocation_at", lambda address: 1)
    yield device
    device.run_free()


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class Rank:
    """A worker whose KV lies on the device."""

    def __init__(self, client: Client, salt: str, **own: Any) -> None:
        self.memory = FakeMemory(BLOCKS * BYTES)
        layers = [LayerRegions("a", [Region(self.memory, 0, BYTES, BYTES, BLOCKS, "cuda")])]
        settings = ConnectorConfig(step_wait_s=20, load_timeout_s=20, salt=salt, **own.pop("settings", {}))
        facts = (GroupFacts((("group", "0"),), BYTES),)
        self.side = WorkerSide(settings, client, RankFacts("m", "", (0, 1), True, facts), [layers], **own)

    def block(self, number: int) -> memoryview:
        return self.memory.view[number * BYTES : (number + 1) * BYTES]

    def fill(self, number: int, value: int) -> None:
        self.block(number)[:] = bytes([value]) * BYTES

    def saved(self) -> dict[str, Any]:
        for each in self.side.saving:
            assert each.job.wait(20)
        self.side.hear_saves()
        return self.side.counters.take()

    def load(self, number: int, block: int) -> set[int]:
        self.side.start_loads(Step(HASHING, loads=[Load("a", False, [Blocks(0, [bytes([number]) * 32], [block])])]))
        job = self.side.loading["a"].job
        assert job is not None
        assert job.wait(20)
        return self.side.arrived((), idle=False).invalid


@pytest.fixture
def rank(server: ServerProcess, device: FakeDevice, request: pytest.FixtureRequest) -> Iterator[Rank]:
    with server.client(copy_threads=1) as client:
        yield Rank(client, request.node.name)
        device.run_free()


def saves(first: int, blocks: list[int]) -> list[Blocks]:
    return [Blocks(0, [bytes([first + at]) * 32 for at in range(len(blocks))], blocks)]


def test_a_save_waits_neither_for_the_forward_nor_for_the_copy(rank: Rank, device: FakeDevice) -> None:
    device.run_free(False)
    device.engine_begins(lambda: rank.fill(1, 7))  # the forward, which is still running
    rank.side.save(Step(HASHING, saves=saves(0, [1])))
    (saving,) = rank.side.saving
    assert not saving.job.has_read
    assert saving.job.result is None
    device.engine_advances()
    device.run_free()
    assert rank.saved()["save_blocks"] == 1
    rank.fill(1, 0)
    assert rank.load(0, 2) == set()
    assert bytes(rank.block(2)) == b"\7" * BYTES


def test_a_step_that_is_given_blocks_which_a_save_reads_waits_for_it(rank: Rank, device: FakeDevice) -> None:
    rank.fill(1, 7)
    device.run_free(False)
    rank.side.save(Step(HASHING, saves=saves(10, [1, 2])))
    assert device.wait_gate(lambda: False)
    rank.side.await_reads(Step(HASHING, fresh=[3, 4]))  # others are not waited for
    assert not rank.side.saving[0].job.has_read
    opener = threading.Thread(target=device.run_free)
    opener.start()
    rank.side.await_reads(Step(HASHING, fresh=[2, 9]))
    assert rank.side.saving[0].job.has_read
    opener.join()
    rank.fill(1, 99)  # what the step computes
    assert rank.saved()["save_blocks"] == 2
    assert rank.load(10, 5) == set()
    assert bytes(rank.block(5)) == b"\7" * BYTES


def test_an_engine_that_sleeps_gets_its_memory_when_nothing_reads_it(rank: Rank, device: FakeDevice) -> None:
    rank.fill(1, 7)
    device.run_free(False)
    rank.side.save(Step(HASHING, saves=saves(20, [1])))
    assert device.wait_gate(lambda: False)
    opener = threading.Thread(target=device.run_free)
    opener.start()
    rank.side.unregister()
    assert not device.queued
    assert rank.side.saving[0].job.has_read
    opener.join()


def test_copies_are_charged_by_the_wall_once_they_have_ended(server: ServerProcess, device: FakeDevice) -> None:
    clock = Clock()
    with server.client(copy_threads=1) as client:
        own = {"settings": {"store_cpu_share": 1e-9}, "clock": clock, "cpu_clock": lambda: 0.0}
        rank = Rank(client, "charged", **own)  # what it has saved up is less than any copy takes
        rank.side.save(Step(HASHING, saves=saves(30, [1])))
        assert rank.saved()["save_blocks"] == 1
        rank.side.save(Step(HASHING, saves=saves(31, [2])))
        assert rank.side.counters.take() == {"save_paced_blocks": 1}
        clock.now_s += 1e12
        rank.side.save(Step(HASHING, saves=saves(31, [2])))
        assert rank.saved()["save_blocks"] == 1


def test_no_more_steps_are_queued_than_may_wait(rank: Rank, device: FakeDevice) -> None:
    device.run_free(False)
    for at in range(9):
        rank.side.save(Step(HASHING, saves=saves(40 + at, [at + 1])))
    assert rank.side.counters.take() == {"save_dropped_blocks": 1}
    device.run_free()
    assert rank.saved()["save_blocks"] == 8


class PinnedClient:
    """Its pool is registered, or refused, when the test lets it be."""

    def __init__(self, error: Exception | None = None) -> None:
        self.pool_is_pinned: bool | None = False
        self.error, self.calls, self.go = error, 0, threading.Event()

    def pin_memory(self) -> bool:
        self.calls += 1
        assert self.go.wait(20)
        if self.error:
            raise self.error
        self.pool_is_pinned = True
        return True


def test_the_pool_is_registered_beside_the_steps_and_anew_for_each_pool() -> None:
    client: Any = PinnedClient()
    pins = PoolPins(client)
    pins.look()
    pins.look()  # it is on its way
    client.go.set()
    until(lambda: client.pool_is_pinned)
    pins.look()
    assert client.calls == 1
    client.pool_is_pinned = None  # the server is away
    pins.look()
    assert client.calls == 1
    client.pool_is_pinned = False  # and comes back with another pool
    until(lambda: pins.look() or client.calls == 2)


def test_a_refusal_is_logged_once_and_not_tried_again(caplog: pytest.LogCaptureFixture) -> None:
    client: Any = PinnedClient(PoolError("CUDA cannot register the pool: raise ulimit -l"))
    pins = PoolPins(client)
    client.go.set()
    pins.look()
    until(lambda: "slower: CUDA cannot register" in caplog.text)
    pins.look()
    assert client.calls == 1
