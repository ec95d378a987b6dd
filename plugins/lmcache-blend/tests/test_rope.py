"""Keys that were moved are those that the model would have computed there, for each form that transformers knows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmcache_blend import Rope, _native
from lmcache_blend.rope import HALVES, NEIGHBOURS
from lmcache_core.errors import UsageError

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

STEP = {"float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}
SPLIT = {"nemotron", "phi", "stablelm"}  # they split heads before they call
HEAD = {"hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 1}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 256,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
FORMS: dict[str, tuple[str, dict[str, Any]]] = {
    "default": ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0}}),
    "theta": ("qwen2", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}),
    "linear": ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10_000.0}}),
    "llama3": ("llama", {"rope_parameters": {**LLAMA3, "rope_theta": 500_000.0}}),
    "yarn": ("llama", {"rope_parameters": {**YARN, "rope_theta": 10_000.0}}),
    "yarn, not truncated": ("llama", {"rope_parameters": {**YARN, "truncate": False, "rope_theta": 150_000.0}}),
    "yarn, mscale": (
        "llama",
        {"rope_parameters": {**YARN, "mscale": 0.7, "mscale_all_dim": 1.0, "rope_theta": 10_000.0}},
    ),
    "yarn, factor": ("llama", {"rope_parameters": {**YARN, "attention_factor": 0.8, "rope_theta": 10_000.0}}),
    "partial": (
        "gpt_neox",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.25}},
    ),
    "partial, phi": (
        "phi",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.5}},
    ),
    "neighbours": ("cohere", {"rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0}}),
    "neighbours, partial": (
        "glm",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.5}},
    ),
}


def config_of(form: str) -> Any:
    kind, fields = FORMS[form]
    return transformers.AutoConfig.for_model(kind, **HEAD, **fields)


def computed(config: Any, keys: Any, positions: Any) -> Any:
    """[tokens, heads, size], by the model's own module and function."""
    module = __import__(f"transformers.models.{config.model_type}.modeling_{config.model_type}", fromlist=["x"])
    (name,) = [each for each in vars(module) if each.endswith("RotaryEmbedding")]
    heads = keys.transpose(0, 1)[None]
    cosines, sines = getattr(module, name)(config)(heads, positions[None])
    turning = cosines.shape[-1]
    if turning < keys.shape[-1] and config.model_type in SPLIT:
        rotated = module.apply_rotary_pos_emb(heads[..., :turning], heads[..., :turning], cosines, sines)[1]
        return torch.cat((rotated, heads[..., turning:]), -1)[0].transpose(0, 1).contiguous()
    return module.apply_rotary_pos_emb(heads, heads, cosines, sines)[1][0].transpose(0, 1).contiguous()


@pytest.mark.parametrize("dtype", STEP)
@pytest.mark.parametrize("form", FORMS)
def test_moved_keys_are_those_computed_at_the_new_place(form: str, dtype: str) -> None:
    config = config_of(form)
    rope = Rope.from_config(config)
    keys = torch.randn(40, 2, 64, generator=torch.Generator().manual_seed(1)).to(getattr(torch, dtype))
    for old, new in ((1, 700), (900, 4), (0, 0), (5, 6)):
        here, there = (computed(config, keys, torch.arange(start, start + 40)) for start in (old, new))
        here = here.contiguous()
        rope.rotate(here, old, new)
        # A few roundings of the type: the model's cosines, its products, and ours, at the largest of a pair.
        tolerance = 4 * STEP[dtype] * float(there.abs().max())
        assert float((here.float() - there.float()).abs().max()) <= tolerance


@pytest.mark.parametrize("kind", sorted(HALVES | NEIGHBOURS))
def test_every_type_of_model_that_is_known_rotates_as_its_own_code_does(kind: str) -> None:
    config = transformers.AutoConfig.for_model(kind, **HEAD, head_dim=64)
    keys = torch.randn(9, 2, 64, generator=torch.Generator().manual_seed(1))
    here, there = (computed(config, keys, torch.arange(start, start + 9)) for start in (3, 300))
    Rope.from_config(config).rotate(here, 3, 300)
    assert float((here - there).abs().max()) < 1e-4


