"""How much a question looks at each stored token: what nobody looks at need not be computed anew."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from lmcache_core.errors import UsageError
from lmcache_transformers.blend.forward import Layers, add_kept, forward, pieces
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
            heads = _probabilities(*args, **(kwargs or {}))
            self.paid.append(sum((self._of_held(each) for each in heads), torch.zeros(self._held)))
        elif function is functional.softmax and found.dim() == 4 and found.shape[-1] > self._held:
            self.paid.append(self._of_held(found))
        return found

    def _of_held(self, probabilities: torch.Tensor) -> torch.Tensor:
        return probabilities[..., : self._held].float().flatten(end_dim=-2).sum(dim=0).cpu()


def _probabilities(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Iterator[torch.Tensor]:
    """Of `scaled_dot_product_attention`, which keeps its own to itself: one head after the other, because all of them
    take gigabytes. No new token is held, and so it makes no difference here which of them see each other."""
    heads = query.shape[1]
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    if attn_mask is not None:
        attn_mask = attn_mask.broadcast_to(query.shape[0], heads, query.shape[2], key.shape[2])
    for head in range(heads):
        scores = query[:, head] @ key[:, head * key.shape[1] // heads].transpose(-2, -1) * scale
        if attn_mask is not None:
            mask = attn_mask[:, head]
            scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
        yield torch.softmax(scores.float(), dim=-1)


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
    layers_seen, calls = len(geometry.layers), len(pieces(len(held), len(question)))
    if len(watched.paid) != layers_seen * calls:
        raise UsageError(f"{len(watched.paid)} calls of attention were seen in {layers_seen * calls} layers")
    paid = torch.stack(watched.paid).reshape(calls, layers_seen, len(held)).sum(dim=0)
    return paid[layers_seen // 3 :].sum(dim=0)[base:]
