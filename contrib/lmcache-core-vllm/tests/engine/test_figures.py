"""What the scheduler of vLLM found is the same in all figures. The test counts what answers say was cached."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from vllm_engines import Engine, Server, is_written, prompt, save_model

from lmcache_testing.waiting import until

BLOCK = 128
GEMMA3 = {"sliding_window": 256, "query_pre_attn_scalar": 64, "num_hidden_layers": 6, "config": "Gemma3Text"}
ASKED = 7 * BLOCK  # whole blocks of a prompt that leave a token to compute


def lines_of(server: Server, *command: str) -> str:
    argv = [sys.executable, "-m", "lmcache_core.cli.main", *command, str(server.runtime_dir), "--name", server.name]
    return subprocess.run(argv, capture_output=True, text=True, check=True).stdout


def metric(text: str, name: str) -> float:
    """The sum of all its samples."""
    return sum(float(line.split()[-1]) for line in text.splitlines() if line.startswith((f"{name} ", f"{name}{{")))


@pytest.mark.parametrize("model", ["llama", pytest.param("gemma3", marks=pytest.mark.slow)])
def test_hits_are_one_truth_in_engine_server_metrics_and_check(
    start: Callable[..., Engine], llama: Path, serve: Callable[..., Server], tmp_path: Path, model: str
) -> None:
    pytest.importorskip("lmcache_http", reason="has the metrics")
    server = serve()
    folder = llama if model == "llama" else save_model(tmp_path, "Gemma3", **GEMMA3)
    engine = start(folder, server.settings(), disable_log_stats=False)
    groups = engine.run("said = len(scheduler.groups)")
    prompts, tokens, cached = 0, 0, 0
    for turn in range(10):  # the first is a miss, and nine are hits, without a call
        (answer,) = engine.generate(prompt(1, 1000))
        prompts, tokens, cached = prompts + 1, tokens + ASKED, cached + answer["cached"]
        assert answer["cached"] == (ASKED if turn else 0)
        engine.saved()
        engine.forget()
    (answer,) = engine.generate(prompt(1, 1000)[:500] + prompt(2, 500))  # in part: the server is asked for the rest
    prompts, tokens, cached = prompts + 1, tokens + ASKED, cached + answer["cached"]
    assert answer["cached"] == 3 * BLOCK
    engine.generate(prompt(3, 10))  # vLLM's figures travel with a step; there is no block to ask for
    own = engine.run("said = {each.name: each.value for each in llm.get_metrics() if hasattr(each, 'value')}")
    assert own["vllm:lmcache_core_lookup_requests"] == prompts
    assert own["vllm:lmcache_core_lookup_hit_tokens"] == own["vllm:external_prefix_cache_hits"] == cached
    assert own["vllm:lmcache_core_lookup_missed_tokens"] == tokens - cached
    with server.client() as client:
        lookups = client.status()["traffic"]["lookups"]
    assert (lookups["prompts"], lookups["tokens"], lookups["hit_tokens"]) == (prompts, tokens, cached)
    assert lookups["hit_rate"] == pytest.approx(cached / tokens, abs=1e-6)
    assert (lookups["keys"], lookups["hits"]) == (groups * tokens // BLOCK, groups * cached // BLOCK)
    text = lines_of(server, "metrics", "--runtime-dir")
    assert metric(text, "lmcache_core_prompts_total") == prompts
    assert metric(text, "lmcache_core_lookup_tokens_total") == tokens
    assert metric(text, "lmcache_core_lookup_hit_tokens_total") == cached
    said = json.loads(lines_of(server, "check", "--engine", "vllm", "--json", "--runtime_dir"))["findings"]
    found = f"{cached:,} of {tokens:,} tokens were found"
    assert [each["message"] for each in said if each["subject"].startswith("namespace ")] == [found] * groups
    assert [each["message"].startswith(found) for each in said if each["subject"] == "prompts"] == [True]
    engine.end()


QUEUED = """
engine = llm.llm_engine
sampling = SamplingParams(temperature=0, max_tokens=12, detokenize=False, ignore_eos=True)
for name, tokens in enumerate({prompts!r}):
    engine.add_request(str(name), {{'prompt_token_ids': tokens}}, sampling)
said = [each.lookup is not None for each in scheduler.tracked.values()]
"""
FINISHED = """
outputs = {}
while engine.has_unfinished_requests():
    outputs |= {each.request_id: each for each in engine.step() if each.finished}
said = [[list(outputs[name].outputs[0].token_ids), outputs[name].num_cached_tokens] for name in sorted(outputs)]
"""


def test_tiers_load_for_requests_that_wait_for_their_turn(
    start: Callable[..., Engine], llama: Path, serve: Callable[..., Server], tmp_path: Path
) -> None:
    server = serve("--l2.disk.type", "fs", "--l2.disk.path", str(tmp_path))
    engine = start(llama, server.settings(), max_num_seqs=1)
    prompts = [prompt(number, 1000) for number in range(3)]
    expected = [engine.generate(each)[0]["tokens"] for each in prompts]
    engine.saved()
    engine.forget()
    engine.figures()
    with server.client() as client:
        until(lambda: is_written(client.status()["tiers"]["stores"]))
        client.clear()  # of the pool
        assert engine.run(QUEUED.format(prompts=prompts)) == [True] * 3
        until(lambda: client.status()["l1"]["objects_by_state"]["ready"] == 3 * 7)  # before a step of the engine
    assert engine.run(FINISHED) == [[tokens, ASKED] for tokens in expected]
    figures = engine.figures()
    assert (figures["lookup_requests"], figures["lookup_held"]) == (3, 3)
    assert (figures["lookup_hit_tokens"], figures["load_blocks"]) == (3 * ASKED, 3 * 7)
    assert len(figures["lookup_latency_seconds"]) == len(figures["load_latency_seconds"]) == 3
    with server.client() as client:
        lookups = client.status()["traffic"]["lookups"]
    assert lookups["loaded_tokens"] == 3 * ASKED
    engine.end()
