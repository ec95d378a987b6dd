"""Blending for one model: chunks of documents stored once, found in any prompt, and computed anew in part."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from lmcache_core import Status
from lmcache_core.errors import UsageError
from lmcache_transformers.blend.certificate import certified
from lmcache_transformers.blend.conditions import Conditions
from lmcache_transformers.blend.deviation import look
from lmcache_transformers.blend.forward import blend_into, compute, compute_chunk
from lmcache_transformers.blend.support import rope_of
from lmcache_transformers.chunks import layout_of
from lmcache_transformers.geometry import config_of
from lmcache_transformers.room import cache_with_room
from lmcache_transformers.weights import computed_by

if TYPE_CHECKING:
    from transformers import DynamicCache

    from lmcache_blend import Chunks, Match
    from lmcache_blend.described import DescribedChunks
    from lmcache_transformers.geometry import Geometry
    from lmcache_transformers.prefix_cache import PrefixCache

Marks = Sequence[tuple[int, int]]
DIVERGENCE_MAX = 0.05  # nats a token: about what recomputing every seventh token costs a small model
AGREEMENT_MIN = 0.9


@dataclass(frozen=True)
class Blending:
    """How a generator blends.

    `share`: of the tokens of found chunks, how many are recomputed, from 0 to 1; a certificate is for one share.
    `prefix_tokens`: the ids that all prompts begin with (BOS, a system prompt): chunks are computed behind them. The
    same for whoever stores and whoever reads. `minimum`, `mean`, `maximum`: of a chunk's tokens, as for
    `lmcache_blend.cut`. `divergence_max` (nats a token) and `agreement_min`: what the certificate has to say at least.
    Raises `UsageError`.
    """

    share: float = 0.15
    prefix_tokens: tuple[int, ...] = ()
    minimum: int = 64
    mean: int = 256
    maximum: int = 1024
    divergence_max: float = DIVERGENCE_MAX
    agreement_min: float = AGREEMENT_MIN

    def __post_init__(self) -> None:
        if not 0 <= self.share <= 1:
            raise UsageError(f"share is {self.share!r}: give the part of the tokens to recompute, from 0 to 1")
        for name in ("divergence_max", "agreement_min"):
            if not getattr(self, name) >= 0:
                raise UsageError(f"{name} is {getattr(self, name)!r}: give a number from 0 on")

    @property
    def conditions(self) -> Conditions:
        """Which a certificate has to cover."""
        return Conditions(self.share, self.minimum, self.maximum, len(self.prefix_tokens))


class Blended(NamedTuple):
    """What became of one prompt's tokens, without its last one. `reused_exact`: their KV is what the model would
    compute; `reused_blended`: their KV is that of the same text at another place, with its keys rotated; `recomputed`:
    those of chunks that were chosen to be computed; all others were computed because nothing was stored. `why`: empty,
    or why nothing was blended. `deviation`: of the tokens of chunks that were kept, in the second layer, on average."""

    reused_exact: int
    reused_blended: int
    recomputed: int
    why: str
    deviation: float = 0.0


class Blender:
    """Stores chunks of documents, and blends them into prompts. `prefixes`: of the same model. Raises `UsageError` for
    a model that cannot blend, and `SettingsError` for a certificate that does not do."""

    def __init__(self, prefixes: PrefixCache, model: Any, blending: Blending, certificate: Path | None) -> None:
        from lmcache_blend import Chunks, ChunkSpace, Lengths

        self.blending = blending
        self._prefixes, self._model = prefixes, model
        self._geometry: Geometry = prefixes.geometry
        rope = rope_of(model, self._geometry)
        self._covered = certified(prefixes.plain, certificate, blending)
        namespace = prefixes.plain
        space = ChunkSpace(
            namespace.model,
            lambda tokens: layout_of(self._geometry, tokens),
            rope,
            tuple(blending.prefix_tokens),
            Lengths(blending.minimum, blending.mean, blending.maximum),
            weights_version=namespace.weights_version,
            tenant_salt=namespace.tenant_salt,
            format=self._geometry.format(0),
        )
        self._chunks: Chunks = Chunks(prefixes.client, space)
        self._front: tuple[bytes, DynamicCache] | None = None

    def store(self, tokens: Sequence[int], marks: Marks | None = None) -> int:
        """Compute the chunks of a text that are not stored yet, each by itself, and store them. `marks`: where its
        documents begin and end. Returns how many chunks were stored now."""
        found = self._find(tokens, marks, 0)
        stored = 0
        for missing in {each.keys: each for each in found.missing}.values():  # a text may say the same twice
            if not self._covered.holds(missing.span.tokens):
                continue
            part = tokens[missing.span.first : missing.span.end]
            layers = compute_chunk(self._model, self._geometry, self._head(), part)
            stored += self._chunks.store([missing], [layers]).count(Status.STORED)
        return stored

    def describe(self) -> DescribedChunks:
        """The chunks that this finds, for another program that stores some."""
        from lmcache_blend.described import DescribedChunks

        return DescribedChunks.of(self._chunks, config=config_of(self._model), extra=computed_by(self._model))

    def blend(self, tokens: Sequence[int], marks: Marks | None, prefix: DynamicCache) -> Blended:
        """Fill `prefix`, which holds the exact beginning of a prompt, with all of its tokens but the last. Where
        nothing was blended, it is left as it is: compute the rest in full."""
        start, last = prefix.get_seq_length(), len(tokens) - 1
        inner = None if marks is None else [(first, min(end, last)) for first, end in marks if first < last]
        found = self._find(tokens[:last], inner, start)
        matches, staged = self._read([each for each in found.matches if self._covered.holds(each.offset + each.tokens)])
        if not matches:
            return Blended(start, 0, 0, "no chunk behind the prefix is stored")
        moved = torch.cat([torch.full((each.tokens,), not each.exact) for each in matches])
        places = torch.cat([torch.arange(each.new_start, each.new_start + each.tokens) for each in matches])
        again = torch.zeros_like(moved)
        deviation = 0.0
        if bool(moved.any()):
            begins = accumulate((each.tokens for each in matches), initial=0)
            starts = [at for at, each in zip(begins, matches, strict=False) if not each.exact]
            looked = look(self._model, self._geometry, prefix, tokens, places, staged, starts)
            again, deviation = looked.choose(self.blending.share)
            if not deviation <= self._covered.deviation_max:
                return Blended(
                    start,
                    0,
                    0,
                    f"the kept tokens deviate by {deviation:.3f} in the second layer, and the certificate holds up to "
                    f"{self._covered.deviation_max:.3f}",
                    deviation,
                )
        kept = int((~again).sum())
        if kept < self.blending.minimum:
            return Blended(start, 0, 0, f"only {kept} tokens would be kept", deviation)
        layers = [(keys[:, ~again], values[:, ~again]) for keys, values in staged]
        blend_into(self._model, prefix, tokens[:last], places[~again], layers)
        kept_moved = int((moved & ~again).sum())
        kept_exact = int((~moved & ~again).sum())
        return Blended(start + kept_exact, kept_moved, int(again.sum()), "", deviation)

    def _find(self, tokens: Sequence[int], marks: Marks | None, prefix_tokens: int) -> Any:
        return self._chunks.find(
            list(tokens), marks, extra=computed_by(self._model), prefix_hits=prefix_tokens, wait_s=self._prefixes.wait_s
        )

    def _head(self) -> DynamicCache:
        """The KV of the prefix tokens, computed once for the weights as they are."""
        state = computed_by(self._model)
        if self._front is None or self._front[0] != state:
            cache = cache_with_room(self._geometry, len(self.blending.prefix_tokens))
            if self.blending.prefix_tokens:
                compute(self._model, cache, self.blending.prefix_tokens)
            self._front = state, cache
        return self._front[1]

    def _read(self, matches: Sequence[Match]) -> tuple[list[Match], list[tuple[torch.Tensor, torch.Tensor]]]:
        """The matches that were read, and for each layer their keys, at their new positions, and values, in a row
        `[heads, tokens, size]` in host memory."""
        total = sum(each.tokens for each in matches)
        layers = [
            tuple(torch.empty((each.heads, total, size), dtype=each.dtype) for size in (each.key_dim, each.value_dim))
            for each in self._geometry.layers
        ]
        ends = list(accumulate((each.tokens for each in matches), initial=0))
        targets = [
            [(keys[:, at : at + each.tokens], values[:, at : at + each.tokens]) for keys, values in layers]
            for at, each in zip(ends, matches, strict=False)
        ]
        read = self._chunks.read(list(matches), targets) if matches else []
        whole = [each for each, done in zip(matches, read, strict=True) if done]
        if len(whole) == len(matches):
            return whole, [(keys, values) for keys, values in layers]
        rows = [torch.arange(at, at + each.tokens) for at, each, done in zip(ends, matches, read, strict=False) if done]
        kept = torch.cat(rows) if rows else torch.arange(0)
        return whole, [(keys[:, kept], values[:, kept]) for keys, values in layers]
