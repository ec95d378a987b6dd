"""One stock forward call over a cache whose tokens stand in any order, or a few where the prompt is long.

Keys carry their position, so attention does not ask in which order a cache holds them: only which tokens a new one may
see. The call gets the new tokens with their true positions, and a mask by position.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from lmcache_transformers.geometry import Geometry, cache_argument
from lmcache_transformers.room import cache_with_room, copy_rooms, fill, rooms_of

if TYPE_CHECKING:
    from transformers import DynamicCache

PAIRS_MAX = 1 << 25  # of a new token and one that it might see, in one call: a mask has 2 or 4 bytes for each
Layers = Sequence[tuple[torch.Tensor, torch.Tensor]]  # keys and values of each layer, [heads, tokens, size]


def compute(model: Any, cache: DynamicCache, tokens: Sequence[int], *, logits: int = 1) -> torch.Tensor:
    """Compute tokens behind those that a cache holds, in order. Returns the last rows of logits."""
    start = cache.get_seq_length()
    output = _call(model, cache, torch.tensor(list(tokens)), torch.arange(start, start + len(tokens)), None, logits)
    rows: torch.Tensor = output.logits[0]
    return rows


def compute_chunk(model: Any, geometry: Geometry, head: DynamicCache, tokens: Sequence[int]) -> Layers:
    """The KV of a chunk behind the tokens of `head`, which is left as it is, in host memory."""
    base = head.get_seq_length()
    cache = cache_with_room(geometry, base + len(tokens))
    copy_rooms(head, cache)
    compute(model, cache, tokens)
    rooms = [room for room in rooms_of(cache) if room is not None]
    return [(room.keys[0, :, base : room.used].cpu(), room.values[0, :, base : room.used].cpu()) for room in rooms]


def blend_into(
    model: Any, cache: DynamicCache, tokens: Sequence[int], kept: torch.Tensor, layers: Layers, *, logits: int = 1
) -> torch.Tensor:
    """Fill a cache that holds the beginning of a prompt with all of its `tokens`: `layers` are those at the positions
    `kept`, their keys already rotated there, and all others are computed. Returns the last rows of logits, of which
    there are none if nothing is computed."""
    held = torch.cat([torch.arange(cache.get_seq_length()), kept])
    places = torch.arange(len(tokens))
    new = places[~torch.isin(places, held)]
    add_kept(cache, layers)
    if not len(new):
        return torch.empty(0)
    return forward(model, cache, held, torch.tensor(list(tokens))[new], new, logits=logits)


def add_kept(cache: DynamicCache, layers: Layers) -> None:
    """Append KV of tokens to a cache with rooms, the keys already rotated to their positions."""
    held = cache.get_seq_length()
    for room, (keys, values) in zip(rooms_of(cache), layers, strict=True):
        assert room is not None
        room.add(keys[None], values[None])
    fill(cache, held + layers[0][0].shape[1])


def forward(
    model: Any, cache: DynamicCache, held: torch.Tensor, tokens: torch.Tensor, positions: torch.Tensor, *, logits: int
) -> torch.Tensor:
    """Compute new tokens, of ids `tokens` at `positions`, which ascend, over a cache whose tokens stand at `held`, and
    append them to it. Returns the last `logits` rows of logits `[logits, vocabulary]`. One call, unless its mask were
    larger than `PAIRS_MAX`: then one piece of the new tokens after another."""
    rows = []
    for first, end in pieces(len(held), len(tokens)):
        new, wanted = positions[first:end], logits - (len(tokens) - end)
        mask = mask_by_position(torch.cat([held, positions[:first]]), new, model.dtype)
        kept = min(max(wanted, 1), end - first)
        found = _call(model, cache, tokens[first:end], new, mask, kept).logits[0]
        if wanted > 0:
            rows.append(found)
    return torch.cat(rows)


def pieces(held: int, new: int) -> list[tuple[int, int]]:
    """First new token and end of each call over `held` tokens."""
    step = max(1, PAIRS_MAX // (held + new))
    return [(first, min(first + step, new)) for first in range(0, new, step)]


def mask_by_position(held: torch.Tensor, new: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """To be added to the scores, `[1, 1, new, held + new]`: 0 where a new token may look, else the least number."""
    everything = torch.cat([held, new])
    hidden = everything[None, :] > new[:, None]
    return torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, torch.finfo(dtype).min)[None, None]


def _call(
    model: Any,
    cache: Any,
    tokens: torch.Tensor,
    positions: torch.Tensor,
    mask: torch.Tensor | None,
    logits: int,
) -> Any:
    device, named = model.device, cache_argument(model, cache)
    if mask is not None:
        named["attention_mask"] = mask.to(device)
    with torch.no_grad():
        return model(
            input_ids=tokens[None].to(device),
            position_ids=positions[None].to(device),
            use_cache=True,
            logits_to_keep=logits,
            **named,
        )
