"""Cache layers with room to grow: they behave like transformers' own layers, in memory that does not move.
transformers' `DynamicLayer` copies all of its KV in every step that adds to it. These append in place, so a prefix is
copied once from the pool, and a chunk once into it. Sliding layers show the model their window and keep the rest, so
that chunks can be cut from it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import DynamicCache, cache_utils
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from lmcache_core.errors import UsageError
from lmcache_transformers.geometry import Geometry, LayerShape

# transformers' class for a layer without its own KV; before 5.23 that was an ordinary layer.
EMPTY_LAYER: Any = getattr(cache_utils, "DummyLayer", None) or type("EmptyLayer", (DynamicLayer,), {})


class _Room:
    """Keys and values `[1, heads, capacity, size]` of one layer, of which the first `used` tokens are written."""

    def __init__(self, shape: LayerShape, capacity: int, device: torch.device) -> None:
        def empty(size: int) -> torch.Tensor:
            with torch.inference_mode(False):  # so that a step outside of inference mode may write to it
                return torch.empty((1, shape.heads, capacity, size), dtype=shape.dtype, device=device)

        self.shape = shape
        self.keys, self.values = empty(shape.key_dim), empty(shape.value_dim)
        self.used = 0

    @property
    def capacity(self) -> int:
        return int(self.keys.shape[2])

    def add(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        if keys.dtype != self.keys.dtype:
            raise UsageError(
                f"the model computes keys of {keys.dtype} now, and computed {self.keys.dtype} when its cache was made: "
                "make it anew, under the same autocast"
            )
        end = self.used + keys.shape[2]
        if end > self.capacity:
            self._grow(max(end, 2 * self.capacity))
        self.keys[:, :, self.used : end].copy_(keys)
        self.values[:, :, self.used : end].copy_(values)
        self.used = end

    def _grow(self, capacity: int) -> None:
        larger = _Room(self.shape, capacity, self.keys.device)
        larger.add(self.keys[:, :, : self.used], self.values[:, :, : self.used])
        self.keys, self.values = larger.keys, larger.values

    def view(self, first: int) -> tuple[torch.Tensor, torch.Tensor]:
        """From token `first` on to the end of what is written."""
        return self.keys[:, :, first : self.used], self.values[:, :, first : self.used]


class RoomLayer(DynamicLayer):  # type: ignore[misc]  # transformers is untyped where types are checked
    """A `DynamicLayer` over a room. Operations that replace its tensors (`crop`, beams, …) make it a plain one."""

    def __init__(self, room: _Room) -> None:
        super().__init__()
        self.room: _Room | None = room
        self._show()

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append them; returns all keys and values."""
        if not _stands(self, self.room, key_states):
            self.room = None
            return super().update(key_states, value_states, *args, **kwargs)  # type: ignore[no-any-return]
        assert self.room is not None
        self.room.add(key_states, value_states)
        self._show()
        return self.keys, self.values

    def _show(self) -> None:
        assert self.room is not None
        self.keys, self.values = self._shown = self.room.view(0)
        self.dtype, self.device = self.keys.dtype, self.keys.device
        self.is_initialized = True


class SlidingRoomLayer(DynamicSlidingWindowLayer):  # type: ignore[misc]  # as above
    """A `DynamicSlidingWindowLayer` over a room that keeps what has left the window."""

    def __init__(self, room: _Room) -> None:
        super().__init__(sliding_window=room.shape.window)
        self.room: _Room | None = room
        self._show()

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append them; returns those of the window before them, and themselves."""
        if self.record_past or not _stands(self, self.room, key_states):
            self.room = None
            return super().update(key_states, value_states, *args, **kwargs)  # type: ignore[no-any-return]
        assert self.room is not None
        first = max(0, self.room.used - self.sliding_window + 1)
        self.room.add(key_states, value_states)
        self._show()
        return self.room.view(first)

    def _show(self) -> None:
        assert self.room is not None
        self.cumulative_length = self.room.used
        first = max(0, self.room.used - self.sliding_window + 1)
        self.keys, self.values = self._shown = self.room.view(first)
        self.dtype, self.device = self.keys.dtype, self.keys.device
        self.is_initialized = True


def _stands(layer: Any, room: _Room | None, keys: torch.Tensor) -> bool:
    """Whether the tensors that the layer showed last are still its own."""
    return room is not None and layer.keys is layer._shown[0] and keys.shape[0] == 1


def cache_with_room(
    geometry: Geometry, capacity: int, device: str | torch.device | None = None, *, layers_in_cache: int | None = None
) -> DynamicCache:
    """An empty cache for one sequence of up to `capacity` tokens, which grows beyond them at the price of a copy.

    `device`: of all layers, in place of the model's own. `layers_in_cache`: fewer than the model's, from the first on.
    """
    cache: Any = DynamicCache()
    shapes = {each.index: each for each in geometry.layers}
    layers: list[Any] = []
    for index in range(geometry.layers_in_cache if layers_in_cache is None else layers_in_cache):
        shape = shapes.get(index)
        if shape is None:
            layers.append(EMPTY_LAYER())
            continue
        room = _Room(shape, capacity, shape.device if device is None else torch.device(device))
        layers.append(SlidingRoomLayer(room) if shape.window else RoomLayer(room))
    cache.layers = layers
    cache.layer_class_to_replicate = None
    return cache


def fill(cache: DynamicCache, tokens: int) -> None:
    """Mark the first `tokens` tokens of the rooms as written from outside."""
    for room in rooms_of(cache):
        assert room is not None
        room.used = tokens
    for layer in cache.layers:
        if isinstance(layer, RoomLayer | SlidingRoomLayer):
            layer._show()


def copy_rooms(source: DynamicCache, target: DynamicCache) -> None:
    """From one cache with rooms to an empty one, on whatever devices."""
    layers: Any = zip(source.layers, target.layers, strict=True)
    for theirs, ours in layers:
        if theirs.keys is not None:
            ours.update(*theirs.room.view(0))


def rooms_of(cache: Any) -> Sequence[_Room | None]:
    """The room of each layer that holds KV; None: it has none (any more)."""
    return [getattr(layer, "room", None) for layer in cache.layers if not isinstance(layer, EMPTY_LAYER)]
