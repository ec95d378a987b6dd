"""What must be equal before the KV of one engine may be used by another.

The bytes of a block mean something only to an engine that would have written the same ones. A worker knows most of
what decides that (which attention backend it chose, for which instruction set, how its tensors lie), so it says it
once, as facts, which travel to the scheduler in vLLM's handshake. Both make the same namespaces of them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

from lmcache_core.pool.layout import Layout
from lmcache_core.tokens.namespace import Namespace


@dataclass(frozen=True)
class GroupFacts:
    """What one rank says of one KV group: whatever its bytes depend on, and how many there are in a block."""

    facts: tuple[tuple[str, str], ...]
    block_bytes: int


@dataclass(frozen=True)
class RankFacts:
    """What one worker says of itself. `shard`: which part of the KV it has, of how many; `stores`: whether it is the
    one that stores it, where several ranks have the same part."""

    model: str
    weights_version: str
    shard: tuple[int, int]
    stores: bool
    groups: tuple[GroupFacts, ...]


def namespaces_of(rank: RankFacts, hashing: Mapping[str, str], salt: str) -> list[Namespace]:
    """One for each group. `hashing`: how block hashes are made, which the scheduler alone knows."""
    return [
        Namespace(
            rank.model,
            Layout("uint8", (group.block_bytes,)),
            f"{rank.weights_version};vllm-block 1;{_digest(group, hashing)}",
            rank.shard,
            salt,
        )
        for group in rank.groups
    ]


def _digest(group: GroupFacts, hashing: Mapping[str, str]) -> str:
    """Of all facts, each with its length, so that no two lists of them have the same text."""
    state = hashlib.sha256()
    for name, value in sorted([*group.facts, *hashing.items()]):
        for part in (name.encode(), value.encode()):
            state.update(len(part).to_bytes(8, "little"))
            state.update(part)
    return state.hexdigest()
