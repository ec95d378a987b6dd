"""Matched blocks are still there when they are loaded, however much is stored meanwhile: both sides over a real server
with a tiny pool and a disk, without vLLM."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lmcache_core.client.client import Client
from lmcache_core.client.find import group_lookups
from lmcache_core.client.results import Status
from lmcache_core.pool.layout import Layout
from lmcache_core.server.server import Server
from lmcache_core.tokens.namespace import Namespace
from lmcache_core_vllm import scheduler
from lmcache_core_vllm.config import ConnectorConfig
from lmcache_core_vllm.groups import Group, Kind
from lmcache_core_vllm.namespaces import GroupFacts, Hashing, RankFacts
from lmcache_core_vllm.scheduler import SchedulerSide
from lmcache_core_vllm.steps import Blocks, Load, Step
from lmcache_core_vllm.tensors import layer_regions
from lmcache_core_vllm.worker import WorkerSide
from lmcache_testing.waiting import until

torch = pytest.importorskip("torch")
BLOCK, BYTES, BLOCKS = 16, 64 << 10, 8
POOL = 8 << 20
HASHING = Hashing("sha256", "0")
GROUPS = [Group(0, Kind.FULL, BLOCK, 1), Group(1, Kind.WINDOW, BLOCK, 1, 2 * BLOCK + 1)]
RANK = RankFacts("m", "", (0, 1), True, tuple(GroupFacts((("group", str(at)),), BYTES) for at in range(2)))
OTHERS = Namespace("others", Layout("uint8", (BYTES,)))


@dataclass(eq=False)
class Request:
    request_id: str = "a"
    num_tokens: int = BLOCKS * BLOCK + 1
    num_computed_tokens: int = 0
    skip_reading_prefix_cache: bool = False
    lora_request: Any = None
    kv_transfer_params: dict[str, Any] | None = None
    block_hashes: list[bytes] = field(default_factory=lambda: [bytes([at]) * 32 for at in range(BLOCKS)])

    @property
    def num_prompt_tokens(self) -> int:
        return self.num_tokens


IDLE: Any = SimpleNamespace(
    total_num_scheduled_tokens=0,
    scheduled_new_reqs=[],
    scheduled_cached_reqs=SimpleNamespace(req_ids=[], num_computed_tokens=[], new_block_ids=[]),
    scheduled_spec_decode_tokens={},
    num_scheduled_tokens={},
    kv_connector_block_state=None,
)


class Engine:
    """One rank, whose cache has the blocks of `Request`."""

    def __init__(self, server: Server, load: str) -> None:
        self.client = server.connect()  # of neither side
        settings = ConnectorConfig(step_wait_s=20, load_timeout_s=20, lookup_timeout_s=20, load=load)
        memory = [torch.randint(0, 256, (2 * BLOCKS, 1, 1, BYTES), dtype=torch.uint8) for _ in GROUPS]
        regions = [layer_regions([str(at)], {str(at): each}, 2 * BLOCKS) for at, each in enumerate(memory)]
        self.scheduler = SchedulerSide(settings, GROUPS, server.connect(), lambda: HASHING, waits=load == "sync")
        self.scheduler.know_ranks([RANK])
        self.worker = WorkerSide(settings, server.connect(), RANK, regions)
        hashes, ids = Request().block_hashes, list(range(1, BLOCKS + 1))
        self.worker.save(Step(HASHING, saves=[Blocks(group, hashes, ids) for group in range(2)]))
        for each in self.worker.saving:
            each.job.wait()
        self.worker.save(Step(HASHING))
        assert self.worker.counters.take()["save_blocks"] == 2 * BLOCKS
        until(self._is_written)

    def _is_written(self) -> bool:
        stores = self.client.status()["tiers"]["stores"]
        return not (stores["arrived"] or any(stores["dirty"].values()) or stores["in_flight_bytes"])

    def store_others(self) -> None:
        """More than the pool holds."""
        for _ in range(4 * POOL // BYTES):
            until(
                lambda: (
                    self.client.store([os.urandom(32)], [bytes(BYTES)], namespace=OTHERS).statuses[0] is Status.STORED
                )
            )

    def promised(self) -> int:
        return sum(each["promised_bytes"] for each in self.client.status()["l1"]["holders"].values())

    def load(self, request: Request) -> dict[str, float]:
        """Allocate, load, and have the scheduler hear of it: the worker's figures."""
        self.scheduler.allocated(request, [list(range(1, BLOCKS + 1)), [0] * 6 + [7, 8]], BLOCKS * BLOCK)
        step = self.scheduler.step(IDLE)
        self.worker.start_loads(step)
        for loading in self.worker.loading.values():
            assert loading.job is not None
            loading.job.wait()
        self.worker.end_step_loads(step)
        told = self.worker.arrived((), idle=False)
        self.scheduler.heard(told.received, told.failed, told.invalid)
        return self.worker.counters.take()

    def close(self) -> None:
        self.scheduler.close()
        self.worker.close()
        self.client.close()


