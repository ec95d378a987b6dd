"""Which models are served: those whose KV at a position depends only on the tokens up to it, and which were proven
exact. Other models are refused, with the reason, before anything is stored. Anything not known to be safe is refused,
because a wrong hit shows only as a wrong answer.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

from lmcache_core.errors import UsageError
from lmcache_transformers.proven import PROVEN
from lmcache_transformers.weights import check_mode

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

# Rotary embeddings that depend only on the position. For the others we know from how many tokens on they do not.
_FIXED_ROPE = {"default", "linear", "yarn", "llama3", "proportional"}
_LENGTH_ROPE = {"dynamic": "max_position_embeddings", "longrope": "original_max_position_embeddings"}
_PARTS_OF_TEXT = {"attn_config", "ffn_config"}  # configurations of a part of the text model itself
_DECODERS_ANYWAY = {"gpt_neox", "gpt_neox_japanese"}  # they have the field, but do not use it
_DISTANCES = {"bloom", "mpt"}  # ALiBi
_LAYERS = {"DynamicLayer", "DynamicSlidingWindowLayer", "DummyLayer"}


def refusal(config: PreTrainedConfig, *, unproven_ok: bool = False) -> str:
    """Why models of this configuration are not served; empty if they are."""
    text = config.get_text_config(decoder=True)
    name = f"the model type {config.model_type!r}"
    if getattr(config, "is_encoder_decoder", False):
        return (
            f"{name} has an encoder and a decoder: the decoder's KV depends on the encoder's input, which no key covers"
        )
    if text is not config or set(type(config).sub_configs) - _PARTS_OF_TEXT:
        return (
            f"{name} is composed of several models: images and sounds would not be in the keys, which cover tokens "
            "alone; load its text model by itself"
        )
    if not _has_causal_model(config):
        return f"{name} has no causal language model in transformers: there is nothing to generate with"
    if getattr(config, "is_decoder", None) is False and config.model_type not in _DECODERS_ANYWAY:
        return f"{name} is configured as an encoder (is_decoder=False), whose KV depends on the tokens that follow"
    if getattr(config, "use_bidirectional_attention", None) not in (None, False, "vision"):
        return f"{name} is configured with bidirectional attention, so its KV depends on the tokens that follow"
    return _cache_refusal(config, name) or _rope_refusal(text, name) or _unproven(config, name, unproven_ok)


def check_model(model: PreTrainedModel, *, unproven_ok: bool = False) -> None:
    """Raises `UsageError` that says why this model is not served, and what to do."""
    why = refusal(model.config, unproven_ok=unproven_ok)
    if not why and not model.can_generate():
        why = f"{type(model).__name__} cannot generate: load the model's class for causal language models"
    if not why and not unproven_ok and type(model).__module__.partition(".")[0] != "transformers":
        why = f"{type(model).__name__} is not part of transformers: what was proven was transformers' own class"
    if why:
        raise UsageError(why)
    check_mode(model)


def tokens_max(config: PreTrainedConfig) -> int | None:
    """Up to how many tokens positions are independent of the length of the whole prompt; None: without a limit.

    Longer prompts take other rotary frequencies for all of their positions (`dynamic` and `longrope` scaling): nothing
    of them can be shared with shorter ones, or, with `dynamic`, with each other.
    """
    text = config.get_text_config(decoder=True)
    limits = []
    for rope in _ropes(text):
        field = _LENGTH_ROPE.get(_rope_type(rope))
        if field is not None:
            # One less: at exactly this length `dynamic` keeps the frequencies of a longer prompt before it.
            limits.append(int(rope.get(field) or getattr(text, field, 0) or text.max_position_embeddings) - 1)
    return min(limits, default=None)


def counts_positions_by_cache(model: PreTrainedModel) -> bool:
    """Whether the model derives positions from what its cache holds, padding included: it takes no position ids, and
    its attention depends on more than distances."""
    taken = inspect.signature(model.forward).parameters
    return "position_ids" not in taken and model.config.model_type not in _DISTANCES


def _has_causal_model(config: PreTrainedConfig) -> bool:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    return type(config) in MODEL_FOR_CAUSAL_LM_MAPPING


def _cache_refusal(config: PreTrainedConfig, name: str) -> str:
    from transformers import DynamicCache

    try:
        kinds = {type(layer).__name__ for layer in DynamicCache(config=config).layers}
    except Exception as error:  # noqa: BLE001  # whatever transformers raises for a configuration that its caches do not know
        return f"{name} has no cache of transformers' own kinds ({type(error).__name__}: {error})"
    if kinds - _LAYERS:
        return (
            f"{name} caches in {', '.join(sorted(kinds - _LAYERS))}: such layers keep a state, or more than keys and "
            "values, and no prefix can be cut from them"
        )
    return ""


def _rope_refusal(text: PreTrainedConfig, name: str) -> str:
    for rope in _ropes(text):
        kind = _rope_type(rope)
        if kind not in _FIXED_ROPE and kind not in _LENGTH_ROPE:
            return f"{name} has rotary embeddings of type {kind!r}: it is not known what its positions depend on"
    return ""


def _ropes(text: Any) -> list[dict[str, Any]]:
    """The parameters of its rotary embeddings: one set, or one for each type of layer."""
    found = getattr(text, "rope_parameters", None) or {}
    nested = [each for each in found.values() if isinstance(each, dict)]
    return nested or ([found] if found else [])


def _rope_type(rope: dict[str, Any]) -> str:
    return str(rope.get("rope_type") or rope.get("type") or "default")


def _unproven(config: PreTrainedConfig, name: str, unproven_ok: bool) -> str:
    if unproven_ok or config.model_type in PROVEN:
        return ""
    return (
        f"{name} has not been proven: nobody has shown that its answers with a cached prefix equal those without; "
        "compare them yourself, and pass unproven_ok=True"
    )
