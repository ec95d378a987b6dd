"""The workers' side over a real server: two groups of a torn-up memory, without vLLM."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from lmcache_core.client import Pages
from lmcache_core.client.client import Client
from lmcache_core_vllm.config import ConnectorConfig
from lmcache_core_vllm.namespaces import GroupFacts, Hashing, RankFacts
from lmcache_core_vllm.steps import Blocks, Load, Step
from lmcache_core_vllm.tensors import layer_regions
from lmcache_core_vllm.weights import Weights
from lmcache_core_vllm.worker import DELIVERY_WAIT_S, SAVE_WAIT_S, WorkerSide
from lmcache_testing.processes import ServerProcess
from lmcache_testing.waiting import until

torch = pytest.importorskip("torch")
BLOCKS, BYTES = 16, 4096
HASHING = Hashing("sha256", "0")
WEIGHTS = Weights("m", "", "", "")
# Waits for as long as it takes: no test asks how busy the machine is.
SETTINGS = ConnectorConfig(step_wait_s=20, load_timeout_s=20, lookup_timeout_s=20)


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with ServerProcess(64 << 20) as process:
        yield process


class Rank:
    """A worker with memory of its own."""

    def __init__(self, client: Client, groups: int, salt: str, **own: Any) -> None:
        self.memory = [torch.randint(0, 256, (BLOCKS, 1, 1, BYTES), dtype=torch.uint8) for _ in range(groups)]
        regions = [layer_regions(["a"], {"a": each}, BLOCKS) for each in self.memory]
        facts = tuple(GroupFacts((("group", str(at)),), BYTES) for at in range(groups))
        settings = ConnectorConfig(**{**vars(SETTINGS), "salt": salt, **own.pop("settings", {})})
        self.side = WorkerSide(settings, client, RankFacts("m", "", (0, 1), True, facts), regions, **own)

    def save(self, step: Step) -> None:
        self.side.start_loads(step)
        self.side.end_step_loads(step)
        self.side.save(step)
        for each in self.side.saving:
            each.job.wait()
        self.side.save(Step(HASHING))

    def load(self, step: Step) -> tuple[set[str], set[str], set[int]]:
        self.side.start_loads(step)
        for loading in self.side.loading.values():
            if loading.job is not None:
                loading.job.wait()
        told = self.side.arrived((), idle=True)
        return told.received, told.failed, told.invalid


@pytest.fixture
def client(server: ServerProcess) -> Iterator[Client]:
    with server.client() as client:
        yield client


@pytest.fixture(params=[1, 2])
def rank(request: pytest.FixtureRequest, client: Client) -> Rank:
    return Rank(client, request.param, request.node.name)


def hashes(first: int, end: int) -> list[bytes]:
    return [bytes([number]) * 32 for number in range(first, end)]


def blocks(rank: Rank, ids: list[int], count: int = 4) -> list[Blocks]:
    return [Blocks(group, hashes(0, count), ids) for group in range(len(rank.memory))]


def test_what_was_saved_is_read_into_other_blocks(rank: Rank) -> None:
    rank.save(Step(HASHING, saves=blocks(rank, [1, 3, 2, 9])))
    kept = [each[[1, 3, 2, 9]].clone() for each in rank.memory]
    for each in rank.memory:
        each.zero_()
    assert rank.load(Step(HASHING, loads=[Load("a", False, blocks(rank, [5, 6, 7, 8]))])) == ({"a"}, set(), set())
    for each, before in zip(rank.memory, kept, strict=True):
        assert torch.equal(each[[5, 6, 7, 8]], before)
        assert not each[[1, 2, 3, 4, 9]].any()
    assert rank.side.arrived((), idle=False).received == set()  # told of once


def test_memory_that_an_engine_gave_back_in_its_sleep_is_registered_anew(rank: Rank) -> None:
    rank.save(Step(HASHING, saves=blocks(rank, [1, 3, 2, 9])))
    kept = [each[[1, 3, 2, 9]].clone() for each in rank.memory]
    for each in rank.memory:
        storage = each.untyped_storage()
        nbytes = storage.nbytes()
        storage.resize_(0)
        storage.resize_(nbytes + 4096)  # so large that it is another piece of memory
        each.zero_()
    assert rank.load(Step(HASHING, loads=[Load("a", False, blocks(rank, [5, 6, 7, 8]))])) == ({"a"}, set(), set())
    for each, before in zip(rank.memory, kept, strict=True):
        assert torch.equal(each[[5, 6, 7, 8]], before)


def test_a_load_that_fails_names_its_blocks_or_its_request(rank: Rank) -> None:
    rank.save(Step(HASHING, saves=blocks(rank, [1, 2, 3, 4])))
    failed = rank.load(Step(HASHING, loads=[Load("a", False, blocks(rank, [5, 6, 7, 8, 9, 10], count=6))]))
    # Of several groups vLLM cannot tell whose block a number means.
    assert failed == ({"a"}, {"a"}, {9, 10} if len(rank.memory) == 1 else set())
    assert rank.side.counters.take()["load_failed_blocks"] == 2 * len(rank.memory)


def test_a_load_that_is_given_up_is_told_of_once(rank: Rank) -> None:
    rank.side.start_loads(Step(HASHING, loads=[Load("a", False, blocks(rank, [1, 2, 3, 4]))]))
    assert rank.side.arrived(["a"], idle=False).received == {"a"}
    assert rank.side.arrived(["a"], idle=True).received == set()


def test_a_load_of_a_step_that_was_interrupted_before_it_began_has_failed(rank: Rank) -> None:
    """vLLM keeps the blocks of a request until it is told that its load has ended. So it is told, and once: again only
    if after the steps that it makes ahead nobody has heard of it."""
    load, told = Load("a", False, blocks(rank, [1, 2, 3, 4]), 7), []
    for number in (2, 3, 4, 5):
        rank.side.begin_step(Step(HASHING, number=number, awaited=[load]))
        told.append(rank.side.arrived((), idle=False))
    assert [each.received for each in told] == [{"a"}, set(), set(), {"a"}]
    assert told[0].failed == {"a"}
    assert told[0].invalid == ({1, 2, 3, 4} if len(rank.memory) == 1 else set())


def test_one_of_several_ranks_tells_of_a_load_once_however_long_the_others_take(client: Client) -> None:
    """vLLM counts the ranks that have told: one that tells twice stands for another that still writes."""
    rank = Rank(client, 1, "several ranks", ranks=2)
    rank.save(Step(HASHING, saves=blocks(rank, [1, 2, 3, 4])))
    load = Load("a", False, blocks(rank, [5, 6, 7, 8]), 7)
    first = Step(HASHING, number=1, loads=[load])
    rank.side.begin_step(first)
    assert rank.load(first) == ({"a"}, set(), set())
    rank.side.end_step(first)
    for number in range(2, 8):
        step = Step(HASHING, number=number, awaited=[load])
        rank.side.begin_step(step)
        assert rank.side.arrived((), idle=False).received == set()
        rank.side.end_step(step)


def test_a_load_that_is_under_way_is_not_taken_for_lost(rank: Rank) -> None:
    rank.save(Step(HASHING, saves=blocks(rank, [1, 2, 3, 4])))
    load = Load("a", False, blocks(rank, [5, 6, 7, 8]), 7)
    first = Step(HASHING, number=1, loads=[load])
    rank.side.begin_step(first)
    rank.side.start_loads(first)
    rank.side.begin_step(Step(HASHING, number=2, awaited=[load]))
    assert rank.load(Step(HASHING)) == ({"a"}, set(), set())


def test_nothing_is_stored_until_a_failed_step_is_confirmed(rank: Rank) -> None:
    missing = Load("a", True, [Blocks(0, hashes(90, 92), [1, 2])])
    rank.save(Step(HASHING, 3, loads=[missing], saves=blocks(rank, [5, 6, 7, 8])))
    assert rank.side.arrived((), idle=False).invalid == {1, 2}
    rank.save(Step(HASHING, 3, saves=blocks(rank, [5, 6, 7, 8])))  # made before the scheduler had heard of it
    count = 4 * len(rank.memory)
    figures = rank.side.counters.take()
    assert figures["save_tainted_blocks"] == 2 * count
    assert "save_blocks" not in figures
    rank.save(Step(HASHING, 4, saves=blocks(rank, [5, 6, 7, 8])))
    assert rank.side.counters.take()["save_blocks"] == count


@pytest.mark.parametrize("ended", [[1, 2], [1], [2]], ids=["all", "one did not end", "one did not begin"])
def test_nothing_is_stored_after_a_step_that_was_not_computed_to_its_end(rank: Rank, ended: list[int]) -> None:
    side = rank.side
    for number in {1, 2} if 1 in ended else {2}:
        side.begin_step(Step(HASHING, number=number))
        if number in ended:
            side.end_step(Step(HASHING, number=number))
    last = Step(HASHING, number=3, saves=blocks(rank, [1, 2, 3, 4]))
    side.begin_step(last)
    side.end_step(last)
    for each in side.saving:
        each.job.wait()
    side.save(Step(HASHING))
    figures, count = side.counters.take(), 4 * len(rank.memory)
    if len(ended) == 2:
        assert figures["save_blocks"] == count
    else:
        assert figures == {"save_tainted_blocks": count}


class Slow:
    """A processor on which every save takes a second and a half, and a clock that the test moves."""

    def __init__(self) -> None:
        self.now_s = self.used_s = 0.0

    def clock(self) -> float:
        return self.now_s

    def cpu_clock(self) -> float:
        self.used_s += 1.5
        return self.used_s


def test_saves_take_their_share_of_the_processor_and_no_more(server: ServerProcess) -> None:
    slow = Slow()
    with server.client() as client:
        rank = Rank(client, 1, "share", settings={"store_cpu_share": 0.1}, clock=slow.clock, cpu_clock=slow.cpu_clock)
        rank.save(Step(HASHING, saves=blocks(rank, [1, 2, 3, 4])))  # it had saved up a second
        rank.side.save(Step(HASHING, saves=[Blocks(0, hashes(10, 13), [5, 6, 7])]))
        figures = rank.side.counters.take()
        assert (figures["save_blocks"], figures["save_paced_blocks"]) == (4, 3)
        slow.now_s += 4.9
        rank.side.save(Step(HASHING, saves=[Blocks(0, hashes(10, 11), [5])]))
        assert rank.side.counters.take() == {"save_paced_blocks": 1}
        slow.now_s += 0.2  # the half second that was too much, at a tenth
        rank.save(Step(HASHING, saves=[Blocks(0, hashes(10, 13), [5, 6, 7])]))
        assert rank.side.counters.take() == {"save_blocks": 3, "save_bytes": 3 * BYTES}


def test_the_null_block_is_neither_read_nor_written(rank: Rank) -> None:
    rank.save(Step(HASHING, saves=blocks(rank, [1, 2, 3, 4])))
    for each in rank.memory:
        each[0] = 77
    rank.load(Step(HASHING, loads=[Load("a", False, blocks(rank, [0, 6, 7, 8]))]))
    assert all(bool((each[0] == 77).all()) for each in rank.memory)


def test_the_first_save_is_waited_for_however_little_patience_steps_have(client: Client) -> None:
    """Server and engine have just started: whoever tries the cache with one prompt would find nothing."""
    rank = Rank(client, 1, "patient", settings={"step_wait_s": 1e-9})
    rank.save(Step(HASHING, saves=blocks(rank, [1, 2, 3, 4])))
    assert rank.side.counters.take()["save_blocks"] == 4


def test_what_another_engine_waits_for_is_not_dropped_as_soon_as_other_saves(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank = Rank(client, 1, "delivers", settings={"step_wait_s": 1e-9})
    waited: list[float] = []
    store = Pages.store_start

    def noting(pages: Pages, entries: Any, *, deadline_s: float) -> Any:
        waited.append(deadline_s)
        job = store(pages, entries, deadline_s=20)
        job.waited_s = 1.1 * SAVE_WAIT_S  # a slow answer, after which others wait less
        return job

    monkeypatch.setattr(Pages, "store_start", noting)
    for at, delivers in enumerate((False, False, True)):
        rank.save(Step(HASHING, saves=[Blocks(0, hashes(at, at + 1), [at + 1])], delivers=delivers))
    assert waited == [SAVE_WAIT_S, 1e-9, DELIVERY_WAIT_S]


def test_saves_are_dropped_and_counted_where_no_server_is(server: ServerProcess) -> None:
    with Client.connect("nobody", runtime_dir=server.directory / "nowhere") as client:
        rank = Rank(client, 1, "")
        rank.save(Step(HASHING, saves=blocks(rank, [1, 2, 3, 4])))
        assert rank.side.counters.take() == {"save_dropped_blocks": 4}
        assert rank.load(Step(HASHING, loads=[Load("a", False, [Blocks(0, hashes(0, 2), [1, 2])])])) == (
            {"a"},
            {"a"},
            {1, 2},
        )


def test_the_server_shows_saves_that_it_never_heard_of_and_keeps_nothing_for_them(server: ServerProcess) -> None:
    with server.client() as client, server.client(maps_pool=False) as other:
        rank = Rank(client, 1, "slow", settings={"step_wait_s": 0.05})
        rank.save(Step(HASHING, saves=blocks(rank, [1, 2, 3, 4])))  # the first one is waited for longer
        before = other.status()["traffic"]["dropped_stores"]
        os.kill(server.pid, signal.SIGSTOP)
        try:
            rank.side.save(Step(HASHING, saves=[Blocks(0, hashes(4, 7), [5, 6, 7])]))
        finally:
            os.kill(server.pid, signal.SIGCONT)
        rank.side.hear_saves()
        assert rank.side.counters.take()["save_dropped_blocks"] == 3
        assert other.status()["traffic"]["dropped_stores"] == before + 3
        until(lambda: other.status()["l1"]["leases_by_kind"]["write"] == 0, "the slots, long before the lease ends")


def test_a_load_that_meets_the_engines_sleep_writes_nothing_more_and_is_told_of_after_it(
    server: ServerProcess, rank: Rank, client: Client
) -> None:
    rank.save(Step(HASHING, saves=blocks(rank, [1, 3, 2, 9])))
    kept = [each[[1, 3, 2, 9]].clone() for each in rank.memory]
    space = rank.side.namespaces[0]
    keys = HASHING.keys(hashes(3, 4), space)
    found = client.lookup(keys, namespace=space, identify=True)
    assert client.drop(keys, namespace=space, incarnations=found.incarnations) == 1
    os.kill(server.pid, signal.SIGSTOP)  # the load waits for what it has to say about the last block
    try:
        rank.side.start_loads(Step(HASHING, loads=[Load("a", False, blocks(rank, [5, 6, 7, 8]), 1)]))
        (loading,) = rank.side.loading.values()
        assert loading.job is not None
        assert not loading.job.done()
        rank.side.unregister()
        assert loading.job.done()
    finally:
        os.kill(server.pid, signal.SIGCONT)
    for each in rank.memory:
        each.zero_()
    rank.side.unregister()  # once more changes nothing
    assert rank.side.sleeps
    assert rank.load(Step(HASHING, loads=[Load("b", False, blocks(rank, [10, 11, 12, 13]), 2)]))[1] == {"a", "b"}
    assert not any(each.any() for each in rank.memory)
    assert rank.side.counters.take()["load_cancelled_requests"] == 1
    rank.side.restore(WEIGHTS)
    assert not rank.side.sleeps
    first = [Blocks(group, hashes(0, 3), [5, 6, 7]) for group in range(len(rank.memory))]
    assert rank.load(Step(HASHING, loads=[Load("c", False, first, 3)])) == ({"c"}, set(), set())
    for each, before in zip(rank.memory, kept, strict=True):
        assert torch.equal(each[[5, 6, 7]], before[:3])


def test_an_engine_that_wakes_with_other_weights_finds_nothing_of_the_former(rank: Rank) -> None:
    rank.save(Step(HASHING, saves=blocks(rank, [1, 3, 2, 9])))
    rank.side.unregister()
    rank.side.restore(replace(WEIGHTS, version="2"))
    assert rank.load(Step(HASHING, loads=[Load("a", False, blocks(rank, [5, 6, 7, 8]))]))[1] == {"a"}
    rank.side.unregister()
    rank.side.restore(WEIGHTS)
    assert rank.load(Step(HASHING, loads=[Load("b", False, blocks(rank, [5, 6, 7, 8]))]))[1] == set()
