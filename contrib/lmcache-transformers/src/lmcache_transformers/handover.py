"""From the separate caches of the prompts to the one cache over which the answers are generated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from lmcache_core.errors import UsageError

if TYPE_CHECKING:
    import torch
    from transformers import Cache, DynamicCache, PreTrainedConfig

CACHES = (None, "dynamic", "static", "quantized")


def joined(
    config: PreTrainedConfig,
    caches: Sequence[DynamicCache],
    kind: str | None,
    options: Mapping[str, Any],
    answer_tokens: int,
) -> Cache:
    """One cache of this kind for all sequences, shorter ones padded on the left. One sequence that is to stay dynamic
    is not copied. Raises `UsageError` for a static cache without a known length."""
    dynamic = kind in (None, "dynamic")
    if dynamic and len(caches) == 1:
        return caches[0]
    longest = max(cache.get_seq_length() for cache in caches)
    cache = _empty(config, kind, options, longest, answer_tokens)
    for at, layer in enumerate(cache.layers):
        if longest and caches[0].layers[at].keys is not None:
            rooms = [each.layers[at].room for each in caches]
            layer.update(
                _batch([room.view(0)[0] for room in rooms], longest),
                _batch([room.view(0)[1] for room in rooms], longest),
            )
    return cache


def _empty(config: Any, kind: str | None, options: Mapping[str, Any], tokens: int, answer_tokens: int) -> Any:
    from transformers import DynamicCache, QuantizedCache, StaticCache

    if kind == "static":
        if not answer_tokens:
            raise UsageError("a static cache has a fixed length: give max_new_tokens")
        return StaticCache(config=config, max_cache_len=tokens + answer_tokens + 1)
    if kind == "quantized":
        given = {"backend": "quanto"} | dict(options)
        return QuantizedCache(config=config, **given)
    return DynamicCache(config=config)


def _batch(tensors: Sequence[torch.Tensor], tokens: int) -> torch.Tensor:
    """[1, heads, its tokens, size] each, as [batch, heads, tokens, size], each at the end of its row."""
    if len(tensors) == 1:
        return tensors[0]
    first = tensors[0]
    whole = first.new_zeros((len(tensors), first.shape[1], tokens, first.shape[3]))
    for row, tensor in enumerate(tensors):
        whole[row, :, tokens - tensor.shape[2] :] = tensor[0]
    return whole
