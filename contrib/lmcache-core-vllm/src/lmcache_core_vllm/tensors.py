"""vLLM's KV tensors as regions of pages. Where in a page a value lies is the backend's own affair."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from lmcache_core import Region
from lmcache_core.errors import UsageError

FLOATS = {"bfloat16", "float16", "float32"}


class LayerRegions(NamedTuple):
    """One layer's regions. Each has one page for each block."""

    layer: str
    regions: list[Region]


def layer_regions(
    names: Sequence[str], tensors: Mapping[str, Any], blocks: int, *, unproven_ok: bool = False
) -> list[LayerRegions]:
    """The regions of a group's layers in order. A tensor that several layers share is listed once. `unproven_ok`: they
    may lie on a GPU.

    Raises `UsageError` for memory of other devices, and for tensors that are not made of whole blocks.
    """
    found: list[LayerRegions] = []
    seen: set[int] = set()
    for name in names:
        tensor = tensors.get(name)
        if tensor is None:
            continue
        if not hasattr(tensor, "untyped_storage"):
            raise UsageError(f"the KV cache of layer {name!r} is a {type(tensor).__name__}, and no tensor")
        if not tensor.is_cpu and not tensor.is_cuda:
            raise UsageError(
                f"the KV cache of layer {name!r} is on {tensor.device}: lmcache-core-vllm copies KV in host memory, as "
                "vLLM's CPU backend has it, and of NVIDIA's GPUs"
            )
        if tensor.is_cuda and not unproven_ok:
            raise UsageError(
                f"the KV cache of layer {name!r} is on {tensor.device}: this connector has been tested with KV in host "
                'memory alone; to use it all the same, set "unproven_ok": true in kv_connector_extra_config, and '
                "compare answers with those without it"
            )
        if tensor.data_ptr() not in seen:
            seen.add(tensor.data_ptr())
            found.append(LayerRegions(name, list(_regions(name, tensor, blocks))))
    return found


def dtype_of(layers: Sequence[LayerRegions]) -> str:
    """The dtype of the values in a block, wherever in it each of them lies: serdes may round them. `uint8` for blocks
    of several dtypes, of states, and of KV that the engine has quantised itself: those are opaque bytes."""
    found = {str(region.buffer.dtype).removeprefix("torch.") for layer in layers for region in layer.regions}
    return found.pop() if len(found) == 1 and found <= FLOATS else "uint8"


def _regions(name: str, tensor: Any, blocks: int) -> Iterator[Region]:
    """A region for each contiguous part of a block: the whole block, or each head of it."""
    if tensor.dim() < 2 or tensor.shape[0] % blocks:
        raise UsageError(
            f"the KV cache of layer {name!r} has the shape {tuple(tensor.shape)}: its first dimension must be a "
            f"multiple of the engine's {blocks} blocks"
        )
    item, parts = tensor.element_size(), tensor.shape[0] // blocks
    stride = tensor.stride(0) * item * parts
    inner = [(parts, tensor.stride(0) * item)] + [
        (size, step * item) for size, step in zip(tensor.shape[1:], tensor.stride()[1:], strict=True)
    ]
    dense = item
    outer: list[tuple[int, int]] = []
    for size, step in sorted((each for each in inner if each[0] > 1), key=lambda each: each[1]):
        if step == dense and not outer:
            dense *= size
        else:
            outer.append((size, step))
    offsets = [0]
    for size, step in reversed(outer):
        offsets = [offset + at * step for offset in offsets for at in range(size)]
    for offset in offsets:
        yield Region(tensor, offset, dense, stride, blocks, "cuda" if tensor.is_cuda else "cpu")
