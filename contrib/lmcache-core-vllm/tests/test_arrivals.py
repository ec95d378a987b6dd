"""Blocks that another engine is computing, over a real server: each is read once it is there, and nobody waits longer
than was said."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

import pytest

from lmcache_core import Client
from lmcache_core.native import native
from lmcache_core_vllm.config import ConnectorConfig
from lmcache_core_vllm.namespaces import GroupFacts, Hashing, RankFacts
from lmcache_core_vllm.shards import parts_of
from lmcache_core_vllm.steps import Blocks, Load, Step
from lmcache_core_vllm.tensors import layer_regions
from lmcache_core_vllm.weights import Weights
from lmcache_core_vllm.worker import WorkerSide
from lmcache_testing.processes import ServerProcess
from lmcache_testing.waiting import WAIT_S, until

torch = pytest.importorskip("torch")
if native is None:
    pytest.skip("without the C extension there is no index to wait for", allow_module_level=True)

BLOCKS, BYTES, HEADS = 16, 4096, 4
HASHING = Hashing("sha256", "0")
LONG_S = 2 * WAIT_S  # for what a test waits for otherwise


class Clock:
    """Goes as the machine's, and further when a test says so."""

    def __init__(self) -> None:
        self.ahead_s = 0.0

    def __call__(self) -> float:
        return time.monotonic() + self.ahead_s


