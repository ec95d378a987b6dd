"""The reverse shim for vLLM: any `SecondaryTierManager` under the kit's `HostBackendContract`."""

from __future__ import annotations

import mmap
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from vllm.v1.kv_offload.base import LookupResult, ReqContext, ScheduleEndContext, make_offload_key
from vllm.v1.kv_offload.tiering.base import JobResult, TransferJob

from lmcache_testing.host_backend import HostBackend
from lmcache_testing.waiting import until

__all__ = ["SecondaryTierBackend"]

CHUNKS = 16  # of the primary tier


class SecondaryTierBackend(HostBackend):
    """A `SecondaryTierManager`, driven as vLLM's scheduler does, on one thread at a time.

    `make(view)` gives the tier over a primary tier of `CHUNKS` chunks of `NBYTES`.
    """

    def __init__(self, make: Callable[[memoryview], Any]) -> None:
        pages = mmap.mmap(-1, CHUNKS * self.NBYTES)  # on pages, as vLLM's own region is: tiers write it past the cache
        self._memory: Any = np.frombuffer(pages, dtype=np.uint8).reshape(CHUNKS, self.NBYTES)
        view: Any = self._memory
        self._tier = make(memoryview(view))
        self._turn = threading.Lock()
        self._numbers = 0

    def store(self, objects: Mapping[bytes, bytes]) -> bool:
        with self._turn:
            for chunk, held in enumerate(objects.values()):
                self._memory[chunk] = np.frombuffer(held, dtype=np.uint8)
            return bool(self._job(list(objects), self._tier.submit_store, is_promotion=False).success)

    def exists(self, keys: Sequence[bytes]) -> list[bool]:
        with self._turn:
            context = self._request()
            names = [make_offload_key(each, 0) for each in keys]

            def answered() -> list[LookupResult] | None:
                found = [self._tier.lookup(name, context) for name in names]
                self._step()
                return None if LookupResult.RETRY in found else found

            found = until(answered, "the lookups to be answered") or []
            self._tier.on_request_finished(context)
            return [each is LookupResult.HIT for each in found]

    def load(self, keys: Sequence[bytes]) -> list[bytes | None]:
        with self._turn:
            self._memory[:] = 0
            done = self._job(keys, self._tier.submit_load, is_promotion=True)
            good = set(done.successful_keys or ())
            return [
                bytes(self._memory[chunk].tobytes()) if done.success or make_offload_key(each, 0) in good else None
                for chunk, each in enumerate(keys)
            ]

    def close(self) -> None:
        self._tier.shutdown()

    def _request(self) -> ReqContext:
        self._numbers += 1
        context = ReqContext(f"request {self._numbers}")
        self._tier.on_new_request(context)
        return context

    def _step(self) -> None:
        self._tier.on_schedule_end(ScheduleEndContext(new_req_ids=[], preempted_req_ids=[]))

    def _job(self, keys: Sequence[bytes], submit: Callable[[TransferJob], None], *, is_promotion: bool) -> JobResult:
        context = self._request()
        names = [make_offload_key(each, 0) for each in keys]
        chunks = np.arange(len(keys), dtype=np.int32)
        submit(TransferJob(self._numbers, names, chunks, is_promotion, context))

        def ended() -> JobResult | None:
            self._step()
            return next(iter(self._tier.get_finished_jobs()), None)

        done = until(ended, "the job to end")
        self._tier.on_request_finished(context)
        return done
