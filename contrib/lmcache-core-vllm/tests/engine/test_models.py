"""Models with windows, states, several KV groups or latent attention, ranks and adapters: answers equal those without
the cache. Each engine starts and ends in its own test."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from vllm_engines import Engine, Server, prompt, save_adapter, save_model

from lmcache_core.testing.waiting import until

ROPE = {"rope_type": "default", "rope_theta": 10_000.0}
# vLLM 0.32 computes latent attention on the CPU without prefixes of its own: behind one its answers are others, also
# where the blocks come from a dict.
UNEQUAL = {"deepseek"}
QUICK = {"gemma3", "granite"}
SLIDES = {"sliding_window": 256, "rope_parameters": ROPE}
# Name: the model, what is not as in `save_model`, options of the engine, and tokens of a prompt.
MODELS: dict[str, tuple[str, dict[str, Any], dict[str, Any], int]] = {
    "mistral": ("Mistral", SLIDES, {}, 900),
    "gemma2": ("Gemma2", {"sliding_window": 256, "head_dim": 64, "query_pre_attn_scalar": 64}, {}, 900),
    "gemma3": (
        "Gemma3",
        {
            "sliding_window": 256,
            "query_pre_attn_scalar": 64,
            "num_hidden_layers": 6,
            "config": "Gemma3Text",
        },
        {},
        900,
    ),
    "granite": (
        "GraniteMoeHybrid",
        {
            "layer_types": ["mamba", "attention", "mamba", "attention"],
            "mamba_n_heads": 8,
            "mamba_d_head": 64,
            "mamba_d_state": 16,
            "mamba_n_groups": 1,
            "mamba_chunk_size": 256,
            "num_local_experts": 0,
            "num_experts_per_tok": 0,
            "shared_intermediate_size": 256,
            "position_embedding_type": "nope",
        },
        {
            "mamba_cache_mode": "align",
            "enable_prefix_caching": True,
            # No step may end behind a boundary: vLLM 0.32 has no states in the middle of a step on the CPU.
            "block_size": 256,
            "max_num_batched_tokens": 256,
        },
        900,
    ),
    "qwen3_next": (
        "Qwen3Next",
        {
            "dtype": "bfloat16",
            "head_dim": 128,
            "layer_types": ["linear_attention", "full_attention", "linear_attention", "full_attention"],
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 64,
            "shared_expert_intermediate_size": 64,
        },
        {
            "dtype": "bfloat16",
            "mamba_cache_mode": "align",
            "enable_prefix_caching": True,
        },
        900,
    ),
    "deepseek": (
        "DeepseekV2",
        {
            "num_key_value_heads": 4,
            "kv_lora_rank": 512,
            "q_lora_rank": None,
            "qk_nope_head_dim": 64,
            "qk_rope_head_dim": 64,
            "v_head_dim": 64,
            "n_routed_experts": 4,
            "n_shared_experts": 1,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 64,
            "first_k_dense_replace": 1,
            "n_group": 1,
            "topk_group": 1,
        },
        {},
        600,
    ),
}


@pytest.fixture(scope="module")
def server(serve: Callable[..., Server]) -> Server:
    return serve()


# Keep what is saved, and compare with it what is read: the way of a dict, without a server in between.
COMPARED = """
kept, compared, different = {}, [], []
def pages(blocks, at):
    layers = worker.memory[blocks.group]
    return [region.buffer[blocks.block_ids[at]].clone() for layer in layers for region in layer.regions]
save, end = worker.save, worker.note_end
def saving(step):
    for blocks in step.saves:
        for at, each in enumerate(blocks.hashes):
            kept[blocks.group, each] = pages(blocks, at)
    save(step)
def ending(loading):
    invalid = end(loading)
    for blocks in loading.load.blocks:
        for at, each in enumerate(blocks.hashes):
            compared.append(blocks.group)
            same = all(bool((a == b).all()) for a, b in zip(pages(blocks, at), kept[blocks.group, each]))
            if not same:
                different.append((blocks.group, at))
    return invalid
