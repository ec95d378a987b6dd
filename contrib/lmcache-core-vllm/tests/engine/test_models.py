"""Models with windows, states, several KV groups or latent attention, ranks and adapters: answers equal those without
the cache. Each engine starts and ends in its own test."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from vllm_engines import Engine, Server, prompt, save_adapter, save_model

from lmcache_testing.embedded import Json
from lmcache_testing.waiting import until

ROPE = {"rope_type": "default", "rope_theta": 10_000.0}
# vLLM 0.32 computes latent attention on the CPU without prefixes of its own: behind one its answers are others, also
# where the blocks come from a dict.
UNEQUAL = {"deepseek"}
QUICK = {"gemma3", "granite"}
HAS_AMX = "amx_tile" in Path("/proc/cpuinfo").read_text()
SLIDES = {"sliding_window": 256, "rope_parameters": ROPE}
# Name: the model, what is not as in `save_model`, options of the engine, and tokens of a prompt.
MODELS: dict[str, tuple[str, Json, Json, int]] = {
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

# Zero what a hit has loaded for one group, before anything is computed over it.
ZEROED = """
def zeroing(loading):
    invalid = ending(loading)
    for blocks in loading.load.blocks:
        for layer in worker.memory[blocks.group] if blocks.group == {group} else ():
            for region in layer.regions:
                region.buffer[blocks.block_ids] = 0
                zeroed.append(len(blocks.block_ids))
    return invalid
zeroed, worker.note_end = [], zeroing
"""
# The log-probability of each generated token: some of these models repeat one token whatever they have read.
SCORED = """
scoring = SamplingParams(temperature=0, max_tokens=12, detokenize=False, ignore_eos=True, logprobs=0)
(output,) = llm.generate([{{'prompt_token_ids': {tokens!r}}}], scoring, use_tqdm=False)
(made,) = output.outputs
said = [output.num_cached_tokens, [each[token].logprob for token, each in zip(made.token_ids, made.logprobs)]]
"""


def skip_latent_in_float32() -> None:
    """vLLM's latent attention for AMX packs weights of 16 bits alone."""
    if HAS_AMX:
        pytest.skip("vLLM 0.32 cannot load latent attention in float32 on a processor with AMX")


def scores(engine: Engine, prompts: list[list[int]]) -> list[tuple[int, list[float]]]:
    """How many tokens of each prompt were cached, and how sure the engine was of each token that followed."""
    engine.forget()
    return [tuple(engine.run(SCORED.format(tokens=each))) for each in prompts]


def distance(one: list[tuple[int, list[float]]], other: list[tuple[int, list[float]]]) -> float:
    """The largest difference between two scores of the same prompts."""
    assert [cached for cached, _ in one] == [cached for cached, _ in other]
    pairs = ((left, right) for (_, left), (_, right) in zip(one, other, strict=True))
    return max(abs(a - b) for left, right in pairs for a, b in zip(left, right, strict=True))


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in sorted(MODELS)]
)
def test_every_group_reads_what_it_stored(
    name: str, start: Callable[..., Engine], server: Server, tmp_path: Path
) -> None:
    if name == "deepseek":
        skip_latent_in_float32()
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
    hits = scores(cached, prompts)
    noise = distance(hits, scores(cached, prompts))
    for group in range(groups):  # else none of this would prove that what was loaded for it is what answers
        cached.run(ZEROED.format(group=group))
        apart = distance(hits, scores(cached, prompts))
        print(f"group {group}: {apart:.2g} with zeros, and {noise:.2g} without")
        assert sum(cached.run("said = zeroed")) > 0
        assert apart > max(1e-3, 10 * noise)
    cached.end()


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_latent_attention_answers_as_with_a_dict_of_the_same_blocks(
    start: Callable[..., Engine], server: Server, tmp_path: Path, dtype: str
) -> None:
    """Behind a prefix vLLM computes it otherwise than without one, so a run without any cache is no measure."""
    if dtype == "float32":
        skip_latent_in_float32()
    kind, changes, options, _ = MODELS["deepseek"]
    model = save_model(tmp_path / "model", kind, **changes)
    switch = ("SwitchConnector", "lmcache_bench.engine.switch")
    engine = start(model, server.settings(salt=f"latent {dtype}"), kv_connector=switch, dtype=dtype, **options)
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
    skip_latent_in_float32()
    kind, changes, _, tokens = MODELS["deepseek"]
    model = save_model(tmp_path / "model", kind, **changes)
    ranks = {"tensor_parallel_size": 2, "bind": "0|1", "processes": True, "disable_log_stats": False}
    engine = start(model, server.settings(salt="latent ranks"), **ranks)

    def counted(name: str) -> int:
        source = "sum(each.value for each in llm.get_metrics() if each.name == 'vllm:lmcache_core_%s')" % name  # noqa: UP031
        return int(engine.run(f"said = {source}"))

    asked = prompt(1, tokens)
    assert engine.generate(asked)[0]["cached"] == 0
    found: list[Json] = []

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


def second_answer(engine: Engine, connector: str, tokens: list[int]) -> Json:
    """What follows a prompt that this connector has, and the engine itself has not: on some processors vLLM keeps its
    own prefix cache for latent attention."""
    engine.run(f"switch.chosen = {connector!r}")
    engine.forget()
    assert engine.generate(tokens, count=24)[0]["cached"] == 0
    found: list[Json] = []

    def again() -> bool:  # the answer to a save may be on its way
        engine.forget()
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

    def asked(with_adapter: bool) -> Json:
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
