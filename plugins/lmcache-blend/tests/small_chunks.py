"""A small model's chunks, with KV that says of which token and position it is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

pytest.importorskip("lmcache_blend._native", reason="built without C")

from lmcache_blend import Chunks, ChunkSpace, Found, Lengths, Rope
from lmcache_core import Layout, Namespace

LAYERS, HEADS, SIZE = 2, 2, 8
ROPE = Rope(100.0, 6, False, (1.0, 0.3, 0.01))
PREFIX_TOKENS = 16  # a chunk of a prefix


def layout_of(tokens: int) -> Layout:
    return Layout("float32", (LAYERS, 2, HEADS, tokens, SIZE), "LKHTD")


def space(**fields: Any) -> ChunkSpace:
    return ChunkSpace(
        "small", layout_of, ROPE, **{"lengths": Lengths(8, 20, 40), "step_tokens": 8, "prefix_tokens": (1,), **fields}
    )


def prefixes() -> Namespace:
    return Namespace("small", layout_of(PREFIX_TOKENS))


def kv(tokens: Sequence[int], start: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Of each layer: keys as the model would rotate them at these positions, values of the tokens alone."""
    found = []
    for layer in range(LAYERS):
        keys, values = (
            np.stack(
                [np.random.default_rng([token, layer, half]).standard_normal((HEADS, SIZE)) for token in tokens], 1
            )
            for half in range(2)
        )
        keys = np.ascontiguousarray(keys, np.float32)
        ROPE.rotate(keys, 0, start, token_axis=1)
        found.append((keys, np.ascontiguousarray(values, np.float32)))
    return found


def targets(found: Found) -> list[list[tuple[np.ndarray, np.ndarray]]]:
    shape = (HEADS, 0, SIZE)
    return [
        [tuple(np.full((shape[0], match.tokens, SIZE), np.nan, np.float32) for _ in range(2)) for _ in range(LAYERS)]
        for match in found.matches
    ]  # type: ignore[misc]


def store_missing(chunks: Chunks, tokens: np.ndarray, found: Found, rank: int = 0) -> list[Any]:
    sources = [kv(tokens[each.span.first : each.span.end].tolist(), chunks.space.base) for each in found.missing]
    return list(chunks.store(found.missing, sources, rank=rank))
