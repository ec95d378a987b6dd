"""What the scheduler's side sends to the workers' side in each step. Plain data, pickled by vLLM."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from lmcache_core import PageEntry, Promise
from lmcache_core.tokens.namespace import Namespace
from lmcache_core_vllm.namespaces import Hashing
from lmcache_core_vllm.weights import Weights

if TYPE_CHECKING:
    from lmcache_blend.described import DescribedChunks

STEPS_AHEAD = 2  # vLLM makes the next step while one runs; the one before that has ended


@dataclass
class Blocks:
    """Blocks of one group: their hashes, and their ids in the engine. `promises`: for loads, the promise that holds the
    blocks in the pool, for each shard; empty if none does. `traceparent`: the trace of their request. `adapter`: the
    version of its LoRA adapter."""

    group: int
    hashes: list[bytes]
    block_ids: list[int]
    promises: list[Promise] = field(default_factory=list)
    traceparent: str = ""
    adapter: str = ""

    def entry(self, hashing: Hashing, namespaces: Sequence[Namespace], first: int = 0) -> PageEntry:
        """The same for a rank with these namespaces: keys instead of hashes. `first`: the shard's first namespace."""
        keys = hashing.of(self.adapter).keys(self.hashes, namespaces[first + self.group])
        return PageEntry(first + self.group, keys, self.block_ids, traceparent=self.traceparent)


@dataclass
class Load:
    """Blocks to be read for a request. `number`: no two loads of an engine have the same. `prefill_wait_s`: another
    engine computes them now, and each is waited for, so long after the one before it; 0: they are there."""

    request_id: str
    waits: bool  # the step needs them, and waits
    blocks: list[Blocks]
    number: int = 0
    prefill_wait_s: float = 0.0

    def without_hashes(self) -> Load:
        """The load without its hashes: only which it is and where it goes. Sent with each step until it has ended."""
        return replace(self, blocks=[replace(each, hashes=[], promises=[]) for each in self.blocks])


@dataclass
class ChunkSave:
    """A document to be stored as a chunk: whose chunks it is one of, the tokens of its request's prompt, and the blocks
    that hold them."""

    about: DescribedChunks
    tokens: list[int]
    block_ids: list[int]


@dataclass
class Step:
    """One step. `number`: from 1 on, one more than the step before it. `epoch`: grows when the scheduler learns of a
    load that failed within a step. `idle`: no tokens are computed in it. `awaited`: loads of earlier steps that the
    scheduler does not yet know to have ended; without their hashes. `weights`: what the engine computes with, if that
    has changed since its workers reported it. `delivers`: another engine waits for what is saved. `fresh`: blocks that
    the engine or a load may write to from this step on, and may have freed since an earlier one. `chunks`: documents
    whose last tokens this step computes."""

    hashing: Hashing
    epoch: int = 0
    number: int = 0
    idle: bool = False
    loads: list[Load] = field(default_factory=list)
    awaited: list[Load] = field(default_factory=list)
    saves: list[Blocks] = field(default_factory=list)
    weights: Weights | None = None
    delivers: bool = False
    fresh: list[int] = field(default_factory=list)
    chunks: list[ChunkSave] = field(default_factory=list)
