"""Which models blend: those whose keys can be moved, which take a mask by position, and whose attention can be watched.
All is tried on the model itself, with a few tokens, so that a kind of model, of rotation or of attention that nobody
thought of is refused.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import torch

from lmcache_core.errors import UsageError
from lmcache_transformers.blend.attention import paid_to
from lmcache_transformers.blend.forward import blend_into, compute
from lmcache_transformers.geometry import cache_argument
from lmcache_transformers.room import cache_with_room, rooms_of
from lmcache_transformers.support import tokens_max

if TYPE_CHECKING:
    from lmcache_blend import Rope
    from lmcache_transformers.geometry import Geometry

_FAR = 1009  # a position at which slow pairs have turned, too
_STEPS = 6  # of the dtype, by which equal computations may differ: the root of the mean square, of the values' own
_TOKENS, _KEPT = 12, (6, 0, 3, 2)  # of the trial: out of order, and with gaps
_LATENT = ("kv_lora_rank", "qk_rope_head_dim")


def rope_of(model: Any, geometry: Geometry) -> Rope:
    """How this model's keys are moved. Raises `UsageError`, with the reason, for a model that cannot blend."""
    from lmcache_blend import Rope

    why = _refusal(model, geometry)
    if not why:
        try:
            rope = Rope.from_config(model.config)
        except UsageError as error:
            raise UsageError(_cannot(model, str(error))) from error
        why = _moved(model, geometry, rope) or _masked(model, geometry)
    if why:
        raise UsageError(_cannot(model, why))
    return rope


def _cannot(model: Any, why: str) -> str:
    return f'the {type(model).__name__} cannot blend: {why}; use reuse="prefix"'


def _refusal(model: Any, geometry: Geometry) -> str:
    windows = sorted({each.window for each in geometry.layers if each.window})
    if windows:
        return f"it has sliding windows (of {windows[0]} tokens), and a chunk's tokens leave them by their place"
    if any(getattr(model.config, name, None) for name in _LATENT) or any(
        each.key_dim != each.value_dim for each in geometry.layers
    ):
        return "it has latent attention (MLA), whose keys are not moved here"
    if len(geometry.layers) != geometry.layers_in_cache:
        return "some of its layers read the KV of others"
    if len(geometry.layers) < 2:
        return "it has one layer, and which tokens deviate is measured in the second"
    if len({each.dtype for each in geometry.layers}) > 1:
        return "its layers differ in dtype"
    if tokens_max(model.config) is not None:
        return "its rotary embeddings depend on the length of the prompt"
    taken = inspect.signature(model.forward).parameters
    if not {"position_ids", "logits_to_keep"} <= taken.keys():
        return "its forward call takes no position_ids or no logits_to_keep"
    return ""


def _moved(model: Any, geometry: Geometry, rope: Rope) -> str:
    """A token that sees itself alone has the same values everywhere, and keys that differ by their rotation alone, in
    every layer."""
    limit = getattr(model.config, "max_position_embeddings", None) or _FAR + 1
    far = min(_FAR, limit - 1)
    for token in _some(model, 2):
        near, there = (_alone(model, geometry, token, at) for at in (0, far))
        for layer, (old, new) in enumerate(zip(near, there, strict=True)):
            assert old is not None
            assert new is not None
            keys = old.keys[0, :, :1].cpu().clone()
            rope.rotate(keys, 0, far, token_axis=1)
            if _apart(keys, new.keys[0, :, :1].cpu()):
                return f"the keys of layer {layer} at position {far} are not those of position 0, rotated"
            if _apart(old.values[0, :, :1], new.values[0, :, :1]):
                return f"the values of layer {layer} depend on their position"
    return ""


def _alone(model: Any, geometry: Geometry, token: int, position: int) -> Any:
    cache = cache_with_room(geometry, 1)
    device = model.device
    with torch.no_grad():
        model(
            input_ids=torch.tensor([[token]], device=device),
            position_ids=torch.tensor([[position]], device=device),
            use_cache=True,
            **cache_argument(model, cache),
        )
    return rooms_of(cache)


def _masked(model: Any, geometry: Geometry) -> str:
    """Tokens computed over a cache out of order are those computed in order."""
    tokens = _some(model, _TOKENS)
    places = torch.arange(_TOKENS)
    whole = cache_with_room(geometry, _TOKENS)
    compute(model, whole, tokens)
    kept = torch.tensor(_KEPT)
    new = places[~torch.isin(places, kept)]
    cache = cache_with_room(geometry, _TOKENS)
    rooms = [room for room in rooms_of(whole) if room is not None]
    blend_into(model, cache, tokens, kept, [(each.keys[0][:, kept], each.values[0][:, kept]) for each in rooms])
    for room, found in zip(rooms, rooms_of(cache), strict=True):
        assert found is not None
        for wanted, got in ((room.keys, found.keys), (room.values, found.values)):
            if _apart(got[0, :, len(kept) :], wanted[0][:, new.to(wanted.device)]):
                attention = getattr(model.config, "_attn_implementation", None)
                return f"its attention ({attention}) does not follow a mask by position"
    empty, first = cache_with_room(geometry, 0), _TOKENS - 1
    layers = [(each.keys[0][:, :first], each.values[0][:, :first]) for each in rooms]
    try:
        paid_to(model, geometry, empty, places[:first], layers, tokens[first:], first)
    except UsageError as error:
        return str(error)
    return ""


def _some(model: Any, count: int) -> list[int]:
    vocabulary = int(model.config.vocab_size)
    return [(7 * at * at + 5 * at + 3) % vocabulary for at in range(count)]


def _apart(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    found, size, step = found.float(), wanted.float().square().mean(), torch.finfo(wanted.dtype).eps
    error = (found - wanted.float()).square().mean()
    return not float(error) <= (_STEPS * max(step, 1e-6)) ** 2 * max(float(size), 1e-12)
