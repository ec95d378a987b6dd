"""Servers that exit, hang or are missing, loads that fail, requests that end early: answers stay the same."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from vllm_engines import Engine, Server, is_written, prompt, save_model

from lmcache_testing.waiting import until

BLOCK = 128

# The blocks of the next load are gone from the pool by the time it begins; `forgotten` says how many.
GONE = """
begin = scheduler.allocated
def allocated(request, block_ids, external):
    begin(request, block_ids, external)
    if external:
        scheduler.client.clear()
        scheduler.allocated = begin
scheduler.allocated = allocated
"""


@pytest.fixture(scope="module")
def plain(start: Callable[..., Engine], llama: Path) -> Engine:
    return start(llama, enable_prefix_caching=False)


@pytest.fixture(scope="module")
def server(serve: Callable[..., Server]) -> Server:
    return serve()


@pytest.fixture(scope="module", params=["async", "sync"])
def cached(request: pytest.FixtureRequest, start: Callable[..., Engine], llama: Path, server: Server) -> Engine:
    return start(llama, server.settings(load=request.param, salt=request.param), max_num_batched_tokens=512)


def asked(plain: Engine, cached: Engine, tokens: list[int]) -> int:
    (expected,), (found,) = plain.generate(tokens), cached.generate(tokens)
    assert found["tokens"] == expected["tokens"]
    return int(found["cached"])


def stored(plain: Engine, cached: Engine, tokens: list[int]) -> None:
    """In the pool, and not in the engine."""
    asked(plain, cached, tokens)
    cached.saved()
    cached.forget()
    cached.figures()


def test_blocks_that_are_gone_when_they_are_read_are_computed(plain: Engine, cached: Engine) -> None:
    tokens = prompt(1, 1100)
    stored(plain, cached, tokens)
    cached.run(GONE)
    asked(plain, cached, tokens)
    assert cached.figures()["load_failed_blocks"] == 8


def test_nothing_that_was_computed_over_blocks_that_failed_is_stored(plain: Engine, cached: Engine) -> None:
    """The step in which a load fails goes on over what is in the blocks; its KV may not answer for the prompt."""
    tokens = prompt(2, 1500)
    stored(plain, cached, tokens[:1100])
    cached.run(GONE)
    asked(plain, cached, tokens)
    cached.saved()
    cached.forget()
    asked(plain, cached, tokens)
    cached.forget()
    assert asked(plain, cached, tokens) >= 8 * BLOCK  # and what was computed again is there now


# The third layer of the model fails once, or somebody interrupts it, and the engine is asked to go on.
FAILS = """
layer = core.model_executor.driver_worker.model_runner.model.model.layers[2]
forward = layer.forward
def failing(*args, **kwargs):
    layer.forward = forward
    raise {error}('in the middle of a step')
layer.forward = failing
try:
    generate({prompts!r})
except {error}:
    said = 'failed'
"""
ABORTS = """
llm.llm_engine.abort_request([*core.scheduler.requests], internal=True)
for _ in range(100):
    if core.scheduler.has_requests(): llm.llm_engine.step()
