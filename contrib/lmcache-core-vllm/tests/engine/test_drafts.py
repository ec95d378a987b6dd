"""Speculative decoding: answers are those without a cache, and a draft model finds its own KV in the blocks, too."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from test_trouble import GONE
from vllm_engines import ROPE, Engine, Server, prompt, save_model

pytestmark = pytest.mark.slow
BLOCK = 128
TOKENS = prompt(71, 1000)


@pytest.fixture(scope="module")
def server(serve: Callable[..., Server]) -> Server:
    return serve()


def stored(engine: Engine) -> list[int]:
    """The answer; its blocks are in the pool, and not in the engine."""
    (found,) = engine.generate(TOKENS, count=40)
    assert found["cached"] == 0
    engine.saved()
    engine.forget()
    engine.figures()
    return list(found["tokens"])


ACCEPTED = """
names = ('vllm:spec_decode_num_accepted_tokens', 'vllm:spec_decode_num_draft_tokens')
def counts(): return [sum(each.value for each in llm.get_metrics() if each.name == name) for name in names]
before = counts()
(found,) = generate([{tokens!r}], 40)
said = [found['tokens'], found['cached'], *[b - a for a, b in zip(before, counts())]]
"""
# What a hit has loaded for the draft model's layers is zeroed before anything is computed over it.
ZEROED = """
end = worker.note_end
def zeroing(loading):
    invalid = end(loading)
    for blocks in loading.load.blocks:
        for layer in worker.memory[blocks.group]:
            if layer.layer.startswith('draft_model'):
                for region in layer.regions: region.buffer[blocks.block_ids] = 0
    return invalid
worker.note_end = zeroing
"""


def accepted(engine: Engine) -> tuple[list[int], int, float]:
    """The answer, its cached tokens, and the part of the draft's tokens that the model accepted."""
    tokens, cached, good, made = engine.run(ACCEPTED.format(tokens=TOKENS))
    engine.saved()
    engine.forget()
    return tokens, cached, good / made


def test_a_draft_model_drafts_as_well_behind_a_hit_and_badly_if_its_kv_is_lost(
    start: Callable[..., Engine], llama: Path, server: Server, tmp_path: Path
) -> None:
    draft = save_model(tmp_path / "draft", "Llama", rope_parameters=ROPE)  # the model itself: all its drafts are right
    options: dict[str, Any] = {
        "speculative_config": {"method": "draft_model", "model": str(draft), "num_speculative_tokens": 3},
        "disable_log_stats": False,
    }
    engine = start(llama, server.settings(salt="draft", store_cpu_share=4), **options)
    layers = engine.run("said = [each.layer for layers in worker.memory for each in layers]")
    assert any(each.startswith("draft_model") for each in layers)
    expected, cached, cold = accepted(engine)
    assert (cached, cold) == (0, 1.0)
    assert accepted(engine) == (expected, 7 * BLOCK, 1.0)
    engine.run(ZEROED)
    tokens, cached, worse = accepted(engine)
    assert (tokens, cached) == (expected, 7 * BLOCK)  # the model decides, whatever is drafted
    assert worse < 0.9
    engine.end()

    other = save_model(tmp_path / "draft", "Llama", seed=2, rope_parameters=ROPE)
    options["speculative_config"]["model"] = str(other)
    another = start(llama, server.settings(salt="draft", store_cpu_share=4), **options)
    tokens, cached, _ = accepted(another)
    assert (tokens, cached) == (expected, 0)  # with a draft model of other weights nothing is shared
    another.end()


@pytest.mark.parametrize("load", ["sync", "async"])
def test_a_load_that_fails_beside_speculation_is_computed(
    start: Callable[..., Engine], llama: Path, server: Server, load: str
) -> None:
    """vLLM asks for the results of a step with speculation before it says that the step is over."""
    speculative = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 2}
    engine = start(llama, server.settings(salt=f"ngram {load}", load=load), speculative_config=speculative)
    expected = stored(engine)
    engine.run(GONE)
    (found,) = engine.generate(TOKENS, count=40)
    assert found["tokens"] == expected
    assert engine.figures()["load_failed_blocks"] == 7
    engine.end()


@pytest.mark.parametrize(
    ("method", "why"),
    [("medusa", "has not been tried with this connector"), ("eagle", "depends on the token after it")],
)
def test_other_ways_to_draft_are_refused_with_the_reason(method: str, why: str) -> None:
    from types import SimpleNamespace

    from lmcache_core.errors import SettingsError
    from lmcache_core_vllm.facts import check_speculation

    speculative = SimpleNamespace(method=method, use_eagle=lambda: method == "eagle")
    with pytest.raises(SettingsError, match=rf"{method}.*{why}.*use ngram, suffix or draft_model"):
        check_speculation(speculative)
