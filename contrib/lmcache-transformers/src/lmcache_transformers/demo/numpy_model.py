"""A small decoder in numpy, for a demo without torch: attention with rotary positions, random weights. Its answers are
useless. But its KV has the shape and the size of the Llama's, depends on every token before it, and costs time to
compute, which is all that matters to a KV cache.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from lmcache_transformers.demo.model import HEAD_DIM, HEADS_PER_KV_HEAD, VOCABULARY, ModelShape

Floats = NDArray[np.float32]
ROPE_THETA = 10_000.0


class NumpyDecoder:
    """The weights are derived from the shape and its seed, equal in every process. KV is float32
    `[layers, 2, kv_heads, room, head_dim]`, keys before values."""

    def __init__(self, shape: ModelShape) -> None:
        rng = np.random.default_rng(shape.seed)
        hidden, narrow = shape.hidden, shape.kv_heads * HEAD_DIM

        def weights(rows: int, columns: int) -> Floats:
            return rng.standard_normal((rows, columns), dtype=np.float32) / np.float32(rows**0.5)

        self.shape = shape
        self._embedding = rng.standard_normal((VOCABULARY, hidden), dtype=np.float32)
        self._layers = [
            (weights(hidden, hidden), weights(hidden, narrow), weights(hidden, narrow), weights(hidden, hidden))
            for _ in range(shape.layers)
        ]
        self._out = weights(hidden, VOCABULARY)
        self._frequencies = ROPE_THETA ** -(np.arange(0, HEAD_DIM, 2, dtype=np.float32) / HEAD_DIM)

    def room(self, tokens: int) -> Floats:
        """KV of as many tokens, all zeros."""
        return np.zeros((self.shape.layers, 2, self.shape.kv_heads, tokens, HEAD_DIM), dtype=np.float32)

    def forward(self, tokens: Sequence[int], kv: Floats, at: int) -> int:
        """Compute `tokens`, the first of them at position `at`: their KV goes into `kv`, beside that of those before.

        Returns the likeliest next token.
        """
        end = at + len(tokens)
        x = self._embedding[np.asarray(tokens)]
        angles = np.arange(at, end, dtype=np.float32)[:, None] * self._frequencies
        turn = (np.cos(angles), np.sin(angles))
        for layer, (queries, keys, values, out) in enumerate(self._layers):
            normed = _normed(x)
            kv[layer, 0, :, at:end] = _turned(_heads(normed @ keys), turn)
            kv[layer, 1, :, at:end] = _heads(normed @ values)
            turned = _turned(_heads(normed @ queries), turn)
            x = x + _attended(turned, kv[layer, 0, :, :end], kv[layer, 1, :, :end]) @ out
        return int((_normed(x[-1:]) @ self._out).argmax())


def _normed(x: Floats) -> Floats:
    normed: Floats = x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + np.float32(1e-6))
    return normed


def _heads(flat: Floats) -> Floats:
    """`[tokens, heads * head_dim]` as `[heads, tokens, head_dim]`."""
    return flat.reshape(len(flat), -1, HEAD_DIM).transpose(1, 0, 2)


def _turned(heads: Floats, turn: tuple[Floats, Floats]) -> Floats:
    """Rotary positions."""
    cos, sin = turn
    even, odd = heads[..., : HEAD_DIM // 2], heads[..., HEAD_DIM // 2 :]
    return np.concatenate([even * cos - odd * sin, odd * cos + even * sin], axis=-1)


def _attended(queries: Floats, keys: Floats, values: Floats) -> Floats:
    """Causal attention; several query heads share one of the keys. Returns `[tokens, heads * head_dim]`."""
    heads, tokens, _ = queries.shape
    grouped = queries.reshape(heads // HEADS_PER_KV_HEAD, HEADS_PER_KV_HEAD * tokens, HEAD_DIM)
    scores = grouped @ keys.transpose(0, 2, 1) * np.float32(HEAD_DIM**-0.5)
    future = np.triu(np.full((tokens, tokens), -np.inf, dtype=np.float32), 1)
    scores[..., -tokens:] += np.tile(future, (HEADS_PER_KV_HEAD, 1))
    scores -= scores.max(axis=-1, keepdims=True)
    np.exp(scores, out=scores)
    scores /= scores.sum(axis=-1, keepdims=True)
    weighed: Floats = (scores @ values).reshape(heads, tokens, HEAD_DIM).astype(np.float32, copy=False)
    return weighed.transpose(1, 0, 2).reshape(tokens, heads * HEAD_DIM)
