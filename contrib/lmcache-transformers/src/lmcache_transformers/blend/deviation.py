"""Which tokens of moved chunks to recompute: those whose keys and values in the second layer differ most from the
stored ones, and that the question looks at. (CacheBlend's finding: tokens that deviate in an early layer deviate in the
later ones.)

The second layer's keys and values need the first layer alone, over the true prompt. So they are computed by the model's
own forward call, which ends where the second layer hands them to the cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from transformers.cache_utils import DynamicLayer

from lmcache_transformers.blend.attention import paid_to
from lmcache_transformers.blend.conditions import FIRST_TOKENS
from lmcache_transformers.blend.forward import Layers, compute
from lmcache_transformers.room import cache_with_room, rooms_of

if TYPE_CHECKING:
    from transformers import DynamicCache

    from lmcache_transformers.geometry import Geometry


class Looked(NamedTuple):
    """What is known of stored tokens before anything is blended. `deviation`: of each, in the second layer; `weight`:
    how much it matters that it deviates; `starts`: where moved chunks begin among them."""

    deviation: torch.Tensor
    weight: torch.Tensor
    starts: Sequence[int]

    def choose(self, share: float) -> tuple[torch.Tensor, float]:
        """Which tokens to recompute, and how far the others deviate, on average."""
        again = chosen(self.weight, self.starts, share, FIRST_TOKENS)
        return again, 0.0 if bool(again.all()) else float(self.deviation[~again].mean())


def look(
    model: Any,
    geometry: Geometry,
    prefix: DynamicCache,
    tokens: Sequence[int],
    places: torch.Tensor,
    layers: Layers,
    starts: Sequence[int],
) -> Looked:
    """Look at the stored tokens of a prompt of `tokens`, at the positions `places`, of which `layers` are the keys and
    values, moved there. What stands behind the last one of them is the question."""
    base, end = prefix.get_seq_length(), int(places[-1]) + 1
    keys, values = second_layer(model, geometry, prefix, tokens[base:end])
    rows = places - base
    deviation = deviations(keys[:, rows].cpu(), values[:, rows].cpu(), *layers[1])
    paid = paid_to(model, geometry, prefix, places, layers, tokens[end:], end)
    return Looked(deviation, deviation * paid.sqrt(), starts)


class _SecondLayer(Exception):  # how the call ends, and no error
    def __init__(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        super().__init__()
        self.keys, self.values = keys, values


class _Ends(DynamicLayer):  # type: ignore[misc]  # transformers is untyped where types are checked
    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        raise _SecondLayer(key_states, value_states)


def second_layer(
    model: Any, geometry: Geometry, prefix: DynamicCache, tokens: Sequence[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values `[heads, tokens, size]` of the second layer, of `tokens` behind those that `prefix` holds, which
    is left as it is."""
    first = rooms_of(prefix)[0]
    assert first is not None
    start = first.used
    cache: Any = cache_with_room(geometry, start + len(tokens), layers_in_cache=1)
    if start:
        cache.layers[0].update(*first.view(0))
    cache.layers.append(_Ends())
    try:
        compute(model, cache, tokens)
    except _SecondLayer as found:
        return found.keys[0], found.values[0]
    raise AssertionError("the model has no second layer, and was not refused")


def deviations(
    keys: torch.Tensor, values: torch.Tensor, stored_keys: torch.Tensor, stored_values: torch.Tensor
) -> torch.Tensor:
    """How far the stored ones are from the computed ones, for each token: the root of the mean square of the two
    relative differences. All `[heads, tokens, size]`."""
    return ((_relative(keys, stored_keys) + _relative(values, stored_values)) / 2).sqrt()


def _relative(computed: torch.Tensor, stored: torch.Tensor) -> torch.Tensor:
    """The squares of the differences, of each token, by the mean square of the computed ones."""
    computed, stored = computed.float(), stored.float()
    difference = (computed - stored).square().sum(dim=(0, 2))
    return difference / computed.square().sum(dim=(0, 2)).mean()


def chosen(weight: torch.Tensor, starts: Sequence[int], share: float, first_tokens: int) -> torch.Tensor:
    """Which tokens to recompute, `[tokens]` of bool, `share` of all: the first `first_tokens` of each chunk (fewer
    where the share does not reach for all chunks), and then those of the most weight. `starts`: where chunks begin."""
    count = round(share * len(weight))
    marked = torch.zeros(len(weight), dtype=torch.bool)
    floor = min(first_tokens, count // max(1, len(starts)))
    for start, end in pairwise((*starts, len(weight))):
        marked[start : min(start + floor, end)] = True
    more = count - int(marked.sum())
    if more > 0:
        marked[weight.masked_fill(marked, -1.0).topk(more).indices] = True
    return marked
