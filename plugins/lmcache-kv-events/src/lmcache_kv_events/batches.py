"""What happened to blocks, joined into runs and cut into batches that a router can be given at once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from lmcache_kv_events.format import KvAllCleared, KvBlocksRemoved, KvBlocksStored, KvEvent
from lmcache_kv_events.limits import BATCH_HASHES, BATCH_TOKENS


def in_batches(events: Iterable[KvEvent]) -> Iterator[list[KvEvent]]:
    """Not larger than a router can be given at once."""
    batch: list[KvEvent] = []
    hashes = tokens = 0
    for event in events:
        if not isinstance(event, KvAllCleared):
            hashes += len(event.block_hashes)
        if isinstance(event, KvBlocksStored):
            tokens += len(event.token_ids)
        batch.append(event)
        if hashes >= BATCH_HASHES or tokens >= BATCH_TOKENS:
            yield batch
            batch, hashes, tokens = [], 0, 0
    if batch:
        yield batch


def merged(events: Iterable[KvEvent]) -> Iterator[KvEvent]:
    """Consecutive runs joined into one event; nothing else changes."""
    last: KvEvent | None = None
    for event in events:
        if isinstance(last, KvBlocksStored) and isinstance(event, KvBlocksStored) and _follows(last, event):
            last.block_hashes += event.block_hashes
            last.token_ids += event.token_ids
        elif (
            isinstance(last, KvBlocksRemoved)
            and isinstance(event, KvBlocksRemoved)
            and (last.medium, last.locality, last.group_idx) == (event.medium, event.locality, event.group_idx)
            and len(last.block_hashes) < BATCH_HASHES
        ):
            last.block_hashes += event.block_hashes
        else:
            if last is not None:
                yield last
            last = event
    if last is not None:
        yield last


def _follows(last: KvBlocksStored, event: KvBlocksStored) -> bool:
    return (
        event.parent_block_hash == last.block_hashes[-1]
        and (event.block_size, event.lora_id, event.lora_name, event.medium, event.locality, event.group_idx)
        == (last.block_size, last.lora_id, last.lora_name, last.medium, last.locality, last.group_idx)
        and bool(event.token_ids) == bool(last.token_ids)
        and len(last.block_hashes) < BATCH_HASHES
        and len(last.token_ids) < BATCH_TOKENS
    )