@pytest.fixture
def server(start: Callable[..., Server], tmp_path: Path) -> Server:
    disk = {"type": "fs", "path": str(tmp_path / "disk")}
    return start(l1={"size_bytes": POOL, "backing": "memfd"}, l2={"disk": disk})


@pytest.fixture(params=["async", "sync"])
def engine(request: pytest.FixtureRequest, server: Server) -> Iterator[Engine]:
    made = Engine(server, request.param)
    yield made
    made.close()


def matched(engine: Engine, request: Request) -> int | None:
    """As a step of the engine does, until there is an answer."""
    found: list[int | None] = [None]

    def answered() -> bool:
        found[0], _ = engine.scheduler.match(request, 0)
        return found[0] is not None

    until(answered)
    return found[0]


@pytest.mark.parametrize("kept", [True, False])
def test_what_tiers_had_to_load_stays_until_it_is_read(
    engine: Engine, kept: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scheduler, "ANSWER_KEPT_S", math.inf)  # however long the machine takes to store the others
    engine.client.clear()  # of the pool
    request = Request()
    assert matched(engine, request) == BLOCKS * BLOCK
    assert engine.scheduler.counters.take()["lookup_held"] == 1
    assert engine.promised() == (BLOCKS + 2) * BYTES  # all that the group of full attention has, and a window
    if not kept:
        found = engine.scheduler.tracked["a"].found
        assert found is not None
        engine.scheduler.client.free_lookup_locks(found.numbers)
    engine.store_others()
    assert matched(engine, request) == BLOCKS * BLOCK  # the answer is remembered
    figures = engine.load(request)
    if kept:
        assert figures["load_blocks"] == BLOCKS + 2
        assert "load_failed_blocks" not in figures
    else:
        assert figures["load_failed_blocks"] > 0


def test_what_the_pool_had_and_what_tiers_brought_are_told_apart(engine: Engine) -> None:
    def from_tiers(request: Request) -> int:
        tokens = matched(engine, request)
        assert tokens == BLOCKS * BLOCK
        engine.scheduler.allocated(request, [list(range(1, BLOCKS + 1)), [0] * 6 + [7, 8]], tokens)
        found = engine.scheduler.from_tiers(request, tokens)
        engine.scheduler.finished(request)
        return found

    assert from_tiers(Request()) == 0
    drop_from_pool(engine, 0, 5)
    assert from_tiers(Request()) == (BLOCKS - 5) * BLOCK
    assert from_tiers(Request()) == 0  # it is there now
    engine.client.clear()
    assert from_tiers(Request()) == BLOCKS * BLOCK


def test_nothing_is_kept_once_it_is_loaded(engine: Engine) -> None:
    engine.client.clear()
    request = Request()
    matched(engine, request)
    assert engine.load(request)["load_blocks"] == BLOCKS + 2
    for _ in range(2):  # a load within a step has ended when the second step after it is made
        engine.scheduler.step(IDLE)
    until(lambda: engine.promised() == 0)


def test_nothing_is_kept_for_a_request_that_is_given_up(engine: Engine) -> None:
    engine.client.clear()
    request = Request()
    matched(engine, request)
    engine.scheduler.finished(request)
    until(lambda: engine.promised() == 0)


def test_nothing_is_kept_for_a_request_that_is_given_up_while_it_loads(engine: Engine) -> None:
    engine.client.clear()
    request = Request()
    matched(engine, request)
    engine.scheduler.allocated(request, [list(range(1, BLOCKS + 1)), [0] * 6 + [7, 8]], BLOCKS * BLOCK)
    engine.scheduler.finished(request)
    until(lambda: engine.promised() == 0)


def test_a_request_may_end_after_the_connector(engine: Engine) -> None:
    engine.client.clear()
    request = Request()
    matched(engine, request)
    engine.scheduler.close()
    engine.scheduler.finished(request)
    until(lambda: engine.promised() == 0)  # the client's promises end with it


