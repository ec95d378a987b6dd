"""Small models with random weights, of any configuration class that has a causal language model."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any

import torch
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

if TYPE_CHECKING:
    import transformers

VOCABULARY = 128
WINDOW = 24

# What configurations call the sizes of a model, and which they are here. A field that a class has not is left out.
SMALL: dict[str, object] = {
    "vocab_size": VOCABULARY,
    "vocab_size_per_layer_input": VOCABULARY,
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "dim_model", "emb_dim", "embedding_size"), 32),
    **dict.fromkeys(("intermediate_size", "n_inner", "d_ff", "ffn_dim", "dim_ff", "word_embed_proj_dim"), 32),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "num_layers", "n_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "num_heads", "n_heads", "attention_heads"), 4),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len"), 256),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk"), 2),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "expert_ffn_hidden_size"), 16),
    **dict.fromkeys(("head_dim", "global_head_dim", "dim_head", "rotary_dim", "query_pre_attn_scalar"), 8),
    **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim", "hidden_size_per_layer_input"), 8),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank"), 16),
    **dict.fromkeys(("sliding_window", "attention_chunk_size"), WINDOW),
    **dict.fromkeys(("n_group", "topk_group", "n_shared_experts", "first_k_dense_replace"), 1),
    "num_key_value_heads": 2,
    "v_head_dim": 12,
    "num_kv_shared_layers": 0,
    "max_distance": 64,
    "prompt_length": 4,
    "prompt_types": 4,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
WHERE_NONE = (
    "head_dim",
    "num_key_value_heads",
    "num_experts_per_tok",
    "moe_intermediate_size",
)  # set also where the default is None
LATENT = {"num_key_value_heads": 4, "qk_head_dim": 16}
# What else some classes need.
OWN: dict[str, dict[str, object]] = {
    **dict.fromkeys(("axk1", "deepseek_v2", "deepseek_v3", "glm4_moe_lite", "minicpm3", "youtu"), LATENT),
    "longcat_flash": LATENT | {"head_dim": 8, "ffn_hidden_size": 32, "zero_expert_num": 1},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10_000.0, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 16, "moe_num_experts": 2},
    },
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "window_size": WINDOW},
    "gemma3n_text": {
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_kv_shared_layers": 2,
        "activation_sparsity_pattern": [0.0] * 4,
        "intermediate_size": [32] * 4,
    },
    "lfm2": {"layer_types": ["full_attention"] * 2},
    "lfm2_moe": {"layer_types": ["full_attention"] * 2, "num_dense_layers": 1},
}


def tiny_config(kind: type, **changes: object) -> transformers.PretrainedConfig:
    """A configuration of this class, small, with each kind of layer that its default has."""
    made = kind()
    fields: dict[str, object] = {}
    for name, value in SMALL.items():
        if isinstance(getattr(kind, name, None), property):
            continue
        now = None
        with suppress(Exception):  # a field that differs from layer to layer does not show
            now = getattr(made, name, None)
        if now is not None or (name in WHERE_NONE and name in vars(made)):
            fields[name] = value
    if "qk_rope_head_dim" in fields:
        fields.pop("head_dim", None)
    fields |= _layers_of(made, fields) | OWN.get(made.model_type, {}) | changes
    return kind(**fields)


def _layers_of(made: Any, fields: dict[str, object]) -> dict[str, Any]:
    types = getattr(made, "layer_types", None)
    if not types:
        return {}
    kinds = list(dict.fromkeys(types))
    count = max(2, len(kinds))
    depth = [name for name in ("num_hidden_layers", "n_layer", "num_layers", "n_layers") if name in fields]
    return {"layer_types": (kinds * 2)[:count], **dict.fromkeys(depth, count)}


def tiny_model(config: transformers.PretrainedConfig, seed: int = 3) -> transformers.PreTrainedModel:
    """Its causal language model, with random weights."""
    torch.manual_seed(seed)
    model = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)](config).eval()
    model.generation_config.eos_token_id = None
    model.generation_config.use_cache = True
    return model