class Rank:
    """A worker with memory of its own."""

    def __init__(
        self, client: Client, groups: int, salt: str, *, shards: int = 0, at: tuple[int, int] = (0, 1), **own: Any
    ) -> None:
        """`shards`: of its KV, 0: as it is. `at`: its place among the tensor-parallel ranks."""
        self.clock = Clock()
        shape = (BLOCKS, HEADS // at[1], 1, BYTES // HEADS)
        self.memory = [torch.randint(0, 256, shape, dtype=torch.uint8) for _ in range(groups)]
        regions = [layer_regions(["a"], {"a": each}, BLOCKS) for each in self.memory]
        facts = tuple(
            GroupFacts((("backend", "CPU_ATTN/vec"), ("group", str(group))), BYTES // at[1]) for group in range(groups)
        )
        settings = ConnectorConfig(step_wait_s=20, load_timeout_s=20, lookup_timeout_s=20, salt=salt)
        rank = RankFacts("m", "", at, True, facts)
        parts = parts_of(rank, regions, shards, at[1]) if shards else [(rank, regions)]
        self.side = WorkerSide(settings, client, *parts[0], more_shards=parts[1:], ranks=at[1], clock=self.clock, **own)

    def store(self, first: int, end: int) -> None:
        """Blocks of the prompt, by number; they are in the blocks of the same number + 1."""
        saves = [Blocks(at, hashes(first, end), [*range(first + 1, end + 1)]) for at in range(len(self.memory))]
        self.side.save(Step(HASHING, saves=saves))
        for each in self.side.saving:
            each.job.wait()
        self.side.hear_saves()

    def wait_for(self, count: int, wait_s: float = LONG_S) -> None:
        """Begin to load so many blocks of the prompt, into the blocks of their number + 1."""
        blocks = [Blocks(at, hashes(0, count), [*range(1, count + 1)]) for at in range(len(self.memory))]
        self.side.start_loads(Step(HASHING, loads=[Load("a", False, blocks, 1, wait_s)]))

    @property
    def arrived(self) -> int:
        """Blocks so far, without waiting."""
        job: Any = self.side.loading["a"].job
        job.done()
        return int(job.arrived)


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with ServerProcess(64 << 20) as process:
        yield process


@pytest.fixture
def connect(server: ServerProcess, request: pytest.FixtureRequest) -> Iterator[Callable[..., Rank]]:
    clients: list[Client] = []

    def connect(groups: int = 1, **own: Any) -> Rank:
        clients.append(server.client())
        return Rank(clients[-1], groups, request.node.name, **own)

    yield connect
    for client in clients:
        client.close()


def hashes(first: int, end: int) -> list[bytes]:
    return [bytes([number]) * 32 for number in range(first, end)]


@pytest.mark.parametrize("groups", [1, 2])
def test_blocks_are_read_as_they_come(connect: Callable[..., Rank], groups: int) -> None:
    prefill, decode = connect(groups), connect(groups)
    decode.wait_for(6)
    assert decode.arrived == 0
    for number in range(6):
        prefill.store(number, number + 1)
        until(lambda number=number: decode.arrived == groups * (number + 1), "the block")
        assert decode.side.arrived((), idle=False).received == ({"a"} if number == 5 else set())
    for ours, theirs in zip(decode.memory, prefill.memory, strict=True):
        assert torch.equal(ours[1:7], theirs[1:7])


def test_a_worker_without_anything_to_compute_is_woken_by_the_block(connect: Callable[..., Rank]) -> None:
    prefill, decode = connect(), connect()
    decode.wait_for(1)
    waiting = threading.Event()
    received: list[set[str]] = []

    def step() -> None:
        waiting.set()
        while not (found := decode.side.arrived((), idle=True).received):
            pass
        received.append(found)

    stepping = threading.Thread(target=step)
    stepping.start()
    assert waiting.wait(WAIT_S)
    prefill.store(0, 1)
    stepping.join(WAIT_S)
    assert received == [{"a"}]


def test_what_does_not_come_in_time_is_invalid_and_the_rest_is_not(connect: Callable[..., Rank]) -> None:
    prefill, decode = connect(), connect()
    prefill.store(0, 2)
    decode.wait_for(5)
    until(lambda: decode.arrived == 2, "two blocks")
    decode.clock.ahead_s += LONG_S
    told = decode.side.arrived((), idle=False)
    assert (told.received, told.invalid) == ({"a"}, {3, 4, 5})
    figures = decode.side.counters.take()
    assert (figures["load_blocks"], figures["prefill_late_blocks"]) == (2, 3)
    assert "load_failed_blocks" not in figures


def test_each_block_gives_the_next_one_its_time(connect: Callable[..., Rank]) -> None:
    prefill, decode = connect(), connect()
    decode.wait_for(3)
    for number in range(3):
        decode.clock.ahead_s += LONG_S / 2
        assert decode.arrived == number
        prefill.store(number, number + 1)
        until(lambda number=number: decode.arrived == number + 1, "the block")
    assert decode.side.arrived((), idle=False).invalid == set()


def test_a_block_behind_a_gap_is_not_read(connect: Callable[..., Rank]) -> None:
    """A prompt is read from its beginning: what comes out of order waits for what is before it."""
    prefill, decode = connect(), connect()
    decode.wait_for(3)
    prefill.store(1, 3)
    assert decode.arrived == 0
    prefill.store(0, 1)
    until(lambda: decode.arrived == 3, "all of them")


def test_a_wait_that_is_given_up_is_told_of_once(connect: Callable[..., Rank]) -> None:
    decode = connect()
    decode.wait_for(2)
    told = decode.side.arrived(["a"], idle=False)
    assert (told.received, told.invalid) == ({"a"}, {1, 2})
    assert decode.side.counters.take()["load_cancelled_requests"] == 1
    assert decode.side.arrived((), idle=True).received == set()


def test_blocks_that_are_there_are_read_before_an_idle_worker_waits_for_others(connect: Callable[..., Rank]) -> None:
    prefill, decode = connect(), connect()
    prefill.store(0, 4)
    decode.wait_for(4, LONG_S)
    until(lambda: decode.arrived == 4, "all of them")
    decode.side.start_loads(
        Step(
            HASHING,
            loads=[
                Load("b", False, [Blocks(0, hashes(9, 10), [9])], 2, LONG_S),
                Load("c", False, [Blocks(0, hashes(0, 4), [10, 11, 12, 13])], 3),
            ],
        )
    )
    received = set()
    while "c" not in received:
        received |= decode.side.arrived((), idle=True).received
    assert "b" not in received


def test_saves_that_an_engine_waits_for_are_not_paced(connect: Callable[..., Rank]) -> None:
    days = count(0, 100_000)  # each save takes a day of the processor
    prefill, decode = connect(cpu_clock=lambda: next(days)), connect()
    prefill.store(0, 1)
    prefill.side.save(Step(HASHING, saves=[Blocks(0, hashes(1, 2), [2])]))
    assert prefill.side.counters.take()["save_paced_blocks"] == 1
    prefill.side.save(Step(HASHING, saves=[Blocks(0, hashes(1, 2), [2])], delivers=True))
    decode.wait_for(2)
    until(lambda: decode.arrived == 2, "both blocks")


# --- beside shards, ranks, sleep and new weights ----------------------------------------------------------------


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize(("writers", "readers"), [(1, 1), (1, 2), (2, 1)])
def test_shards_of_heads_are_read_as_they_come_whatever_the_ranks(
    connect: Callable[..., Rank], groups: int, writers: int, readers: int
) -> None:
    prefill = [connect(groups, shards=4, at=(rank, writers)) for rank in range(writers)]
    decode = [connect(groups, shards=4, at=(rank, readers)) for rank in range(readers)]
    for each in decode:
        each.wait_for(3)
    for number in range(3):
        for each in prefill:
            each.store(number, number + 1)
        for each in decode:
            until(lambda each=each, n=number: each.arrived == groups * (4 // readers) * (n + 1), "the block's shards")
    for each in decode:
        found = each.side.arrived((), idle=False)
        assert (found.received, found.failed, found.invalid) == ({"a"}, set(), set())
    for group in range(groups):
        ours, theirs = (torch.cat([each.memory[group] for each in side], dim=1) for side in (decode, prefill))
        assert torch.equal(ours[1:4], theirs[1:4])


def test_a_block_of_which_a_shard_does_not_come_is_invalid_and_those_before_it_are_not(
    connect: Callable[..., Rank],
) -> None:
    one, other = (connect(shards=4, at=(rank, 2)) for rank in range(2))
    decode = connect(shards=4)
    decode.wait_for(4)
    one.store(0, 3)
    other.store(0, 2)
    until(lambda: decode.arrived == 2 * 3 + 2 * 2, "ten shards")
    decode.clock.ahead_s += LONG_S
    found = decode.side.arrived((), idle=False)
    assert (found.received, found.invalid) == ({"a"}, {3, 4})
    figures = decode.side.counters.take()
    assert (figures["load_blocks"], figures["prefill_late_blocks"]) == (10, 6)
    assert torch.equal(decode.memory[0][1:3], torch.cat([one.memory[0], other.memory[0]], dim=1)[1:3])


@pytest.mark.parametrize("shards", [0, 2])
def test_an_engine_that_falls_asleep_ends_its_waits_and_tells_of_them_when_it_has_woken(
    connect: Callable[..., Rank], shards: int
) -> None:
    prefill, decode = connect(shards=shards), connect(shards=shards)
    prefill.store(0, 1)
    decode.wait_for(3)
    until(lambda: decode.arrived == max(1, shards), "the first block")
    decode.side.unregister()
    assert decode.side.sleeps
    before = decode.memory[0].clone()
    prefill.store(1, 3)
    decode.side.restore(Weights("m", "", "", ""))
    found = decode.side.arrived((), idle=True)
    assert (found.received, found.invalid) == ({"a"}, {2, 3})
    assert torch.equal(decode.memory[0], before)
    decode.wait_for(3)
    until(lambda: decode.arrived == 3 * max(1, shards), "all of them, in the new memory")


@pytest.mark.parametrize("how", ["reset", "another path"])
def test_new_weights_end_a_wait_for_blocks_of_the_former_ones(connect: Callable[..., Rank], how: str) -> None:
    prefill, decode = connect(), connect()
    decode.side.begin_step(Step(HASHING, number=1))
    prefill.store(0, 1)
    decode.wait_for(3)
    until(lambda: decode.arrived == 1, "the first block")
    decode.side.end_step(Step(HASHING, number=1))
    before = decode.memory[0].clone()
    if how == "reset":
        decode.side.begin_step(Step(HASHING, number=2, weights=Weights("m", "2", "m", "/m")), "/m")
    else:
        decode.side.begin_step(Step(HASHING, number=2), "/m")
    prefill.store(1, 3)
    found = decode.side.arrived((), idle=False)
    assert (found.received, found.invalid) == ({"a"}, {2, 3})
    assert torch.equal(decode.memory[0], before)


def test_ranks_report_a_wait_once_each_however_late(connect: Callable[..., Rank]) -> None:
    """vLLM counts the reports of all ranks, and the scheduler goes on to name the load until the last."""
    prefill = [connect(at=(rank, 2)) for rank in range(2)]
    decode = [connect(at=(rank, 2)) for rank in range(2)]
    for each in decode:
        each.side.begin_step(Step(HASHING, number=1))
        each.wait_for(1)
        each.side.end_step(Step(HASHING, number=1))
    prefill[0].store(0, 1)
    awaited = [Load("a", False, [Blocks(0, [], [1])], 1, LONG_S)]
    reports: list[int] = [0, 0]
    for number in range(2, 12):
        if number == 9:
            prefill[1].store(0, 1)
            until(lambda: decode[1].arrived, "the block")
        for at, each in enumerate(decode):
            if number == 2 and at == 0:
                until(lambda: decode[0].arrived, "the block")
            step = Step(HASHING, number=number, awaited=awaited if number < 10 else [])
            each.side.begin_step(step)
            found = each.side.arrived((), idle=False)
            each.side.end_step(step)
            reports[at] += len(found.received)
            assert found.invalid == set()
    assert reports == [1, 1]
