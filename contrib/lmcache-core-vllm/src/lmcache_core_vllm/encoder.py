"""The class that vLLM loads for encoder outputs: `ec_connector="LMCacheCoreECConnector"`."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field
from typing import Any

import torch
import vllm
from vllm.config import VllmConfig
from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorBase, ECConnectorMetadata, ECConnectorRole
from vllm.distributed.parallel_state import get_tp_group

from lmcache_core import Client, Namespace
from lmcache_core.errors import CacheError, SettingsError
from lmcache_core_vllm import facts
from lmcache_core_vllm.config import ConnectorConfig
from lmcache_core_vllm.encoder_outputs import LAYOUT, EncoderOutputs, Search
from lmcache_core_vllm.namespaces import digest_of, introduce
from lmcache_core_vllm.patience import Patience
from lmcache_core_vllm.weights import weights_of

log = logging.getLogger("vllm.lmcache_core")

WHERE = "ec_connector_extra_config"
SETTINGS = (
    *("server", "runtime_dir", "address", "model", "weights_version", "weights_fingerprint", "salt"),
    *("lookup_timeout_s", "retry_s", "verify", "copy_threads", "unproven_ok"),
)


@dataclass
class OutputsToLoad(ECConnectorMetadata):  # type: ignore[misc]  # vLLM is not there where types are checked
    """Outputs that the workers need in this step, by identifier: with their content, so that none can get lost."""

    outputs: dict[str, torch.Tensor] = field(default_factory=dict)


class LMCacheCoreECConnector(ECConnectorBase):  # type: ignore[misc]  # as above
    """Outputs of multimodal encoders, shared by all engines of the node through an lmcache-core server.

    vLLM cannot encode what it was promised and did not get. So the scheduler's side copies an output out of the pool
    before it promises it, and sends it along with the step.
    """

    def __init__(self, vllm_config: VllmConfig, role: ECConnectorRole) -> None:
        super().__init__(vllm_config, role)
        given = vllm_config.ec_transfer_config.ec_connector_extra_config
        self._settings = ConnectorConfig.parse(given, where=WHERE, known=SETTINGS)
        facts.check_version(vllm.__version__, unproven_ok=self._settings.unproven_ok)
        device = vllm_config.device_config.device_type
        if device != "cpu" and not self._settings.unproven_ok:
            raise SettingsError(
                f"encoder outputs of this engine are on {device}: this connector has been tested on the CPU alone; to "
                f'use it all the same, set "unproven_ok": true in {WHERE}, and compare answers with those without it'
            )
        if vllm_config.weight_transfer_config is not None:
            raise SettingsError(
                "weights come from a trainer, and vLLM does not tell an encoder connector when: use it without this one"
            )
        self._client = Client.connect(
            self._settings.server,
            runtime_dir=self._settings.runtime_dir,
            address=self._settings.address,
            client_name=f"vllm-encoder-{role.name.lower()}",
            copy_threads=self._settings.copy_threads,
            call_timeout_s=self._settings.lookup_timeout_s,
            connect_timeout_s=self._settings.lookup_timeout_s,
            verify=self._settings.verify,
        )
        self._patience = Patience(self._settings.retry_s, time.monotonic)
        self.outputs = EncoderOutputs(self._client, self._namespace(), self._patience)
        introduce(self._client, [self.outputs.namespace])
        self._searches: dict[str, dict[str, Search]] = {}  # by request, by identifier
        self._ready: dict[str, torch.Tensor] = {}  # copied out of the pool, for the step that is being scheduled
        self._to_load: dict[str, torch.Tensor] = {}

    def _namespace(self) -> Namespace:
        """What an output depends on, besides what was encoded: vLLM's identifiers have that, and its processing."""
        config = self._vllm_config
        weights = weights_of(config.model_config, str(config.load_config.load_format), self._settings)
        format_ = f"vllm-encoder 1 {digest_of(sorted(facts.encoder_facts(config).items()))}"
        return Namespace(weights.model, LAYOUT, weights.version, tenant_salt=self._settings.salt, format=format_)

    # --- the scheduler's side -------------------------------------------------------------------------------------

    def ensure_cache_available(self, request: Any, num_computed_tokens: int) -> bool:
        """Whether tiers have been asked for all that this request needs; a request waits `lookup_timeout_s` at
        most."""
        searches = self._searches.setdefault(request.request_id, {})
        for feature in request.mm_features:
            place, name = feature.mm_position, feature.identifier
            if place.offset + place.length <= num_computed_tokens or name in searches:
                continue
            if self._patience.over or self.outputs.has(name):
                continue
            searches[name] = Search(self.outputs, name, self._settings.lookup_timeout_s, time.monotonic)
        pending = [each for each in searches.values() if not each.over()]
        return not pending

    def has_cache_item(self, identifier: str) -> bool:
        """Whether the pool has it. A consumer's is copied out of it: what is promised is there."""
        if not self.is_consumer:
            return self.outputs.has(identifier)
        if identifier not in self._ready:
            output = self.outputs.get(identifier)
            if output is None:
                return False
            self._ready[identifier] = output
        return True

    def update_state_after_alloc(self, request: Any, index: int) -> None:
        """The engine has made room for it, and expects it in this step if it was promised."""
        name = request.mm_features[index].identifier
        if name in self._ready:
            self._to_load[name] = self._ready[name]

    def build_connector_meta(self, scheduler_output: Any) -> OutputsToLoad:
        """What the workers put into their caches before this step."""
        made, self._to_load, self._ready = OutputsToLoad(self._to_load), {}, {}
        return made

    def request_finished(self, request: Any) -> tuple[bool, dict[str, Any] | None]:
        """The answers of tiers to it are no longer wanted."""
        for search in self._searches.pop(request.request_id, {}).values():
            search.cancel()
        return False, None

    # --- the workers' side ----------------------------------------------------------------------------------------

    def start_load_caches(self, encoder_cache: dict[str, torch.Tensor], **kwargs: Any) -> None:
        """Put them where the model looks for them."""
        for name, output in self._get_connector_metadata().outputs.items():
            if name not in encoder_cache:
                encoder_cache[name] = output.to(self._vllm_config.device_config.device)

    def save_caches(self, encoder_cache: dict[str, torch.Tensor], mm_hash: str, **kwargs: Any) -> None:
        """The model has encoded it. All ranks have the same, and the first one stores it."""
        if self.is_producer and get_tp_group().rank_in_group == 0:
            self.outputs.put(mm_hash, encoder_cache[mm_hash])

    def shutdown(self) -> None:
        """The engine ends."""
        for searches in self._searches.values():
            for search in searches.values():
                search.cancel()
        try:
            self._client.close()
        except CacheError as error:
            log.warning("the client could not be closed in good order: %s", error)
