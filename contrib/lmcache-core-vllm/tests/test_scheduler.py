"""The scheduler's side over a client whose server never answers, in simulated time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from lmcache_core import CommonHits, Promise
from lmcache_core.client.find.group_lookups import GroupHits, KeyGroup
from lmcache_core.errors import CacheError, LimitError, UnknownNamespaceError, UsageError
from lmcache_core_vllm.config import ConnectorConfig
from lmcache_core_vllm.groups import Group, Kind
from lmcache_core_vllm.namespaces import GroupFacts, Hashing, RankFacts
from lmcache_core_vllm.scheduler import EARLY_LOOKUPS_MAX, SchedulerSide
from lmcache_core_vllm.steps import Blocks, Load
from lmcache_core_vllm.weights import Weights
from lmcache_testing.waiting import until

BLOCK = 16


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Handle:
    """A question that nobody answers, unless a test does."""

    asked = True

    def __init__(self, clock: Clock, refusal: CacheError | None = None) -> None:
        self._clock = clock
        self._refusal = refusal
        self.done = False
        self.result: CommonHits | None = None

    def wait(self, timeout_s: float) -> None:
        self._clock.now += timeout_s
        if self._refusal:
            raise self._refusal

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
    why_unreachable: str = ""
    published: int | None = 0
    refusal: CacheError | None = None  # what it is asked is refused: at once, or when the answer is waited for
    refuses_at_once: bool = False
    handles: list[Handle] = field(default_factory=list)
    prompts: list[tuple[int, int, bool]] = field(default_factory=list)  # tokens, those found, whether it was asked

    def count_prompt(self, tokens: int, hit_tokens: int, *, from_tiers: int, not_asked: list[int]) -> None:
        self.prompts.append((tokens, hit_tokens, not not_asked))

    def register_layout(self, namespace: object) -> bool:
        return True

    def lookup_many(self, groups: Sequence[KeyGroup], *, unit_tokens: list[int], ask: bool) -> CommonHits:
        assert not ask
        return CommonHits(min(self.tokens, len(groups[0].keys) * unit_tokens[0]), [])

    def lookup_many_nowait(self, groups: Sequence[KeyGroup], **options: Any) -> Handle:
        self.asked += 1
        self.options = options
        if self.refusal and self.refuses_at_once:
            raise self.refusal
        self.handles.append(Handle(self.clock, self.refusal))
        return self.handles[-1]


@dataclass(eq=False)
class Request:
    request_id: str
    num_tokens: int
    num_computed_tokens: int = 0
    skip_reading_prefix_cache: bool = False
    lora_request: Any = None
    block_hashes: list[bytes] = field(default_factory=list)
    trace_headers: dict[str, str] | None = None
    kv_transfer_params: dict[str, Any] | None = None

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
    return made(clock, client, [Group(0, Kind.FULL, BLOCK, 1)])


def made(clock: Clock, client: SilentClient, groups: list[Group], **own: Any) -> SchedulerSide:
    side = SchedulerSide(ConnectorConfig(), groups, client, lambda: Hashing("sha256", "0"), clock=clock, **own)  # type: ignore[arg-type]
    side.know_ranks([RankFacts("m", "", (0, 1), True, (GroupFacts((), 4096),) * len(groups))])
    return side


def output(scheduled: dict[str, tuple[int, int]], tables: dict[str, list[int]] | None = None) -> SimpleNamespace:
    """What vLLM says of a step: of each request the tokens before it and in it."""
    found = tables or {}
    return SimpleNamespace(
        total_num_scheduled_tokens=sum(count for _, count in scheduled.values()),
        scheduled_new_reqs=[
            SimpleNamespace(req_id=name, num_computed_tokens=at, block_ids=(found.get(name, []),))
            for name, (at, _) in scheduled.items()
        ],
        scheduled_cached_reqs=SimpleNamespace(req_ids=[], num_computed_tokens=[], new_block_ids=[]),
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


def test_a_step_names_the_blocks_that_are_given_out_for_it(clock: Clock, client: SilentClient) -> None:
    side = made(clock, client, [Group(0, Kind.FULL, BLOCK, 1), Group(1, Kind.STATE, BLOCK, 1)])
    request = Request("a", 5 * BLOCK)
    side.match(request, 0)
    said = output({"a": (2 * BLOCK, BLOCK)})
    said.scheduled_new_reqs[0].block_ids = ([7, 8, 9], [0, 0, 19])  # two are vLLM's own hits
    said.scheduled_cached_reqs.new_block_ids = [None, ([11], [21])]
    said.kv_connector_block_state.boundary_state_offloads = {"a": [(1, 19, 3 * BLOCK)]}
    said.kv_connector_block_state.get_block_ids = lambda name: ([7, 8, 9], [0, 0, 19])
    first = side.step(said)
    assert sorted(first.fresh) == [9, 11, 19, 21]
    assert 19 in [block for each in first.saves for block in each.block_ids]
    assert side.step(output({})).fresh == [19], "what holds a state now may be written to in the next step"


def test_a_step_names_the_blocks_that_a_load_is_to_fill(side: SchedulerSide, client: SilentClient) -> None:
    client.tokens, request = 1000, Request("b", 6 * BLOCK)
    side.match(request, 2 * BLOCK)
    side.allocated(request, [[1, 2, 3, 4, 5, 6]], 3 * BLOCK)
    assert side.step(output({})).fresh == [3, 4, 5]


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
    assert side.match(Request("b", 100), 0) == (3 * BLOCK, True)  # and the server is not asked for a while
    assert client.asked == asked


def test_what_the_index_has_costs_no_question(side: SchedulerSide, client: SilentClient) -> None:
    client.tokens = 1000
    assert side.match(Request("a", 6 * BLOCK), 0) == (5 * BLOCK, True)  # and a token is left to compute
    assert side.match(Request("b", 6 * BLOCK + 1), 2 * BLOCK) == (4 * BLOCK, True)
    assert client.asked == 0


def test_what_the_index_lacks_is_asked_for_when_a_request_is_queued(side: SchedulerSide, client: SilentClient) -> None:
    client.tokens = 3 * BLOCK
    side.queued(Request("short", 3 * BLOCK + 1), 0)  # the index has all of it
    assert client.asked == 0
    requests = [Request(str(number), 100) for number in range(EARLY_LOOKUPS_MAX + 2)]
    for each in requests:
        side.queued(each, 0)
    assert client.asked == EARLY_LOOKUPS_MAX  # the others are asked for in their turn
    assert side.match(requests[0], 0) == (None, False)
    assert client.asked == EARLY_LOOKUPS_MAX
    side.queued(requests[-1], 0)  # one has had its turn
    side.finished(requests[1])  # and another was aborted
    side.queued(requests[-2], 0)
    assert client.asked == EARLY_LOOKUPS_MAX + 2
    assert client.prompts == []  # none has been answered


def test_an_early_answer_that_no_longer_fits_is_asked_for_again(
    side: SchedulerSide, client: SilentClient, clock: Clock
) -> None:
    request = Request("a", 6 * BLOCK + 1)
    side.queued(request, 2 * BLOCK)
    (early,) = client.handles
    early.done, early.result = True, CommonHits(3 * BLOCK, [], served=False)
    client.tokens = 1000
    assert side.match(request, 0) == (6 * BLOCK, True)  # the engine has lost its own blocks, and the index has them now
    assert client.prompts == [(6 * BLOCK, 6 * BLOCK, False)]
    another = Request("b", 6 * BLOCK + 1)
    client.tokens = 2 * BLOCK
    side.queued(another, 0)
    held = Promise((1,) * 6, (bytes(32),) * 6, clock.now + 60)
    client.handles[-1].done = True
    client.handles[-1].result = CommonHits(6 * BLOCK, [GroupHits(0, 6, BLOCK)], promise=held)
    clock.now += 30  # in the engine's queue; the promise still holds
    assert side.match(another, 4 * BLOCK) == (2 * BLOCK, True)
    assert client.prompts[-1] == (2 * BLOCK, 2 * BLOCK, True)  # the rest the engine has by now
    times = side.counters.take()["lookup_latency_seconds"]
    assert times == [0.0, 0.0]  # nobody has waited


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


def test_after_new_weights_requests_begin_anew_and_those_that_go_on_are_not_cached(
    side: SchedulerSide, client: SilentClient
) -> None:
    client.tokens = 1000
    anew, goes_on, table = Request("a", 4 * BLOCK), Request("b", 4 * BLOCK), {"a": [1, 2, 3, 4], "b": [5, 6, 7, 8]}
    for each in (anew, goes_on):
        side.match(each, 0)
    side.step(output({"a": (0, 2 * BLOCK), "b": (0, 2 * BLOCK)}, table))
    goes_on.num_computed_tokens = 2 * BLOCK
    new = Weights("m", "2", "m", "/m")
    side.weights_changed(new)
    mixed = side.namespaces[0][0].weights_version
    assert mixed.startswith("2 mixed ")  # vLLM's own prefix cache has blocks of the former weights
    assert side.match(anew, 0) == (3 * BLOCK, True)
    assert side.match(goes_on, 2 * BLOCK) == (0, False)
    step = side.step(output({"a": (0, 2 * BLOCK), "b": (2 * BLOCK, 2 * BLOCK)}, table))
    assert step.weights is not None
    assert step.weights.version == mixed
    assert [each.block_ids for each in step.saves] == [[1, 2]]
    side.finished(goes_on)
    side.weights_changed(new)
    assert side.namespaces[0][0].weights_version == "2"
    assert side.step(output({})).weights == new


def test_nothing_is_cached_of_an_adapter_that_may_be_another(side: SchedulerSide, client: SilentClient) -> None:
    client.tokens = 1000
    gone = SimpleNamespace(path="/there/is/none", adapter_id=1, name="one", load_inplace=False)
    assert side.match(Request("a", 4 * BLOCK, lora_request=gone), 0) == (0, False)
    assert side.step(output({"a": (0, 4 * BLOCK)}, {"a": [1, 2, 3, 4]})).saves == []


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


def test_a_request_loads_and_stores_no_more_than_its_parameters_allow(
    side: SchedulerSide, client: SilentClient
) -> None:
    client.tokens = 1000
    request = Request("a", 6 * BLOCK, kv_transfer_params={"max_load_tokens": 2 * BLOCK + 3, "max_offload_tokens": 70})
    assert side.match(request, BLOCK) == (2 * BLOCK, True)
    request.num_computed_tokens = 3 * BLOCK
    (save,) = side.step(output({"a": (3 * BLOCK, 3 * BLOCK)}, {"a": [1, 2, 3, 4, 5, 6]})).saves
    assert save.block_ids == [4]
    assert side.finished(request) is None


def test_a_request_asks_only_the_tiers_that_it_names(side: SchedulerSide, client: SilentClient) -> None:
    for tiers, asked in (([], None), ([{"tier": "disk"}], ("disk",)), ([{"medium": "STORAGE"}], None)):
        client.options, count = {}, client.asked
        side.match(Request(str(tiers), 4 * BLOCK, kv_transfer_params={"kv_load_tiers": tiers}), 0)
        assert client.options.get("tiers") == asked
        assert client.asked == count + bool(tiers)


def test_a_request_with_bad_parameters_is_computed_and_not_stored(side: SchedulerSide, client: SilentClient) -> None:
    client.tokens = 1000
    request = Request("a", 4 * BLOCK, kv_transfer_params={"max_offload_tokens": -1})
    assert side.match(request, 0) == (0, False)
    assert side.step(output({"a": (0, 4 * BLOCK)}, {"a": [1, 2, 3, 4]})).saves == []
    answer = side.finished(request)
    assert answer is not None
    assert answer["lmcache_core_refused"].startswith("kv_transfer_params: max_offload_tokens is -1")
    assert side.counters.take()["params_refused_requests"] == 1
    assert side.match(Request("b", 4 * BLOCK), 0) == (3 * BLOCK, True)  # others are served


def test_a_load_that_vllm_defers_goes_on_and_is_reported_as_lost_after_new_weights(
    side: SchedulerSide, client: SilentClient
) -> None:
    """vLLM 0.33 calls `allocated` some steps after `match`, and waits until the load is reported."""
    client.tokens = 1000
    goes_on, lost = Request("a", 4 * BLOCK), Request("b", 4 * BLOCK)
    for each in (goes_on, lost):
        assert side.match(each, BLOCK) == (2 * BLOCK, True)
    side.step(output({}))
    side.allocated(goes_on, [[1, 2, 3, 4]], 2 * BLOCK)
    (load,) = side.step(output({})).loads
    assert load.blocks[0].block_ids == [2, 3]
    side.weights_changed(Weights("m", "2", "m", "/m"))
    side.allocated(lost, [[5, 6, 7, 8]], 2 * BLOCK)
    step = side.step(output({}))
    assert step.loads == []
    assert [each.blocks[0].block_ids for each in step.awaited if each.request_id == "b"] == [[6, 7]]


WAITS = {"do_remote_prefill": True, "do_remote_decode": False, "transfer_id": "t"}
COMPUTES = {"do_remote_prefill": False, "do_remote_decode": True, "transfer_id": "t"}


def test_a_prompt_that_another_engine_computes_is_all_to_be_loaded(side: SchedulerSide, client: SilentClient) -> None:
    """At once, without a question to the server; the workers wait for the blocks."""
    client.tokens = 2 * BLOCK
    request = Request("a", 5 * BLOCK, kv_transfer_params=WAITS)
    side.queued(request, 0)
    assert side.match(request, BLOCK) == (3 * BLOCK, True)  # the last block has the token that is to be computed
    assert client.asked == 0
    side.allocated(request, [[1, 2, 3, 4]], 3 * BLOCK)
    (load,) = side.step(output({})).loads
    assert (load.prefill_wait_s, load.blocks[0].block_ids) == (10.0, [2, 3, 4])


def test_what_the_other_engine_has_stored_already_is_an_ordinary_hit(side: SchedulerSide, client: SilentClient) -> None:
    client.tokens = 5 * BLOCK
    request = Request("a", 5 * BLOCK, kv_transfer_params=WAITS)
    assert side.match(request, 0) == (4 * BLOCK, True)
    side.allocated(request, [[1, 2, 3, 4]], 4 * BLOCK)
    assert side.step(output({})).loads[0].prefill_wait_s == 0


@pytest.mark.parametrize("lost", [{"why_unreachable": "it was killed"}, {"published": None}])
def test_without_a_server_nobody_waits_for_another_engine(
    side: SchedulerSide, client: SilentClient, lost: dict[str, Any]
) -> None:
    for name, value in lost.items():
        setattr(client, name, value)
    request = Request("a", 5 * BLOCK, kv_transfer_params=WAITS)
    side.match(request, 0)
    assert client.asked == 1  # like any other request


def test_an_engine_that_has_answered_gets_less_time(side: SchedulerSide) -> None:
    request = Request("a", 5 * BLOCK, kv_transfer_params={**WAITS, "remote_prefill_ended": True})
    side.match(request, 0)
    side.allocated(request, [[1, 2, 3, 4]], 4 * BLOCK)
    assert side.step(output({})).loads[0].prefill_wait_s == 0.5


def test_a_prompt_that_came_in_part_is_not_waited_for_again(side: SchedulerSide, client: SilentClient) -> None:
    request = Request("a", 5 * BLOCK, kv_transfer_params=WAITS)
    side.match(request, 0)
    side.allocated(request, [[1, 2, 3, 4]], 4 * BLOCK)
    side.step(output({}))
    request.num_computed_tokens = 2 * BLOCK  # by vLLM, after it has heard which blocks are invalid
    side.heard(["a"], (), [3, 4])
    assert client.prompts == [(4 * BLOCK, 2 * BLOCK, False)]
    step = side.step(output({"a": (2 * BLOCK, 3 * BLOCK)}, {"a": [1, 2, 3, 4, 5]}))
    assert [blocks.block_ids for blocks in step.saves] == [[3, 4, 5]]


@pytest.mark.parametrize("groups", ["one", "several"])
def test_a_prompt_of_which_nothing_is_left_is_looked_up_like_any_other(
    side: SchedulerSide, client: SilentClient, groups: str
) -> None:
    request = Request("a", 5 * BLOCK, kv_transfer_params=WAITS)
    side.match(request, 0)
    side.allocated(request, [[1, 2, 3, 4]], 4 * BLOCK)
    side.step(output({}))
    request.num_computed_tokens = 0
    side.heard(["a"], ["a"] if groups == "several" else (), [1, 2, 3, 4] if groups == "one" else ())
    client.tokens = 4 * BLOCK  # it came after the time was over
    assert side.match(request, 0) == (4 * BLOCK, True)
    side.allocated(request, [[1, 2, 3, 4]], 4 * BLOCK)
    assert side.step(output({})).loads[0].prefill_wait_s == 0
    side.heard(["a"], ["a"], ())
    assert side.match(request, 0) == (0, False)  # what failed once is not promised again


def test_an_engine_that_computes_for_another_delivers_and_says_what_the_other_needs(side: SchedulerSide) -> None:
    request = Request("a", 5 * BLOCK, kv_transfer_params=COMPUTES)
    side.queued(request, 0)
    assert side.step(output({"a": (0, 5 * BLOCK)}, {"a": [1, 2, 3, 4, 5]})).delivers
    assert side.finished(request) == {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "transfer_id": "t",
        "remote_request_id": "a",
        "remote_engine_id": "",
        "remote_num_tokens": 5 * BLOCK,
        "remote_prefill_ended": True,
    }


@pytest.mark.parametrize(
    "params",
    [None, {}, {"do_remote_prefill": True, "do_remote_decode": True}, {"transfer_id": "t"}],
)
def test_requests_without_a_transfer_are_like_any_other(side: SchedulerSide, client: SilentClient, params: Any) -> None:
    request = Request("a", 5 * BLOCK, kv_transfer_params=params)
    side.queued(request, 0)
    assert client.asked == 1
    assert not side.step(output({"a": (0, 5 * BLOCK)}, {"a": [1, 2, 3, 4, 5]})).delivers
    assert side.finished(request) is None


def test_limits_of_a_request_go_on_to_the_engine_that_decodes(side: SchedulerSide, client: SilentClient) -> None:
    """Routers give the answer of the first engine in place of what the client sent."""
    limits = {"max_load_tokens": 4 * BLOCK, "max_offload_tokens": 2 * BLOCK + 3, "kv_load_tiers": []}
    first, second = Request("a", 6 * BLOCK, kv_transfer_params={**COMPUTES, **limits}), Request("b", 6 * BLOCK)
    side.match(first, 0)
    (saves,) = side.step(output({"a": (0, 6 * BLOCK)}, {"a": [1, 2, 3, 4, 5, 6]})).saves
    assert saves.block_ids == [1, 2]
    second.kv_transfer_params = side.finished(first)
    assert second.kv_transfer_params is not None
    assert second.kv_transfer_params.items() >= limits.items()
    assert side.match(second, 0) == (2 * BLOCK, True)  # the two blocks that the first engine stores
    side.allocated(second, [[1, 2]], 2 * BLOCK)
    assert side.step(output({})).loads[0].prefill_wait_s == 0.5
    second.num_computed_tokens = 2 * BLOCK
    side.heard(["b"], (), ())
    assert side.step(output({"b": (2 * BLOCK, 4 * BLOCK)}, {"b": [1, 2, 3, 4, 5, 6]})).saves == []


def test_what_one_engine_refuses_the_engine_that_decodes_refuses_too(side: SchedulerSide, client: SilentClient) -> None:
    first = Request("a", 4 * BLOCK, kv_transfer_params={**COMPUTES, "max_offload_tokens": "none"})
    side.match(first, 0)
    assert side.step(output({"a": (0, 4 * BLOCK)}, {"a": [1, 2, 3, 4]})).saves == []
    answer = side.finished(first)
    assert answer is not None
    client.tokens = 1000
    second = Request("b", 4 * BLOCK, kv_transfer_params=answer)
    assert side.match(second, 0) == (0, False)
    assert side.step(output({"b": (0, 4 * BLOCK)}, {"b": [1, 2, 3, 4]})).saves == []
    assert side.finished(second) == answer


@pytest.mark.parametrize(
    "params",
    [
        {"max_load_tokens": 0},
        {"max_load_tokens": "all"},
        {"remote_prefill_ended": True, "remote_num_tokens": 0},
        {"remote_prefill_ended": True, "remote_num_tokens": BLOCK - 1},
    ],
)
def test_nobody_waits_for_what_does_not_come_or_may_not_be_loaded(
    side: SchedulerSide, client: SilentClient, params: dict[str, Any]
) -> None:
    request = Request("a", 5 * BLOCK, kv_transfer_params={**WAITS, **params})
    side.queued(request, 0)
    assert side.match(request, 0) == ((0, False) if "max_load_tokens" in params else (None, False))  # an ordinary one
    assert client.asked == ("max_load_tokens" not in params)


@pytest.mark.parametrize("tokens", [-1, True, "80", None, 1000])
def test_a_number_of_tokens_that_makes_no_sense_limits_nothing(side: SchedulerSide, tokens: Any) -> None:
    params = {**WAITS, "remote_prefill_ended": True, "remote_num_tokens": tokens}
    assert side.match(Request("a", 5 * BLOCK, kv_transfer_params=params), 0) == (4 * BLOCK, True)


@pytest.mark.parametrize("skip", [True, False], ids=["may not read", "has all itself"])
def test_a_prompt_that_was_not_waited_for_is_not_waited_for_when_it_is_preempted(
    side: SchedulerSide, client: SilentClient, skip: bool
) -> None:
    """Blocks of generated tokens come from nobody."""
    request = Request("a", 5 * BLOCK, kv_transfer_params=WAITS, skip_reading_prefix_cache=skip)
    assert side.match(request, 0 if skip else 4 * BLOCK) == (0, False)
    side.allocated(request, [[1, 2, 3, 4, 5]], 0)
    side.step(output({"a": (4 * BLOCK, BLOCK)}, {"a": [1, 2, 3, 4, 5]}))
    request.num_tokens, request.skip_reading_prefix_cache = 9 * BLOCK, False
    request.block_hashes = [bytes([at]) * 32 for at in range(9)]
    assert side.match(request, 0) == (None, False)
    assert client.asked == 1


def test_a_prompt_that_was_not_waited_for_is_reported_to_routers(side: SchedulerSide, client: SilentClient) -> None:
    client.wants_blocks, reported = True, list[tuple[int, ...]]()
    client.report_block_allocation = lambda keys, blocks, *, namespace: reported.append(tuple(blocks.hashes))  # type: ignore[attr-defined]
    request = Request("a", 3 * BLOCK, kv_transfer_params={**WAITS, "max_load_tokens": 0})
    request.all_token_ids = [*range(3 * BLOCK)]  # type: ignore[attr-defined]
    side.match(request, 0)
    side.allocated(request, [[1, 2, 3]], 0)
    assert side.step(output({"a": (0, 3 * BLOCK)}, {"a": [1, 2, 3]})).saves
    until(lambda: len(reported) == 1, "the report")
    assert reported == [tuple(request.block_hashes)]


@pytest.mark.parametrize("deferred", [False, True])
def test_new_weights_end_a_wait_and_nothing_of_it_is_cached(
    side: SchedulerSide, client: SilentClient, deferred: bool
) -> None:
    request, table = Request("a", 5 * BLOCK, kv_transfer_params=WAITS), {"a": [1, 2, 3, 4, 5]}
    assert side.match(request, 0) == (4 * BLOCK, True)
    if not deferred:
        side.allocated(request, [[1, 2, 3, 4]], 4 * BLOCK)
        side.step(output({}))
    side.weights_changed(Weights("m", "2", "m", "/m"))
    if deferred:  # vLLM 0.33 allocates later
        side.allocated(request, [[1, 2, 3, 4]], 4 * BLOCK)
    (awaited,) = side.step(output({})).awaited
    assert awaited.blocks[0].block_ids == [1, 2, 3, 4]
    request.num_computed_tokens = 0
    side.heard(["a"], (), [1, 2, 3, 4])
    client.tokens = 4 * BLOCK
    if deferred:  # it has nothing of the former weights
        assert side.match(request, 0) == (4 * BLOCK, True)
        return
    assert side.match(request, 0) == (0, False)
    assert side.step(output({"a": (0, 5 * BLOCK)}, table)).saves == []


def test_an_aborted_wait_is_awaited_until_the_workers_report_it(side: SchedulerSide) -> None:
    request = Request("a", 5 * BLOCK, kv_transfer_params=WAITS)
    side.match(request, 0)
    side.allocated(request, [[1, 2, 3, 4]], 4 * BLOCK)
    side.step(output({}))
    assert side.finished(request) is None
    assert [each.request_id for each in side.step(output({})).awaited] == ["a"]
    side.heard(["a"], ["a"], [1, 2, 3, 4])
    assert side.step(output({})).awaited == []
    assert side.requests == 0


def test_with_synchronous_loads_a_wait_is_between_steps_and_later_loads_are_not(
    clock: Clock, client: SilentClient
) -> None:
    side = made(clock, client, [Group(0, Kind.FULL, BLOCK, 1)], waits=True)
    request = Request("a", 5 * BLOCK, kv_transfer_params=WAITS)
    assert side.match(request, 0) == (4 * BLOCK, True)
    side.allocated(request, [[1, 2, 3, 4]], 4 * BLOCK)
    assert [(load.waits, load.prefill_wait_s) for load in side.step(output({})).loads] == [(False, 10.0)]
    request.num_computed_tokens = 0
    side.heard(["a"], (), [1, 2, 3, 4])
    client.tokens = 4 * BLOCK
    assert side.match(request, 0) == (4 * BLOCK, False)
    side.allocated(request, [[1, 2, 3, 4]], 4 * BLOCK)
    assert [(load.waits, load.prefill_wait_s) for load in side.step(output({})).loads] == [(True, 0.0)]


def test_states_that_another_engine_waits_for_are_delivered(clock: Clock, client: SilentClient) -> None:
    side = made(clock, client, [Group(0, Kind.STATE, BLOCK, 1)])
    computes, plain = Request("a", 3 * BLOCK, kv_transfer_params=COMPUTES), Request("b", 3 * BLOCK)
    for request, delivers in ((plain, False), (computes, True)):
        side.match(request, 0)
        step = output({request.request_id: (0, 3 * BLOCK)}, {request.request_id: [0, 0, 7]})
        step.kv_connector_block_state.boundary_state_offloads = {request.request_id: [(0, 7, 3 * BLOCK)]}
        found = side.step(step)
        assert [each.block_ids for each in found.saves] == [[7]]
        assert found.delivers is delivers
    answer = side.finished(computes)
    assert answer is not None
    assert answer["remote_num_tokens"] == 3 * BLOCK


def test_hints_of_a_refused_request_name_none_of_its_blocks(side: SchedulerSide, client: SilentClient) -> None:
    sent: list[dict[str, Any]] = []
    client.call_operation = lambda name, message, reply: sent.append(message) or {"outcomes": []}  # type: ignore[attr-defined]
    action = SimpleNamespace(action_id="1", action_type="kv.prefetch", action_version=1, payload={})
    for name, params in (("a", None), ("b", {"max_offload_tokens": "none"})):
        request = Request(name, 4 * BLOCK, kv_transfer_params=params)
        request.kv_hints = SimpleNamespace(protocol_version=1, message_id=name, actions=[action])  # type: ignore[attr-defined]
        side.queued(request, 0)
    until(lambda: len(sent) == 2, "both messages")
    assert [[len(each["payload"]["keys"]) for each in message["actions"]] for message in sent] == [[4], []]


def test_a_prompt_that_came_late_keeps_no_other_request_from_the_cache(
    side: SchedulerSide, client: SilentClient
) -> None:
    late, preempted = Request("a", 5 * BLOCK, kv_transfer_params=WAITS), Request("b", 5 * BLOCK)
    side.match(late, 0)
    side.allocated(late, [[1, 2, 3, 4]], 4 * BLOCK)
    side.match(preempted, 0)
    side.step(output({"b": (0, 3 * BLOCK)}, {"b": [5, 6, 7]}))
    preempted.num_computed_tokens = late.num_computed_tokens = 0  # by vLLM, both
    side.heard(["a"], (), [1, 2, 3, 4])
    client.tokens = 3 * BLOCK
    assert side.match(preempted, 0) == (None, False)
    found = client.handles[-1]
    found.done, found.result = True, CommonHits(3 * BLOCK, [], served=False)
    assert side.match(preempted, 0) == (3 * BLOCK, True)


def test_groups_wait_together_for_what_the_next_token_needs(clock: Clock, client: SilentClient) -> None:
    side = made(clock, client, [Group(0, Kind.FULL, BLOCK, 1), Group(1, Kind.WINDOW, BLOCK, 1, 2 * BLOCK)])
    params = {**WAITS, "remote_prefill_ended": True, "remote_num_tokens": 4 * BLOCK + 3}
    request = Request("a", 6 * BLOCK, kv_transfer_params=params)
    assert side.match(request, 0) == (4 * BLOCK, True)
    side.allocated(request, [[1, 2, 3, 4], [5, 6, 7, 8]], 4 * BLOCK)
    (load,) = side.step(output({})).loads
    assert [each.block_ids for each in load.blocks] == [[1, 2, 3, 4], [7, 8]]


def test_a_prompt_of_an_adapter_that_may_be_another_is_not_waited_for(
    side: SchedulerSide, client: SilentClient
) -> None:
    gone = SimpleNamespace(path="/there/is/none", adapter_id=1, name="one", load_inplace=False)
    waits = Request("a", 4 * BLOCK, lora_request=gone, kv_transfer_params=WAITS)
    assert side.match(waits, 0) == (0, False)
    computes = Request("b", 4 * BLOCK, lora_request=gone, kv_transfer_params=COMPUTES)
    side.match(computes, 0)
    assert side.step(output({"b": (0, 4 * BLOCK)}, {"b": [1, 2, 3, 4]})).saves == []
    answer = side.finished(computes)
    assert answer is not None
    assert answer["remote_num_tokens"] == 0  # so the engine that decodes waits for nothing


@pytest.mark.parametrize("waits", [True, False], ids=["within a step", "between steps"])
def test_of_several_requests_that_whose_load_failed_is_not_promised_it_again(
    clock: Clock, client: SilentClient, waits: bool
) -> None:
    side = made(clock, client, [Group(0, Kind.FULL, BLOCK, 1)], waits=waits)
    client.tokens = 1000
    failed, preempted = Request("a", 5 * BLOCK), Request("b", 5 * BLOCK, skip_reading_prefix_cache=True)
    side.match(preempted, 0)
    assert side.step(output({"b": (0, 3 * BLOCK)}, {"b": [5, 6, 7]})).saves
    preempted.skip_reading_prefix_cache = False
    side.match(failed, 0)
    side.allocated(failed, [[1, 2, 3, 4]], 4 * BLOCK)
    for _ in range(2):  # vLLM makes another one before it hears of the first
        side.step(output({}))
    side.heard([] if waits else ["a"], (), [1, 2, 3, 4])
    assert side.match(failed, 0) == (0, False)
    assert side.match(preempted, 0) == (4 * BLOCK, not waits)


@pytest.mark.parametrize("at_once", [True, False])
@pytest.mark.parametrize("early", [True, False])
def test_a_tier_that_the_server_does_not_have_refuses_the_request_however_fast_the_answer(
    side: SchedulerSide, client: SilentClient, at_once: bool, early: bool
) -> None:
    client.tokens, client.refuses_at_once = 2 * BLOCK, at_once
    client.refusal = UsageError("no tier is named 'attic': there are disk")
    request = Request("a", 5 * BLOCK, kv_transfer_params={"kv_load_tiers": [{"tier": "attic"}]})
    if early:
        side.queued(request, 0)
    assert side.match(request, 0) == (0, False)
    assert side.step(output({"a": (0, 5 * BLOCK)}, {"a": [1, 2, 3, 4, 5]})).saves == []
    answer = side.finished(request)
    assert answer is not None
    assert "attic" in answer["lmcache_core_refused"]
    assert side.counters.take()["params_refused_requests"] == 1


@pytest.mark.parametrize("at_once", [True, False])
def test_a_namespace_that_the_server_refuses_is_not_asked_for_again_for_a_while(
    side: SchedulerSide, client: SilentClient, at_once: bool
) -> None:
    client.tokens, client.refuses_at_once = 2 * BLOCK, at_once
    client.refusal = UsageError("a layout of too many bytes")
    assert side.match(Request("a", 5 * BLOCK), 0) == (2 * BLOCK, True)
    side.queued(Request("b", 5 * BLOCK), 0)
    assert side.match(Request("c", 5 * BLOCK), 0) == (2 * BLOCK, True)
    assert client.asked == 1


@pytest.mark.parametrize("at_once", [True, False])
@pytest.mark.parametrize("error", [LimitError, UnknownNamespaceError, UsageError])
def test_what_the_server_has_no_room_for_is_not_blamed_on_the_tiers_that_a_request_names(
    side: SchedulerSide, client: SilentClient, at_once: bool, error: type[CacheError]
) -> None:
    client.tokens, client.refuses_at_once = 2 * BLOCK, at_once
    client.refusal = error("1023 of 1023 layouts are in use: tier 'disk' has nothing to do with it")
    request = Request("a", 5 * BLOCK, kv_transfer_params={"kv_load_tiers": [{"tier": "disk"}]})
    assert side.match(request, 0) == (2 * BLOCK, True)
    assert side.match(Request("b", 5 * BLOCK), 0) == (2 * BLOCK, True)
    assert client.asked == 1  # it is not asked again for a while
    side.finished(request)
    assert "params_refused_requests" not in side.counters.take()


class Offers:
    """Takes every document, or none."""

    def __init__(self, refusal: str = "") -> None:
        self.refusal = refusal

    def offer(self, request: Any, groups: Any, shards: Any, block_ids: Any) -> Any:
        if self.refusal:
            raise UsageError(self.refusal)
        return request.request_id, list(block_ids)


def test_a_document_is_offered_once_in_the_step_that_computes_its_last_token(
    clock: Clock, client: SilentClient
) -> None:
    side = made(clock, client, [Group(0, Kind.FULL, BLOCK, 1)], chunks=Offers())
    request = Request("a", 40, kv_transfer_params={"store_chunk": True})
    other = Request("b", 40)
    for each in (request, other):
        side.allocated(each, ([],), 0)
    tables = {"a": [4, 5, 6], "b": [7, 8, 9]}
    assert not side.step(output({"a": (0, 39), "b": (0, 40)}, tables)).chunks
    assert side.step(output({"a": (39, 1), "b": (40, 1)}, tables)).chunks == [("a", [4, 5, 6])]
    assert not side.step(output({"a": (40, 1)}, tables)).chunks
    assert side.finished(request) is side.finished(other) is None


def test_an_answer_says_why_a_document_was_not_stored(clock: Clock, client: SilentClient) -> None:
    side = made(clock, client, [Group(0, Kind.FULL, BLOCK, 1)], chunks=Offers("too long"))
    refused = "lmcache_core_chunk_refused"

    def told(computed: int, **params: Any) -> dict[str, Any] | None:
        request = Request("a", 40, kv_transfer_params={"store_chunk": True, **params})
        side.allocated(request, ([],), 0)
        assert not side.step(output({"a": (0, computed)}, {"a": [4, 5, 6]})).chunks
        return side.finished(request)

    assert told(40) == {refused: "too long"}
    assert told(40, max_offload_tokens=39) == {
        refused: "max_offload_tokens keeps a part of the prompt out of the cache"
    }
    assert "was not computed" in (told(39) or {})[refused]  # it was aborted
    both = told(40, do_remote_decode=True) or {}
    assert (both[refused], both["do_remote_prefill"]) == ("too long", True)
    assert side.counters.take()["save_dropped_chunks"] == 3