said = core.scheduler.has_requests()
"""


@pytest.mark.parametrize("error", ["KeyboardInterrupt", pytest.param("RuntimeError", marks=pytest.mark.slow)])
def test_nothing_of_a_step_that_failed_is_stored_nor_what_is_computed_after_it(
    plain: Engine, start: Callable[..., Engine], llama: Path, server: Server, error: str
) -> None:
    """vLLM takes the blocks of such a step for computed, finds them in its own prefix cache, and goes on from there."""
    settings = server.settings(salt=error)
    failing, tokens = start(llama, settings, max_num_batched_tokens=512), prompt(60, 1500)
    assert failing.run(FAILS.format(error=error, prompts=[tokens])) == "failed"
    assert failing.run(ABORTS) is False
    failing.generate(tokens)
    failing.saved()
    figures = failing.figures()
    assert "save_blocks" not in figures
    assert figures["save_tainted_blocks"] > 0
    failing.end()
    another = start(llama, settings)
    assert asked(plain, another, tokens) == 0
    another.end()


@pytest.mark.slow
def test_a_load_that_ends_in_a_step_that_fails_is_told_of_in_the_next(
    plain: Engine, start: Callable[..., Engine], llama: Path, server: Server
) -> None:
    tokens, computed = prompt(61, 1100), prompt(62, 400)
    failing = start(llama, server.settings(salt="told"), max_num_batched_tokens=512)
    stored(plain, failing, tokens)
    failing.run("begin = worker.start_loads")
    failing.run(
        "def ended(step):\n"
        "    begin(step)\n"
        "    for each in worker.loading.values(): each.job.wait()\n"
        "worker.start_loads = ended"
    )
    assert failing.run(FAILS.format(error="RuntimeError", prompts=[tokens, computed])) == "failed"
    assert failing.run(ABORTS) is False  # vLLM keeps the blocks of a request until it is told that its load has ended
    assert failing.run("said = [len(worker.loading), len(core.scheduler.requests)]") == [0, 0]
    failing.end()


INTERRUPTED = """
begin = worker.start_loads
def interrupted(step):
    if step.loads:
        worker.start_loads = begin
        {during}
        raise KeyboardInterrupt('by a signal, in the middle of a load')
    begin(step)
worker.start_loads = interrupted
try:
    generate([{tokens!r}])
except KeyboardInterrupt:
    said = 'interrupted'
