"""A vLLM connector that can change between two requests: ours, the dict connector, or none, in one engine.

Switch it only while the engine has no request. It also measures the CPU time that the engine's own thread spends in our
connector's calls.
"""

from __future__ import annotations

import time
from collections import Counter
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)

from lmcache_bench.engine.dict_connector import DictConnector
from lmcache_core_vllm.connector import LMCacheCoreConnector

KINDS: dict[str, Any] = {"ours": LMCacheCoreConnector, "dict": DictConnector}
chosen = ""  # one of KINDS, or none
ours_cpu_s = 0.0  # of the engine's thread, within our calls
figures: Counter[str] = Counter()  # the counters of our connector
memory: dict[str, Any] = {}  # the engine's KV tensors by layer
blocks = 0  # number of the engine's blocks


class SwitchConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]  # vLLM is not there where types are checked
    """Forwards every call to the connector that is `chosen`."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._kinds = {name: kind(vllm_config, role, kv_cache_config) for name, kind in KINDS.items()}
        self._blocks = kv_cache_config.num_blocks

    def _call(self, method: str, otherwise: Any, *arguments: Any, **options: Any) -> Any:
        global ours_cpu_s
        if not chosen:
            return otherwise
        call = getattr(self._kinds[chosen], method)
        if chosen != "ours":
            return call(*arguments, **options)
        began_s = time.thread_time()
        try:
            return call(*arguments, **options)
        finally:
            ours_cpu_s += time.thread_time() - began_s

    @property
    def requires_kv_delivery(self) -> bool:
        """No: nobody waits for what is saved."""
        return False

    # --- the scheduler's side -----------------------------------------------------------------------------------

    def bind_kv_cache_manager(self, kv_cache_manager: Any) -> None:
        """Forwarded to both."""
        for each in self._kinds.values():
            each.bind_kv_cache_manager(kv_cache_manager)

    def on_new_request(self, request: Any) -> None:
        """Forwarded."""
        self._call("on_new_request", None, request)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """The chosen connector's answer; with none, nothing matches."""
        found: tuple[int | None, bool] = self._call(
            "get_num_new_matched_tokens", (0, False), request, num_computed_tokens
        )
        return found

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Forwarded."""
        self._call("update_state_after_alloc", None, request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        """Forwarded."""
        return self._call("build_connector_meta", KVConnectorMetadata(), scheduler_output)

    def update_connector_output(self, connector_output: Any) -> None:
        """Forwarded."""
        self._call("update_connector_output", None, connector_output)

    def request_finished(self, request: Any, block_ids: Any) -> tuple[bool, Any]:
        """Forwarded."""
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> tuple[bool, Any]:
        """Forwarded."""
        ended: tuple[bool, Any] = self._call("request_finished_all_groups", (False, None), request, block_ids)
        return ended

    def set_xfer_handshake_metadata_pp_aware(self, metadata: Any) -> None:
        """For our connector only."""
        self._kinds["ours"].set_xfer_handshake_metadata_pp_aware(metadata)

    # --- the worker's side --------------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """Forwarded to both."""
        global blocks
        memory.update(kv_caches)
        blocks = self._blocks
        for each in self._kinds.values():
            each.register_kv_caches(kv_caches)

    def get_handshake_metadata(self) -> Any:
        """From our connector only."""
        return self._kinds["ours"].get_handshake_metadata()

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """Forwarded."""
        super().bind_connector_metadata(connector_metadata)
        self._call("bind_connector_metadata", None, connector_metadata)

    def clear_connector_metadata(self) -> None:
        """Forwarded."""
        super().clear_connector_metadata()
        self._call("clear_connector_metadata", None)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Forwarded."""
        self._call("start_load_kv", None, forward_context, **kwargs)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Forwarded."""
        self._call("wait_for_layer_load", None, layer_name)

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Forwarded."""
        self._call("save_kv_layer", None, layer_name, kv_layer, attn_metadata, **kwargs)

    def wait_for_save(self) -> None:
        """Forwarded."""
        self._call("wait_for_save", None)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """Forwarded."""
        return self._call("get_transfer_results", KVConnectorTransferResults(), finished_req_ids)

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Forwarded."""
        found: set[int] = self._call("get_block_ids_with_load_errors", set())
        return found

    # --- both ---------------------------------------------------------------------------------------------------

    def get_kv_connector_stats(self) -> Any:
        """Forwarded; the result is also kept for the bench."""
        stats = self._call("get_kv_connector_stats", None)
        if stats is not None:
            figures.update({name: value for name, value in stats.data.items() if not isinstance(value, list)})
        return stats

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> Any:
        """Ours."""
        return LMCacheCoreConnector.build_kv_connector_stats(data)

    def shutdown(self) -> None:
        """Shuts down both."""
        for each in self._kinds.values():
            each.shutdown()
