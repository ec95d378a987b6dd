"""The class that vLLM loads: one object in the scheduler's process, and one in each worker."""

from __future__ import annotations

import logging
import sys
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import vllm
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)
from vllm.distributed.parallel_state import get_pp_group, get_tp_group
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from lmcache_core import Client
from lmcache_core.errors import CacheError
from lmcache_core_vllm import facts
from lmcache_core_vllm.config import ConnectorConfig
from lmcache_core_vllm.groups import Group
from lmcache_core_vllm.namespaces import GroupFacts, RankFacts
from lmcache_core_vllm.scheduler import SchedulerSide
from lmcache_core_vllm.shards import Part, parts_of
from lmcache_core_vllm.stats import ConnectorMetrics, ConnectorStats
from lmcache_core_vllm.steps import Step
from lmcache_core_vllm.tensors import dtype_of, layer_regions
from lmcache_core_vllm.weights import Weights, weights_of
from lmcache_core_vllm.worker import WorkerSide

if TYPE_CHECKING:
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats

log = logging.getLogger("vllm.lmcache_core")


@dataclass
class StepMetadata(KVConnectorMetadata):  # type: ignore[misc]  # vLLM is not there where types are checked
    """A step, as vLLM sends it from the scheduler to the workers."""

    step: Step


@dataclass
class RankHandshake(KVConnectorHandshakeMetadata):  # type: ignore[misc]  # as above
    """A worker's facts, as vLLM sends them to the scheduler: of each shard that it holds."""

    shards: list[RankFacts]


def log_as_vllm() -> None:
    """The client's lines go where vLLM's go, with their time and process; not if the application has a handler."""
    client = logging.getLogger("lmcache_core")
    if not client.hasHandlers():
        client.parent = logging.getLogger("vllm")


class LMCacheCoreConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]  # as above
    """KV of prompt prefixes, shared by all engines of the node through an lmcache-core server.

    A server that is missing, hangs or exits costs hits, never an answer: the engine then computes.
    """

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        log_as_vllm()
        self._settings = ConnectorConfig.parse(self._kv_transfer_config.kv_connector_extra_config)
        facts.check_version(vllm.__version__, unproven_ok=self._settings.unproven_ok)
        facts.check_supported(vllm_config)
        self._groups = facts.groups_of(vllm_config, kv_cache_config)
        if self._settings.kv_shards:
            facts.check_shards_of(self._settings.kv_shards, vllm_config, kv_cache_config, self._groups)
        self.scheduler: SchedulerSide | None = None
        self.worker: WorkerSide | None = None
        self._kv_cache_manager: Any = None  # vLLM binds its scheduler's; a connector around this one may not pass it on
        self._invalid: set[int] = set()
        self._handled: BaseException | None = None  # called by the engine when a step begins
        if role is KVConnectorRole.SCHEDULER:
            self.scheduler = SchedulerSide(
                self._settings,
                self._groups,
                self._connect("scheduler"),
                lambda: facts.hashing_of(vllm_config),
                loads=self._kv_transfer_config.is_kv_consumer,
                saves=self._kv_transfer_config.is_kv_producer,
                waits=loads_wait(self._settings, self._groups, vllm_config.parallel_config.world_size),
                engine_id=self._kv_transfer_config.engine_id or "",
                chunks=facts.chunk_offers(self._settings.chunks, vllm_config, kv_cache_config),
            )

    def _connect(self, part: str) -> Client:
        """A client; returns at once, with or without a server. None of its calls may block a step for long."""
        settings = self._settings
        return Client.connect(
            settings.server,
            runtime_dir=settings.runtime_dir,
            address=settings.address,
            client_name=f"vllm-{part}",
            copy_threads=settings.copy_threads,
            call_timeout_s=settings.lookup_timeout_s,
            connect_timeout_s=settings.lookup_timeout_s,
            verify=settings.verify,
        )

    @property
    def requires_kv_delivery(self) -> bool:
        """A dropped save is only a miss later."""
        return False

    # --- the scheduler's side -----------------------------------------------------------------------------------

    def set_xfer_handshake_metadata_pp_aware(self, metadata: dict[tuple[int, int], RankHandshake]) -> None:
        """The workers have registered their memory: when the engine starts, and each time that it has woken."""
        assert self.scheduler is not None
        woken = bool(self.scheduler.namespaces)
        self.scheduler.know_ranks(shard for each in metadata.values() for shard in each.shards)
        if woken and self._trains:
            self.scheduler.weights_changed(self._weights())

    def on_new_request(self, request: Any) -> None:
        """The request waits for its turn from now on, and tiers may load meanwhile what vLLM's own cache does not
        have."""
        assert self.scheduler is not None
        manager = self._kv_cache_manager
        self.scheduler.queued(request, 0 if manager is None else manager.get_computed_blocks(request)[1])

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Tokens that can be loaded, and whether between steps; None: the server has not answered yet."""
        assert self.scheduler is not None
        return self.scheduler.match(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """The engine has made room for them."""
        assert self.scheduler is not None
        self.scheduler.allocated(request, blocks.get_block_ids(), num_external_tokens)

    def get_external_cache_hit_sources(self, request: Any, num_external_tokens: int) -> dict[CacheHitSource, int]:
        """From the pool, or from its tiers: tiers count as disks, whatever their medium."""
        assert self.scheduler is not None
        from_tiers = self.scheduler.from_tiers(request, num_external_tokens)
        counts = {CacheHitSource.HOST: num_external_tokens - from_tiers, CacheHitSource.DISK: from_tiers}
        return {source: count for source, count in counts.items() if count}

    def build_connector_meta(self, scheduler_output: Any) -> StepMetadata:
        """What the workers load before or beside this step, and save after it."""
        assert self.scheduler is not None
        return StepMetadata(self.scheduler.step(scheduler_output))

    def update_connector_output(self, connector_output: Any) -> None:
        """The results of loads."""
        assert self.scheduler is not None
        self.scheduler.heard(
            connector_output.finished_recving or (),
            connector_output.failed_recving or (),
            connector_output.invalid_block_ids or (),
        )

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Its blocks can be freed at once: saves have already read them, or are waited for before somebody writes to
        them. With what another engine needs to know that decodes."""
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """The same, for models with several KV groups. Whoever sent parameters that were refused learns why."""
        assert self.scheduler is not None
        return False, self.scheduler.finished(request)

    def reset_cache(self) -> bool | None:
        """Clear this engine's namespaces, on the tiers too, and look what weights it has now: this is called after they
        were reloaded, or came from a trainer. False: no server has cleared them."""
        assert self.scheduler is not None
        cleared = self.scheduler.clear()
        self.scheduler.weights_changed(self._weights())
        return cleared

    @property
    def _trains(self) -> bool:
        """Whether a trainer sends weights: they need not be those of the files."""
        return self._vllm_config.weight_transfer_config is not None

    def _weights(self) -> Weights:
        """Those that the engine has now; with a trainer, equal to no others."""
        weights = self._weights_of_files()
        return replace(weights, version=f"{weights.version} transferred {uuid4().hex}") if self._trains else weights

    def _weights_of_files(self) -> Weights:
        load_format = str(self._vllm_config.load_config.load_format)
        return weights_of(self._vllm_config.model_config, load_format, self._settings)

    # --- the workers' side ----------------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """The engine's memory, by layer."""
        config, kv_config, kv_shards = self._vllm_config, self._kv_cache_config, self._settings.kv_shards
        memory = [
            layer_regions(group.layer_names, kv_caches, kv_config.num_blocks, unproven_ok=self._settings.unproven_ok)
            for group in kv_config.kv_cache_groups
        ]
        common = facts.engine_facts(config, kv_config, kv_shards) | facts.draft_facts(config, self._settings)
        made = []
        for group, layers in zip(kv_config.kv_cache_groups, memory, strict=True):
            own = facts.group_facts(config, group, [layer.layer for layer in layers], kv_shards)
            block_bytes = sum(region.page_bytes for layer in layers for region in layer.regions)
            made.append(GroupFacts(tuple(sorted((common | own).items())), block_bytes, dtype_of(layers)))
        tp, pp, replicas = get_tp_group(), get_pp_group(), kv_config.kv_tp_replicas
        ranks = tp.world_size // replicas
        weights = self._weights_of_files()
        rank = RankFacts(
            weights.model,
            weights.version,
            (pp.rank_in_group * ranks + tp.rank_in_group // replicas, pp.world_size * ranks),
            tp.rank_in_group % replicas == 0,
            tuple(made),
            weights.name,
        )
        parts = parts_of(rank, memory, kv_shards, ranks) if kv_shards else [Part(rank, memory)]
        client, workers = self._connect(f"worker-{tp.rank_in_group}"), config.parallel_config.world_size
        self.worker = WorkerSide(
            self._settings,
            client,
            *parts[0],
            more_shards=parts[1:],
            ranks=workers,
            path=weights.path,
            chunk_layers=self._chunk_layers(kv_caches),
        )

    def _chunk_layers(self, kv_caches: dict[str, Any]) -> list[tuple[Any, Any]]:
        return facts.chunk_layers(self._vllm_config, kv_caches) if self._settings.chunks else []

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: Any) -> bool:
        """Whether the engine may give back and replace the memory of its KV."""
        return True

    def unregister_kv_caches(self) -> None:
        """The engine gives the memory of its KV back."""
        if self.worker is not None:
            self.worker.unregister()

    def restore_kv_caches(self) -> None:
        """It has memory again, and perhaps other weights: the scheduler's side hears which from
        `get_handshake_metadata`."""
        if self.worker is not None and self.worker.sleeps:
            self.worker.restore(self._weights_of_files())

    def get_handshake_metadata(self) -> RankHandshake | None:
        """What the scheduler's side needs to know about this worker."""
        return None if self.worker is None else RankHandshake(self.worker.shards)

    def bind_connector_metadata(self, connector_metadata: StepMetadata) -> None:
        """A step begins."""
        super().bind_connector_metadata(connector_metadata)
        self._handled = sys.exception()
        if self.worker is not None:
            self.worker.begin_step(connector_metadata.step, str(self._vllm_config.model_config.model))

    @property
    def _step_fails(self) -> bool:
        """Whether an exception ends the step: vLLM still finishes such a step, with blocks that were not computed."""
        return sys.exception() is not self._handled

    def handle_preemptions(self, kv_connector_metadata: StepMetadata) -> None:
        """Before each step, and before vLLM clears or fills the blocks that it has given out for it."""
        if self.worker is not None:
            self.worker.await_reads(kv_connector_metadata.step)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Begin this step's loads."""
        if self.worker is not None:
            self.worker.start_loads(self._get_connector_metadata().step)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Wait until a layer that this step needs is loaded."""
        if self.worker is not None:
            self.worker.wait_layer(layer_name)

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Nothing: a step's blocks are read together, at its end."""

    def wait_for_save(self) -> None:
        """The step has been computed."""
        if self.worker is not None and not self._step_fails:
            self.worker.end_step(self._get_connector_metadata().step)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """Loads between steps that have ended, each reported once, and those of them that failed. vLLM discards the
        report of a step that fails, so nothing is reported then."""
        if self.worker is None or self._step_fails:
            return KVConnectorTransferResults()
        step = self._get_connector_metadata().step if self.has_connector_metadata() else None
        if step is not None:  # with speculation `wait_for_save` comes after this, and after the model has sampled
            self.worker.end_step_loads(step)
        arrived = self.worker.arrived(finished_req_ids, step is not None and step.idle)
        self._invalid = arrived.invalid
        several = len(self._groups) > 1
        return KVConnectorTransferResults(
            finished_recving=arrived.received, failed_recving=arrived.failed if several else set()
        )

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Blocks without valid KV: of the loads that `get_transfer_results` has just reported, and of this step's."""
        invalid, self._invalid = self._invalid, set()
        return invalid

    # --- both ---------------------------------------------------------------------------------------------------

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        """What has moved since the last time."""
        side = self.scheduler or self.worker
        data = {} if side is None else side.counters.take()
        return ConnectorStats(data) if data else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVConnectorStats | None:
        """Figures as the front end received them."""
        return ConnectorStats(data or {})

    @classmethod
    def build_prom_metrics(
        cls, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine_labelvalues: Any
    ) -> ConnectorMetrics:
        """Counters for vLLM's `/metrics`."""
        return ConnectorMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """Loads within a step are waited for layer by layer."""
        return extra_config.get("load") == "sync"

    def shutdown(self) -> None:
        """The engine ends."""
        for side in (self.scheduler, self.worker):
            if side is not None:
                try:
                    side.close()
                except CacheError as error:
                    log.warning("the client could not be closed in good order: %s", error)


def loads_wait(settings: ConnectorConfig, groups: list[Group], ranks: int) -> bool:
    """Whether loads are synchronous. With several groups vLLM cannot recover from a failure within a step; with several
    ranks, those that loaded well would store what they computed from another rank's failure."""
    return settings.load == "sync" and len(groups) == 1 and ranks == 1
