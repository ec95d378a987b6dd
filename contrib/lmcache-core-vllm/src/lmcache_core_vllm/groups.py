"""KV groups of a model, as in vLLM: which blocks of each a request needs to continue from a boundary."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum


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
    def window_blocks(self) -> int:
        """How many blocks in front of a boundary a window needs."""
        return max(1, -(-(self.window_tokens - 1) // self.block_tokens))

    def block_hashes(self, hashes: Sequence[bytes], first: int, end: int) -> list[bytes]:
        """The hashes of blocks `first` to `end`: each that of the last tokens of its block."""
        step = self.hashes_per_block
        return [bytes(hashes[step * (block + 1) - 1]) for block in range(first, end)]

    def hashed_blocks(self, hashes: Sequence[bytes]) -> int:
        """How many blocks already have a hash."""
        return len(hashes) // self.hashes_per_block


def boundary_step(groups: Sequence[Group]) -> int:
    """Tokens between boundaries at which every group has whole blocks."""
    return math.lcm(*(group.block_tokens for group in groups))


def longest_boundary(groups: Sequence[Group], there: Sequence[Sequence[bool]], start: int, limit: int) -> int:
    """The last boundary up to `limit`, in tokens, from which every group can continue; `start` if there is none.
    `there`: for each group, whether each block from `start` on is available. The engine already has everything before
    `start`.
    """
    step = boundary_step(groups)
    for group, had in zip(groups, there, strict=True):
        if group.kind is Kind.FULL:
            first = start // group.block_tokens
            run = next((at for at, each in enumerate(had) if not each), len(had))
            limit = min(limit, (first + run) * group.block_tokens)
    others = [(group, _gaps(had)) for group, had in zip(groups, there, strict=True) if group.kind is not Kind.FULL]
    for boundary in range(limit - limit % step, start, -step):
        if all(_can_go_on(group, gaps, start, boundary) for group, gaps in others):
            return boundary
    return start


def _gaps(had: Sequence[bool]) -> list[int]:
    """How many of the first N blocks are missing."""
    gaps = [0]
    for each in had:
        gaps.append(gaps[-1] + (not each))
    return gaps


def _can_go_on(group: Group, gaps: Sequence[int], start: int, boundary: int) -> bool:
    first = start // group.block_tokens
    low = max(0, group.first_needed(boundary) - first)
    high = boundary // group.block_tokens - first
    return high < len(gaps) and gaps[high] == gaps[low]
