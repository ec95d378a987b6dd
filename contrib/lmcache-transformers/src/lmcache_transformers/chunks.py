"""The position of chunks in the tensors of a cache.

A chunk holds the keys and values of all layers for `chunk_tokens` tokens: for each layer its keys, then its values; in
each, for each head, the tokens in order (axes LKHTD). transformers keeps keys and values as [batch, head, token, size],
so for each head a chunk is one run of bytes on both sides, without an intermediate copy.

Keys are cached after their rotary embedding: they belong to their positions. A chunk may be reused only at its own
position, at the same distance from the start of the sequence. Chunk keys of `lmcache_core.tokens` ensure that, because
each covers everything before it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from lmcache_core import Region
from lmcache_core.buffers import check_tensor
from lmcache_core.errors import UsageError
from lmcache_core.pool.layout import DTYPE_BYTES, Layout

if TYPE_CHECKING:
    import torch
    from transformers import Cache

    from lmcache_transformers.geometry import Geometry, LayerShape


def layout_of(geometry: Geometry, chunk_tokens: int) -> Layout:
    """The layout of one chunk: axes where all layers have the same shape, else values in a row, or bytes where layers
    differ in dtype, too. `Geometry.format` says which layer has what."""
    shapes = {(each.heads, each.key_dim, each.value_dim) for each in geometry.layers}
    dtypes = {str(each.dtype).removeprefix("torch.") for each in geometry.layers}
    nbytes = chunk_tokens * geometry.token_bytes
    if len(dtypes) > 1 or not dtypes <= DTYPE_BYTES.keys():
        return Layout("uint8", (nbytes,))
    (dtype,) = dtypes
    heads, key_dim, value_dim = min(shapes)
    if len(shapes) > 1 or key_dim != value_dim:
        return Layout(dtype, (nbytes // DTYPE_BYTES[dtype],))
    return Layout(dtype, (len(geometry.layers), 2, heads, chunk_tokens, key_dim), "LKHTD")


def regions_of(
    cache: Cache, geometry: Geometry, chunk_tokens: int, chunks: int, *, reserved: bool = False
) -> list[Region]:
    """The memory of the first `chunks` chunks of a cache that holds one sequence. Page `i` of each region belongs to
    chunk `i`. Tensors on a device are copied to the host first, so these regions can be read but not written. Raises
    `UsageError`, naming the layer, if the cache does not hold all of these tokens. `reserved`: it need not hold them,
    only have room for them.
    """
    if len(cache.layers) != geometry.layers_in_cache:
        raise UsageError(
            f"the cache has {len(cache.layers)} layers and the model {geometry.layers_in_cache}: is it another model's?"
        )
    regions = []
    for shape in geometry.layers:
        keys, values = _held(cache.layers[shape.index], shape, chunks * chunk_tokens, reserved)
        for tensor in (keys, values):
            regions += _of_heads(tensor if tensor.is_cpu else tensor.cpu(), chunk_tokens, chunks)
    return regions


def _held(layer: Any, shape: LayerShape, tokens: int, reserved: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values from the first token on, once they are known to be there."""
    room = getattr(layer, "room", None)
    if room is not None:
        keys, values, held = room.keys, room.values, room.capacity if reserved else room.used
    else:
        if getattr(layer, "is_sliding", False):
            raise UsageError(
                f"layer {shape.index} of the cache is {layer!r}, which keeps its window alone: chunks of models with "
                "sliding windows are cut from caches that PrefixCache.load has made"
            )
        if hasattr(layer, "_quantized_keys") or getattr(layer, "keys", None) is None:
            raise UsageError(
                f"layer {shape.index} of the cache is {layer!r}, quantised or empty: no chunk can be cut from it"
            )
        keys, values, held = layer.keys, layer.values, int(layer.get_seq_length())
    for tensor, size in ((keys, shape.key_dim), (values, shape.value_dim)):
        if tuple(tensor.shape[:2]) != (1, shape.heads) or tensor.shape[3] != size or held < tokens:
            raise UsageError(
                f"layer {shape.index} of the cache has shape {tuple(tensor.shape)}, {held} tokens of it written, and "
                f"{tokens} tokens of {shape.heads} heads × {size} are asked of one sequence"
            )
        if tensor.dtype != shape.dtype:
            raise UsageError(f"layer {shape.index} of the cache is {tensor.dtype} and the model's {shape.dtype}")
    return keys, values


def _of_heads(tensor: torch.Tensor, chunk_tokens: int, chunks: int) -> list[Region]:
    if tensor.stride(3) != 1 or tensor.stride(2) != tensor.shape[3]:
        # For a cache that keeps heads inside of tokens. Pages are looked at when they are copied; this is a copy, too.
        tensor = check_tensor(tensor, "a tensor of the cache").tensor.contiguous()
    item = tensor.element_size()
    page_bytes = chunk_tokens * tensor.shape[3] * item
    step = tensor.stride(1) * item
    return [Region(tensor, head * step, page_bytes, page_bytes, chunks) for head in range(tensor.shape[1])]


def pages_of(region: Region) -> list[memoryview]:
    """The bytes of each page of a region of a tensor in host memory, which may be a strided view."""
    import torch

    tensor = region.buffer
    storage: Any = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage()).numpy()
    memory = memoryview(storage)
    start = tensor.storage_offset() * tensor.element_size() + region.offset
    return [memory[start + page * region.page_stride :][: region.page_bytes] for page in range(region.pages)]


class Chunk:
    """One chunk in a row, from the memory of a cache and back: for a codec, which takes whole chunks."""

    def __init__(self, pages: list[list[memoryview]], nbytes: int) -> None:
        """`pages`: of each region, by chunk."""
        self._pages = pages
        self.row = memoryview(bytearray(nbytes))

    def gather(self, at: int) -> None:
        """Copy chunk `at` of the cache into the row."""
        for parts, place in self._places(at):
            self.row[place] = parts

    def scatter(self, at: int) -> None:
        """Copy the row into chunk `at` of the cache."""
        for parts, place in self._places(at):
            parts[:] = self.row[place]

    def _places(self, at: int) -> Iterator[tuple[memoryview, slice]]:
        start = 0
        for pages in self._pages:
            yield pages[at], slice(start, start + pages[at].nbytes)
            start += pages[at].nbytes