"""


@pytest.mark.slow
@pytest.mark.parametrize("load", ["async", "sync"])
@pytest.mark.parametrize("during", ["pass", "begin(step)"], ids=["before it began", "once it was under way"])
def test_a_load_that_is_interrupted_keeps_no_request(
    plain: Engine, start: Callable[..., Engine], llama: Path, server: Server, load: str, during: str
) -> None:
    cached = start(llama, server.settings(load=load, salt=f"{load}{during}"), max_num_batched_tokens=512)
    tokens = prompt(63, 1100)
    stored(plain, cached, tokens)
    assert cached.run(INTERRUPTED.format(tokens=tokens, during=during)) == "interrupted"
    assert cached.run(ABORTS) is False
    cached.forget()
    asked(plain, cached, tokens)
    assert cached.run("said = [len(worker.loading), len(core.scheduler.requests), scheduler.requests]") == [0, 0, 0]
    cached.end()


def test_a_request_that_is_aborted_while_it_loads_leaves_the_engine_well(plain: Engine, cached: Engine) -> None:
    tokens = prompt(3, 1100)
    stored(plain, cached, tokens)
    cached.run(
        "engine = llm.llm_engine\n"
        "sampling = SamplingParams(temperature=0, max_tokens=9, detokenize=False, ignore_eos=True)\n"
        f"name = engine.add_request('aborted', {{'prompt_token_ids': {tokens!r}}}, sampling) or 'aborted'\n"
        "engine.step()\n"
        "engine.abort_request(['aborted'])\n"
        "while engine.has_unfinished_requests(): engine.step()\n"
        "for _ in range(3): engine.step()\n"
        "said = [scheduler.requests, len(worker.loading)]"
    )
    assert asked(plain, cached, tokens) in (0, 8 * BLOCK)
    assert cached.run("said = [scheduler.requests, len(worker.loading)]") == [0, 0]


def test_a_server_that_was_killed_costs_hits_and_its_successor_serves_them(
    plain: Engine, cached: Engine, server: Server
) -> None:
    tokens, others = prompt(4, 1100), prompt(5, 700)
    stored(plain, cached, tokens)
    server.signal(signal.SIGKILL)
    server.end()
    asked(plain, cached, tokens)
    asked(plain, cached, others)
    cached.forget()
    server.start()
    until(lambda: served_again(plain, cached, tokens, 8 * BLOCK))


def test_a_server_that_hangs_costs_hits(
    plain: Engine, start: Callable[..., Engine], llama: Path, server: Server
) -> None:
    """With its own limits: a step waits some milliseconds for it, and a request a part of a second."""
    settings = server.settings(salt="hangs", step_wait_s=0.004, lookup_timeout_s=0.2, load_timeout_s=0.2)
    cached = start(llama, settings)
    asked(plain, cached, prompt(6, 600))
    server.signal(signal.SIGSTOP)
    try:
        for number in range(4):
            asked(plain, cached, prompt(7 + number, 600))
    finally:
        server.signal(signal.SIGCONT)
    figures = cached.figures()
    assert figures["lookup_timeouts"] + figures.get("lookup_unreachable", 0) >= 1
    assert figures["save_dropped_blocks"] >= 4
    tokens = prompt(20, 600)
    until(lambda: served_again(plain, cached, tokens))


def served_again(plain: Engine, cached: Engine, tokens: list[int], hit: int = 4 * BLOCK) -> bool:
    cached.forget()
    return asked(plain, cached, tokens) == hit


@pytest.mark.slow
def test_loads_of_several_groups_fail_twice_and_their_requests_are_computed(
    start: Callable[..., Engine], server: Server, tmp_path: Path
) -> None:
    """vLLM forgets all that such a request has, and matches it again: the connector has to let it be computed then."""
    changes = {"sliding_window": 256, "query_pre_attn_scalar": 64, "num_hidden_layers": 6, "config": "Gemma3Text"}
    model = save_model(tmp_path / "gemma3", "Gemma3", **changes)
    cached = start(model, server.settings(salt="groups"))
    tokens = prompt(50, 900)
    (expected,) = cached.generate(tokens)
    for _ in range(2):
        cached.saved()
        cached.forget()
        cached.figures()
        cached.run(GONE)
        (found,) = cached.generate(tokens)
        assert found["tokens"] == expected["tokens"]
        figures = cached.figures()
        assert figures["load_failed_requests"] == 1
        assert figures["lookup_vetoed"] >= 1
    cached.saved()  # what was computed then is there
    cached.forget()
    assert cached.generate(tokens) == [{"tokens": expected["tokens"], "cached": 7 * BLOCK}]
    cached.end()


@pytest.mark.slow
def test_objects_that_were_cut_short_on_a_disk_are_computed(
    plain: Engine, start: Callable[..., Engine], llama: Path, serve: Callable[..., Server], tmp_path: Path
) -> None:
    server = serve("--l2.disk.type", "fs", "--l2.disk.path", str(tmp_path))
    cached, tokens = start(llama, server.settings(), max_num_batched_tokens=512), prompt(70, 1100)
    stored(plain, cached, tokens)
    with server.client() as client:
        until(lambda: is_written(client.status()["tiers"]["stores"]))
        client.clear()
    large = [path for path in tmp_path.rglob("*") if path.is_file() and path.stat().st_size >= 512 * 1024]
    assert len(large) == 8
    for number, path in enumerate(large):
        os.truncate(path, path.stat().st_size // 2 if number % 2 else 0)
    assert asked(plain, cached, tokens) == 0
    cached.saved()
    cached.forget()
    assert asked(plain, cached, tokens) == 8 * BLOCK  # what was computed then is whole
    cached.end()


@pytest.mark.slow
def test_an_engine_starts_without_a_server_and_finds_it_later(
    plain: Engine, start: Callable[..., Engine], llama: Path, serve: Callable[..., Server]
) -> None:
    server = serve()
    server.remove()
    cached = start(llama, server.settings())
    tokens = prompt(30, 600)
    assert asked(plain, cached, tokens) == 0
    cached.forget()
    server.start()
    until(lambda: served_again(plain, cached, tokens))


@pytest.mark.slow
def test_preemption_while_blocks_are_saved_and_loaded(
    plain: Engine, start: Callable[..., Engine], llama: Path, server: Server
) -> None:
    """Seven blocks for three requests that need four each."""
    small = {"kv_bytes": 8 * 512 * 1024 + 1, "max_model_len": 512, "enable_prefix_caching": False}
    cached = start(llama, server.settings(salt="small"), **small)
    prompts = [prompt(40 + number, 300) for number in range(3)]
    expected = [plain.generate(each, count=150)[0]["tokens"] for each in prompts]
    for _ in range(2):
        assert [each["tokens"] for each in cached.generate(*prompts, count=150)] == expected
        cached.saved()
    assert cached.run("said = core.scheduler.kv_cache_config.num_blocks") == 8
