"""Windows of text, whose KV goes through a chain of serdes, and what the model predicts then; and the report of that
and of blending."""

from __future__ import annotations

import copy
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers

from lmcache_core.errors import UsageError
from lmcache_core.plugins.components import Kind
from lmcache_core.plugins.loader import load_plugins
from lmcache_core.serde.certificate import FORMAT
from lmcache_core.serde.chain import CodecChain
from lmcache_core.serde.scratch import Scratch
from lmcache_core.tiers.object.format import SERDE_KEY_BYTES
from lmcache_transformers import smollm2
from lmcache_transformers.chunks import Chunk, layout_of, pages_of, regions_of
from lmcache_transformers.geometry import Geometry, cache_argument, geometry_of
from lmcache_transformers.quality.mean import Mean
from lmcache_transformers.weights import names_of

if TYPE_CHECKING:
    import argparse

    from lmcache_core.plugins.registry import Registry
    from lmcache_core.serde.contract import Serde
    from lmcache_transformers.quality.blending import BlendQuality

KEY = bytes(range(SERDE_KEY_BYTES))


@dataclass(frozen=True)
class Quality:
    """Of one chain. `lossy`: those of its serdes that do not restore the same bytes; `size`: bytes on the medium, of
    the KV's own; `divergence`: in nats a token, of the predictions from decoded KV against those from the KV as it was;
    `agreement`: how often the most likely token is the same; `perplexity`: of the text that follows, with decoded
    KV."""

    chain: str
    serdes: list[tuple[str, Mapping[str, str | int | float]]]
    lossy: list[tuple[str, Mapping[str, str | int | float]]]
    size: float
    divergence: Mean
    agreement: Mean
    perplexity: Mean


@dataclass(frozen=True)
class Report:
    """All chains, and what they were measured with. As JSON it is a certificate. `rope`: how the model rotates keys,
    where it was to blend. Without serdes there are no windows."""

    format: int
    model: str
    weights: str
    dtype: str
    layout: str
    context_tokens: int
    predicted_tokens: int
    windows: int
    torch: str
    transformers: str
    rope: str
    perplexity_unchanged: Mean | None
    chains: list[Quality | BlendQuality]


@dataclass(frozen=True)
class Window:
    """A text's next tokens, the cache in front of them, and log probabilities `[token, vocabulary]`."""

    cache: Any
    following: torch.Tensor
    expected: torch.Tensor
    log_probabilities: torch.Tensor


def measure(options: argparse.Namespace) -> Report:
    """Measure all chains of the options, and all shares."""
    registry = load_plugins()
    chains = {names: CodecChain([_serde(registry, text) for text in names.split(",")]) for names in options.chains}
    folder = str(smollm2.folder()) if options.model == "smollm2" else options.model
    if not Path(folder).is_dir():
        raise UsageError(f"there is no folder {folder!r}: give one that holds a model, or smollm2")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    dtype = getattr(torch, options.dtype)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
    geometry = geometry_of(model)
    layout = layout_of(geometry, options.chunk_tokens[0])
    for chain in chains.values():
        chain.encoded_bytes_max(layout)  # refuses a layout that it cannot take, before the first window is computed
    name, weights = names_of(model, "", "")
    rope, blends = "", []
    if options.shares:
        from lmcache_transformers.blend.support import rope_of
        from lmcache_transformers.quality.blending import measure_blending

        moves = rope_of(model, geometry)
        of = f"{name} {weights} {options.dtype} {moves.text}"
        rope, blends = moves.text, measure_blending(model, tokenizer, geometry, moves, options, of)
    windows = []
    if chains:
        text = "\n\n".join(Path(file).read_text(errors="replace") for file in options.document)
        tokens = tokenizer(text, return_tensors="pt", verbose=False).input_ids[0]
        windows = list(_windows(model, tokens, options))
    return Report(
        format=FORMAT,
        model=name,
        weights=weights,
        dtype=options.dtype,
        layout=layout.text,
        context_tokens=options.context,
        predicted_tokens=options.predict,
        windows=len(windows),
        torch=torch.__version__,
        transformers=transformers.__version__,
        rope=rope,
        perplexity_unchanged=_unchanged(windows) if windows else None,
        chains=[
            *(_measured(model, geometry, each, of, windows, options.chunk_tokens[0]) for of, each in chains.items()),
            *blends,
        ],
    )


