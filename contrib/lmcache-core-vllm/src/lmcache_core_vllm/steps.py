"""What the scheduler's side sends to the workers' side in each step. Plain data, pickled by vLLM."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from lmcache_core.client.promises import Promise
from lmcache_core_vllm.namespaces import Hashing

STEPS_AHEAD = 2  # vLLM makes the next step while one runs; the one before that has ended


@dataclass
class Blocks:
    """Blocks of one group: their hashes, and their ids in the engine. `promises`: for loads, the promise that holds the
    blocks in the pool, for each shard; empty if none does. `traceparent`: the trace of the request that they are saved
    for."""

    group: int
    hashes: list[bytes]
    block_ids: list[int]
    promises: list[Promise] = field(default_factory=list)
    traceparent: str = ""


@dataclass
class Load:
    """Blocks to be read for a request. `number`: no two loads of an engine have the same."""

    request_id: str
    waits: bool  # the step needs them, and waits
    blocks: list[Blocks]
    number: int = 0

    def without_hashes(self) -> Load:
        """The load without its hashes: only which it is and where it goes. Sent with each step until it has ended."""
        return replace(self, blocks=[Blocks(each.group, [], each.block_ids) for each in self.blocks])


@dataclass
class Step:
    """One step. `number`: from 1 on, one more than the step before it. `epoch`: grows when the scheduler learns of a
    load that failed within a step. `idle`: no tokens are computed in it. `awaited`: loads of earlier steps that the
    scheduler does not yet know to have ended; without their hashes."""

    hashing: Hashing
    epoch: int = 0
    number: int = 0
    idle: bool = False
    loads: list[Load] = field(default_factory=list)
    awaited: list[Load] = field(default_factory=list)
    saves: list[Blocks] = field(default_factory=list)
