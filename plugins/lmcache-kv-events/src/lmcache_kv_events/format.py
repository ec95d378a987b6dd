"""vLLM's format of KV events, as our own structs: what routers for LLM engines read.

A batch is an array `[ts, [events], data_parallel_rank]`. Events are maps with `type` (vLLM 0.32), or arrays that begin
with it (earlier versions, and consumers that lag behind): the same fields in the same order.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

BlockHash = int | bytes
Medium = Literal["CPU", "STORAGE"]
Locality = Literal["LOCAL", "REMOTE"]  # REMOTE: other servers have the same blocks there
END_SEQ = (-1).to_bytes(8, "big", signed=True)  # after the last batch of a replay


class KvBlocksStored(msgspec.Struct, omit_defaults=True, tag="BlockStored"):
    """A run of blocks: the first follows `parent_block_hash`."""

    block_hashes: list[BlockHash]
    parent_block_hash: BlockHash | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[Any] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    locality: Locality | None = None


class KvBlocksRemoved(msgspec.Struct, omit_defaults=True, tag="BlockRemoved"):
    """These are no longer on `medium`."""

    block_hashes: list[BlockHash]
    medium: str | None
    group_idx: int | None = None
    locality: Locality | None = None


class KvAllCleared(msgspec.Struct, tag="AllBlocksCleared"):
    """No blocks are stored anywhere any more."""


KvEvent = KvBlocksStored | KvBlocksRemoved | KvAllCleared


class KvEventBatch(msgspec.Struct, array_like=True):
    """One batch, as published."""

    ts: float
    events: list[Any]
    data_parallel_rank: int | None = None


def encode_batch(at_s: float, events: list[KvEvent], rank: int | None, shape: Literal["map", "array"]) -> bytes:
    """One batch as MessagePack."""
    shaped: list[Any] = [_as_array(event) for event in events] if shape == "array" else list(events)
    return msgspec.msgpack.encode(KvEventBatch(at_s, shaped, rank))


def as_hash(value: bytes, shape: Literal["int", "bytes"]) -> BlockHash:
    """The form in which engines publish a hash: by default its low 64 bits."""
    return int.from_bytes(value, "big") & (1 << 64) - 1 if shape == "int" else value


def _as_array(event: KvEvent) -> list[Any]:
    names = event.__struct_fields__
    if "group_idx" in names:  # those that read arrays know nothing of what came later
        names = names[: names.index("group_idx") + 1]
    fields = [getattr(event, name) for name in names]
    while fields and event.__struct_defaults__ and fields[-1] is None and len(fields) > _always(event):
        fields.pop()
    return [event.__struct_config__.tag, *fields]


def _always(event: KvEvent) -> int:
    return len(event.__struct_fields__) - len(event.__struct_defaults__)
