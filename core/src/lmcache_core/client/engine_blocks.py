"""Which of an engine's blocks some keys hold, reported for routers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from lmcache_core.errors import UsageError
from lmcache_core.limits import BATCH_KEYS_MAX, REPORT_HASHES_MAX, REPORT_TOKENS_MAX
from lmcache_core.protocol import messages as m


@dataclass(frozen=True)
class EngineBlocks:
    """Blocks in prefix order, the same number for each key. Each block follows the one before it, and the first follows
    `parent`."""

    hashes: Sequence[bytes]
    block_size: int  # tokens
    parent: bytes | None = None  # the hash of the block before the first; None: the prompt starts here
    lora_id: int | None = None
    lora_name: str | None = None
    group: int | None = None  # of the KV cache, if the engine has several
    token_ids: Sequence[int] = ()  # of all the blocks; this is content, so pass them only if routers need them

    def pages(self, keys: int) -> Iterator[tuple[int, _ReportPage]]:
        """The content of each frame, with the position of its first key."""
        each = len(self.hashes) // keys if keys else 0
        if not keys or not each or each * keys != len(self.hashes) or self.block_size < 1:
            raise UsageError(
                f"{len(self.hashes)} hashes of blocks of {self.block_size} tokens for {keys} keys: give the same "
                "number for each key, and a size above 0"
            )
        if self.token_ids and len(self.token_ids) != len(self.hashes) * self.block_size:
            raise UsageError(
                f"{len(self.token_ids)} token ids for {len(self.hashes)} blocks of {self.block_size}: give all, or none"
            )
        step = max(1, min(BATCH_KEYS_MAX, REPORT_HASHES_MAX // each))
        if self.token_ids:
            step = max(1, min(step, REPORT_TOKENS_MAX // (each * self.block_size)))
        for first in range(0, keys, step):
            yield first, _ReportPage(self, first * each, min(step, keys - first), each)


class _ReportPage(NamedTuple):
    blocks: EngineBlocks
    first: int  # of its hashes
    keys: int
    hashes_per_key: int

    def message(self, namespace_id: int, keys: bytes) -> m.ReportBlocks:
        blocks, first, end = self.blocks, self.first, self.first + self.keys * self.hashes_per_key
        size = blocks.block_size
        return m.ReportBlocks(
            0,
            namespace_id,
            keys,
            list(blocks.hashes[first:end]),
            blocks.hashes[first - 1] if first else blocks.parent,
            size,
            blocks.lora_id,
            blocks.lora_name,
            blocks.group,
            list(blocks.token_ids[first * size : end * size]),
        )