def test_nothing_is_kept_of_what_is_no_hit(engine: Engine) -> None:
    """The window's blocks are missing everywhere: no boundary is left."""
    engine.client.clear()
    window = engine.scheduler.namespaces[0][1]
    engine.client.clear(window, tiers=True)
    assert matched(engine, Request()) == 0
    until(lambda: engine.promised() == 0)


def loaded_objects(engine: Engine) -> int:
    (disk,) = engine.client.status()["tiers"]["tiers"]
    return int(disk["counts"].get("loaded", 0))


def drop_from_pool(engine: Engine, group: int, block: int) -> None:
    """One block of one group, which the disk has still."""
    drop(engine, group, block, tiers=False)


def drop(engine: Engine, group: int, block: int, tiers: bool = True) -> None:
    """One block of one group, wherever it is."""
    namespace = engine.scheduler.namespaces[0][group]
    keys = HASHING.keys([bytes([block]) * 32], namespace)
    found = engine.client.lookup_nowait(keys, namespace=namespace, identify=True).wait(20)
    assert found is not None
    engine.client.drop(keys, incarnations=found.incarnations, namespace=namespace, tiers=tiers)
    until(lambda: not engine.client.status()["tiers"]["tiers"][0]["deletes"]["waiting"])


def test_tiers_load_of_a_window_what_is_read_of_it_and_no_more(engine: Engine) -> None:
    engine.client.clear()
    before = loaded_objects(engine)
    request = Request()
    assert matched(engine, request) == BLOCKS * BLOCK
    assert loaded_objects(engine) - before == BLOCKS + 2
    assert engine.load(request)["load_blocks"] == BLOCKS + 2


@pytest.mark.parametrize(
    ("missing", "boundary"),
    [
        ([(1, 7)], 7),  # the window of the boundary before it
        ([(0, 4)], 4),  # the window was asked for behind that, and is asked for again
        ([(0, 6), (1, 5)], 5),
        ([(0, 6), (1, 5), (1, 3)], 3),  # down to a boundary whose window is whole
        ([(0, 0)], 0),
    ],
)
def test_the_boundary_is_where_the_tiers_have_what_every_group_needs(
    engine: Engine, missing: list[tuple[int, int]], boundary: int
) -> None:
    for group, block in missing:
        drop(engine, group, block)
    engine.client.clear()
    request = Request()
    assert matched(engine, request) == boundary * BLOCK
    found = engine.scheduler.tracked["a"].found
    assert found is not None
    kept = sum(len([number for number in promise.ids if number]) for ranks in found.promises for promise in ranks)
    assert kept >= boundary + min(boundary, 2)
    engine.scheduler.finished(request)
    until(lambda: engine.promised() == 0)


def test_a_window_far_from_the_end_is_found_frame_by_frame(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_lookups, "BATCH_KEYS_MAX", 3)
    for block in (3, 5, 7):
        drop(engine, 1, block)
    engine.client.clear()
    assert matched(engine, Request()) == 3 * BLOCK


def test_what_the_index_answered_is_looked_up_again_until_there_is_room(engine: Engine) -> None:
    """Nobody keeps it, which would cost a call for each hit; so no answer of an earlier step is believed."""
    request = Request()
    assert matched(engine, request) == BLOCKS * BLOCK
    assert engine.promised() == 0
    engine.store_others()
    assert matched(engine, request) == BLOCKS * BLOCK  # now the disk had to load it
    assert engine.scheduler.counters.take()["lookup_held"] == 1
    assert engine.load(request)["load_blocks"] == BLOCKS + 2


def test_a_worker_redeems_what_it_reads_without_the_index(engine: Engine, server: Server) -> None:
    engine.client.clear()
    request = Request()
    matched(engine, request)
    engine.scheduler.allocated(request, [list(range(1, BLOCKS + 1)), [0] * 6 + [7, 8]], BLOCKS * BLOCK)
    (load,) = engine.scheduler.step(IDLE).loads
    memory = torch.zeros(2 * BLOCKS, 1, 1, BYTES, dtype=torch.uint8)
    regions = [layer_regions([str(at)], {str(at): memory.clone()}, 2 * BLOCKS) for at in range(2)]
    client: Client = server.connect(use_index=False)
    worker = WorkerSide(ConnectorConfig(load_timeout_s=20), client, RANK, regions)
    worker.start_loads(Step(HASHING, loads=[Load("a", False, load.blocks)]))
    assert worker.loading["a"].job is not None
    worker.loading["a"].job.wait()
    worker.arrived((), idle=False)
    assert worker.counters.take()["load_blocks"] == BLOCKS + 2
    until(lambda: engine.promised() == 0)
    worker.close()
