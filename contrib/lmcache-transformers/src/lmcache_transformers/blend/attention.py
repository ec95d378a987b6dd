"""How much a question looks at each stored token: what nobody looks at need not be computed anew."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from lmcache_core.errors import UsageError
from lmcache_transformers.blend.forward import Layers, add_kept, forward
from lmcache_transformers.room import cache_with_room, copy_rooms

if TYPE_CHECKING:
    from transformers import DynamicCache

    from lmcache_transformers.geometry import Geometry

QUESTION_TOKENS_MAX = 256  # of those behind the last chunk, the last ones


class _Watched(TorchFunctionMode):  # type: ignore[misc]  # torch is not there where types are checked
    """Sees the model's calls of attention, and changes none of them. `paid`: of each layer, the probabilities of the
    tokens that are held, `[tokens]`, summed over heads and new tokens."""

    def __init__(self, held: int) -> None:
        super().__init__()
        self.paid: list[torch.Tensor] = []
        self._held = held

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        found = function(*args, **(kwargs or {}))
        if function is functional.scaled_dot_product_attention:
            self._note(_probabilities(*args, **(kwargs or {})))
        elif function is functional.softmax and found.dim() == 4 and found.shape[-1] > self._held:
            self._note(found)
        return found

    def _note(self, probabilities: torch.Tensor) -> None:
        self.paid.append(probabilities[..., : self._held].float().sum(dim=(0, 1, 2)).cpu())


def _probabilities(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Of `scaled_dot_product_attention`, which keeps its own to itself. No new token is held, and so it makes no
    difference here which of them see each other."""
    heads = query.shape[1] // key.shape[1]
    key = key.repeat_interleave(heads, dim=1) if heads > 1 else key
    scores = query @ key.transpose(-2, -1) * (query.shape[-1] ** -0.5 if scale is None else scale)
    if attn_mask is not None:
        scores = scores.masked_fill(~attn_mask, -torch.inf) if attn_mask.dtype == torch.bool else scores + attn_mask
    return torch.softmax(scores.float(), dim=-1)


def paid_to(
    model: Any,
    geometry: Geometry,
    prefix: DynamicCache,
    places: torch.Tensor,
    layers: Layers,
    question: Sequence[int],
    first: int,
) -> torch.Tensor:
    """How much `question`, whose tokens stand from `first` on, looks at the stored tokens at `places`, `[tokens]`:
    probabilities summed over its tokens, the heads, and the layers but the first third, which look at what is near.
    `layers`: keys and values of all stored tokens. Behind the tokens of `prefix`, which is left as it is. Raises
    `UsageError` if the model's attention cannot be watched."""
    question, first = question[-QUESTION_TOKENS_MAX:], first + max(0, len(question) - QUESTION_TOKENS_MAX)
    base = prefix.get_seq_length()
    cache = cache_with_room(geometry, base + len(places) + len(question))
    copy_rooms(prefix, cache)
    add_kept(cache, layers)
    held = torch.cat([torch.arange(base), places])
    with _Watched(len(held)) as watched:
        forward(model, cache, held, torch.tensor(list(question)), torch.arange(first, first + len(question)), logits=1)
    if len(watched.paid) != len(geometry.layers):
        raise UsageError(f"{len(watched.paid)} calls of attention were seen in {len(geometry.layers)} layers")
    return torch.stack(watched.paid[len(watched.paid) // 3 :]).sum(dim=0)[base:]
