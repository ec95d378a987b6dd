"""Whatever the order of its axes, a layer's pages hold exactly the bytes of its blocks."""

from __future__ import annotations

from itertools import permutations
from typing import Any

import pytest

from lmcache_core.errors import UsageError
from lmcache_core_vllm.tensors import layer_regions

torch = pytest.importorskip("torch")
BLOCKS, HEADS, TOKENS, CONTENT = 5, 2, 4, 8


def page_bytes(regions: list[Any], block: int) -> bytes:
    """What lies at a page's address."""
    found = b""
    for region in regions:
        raw = torch.empty(0, dtype=torch.uint8).set_(region.buffer.untyped_storage())
        at = region.buffer.storage_offset() * region.buffer.element_size() + region.offset + block * region.page_stride
        found += raw[at : at + region.page_bytes].numpy().tobytes()
    return found


@pytest.mark.parametrize("order", list(permutations(range(4))))
@pytest.mark.parametrize("padding", [0, 3])
def test_pages_are_the_blocks(order: tuple[int, ...], padding: int) -> None:
    """A tensor whose axes lie in memory in that order, in front of others at a stride of its own."""
    shape = [BLOCKS, HEADS, TOKENS, CONTENT]
    memory = torch.arange(2 * (BLOCKS + padding) * HEADS * TOKENS * CONTENT * 2, dtype=torch.int32)
    dense = memory[7 : 7 + BLOCKS * HEADS * TOKENS * CONTENT].view([shape[axis] for axis in order])
    tensor = dense.permute([order.index(axis) for axis in range(4)])
    (layer,) = layer_regions(["a"], {"a": tensor}, BLOCKS)
    for block in range(BLOCKS):
        assert sorted(page_bytes(layer.regions, block)) == sorted(tensor[block].contiguous().numpy().tobytes())


def test_states_lie_at_a_stride_that_is_not_their_size() -> None:
    memory = torch.zeros(4 * 1000, dtype=torch.int8)
    tensor = memory.as_strided((4, 1, 1, 700), (1000, 700, 700, 1))
    (layer,) = layer_regions(["a"], {"a": tensor}, 4)
    (region,) = layer.regions
    assert (region.page_bytes, region.page_stride, region.pages) == (700, 1000, 4)


def test_a_block_of_several_kernel_blocks_is_one_page() -> None:
    tensor = torch.zeros((3 * 4, 2, 16, 8), dtype=torch.float16)
    (layer,) = layer_regions(["a"], {"a": tensor}, 3)
    (region,) = layer.regions
    assert (region.page_bytes, region.page_stride, region.pages) == (4 * 2 * 16 * 8 * 2, 4 * 2 * 16 * 8 * 2, 3)


def test_layers_that_share_a_tensor_have_it_once() -> None:
    tensor = torch.zeros((3, 2, 16, 8))
    assert [each.layer for each in layer_regions(["a", "b"], {"a": tensor, "b": tensor}, 3)] == ["a"]


def test_a_device_is_refused_in_words() -> None:
    with pytest.raises(UsageError, match="is on meta: lmcache-core-vllm copies KV in host memory"):
        layer_regions(["a"], {"a": torch.zeros((3, 2, 16, 8), device="meta")}, 3)


class OnGpu:
    """A tensor's face, with memory that no machine without a GPU has."""

    is_cpu, is_cuda, device = False, True, "cuda:0"

    def __init__(self, tensor: Any) -> None:
        self._tensor = tensor

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tensor, name)


def test_a_gpu_s_memory_is_refused_unless_what_is_not_proven_will_do() -> None:
    tensors = {"a": OnGpu(torch.zeros((3, 2, 16, 8)))}
    with pytest.raises(UsageError, match="is on cuda:0: this connector has been tested with KV in host memory alone"):
        layer_regions(["a"], tensors, 3)
    (layer,) = layer_regions(["a"], tensors, 3, unproven_ok=True)
    assert [region.device for region in layer.regions] == ["cuda"]


def test_a_tensor_that_is_not_made_of_whole_blocks_is_refused() -> None:
    with pytest.raises(UsageError, match=r"has the shape \(7, 2\): its first dimension must be a multiple of"):
        layer_regions(["a"], {"a": torch.zeros((7, 2))}, 3)
