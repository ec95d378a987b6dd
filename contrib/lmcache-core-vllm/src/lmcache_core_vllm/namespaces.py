"""What must be equal before the KV of one engine may be used by another.

The bytes of a block mean something only to an engine that would have written the same ones. A worker knows most of what
decides that (which attention backend it chose, for which instruction set, how its tensors lie), so it reports these
facts once, and vLLM's handshake sends them to the scheduler. Both make the same namespaces from them.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from lmcache_core.client.client import Client
from lmcache_core.errors import CacheError
from lmcache_core.pool.layout import Layout
from lmcache_core.tokens.keys import keys_from_block_hashes
from lmcache_core.tokens.namespace import Namespace

log = logging.getLogger("vllm.lmcache_core")  # below "vllm", so that vLLM's log shows it


@dataclass(frozen=True)
class GroupFacts:
    """One rank's facts about one KV group: everything that its bytes depend on, and the number of bytes in a block."""

    facts: tuple[tuple[str, str], ...]
    block_bytes: int


@dataclass(frozen=True)
class RankFacts:
    """One worker's facts. `shard`: which part of the KV it has, of how many; `stores`: whether it stores that part, if
    several ranks have the same one."""

    model: str
    weights_version: str
    shard: tuple[int, int]
    stores: bool
    groups: tuple[GroupFacts, ...]


@dataclass(frozen=True)
class Hashing:
    """How the engine hashes its blocks. Only the scheduler knows the seed, and sends it to the workers with each
    step."""

    algorithm: str
    seed: str

    def keys(self, hashes: Sequence[bytes], namespace: Namespace) -> list[bytes]:
        """The keys of blocks with these hashes."""
        return keys_from_block_hashes(hashes, namespace, algorithm=self.algorithm, seed=self.seed)


def namespaces_of(rank: RankFacts, salt: str) -> list[Namespace]:
    """One for each group."""
    return [
        Namespace(
            rank.model,
            Layout("uint8", (group.block_bytes,)),
            rank.weights_version,
            rank.shard,
            salt,
            f"vllm-block 1 {_digest(group.facts)}",
        )
        for group in rank.groups
    ]


def introduce(client: Client, namespaces: Iterable[Namespace]) -> None:
    """Register them with the server before the first step, which then finds a link. Waits as a first call does."""
    for namespace in namespaces:
        try:
            if not client.register_layout(namespace):
                log.warning("no server yet, so everything is computed: %s", client.why_unreachable)
                return
        except CacheError as error:
            log.error("nothing of %s can be cached: %s", namespace.model, error)


def _digest(facts: Sequence[tuple[str, str]]) -> str:
    """A digest of all facts, each with its length, so that different lists never have the same text."""
    state = hashlib.sha256()
    for name, value in sorted(facts):
        for part in (name.encode(), value.encode()):
            state.update(len(part).to_bytes(8, "little"))
            state.update(part)
    return state.hexdigest()