worker.save, worker.note_end = saving, ending
"""


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in sorted(MODELS)]
)
def test_every_group_reads_what_it_stored(
    name: str, start: Callable[..., Engine], server: Server, tmp_path: Path
) -> None:
    kind, changes, options, tokens = MODELS[name]
    model = save_model(tmp_path / "model", kind, **changes)
    cached = start(model, server.settings(salt=name), **options)
    cached.run(COMPARED)
    prompts = [prompt(number, tokens) for number in range(2)]
    expected = [cached.generate(each)[0] for each in prompts]
    assert [each["cached"] for each in expected] == [0, 0]
    cached.saved()
    cached.forget()
    cached.figures()
    found = [cached.generate(each)[0] for each in prompts]
    assert all(each["cached"] >= tokens // 2 for each in found), found
    assert "load_failed_blocks" not in cached.figures()
    groups = cached.run("said = len(scheduler.groups)")
    assert cached.run("said = [sorted(set(compared)), different]") == [list(range(groups)), []]
    if name not in UNEQUAL:
        assert [each["tokens"] for each in found] == [each["tokens"] for each in expected]
    cached.end()


@pytest.mark.slow
def test_latent_attention_answers_as_with_a_dict_of_the_same_blocks(
    start: Callable[..., Engine], server: Server, tmp_path: Path
) -> None:
    """Behind a prefix vLLM computes it otherwise than without one, so a run without any cache is no measure."""
    kind, changes, options, _ = MODELS["deepseek"]
    model = save_model(tmp_path / "model", kind, **changes)
    switch = ("SwitchConnector", "lmcache_bench.engine.switch")
    engine = start(model, server.settings(salt="latent"), kv_connector=switch, **options)
    engine.run("from lmcache_bench.engine import switch")
    for tokens in (prompt(1, 600), prompt(2, 900)):
        ours, of_dict = (second_answer(engine, kind, tokens) for kind in ("ours", "dict"))
        assert ours == of_dict
        assert ours["cached"] >= len(tokens) // 2
    engine.end()


@pytest.mark.slow
def test_ranks_of_latent_attention_store_one_shard_and_all_read_it(
    start: Callable[..., Engine], server: Server, tmp_path: Path
) -> None:
    kind, changes, _, tokens = MODELS["deepseek"]
    model = save_model(tmp_path / "model", kind, **changes)
    ranks = {"tensor_parallel_size": 2, "bind": "0|1", "processes": True, "disable_log_stats": False}
    engine = start(model, server.settings(salt="latent ranks"), **ranks)

    def counted(name: str) -> int:
        source = "sum(each.value for each in llm.get_metrics() if each.name == 'vllm:lmcache_core_%s')" % name  # noqa: UP031
        return int(engine.run(f"said = {source}"))

    asked = prompt(1, tokens)
    assert engine.generate(asked)[0]["cached"] == 0
    found: list[dict[str, Any]] = []

    def again() -> bool:  # the last answer to a save may be on its way
        found[:] = engine.generate(asked)
        return bool(found[0]["cached"] >= tokens // 2)

    until(again)
    cached = found[0]["cached"]
    loads = counted("load_blocks")
    assert engine.generate(asked) == found
    engine.generate(prompt(2, 10))  # figures travel with a step
    block = cached // (counted("load_blocks") - loads) * 2  # both ranks have read each
    assert cached % block == 0
    assert tokens // block <= counted("save_blocks") < 2 * (tokens // block)  # and one has stored it
    assert not counted("load_failed_blocks")
    engine.end()


def second_answer(engine: Engine, connector: str, tokens: list[int]) -> dict[str, Any]:
    """What follows a prompt that this connector has."""
    engine.run(f"switch.chosen = {connector!r}")
    assert engine.generate(tokens, count=24)[0]["cached"] == 0
    found: list[dict[str, Any]] = []

    def again() -> bool:  # the answer to a save may be on its way
        found[:] = engine.generate(tokens, count=24)
        return bool(found[0]["cached"])

    until(again)
    return found[0]


@pytest.mark.slow
def test_adapters_share_nothing(start: Callable[..., Engine], server: Server, llama: Path, tmp_path: Path) -> None:
    adapter = save_adapter(tmp_path / "adapter", 5)
    cached = start(llama, server.settings(salt="lora"), enable_lora=True, max_lora_rank=8)
    cached.run(f"from vllm.lora.request import LoRARequest\nadapter = LoRARequest('one', 1, {adapter!r})")
    tokens = prompt(1, 700)

    def asked(with_adapter: bool) -> dict[str, Any]:
        cached.forget()
        lora = "adapter" if with_adapter else "None"
        (found,) = cached.run(f"said = generate([{tokens!r}], 12, lora={lora})")
        cached.saved()
        return found  # type: ignore[no-any-return]

    with_it, without = asked(True), asked(False)
    assert [with_it["cached"], without["cached"]] == [0, 0]
    assert with_it["tokens"] != without["tokens"]
    assert asked(True) == {"tokens": with_it["tokens"], "cached": 640}
    assert asked(False) == {"tokens": without["tokens"], "cached": 640}
    cached.end()
