"""How much KV one token of a model takes, read from its `config.json`.

Families name the same figure differently, and hybrids keep KV in some of their layers only. What cannot be counted
exactly is counted too high, never too low, and `Counted.bound_why` says so.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from lmcache_core.errors import UsageError

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float8": 1, "int8": 1}

_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_HEADS = ("num_attention_heads", "n_head", "n_heads")
_KV_HEADS = ("num_key_value_heads", "num_kv_heads", "multi_query_group_num", "kv_n_heads")
_HIDDEN = ("hidden_size", "n_embd", "d_model")
_HEAD_SIZE = ("head_dim", "kv_channels", "attention_head_dim")
_LAYER_LISTS = ("layer_types", "layers_block_type", "attn_type_list")  # one entry for each layer
_ATTENTION_LISTS = ("attn_layer_indices", "full_attn_idxs", "full_attn_layers")  # one entry for each layer with KV
_STATE_WORDS = ("mamba", "ssm", "linear_attn", "linear_num", "recurrent", "rwkv", "lru_")  # of layers without KV
_WITHOUT_KV = frozenset({"mamba", "mamba2", "linear_attention", "recurrent", "conv", "mlp", "moe", "ssm", "0"})


class Counted(NamedTuple):
    """Bytes of one token's KV in all layers. `bound_why` is empty if they are exact."""

    token_bytes: int
    bound_why: str


def count(config: Mapping[str, Any], given: Mapping[str, int], dtype: str | None) -> Counted:
    """What a token takes: keys and values of each head, or the latent if the model keeps that.

    `given` are figures that override the configuration's. Raises UsageError if the model is not known well enough.
    """
    config = _flat(config)
    item = ITEM_BYTES[dtype or _dtype_of(config)]
    layers, bound_why = (given["layers"], "") if given.get("layers") else _layers_with_kv(config)
    latent = _number(config, "kv_lora_rank")
    if latent and layers and "kv_heads" not in given:
        return Counted(layers * (latent + _number(config, "qk_rope_head_dim")) * item, bound_why)
    heads = _number(config, *_HEADS)
    kv_heads = given.get("kv_heads") or _kv_heads(config, heads)
    head_size = given.get("head_size") or _number(config, *_HEAD_SIZE)
    if not head_size and heads:
        head_size = _number(config, *_HIDDEN) // heads
    missing = [
        option
        for option, found in (("--layers", layers), ("--kv-heads", kv_heads), ("--head-size", head_size))
        if not found
    ]
    if missing:
        raise UsageError(
            f"the size of the model's KV is not known: give {', '.join(missing)}, or --model FILE with its config.json"
        )
    return Counted(2 * layers * kv_heads * head_size * item, bound_why)


def _flat(config: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration with the figures of attention, which some families keep in a table of their own."""
    inner = [config[name] for name in ("attn_config", "linear_attn_config") if isinstance(config.get(name), Mapping)]
    return {**{name: value for table in inner for name, value in table.items()}, **config}


def _kv_heads(config: Mapping[str, Any], heads: int) -> int:
    named = [name for name in _KV_HEADS if config.get(name) is not None]
    groups = _number(config, *named) if named else heads
    if config.get("model_type") in ("falcon", "RefinedWeb", "RefinedWebModel"):  # both may be named: this one decides
        return groups if config.get("new_decoder_architecture") else 1 if config.get("multi_query", True) else heads
    return 1 if config.get("multi_query") and not named else groups


def _layers_with_kv(config: Mapping[str, Any]) -> tuple[int, str]:
    """How many layers keep KV, and why that is an upper bound; 0 if that is not known."""
    every = _number(config, *_LAYERS)
    known = _known_layers(config, every)
    if known is None and any(word in name for name, value in config.items() if value for word in _STATE_WORDS):
        return every, "layers that may keep a state instead of KV count in full: give --layers"
    windows = "sliding_window" in config and config["sliding_window"] and config.get("use_sliding_window", True)
    kinds = config.get("layer_types")
    if isinstance(kinds, list):
        windows = any(str(kind) in ("sliding_attention", "chunked_attention") for kind in kinds)
    why = "layers with a sliding window count in full, as if they kept every token" if windows else ""
    return (every if known is None else known), why


def _known_layers(config: Mapping[str, Any], every: int) -> int | None:
    """Layers with KV, where the configuration tells them from others."""
    for name in _LAYER_LISTS:
        kinds = config.get(name)
        if isinstance(kinds, list) and kinds:
            return sum(str(kind) not in _WITHOUT_KV for kind in kinds)
    for name in _ATTENTION_LISTS:
        listed = config.get(name)
        if isinstance(listed, list) and listed:
            return len(listed)
    pattern = config.get("hybrid_override_pattern")
    if isinstance(pattern, str) and pattern:
        return pattern.count("*")
    block = config.get("block_types") or config.get("_block_types")
    if isinstance(block, list) and block:  # repeated until every layer has one
        return sum(str(block[layer % len(block)]) not in _WITHOUT_KV for layer in range(every))
    interval = _number(config, "full_attention_interval")
    if interval:
        return every // interval
    period, offset = _number(config, "attn_layer_period"), config.get("attn_layer_offset", 0)
    if period and isinstance(offset, int):
        return sum(layer % period == offset for layer in range(every))
    return None


def _number(config: Mapping[str, Any], *names: str) -> int:
    """The first of these figures; 0 if it is missing or differs between layers."""
    for name in names:
        found = config.get(name)
        if found is not None:
            return found if isinstance(found, int) and found > 0 else 0
    return 0


def _dtype_of(config: Mapping[str, Any]) -> str:
    named = str(config.get("dtype") or config.get("torch_dtype") or "bfloat16").removeprefix("torch.")
    return named if named in ITEM_BYTES else "bfloat16"