def _unchanged(windows: Sequence[Window]) -> Mean:
    return Mean.of([_perplexity(each.log_probabilities, each.expected) for each in windows])


def _serde(registry: Registry, text: str) -> Serde:
    """NAME, or NAME:SETTING=VALUE."""
    name, *settings = text.split(":")
    serde: Serde = registry.build(Kind.SERDE, name, dict(each.split("=", 1) for each in settings) or None)
    return serde


def _windows(model: Any, tokens: torch.Tensor, options: argparse.Namespace) -> Iterator[Window]:
    """Windows side by side. The last token that is predicted has no successor in its window, hence one more."""
    length = options.context + options.predict + 1
    count = min(options.windows, len(tokens) // length)
    if not count:
        raise UsageError(f"the text has {len(tokens):,} tokens, and one window needs {length:,}: give more text")
    for at in range(count):
        sys.stderr.write(f"\rwindow {at + 1} of {count}" + "\n" * (at + 1 == count))
        window = tokens[at * length : (at + 1) * length]
        cache = transformers.DynamicCache(config=model.config)
        with torch.no_grad():
            model(window[None, : options.context], use_cache=True, **cache_argument(model, cache))
        following = window[None, options.context : -1]
        yield Window(cache, following, window[options.context + 1 :], _predicted(model, cache, following))


def _predicted(model: Any, cache: Any, following: torch.Tensor) -> torch.Tensor:
    """Log probabilities after each of the tokens. The cache is left as it is."""
    with torch.no_grad():
        logits = model(following, use_cache=True, **cache_argument(model, copy.deepcopy(cache))).logits[0]
    return torch.log_softmax(logits.float(), dim=-1)


def _perplexity(log_probabilities: torch.Tensor, expected: torch.Tensor) -> float:
    return float(torch.exp(-log_probabilities.gather(1, expected[:, None]).mean()))


def _measured(
    model: Any, geometry: Geometry, chain: CodecChain, name: str, windows: Sequence[Window], chunk_tokens: int
) -> Quality:
    sizes, divergences, agreements, perplexities = [], [], [], []
    for window in windows:
        cache = copy.deepcopy(window.cache)
        sizes.append(through(chain, cache, geometry, chunk_tokens))
        found = _predicted(model, cache, window.following)
        unchanged = window.log_probabilities
        divergences.append(float((unchanged.exp() * (unchanged - found)).sum(dim=-1).mean()))
        agreements.append(float((unchanged.argmax(dim=-1) == found.argmax(dim=-1)).float().mean()))
        perplexities.append(_perplexity(found, window.expected))
    means = [Mean.of(values) for values in (divergences, agreements, perplexities)]
    return Quality(name, chain.describe(), chain.lossy, statistics.fmean(sizes), *means)


def through(chain: CodecChain, cache: Any, geometry: Geometry, chunk_tokens: int) -> float:
    """Send all whole chunks of a cache through a chain and back, in place. Returns their bytes on the medium, of their
    own; raises `UsageError` if the cache holds no whole chunk."""
    layout = layout_of(geometry, chunk_tokens)
    chunks = cache.get_seq_length() // chunk_tokens
    if not chunks:
        raise UsageError(f"the context is shorter than one chunk of {chunk_tokens} tokens: give more --context")
    pages = [pages_of(region) for region in regions_of(cache, geometry, chunk_tokens, chunks)]
    scratch, encoded_bytes, chunk = Scratch(), 0, Chunk(pages, layout.nbytes)
    for at in range(chunks):
        chunk.gather(at)
        encoded = chain.encode(chunk.row, layout, KEY, scratch)
        medium = b"".join(encoded.buffers)
        encoded_bytes += len(medium)
        if chain.is_identity:
            chunk.row[:] = medium
        else:
            chain.decode(memoryview(medium), chunk.row, layout, KEY, encoded.lengths, scratch)
        chunk.scatter(at)
    return float(encoded_bytes / (chunks * layout.nbytes))
