"""Which of the engine's blocks are in the cache, for routers: they know vLLM's hashes, and none of the cache's keys."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

from lmcache_core import Client
from lmcache_core.client import EngineBlocks
from lmcache_core.tokens.namespace import Namespace
from lmcache_core_vllm.groups import Group
from lmcache_core_vllm.messages import Messages
from lmcache_core_vllm.namespaces import Hashing


class Hashed(Protocol):
    """The fields of vLLM's request that are used here."""

    block_hashes: Sequence[bytes]
    all_token_ids: Sequence[int]
    lora_request: Any


class Reports:
    """Reports to the server, if it wants reports, under which of vLLM's hashes blocks are stored, or were found. One
    rank reports for all."""

    def __init__(self, client: Client, messages: Messages, hashing: Callable[[], Hashing], token_ids: bool) -> None:
        """`token_ids`: report the tokens of each block too. Tokens are content."""
        self._client = client
        self._messages = messages
        self._hashing = hashing
        self._token_ids = token_ids

    def tell(
        self, request: Hashed, group: Group, blocks: Sequence[int], namespace: Namespace, adapter: str = ""
    ) -> int:
        """These blocks of the request, in order, are in the cache now, or will be; its LoRA adapter has this version.
        Returns how many reports were dropped because the server is too far behind."""
        if not self._client.wants_blocks:
            return 0
        unreported = 0
        for run in _runs(blocks):
            hashes = group.block_hashes(request.block_hashes, run)
            keys = self._hashing().of(adapter).keys(hashes, namespace)
            if not self._messages.report(keys, self._described(request, group, run, hashes), namespace):
                unreported += len(run)
        return unreported

    def _described(self, request: Hashed, group: Group, run: range, hashes: Sequence[bytes]) -> EngineBlocks:
        tokens, lora = group.block_tokens, request.lora_request
        before = group.block_hashes(request.block_hashes, [run.start - 1]) if run.start else ()
        return EngineBlocks(
            hashes,
            tokens,
            before[0] if before else None,
            None if lora is None else lora.adapter_id,
            None if lora is None else lora.name,
            group.number,
            list(request.all_token_ids[run.start * tokens : run.stop * tokens]) if self._token_ids else (),
        )


def _runs(blocks: Sequence[int]) -> Iterator[range]:
    """Consecutive blocks."""
    first = 0
    for at in range(1, len(blocks) + 1):
        if at == len(blocks) or blocks[at] != blocks[at - 1] + 1:
            yield range(blocks[first], blocks[at - 1] + 1)
            first = at
