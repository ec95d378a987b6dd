"""KV by shards of heads, in place of ranks: an engine of another tensor-parallel size finds it, too.

A rank stores and reads the shards that it holds, each as objects of their own. That needs blocks whose heads lie one
after the other; what is in a head stays opaque.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from lmcache_core import Region
from lmcache_core.errors import SettingsError, UsageError
from lmcache_core_vllm.groups import Group, Kind
from lmcache_core_vllm.namespaces import GroupFacts, RankFacts
from lmcache_core_vllm.tensors import LayerRegions

BACKENDS = ("CPU_ATTN",)  # whose blocks are [KV heads, tokens of a block, 2 * head size]


class Part(NamedTuple):
    """A shard that a rank holds, or all that it has: the facts, and of each group its layers' regions."""

    facts: RankFacts
    memory: list[list[LayerRegions]]


def check_shards(shards: int, heads: int, ranks: int, groups: Iterable[Group], specs: Iterable[Any]) -> None:
    """Whether KV with so many heads can be stored in so many shards by so many tensor-parallel ranks. `specs`: vLLM's
    of each group's layers. Raises `SettingsError`, with the numbers that can."""
    good = [number for number in range(ranks, heads + 1, ranks) if not heads % number]
    if shards not in good:
        cure = f"give {' or '.join(map(str, good))}" if good else "several ranks hold the same head: leave it out"
        raise SettingsError(
            f"kv_shards is {shards}: it has to divide the model's {heads} KV heads, and to be a multiple of "
            f"tensor_parallel_size {ranks}: {cure}"
        )
    if any(group.kind is Kind.STATE for group in groups):
        raise SettingsError("kv_shards: states are not made of KV heads: leave it out for this model")
    for spec in specs:
        if getattr(spec, "num_kv_heads", 0) * ranks != heads or spec.page_size_padded or _is_latent(spec):
            raise SettingsError(
                f"kv_shards: blocks of {type(spec).__name__} are not {heads} KV heads over {ranks} ranks: leave it out "
                "for this model"
            )


def _is_latent(spec: Any) -> bool:
    return "MLA" in type(spec).__name__


def shard_spec(spec: Any, heads: int) -> Any:
    """vLLM's description of a layer's blocks, as it is for the heads of one shard, on whichever rank."""
    return replace(spec, num_kv_heads=heads)


def held(shards: int, ranks: int, rank: int) -> range:
    """The shards that a tensor-parallel rank holds."""
    each = shards // ranks
    return range(rank * each, (rank + 1) * each)


def cut(layers: Sequence[LayerRegions], pieces: int, backends: Iterable[str]) -> list[list[LayerRegions]]:
    """The layers' blocks in pieces of equally many heads, in order. `backends`: by which they are written. Raises
    `UsageError` where heads do not lie one after the other."""
    for backend in backends:
        if backend.partition("/")[0] not in BACKENDS:
            raise UsageError(f"kv_shards: how {backend or 'this layer'} lays out a block is not known: leave it out")
    made: list[list[LayerRegions]] = [[] for _ in range(pieces)]
    for layer in layers:
        region = _whole_block(layer, pieces)
        size = region.page_bytes // pieces
        for number, piece in enumerate(made):
            own = replace(region, offset=region.offset + number * size, page_bytes=size)
            piece.append(LayerRegions(layer.layer, [own]))
    return made


def _whole_block(layer: LayerRegions, pieces: int) -> Region:
    """The region of a layer whose blocks are heads, one after the other."""
    tensor = layer.regions[0].buffer
    blocks = layer.regions[0].pages
    if tensor.dim() != 4 or tensor.shape[0] != blocks or tensor.shape[1] % pieces or not tensor[0].is_contiguous():
        raise UsageError(
            f"kv_shards: the KV cache of layer {layer.layer!r} is {tuple(tensor.shape)} at strides {tensor.stride()}, "
            f"and not {blocks} blocks of KV heads, {pieces} or a multiple of it, one after the other: leave it out"
        )
    (region,) = layer.regions
    return region


def parts_of(facts: RankFacts, memory: Sequence[Sequence[LayerRegions]], shards: int, ranks: int) -> list[Part]:
    """The shards that a rank holds. `facts`: the rank's, with its place among all ranks of all stages, and with group
    facts that are equal on every rank."""
    stage, rank = divmod(facts.shard[0], ranks)
    stages = facts.shard[1] // ranks
    numbers = held(shards, ranks, rank)
    pieces = [cut(layers, len(numbers), _backends(group)) for layers, group in zip(memory, facts.groups, strict=True)]
    made = []
    for at, number in enumerate(numbers):
        groups = tuple(replace(group, block_bytes=group.block_bytes // len(numbers)) for group in facts.groups)
        own = replace(facts, shard=(stage * shards + number, stages * shards), groups=groups)
        made.append(Part(own, [piece[at] for piece in pieces]))
    return made


def _backends(group: GroupFacts) -> list[str]:
    return dict(group.facts).get("backend", "").splitlines() or [""]