@pytest.mark.parametrize("form", FORMS)
def test_frequencies_and_scaling_are_the_model_s_own(form: str) -> None:
    config = config_of(form)
    module = __import__(f"transformers.models.{config.model_type}.modeling_{config.model_type}", fromlist=["x"])
    (name,) = [each for each in vars(module) if each.endswith("RotaryEmbedding")]
    theirs, ours = getattr(module, name)(config), Rope.from_config(config)
    assert np.allclose(theirs.inv_freq.numpy(), np.array(ours.inv_freq, np.float32), rtol=3e-7, atol=0)
    assert ours.attention_scaling == pytest.approx(theirs.attention_scaling)
    assert Rope.from_config(config.to_dict()) == ours


def test_gemma_s_proportional_form_has_all_pairs_of_a_head() -> None:
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = transformers.LlamaConfig(**HEAD)
    config.rope_parameters = {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25}
    theirs, _ = ROPE_INIT_FUNCTIONS["proportional"](config)
    ours = Rope.from_config(config)
    assert ours.dimensions == 64
    assert np.allclose(theirs.numpy(), np.array(ours.inv_freq, np.float32), rtol=3e-7)


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}, "rope_theta": 1e4}, "length of the prompt"),
        ({"rope_scaling": {"type": "longrope"}, "rope_theta": 1e4}, "another for long ones"),
        ({"rope_scaling": {"rope_type": "new"}, "rope_theta": 1e4}, "are not known"),
        ({"rope_scaling": {"type": "default", "mrope_section": [1, 2]}, "rope_theta": 1e4}, "time, height"),
        ({"hidden_size": 64, "num_attention_heads": 4}, "no rope_theta"),
        ({"rope_parameters": {"full_attention": {}, "sliding_attention": {}}}, "full_attention, sliding_attention"),
        ({"rope_theta": 1e4, "head_dim": 7}, "even number"),
        ({"rope_theta": float("nan"), "head_dim": 8}, "not finite"),
        ({"rope_theta": 1e4, "rope_scaling": {"type": "linear"}}, "has no factor"),
        ({"rope_theta": 1e4, "model_type": "nanochat"}, "'nanochat' rotate their keys is not known"),
        ({"rope_theta": 1e4, "model_type": "deepseek_v3", "kv_lora_rank": 8}, "latents"),
        ({"rope_theta": 1e4, "model_type": "smollm3", "no_rope_layers": [1, 0]}, "some layers"),
    ],
)
def test_what_cannot_be_moved_is_refused_in_words(config: dict, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        Rope.from_config({"model_type": "llama", "hidden_size": 64, "num_attention_heads": 4, **config})


def test_layers_of_a_kind_have_their_own_rotation() -> None:
    kinds = {
        "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    config = {"model_type": "llama", "head_dim": 16, "rope_parameters": kinds}
    assert Rope.from_config(config, layer_type="full_attention").theta == 1e6
    assert Rope.from_config(config, layer_type="sliding_attention").theta == 1e4


# --- the kernels -----------------------------------------------------------------------------------------


def values_of(kind: str, shape: tuple[int, ...], seed: int) -> np.ndarray:
    """Any bits: NaN, infinities and denormals too."""
    bits = np.random.default_rng(seed).integers(0, 1 << 32, shape, dtype=np.uint64)
    if kind == "float32":
        return bits.astype(np.uint32).view(np.float32)
    return bits.astype(np.uint16) if kind == "bfloat16" else bits.astype(np.uint16).view(np.float16)


def without_nans(array: np.ndarray, kind: str) -> bytes:
    """The bytes, all NaNs alike: which of two goes on through a sum is the processor's choice."""
    if kind == "bfloat16":
        return np.where((array & 0x7FFF) > 0x7F80, 0x7FC0, array).tobytes()
    return np.where(np.isnan(array), np.array(np.nan, array.dtype), array).tobytes()


@given(
    kind=st.sampled_from(sorted(STEP)),
    interleaved=st.booleans(),
    pairs=st.integers(1, 20),
    rest=st.integers(0, 9),
    tokens=st.integers(0, 70),
    axis=st.integers(0, 1),
    seed=st.integers(0, 1000),
)
def test_all_kernels_give_the_same_bytes_in_place_and_apart(
    kind: str, interleaved: bool, pairs: int, rest: int, tokens: int, axis: int, seed: int
) -> None:
    rope = Rope(100.0, 2 * pairs, interleaved, tuple(np.linspace(0.01, 1, pairs).tolist()))
    shape = (tokens, 3) if axis == 0 else (3, tokens)
    before = values_of(kind, (*shape, 2 * pairs + rest), seed)
    new = np.random.default_rng(seed).integers(0, 5000, tokens)
    results = []
    for isa in _native.isas():
        apart, same = np.zeros_like(before), before.copy()
        rope.rotate_into(before, apart, 7, new, token_axis=axis, dtype=kind, isa=isa)
        rope.rotate(same, 7, new, token_axis=axis, dtype=kind, isa=isa)
        results += [without_nans(apart, kind), without_nans(same, kind)]
    assert len(set(results)) == 1
    assert apart[..., 2 * pairs :].tobytes() == before[..., 2 * pairs :].tobytes()


@given(seed=st.integers(0, 1000), old=st.integers(0, 100_000), new=st.integers(0, 100_000), interleaved=st.booleans())
def test_a_rotation_is_that_of_the_angles_between(seed: int, old: int, new: int, interleaved: bool) -> None:
    rope = Rope(100.0, 8, interleaved, (1.0, 0.5, 0.0625, 0.0))
    keys = np.random.default_rng(seed).standard_normal((1, 1, 10)).astype(np.float32)
    angles = np.array([np.float32(new) * f - np.float32(old) * f for f in np.array(rope.inv_freq, np.float32)], float)
    pairs = [(2 * p, 2 * p + 1) if interleaved else (p, p + 4) for p in range(4)]
    right = keys.astype(float).copy()
    for angle, (one, other) in zip(angles, pairs, strict=True):
        x, y = keys[0, 0, one], keys[0, 0, other]
        right[0, 0, one], right[0, 0, other] = (
            x * np.cos(angle) - y * np.sin(angle),
            y * np.cos(angle) + x * np.sin(angle),
        )
    rope.rotate(keys, [old], [new])
    assert np.allclose(keys, right, atol=1e-6)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda keys: (keys.astype(np.float64), {}), "dtype"),
        (lambda keys: (keys[..., ::2], {}), "in a row"),
        (lambda keys: (keys[..., :4], {}), "8 values of a head"),
        (lambda keys: (keys, {"token_axis": 2}), "token_axis"),
        (lambda keys: (keys, {"token_axis": -1}), "token_axis"),
        (lambda keys: (keys, {"token_axis": 7}), "token_axis"),
        (lambda keys: (keys, {"isa": "altivec"}), "no kernels named"),
        (lambda keys: (keys, {"old_positions": [1]}), "1 positions for 6"),
        (lambda keys: (keys, {"old_positions": 1 << 24}), "use 0 to"),
        (lambda keys: (keys, {"old_positions": -1}), "use 0 to"),
        (lambda keys: (keys, {"old_positions": 0.5}), "whole numbers"),
        (lambda keys: (keys.tolist(), {}), "give a numpy array"),
    ],
)
def test_what_cannot_be_rotated_is_refused(change: Any, says: str) -> None:
    rope = Rope(100.0, 8, False, (1.0, 0.5, 0.0625, 0.0))
    keys, asked = change(np.ones((6, 2, 8), np.float32))
    with pytest.raises(UsageError, match=says):
        rope.rotate(keys, **{"old_positions": 0, "new_positions": 1, **asked})


