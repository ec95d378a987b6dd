"""A minimal vLLM connector: KV blocks kept in a dict of the engine's own process.

Ours is compared with it: the same blocks are copied back into the same memory, without a pool, a server, another
process, checks of any kind, or a limit. One KV group and one process only.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorTransferResults,
    SupportsHMA,
)

KEPT: dict[bytes, list[torch.Tensor]] = {}  # by block hash, one tensor per layer; shared by both sides of the connector
between_steps = True  # whether loads continue between steps, as ours do by default


@dataclass
class Moves(KVConnectorMetadata):  # type: ignore[misc]  # vLLM is not there where types are checked
    """What a step loads and saves: the request, and pairs of a block's hash and its number in the engine."""

    loads: list[tuple[str, list[tuple[bytes, int]]]] = field(default_factory=list)
    saves: list[tuple[bytes, int]] = field(default_factory=list)


class DictConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]  # as above
    """Keeps every block that the engine has computed, and copies back those it has."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        (group,) = kv_cache_config.kv_cache_groups
        self._block_tokens: int = group.kv_cache_spec.block_size
        self._requests: dict[str, Any] = {}
        self._kept: dict[str, int] = {}  # by request: the number of blocks saved or loaded
        self._loads: list[tuple[str, list[tuple[bytes, int]]]] = []
        self._layers: list[torch.Tensor] = []
        self._arrived: set[str] = set()

    # --- the scheduler's side -----------------------------------------------------------------------------------

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        """Tokens of the whole blocks that are kept, leaving one token to compute."""
        self._requests[request.request_id] = request
        most = (request.num_tokens - 1) // self._block_tokens
        hits = next((at for at, each in enumerate(request.block_hashes[:most]) if bytes(each) not in KEPT), most)
        found = max(0, hits * self._block_tokens - num_computed_tokens)
        return found, bool(found) and between_steps

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Load them in the next step."""
        if num_external_tokens:
            end = (request.num_computed_tokens + num_external_tokens) // self._block_tokens
            hashes = map(bytes, request.block_hashes[:end])
            self._loads.append((request.request_id, list(zip(hashes, blocks.get_block_ids()[0], strict=False))))
            self._kept[request.request_id] = end

    def build_connector_meta(self, scheduler_output: Any) -> Moves:
        """The loads, and the blocks that are full after this step."""
        moves, self._loads = Moves(loads=self._loads), []
        before = {each.req_id: each.num_computed_tokens for each in scheduler_output.scheduled_new_reqs}
        cached = scheduler_output.scheduled_cached_reqs
        before.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        state = scheduler_output.kv_connector_block_state
        for request_id, count in scheduler_output.num_scheduled_tokens.items():
            table = None if state is None else state.get_block_ids(request_id)
            request = self._requests.get(request_id)
            if table is not None and request is not None:
                first, end = self._kept.get(request_id, 0), (before[request_id] + count) // self._block_tokens
                end = min(end, len(request.block_hashes))
                hashes = map(bytes, request.block_hashes[first:end])
                moves.saves += zip(hashes, table[0][first:end], strict=True)
                self._kept[request_id] = max(first, end)
        return moves

    def request_finished(self, request: Any, block_ids: Any) -> tuple[bool, None]:
        """Its blocks were already copied."""
        self._requests.pop(request.request_id, None)
        self._kept.pop(request.request_id, None)
        return False, None

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> tuple[bool, None]:
        """The same."""
        return self.request_finished(request, block_ids)

    # --- the worker's side --------------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Keep the engine's tensors."""
        self._layers = list(kv_caches.values())

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Copy at once."""
        for request_id, blocks in self._get_connector_metadata().loads:
            for block_hash, block in blocks:
                for layer, kept in zip(self._layers, KEPT[block_hash], strict=True):
                    layer[block].copy_(kept)
            self._arrived.add(request_id)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing to wait for."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Blocks are saved at the end of the step."""

    def wait_for_save(self) -> None:
        """Save the blocks of this step."""
        for block_hash, block in self._get_connector_metadata().saves:
            if block_hash not in KEPT:
                KEPT[block_hash] = [layer[block].clone() for layer in self._layers]

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """All loads between steps: they have ended."""
        arrived, self._arrived = self._arrived if between_steps else set(), set()
        return KVConnectorTransferResults(finished_recving=arrived)
