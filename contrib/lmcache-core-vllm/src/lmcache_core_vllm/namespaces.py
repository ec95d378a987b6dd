"""What must be equal before the KV of one engine may be used by another.

The bytes of a block mean something only to an engine that would have written the same ones. A worker knows most of what
decides that (which attention backend it chose, for which instruction set, how its tensors lie), so it reports these
facts once, and vLLM's handshake sends them to the scheduler. Both make the same namespaces from them.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from lmcache_core import Client
from lmcache_core.errors import CacheError
from lmcache_core.pool.layout import DTYPE_BYTES, Layout
from lmcache_core.tokens.keys import keys_from_block_hashes
from lmcache_core.tokens.namespace import Namespace, label_from, label_of_weights
from lmcache_core_vllm.weights import Weights

log = logging.getLogger("vllm.lmcache_core")  # below "vllm", so that vLLM's log shows it


@dataclass(frozen=True)
class GroupFacts:
    """One rank's facts about one KV group: everything that its bytes depend on, the number of bytes in a block, and the
    dtype of the values in it (`uint8`: not known)."""

    facts: tuple[tuple[str, str], ...]
    block_bytes: int
    dtype: str = "uint8"

    @property
    def layout(self) -> Layout:
        """Of a block: its values, without the order of their axes, which differs by backend and processor."""
        return Layout(self.dtype, (self.block_bytes // DTYPE_BYTES[self.dtype],))


@dataclass(frozen=True)
class RankFacts:
    """One worker's facts. `shard`: which part of the KV it has, of how many; `stores`: whether it stores that part, if
    several ranks have the same one. `name`: what people call the model, if that is not `model`."""

    model: str
    weights_version: str
    shard: tuple[int, int]
    stores: bool
    groups: tuple[GroupFacts, ...]
    name: str = ""

    def computing_with(self, weights: Weights) -> RankFacts:
        """The same rank after the engine has loaded these weights."""
        return replace(self, model=weights.model, weights_version=weights.version, name=weights.name)


@dataclass(frozen=True)
class Hashing:
    """How the engine hashes its blocks. Only the scheduler knows the seed, and sends it to the workers with each
    step. `adapter`: the version of the LoRA adapter that the blocks were computed with; empty if none is known."""

    algorithm: str
    seed: str
    adapter: str = ""

    def of(self, adapter: str) -> Hashing:
        """For blocks that were computed with an adapter of this version."""
        return replace(self, adapter=adapter) if adapter else self

    def keys(self, hashes: Sequence[bytes], namespace: Namespace) -> list[bytes]:
        """The keys of blocks with these hashes."""
        seed = f"{self.seed} adapter {self.adapter}" if self.adapter else self.seed
        return keys_from_block_hashes(hashes, namespace, algorithm=self.algorithm, seed=seed)


def namespaces_of(rank: RankFacts, salt: str) -> list[Namespace]:
    """One for each group."""
    return [
        Namespace(
            rank.model,
            group.layout,
            rank.weights_version,
            rank.shard,
            salt,
            f"vllm-block 1 {digest_of(group.facts)}",
            _label(rank, number),
        )
        for number, group in enumerate(rank.groups)
    ]


def _label(rank: RankFacts, number: int) -> str:
    """What people see: the model, the dtype of its KV, its weights, the part of the KV, and the group."""
    facts = dict(rank.groups[number].facts)
    dtypes = [name.removeprefix("torch.") for name in (facts.get("dtype", ""), facts.get("cache_dtype", ""))]
    parts = [f"/{name}" for name in dtypes if name not in ("", "auto")]
    parts += [label_of_weights(rank.weights_version)]
    parts += [f" {rank.shard[0]}/{rank.shard[1]}"] * (rank.shard[1] > 1)
    parts += [f" group {number}"] * (len(rank.groups) > 1)
    return label_from(rank.name or rank.model, "".join(parts))


def introduce(client: Client, namespaces: Iterable[Namespace]) -> None:
    """Register them with the server before the first step, which then finds a link. Waits as a first call does."""
    for namespace in namespaces:
        try:
            if not client.register_layout(namespace):
                log.warning("no server yet, so everything is computed: %s", client.why_unreachable)
                return
        except CacheError as error:
            log.error("nothing of %s can be cached: %s", namespace.model, error)


def digest_of(facts: Sequence[tuple[str, str]]) -> str:
    """A digest of all facts, each with its length, so that different lists never have the same text."""
    state = hashlib.sha256()
    for name, value in sorted(facts):
        for part in (name.encode(), value.encode()):
            state.update(len(part).to_bytes(8, "little"))
            state.update(part)
    return state.hexdigest()
