"""Two engines and one pool: one computes prompts, the other goes on with them, and either side may die at any block."""

from __future__ import annotations

import os
import random
import signal
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from vllm_engines import Engine, EngineError, Server, prompt, save_model

from lmcache_testing.embedded import Json

BLOCK = 128

GENERATE = """
extra = {{'kv_transfer_params': {params!r}}} if {params!r} else None
sampling = SamplingParams(temperature=0, max_tokens={count}, detokenize=False, ignore_eos=True, extra_args=extra)
outputs = llm.generate([{{'prompt_token_ids': each}} for each in {prompts!r}], sampling, use_tqdm=False)
said = [
    {{'tokens': list(each.outputs[0].token_ids), 'cached': each.num_cached_tokens, 'params': each.kv_transfer_params}}
    for each in outputs
]
"""


def computing(engine: Engine, *prompts: list[int], transfer_id: str) -> None:
    """Have it compute prompts for another engine; `hear` waits for the end."""
    params = {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": transfer_id}
    engine.tell(GENERATE.format(params=params, count=1, prompts=list(prompts)))


def decoding(engine: Engine, *prompts: list[int], transfer_id: str = "", params: Json | None = None) -> None:
    """Have it go on with prompts that another one computes."""
    given = params or {"do_remote_decode": False, "do_remote_prefill": True, "transfer_id": transfer_id}
    engine.tell(GENERATE.format(params=given, count=12, prompts=list(prompts)))


def heard(engine: Engine) -> Json:
    (answer,) = engine.hear()
    return answer  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def server(serve: Callable[..., Server]) -> Server:
    return serve()


@pytest.fixture(scope="module")
def plain(start: Callable[..., Engine], llama: Path) -> Engine:
    return start(llama, enable_prefix_caching=False)


def pair(start: Callable[..., Engine], model: Path, server: Server, **settings: Any) -> tuple[Engine, Engine]:
    """An engine that computes prompts, two blocks in a step, and one that decodes."""
    given = server.settings(**settings)
    return (
        start(model, given, role="kv_producer", max_num_batched_tokens=2 * BLOCK),
        start(model, given, role="kv_consumer", max_num_batched_tokens=4 * BLOCK),
    )


@pytest.fixture(scope="module")
def engines(start: Callable[..., Engine], llama: Path, server: Server) -> tuple[Engine, Engine]:
    return pair(start, llama, server, salt="pair", prefill_timeout_s=60)


def test_an_engine_goes_on_with_a_prompt_while_another_computes_it(
    plain: Engine, engines: tuple[Engine, Engine]
) -> None:
    prefill, decode = engines
    tokens = prompt(1, 1500)
    (expected,) = plain.generate(tokens)
    decoding(decode, tokens, transfer_id="1")
    computing(prefill, tokens, transfer_id="1")
    assert heard(prefill)["params"]["transfer_id"] == "1"
    found = heard(decode)
    assert (found["tokens"], found["cached"]) == (expected["tokens"], 11 * BLOCK)
    figures = decode.figures()
    assert (figures["prefill_loads"], figures["load_blocks"]) == (1, 11)
    assert "prefill_late_blocks" not in figures


def test_what_the_first_engine_answers_is_what_the_second_is_given(
    plain: Engine, engines: tuple[Engine, Engine]
) -> None:
    """As routers do it that know vLLM's own connectors."""
    prefill, decode = engines
    tokens = prompt(2, 900)
    (expected,) = plain.generate(tokens)
    computing(prefill, tokens, transfer_id="2")
    params = heard(prefill)["params"]
    assert params["do_remote_prefill"] is True
    assert params["remote_prefill_ended"] is True
    assert params["remote_num_tokens"] == 7 * BLOCK
    decode.figures()
    decoding(decode, tokens, params=params)
    assert heard(decode)["tokens"] == expected["tokens"]
    assert decode.figures()["load_blocks"] == 7  # vLLM itself says how many the first engine had cached


def test_limits_that_only_the_first_engine_is_given_hold_in_the_second_too(
    plain: Engine, engines: tuple[Engine, Engine]
) -> None:
    prefill, decode = engines
    tokens = prompt(8, 900)
    (expected,) = plain.generate(tokens)
    given = {"do_remote_decode": True, "transfer_id": "8", "max_offload_tokens": 3 * BLOCK}
    prefill.tell(GENERATE.format(params=given, count=1, prompts=[tokens]))
    params = heard(prefill)["params"]
    assert (params["remote_num_tokens"], params["max_offload_tokens"]) == (3 * BLOCK, 3 * BLOCK)
    decode.figures()
    decoding(decode, tokens, params=params)
    assert heard(decode)["tokens"] == expected["tokens"]
    figures = decode.figures()
    assert figures["load_blocks"] == 3
    assert "prefill_late_blocks" not in figures  # nobody has waited for the others


def test_requests_that_wait_hold_up_no_others(plain: Engine, engines: tuple[Engine, Engine]) -> None:
    prefill, decode = engines
    waiting, other = prompt(3, 700), prompt(4, 700)
    (expected, different) = plain.generate(waiting, other)
    decode.run(
        "params = {'do_remote_prefill': True, 'transfer_id': '3'}\n"
        "sampling = SamplingParams(temperature=0, max_tokens=12, detokenize=False, ignore_eos=True)\n"
        "waits = sampling.clone()\n"
        "waits.extra_args = {'kv_transfer_params': params}\n"
        "engine, ended = llm.llm_engine, {}\n"
        f"engine.add_request('waits', {{'prompt_token_ids': {waiting!r}}}, waits)\n"
        f"engine.add_request('other', {{'prompt_token_ids': {other!r}}}, sampling)\n"
        "while not ended:\n"
        "    ended = {each.request_id: list(each.outputs[0].token_ids) for each in engine.step() if each.finished}\n"
        "assert engine.has_unfinished_requests()\n"
        f"assert [*ended.values()] == [{different['tokens']!r}], ended\n"
    )
    computing(prefill, waiting, transfer_id="3")
    heard(prefill)
    decode.run(
        "while engine.has_unfinished_requests():\n"
        "    ended |= {each.request_id: list(each.outputs[0].token_ids) for each in engine.step() if each.finished}\n"
        f"assert {expected['tokens']!r} in ended.values(), ended\n"
    )


def test_a_request_that_is_aborted_while_it_waits_leaves_nothing_behind(engines: tuple[Engine, Engine]) -> None:
    _, decode = engines
    decode.run(
        "sampling.extra_args = {'kv_transfer_params': {'do_remote_prefill': True, 'transfer_id': '4'}}\n"
        f"name = engine.add_request('gone', {{'prompt_token_ids': {prompt(5, 700)!r}}}, sampling) or 'gone'\n"
        "for _ in range(3): engine.step()\n"
        "assert worker.loading\n"
        "engine.abort_request(['gone'])\n"
        "llm.llm_engine.abort_request([*core.scheduler.requests], internal=True)\n"
        "for _ in range(5): engine.step()\n"
        "assert [scheduler.requests, len(worker.loading), len(core.scheduler.requests)] == [0, 0, 0]"
    )


@pytest.mark.parametrize("load", ["async", pytest.param("sync", marks=pytest.mark.slow)])
def test_what_nobody_computes_in_time_is_computed(
    plain: Engine, start: Callable[..., Engine], llama: Path, server: Server, load: str
) -> None:
    decode = start(llama, server.settings(salt=f"alone {load}", load=load, prefill_timeout_s=0.3), role="kv_consumer")
    tokens = prompt(6, 700)
    (expected,) = plain.generate(tokens)
    decoding(decode, tokens, transfer_id="6")
    assert heard(decode)["tokens"] == expected["tokens"]
    figures = decode.figures()
    assert figures["prefill_late_blocks"] == 5
    assert "load_failed_requests" not in figures
    decode.end()


@pytest.mark.slow
@pytest.mark.parametrize("ends", [True, False], ids=["whole", "in part"])
def test_models_with_several_groups_go_on_with_what_has_come(
    start: Callable[..., Engine], server: Server, tmp_path: Path, ends: bool
) -> None:
    """What has come in part is dropped by vLLM, which has no better way, and looked up once more, like any prompt."""
    changes = {"sliding_window": 256, "query_pre_attn_scalar": 64, "num_hidden_layers": 6, "config": "Gemma3Text"}
    model = save_model(tmp_path / "gemma3", "Gemma3", **changes)
    prefill, decode = pair(start, model, server, salt=f"groups {ends}", prefill_timeout_s=30 if ends else 2)
    tokens = prompt(7, 900)
    (expected,) = start(model, enable_prefix_caching=False).generate(tokens)
    decoding(decode, tokens, transfer_id="7")
    computing(prefill, tokens if ends else tokens[: 4 * BLOCK + 1], transfer_id="7")
    heard(prefill)
    found = heard(decode)
    assert found["tokens"] == expected["tokens"]
    assert found["cached"] == (7 if ends else 4) * BLOCK
    prefill.end()
    decode.end()


# --- ends at any block ----------------------------------------------------------------------------------------

# How many transfers, or which, as in "400-480": a thousand take an hour on two cores, and can be run in pieces.
FIRST, _, END = os.environ.get("LMCACHE_CORE_VLLM_TRANSFERS", "96").rpartition("-")
ROUND = 24  # at once
TRANSFERS = range(int(FIRST or "0") // ROUND * ROUND, int(END), ROUND)
KILLS = """
import os
saved = [0]
def killing(step):
    type(worker).save(worker, step)
    saved[0] += sum(len(each.hashes) for each in step.saves)
    if saved[0] >= {blocks}: os.kill({pid} or os.getpid(), 9)
worker.save = killing
"""
KILLS_ITSELF = """
import os
came = {{}}
def killing(finished, idle):
    running = worker.loading.items()
    wanted = {{name: sum(len(each.block_ids) for each in loading.load.blocks) for name, loading in running}}
    found = type(worker).arrived(worker, finished, idle)
    came.update({{name: wanted.get(name, 0) for name in found.received}})
    came.update({{name: each.job.arrived for name, each in worker.loading.items()}})
    if sum(came.values()) >= {blocks}: os.kill(os.getpid(), 9)
    return found
worker.arrived = killing
"""
SPARED = "vars(worker).pop('save', None), vars(worker).pop('arrived', None)"  # the next one is chosen anew


def answers(engine: Engine) -> list[list[int]] | None:
    """The tokens of all its requests; None if it was killed."""
    try:
        return [each["tokens"] for each in engine.hear()]
    except EngineError:
        assert engine.popen.wait(60) == -signal.SIGKILL, engine.log[-4000:]
        return None


@pytest.mark.slow
@pytest.mark.timeout(len(TRANSFERS) * 240 + 600)
def test_no_answer_differs_and_none_is_missing_whoever_is_killed_at_whatever_block(
    plain: Engine, start: Callable[..., Engine], llama: Path, serve: Callable[..., Server]
) -> None:
    """Each round has a victim, and a block at which it is killed, both by the round's number. Who sent requests to a
    decoder that was killed sends them to the next."""
    server = serve()
    settings = server.settings(prefill_timeout_s=20.0)

    def prefiller() -> Engine:
        return start(llama, settings, role="kv_producer", max_num_batched_tokens=2 * BLOCK)

    def decoder() -> Engine:
        return start(llama, settings, role="kv_consumer", max_num_batched_tokens=4 * BLOCK)

    prefill, decode = prefiller(), decoder()
    killed: Counter[str] = Counter()
    loaded = 0.0
    for first in TRANSFERS:
        chooser = random.Random(first)
        prompts = [prompt(10_000 + first + at, chooser.randrange(2 * BLOCK, 8 * BLOCK)) for at in range(ROUND)]
        expected = [each["tokens"] for each in plain.generate(*prompts)]
        victim = ("prefill", "decode", "server", "nobody")[first // ROUND % 4]
        blocks = chooser.randrange(1, sum(len(each) - 1 for each in prompts) // BLOCK)
        if victim in ("prefill", "server"):
            prefill.run(KILLS.format(blocks=blocks, pid=server.pid if victim == "server" else 0))
        elif victim == "decode":
            decode.run(KILLS_ITSELF.format(blocks=blocks))
        decoding(decode, *prompts, transfer_id=f"{first}")
        computing(prefill, *prompts, transfer_id=f"{first}")
        found, computed = answers(decode), answers(prefill)
        if found is None:
            decode.end()
            decode = decoder()
            decoding(decode, *prompts, transfer_id=f"{first}")
            found = answers(decode)
            killed["decode"] += 1
        if computed is None:
            prefill.end()
            prefill = prefiller()
            killed["prefill"] += 1
        prefill.run(SPARED)
        decode.run(SPARED)
        if victim == "server":
            server.end()
            server.start()
            killed["server"] += 1
        assert found == expected, f"round {first}, {victim} killed at block {blocks}"
        assert decode.run("said = [len(worker.loading), scheduler.requests, len(core.scheduler.requests)]") == [0, 0, 0]
        figures = decode.figures()
        loaded += figures.get("load_blocks", 0)
        done = f"transfers {TRANSFERS.start} to {first + ROUND}"
        print(f"{done}, {loaded:.0f} blocks loaded, killed: {dict(killed)}", flush=True)
    assert loaded
