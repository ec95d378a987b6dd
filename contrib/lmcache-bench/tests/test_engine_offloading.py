"""The copies that stand in for those between a GPU and the host, over vLLM's own objects."""

from __future__ import annotations

import warnings
from importlib.util import find_spec

import pytest

if find_spec("vllm") is None:
    pytest.skip("vLLM is not installed here: run these with `nox -s vllm`", allow_module_level=True)
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # what vLLM warns of while it is imported is not ours
    import torch
    from vllm.v1.kv_offload.base import GPULoadStoreSpec
    from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec

    from lmcache_bench.engine.offloading import MemoryWorker

BLOCKS, ROW = 12, 64


def blocks(*numbers: int) -> GPULoadStoreSpec:
    return GPULoadStoreSpec(list(numbers), [len(numbers)], [0])


def test_blocks_come_back_into_other_places() -> None:
    memory = [torch.randint(-128, 128, (BLOCKS, ROW + 32), dtype=torch.int8) for _ in range(2)]
    worker = MemoryWorker([(each, ROW) for each in memory], chunks=5)
    before = [each.clone() for each in memory]
    worker.submit_store(1, blocks(4, 1, 7), CPULoadStoreSpec([2, 0, 4]))
    for each in memory:
        each[[4, 1, 7]] = 0
    worker.submit_load(2, CPULoadStoreSpec([4, 2]), blocks(3, 5))
    for now, then in zip(memory, before, strict=True):
        assert torch.equal(now[[3, 5], :ROW], then[[7, 4], :ROW])
        assert torch.equal(now[[3, 5], ROW:], then[[3, 5], ROW:])  # padding
        assert torch.equal(now[[0, 2, 9]], then[[0, 2, 9]])
    ended = worker.get_finished()
    assert [(each.job_id, each.success, each.transfer_size) for each in ended] == [
        (1, True, 3 * 2 * ROW),
        (2, True, 2 * 2 * ROW),
    ]
    assert worker.get_finished() == []