def test_arrays_that_overlap_and_read_only_targets_are_refused() -> None:
    rope = Rope(100.0, 8, False, (1.0, 0.5, 0.0625, 0.0))
    memory = np.ones((9, 8), np.float32)
    with pytest.raises(UsageError, match="overlap"):
        rope.rotate_into(memory[:8], memory[1:], 0, 1)
    with pytest.raises(UsageError, match="overlap"):
        rope.rotate_into(memory[:8], memory[7::-1], 0, 1)
    fixed = np.ones((8, 8), np.float32)
    fixed.flags.writeable = False
    with pytest.raises(UsageError, match="read-only"):
        rope.rotate(fixed, 0, 1)
    with pytest.raises(UsageError, match="target"):
        rope.rotate_into(memory, np.ones((8, 8), np.float32), 0, 1)


def test_the_float_mode_of_the_thread_stays_and_does_not_count() -> None:
    rope = Rope(100.0, 8, False, (1.0, 0.5, 0.0625, 0.0))
    tiny = np.full((2, 8), 1e-40, np.float32)
    other = tiny.copy()
    rope.rotate(tiny, 0, 3)
    assert torch.set_flush_denormal(True)
    try:
        rope.rotate(other, 0, 3)
    finally:
        torch.set_flush_denormal(False)
    assert other.tobytes() == tiny.tobytes()
