"""vLLM's own tiering manager, with our tier behind its primary one. Importing this needs vLLM."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
from vllm.v1.kv_offload.base import LookupResult, ReqContext, ScheduleEndContext, make_offload_key
from vllm.v1.kv_offload.config import (
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory
from vllm.v1.kv_offload.tiering.manager import CPUPrimaryTierOffloadingManager, TieringOffloadingManager

from lmcache_testing.waiting import until

CHUNK_BYTES = 131072


def spec(model: str = "model", dtype: str = "bfloat16") -> Any:
    parallel = OffloadingParallelConfig(0, 1, 1, 1, 1, 1, 0, 1, None, True)
    config = OffloadingConfig(
        groups=(OffloadingGroupConfig(16, ("layer.0", "layer.1"), 0),),
        worker_kv_bytes_per_block=CHUNK_BYTES,
        enable_kv_cache_events=False,
        extra_config={},
        engine_id="engine",
        model=OffloadingModelConfig(model, dtype),
        cache=OffloadingCacheConfig(16, 1),
        parallel=parallel,
    )
    return SimpleNamespace(config=config, blocks_per_chunk=1, kv_events_config=SimpleNamespace())


def block_hash(number: int) -> bytes:
    return hashlib.sha256(number.to_bytes(8, "little")).digest()


def key(number: int) -> Any:
    return make_offload_key(block_hash(number), 0)


def content(number: int) -> bytes:
    return hashlib.shake_128(number.to_bytes(8, "little")).digest(CHUNK_BYTES)


def hosted(**params: Any) -> dict[str, Any]:
    return {"type": "HostedTier", "module_path": "lmcache_hosts.vllm_tier", **params}


class Offloading:
    """The scheduler's side of vLLM's tiered offloading, over memory of its own."""

    def __init__(self, tier: Mapping[str, Any], of: Any = None, chunks: int = 16) -> None:
        self.region = SharedOffloadRegion(f"t{os.getpid()}_{id(self)}", chunks, None, CHUNK_BYTES, CHUNK_BYTES)
        self.primary = CPUPrimaryTierOffloadingManager(chunks, self.region)
        self.view = self.primary.get_kv_memoryview()
        self.tier = SecondaryTierFactory.create_secondary_tier(dict(tier), self.view, of or spec())
        self.manager = TieringOffloadingManager(self.primary, [self.tier])
        self._requests = 0

    def request(self) -> ReqContext:
        self._requests += 1
        context = ReqContext(f"request {self._requests}")
        self.manager.on_new_request(context)
        return context

    def step(self, *new: str) -> None:
        self.manager.on_schedule_end(ScheduleEndContext(new_req_ids=list(new), preempted_req_ids=[]))

    def write(self, numbers: Sequence[int]) -> None:
        """As if the GPU had stored these chunks: into the primary tier, which passes them on."""
        context = self.request()
        keys = [key(number) for number in numbers]
        prepared = self.manager.prepare_store(keys, context)
        assert prepared is not None
        flat = np.frombuffer(self.view, dtype=np.uint8).reshape(-1, CHUNK_BYTES)
        number_of = {key(number): number for number in numbers}
        for each, chunk in zip(prepared.keys_to_store, prepared.store_spec.chunk_ids, strict=True):
            flat[int(chunk)] = np.frombuffer(content(number_of[each]), dtype=np.uint8)
        del flat
        self.manager.complete_store(prepared.keys_to_store, context)
        self.manager.on_request_finished(context)

    def settle(self) -> None:
        """Steps until no job is out."""

        def settled() -> bool:
            self.step()
            return not self.manager.has_pending_work()

        until(settled, "the jobs of the tier to end")

    def store(self, numbers: Sequence[int]) -> None:
        """As `write`, until the tier has answered; then out of the primary tier."""
        self.write(numbers)
        self.settle()
        self.forget()

    def forget(self) -> None:
        with getattr(self.manager, "lock", nullcontext()):  # since 0.33
            self.manager.reset_cache()
            getattr(self.manager, "on_reset_flushed", lambda: None)()  # no worker is here that still writes

    def read(self, numbers: Sequence[int]) -> dict[int, bytes]:
        """What a request gets of these chunks, as a scheduler asks for it."""
        context = self.request()
        found: dict[int, bytes] = {}
        for number in numbers:

            def resolved(number: int = number) -> LookupResult | None:
                answer = self.manager.lookup(key(number), context)
                self.step()
                return answer if answer in (LookupResult.HIT, LookupResult.MISS) else None

            if until(resolved, "an answer for a chunk") is LookupResult.HIT:
                loaded = self.manager.prepare_load([key(number)], context)
                found[number] = bytes(self.view.cast("B")[int(loaded.chunk_ids[0]) * CHUNK_BYTES :][:CHUNK_BYTES])
                self.manager.complete_load([key(number)], context)
        self.manager.on_request_finished(context)
        return found

    def close(self) -> None:
        self.manager.shutdown()


@contextmanager
def vllm_over(tier: Mapping[str, Any], of: Any = None) -> Iterator[Offloading]:
    offloading = Offloading(tier, of)
    try:
        yield offloading
    finally:
        offloading.close()
