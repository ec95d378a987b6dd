"""KV groups of a model, as in vLLM: which blocks of each a request needs to continue from a boundary."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from lmcache_core import Need


class Kind(StrEnum):
    """Which earlier tokens a layer needs for the next one."""

    FULL = "full"  # all of them; also multi-head latent attention
    WINDOW = "window"  # the last ones
    STATE = "state"  # one state, as it was after the last one


@dataclass(frozen=True)
class Group:
    """Layers that share a block table. Block `i` holds the tokens from `i * block_tokens` on, or the state after them.

    `hashes_per_block`: vLLM hashes tokens in blocks of the groups' greatest common divisor.
    """

    number: int
    kind: Kind
    block_tokens: int
    hashes_per_block: int
    window_tokens: int = 0

    def first_needed(self, boundary: int) -> int:
        """The first of the blocks up to `boundary` tokens that the next token needs."""
        if self.kind is Kind.FULL:
            return 0
        if self.kind is Kind.STATE:
            return boundary // self.block_tokens - 1
        return max(0, boundary - self.window_tokens + 1) // self.block_tokens

    @property
    def need(self) -> Need:
        """`first_needed`, in blocks before any boundary."""
        if self.kind is Kind.FULL:
            return Need.PREFIX
        if self.kind is Kind.STATE:
            return Need.LAST
        return Need.last_window(max(1, -(-(self.window_tokens - 1) // self.block_tokens)))

    def block_hashes(self, hashes: Sequence[bytes], blocks: Iterable[int]) -> list[bytes]:
        """The hashes of these blocks: each that of the last tokens of its block."""
        step = self.hashes_per_block
        return [bytes(hashes[step * (block + 1) - 1]) for block in blocks]

    def hashed_blocks(self, hashes: Sequence[bytes]) -> int:
        """How many blocks already have a hash."""
        return len(hashes) // self.hashes_per_block


def boundary_step(groups: Sequence[Group]) -> int:
    """Tokens between boundaries at which every group has whole blocks."""
    return math.lcm(*(group.block_tokens for group in groups))
