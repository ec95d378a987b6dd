"""A cache object of transformers as chunks, and back.

A chunk holds the keys and values of all layers for `chunk_tokens` tokens, as one tensor of the axes LKHTD: layer,
key or value, head, token, head dimension. transformers keeps a layer's keys as [batch, head, token, head dim],
so in this order a chunk is made of runs of token × head dim elements that lie together on both sides, and a whole
chunk goes back into a cache in one copy.

Keys are cached after their rotary embedding: they belong to their positions. A chunk may be used again only where
it stood, at the same distance from the start of the sequence. Chunk keys of `lmcache_core.tokens` see to that,
because each covers everything before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from lmcache_core.errors import UsageError
from lmcache_core.limits import CHUNK_TOKENS
from lmcache_core.pool.layout import Layout

if TYPE_CHECKING:
    import torch
    from transformers import DynamicCache, PreTrainedConfig

MEMORY_FORMAT = "LKHTD"


def layout_for(
    config: PreTrainedConfig, chunk_tokens: int = CHUNK_TOKENS, dtype: str | torch.dtype = "bfloat16"
) -> Layout:
    """The layout of one chunk of this model's KV.

    `config`: the model's configuration; `dtype`: that of the cache, usually `model.dtype`. Raises `UsageError`
    for a model whose cache is not the keys and values of every token in every layer (sliding windows, linear
    attention): a prefix of it cannot be cut into chunks.
    """
    from transformers import DynamicCache
    from transformers.cache_utils import DynamicLayer

    text = config.get_text_config(decoder=True)
    kinds = {type(layer) for layer in DynamicCache(config=config).layers}
    if kinds - {DynamicLayer}:
        names = ", ".join(sorted(kind.__name__ for kind in kinds - {DynamicLayer}))
        raise UsageError(
            f"the model {text.model_type!r} caches in {names}: only full attention, every token in every layer, "
            "can be cut into chunks"
        )
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    shape = (text.num_hidden_layers, 2, heads, chunk_tokens, head_dim)
    return Layout(str(dtype).removeprefix("torch."), shape, MEMORY_FORMAT)


def gather_chunks(cache: DynamicCache, positions: Sequence[int], into: Sequence[torch.Tensor]) -> None:
    """Copy chunks out of a cache: chunk `positions[i]` of the sequence into the tensor `into[i]`.

    The tensors have the shape of `layout_for`; slots of the pool are such tensors, so this is the only copy on
    the way there. Raises `UsageError`, naming the layer, where the cache does not hold what the tensors ask for.
    """
    if len(positions) != len(into):
        raise UsageError(f"{len(positions)} chunks to gather into {len(into)} tensors: give one for each")
    if not into:
        return
    chunk_tokens = into[0].shape[3]
    tokens = (max(positions) + 1) * chunk_tokens
    for index, (keys, values) in enumerate(_layers(cache, tokens, into[0])):
        for position, tensor in zip(positions, into, strict=True):
            start = position * chunk_tokens
            tensor[index, 0].copy_(keys[0, :, start : start + chunk_tokens])
            tensor[index, 1].copy_(values[0, :, start : start + chunk_tokens])


def read_chunks(cache: DynamicCache, first: int, count: int, layout: Layout) -> list[torch.Tensor]:
    """`count` chunks of a cache, from chunk `first` on, as new tensors on the CPU."""
    import torch

    chunks = [torch.empty(layout.shape, dtype=getattr(torch, layout.dtype)) for _ in range(count)]
    gather_chunks(cache, range(first, first + count), chunks)
    return chunks


def write_chunks(chunks: Sequence[torch.Tensor], device: str | torch.device = "cpu") -> DynamicCache:
    """A cache on `device` that holds these chunks, in order, from the start of the sequence on.

    The chunks are copied and not needed afterwards. No chunks: an empty cache. A model called with the cache and
    with the tokens after the chunks gives them the positions that follow.
    """
    import torch
    from transformers import DynamicCache

    cache = DynamicCache()
    if not chunks:
        return cache
    layers, _, heads, chunk_tokens, head_dim = chunks[0].shape
    shape = (layers, 2, 1, heads, chunk_tokens * len(chunks), head_dim)
    # One block for all layers: each chunk is then one copy, not two for each layer.
    whole = torch.empty(shape, dtype=chunks[0].dtype, device=device)
    for position, chunk in enumerate(chunks):
        start = position * chunk_tokens
        whole[:, :, 0, :, start : start + chunk_tokens].copy_(chunk)
    for keys, values in whole:
        cache.layers.append(_layer(keys, values))
    return cache


def _layer(keys: torch.Tensor, values: torch.Tensor) -> Any:
    """A cache layer around existing tensors; its own `update` would copy them once more."""
    from transformers.cache_utils import DynamicLayer

    kind: Any = DynamicLayer  # untyped in some versions
    layer = kind()
    layer.keys, layer.values = keys, values
    layer.dtype, layer.device = keys.dtype, keys.device
    layer.is_initialized = True
    return layer


def _layers(cache: DynamicCache, tokens: int, chunk: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Keys and values of each layer, once they are known to hold `tokens` tokens shaped as in `chunk`."""
    from transformers.cache_utils import DynamicLayer

    layers, _, heads, _, head_dim = chunk.shape
    if len(cache.layers) != layers:
        raise UsageError(f"the cache has {len(cache.layers)} layers and the layout {layers}: is it another model's?")
    found = []
    for index, layer in enumerate(cache.layers):
        if type(layer) is not DynamicLayer or layer.keys is None or layer.values is None:
            raise UsageError(f"layer {index} of the cache is {layer!r}, or empty: only full attention can be cut")
        for tensor in (layer.keys, layer.values):
            batch, *rest = tensor.shape
            if batch != 1 or rest[0] != heads or rest[1] < tokens or rest[2] != head_dim:
                raise UsageError(
                    f"layer {index} of the cache has shape {tuple(tensor.shape)}, and {tokens} tokens of "
                    f"{heads} heads × {head_dim} are asked of one sequence"
                )
            if tensor.dtype != chunk.dtype:
                raise UsageError(f"layer {index} of the cache is {tensor.dtype} and the layout {chunk.dtype}")
        found.append((layer.keys, layer.values))
    return found
