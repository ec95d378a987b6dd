"""The shapes of one model's KV, as the model itself makes them.

Configurations say it in a dozen ways (heads, KV heads, multi-query, latent attention with keys and values of different
sizes), so nothing is read from them: the model computes one token, and we inspect its cache.
"""

from __future__ import annotations

import hashlib
import inspect
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lmcache_core.errors import UsageError

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

# The fields of a configuration that do not affect KV.
_IDLE = {"transformers_version", "_name_or_path", "architectures", "use_cache", "id2label", "label2id", "problem_type"}


@dataclass(frozen=True)
class LayerShape:
    """Keys `[batch, heads, tokens, key_dim]` and values `[batch, heads, tokens, value_dim]` of one layer.

    `window`: how many tokens a sliding layer sees; 0 where it sees all. `index`: of the layer in the cache.
    """

    index: int
    heads: int
    key_dim: int
    value_dim: int
    window: int
    dtype: torch.dtype
    device: torch.device

    @property
    def token_bytes(self) -> int:
        """Of the keys and the values of one token."""
        return self.heads * (self.key_dim + self.value_dim) * int(self.dtype.itemsize)


@dataclass(frozen=True)
class Geometry:
    """All layers that hold KV (others read that of an earlier layer), in order. `layers_in_cache`: with the others."""

    layers: tuple[LayerShape, ...]
    layers_in_cache: int
    config_digest: str

    @property
    def token_bytes(self) -> int:
        """Of one token in all layers."""
        return sum(layer.token_bytes for layer in self.layers)

    def format(self, chunk_tokens: int) -> str:
        """What the bytes of a chunk mean, for the namespace: for each layer its keys, then its values; in each, for
        each head, `chunk_tokens` tokens. And the model's configuration, because positions depend on it."""
        layers = ",".join(f"{each.index}:{each.heads}x{each.key_dim}+{each.value_dim}" for each in self.layers)
        dtypes = ",".join(sorted({str(each.dtype).removeprefix("torch.") for each in self.layers}))
        return f"transformers LKHTD {chunk_tokens} {dtypes} {layers} config {self.config_digest}"


def cache_argument(model: PreTrainedModel, cache: Any) -> dict[str, Any]:
    """`cache` as the keyword that this model takes it by, for `forward` and `generate`: transformers 5.24 renamed
    `past_key_values` to `cache`, and a model with code of its own may have either."""
    return {"cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values": cache}


def geometry_of(model: PreTrainedModel) -> Geometry:
    """Compute one token and look at the cache. Raises `UsageError` for a cache that holds anything but keys and
    values."""
    import torch
    from transformers import DynamicCache

    cache = DynamicCache(config=model.config)
    ids = torch.zeros((1, 1), dtype=torch.long, device=model.device)
    with torch.no_grad():
        model(input_ids=ids, use_cache=True, **cache_argument(model, cache))
    name = model.config.model_type
    if cache.get_seq_length() != 1:
        raise UsageError(f"the model {name!r} does not fill the cache that it is given: it cannot be served")
    layers = [shape for at, layer in enumerate(cache.layers) if (shape := _shape(name, at, layer)) is not None]
    return Geometry(tuple(layers), len(cache.layers), _digest(model))


def _shape(name: str, index: int, layer: Any) -> LayerShape | None:
    keys, values = layer.keys, layer.values
    if keys is None:  # for a layer that reads the KV of another one
        return None
    if keys.dim() != 4 or values.dim() != 4 or keys.shape[:3] != values.shape[:3] or keys.shape[0] != 1:
        raise UsageError(
            f"layer {index} of the model {name!r} caches keys of shape {tuple(keys.shape)} and values of shape "
            f"{tuple(values.shape)}: only [batch, heads, tokens, size] can be cut into chunks"
        )
    window = int(layer.sliding_window) if getattr(layer, "is_sliding", False) else 0
    return LayerShape(index, keys.shape[1], keys.shape[3], values.shape[3], window, keys.dtype, keys.device)


def config_of(model: PreTrainedModel) -> dict[str, Any]:
    """What the configuration says that KV may depend on: rope scaling, window sizes and the like change it under the
    same name."""
    relevant = {name: value for name, value in model.config.to_dict().items() if name not in _IDLE}
    plain: dict[str, Any] = json.loads(json.dumps(relevant, sort_keys=True, default=str))
    return plain


def _digest(model: PreTrainedModel) -> str:
    return hashlib.sha256(json.dumps(config_of(model), sort_keys=True).encode()).hexdigest()[:16]
