"""The scheduler's side over a client whose server never answers, in simulated time."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from lmcache_core_vllm.config import ConnectorConfig
from lmcache_core_vllm.groups import Group, Kind
from lmcache_core_vllm.namespaces import GroupFacts, Hashing, RankFacts
from lmcache_core_vllm.scheduler import SchedulerSide
from lmcache_core_vllm.steps import Blocks, Load

BLOCK = 16


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Handle:
    """A question that nobody answers."""

    done = False
    result = None

    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    def wait(self, timeout_s: float) -> None:
        self._clock.now += timeout_s

    def cancel(self) -> None:
        self.done = False


@dataclass
class SilentClient:
    """Its index has the first `tokens` tokens of everything; its server never answers."""

    clock: Clock
    tokens: int = 0
    asked: int = 0
    options: dict[str, Any] = field(default_factory=dict)
    wants_blocks: bool = False

    def register_layout(self, namespace: Any) -> bool:
        return True

    def lookup_many(self, groups: Any, *, unit_tokens: list[int], ask: bool) -> Any:
        assert not ask
        return SimpleNamespace(tokens=min(self.tokens, len(groups[0].keys) * unit_tokens[0]))

    def lookup_nowait(self, keys: Any, **options: Any) -> Handle:
        self.asked += 1
        self.options = options
        return Handle(self.clock)


@dataclass(eq=False)
class Request:
    request_id: str
    num_tokens: int
    num_computed_tokens: int = 0
    skip_reading_prefix_cache: bool = False
    block_hashes: list[bytes] = field(default_factory=list)
    trace_headers: dict[str, str] | None = None

    def __post_init__(self) -> None:
        self.num_prompt_tokens = self.num_tokens
        self.block_hashes = [bytes([at]) * 32 for at in range(self.num_tokens // BLOCK)]


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def client(clock: Clock) -> SilentClient:
    return SilentClient(clock)


@pytest.fixture
def side(clock: Clock, client: SilentClient) -> SchedulerSide:
    groups = [Group(0, Kind.FULL, BLOCK, 1)]
    made = SchedulerSide(ConnectorConfig(), groups, client, lambda: Hashing("sha256", "0"), clock=clock)  # type: ignore[arg-type]
    made.know_ranks([RankFacts("m", "", (0, 1), True, (GroupFacts((), 4096),))])
    return made


def output(scheduled: dict[str, tuple[int, int]], tables: dict[str, list[int]] | None = None) -> Any:
    """What vLLM says of a step: of each request the tokens before it and in it."""
    found = tables or {}
    return SimpleNamespace(
        total_num_scheduled_tokens=sum(count for _, count in scheduled.values()),
        scheduled_new_reqs=[
            SimpleNamespace(req_id=name, num_computed_tokens=at) for name, (at, _) in scheduled.items()
        ],
        scheduled_cached_reqs=SimpleNamespace(req_ids=[], num_computed_tokens=[]),
        scheduled_spec_decode_tokens={},
        num_scheduled_tokens={name: count for name, (_, count) in scheduled.items()},
        kv_connector_block_state=SimpleNamespace(
            get_block_ids=lambda name: None if name not in found else (found[name],), boundary_state_offloads={}
        ),
    )


def test_a_step_waits_once_however_many_requests_ask(side: SchedulerSide, clock: Clock) -> None:
    requests = [Request(str(number), 100) for number in range(50)]
    began = clock.now
    assert {side.match(each, 0) for each in requests} == {(None, False)}
    assert clock.now - began == pytest.approx(ConnectorConfig().step_wait_s)
    side.step(output({}))
    side.match(requests[0], 0)
    assert clock.now - began == pytest.approx(2 * ConnectorConfig().step_wait_s)


def test_a_server_that_says_nothing_leaves_what_the_index_has(
    side: SchedulerSide, clock: Clock, client: SilentClient
) -> None:
    client.tokens = 3 * BLOCK
    request = Request("a", 100)
    assert side.match(request, 0) == (None, False)
    clock.now += ConnectorConfig().lookup_timeout_s
    assert side.match(request, 0) == (3 * BLOCK, True)
    assert side.match(request, 0) == (3 * BLOCK, True)  # remembered
    asked = client.asked
    assert side.match(Request("b", 100), 0) == (3 * BLOCK, True)  # and the server is left alone for a while
    assert client.asked == asked


def test_what_the_index_has_costs_no_question(side: SchedulerSide, client: SilentClient) -> None:
    client.tokens = 1000
    assert side.match(Request("a", 6 * BLOCK), 0) == (5 * BLOCK, True)  # and a token is left to compute
    assert side.match(Request("b", 6 * BLOCK + 1), 2 * BLOCK) == (4 * BLOCK, True)
    assert client.asked == 0


def test_requests_that_must_compute_everything_are_not_looked_up(side: SchedulerSide, client: SilentClient) -> None:
    client.tokens = 1000
    assert side.match(Request("a", 100, skip_reading_prefix_cache=True), 0) == (0, False)


def test_a_load_goes_into_the_blocks_behind_what_the_engine_has(side: SchedulerSide, client: SilentClient) -> None:
    client.tokens = 1000
    request = Request("a", 6 * BLOCK)
    side.match(request, 2 * BLOCK)
    side.allocated(request, [[1, 2, 3, 4, 5, 6]], 3 * BLOCK)
    (load,) = side.step(output({})).loads
    (blocks,) = load.blocks
    assert blocks.block_ids == [3, 4, 5]
    assert blocks.hashes == request.block_hashes[2:5]
    assert side.step(output({})).loads == []


def test_steps_name_the_loads_that_nobody_has_told_the_end_of(side: SchedulerSide, client: SilentClient) -> None:
    client.tokens = 1000
    request = Request("a", 6 * BLOCK)
    for _ in range(2):
        side.match(request, 0)
        side.allocated(request, [[1, 2, 3, 4, 5, 6]], 5 * BLOCK)
        first, second = side.step(output({})), side.step(output({}))
        assert (len(first.loads), first.awaited) == (1, [])
        awaited = [Load("a", False, [Blocks(0, [], [1, 2, 3, 4, 5])], first.loads[0].number)]
        assert second.awaited == awaited  # in every step to every rank: without what a load reads
        side.finished(request)  # as when it is aborted: its blocks are kept all the same
        assert side.step(output({})).awaited == awaited
        side.heard(["a"], [], [])
        assert side.step(output({})).awaited == []
    assert first.loads[0].number == 2


def test_each_block_is_saved_once_and_none_that_was_loaded(side: SchedulerSide, client: SilentClient) -> None:
    client.tokens = 2 * BLOCK
    request = Request("a", 6 * BLOCK + 3)
    side.know_ranks([])  # nobody to ask: nothing is looked up
    assert side.match(request, 0) == (0, False)
    side.know_ranks([RankFacts("m", "", (0, 1), True, (GroupFacts((), 4096),))])
    request.num_computed_tokens = 2 * BLOCK
    table = {"a": [9, 8, 7, 6, 5, 4, 3]}
    (first,) = side.step(output({"a": (2 * BLOCK, 40)}, table)).saves
    assert (first.block_ids, first.hashes) == ([7, 6], request.block_hashes[2:4])
    (second,) = side.step(output({"a": (2 * BLOCK + 40, 27)}, table)).saves
    assert second.block_ids == [5, 4]
    assert side.step(output({"a": (6 * BLOCK + 3, 1)}, table)).saves == []


def test_after_a_failed_load_blocks_are_saved_anew_in_a_new_epoch(side: SchedulerSide) -> None:
    request = Request("a", 6 * BLOCK)
    side.match(request, 0)
    table = {"a": [1, 2, 3, 4, 5, 6]}
    tainted = side.step(output({"a": (0, 6 * BLOCK)}, table))
    request.num_computed_tokens = 2 * BLOCK  # vLLM has moved it back
    side.heard([], [], [3])
    confirmed = side.step(output({"a": (2 * BLOCK, 4 * BLOCK)}, table))
    assert confirmed.epoch > tainted.epoch
    assert confirmed.saves[0].block_ids == [3, 4, 5, 6]


def test_a_request_whose_load_failed_is_not_promised_again(side: SchedulerSide, client: SilentClient) -> None:
    client.tokens = 1000
    request = Request("a", 100)
    assert side.match(request, 0)[0]
    side.heard(["a"], ["a"], [])
    assert side.match(request, 0) == (0, False)


def test_nothing_is_kept_of_requests_that_have_ended(side: SchedulerSide, client: SilentClient) -> None:
    client.tokens = 1000
    request = Request("a", 100)
    side.match(request, 0)
    side.allocated(request, [[1, 2, 3, 4, 5, 6]], 5 * BLOCK)
    side.finished(request)
    assert side.requests == 0
    assert side.step(output({})).loads == []


def test_a_request_with_trace_headers_is_looked_up_within_its_trace(side: SchedulerSide, client: SilentClient) -> None:
    trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    side.match(Request("traced", 4 * BLOCK, trace_headers={"traceparent": trace}), 0)
    assert client.options["traceparent"] == trace
    side.match(Request("plain", 4 * BLOCK), 0)
    assert client.options["traceparent"] == ""


def test_what_a_request_makes_is_saved_within_its_trace(side: SchedulerSide) -> None:
    trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    requests = [Request("traced", 2 * BLOCK, trace_headers={"traceparent": trace}), Request("plain", 2 * BLOCK)]
    for request in requests:
        side.match(request, 0)
    tables = {"traced": [1, 2], "plain": [3, 4]}
    saves = side.step(output(dict.fromkeys(tables, (0, 2 * BLOCK)), tables)).saves
    assert {tuple(each.block_ids): each.traceparent for each in saves} == {(1, 2): trace, (3, 4): ""}
