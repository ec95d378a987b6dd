"""vLLM's own offloading, where its worker refuses the CPU: its connector, its scheduler's side and its manager as they
are, and plain copies between two pieces of memory in place of its copies between a GPU and the host."""

from __future__ import annotations

import time
from typing import Any

import torch
from vllm.v1.kv_offload.base import GPULoadStoreSpec, LoadStoreSpec, OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec


class MemorySpec(CPUOffloadingSpec):  # type: ignore[misc]  # vLLM is not there where types are checked
    """Blocks in tensors of the engine's process, `cpu_bytes_to_use` of them. One KV group and one process only."""

    def get_worker(self, kv_caches: Any) -> OffloadingWorker:
        """What copies, instead of vLLM's, which needs a GPU."""
        if self.blocks_per_chunk != 1 or len(kv_caches.group_data_refs) != 1:
            raise ValueError("this worker copies single blocks of one KV group")
        return MemoryWorker([(each.tensor, each.page_size_bytes) for each in kv_caches.tensors], self.num_chunks)


class MemoryWorker(OffloadingWorker):  # type: ignore[misc]  # as above
    """Each copy ends before its call does."""

    def __init__(self, tensors: list[tuple[torch.Tensor, int]], chunks: int) -> None:
        """`tensors`: the engine's, with a row for each block, and the bytes of a row that count."""
        self._engine = [tensor.view(torch.int8)[:, :nbytes] for tensor, nbytes in tensors]
        self._kept = [torch.zeros((chunks, nbytes), dtype=torch.int8) for _, nbytes in tensors]
        self._row_bytes = sum(nbytes for _, nbytes in tensors)
        self._ended: list[TransferResult] = []

    def submit_store(self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: LoadStoreSpec) -> bool:
        """From the engine."""
        return self._copy(job_id, self._engine, src_spec, self._kept, dst_spec)

    def submit_load(self, job_id: int, src_spec: LoadStoreSpec, dst_spec: GPULoadStoreSpec) -> bool:
        """Into the engine."""
        return self._copy(job_id, self._kept, src_spec, self._engine, dst_spec)

    def _copy(self, job_id: int, sources: list[torch.Tensor], src: Any, targets: list[torch.Tensor], dst: Any) -> bool:
        assert isinstance(src, CPULoadStoreSpec) or isinstance(dst, CPULoadStoreSpec)
        began_s = time.perf_counter()
        rows = list(zip(src.block_ids.tolist(), dst.block_ids.tolist(), strict=True))
        for source, target in zip(sources, targets, strict=True):
            for here, there in rows:
                target[there].copy_(source[here])
        took_s = time.perf_counter() - began_s
        self._ended.append(TransferResult(job_id, True, len(rows) * self._row_bytes, took_s))
        return True

    def get_finished(self) -> list[TransferResult]:
        """All since the last call."""
        ended, self._ended = self._ended, []
        return ended

    def wait(self, job_ids: set[int]) -> None:
        """They have ended."""
